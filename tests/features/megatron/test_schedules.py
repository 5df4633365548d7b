"""Megatron-LM's training loop gives the plain model's losses and gradients."""

import copy
import functools
from typing import Any

import pytest
import torch

import autopar
from autopar.errors import ConfigError
from autopar.features.megatron.schedules import get_forward_backward_func
from autopar.pipeline_parallel.pipeline import pipeline_of
from tests.compare import same_gradients
from tests.harness.worlds import pooled
from tests.parity import close, language_batches
from tests.small import gpt2


def _forward_step(data_iterator: Any, model: Any) -> Any:
    outputs = model(**next(data_iterator))
    return outputs, lambda outputs: (outputs.loss, {"lm loss": outputs.loss.detach()})


@pytest.mark.tier("test", only=("1f1b",))
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipev"])
@pooled(world_size=2)
def test_the_loop(schedule: str) -> None:
    plain = gpt2(n_layer=4)
    piped = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3) for model in (plain, piped)]
    piped = autopar.initialize(piped, {"pp": 2, "pipeline": {"schedule": schedule}})
    forward_backward = get_forward_backward_func()
    for step in range(3):
        batches = language_batches(131, count=4, batch=2, seed=step)
        losses = [plain(**batch).loss for batch in batches]
        torch.stack(losses).mean().backward()
        settings = {"model": [piped], "num_microbatches": 4, "seq_length": 7, "micro_batch_size": 2}
        reports = forward_backward(forward_step_func=_forward_step, data_iterator=iter(batches), **settings)
        assert len(reports) == (4 if pipeline_of(piped).last else 0)
        for report, loss in zip(reports, losses, strict=False):
            close(report["lm loss"], loss.detach(), "loss")
        same_gradients(piped, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        forward_backward(forward_step_func=_forward_step, data_iterator=iter(batches), forward_only=True, **settings)
        assert all(parameter.grad is None for parameter in piped.parameters())
    with pytest.raises(ConfigError, match="num_microbatches must be at least 1, not 0"):
        forward_backward(forward_step_func=_forward_step, data_iterator=iter([]), **{**settings, "num_microbatches": 0})
    with pytest.raises(ConfigError, match="is not parallelized"):
        forward_backward(forward_step_func=_forward_step, data_iterator=iter([]), **{**settings, "model": plain})


@pooled(world_size=2)
def test_the_loop_in_fp16() -> None:
    """What execute_pipeline does, bit for bit; a loss that nobody scaled is refused on both stages."""
    models, optimizers = [], []
    for _ in range(2):
        model = gpt2(n_layer=4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
        config = {"pp": 2, "precision": {"dtype": "fp16"}, "gradient_clipping": 0.5}
        models.append(autopar.initialize(model, config, optimizer=optimizer)[0])
        optimizers.append(optimizer)
    looped, piped = models

    def forward_step(data_iterator: Any, model: Any) -> Any:
        outputs = model(**next(data_iterator))
        return outputs, lambda outputs: (optimizers[0].scale_loss(outputs.loss), {"loss": outputs.loss.detach()})

    run = functools.partial(get_forward_backward_func(), model=looped, num_microbatches=4)
    for step in range(4):
        (batch,) = language_batches(131, count=1, batch=4, seed=step)
        batch["labels"] = batch["input_ids"]  # as many labels in each micro-batch
        batches = [{name: tensor[m : m + 1] for name, tensor in batch.items()} for m in range(4)]
        reports = run(forward_step_func=forward_step, data_iterator=iter(batches))
        loss = piped.execute_pipeline(batch, optimizer=optimizers[1]).loss
        if loss is not None:
            close(torch.stack([report["loss"] for report in reports]).mean(), loss, "loss", 1e-3)
        for optimizer in optimizers:
            optimizer.step()
            assert not optimizer.step_was_skipped
            optimizer.zero_grad()
        assert optimizers[0].loss_scale == optimizers[1].loss_scale
        for (name, one), other in zip(looped.named_parameters(), piped.parameters(), strict=True):
            assert torch.equal(one, other), name
    run(forward_step_func=_forward_step, data_iterator=iter(batches))
    with pytest.raises(ConfigError, match=r"get_forward_backward_func, loss_func must return optimizer\.scale_loss"):
        optimizers[0].step()
    for model in models:
        model.mpu.destroy()


def _loss_mask_step(data_iterator: Any, model: Any) -> Any:
    """As in Megatron-LM's pretrain_gpt.py of today: sums over the tokens that count, their number, what is reported."""
    batch = next(data_iterator)
    logits = model(batch["input_ids"]).logits

    def loss_func(logits: torch.Tensor) -> Any:
        labels = batch["labels"][:, 1:].flatten()
        losses = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels, reduction="none")
        mask = batch["loss_mask"][:, 1:].flatten()
        loss, tokens = (losses * mask).sum(), mask.sum().int()
        return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens])}

    return logits, loss_func


def _masked_batches(count: int) -> list[dict[str, torch.Tensor]]:
    batches = language_batches(131, count=count, batch=2, seed=5)
    for number, batch in enumerate(batches):
        batch["labels"] = batch["input_ids"]
        batch["loss_mask"] = torch.ones(batch["labels"].shape)
        batch["loss_mask"][0, number + 2 :] = 0  # another number of tokens in each
    batches[1]["loss_mask"].zero_()  # and none
    return batches


@pytest.mark.parametrize(("sizes", "schedule"), [((1, 2), "1f1b"), ((1, 2), "interleaved"), ((2, 1), "1f1b")])
@pooled(world_size=2)
def test_three_values_of_loss_func_and_lists_of_iterators(sizes: tuple[int, int], schedule: str) -> None:
    plain = gpt2(n_layer=4)
    tp, pp = sizes
    model = autopar.initialize(copy.deepcopy(plain), {"tp": tp, "pp": pp, "pipeline": {"schedule": schedule}})
    chunks = 2 if schedule == "interleaved" else 1
    for given in ([iter(_masked_batches(4)) for _ in range(chunks)], [iter(_masked_batches(4))]):
        for batch in _masked_batches(4):
            loss, tokens, _ = _loss_mask_step(iter([batch]), plain)[1](plain(batch["input_ids"]).logits)
            (loss / tokens.clamp(min=1) / 4).backward()
        settings = {"num_microbatches": 4, "seq_length": 7, "micro_batch_size": 2, "decoder_seq_length": 7}
        settings |= {"model": [model] * len(given), "first_val_step": None, "forward_only": False}
        run = get_forward_backward_func(pp_size=pp, vp_size=chunks)
        reports = run(forward_step_func=_loss_mask_step, data_iterator=given, **settings)
        assert len(reports) == (4 if pipeline_of(model).last else 0)
        assert [int(report["lm loss"][1]) for report in reports] in ([], [7, 0, 9, 10])
        same_gradients(model, plain)


@pooled(world_size=4)
def test_ranks_without_an_iterator_get_their_data_by_broadcast() -> None:
    plain = gpt2(n_layer=4)
    model = autopar.initialize(copy.deepcopy(plain), {"tp": 2, "pp": 2})
    mpu, batches = model.mpu, language_batches(131, count=2, batch=2)

    def forward_step(data_iterator: Any, model: Any) -> Any:
        data = None if data_iterator is None else next(data_iterator)
        batch = mpu.broadcast_data(["input_ids", "labels"], data, torch.int64)
        outputs = model(**batch)
        return outputs, lambda outputs: (outputs.loss, outputs.loss.detach())

    for _ in range(2):
        for batch in batches:
            (plain(input_ids=batch["input_ids"], labels=batch["labels"]).loss / 2).backward()
        data = iter(batches) if mpu.tp.rank == 0 else None
        get_forward_backward_func()(forward_step_func=forward_step, data_iterator=data, model=model, num_microbatches=2)
    same_gradients(model, plain)


@pytest.mark.tier("sweep")
@pooled(world_size=2)
def test_what_is_not_megatrons_is_named() -> None:
    model = autopar.initialize(gpt2(n_layer=4), {"pp": 2, "pipeline": {"schedule": "interleaved"}})
    batches = language_batches(131, count=2, batch=2)
    run = functools.partial(get_forward_backward_func(), model=model, num_microbatches=2)

    def raises(message: str, **arguments: Any) -> None:
        settings = {"forward_step_func": _forward_step, "data_iterator": iter(batches), **arguments}
        with pytest.raises(autopar.AutoparError) as info:
            run(**settings)
        assert message in str(info.value), str(info.value)

    raises("model is a list of 2 different modules", model=[model, gpt2()])
    raises("data_iterator is a list of 3, and this rank has 2 chunks of the model", data_iterator=[iter(batches)] * 3)

    def returning(value: Any) -> Any:
        return lambda iterator, model: (model(**next(iterator)), lambda outputs: value)

    accepted = "(loss, report) or (sum of losses, number of tokens, report)"
    raises(f"loss_func must return {accepted}, got Tensor", forward_step_func=returning(torch.ones(())))
    raises("forward_step_func must return (outputs, loss_func), not", forward_step_func=lambda i, m: m(**next(i)))
