"""States handed on from rank to rank: recurrences and convolutions over own rows, equal to the plain model."""

import contextlib
import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.compat.transformers import CACHES
from autopar.features.context_parallel.plan import plan_rows
from autopar.features.context_parallel.recurrent.state_passing import HandedStates, States, own_arguments
from autopar.layout import rows_layout
from autopar.policy.match import find_policy
from tests.features.context_parallel.test_exactness import KINDS, batches, made, packed, padded_left, sizes
from tests.harness.worlds import pooled
from tests.parity import check, close, language_batches
from tests.random_models import Case, build


def one(name: str, **changes: Any) -> Callable[[], Any]:
    return functools.partial(made, *KINDS[name], **changes)


def handed(model_type: str, head: str) -> dict[str, HandedStates | None]:
    model = build(Case(model_type, head), 6, 3)
    plan = plan_rows(model, find_policy(model), "", 2)
    assert plan.in_runs == any(where.states is not None for where in plan.whole.values())
    found = {type(model.get_submodule(path)).__name__: where.states for path, where in plan.whole.items()}
    assert all(states is None or states.argument in CACHES for states in found.values())
    return {name: states and dataclasses.replace(states, argument="cache") for name, states in found.items()}


def test_which_modules_hand_on_states() -> None:
    assert handed(*KINDS["gated delta"]) == {"Qwen3NextGatedDeltaNet": HandedStates("cache", 1, True)}
    assert handed(*KINDS["short convolution"]) == {"Lfm2ShortConv": HandedStates("cache", 1, True)}
    assert handed(*KINDS["state space"]) == {"BambaMixer": HandedStates("cache", 1, True)}
    assert handed(*KINDS["rows that are read early"]) == {"ZayaCCAProjection": HandedStates("cache", 0, False)}
    assert handed("mamba", "MambaForCausalLM") == {"MambaMixer": None}
    assert handed("bloom", "BloomForCausalLM") == {"BloomAttention": None}


@pytest.mark.tier("test", only=("gated delta", "state space"))
@pytest.mark.parametrize("name", KINDS)
@pooled(world_size=2)
def test_masks_and_lengths(name: str) -> None:
    """Odd lengths, padding on the left, documents, a rank without labels; also recomputed."""
    model = check(one(name), batches(), 1, config=sizes(2), step=False)
    assert in_runs(model)
    config = {**sizes(2, "gather"), "activation_checkpointing": {"enable": True}}
    check(one(name), batches()[1:3], 1, config=config, step=False)


def in_runs(model: nn.Module) -> bool:
    """Whether rows were cut into runs, and states sent."""
    (state,) = {each._autopar_rows for each in model.modules() if hasattr(each, "_autopar_rows")}
    rank, size = state.axis.rank, state.axis.size
    given, taken = (any(each.values()) for each in (state.links.given, state.links.taken))
    runs = len(state.rows_of(33).ranges(rank)) == 1
    return runs and given == (rank < size - 1) and taken == (rank > 0)


_RECURRENT = {"mamba2": "Mamba2", "mamba": "Mamba", "falcon_h1": "FalconH1", "zamba2": "Zamba2"}
_RECURRENT |= {"nemotron_h": "NemotronH", "granitemoehybrid": "GraniteMoeHybrid"}


@pytest.mark.tier("test", only=("mamba2",))
@pytest.mark.parametrize("name", _RECURRENT)
@pooled(world_size=2, timeout=60.0)
def test_a_recomputed_block_hands_on_its_states_before_it_waits_for_their_gradients(name: str) -> None:
    config = {**sizes(2), "activation_checkpointing": {"enable": True}}
    build_one = functools.partial(made, name, f"{_RECURRENT[name]}ForCausalLM")
    check(build_one, language_batches(131, seq=12), 1, config=config)


@pooled(world_size=2)
def test_a_second_derivative_is_refused_and_a_rank_may_forget_the_model() -> None:
    model = autopar.initialize(one("short convolution")(), sizes(2))
    loss = model(**padded_left(16)).loss
    with pytest.raises(autopar.ConfigError, match="create_graph=True"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)

    model = autopar.initialize(one("short convolution")(), sizes(2))
    autopar.local_hooks(model.model.layers[0])  # of one rank only
    if dist.get_rank() == 0:
        model.model.layers[0].register_full_backward_pre_hook(lambda *_: time.sleep(1))
    model(**padded_left(16)).loss.backward()
    del model
    gc.collect()


@contextlib.contextmanager
def failing(module: nn.Module, here: bool = True) -> Iterator[None]:
    """Let the forward of a module raise on this rank."""

    def fail(*_: Any) -> None:
        raise ValueError("planted")

    hook = module.register_forward_pre_hook(fail) if here else None
    with pytest.raises(ValueError, match="planted") if here else contextlib.nullcontext():
        yield
    if hook is not None:
        hook.remove()


@pytest.mark.parametrize("first", [False, True])
@pooled(world_size=2)
def test_a_forward_that_failed_leaves_nothing_behind(first: bool) -> None:
    """A state that was sent then and not received is not that of the next forward."""
    plain, model = one("gated delta")(), autopar.initialize(one("gated delta")(), sizes(2))
    module = model.model.layers[0].linear_attn
    if not first:  # shapes are known
        model(**padded_left(16))
    place = module.out_proj if dist.get_rank() == 0 else module
    autopar.local_hooks(place)
    with failing(place):
        model(**packed(7, 9))
    losses = [each(**padded_left(16)).loss for each in (plain, model)]
    close(losses[1], losses[0], "loss")
    losses[1].backward()


@pooled(world_size=2)
def test_a_forward_may_have_failed_on_one_rank_alone() -> None:
    """Behind the blocks, so that the other one ends it, and knows shapes that this one forgets.

    In training: an evaluation gathers its logits.
    """
    plain, model = one("gated delta")().train(), autopar.initialize(one("gated delta")(), sizes(2)).train()
    ids = torch.arange(24).view(2, 12)
    autopar.local_hooks(model.lm_head)
    for rank in range(2):
        model(input_ids=ids, use_cache=False)
        with failing(model.lm_head, dist.get_rank() == rank):
            model(input_ids=ids, use_cache=False)
        losses = [each(input_ids=ids, labels=ids, use_cache=False).loss for each in (plain, model)]
        close(losses[1], losses[0], "loss")


def test_what_takes_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels cut states between documents; which of them a rank has is not put into other words."""
    module, rows = build(Case(*KINDS["gated delta"]), 6, 3).model.layers[0].linear_attn, rows_layout(8, 2)
    hidden, how = torch.zeros(2, 4, 48), HandedStates("cache_params", 1, True)
    inputs = {"[0][0] of 3 dims": 1}
    (kept,), rest = own_arguments(module, ((hidden,), {"attention_mask": torch.ones(2, 8)}), how, inputs, rows, 1)
    assert kept is hidden and rest["attention_mask"].shape == (2, 4)
    documents = {"seq_idx": torch.zeros(2, 8, dtype=torch.int32)}
    assert own_arguments(module, ((hidden,), documents), how, inputs, rows, 1) is None

    # The rehearsal sees states that are not read, not given, or have no gradient.
    plain = States.update_recurrent_state
    for forget in (
        lambda self, state, *args: plain(self, torch.zeros_like(state), *args),
        lambda self, state, *args: plain(self, state.detach(), *args),
        lambda self, state, *args: state,
    ):
        monkeypatch.setattr(States, "update_recurrent_state", forget)
        assert set(handed(*KINDS["gated delta"]).values()) == {None}
