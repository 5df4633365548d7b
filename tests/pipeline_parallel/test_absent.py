"""What a stage does not hold never reaches its results unnoticed, not even through comparisons and whole numbers."""

from typing import Any

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutput

import autopar
from autopar.errors import AutoparError, UnsupportedModelError
from autopar.pipeline_parallel.outputs import Provenance, complete, incomplete
from tests.harness.worlds import pooled
from tests.parity import language_batches
from tests.small import gpt2


def _cat(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cat([y, x[0]])


def _write(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    y[:1] = x[0, :1]
    return y


def _write_through_a_view(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    y.view(-1, 1)[0].add_(x[0, 0])
    return y


@pytest.mark.parametrize(
    "made",
    [
        lambda x, y: x > 0,
        lambda x, y: x.argmax(),
        lambda x, y: x.nan_to_num() * 0,
        lambda x, y: torch.where(x > 0, 1.0, 2.0),
        lambda x, y: y.masked_fill(x[0] > 0, 0.0),
        lambda x, y: {"a": [y, x.T[1:].long()]},
        _cat,
        _write,
        _write_through_a_view,
    ],
)
def test_what_is_made_from_absent_values_is_followed(made: Any) -> None:
    x, y = torch.full((), torch.nan).expand(2, 3), torch.ones(3)
    watch = Provenance()
    watch.mark(x, ["x"])
    with watch:
        result = made(x, y)
    assert watch.origins(result) == {"x"}


@pytest.mark.parametrize("made", [torch.zeros_like, lambda x: x.new_ones(2), lambda x: torch.ones(x.shape)])
def test_shapes_and_dtypes_may_be_read(made: Any) -> None:
    x = torch.full((), torch.nan).expand(2, 3)
    watch = Provenance()
    watch.mark(x, ["x"])
    with watch:
        result = made(x) + 1
        if torch.ones(1).sum() > 0:
            result = result * 2
    assert not watch.origins(result)
    assert not watch.read_by_control_flow
    with watch:
        bool(x.isnan().any())
    assert watch.read_by_control_flow == {"x"}


def test_reading_a_unavailable_entry_raises() -> None:
    whole = CausalLMOutput(loss=torch.ones(()), logits=torch.ones(2), hidden_states=(torch.ones(3),))
    given = incomplete(whole, ("hidden_states",))
    assert given.logits is given["logits"] is given[1]
    assert isinstance(given, CausalLMOutput)
    for read in (lambda: given.hidden_states, lambda: given["hidden_states"], lambda: given[2], given.to_tuple):
        with pytest.raises(UnsupportedModelError, match="the first stage computes hidden_states"):
            read()
    with pytest.raises(UnsupportedModelError, match="all of them in a row"):
        given.items()
    assert complete(given).hidden_states is None
    assert type(complete(given)) is CausalLMOutput


@pooled(world_size=2)
def test_a_criterion_that_reads_another_stages_weights_is_refused() -> None:
    """Without a trace of a value that is not a number: a comparison with it is just false."""
    piped = autopar.initialize(gpt2(n_layer=2), {"model_parallelism": {"pipeline_parallel_size": 2}})
    (batch,) = language_batches(131, count=1)
    place = piped.transformer.wpe

    def criterion(outputs: Any, inputs: Any) -> torch.Tensor:
        return outputs.loss + (place.weight > 0).float().mean()

    with pytest.raises(AutoparError, match=r"read transformer.wpe.weight, which another stage holds"):
        piped.execute_pipeline(batch, criterion)
    piped.execute_pipeline(batch)
    piped.mpu.destroy()
