"""Features: what they register, in which order steps run, and the error on one that is missing."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from autopar import registry
from autopar.config import ParallelConfig
from autopar.errors import ConfigError
from autopar.registry import Feature, Step
from autopar.setup.steps import STEPS
from autopar.stored import quantizers

ALL = ParallelConfig.parse({"tp": 2, "cp": 2, "model_parallelism": {"sequence_parallel": True}}, 4)


def test_each_entry_can_be_imported_and_each_public_name_is_in_its_table() -> None:
    for feature in registry.features():
        for table in registry.TABLES:
            for value in getattr(feature, table).values():
                assert registry.load(getattr(value, "function", value)) is not None, value
    assert {name: feature.name for feature in registry.features() for name in feature.names} == registry.OF_FEATURES


def test_each_setting_is_one_of_the_configuration() -> None:
    for key, (feature, without) in registry.SETTINGS.items():
        assert getattr(ParallelConfig(), key) in without
        assert feature in [each.name for each in registry.features()]


def test_steps_of_features_follow_those_that_they_name() -> None:
    names = [step.__name__ for step in registry.in_order(STEPS, ALL)]
    for order in (
        ["release_other_stages", "run_on_rows_between_regions", "fill_weights"],
        ["hook_forwards", "run_on_rows_of_sequences", "add_savers"],
    ):
        assert sorted(order, key=names.index) == order


def test_features_that_a_configuration_does_not_ask_for_add_no_steps() -> None:
    names = [step.__name__ for step in registry.in_order(STEPS, ParallelConfig())]
    assert "run_on_rows_of_sequences" not in names and "share_experts" not in names
    assert "balance_routers" in names  # one that is made always


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Feature]]:
    found = list(registry.features())
    monkeypatch.setattr(registry, "features", lambda: tuple(found))
    yield found


def test_a_feature_of_a_library_adds_nothing_before_it_is_imported(
    installed: list[Feature], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed[:] = [Feature("toy", "a test", library="toy_library", additions={"toy": "math:sqrt"})]
    assert not list(registry.entries("additions")) and not registry.asked(ParallelConfig())
    monkeypatch.setitem(sys.modules, "toy_library", sys)
    assert [name for name, _ in registry.entries("additions")] == ["toy"]
    assert registry.asked(ParallelConfig()) == installed


def test_a_setting_of_a_missing_feature_is_an_error(installed: list[Feature]) -> None:
    installed[:] = [feature for feature in installed if feature.name == "host_transport"]
    registry.check_settings(ParallelConfig())
    with pytest.raises(ConfigError) as raised:
        registry.check_settings(ALL)
    assert str(raised.value) == (
        "context_parallel_size: 2 needs the feature 'context_parallel', which is not installed.\n"
        "  Installed: host_transport. Restore the folder autopar/features/context_parallel."
    )


def test_a_quantized_model_needs_its_feature(installed: list[Feature]) -> None:
    settings = SimpleNamespace(quant_method=SimpleNamespace(value="bitsandbytes"))
    quantizer = SimpleNamespace(pre_quantized=True, quantization_config=settings)
    assert quantizers("Llama", quantizer) is registry.entry("quantizers", "transformers")
    installed[:] = []
    with pytest.raises(ConfigError, match="Llama with quantized weights needs the feature 'quantized'"):
        quantizers("Llama", quantizer)
    settings.dequantize = True  # its weights are plain
    assert quantizers("Llama", quantizer) is None


def test_a_step_after_an_unknown_one_is_an_error(installed: list[Feature]) -> None:
    installed.append(Feature("toy", "a test", steps={"play": Step("math:sqrt", after="nothing")}))
    with pytest.raises(ConfigError, match="feature toy: step play follows 'nothing', which does not exist"):
        registry.in_order(STEPS, ALL)


def test_another_distribution_adds_a_feature_by_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise ImportError("no module named toys")

    toy, twice = Feature("toy", "a test"), Feature("peft", "a test")
    point: Any = SimpleNamespace(name="toy", value="toy:FEATURE", load=fail)
    monkeypatch.setattr(registry, "_entry_points", lambda: [point])
    registry.features.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"feature toy \(toy:FEATURE\) cannot be imported: no module named toys"):
            registry.features()
        point.load = lambda: twice
        with pytest.raises(ConfigError, match=r"feature peft \(toy:FEATURE\) is installed already"):
            registry.features()
        point.load = lambda: toy
        assert toy in registry.features()
    finally:
        registry.features.cache_clear()


def test_public_names_and_variables_of_a_missing_feature(
    installed: list[Feature], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed[:] = []
    with pytest.raises(AttributeError, match=r"autopar\.verify needs the feature 'tools', which is not installed"):
        registry.public_name("verify")
    registry.begin_asked()
    monkeypatch.setenv(registry.TRACE, "traces")
    with pytest.raises(ConfigError, match="AUTOPAR_TRACE=traces needs the feature 'tools', which is not installed"):
        registry.begin_asked()


def test_the_command_lists_features(capsys: pytest.CaptureFixture[str]) -> None:
    from autopar.cli import app

    app(["features"], standalone_mode=False)
    text = capsys.readouterr().out
    assert all(f"{feature.name}: {feature.about}" in text for feature in registry.features())
    assert "steps.run_on_rows_of_sequences = " in text and ", after hook_forwards" in text
