"""Sequence parallelism: what the rehearsal makes whole, and what it refuses."""

import pytest
import torch
from torch import nn

import autopar
from autopar.config import ParallelConfig
from autopar.errors import ConfigError
from tests.exchange import raises_everywhere
from tests.harness.worlds import pooled
from tests.parity import check, close, language_batches
from tests.random_models import build, cases
from tests.small import gpt2, llama

SIZES = {"model_parallelism": {"tensor_parallel_size": 2, "sequence_parallel": True}}


class Shifted(nn.Module):
    """A norm that mixes each row with the one before."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.weight = plain.weight
        self.mixed = nn.Parameter(torch.full((), 0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
        return (x + self.mixed * before) * self.weight


def _shifted() -> nn.Module:
    model = llama()
    for layer in model.model.layers:
        layer.post_attention_layernorm = Shifted(layer.post_attention_layernorm)
    return model


@pooled(world_size=2)
def test_a_module_that_mixes_rows_computes_with_whole_sequences() -> None:
    model = check(_shifted, language_batches(131), 2, config=SIZES)
    plan = model._autopar.features["sequence_parallel"]
    assert set(plan.wholes) == {f"model.layers.{n}.post_attention_layernorm" for n in range(2)}
    model.mpu.destroy()


@pooled(world_size=2)
def test_blocks_that_mix_rows_are_refused_and_nothing_is_changed() -> None:
    model = build(next(case for case in cases("swin") if case.head.endswith("ForImageClassification")), 6, 3)
    kinds = [type(module) for module in model.modules()]
    with raises_everywhere(ConfigError, "sequence_parallel does not fit SwinForImageClassification: ", "blocks.0"):
        autopar.initialize(model, SIZES)
    assert [type(module) for module in model.modules()] == kinds
    assert not hasattr(model, "mpu")


def test_compiled_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="sequence_parallel is not supported with compile"):
        ParallelConfig.parse({**SIZES, "compile": {"enable": True}})


@pooled(world_size=2)
def test_without_its_first_block_a_forward_is_right_and_without_its_last_one_it_raises() -> None:
    ids = torch.arange(7)[None]
    plain, model = gpt2(n_layer=3), autopar.initialize(gpt2(n_layer=3), SIZES)
    for each in (plain, model):
        _leave_out(each.transformer.h[0])
    close(model(ids).logits, plain(ids).logits, "logits")
    model.mpu.destroy()
    model = autopar.initialize(llama(), SIZES)
    _leave_out(model.model.layers[1])
    with raises_everywhere(ConfigError, "the last block of LlamaModel did not run in this forward"):
        model(ids)
    model.mpu.destroy()


def _leave_out(block: nn.Module) -> None:
    kind = type(block)
    block.__class__ = type(kind.__name__, (kind,), {"__call__": lambda self, x, *args, **kwargs: x})
