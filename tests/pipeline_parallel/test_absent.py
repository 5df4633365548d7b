"""What a stage holds, and that what it does not hold never reaches its results unnoticed."""

import copy
import pickle
import weakref
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutput

import autopar
from autopar.errors import AutoparError, UnsupportedModelError
from autopar.pipeline_parallel.outputs import Provenance, complete, incomplete
from autopar.pipeline_parallel.p2p import Message
from autopar.pipeline_parallel.pipeline import pipeline_of
from autopar.pipeline_parallel.stage_weights import Placeholder, make_placeholder
from tests.harness.worlds import pooled
from tests.parity import language_batches
from tests.small import gpt2, llama
from tests.timeouts import told_at_once


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
@told_at_once
def test_a_criterion_that_reads_another_stages_weights_is_refused() -> None:
    piped = autopar.initialize(gpt2(n_layer=2), {"model_parallelism": {"pipeline_parallel_size": 2}})
    (batch,) = language_batches(131, count=1)
    place = piped.transformer.wpe

    def criterion(outputs: Any, inputs: Any) -> torch.Tensor:
        return outputs.loss + (place.weight > 0).float().mean()

    with pytest.raises(AutoparError, match=r"read transformer.wpe.weight, which another stage holds"):
        piped.execute_pipeline(batch, criterion)
    piped.execute_pipeline(batch)


def _made(in_front: bool | None) -> Placeholder:
    placeholder = make_placeholder(torch.ones(3, 2), "h.0.weight", torch.device("cpu"))
    placeholder.in_front = lambda: in_front  # type: ignore[method-assign]
    return placeholder


def test_a_write_in_front_of_the_blocks_is_left_out_and_results_are_tensors() -> None:
    placeholder = _made(True)
    assert placeholder.mul_(2) is placeholder and placeholder.data.div_(2).isnan().all()
    placeholder[0] = 1.0
    placeholder += 1
    placeholder[1].zero_()
    assert type(placeholder) is Placeholder and placeholder.shape == (3, 2) and placeholder.isnan().all()
    assert placeholder.untyped_storage().nbytes() == 4
    assert type(placeholder * 2) is type(torch.nn.functional.linear(torch.ones(1, 2), placeholder)) is torch.Tensor
    assert (torch.ones(3, 2).mul_(placeholder)).isnan().all()
    copied = copy.deepcopy(_made(True))
    assert type(copied) is Placeholder and copied.mul_(2) is copied and copied.untyped_storage().nbytes() == 4
    assert pickle.loads(pickle.dumps(_made(True))).shape == (3, 2)


def test_a_write_behind_a_block_is_refused_and_one_outside_is_left_out() -> None:
    with pytest.raises(autopar.UnsupportedModelError, match=r"writes in place into h\.0\.weight, which another stage"):
        _made(False).mul_(2)
    outside = _made(None)
    assert outside.mul_(2) is outside
    outside.data = torch.ones(3, 2)
    assert outside.isnan().all() and outside.untyped_storage().nbytes() == 4


def test_what_is_drawn_into_it_is_drawn_and_thrown_away() -> None:
    drawn, expected = _made(None), torch.empty(3, 2)
    for weight in (drawn, expected):
        torch.manual_seed(3)
        torch.nn.init.normal_(weight, std=0.1)
        torch.nn.init.kaiming_uniform_(weight)
        torch.nn.init.xavier_normal_(weight)
        weight.data.uniform_()
        weight.after = torch.rand(())  # type: ignore[attr-defined]
    assert drawn.isnan().all() and torch.equal(drawn.after, expected.after)  # type: ignore[attr-defined]


@pooled(world_size=2)
def test_a_stage_holds_only_its_own_parameters() -> None:
    model = llama(num_hidden_layers=4)
    storages = [weakref.ref(parameter.untyped_storage()) for parameter in model.parameters()]
    total = sum(parameter.numel() for parameter in model.parameters())
    piped = autopar.initialize(model, {"model_parallelism": {"pipeline_parallel_size": 2}})
    held = sum(parameter.numel() for parameter in piped.parameters())
    assert 0.4 * total < held < 0.6 * total
    alive = sum(storage.nbytes() // 4 for ref in storages if (storage := ref()) is not None)
    assert alive <= held
    names = [name for name, _ in piped.named_parameters()]
    assert names == [n for n in piped.state_dict() if not n.endswith("inv_freq")]
    assert ("lm_head.weight" in names) == piped.mpu.is_pipeline_last_stage()


@pooled(world_size=2)
def test_buffers_of_messages_go_while_the_step_runs() -> None:
    piped = autopar.initialize(gpt2(), {"pp": 2, "pipeline": {"microbatch_size": 1}})
    p2p = pipeline_of(piped).p2p
    most = []
    plain_send = p2p.send

    def send(*args: Any, **kwargs: Any) -> None:
        plain_send(*args, **kwargs)
        most.append(len({entry[3] for entry in p2p._sent}))

    p2p.send = send
    piped.execute_pipeline(language_batches(131, count=1, batch=12)[0])
    assert max(most) <= 3


@pooled(world_size=2)
def test_values_of_any_size_and_dtype_arrive_in_frames_of_the_last_size() -> None:
    piped = autopar.initialize(gpt2(), {"pp": 2})
    p2p = pipeline_of(piped).p2p
    torch.manual_seed(0)
    sizes = [(3,), (700, 1000), (5, 0), (2, 7), (1200, 1000), (), (700, 999)]  # the fifth is too large for a frame
    dtypes = (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64)
    values = [[(torch.rand(size) * 9).to(dtype) for dtype in dtypes[: 1 + n % 5]] for n, size in enumerate(sizes)]
    values += [[torch.ones(1).expand(3)[:1], torch.rand(3, dtype=torch.complex64).conj()]]
    kind = Message("a value", 6)
    p2p.begin_actions()
    for value in values if piped.mpu.is_pipeline_first_stage() else []:
        p2p.send({"of": value}, 1, kind)
    for value in [] if piped.mpu.is_pipeline_first_stage() else values:
        found = p2p.receive(0, kind)["of"]
        assert [x.dtype for x in found] == [x.dtype for x in value]
        assert all(map(torch.equal, found, value))
    p2p.end_actions()
