"""What a rank holds of a longer sequence, when it always has as many rows of it: docs/long-sequences.md, "Memory"."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from tests.features.context_parallel.test_exactness import VOCAB, Largest, made, sizes
from tests.harness.worlds import pooled
from tests.small import llama

ROWS, BATCH, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 2, 2, 8, 4, 4


def small_llama() -> Any:
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "hidden_size": HEADS * HEAD_DIM}
    return llama(**heads, num_hidden_layers=LAYERS, intermediate_size=64, max_position_embeddings=4 * ROWS)


def saved_and_largest(n: int, method: str, make: Callable[[], Any] = small_llama) -> tuple[int, dict[int, int]]:
    """Bytes that the backward of a step keeps, besides weights; elements of the largest tensors by width."""
    model = make()
    if n > 1:
        model = autopar.initialize(model, sizes(n, method))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    ids = torch.arange(BATCH * n * ROWS).view(BATCH, -1) % VOCAB
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage  # held, so that no other takes its place
        return tensor

    with Largest() as largest:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    return sum(storage.nbytes() for storage in kept.values()), largest.elements


@pooled(world_size=4)
def test_with_as_many_rows_a_rank_keeps_as_much_for_whatever_length() -> None:
    """Exactly so: 2 ranks keep attention's output once more than one does; 4 keep what 2 do, and more token ids."""
    (one, *_), (two, *_), (four, *_) = found = [saved_and_largest(n, "ulysses") for n in (1, 2, 4)]
    for width in (VOCAB, HEADS * HEAD_DIM):  # logits, embeddings
        largest = [elements[width] for _, elements in found]
        assert largest == [BATCH * ROWS * width] * 3, f"of no other rank's rows, {width} wide"
    outputs = LAYERS * BATCH * ROWS * HEADS * HEAD_DIM * 4
    assert 0 <= two - one - outputs <= 0.005 * one, (one, two)
    assert 0 <= four - two <= 0.005 * two, (two, four)

    (two, largest_of_two), (four, largest_of_four) = (saved_and_largest(n, "gather") for n in (2, 4))
    assert largest_of_two[VOCAB] == largest_of_four[VOCAB] == BATCH * ROWS * VOCAB
    repeated, masks = 2 * BATCH * 2 * ROWS * HEADS * HEAD_DIM * 4, ROWS // 2 * 2 * ROWS * 4  # of two runs
    if dist.get_rank() == 0:  # the runs of the last rank touch: they are one, with fewer keys
        assert 0 <= four - two - LAYERS * (repeated + masks) <= 0.005 * two, (two, four)


KINDS = [("qwen3_next", "Qwen3NextForCausalLM"), ("lfm2", "Lfm2ForCausalLM"), ("mamba2", "Mamba2ForCausalLM")]


@pytest.mark.parametrize("kind", KINDS)
@pooled(world_size=4)
def test_modules_that_hand_on_states_keep_as_much_for_whatever_length(kind: tuple[str, str]) -> None:
    """From 2 to 4 ranks, so for twice the sequence, nothing but token ids; a rank behind another has a state more."""
    make = functools.partial(made, *kind, 4, 4)
    (two, largest_of_two), (four, largest_of_four) = (saved_and_largest(n, "ulysses", make) for n in (2, 4))
    if dist.get_rank() == 2:  # the first of two, the third of four
        return
    ids = BATCH * 2 * ROWS * 8
    assert 0 <= four - two <= 3 * ids, (two, four)
    hidden = HEADS * HEAD_DIM
    assert largest_of_two[hidden] == largest_of_four[hidden] == BATCH * ROWS * hidden
    assert max(largest_of_two.values()) == max(largest_of_four.values())
