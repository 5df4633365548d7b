"""Weights, gradients and optimizer states that tensor-parallel ranks must have alike: named as soon as they differ."""

import pytest
import torch
import torch.distributed as dist

from autopar.errors import CheckpointError, ConsistencyError
from tests.exchange import everyones, raises_everywhere
from tests.harness.worlds import pooled
from tests.parity import language_batches
from tests.small import gpt2, llama, parallel


def _train(model, steps: int, skip: int | None = None, change=lambda *_: None, kind=torch.optim.AdamW, lr=1e-2):
    """A user's loop, in which one rank may skip a step, and which may change gradients."""
    optimizer = kind(model.parameters(), lr=lr)
    for step, batch in enumerate(language_batches(min(131, model.config.vocab_size), count=steps)):
        model(**batch).loss.backward()
        for name, parameter in model.named_parameters():
            change(name, parameter.grad)
        if step != skip or dist.get_rank() != 1:
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.tier("test")
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
        "other settings",
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


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_weights_that_differ_are_not_saved(tmp_path):
    model = parallel(gpt2(), 2).train()
    _train(model, 2, skip=1)  # no forward comes after it
    for arguments in ({}, {"merge_checkpoints": True}, {"async_save": True}):
        with raises_everywhere(
            CheckpointError,
            "transformer.wpe.weight must be identical on rank 0 and rank 1, but differs",
            "skipped an optimizer step",
        ):
            model.save_parallelized(tmp_path / "step-2", **arguments)
    off = parallel(gpt2(), 2, consistency_check={"enable": False}).train()
    _train(off, 2, skip=1)
    off.save_parallelized(tmp_path / "step-2")


@pooled(world_size=2)
def test_dropout_and_fifty_steps_raise_no_false_alarm():
    rates = {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}
    model = parallel(gpt2(**rates), 2).train()
    own = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(5):
        _train(model, 10, change=lambda *_: torch.rand(1, generator=own))
        with torch.no_grad():
            model.eval()(**language_batches(131, count=1)[0])
        model.train()


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_gradients_that_were_summed_over_all_ranks_are_noticed_on_the_next_forward():
    model = parallel(llama(num_attention_heads=4, num_key_value_heads=4, hidden_size=32, vocab_size=132), 2).train()
    model.config.use_cache = False

    def average(name: str, gradient: torch.Tensor) -> None:
        if "mlp" not in name:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()

    with raises_everywhere(ConsistencyError, "stepped with the same numbers for", "autopar.average_gradients(model)"):
        _train(model, 6, change=average, kind=torch.optim.SGD, lr=0.1)


@pooled(world_size=2)
def test_a_rank_that_generates_while_the_other_trains():
    model = parallel(gpt2(), 2).train()
    ids = torch.arange(4)[None]
    with raises_everywhere(
        ConsistencyError,
        "are in different calls:\n  call: rank 0: generate, rank 1: forward of GPT2LMHeadModel\n",
        "every forward and every generate on all ranks",
    ):
        if dist.get_rank() == 0:
            model.generate(ids, max_new_tokens=2, pad_token_id=0)
        else:
            model(ids)


@pooled(world_size=2)
def test_weights_drawn_anew_after_initialize_are_the_same_on_every_shard():
    model = parallel(gpt2(n_embd=32, n_head=4, vocab_size=132), 2)
    weight = model.transformer.h[1].mlp.c_fc.weight
    weight.data.normal_()
    with raises_everywhere(
        ConsistencyError,
        "same shard of the weights transformer.h.1.mlp.c_fc.weight.\n",
        "over all ranks copies the shard of rank 0 to the other ranks: pass\n  process_group=model.mpu.",
        "weights were drawn after",
    ):
        model(torch.arange(4)[None])


@pooled(world_size=2)
def test_biases_may_have_the_same_numbers_on_all_ranks():
    """Signs of gradients, a pattern for each head: a few numbers are soon alike."""
    torch.manual_seed(0)
    model = parallel(llama(attention_bias=True, hidden_size=8, num_attention_heads=2, num_key_value_heads=2), 2).train()
    _train(model, 40, change=lambda _, gradient: gradient.sign_(), kind=torch.optim.SGD, lr=1e-3)
    torch.nn.init.normal_(model.model.layers[0].self_attn.q_proj.bias, generator=torch.Generator().manual_seed(0))
    model(**language_batches(131, count=1)[0])


@pooled(world_size=2)
def test_an_optimizer_state_of_rank_0_on_all_ranks_is_noticed_on_the_next_forward():
    model = parallel(gpt2(n_embd=32, n_head=4, vocab_size=132), 2).train()
    batches = language_batches(131, count=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(**batches[0]).loss.backward()
    optimizer.step()
    saved = everyones(optimizer.state_dict())[0]  # what torch.load of rank 0's file gives
    resumed = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with raises_everywhere(ConsistencyError, "stepped with the same numbers for", "from_parallelized(..., optimizer="):
        for batch in batches:
            resumed.load_state_dict(saved)
            model(**batch).loss.backward()
            resumed.step()
            resumed.zero_grad()


@pooled(world_size=2)
def test_settings_and_frozen_weights_that_differ_between_ranks():
    rank = dist.get_rank()
    model = parallel(gpt2(), 2).train()
    model.transformer.requires_grad_(False)
    model.transformer.wte.requires_grad_(True)  # sharded: nothing that ranks hold whole drifts apart
    with raises_everywhere(ConsistencyError, "stepped with different settings of the optimizer", "'lr': 0.1"):
        _train(model, 3, kind=torch.optim.SGD, lr=0.1 * (1 + rank))
    model, (batch,) = parallel(gpt2(), 2).train(), language_batches(131, count=1)
    model(**batch)
    model.transformer.h[0].mlp.c_fc.weight.requires_grad_(rank == 1)
    with raises_everywhere(
        ConsistencyError,
        "train different weights:",
        "requires_grad of transformer.h.0.mlp.c_fc.weight: rank 0: False, rank 1: True",
    ):
        model(**batch)


@pooled(world_size=2)
def test_gradients_that_are_no_numbers_and_heads_that_are_copies_raise_no_false_alarm():
    model = parallel(gpt2(), 2).train()
    _train(model, 6, change=lambda _, gradient: gradient.fill_(float("nan")), kind=torch.optim.SGD, lr=0.1)
    model = llama(num_attention_heads=4, num_key_value_heads=4, hidden_size=32, intermediate_size=36, vocab_size=132)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name:  # each half is the other one's copy
                dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
                half = parameter.narrow(dim, 0, parameter.shape[dim] // 2)
                parameter.copy_(torch.cat([half, half], dim))
    model = parallel(model, 2).train()
    _train(model, 12, kind=torch.optim.SGD, lr=0.01)


@pooled(world_size=2)
def test_all_replicated_weights_are_compared_on_the_first_forward_after_every_few_steps():
    model = parallel(gpt2(n_layer=5), 2, consistency_check={"inputs": "first", "parameters": "every 4"}).train()
    _train(model, 3)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.transformer.h[3].ln_2.bias[2] += 1e-4
    _train(model, 1)
    with raises_everywhere(ConsistencyError, "have drifted apart", "weight transformer.h.3.ln_2.bias: rank 0: "):
        _train(model, 1)
