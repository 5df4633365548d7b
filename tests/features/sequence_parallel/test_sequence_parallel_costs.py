"""What sequence parallelism saves and sends: counted, and equal to the formulas in docs/long-sequences.md."""

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar.distributed import collectives
from tests.harness.worlds import pooled
from tests.parity import randomise

HIDDEN, HEADS, SEQ, BATCH = 64, 8, 16, 2


def _model() -> GPT2LMHeadModel:
    """Blocks as Korthikanti et al. count them: eager attention, dropout everywhere, 2 bytes for an element."""
    torch.manual_seed(0)
    rates = {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}
    made = {"n_layer": 3, "n_embd": HIDDEN, "n_head": HEADS, "vocab_size": 131, "n_positions": 64}
    config = GPT2Config(**made, **rates, activation_function="gelu", bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel._from_config(config, attn_implementation="eager")
    return randomise(model).to(torch.bfloat16).train()


def _saved_bytes(model: Any) -> int:
    """Bytes that the backward of the second block keeps, without parameters."""
    storages: dict[int, torch.Tensor] = {}
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    running = False

    def note(value: bool) -> None:
        nonlocal running
        running = value

    def pack(x: torch.Tensor) -> torch.Tensor:
        if running and x.untyped_storage()._cdata not in parameters:
            storages[x.untyped_storage()._cdata] = x
        return x

    block = model.transformer.h[1]
    autopar.local_hooks(block)  # with others the block would compute with full sequences
    block.register_forward_pre_hook(lambda *_: note(True))
    block.register_forward_hook(lambda *_: note(False))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(torch.arange(SEQ).repeat(BATCH, 1))
    return sum(x.untyped_storage().nbytes() for x in storages.values())


@pooled(world_size=4)
def test_saved_activations_are_those_of_korthikanti_et_al() -> None:
    sbh, scores = SEQ * BATCH * HIDDEN, HEADS * SEQ * SEQ * BATCH
    for tp in (2, 4):
        # On a CPU dropout keeps a mask of 2 bytes, not 1, and norms keep two numbers for each token.
        for rows, masks, stats in ((True, 2 * sbh / tp, 8 * SEQ * BATCH / tp), (False, 2 * sbh, 8 * SEQ * BATCH)):
            sizes = {"tensor_parallel_size": tp, "sequence_parallel": rows}
            model = autopar.initialize(_model(), {"model_parallelism": sizes})
            term = 34 / tp if rows else 10 + 24 / tp  # equations 4 and 2 of the paper
            expected = sbh * term + 5 * scores / tp
            assert _saved_bytes(model) == expected + masks + scores / tp + stats, f"tp {tp}, rows {rows}"
            model.mpu.destroy()


@pooled(world_size=2)
def test_collectives_of_a_block_are_those_of_the_formula() -> None:
    monkeypatch = pytest.MonkeyPatch()
    model = autopar.initialize(_model(), {"model_parallelism": {"tensor_parallel_size": 2, "sequence_parallel": True}})
    elements: dict[str, int] = {}
    calls: list[str] = []
    run = collectives.run
    running = False

    def count(collective: Any, axis: Any, *args: Any) -> None:
        name = collective.__name__.removesuffix("_single").removesuffix("_tensor").removesuffix("_into")
        if running:
            calls.append(name)
            elements[name] = elements.get(name, 0) + max(x.numel() for x in args if isinstance(x, torch.Tensor))
        run(collective, axis, *args)

    monkeypatch.setattr(collectives, "run", count)
    blocks = model.transformer.h
    x = torch.randn(BATCH, SEQ, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    y, running = x, True
    for block in blocks:
        y = block(y)
        y = y[0] if isinstance(y, tuple) else y
    forward = dict(elements)
    y.sum().backward()
    monkeypatch.undo()
    number, n = len(blocks), BATCH * SEQ * HIDDEN
    ends = n  # the last block's sequence is gathered, and in the backward the gradient of the first one's
    assert forward == {"all_gather": 2 * number * n + ends, "reduce_scatter": 2 * number * n}
    # Backward: gradients of outputs and rows for the weights are gathered, those of inputs reduce-scattered.
    replicated = 6 * HIDDEN  # two norms with a bias, two biases behind row-parallel layers
    assert elements == {
        "all_gather": (2 + 2 + 2) * number * n + 2 * ends,
        "reduce_scatter": (2 + 2) * number * n,
        "all_reduce": number * replicated,
    }
    assert calls.count("all_reduce") == number
