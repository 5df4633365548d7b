"""Training loops as users write them, over rows of the sequence: losses, norms and weights of one process."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import get_cosine_schedule_with_warmup

import autopar
from tests.compare import same_weights
from tests.features.context_parallel.test_exactness import CAUSAL, VOCAB, Batch, made, sizes
from tests.harness.worlds import pooled
from tests.parity import close, language_batches
from tests.small import gpt2, llama

STEPS, RECOMPUTED = 4, {"activation_checkpointing": {"enable": True}}


def padded(step: int, micro: int) -> Batch:
    """Four sequences, of other lengths in every batch, with other padding on the left."""
    (batch,) = language_batches(VOCAB, count=1, batch=4, seq=9 + 3 * step + micro, seed=10 * step + micro)
    for row in range(4):
        batch["attention_mask"][row] = 1
        batch["attention_mask"][row, : (row + step) % 4] = 0
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


def packed(step: int, micro: int) -> Batch:
    """Documents, told apart by their positions."""
    (batch,) = language_batches(VOCAB, count=1, batch=4, seq=12 + step + micro, seed=10 * step + micro)
    first = 5 + micro
    positions = torch.cat([torch.arange(first), torch.arange(7 + step)])
    labels = batch["input_ids"].index_fill(1, torch.tensor([first]), -100)
    given = {"input_ids": batch["input_ids"], "labels": labels}
    return {**given, "position_ids": positions.expand(4, -1), "use_cache": False}


def of_outputs(each: Any, batch: Batch) -> torch.Tensor:
    return each(**batch).loss


def by_number(each: Any, batch: Batch) -> torch.Tensor:
    out = each(**batch, num_items_in_batch=torch.tensor(17))
    assert not getattr(out.logits, "is_full", False), "FSDP2 asks every output when its gradient comes"
    return out.loss


def by_hand(each: Any, batch: Batch) -> torch.Tensor:
    """A loss of one's own, and a metric before it."""
    logits = each(**{name: value for name, value in batch.items() if name != "labels"}).logits
    with torch.no_grad():
        (logits.argmax(-1) == batch["labels"]).float().mean()
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), batch["labels"][:, 1:].reshape(-1))


def part(batch: Batch, number: int, parts: int) -> Batch:
    return {n: x.chunk(parts)[number] if isinstance(x, torch.Tensor) else x for n, x in batch.items()}


def train(
    build: Callable[[], Any],
    config: dict[str, Any],
    data: Callable[[int, int], Batch] = padded,
    loss_of: Callable[[Any, Batch], torch.Tensor] = of_outputs,
) -> None:
    """AdamW, a cosine schedule, torch's clipping, two micro-batches a step, an evaluation, tokens at the end."""
    plain, model = build().train(), build().train()
    reference, optimizer = (torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3) for each in (plain, model))
    schedules = [get_cosine_schedule_with_warmup(each, 1, STEPS) for each in (reference, optimizer)]
    if "zero" in config:
        model, optimizer = autopar.initialize(model, config, optimizer=optimizer)
    else:
        model = autopar.initialize(model, config)
    mpu, engine, sharded = model.mpu, model, config.get("zero") == {"stage": 3}
    if mpu.dp_cp.size > 1 and not sharded:
        group = mpu.get_data_parallel_group(with_context_parallel=True)
        engine = DistributedDataParallel(model, process_group=group)
    for step in range(STEPS):
        for micro in range(2):
            whole = data(step, micro)
            expected = [loss_of(plain, part(whole, number, mpu.dp.size)) / 2 for number in range(mpu.dp.size)]
            torch.stack(expected).mean().backward()
            with contextlib.nullcontext() if micro or engine is model else engine.no_sync():
                loss = loss_of(engine, part(whole, mpu.dp.rank, mpu.dp.size)) / 2
                loss.backward()
            close(loss, expected[mpu.dp.rank], f"loss of step {step}, {micro}")
        norms = [torch.nn.utils.clip_grad_norm_(list(each.parameters()), 0.5) for each in (plain, model)]
        close(torch.tensor(float(norms[1])), norms[0], f"norm of step {step}")
        for each, schedule in zip((reference, optimizer), schedules, strict=True):
            each.step()
            each.zero_grad()
            schedule.step()
        if dist.get_rank() == 0:
            torch.rand(())  # of the user's own: these models draw nothing
        if step == 1:
            batch = data(9, 0)
            with torch.no_grad():
                close(model.eval()(**batch).logits + 0, plain.eval()(**batch).logits, "logits in evaluation")
            model.train(), plain.train()
    if sharded:
        for name, parameter in model.named_parameters():
            close(parameter.full_tensor(), plain.get_parameter(name), f"{name} at the end", 2e-5)
        return
    same_weights(model, plain, 2e-5)
    ids = data(0, 0)["input_ids"][:2, :5]
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **settings), plain.generate(ids, **settings))
    if mpu.cp.size > 1:
        with torch.no_grad():
            cached = model(ids, use_cache=True).past_key_values
            assert cached.get_seq_length() == 5, "a forward that fills a cache has all rows"
            assert model(ids).past_key_values is None


@pytest.mark.parametrize("method", ["ulysses", "gather"])
@pooled(world_size=2)
def test_two_ranks(method: str) -> None:
    train(llama, sizes(2, method))
    train(CAUSAL["windows"], sizes(2, method), packed, by_hand)


@pooled(world_size=4)
def test_beside_other_axes() -> None:
    train(llama, {**sizes(2, tensor_parallel_size=2, sequence_parallel=True), **RECOMPUTED}, padded, by_hand)
    train(CAUSAL["learned positions"], {**sizes(2), "zero": {"stage": 1}})
    train(CAUSAL["windows"], sizes(1, tensor_parallel_size=2, sequence_parallel=True), packed, by_hand)  # replicas


@pytest.mark.every_case
@pytest.mark.tier("test", only=("grouped keys-1",))
@pytest.mark.tier("sweep", only=("grouped keys-3", "gated delta-1", "gated delta-3"))
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("name", ["grouped keys", "gated delta"])
@pooled(world_size=4)
def test_replicas_and_sharded_states(name: str, stage: int) -> None:
    build = CAUSAL.get(name, functools.partial(made, "qwen3_next", "Qwen3NextForCausalLM"))
    train(build, {**sizes(2), **RECOMPUTED, "zero": {"stage": stage}}, padded, by_number)


@pooled(world_size=2)
def test_gradients_are_those_of_the_masks_that_dropout_drew() -> None:
    """The derivative along a direction, of the function that the same draws make again; also recomputed."""
    (batch,) = language_batches(VOCAB, count=1, seq=9)
    labels = batch.pop("labels")

    def loss(model: Any) -> torch.Tensor:
        torch.manual_seed(5)
        logits = model(**batch).logits[:, :-1]  # in fp64, unlike the model's own loss
        return F.cross_entropy(logits.reshape(-1, VOCAB), labels[:, 1:].reshape(-1))

    for method, recomputed in (("ulysses", True), ("gather", False)):
        model = gpt2(attn_pdrop=0.3, resid_pdrop=0.3, embd_pdrop=0.3).double()
        config = {**sizes(2, method), "activation_checkpointing": {"enable": recomputed}}
        model = autopar.initialize(model, config).train()
        loss(model).backward()
        autopar.average_gradients(model)
        torch.manual_seed(11)
        direction = [torch.randn_like(parameter) for parameter in model.parameters()]
        slope = sum((p.grad * d).sum() for p, d in zip(model.parameters(), direction, strict=True))
        found = []
        for step in (1e-5, -2e-5):
            with torch.no_grad():
                for parameter, along in zip(model.parameters(), direction, strict=True):
                    parameter.add_(along, alpha=step)
                found.append(loss(model))
        close((found[0] - found[1]) / 2e-5, slope, f"slope, {method}")


@pooled(world_size=2)
def test_loss_scalers_step_and_skip_alike() -> None:
    """torch's GradScaler, an overflow on one rank, and autocast."""
    plain, model = llama().train(), autopar.initialize(llama(), sizes(2)).train()
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (plain, model)]
    for step in range(3):
        for each, scaler, optimizer in zip((plain, model), scalers, optimizers, strict=True):
            scaler.scale(each(**padded(step, 0)).loss).backward()
            if each is model:
                autopar.average_gradients(model)
            if step == 1 and (each is plain or dist.get_rank() == 0):
                each.lm_head.weight.grad[0, 0] = torch.inf
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale() == (1024.0 if step == 0 else 512.0)
    same_weights(model, plain, 2e-5)
    with torch.autocast("cpu", torch.bfloat16):
        losses = [each(**padded(0, 0)).loss for each in (plain, model)]
    assert losses[0].dtype == losses[1].dtype == torch.float32
    close(losses[1], losses[0], "loss in bf16", 1e-2)


@pooled(world_size=2)
def test_adapters() -> None:
    peft = pytest.importorskip("peft")
    from autopar.integrations import get_peft_model

    config = functools.partial(peft.LoraConfig, r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    torch.manual_seed(3)
    plain = peft.get_peft_model(llama(), config(init_lora_weights=False)).train()
    torch.manual_seed(3)
    model = autopar.initialize(llama(), {**sizes(2), **RECOMPUTED})
    model = get_peft_model(model, config(init_lora_weights=False)).train()
    for each in (plain, model):
        each(**padded(0, 0)).loss.backward()
    autopar.average_gradients(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert len(trained) == 2 * 7 * 2 and all("lora" in name for name in trained)
    for name in trained:
        close(model.get_parameter(name).grad, plain.get_parameter(name).grad, name)
