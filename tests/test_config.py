from __future__ import annotations

import json

import pytest
import yaml

from autopar.config import ParallelConfig
from autopar.errors import ConfigError

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
    text = str(info.value)
    assert text.startswith("the config has 6 problems:")
    assert "unknown section 'model_paralelism'. Did you mean 'model_parallelism'?" in text
    assert "'tensor_parallel_size' belongs into the section 'model_parallelism'" in text
    assert (
        "unknown key 'tensor_parallel_sise' in section 'model_parallelism'. Did you mean 'tensor_parallel_size'?"
        in text
    )
    assert "model_parallelism.pipeline_parallel_size must be an integer, not True (bool)" in text
    assert "model_parallelism.enable must be true or false, not 1 (int)" in text
    assert "section 'activation_checkpointing' must hold keys, not True (bool)" in text
    assert len(info.value.problems) == 6


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"model_parallelism": {"tensor_parallel_size": 0}}, "tensor_parallel_size must be at least 1, not 0"),
        ({"model_parallelism": {"tensor_parallel_size": "2"}}, r"must be an integer, not '2' \(str\)"),
        ([1], r"must be a dict, a path or a ParallelConfig, not \[1\] \(list\)"),
        ("nowhere.yaml", "config file 'nowhere.yaml' cannot be read"),
        ("config.toml", "must end in .json, .yaml or .yml"),
    ],
)
def test_each_mistake_has_its_message(source, message):
    with pytest.raises(ConfigError, match=message):
        ParallelConfig.parse(source)
    with pytest.raises(ConfigError, match="tensor_parallel_size must be an integer, not True"):
        ParallelConfig(tensor_parallel_size=True)


def test_files_that_are_no_config(tmp_path):
    (tmp_path / "c.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match=r"c.yaml' cannot be parsed"):
        ParallelConfig.parse(tmp_path / "c.yaml")
    (tmp_path / "evil.yaml").write_text("!!python/object/apply:os.system ['true']")
    with pytest.raises(ConfigError, match="cannot be parsed"):
        ParallelConfig.parse(tmp_path / "evil.yaml")


def test_the_data_parallel_size_is_what_remains_of_the_world():
    config = ParallelConfig(tensor_parallel_size=2)
    assert config.data_parallel_size(8) == 4
    with pytest.raises(ConfigError) as info:
        ParallelConfig(3, 2).data_parallel_size(8)
    assert str(info.value) == (
        "tensor_parallel_size=3 x pipeline_parallel_size=2 = 6 does not divide the world of 8 processes.\n"
        "  8 / 6 must be whole: it is the data-parallel size.\n"
        "  With 8 processes tensor_parallel_size can be 1, 2, 4; or start a multiple of 6 processes "
        "(torchrun --nproc-per-node 6)."
    )


def test_a_size_that_does_not_divide_the_world_stands_in_the_same_list():
    with pytest.raises(ConfigError) as info:
        ParallelConfig.parse({"model_parallelism": {"tensor_parallel_size": 3}, "zerro": {}}, world_size=4)
    assert str(info.value).startswith("the config has 2 problems:")
    assert "= 3 does not divide the world of 4 processes" in str(info.value)
    for ready in (ParallelConfig(3), {"model_parallelism": {"tensor_parallel_size": 3}}):
        with pytest.raises(ConfigError, match=r"= 3 does not divide the world of 4 processes"):
            ParallelConfig.parse(ready, world_size=4)


def test_whole_experts_go_to_all_tensor_parallel_ranks_or_none():
    for expert in (1, 4):
        config = {"model_parallelism": {"tensor_parallel_size": 4, "expert_parallel_size": expert}}
        assert ParallelConfig.parse(config).expert_parallel_size == expert
    off = {"model_parallelism": {"enable": False, "tensor_parallel_size": 4, "expert_parallel_size": 4}}
    assert ParallelConfig.parse(off).expert_parallel_size == 1
    message = (
        "expert_parallel_size=2 must be 1 or tensor_parallel_size=4: "
        "whole experts are shared out over the tensor-parallel ranks"
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
        "expert_parallel_size=2",
        "tensor_parallel_size=3",
    ]
    with pytest.raises(ConfigError, match="expert_parallel_size must be at least 1, not 0"):
        ParallelConfig.parse({"model_parallelism": {"expert_parallel_size": 0}})
