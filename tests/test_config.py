import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml

from autopar.config import ParallelConfig
from autopar.config.sections import PLAIN, SECTIONS, PipelineConfig, explain, foreign_keys
from autopar.errors import ConfigError

MISTAKES = yaml.safe_load(Path(__file__).with_name("config_mistakes.yaml").read_text())
CONFIG = {"model_parallelism": {"enable": True, "tensor_parallel_size": 2}, "activation_checkpointing": {}}


def test_dict_json_yaml_and_ready_configs_are_the_same(tmp_path):
    (tmp_path / "c.json").write_text(json.dumps(CONFIG))
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(CONFIG))
    expected = ParallelConfig(tensor_parallel_size=2, activation_checkpointing=True)
    for source in (CONFIG, tmp_path / "c.json", str(tmp_path / "c.yaml"), expected):
        assert ParallelConfig.parse(source) == expected
    assert ParallelConfig.parse(None) == ParallelConfig()


def test_a_present_section_is_on_unless_it_says_no():
    assert ParallelConfig.parse({"model_parallelism": {"tensor_parallel_size": 4}}).tensor_parallel_size == 4
    off = ParallelConfig.parse({"model_parallelism": {"enable": False, "tensor_parallel_size": 4}})
    assert off.tensor_parallel_size == 1
    assert not ParallelConfig.parse({}).activation_checkpointing
    assert not ParallelConfig.parse({"activation_checkpointing": {"enable": False}}).activation_checkpointing
    assert not ParallelConfig.parse({"consistency_check": {"enable": False}}).consistency_check


def test_all_problems_at_once():
    with pytest.raises(ConfigError) as info:
        ParallelConfig.parse(
            {
                "model_paralelism": {},
                "tensor_parallel_size": 2,
                "model_parallelism": {"tensor_parallel_sise": 2, "pipeline_parallel_size": True, "enable": 1},
                "activation_checkpointing": True,
            }
        )
    assert str(info.value).startswith("the config has 6 problems:") and len(info.value.problems) == 6
    for problem in (
        "unknown section 'model_paralelism'. Did you mean 'model_parallelism'?",
        "'tensor_parallel_size' belongs into the section 'model_parallelism'",
        "unknown key 'tensor_parallel_sise' in section 'model_parallelism'. Did you mean 'tensor_parallel_size'?",
        "model_parallelism.pipeline_parallel_size must be an integer, not True (bool)",
        "model_parallelism.enable must be true or false, not 1 (int)",
        "section 'activation_checkpointing' must hold keys (enable, ",
    ):
        assert problem in str(info.value)


def test_files_that_are_no_config(tmp_path):
    for name, text, message in (
        ("c.yaml", "a:\n- b: [", "c.yaml', line 2: cannot be parsed as YAML: "),
        ("evil.yaml", "!!python/object/apply:os.system ['true']", "evil.yaml', line 1: has a tag, which is"),
        ("c.json", '{"a": 1,\n"b" 2}', "c.json', line 2: cannot be parsed as JSON: Expecting ':' delimiter"),
        ("twice.json", '{"zero": {"stage": 1, "stage": 3}}', "twice.json' has the key 'stage' twice in one section"),
        ("deep.json", "[" * 100_000, "deep.json' is nested too deeply"),
        ("long.json", "9" * 5000, "long.json', line 1: cannot be parsed as JSON: Exceeds the limit"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=re.escape(message)):
            ParallelConfig.parse(tmp_path / name)
    (tmp_path / "latin.json").write_bytes(b'{\n"\xe9": 1}')
    with pytest.raises(ConfigError, match=r"latin\.json', line 2: cannot be read: byte 0xe9 is not UTF-8"):
        ParallelConfig.parse(tmp_path / "latin.json")
    place = re.escape(str(tmp_path))
    with pytest.raises(ConfigError, match=rf"No such file .*{place} has no 'deep1.json'. Did you mean 'deep.json"):
        ParallelConfig.parse(tmp_path / "deep1.json")
    with pytest.raises(ConfigError, match=rf"{place} has no 'conf'"):
        ParallelConfig.parse(tmp_path / "conf" / "parallel.yaml")


def test_what_people_write_in_config_files(tmp_path):
    text = (
        "precision: {dtype: fp16, initial_scale: 1e3}\nactivation_checkpointing: {enable: yes}\nzero: {enable: off}\n"
    )
    for content in (text.encode(), text.encode("utf-8-sig"), text.replace("\n", "\r\n").encode()):
        (tmp_path / "c.yaml").write_bytes(content)
        config = ParallelConfig.parse(tmp_path / "c.yaml")
        assert (config.initial_scale, config.activation_checkpointing, config.zero_stage) == (1000.0, True, 0)
    (tmp_path / "c.json").write_bytes(b'\xef\xbb\xbf{"zero": {"stage": 1}}')
    assert ParallelConfig.parse(tmp_path / "c.json").zero_stage == 1
    for line, message in MISTAKES["lines"]:
        (tmp_path / "c.yaml").write_text(line)
        with pytest.raises(ConfigError, match=message):
            ParallelConfig.parse(tmp_path / "c.yaml")


def test_the_data_parallel_size_is_what_remains_of_the_world():
    config = ParallelConfig(tensor_parallel_size=2)
    assert config.data_parallel_size(8) == 4
    with pytest.raises(ConfigError) as info:
        ParallelConfig(3, 2).data_parallel_size(8)
    assert str(info.value) == (
        "tensor_parallel_size=3 x pipeline_parallel_size=2 = 6 does not divide the world of 8 processes.\n"
        "  8 / 6 must be an integer: it is the data-parallel size.\n"
        "  With 8 processes tensor_parallel_size can be 1, 2, 4; or start a multiple of 6 processes "
        "(torchrun --nproc-per-node 6)."
    )


def test_context_ranks_count_among_the_sizes_which_have_short_names():
    section = {"tensor_parallel_size": 2, "context_parallel_size": 2, "context_parallel_method": "gather"}
    config = ParallelConfig.parse({"model_parallelism": section}, world_size=12)
    assert config == ParallelConfig(tensor_parallel_size=2, context_parallel_size=2, context_parallel_method="gather")
    assert ParallelConfig.parse({"model_parallelism": {"sequence_parallel": True}}) == ParallelConfig(
        sequence_parallel=True
    )
    assert config.data_parallel_size(12) == 3
    short = ParallelConfig.parse({"tp": 2, "pp": 3, "cp": 2, "ep": 2})
    sizes = {f"{axis}_parallel_size": 2 for axis in ("tensor", "context", "expert")} | {"pipeline_parallel_size": 3}
    assert short == ParallelConfig.parse({"model_parallelism": sizes})
    assert not ParallelConfig.parse({"model_parallelism": {"enable": False, **section}}).context_parallel_size > 1
    with pytest.raises(ConfigError) as info:
        ParallelConfig.parse({"model_parallelism": {**section, "pipeline_parallel_size": 2}}, world_size=6)
    assert str(info.value) == (
        "tensor_parallel_size=2 x context_parallel_size=2 x pipeline_parallel_size=2 = 8 does not divide the world of "
        "6 processes.\n"
        "  6 / 8 must be an integer: it is the data-parallel size.\n"
        "  With 6 processes no tensor_parallel_size fits context_parallel_size=2 x pipeline_parallel_size=2; or start "
        "a multiple of 8 processes (torchrun --nproc-per-node 8)."
    )


def test_a_size_that_does_not_divide_the_world_stands_in_the_same_list():
    with pytest.raises(ConfigError) as info:
        ParallelConfig.parse({"model_parallelism": {"tensor_parallel_size": 3}, "zerro": {}}, world_size=4)
    assert str(info.value).startswith("the config has 2 problems:")
    assert "= 3 does not divide the world of 4 processes" in str(info.value)
    for ready in (ParallelConfig(3), {"model_parallelism": {"tensor_parallel_size": 3}}):
        with pytest.raises(ConfigError, match=r"= 3 does not divide the world of 4 processes"):
            ParallelConfig.parse(ready, world_size=4)


@pytest.mark.parametrize(("fields", "message"), MISTAKES["ready"])
def test_each_mistake_in_a_ready_config_has_its_message(fields, message):
    with pytest.raises(ConfigError) as info:
        if "pipeline" in fields:
            fields = {"pipeline_parallel_size": 2, "pipeline": PipelineConfig(**fields["pipeline"])}
        ParallelConfig(**fields)
    assert message in str(info.value)


def test_whole_experts_go_to_tensor_parallel_ranks_of_some_replicas():
    for expert in (1, 4, 8):
        config = {"model_parallelism": {"tensor_parallel_size": 4, "expert_parallel_size": expert}}
        assert ParallelConfig.parse(config).expert_parallel_size == expert
    off = {"model_parallelism": {"enable": False, "tensor_parallel_size": 4, "expert_parallel_size": 4}}
    assert ParallelConfig.parse(off).expert_parallel_size == 1
    message = (
        "expert_parallel_size=2 must be 1 or a multiple of tensor_parallel_size=4: "
        "experts are sharded over the tensor-parallel ranks and some of their replicas"
    )
    for wrong in (
        {"model_parallelism": {"tensor_parallel_size": 4, "expert_parallel_size": 2}},
        ParallelConfig(tensor_parallel_size=4, expert_parallel_size=2),
    ):
        with pytest.raises(ConfigError) as info:
            ParallelConfig.parse(wrong)
        assert str(info.value) == message
    with pytest.raises(ConfigError) as info:
        ParallelConfig.parse({"model_parallelism": {"tensor_parallel_size": 3, "expert_parallel_size": 2}}, 4)
    assert [problem.split(" ")[0] for problem in info.value.problems] == [
        "tensor_parallel_size=3",
        "expert_parallel_size=2",
    ]
    with pytest.raises(ConfigError) as info:
        ParallelConfig.parse({"tp": 2, "ep": 8}, 12)
    assert str(info.value) == (
        "expert_parallel_size=8 must be 1 or a multiple of tensor_parallel_size=2 that divides 2 x 6 replicas = 12: "
        "1, 2, 4, 6, 12 fit here"
    )


def test_zero_precision_and_clipping():
    config = ParallelConfig.parse(
        {
            "zero": {"stage": 3, "cpu_offload": True},
            "precision": {"dtype": "fp16", "initial_scale": 256, "growth_interval": 5, "hysteresis": 1},
            "gradient_clipping": 1,
            "activation_checkpointing": {"cpu_checkpointing": True},
        }
    )
    assert (config.zero_stage, config.zero_cpu_offload, config.gradient_clipping) == (3, True, 1)
    assert (config.precision, config.initial_scale, config.growth_interval, config.hysteresis) == ("fp16", 256, 5, 1)
    assert config.activation_checkpointing and config.cpu_checkpointing
    assert ParallelConfig.parse(config) == config
    plain = ParallelConfig.parse(
        {"zero": {"enable": False, "stage": 1}, "precision": {"enable": False, "dtype": "bf16"}}
    )
    assert plain == ParallelConfig() and plain.precision == "fp32" and plain.zero_stage == 0


def test_null_is_the_default_of_every_key_and_section(tmp_path):
    sections = {name: dict.fromkeys(keys) for name, keys in SECTIONS.items()}
    assert ParallelConfig.parse(dict.fromkeys([*SECTIONS, *PLAIN])) == ParallelConfig()
    # A section that is present is on, whatever its keys say by default.
    assert ParallelConfig.parse(sections) == ParallelConfig(activation_checkpointing=True, compile=True)
    (tmp_path / "c.yaml").write_text(
        "gradient_clipping:\nprecision:\n  dtype: bf16\n  initial_scale:\n  enable: null\n"
    )
    assert ParallelConfig.parse(tmp_path / "c.yaml") == ParallelConfig(precision="bf16")
    nothing = dict.fromkeys(field.name for field in dataclasses.fields(ParallelConfig))
    assert ParallelConfig(**nothing) == ParallelConfig()
    assert ParallelConfig(pipeline=PipelineConfig(timeout=None, schedule=None)) == ParallelConfig()
    folded = PipelineConfig(schedule="zbv", layers_per_stage=(1,) * 4)
    config = ParallelConfig(pipeline_parallel_size=2, pipeline=folded)
    assert (config.pipeline.chunks, config.pipeline.microbatch_size) == (2, 1)
    with pytest.raises(ConfigError, match="unknown section 'nothing'"):
        ParallelConfig.parse({"nothing": None})


@pytest.mark.parametrize(("source", "message"), MISTAKES["exact"])
def test_keys_of_other_libraries_say_what_to_write(source, message):
    with pytest.raises(ConfigError) as info:
        ParallelConfig.parse(source)
    assert str(info.value) == message


def test_every_foreign_key_has_one_sentence_that_leads_somewhere():
    own = {*SECTIONS, *PLAIN}
    said = {sentence for advice in foreign_keys().values() for sentence in advice.values()}
    assert {key for sentence in said for key in re.findall(r"(\w+): \{?VALUE", sentence)} <= own.union(
        *SECTIONS.values()
    )
    names = {name for library, advice in foreign_keys().items() if library != "anyone" for name in advice}
    assert names & own == {"optimizer"}
    for name in names:
        sentence = explain(name, 2)
        assert sentence.startswith(f"'{name}' is ") and len(sentence) < 250 and "\n" not in sentence
        with pytest.raises(ConfigError) as info:
            ParallelConfig.parse({name: 2})
        assert str(info.value) == sentence
    assert explain("no_such_key") is None


def test_a_whole_foreign_config_is_refused_in_ten_lines():
    plugin = "tp_size pp_size precision zero_stage enable_all_optimization sp_size max_norm overlap_p2p use_fp8 " * 2
    foreign = {**dict.fromkeys(plugin.split(), 1), "x" * 100_000: "y", "zero": "z" * 100_000}
    with pytest.raises(ConfigError) as info:
        ParallelConfig.parse(foreign)
    assert len(info.value.problems) == 11
    lines = str(info.value).splitlines()
    assert len(lines) == 10 and lines[-1] == "  ... and 3 more: the error's .problems lists all"
    assert all(len(line) < 400 for line in (*lines, *info.value.problems))


@pytest.mark.parametrize(("source", "message"), MISTAKES["found"])
def test_each_mistake_about_training_has_its_message(source, message):
    with pytest.raises(ConfigError, match=message):
        ParallelConfig.parse(source)
    with pytest.raises(ConfigError, match=r"zero.shard_size=3 must divide the 4 replicas: 1, 2, 4 fit here"):
        ParallelConfig.parse({"tp": 2, "zero": {"stage": 3, "shard_size": 3}}, world_size=8)
    with pytest.raises(ConfigError, match="checkpoint_saves and checkpoint_every need activation_checkpointing=True"):
        ParallelConfig(checkpoint_saves=("attention",))
