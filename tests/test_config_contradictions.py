"""Values of a configuration that do not go together: each mistake has its message."""

from __future__ import annotations

import pytest

from autopar.config import ParallelConfig
from autopar.errors import ConfigError


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"zero": {"stage": 1, "cpu_offload": True}}, "zero.cpu_offload needs zero.stage 2 or 3, not 1"),
        (
            {"model_parallelism": {"cpu_transport": "mpi"}},
            "model_parallelism.cpu_transport must be auto, gloo or shm, not mpi",
        ),
        ({"precision": {"dtype": "half"}}, "precision.dtype must be fp32, bf16 or fp16, not half"),
        ({"precision": {"dtype": 16}}, r"precision.dtype must be a word, not 16 \(int\)"),
        ({"precision": {"min_scale": 0}}, "precision.min_scale must be above 0, not 0"),
        (
            {"precision": {"initial_scale": 0.5}},
            "initial_scale=0.5 must lie between min_scale=1 and max_scale=1.67772e",
        ),
        ({"precision": {"growth_factor": 1}}, "precision.growth_factor must be above 1, not 1"),
        ({"precision": {"backoff_factor": 1.5}}, "precision.backoff_factor must be below 1, not 1.5"),
        ({"precision": {"hysteresis": 0}}, "precision.hysteresis must be at least 1, not 0"),
        ({"precision": {"dtyp": "bf16"}}, "unknown key 'dtyp' in section 'precision'. Did you mean 'dtype'?"),
        ({"gradient_clipping": -1}, "gradient_clipping must be above 0, not -1"),
        ({"gradient_clipping": True}, r"gradient_clipping must be a number, not True \(bool\)"),
        ({"gradient_cliping": 1.0}, "unknown section 'gradient_cliping'. Did you mean 'gradient_clipping'?"),
        ({"loss_scael": 2}, "unknown section 'loss_scael'"),
        ({"initial_scale": 2}, "'initial_scale' belongs into the section 'precision'"),
        (
            {"pp": 2, "zero": {"stage": 3}, "pipeline": {"schedule": "zbv", "num_microbatches": 4}},
            "(?s)zero.stage=3 does not go with pipeline.schedule=zbv: .* Use zero.stage 2, which gathers weights once",
        ),
        (
            {"zero": {"stage": 3, "optimizer_offload": True}},
            "zero.optimizer_offload needs zero.stage 0 or 1, not 3, which has zero.cpu_offload",
        ),
        ({"zero": {"shard_size": 2}}, "zero.shard_size needs zero.stage 2 or 3, not 0"),
        (
            {"tp": 2, "ep": 4, "zero": {"stage": 3, "shard_size": 2}},
            "zero.shard_size=2 does not go with expert_parallel_size=4 above tensor_parallel_size=2",
        ),
        (
            {"optimizer": {"split_fused": True}, "zero": {"stage": 2}},
            "zero.stage=2 does not go with optimizer.split_fused",
        ),
    ],
)
def test_each_mistake_about_training_has_its_message(source, message):
    with pytest.raises(ConfigError, match=message):
        ParallelConfig.parse(source)
    with pytest.raises(ConfigError, match=r"zero.shard_size=3 must divide the 4 replicas: 1, 2, 4 fit here"):
        ParallelConfig.parse({"tp": 2, "zero": {"stage": 3, "shard_size": 3}}, world_size=8)
    with pytest.raises(ConfigError, match="cpu_checkpointing=True needs activation_checkpointing=True"):
        ParallelConfig(cpu_checkpointing=True)
    for field in ({"checkpoint_every": 2}, {"checkpoint_saves": ("attention",)}):
        with pytest.raises(
            ConfigError, match="checkpoint_saves and checkpoint_every need activation_checkpointing=True"
        ):
            ParallelConfig(**field)
