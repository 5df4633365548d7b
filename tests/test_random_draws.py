"""Dropout, sampling and seeds of layers: identical on replicated activations, different on sharded ones."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.swap import unbind
from autopar.tensor_parallel import apply
from autopar.tensor_parallel.apply import draw_seeds_alike
from autopar.tools.verification.recording import recording_of
from tests.exchange import everyones
from tests.harness.worlds import pooled
from tests.parity import all_close, close, whole
from tests.random_models import Case, batches, build
from tests.small import gpt2, llama, parallel

IDS = torch.arange(10).view(2, 5)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_dropout_on_replicated_activations_is_equal_and_on_sharded_ones_differs():
    torch.manual_seed(dist.get_rank())  # unseeded users: initialize shares the first rank's state
    model = parallel(gpt2(n_head=2, attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5), 2).train()
    with torch.no_grad():  # the same values into both heads: only masks can make a difference
        for block in model.transformer.h:
            block.attn.c_attn.weight.fill_(0.01)
            block.attn.c_attn.bias.fill_(0.1)
    seen: dict[str, torch.Tensor] = {}
    block = model.transformer.h[0]
    autopar.local_hooks(block.attn.c_proj)
    block.attn.c_proj.register_forward_pre_hook(lambda _, args: seen.update(inside=args[0]))
    block.attn.resid_dropout.register_forward_hook(lambda _, args, out: seen.update(after=out))
    model.transformer.drop.register_forward_hook(lambda _, args, out: seen.update(before=out))
    model(IDS)
    for name in ("before", "after"):
        first, second = everyones(seen[name])
        assert torch.equal(first, second) and (first == 0).any(), name
    first, second = everyones(seen["inside"])
    assert not torch.equal(first, second)


@pooled(world_size=2)
def test_random_streams_without_dropout_and_after_an_interrupted_forward():
    model = parallel(gpt2(), 2).train()
    before = torch.get_rng_state()
    model(IDS, labels=IDS).loss.backward()
    assert torch.equal(torch.get_rng_state(), before), "no random number is drawn"
    model = parallel(gpt2(attn_pdrop=0.3), 2).train()

    def fail(*_):
        raise RuntimeError("on purpose")

    handle = model.transformer.h[0].attn.c_proj.register_forward_pre_hook(fail)  # in the middle of a region
    with pytest.raises(RuntimeError, match="on purpose"):
        model(IDS)
    handle.remove()
    states = everyones(torch.get_rng_state())
    assert torch.equal(states[0], states[1])


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_sampling_is_that_of_the_plain_model_given_the_seed_and_the_same_on_all_ranks_without():
    plain = gpt2().eval()
    model = parallel(copy.deepcopy(plain), 2).eval()
    settings = {"max_new_tokens": 12, "do_sample": True, "top_k": 20, "pad_token_id": 0, "eos_token_id": None}
    torch.manual_seed(5)
    expected = plain.generate(IDS, **settings)
    torch.manual_seed(5)
    assert torch.equal(model.generate(IDS, **settings), expected)
    torch.manual_seed(100 + dist.get_rank())  # careless users
    first, second = everyones(model.generate(IDS, **settings))
    assert torch.equal(first, second)


@pooled(world_size=2)
def test_projections_that_read_the_same_tensor_share_one_all_reduce():
    """Backward of one block: one sum for q, k and v, one for gate and up; forward: one for o and one for down."""
    counts = []
    for layers in (1, 2):
        model = parallel(llama(num_hidden_layers=layers), 2)
        with recording_of(model.mpu.tp) as found:
            model(IDS, labels=IDS).loss.backward()
        counts.append(sum(each.name in ("allreduce", "all_reduce") for each in found))
    assert counts[1] - counts[0] == 4


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_an_evaluation_between_forward_and_a_recomputing_backward_changes_no_mask():
    gradients = []
    for interrupt in (False, True):
        model = parallel(gpt2(attn_pdrop=0.3), 2, activation_checkpointing={}).train()
        torch.manual_seed(3)
        loss = model(IDS, labels=IDS).loss
        if interrupt:
            with torch.no_grad():
                model.eval()(IDS)
            model.train()
        loss.backward()
        gradients.append(whole(model, lambda parameter: parameter.grad))
    all_close(gradients[1], gradients[0], "{}", 1e-6)


@pooled(world_size=2)
def test_autocast_gives_the_dtypes_of_the_plain_model():
    plain = gpt2()
    model = parallel(copy.deepcopy(plain), 2)
    seen = []
    for m in (plain, model):
        handle = m.transformer.h[0].mlp.c_proj.register_forward_hook(lambda _, args, out: seen.append(out.dtype))
        with torch.autocast("cpu", torch.bfloat16):
            m(IDS, labels=IDS).loss.backward()
        handle.remove()
    assert seen[0] == seen[1] == torch.bfloat16


CASE = Case("reformer", "ReformerForMaskedLM")


def _hashing(model: Any) -> Any:
    for module in model.modules():
        if hasattr(module, "hash_seed"):
            module.hash_seed = None  # other buckets at each forward
    return model.train()


@pooled(world_size=2)
def test_hashes_and_gradients_are_the_plain_models_for_the_same_seed() -> None:
    plain = _hashing(build(CASE, 4, 2))
    batch = batches(CASE, plain.config, 1)[0]
    model = autopar.initialize(_hashing(build(CASE, 4, 2)), {"model_parallelism": {"tensor_parallel_size": 2}})
    draw_seeds_alike(plain)
    losses = []
    for each in (plain, model):
        torch.manual_seed(3)
        losses.append(each(**batch).loss)
        losses[-1].backward()
    close(losses[1].detach(), losses[0].detach(), "loss")
    theirs = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        expected = theirs[name].grad
        assert (parameter.grad is None) == (expected is None), name
        if expected is not None and parameter.shape == expected.shape:
            close(parameter.grad, expected, name)
    unbind(plain, apply._OWNER)
    assert not any("_init_attention_seed" in vars(module) for module in plain.modules())
