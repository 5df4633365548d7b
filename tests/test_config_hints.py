"""What people write without having read the configuration: short names, keyword arguments, files that are not there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import autopar
from autopar.config import ParallelConfig
from autopar.errors import ConfigError


def test_short_names_of_the_sizes() -> None:
    short = ParallelConfig.parse({"tp": 2, "pp": 3, "cp": 2, "ep": 2, "gradient_clipping": 1.0})
    sizes = {f"{axis}_parallel_size": 2 for axis in ("tensor", "context", "expert")} | {"pipeline_parallel_size": 3}
    assert short == ParallelConfig.parse({"model_parallelism": sizes, "gradient_clipping": 1.0})
    for config, text in (
        ({"tp": 0}, "tp must be at least 1, not 0"),
        (
            {"tp": 2, "model_parallelism": {"tensor_parallel_size": 4}},
            "tp=2 is short for model_parallelism.tensor_parallel_size, which is given",
        ),
        ({"dp": 2}, "there is no key 'dp': the data-parallel size is what remains of the processes"),
        ({"sp": True}, "there is no key 'sp': write model_parallelism: {sequence_parallel: true}"),
    ):
        with pytest.raises(ConfigError, match=re.escape(text)):
            ParallelConfig.parse(config, 24)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"tensor_parallel_size": 2}, "initialize(model, {'model_parallelism': {'tensor_parallel_size': 2}})"),
        ({"tp": 2}, "It belongs into the configuration: initialize(model, {'tp': 2})"),
        ({"tp_mapping": {}}, "'tp_mapping' is OSLO's name: write policy: FILE"),
        ({"optimiser": None}, "initialize takes no argument 'optimiser'. Did you mean 'optimizer'?"),
    ],
)
def test_arguments_that_initialize_does_not_have(given: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        autopar.initialize(torch.nn.Linear(2, 2), {}, **given)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "parallel.yaml").write_text("tp: 2")
    place = re.escape(str(tmp_path))
    with pytest.raises(ConfigError, match=rf"No such file .*{place} has no 'paralel.yaml'. Did you mean 'parallel"):
        ParallelConfig.parse(tmp_path / "paralel.yaml")
    with pytest.raises(ConfigError, match=rf"{place} has no 'conf'"):
        ParallelConfig.parse(tmp_path / "conf" / "parallel.yaml")
