"""What tensor-parallel ranks must have alike, in the loops that users write: named as soon as it differs."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

import autopar
from autopar.errors import CheckpointError, ConsistencyError
from tests.parity import close, language_batches, whole
from tests.pool import pooled
from tests.small import gpt2, llama, parallel
from tests.worlds import raises_everywhere


@pooled(world_size=2)
def test_different_batches_are_an_error_that_names_the_argument_on_any_forward():
    rank = dist.get_rank()
    for before in (0, 1, 7):
        model = parallel(gpt2(), 2).train()
        for step in range(before):
            model(torch.arange(step, step + 4)[None], labels=torch.arange(4)[None])
        with raises_everywhere(
            ConsistencyError,
            "the ranks [0, 1] of one tensor-parallel group got different inputs (1 argument):",
            "labels: rank 0: [1, 4] ",
            "autopar.prepare_dataloader",
        ):
            model(torch.arange(4)[None], labels=torch.arange(4)[None] + rank)
        model(torch.arange(4)[None])  # goes on
        with raises_everywhere(ConsistencyError, "input_ids: rank 0: [1, 4] ", "attention_mask: rank 0: missing"):
            model(torch.arange(4 + rank)[None], **({"attention_mask": torch.ones(1, 5)} if rank else {}))


@pooled(world_size=2)
def test_the_same_samples_in_another_order_are_other_inputs():
    model = parallel(gpt2(), 2)
    ids = torch.arange(8).view(2, 4)
    model(ids)
    with raises_everywhere(ConsistencyError, "input_ids"):
        model(ids.flip(0) if dist.get_rank() else ids)
    large = torch.randint(0, 131, (1000, 30), generator=torch.Generator().manual_seed(0))  # too much to be hashed
    with torch.no_grad(), raises_everywhere(ConsistencyError, "input_ids"):
        model(large.flip(0) if dist.get_rank() else large)


@pooled(world_size=2)
def test_the_base_model_and_evaluation_are_compared_too():
    model, rank = parallel(gpt2(), 2), dist.get_rank()
    model(torch.arange(4)[None])
    with raises_everywhere(ConsistencyError, "input_ids"):
        model.transformer(torch.arange(4)[None] + rank)
    with torch.no_grad(), raises_everywhere(ConsistencyError, "input_ids"):
        model.eval()(torch.arange(4)[None] + rank)
    model.train(rank == 0)
    with raises_everywhere(ConsistencyError, "training mode: rank 0: True, rank 1: False"):
        model(torch.arange(4)[None])


@pooled(world_size=2)
def test_how_often_inputs_are_compared():
    ids, rank = torch.arange(4)[None], dist.get_rank()
    first = parallel(gpt2(), 2, consistency_check={"inputs": "first"}).train()
    first(ids)
    first(ids + rank)
    with pytest.raises(ConsistencyError):
        first.eval()(ids + rank)  # of each mode
    seldom = parallel(gpt2(), 2, consistency_check={"inputs": "every 3"})
    seldom(ids)
    seldom(ids + rank)
    with raises_everywhere(ConsistencyError, "input_ids: rank 0: [1, 4] int64, rank 1: [1, 5] int64"):
        seldom(torch.arange(4 + rank)[None])  # shapes always
    with raises_everywhere(ConsistencyError, "input_ids"):
        seldom(ids + rank)
    off = parallel(gpt2(), 2, consistency_check={"enable": False}).train()
    off(ids + rank)


@pooled(world_size=2)
def test_generate_compares_its_first_forward_only():
    model, rank = parallel(gpt2(), 2).eval(), dist.get_rank()
    original, calls = dist.all_reduce, []

    def counted(x: torch.Tensor, *args, **kwargs):
        calls.append(x.dtype)
        return original(x, *args, **kwargs)

    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    dist.all_reduce = counted
    try:
        model.generate(torch.arange(4)[None], **options)
    finally:
        dist.all_reduce = original
    assert calls.count(torch.int64) == 2  # that all generate, and the first forward
    with raises_everywhere(ConsistencyError, "input_ids"):
        model.generate(torch.arange(4)[None] + rank, **options)
    with raises_everywhere(ConsistencyError, "input_ids"):
        model(torch.arange(4)[None] + rank)  # outside again


@pooled(world_size=2)
def test_a_forward_that_was_interrupted_turns_nothing_off():
    model, rank = parallel(gpt2(), 2), dist.get_rank()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.transformer.h[0].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(torch.arange(4)[None])
    handle.remove()
    with raises_everywhere(ConsistencyError, "input_ids"):
        model(torch.arange(4)[None] + rank)


# -- random states -----------------------------------------------------------------------------------------------------


@pooled(world_size=2)
def test_random_states_that_differ_are_an_error_when_dropout_is_on():
    rank = dist.get_rank()
    model = parallel(gpt2(attn_pdrop=0.1), 2).train()
    model(torch.arange(4)[None])
    if rank == 0:
        torch.rand(1)  # rank 0 draws once: for a picture, for its log
    with raises_everywhere(ConsistencyError, "have different random states (1)", "random state of torch: rank 0: "):
        model(torch.arange(4)[None])
    model = parallel(gpt2(), 2).train()
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    model(torch.arange(4)[None])  # nothing is drawn, nothing to compare


def _speech(**changes: object) -> Wav2Vec2ForCTC:
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 37}
    sizes |= {"conv_dim": (12, 14), "conv_stride": (3, 2), "conv_kernel": (5, 3), "vocab_size": 17}
    sizes |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0}
    rates = dict.fromkeys(("hidden_dropout", "activation_dropout", "attention_dropout", "final_dropout"), 0.0)
    masks = {"mask_time_prob": 0.4, "mask_time_length": 2, "mask_feature_prob": 0.3, "mask_feature_length": 3}
    torch.manual_seed(0)
    config = Wav2Vec2Config(**{**sizes, **rates, **masks, "feat_proj_dropout": 0.0, "ctc_loss_reduction": "mean"})
    return Wav2Vec2ForCTC(config)


@pooled(world_size=2)
def test_masks_drawn_from_numpy_are_those_of_one_process():
    rank = dist.get_rank()
    np.random.seed(5)
    torch.manual_seed(0)
    wave, labels = torch.randn(2, 400), torch.randint(1, 17, (2, 4))
    plain, model = _speech().train(), _speech().train()
    optimizers = [torch.optim.SGD(m.parameters(), 1e-2) for m in (plain, model)]
    losses = []
    np.random.seed(5)
    for _ in range(4):
        losses.append(plain(wave, labels=labels).loss)
        losses[-1].backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
    np.random.seed(5 if rank == 0 else 77)  # users seed by rank, or not at all: initialize shares the first one's
    model = autopar.initialize(model, {"model_parallelism": {"tensor_parallel_size": 2}})
    for loss in losses:
        output = model(wave, labels=labels)
        close(output.loss, loss, "loss")
        output.loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    assert len({round(loss.item(), 4) for loss in losses}) == 4
    weights = whole(model, lambda parameter: parameter.data)
    for name, parameter in plain.named_parameters():
        close(weights[name], parameter.data, name)
    if rank == 0:
        np.random.rand()
    with raises_everywhere(ConsistencyError, "random state of numpy: rank 0: "):
        model(wave, labels=labels)


@pooled(world_size=2)
def test_generators_that_differ_before_the_first_forward_are_noticed_in_it():
    wave, labels = torch.zeros(2, 400), torch.ones(2, 4, dtype=torch.long)
    model = autopar.initialize(_speech(), {"model_parallelism": {"tensor_parallel_size": 2}}).train()
    np.random.seed(dist.get_rank())  # set_seed(rank) after initialize
    with raises_everywhere(ConsistencyError, "random state of numpy"):
        model(wave, labels=labels)


@pooled(world_size=2)
def test_initialize_draws_nothing():
    for build in (gpt2, llama):
        model = build()
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        parallel(model, 2)
        assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(3))
        assert random.random() == random.Random(3).random()
        assert np.random.rand() == np.random.RandomState(3).rand()


# -- weights -----------------------------------------------------------------------------------------------------------


def _train(model, steps: int, skip: int | None = None):
    """A user's loop, in which one rank may skip a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, batch in enumerate(language_batches(131, count=steps)):
        model(**batch).loss.backward()
        if step != skip or dist.get_rank() != 1:
            optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pooled(world_size=2)
def test_a_rank_that_skips_a_step_is_named_on_the_next_forward():
    model = parallel(gpt2(), 2).train()
    _train(model, 2)
    with raises_everywhere(
        ConsistencyError,
        "have drifted apart",
        "optimizer steps so far: rank 0: 4, rank 1: 3",
        "weight transformer.",
        "skipped an optimizer step",
    ):
        _train(model, 3, skip=1)


@pooled(world_size=2)
def test_weights_that_one_rank_wrote_are_found_within_some_forwards():
    model = parallel(gpt2(n_layer=5), 2).train()
    batch = language_batches(131, count=1)[0]
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.transformer.h[3].ln_2.bias[2] += 1e-7
    with raises_everywhere(ConsistencyError, "weight transformer.h.3.ln_2.bias: rank 0: "):
        for _ in range(20):
            with torch.no_grad():
                model(**batch)


@pooled(world_size=2)
def test_weights_that_differ_are_not_saved(tmp_path_factory=None):
    import tempfile

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    model = parallel(gpt2(), 2).train()
    _train(model, 2, skip=1)  # no forward comes after it
    for arguments in ({}, {"merge_checkpoints": True}, {"async_save": True}):
        with raises_everywhere(
            CheckpointError,
            "transformer.wpe.weight differs between rank 0 and rank 1, which must hold the same",
            "skipped an optimizer step",
        ):
            model.save_parallelized(f"{folder[0]}/step-2", **arguments)
    off = parallel(gpt2(), 2, consistency_check={"enable": False}).train()
    _train(off, 2, skip=1)
    off.save_parallelized(f"{folder[0]}/step-2")


@pooled(world_size=2)
def test_dropout_and_fifty_steps_raise_no_false_alarm():
    rates = {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}
    model = parallel(gpt2(**rates), 2).train()
    own = torch.Generator().manual_seed(dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = language_batches(131, count=3)
    for step in range(50):
        model(**batches[step % 3]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.rand(1, generator=own)
        if step % 10 == 9:
            with torch.no_grad():
                model.eval()(**batches[0])
            model.train()


@pooled(world_size=2)
def test_torchs_own_clipping_is_noticed_on_the_next_forward():
    """It scales each rank by the norm of its own shards, so that replicated weights drift apart."""
    model = parallel(gpt2(), 2).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with raises_everywhere(ConsistencyError, "have drifted apart", "weight transformer.", "other settings"):
        for batch in language_batches(131, count=3):
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()


@pooled(world_size=2)
def test_gradients_that_were_summed_over_all_ranks_are_noticed_on_the_next_forward():
    model = parallel(llama(num_attention_heads=4, num_key_value_heads=4, hidden_size=32, vocab_size=132), 2).train()
    model.config.use_cache = False
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    even = [p for name, p in model.named_parameters() if "mlp" not in name]
    batches = language_batches(131, count=6)
    with raises_everywhere(ConsistencyError, "stepped with the same numbers for", "autopar.average_gradients(model)"):
        for batch in batches:
            model(**batch).loss.backward()
            for parameter in even:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            optimizer.step()
            optimizer.zero_grad()


@pooled(world_size=2)
def test_a_rank_that_generates_while_the_other_trains():
    model = parallel(gpt2(), 2).train()
    ids = torch.arange(4)[None]
    with raises_everywhere(
        ConsistencyError,
        "are in different calls:\n  call: rank 0: generate, rank 1: forward of GPT2LMHeadModel\n",
        "evaluate and generate on all of them",
    ):
        if dist.get_rank() == 0:
            model.generate(ids, max_new_tokens=2, pad_token_id=0)
        else:
            model(ids)


@pooled(world_size=2)
def test_weights_drawn_anew_after_initialize_are_the_same_on_every_shard():
    model = parallel(gpt2(n_embd=32, n_head=4, vocab_size=132), 2)
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight.normal_()
    with raises_everywhere(ConsistencyError, "hold the same shard of the weights", "Drawing weights anew"):
        for _ in range(40):
            model(torch.arange(4)[None])


@pooled(world_size=2)
def test_an_optimizer_state_of_rank_0_on_all_ranks_is_noticed_on_the_next_forward():
    model = parallel(gpt2(n_embd=32, n_head=4, vocab_size=132), 2).train()
    batches = language_batches(131, count=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(**batches[0]).loss.backward()
    optimizer.step()
    saved = [optimizer.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(saved)  # what torch.load of rank 0's file gives
    resumed = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with raises_everywhere(ConsistencyError, "stepped with the same numbers for", "from_parallelized(..., optimizer="):
        for batch in batches:
            resumed.load_state_dict(saved[0])
            model(**batch).loss.backward()
            resumed.step()
            resumed.zero_grad()


@pooled(world_size=2)
def test_settings_and_frozen_weights_that_differ_between_ranks():
    rank = dist.get_rank()
    batches = language_batches(131, count=3)
    model = parallel(gpt2(), 2).train()
    model.transformer.requires_grad_(False)
    model.transformer.wte.requires_grad_(True)  # sharded: nothing that ranks hold whole drifts apart
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank))
    with raises_everywhere(ConsistencyError, "stepped with different settings of the optimizer", "'lr': 0.1"):
        for batch in batches:
            model(**batch).loss.backward()
            optimizer.step()
    model = parallel(gpt2(), 2).train()
    model(**batches[0])
    model.transformer.h[0].mlp.c_fc.weight.requires_grad_(rank == 1)
    with raises_everywhere(
        ConsistencyError,
        "train different weights:",
        "requires_grad of transformer.h.0.mlp.c_fc.weight: rank 0: False, rank 1: True",
    ):
        model(**batches[0])


@pooled(world_size=2)
def test_gradients_that_are_no_numbers_and_heads_that_are_copies_raise_no_false_alarm():
    model = parallel(gpt2(), 2).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in language_batches(131, count=6):
        (model(**batch).loss * float("nan")).backward()
        optimizer.step()
        optimizer.zero_grad()
    model = llama(num_attention_heads=4, num_key_value_heads=4, hidden_size=32, intermediate_size=36, vocab_size=132)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name:  # each half is the other one's copy
                dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
                half = parameter.narrow(dim, 0, parameter.shape[dim] // 2)
                parameter.copy_(torch.cat([half, half], dim))
    model = parallel(model, 2).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in language_batches(131, count=12):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
