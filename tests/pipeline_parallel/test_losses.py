"""Losses that are no mean over labels, replicas with unlike padding, gradients that stay the same on all holders."""

import copy
import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.errors import ConfigError, ShardWarning
from autopar.pipeline_parallel.microbatch import OwnLoss, split
from autopar.pipeline_parallel.pipeline import pipeline_of
from tests.compare import same_gradients
from tests.exchange import raises_everywhere
from tests.harness.worlds import pooled
from tests.parity import close, language_batches
from tests.pipeline_parallel.oracle import whole_tensors
from tests.random_models import Case, build
from tests.small import Unshifted, gpt2, llama
from tests.timeouts import told_at_once


def _config(pp: int = 1, tp: int = 1, **pipeline: Any) -> dict[str, Any]:
    return {"pp": pp, "tp": tp, "pipeline": pipeline}


def _ids(samples: int = 4) -> torch.Tensor:
    return torch.randint(5, 131, (samples, 7), generator=torch.Generator().manual_seed(2))


def _compare(piped: nn.Module, plain: nn.Module) -> None:
    gradients = whole_tensors(piped, lambda parameter: parameter.grad)
    for name, parameter in plain.named_parameters():
        assert (gradients[name] is None) == (parameter.grad is None), name
        if parameter.grad is not None:
            close(gradients[name], parameter.grad, f"gradient of {name}")


def _as_on_one_process(plain: nn.Module, batch: dict[str, Any], policy: Any = None, **config: Any) -> None:
    expected = plain(**batch).loss
    expected.backward()
    model = autopar.initialize(copy.deepcopy(plain), _config(**config), policy=policy)
    model.zero_grad()
    close(model.execute_pipeline(batch, broadcast_loss=True).loss, expected.detach(), "loss")
    _compare(model, plain)


def _questions() -> dict[str, Any]:
    starts, ends = torch.tensor([1, 2, 9, 3]), torch.tensor([2, 3, 9, 4])  # the third answer lies behind the end
    return {"input_ids": _ids(), "start_positions": starts, "end_positions": ends}


def _pairs() -> dict[str, Any]:
    labels = torch.full_like(_ids(), -100)
    labels[0, :6], labels[1, 0] = 3, 4
    return {"input_ids": _ids(), "labels": labels, "next_sentence_label": torch.tensor([0, 1, 0, 1])}


def test_which_losses_can_be_put_together() -> None:
    words = {"input_ids": _ids(), "labels": _ids()}
    items = {**words, "num_items_in_batch": torch.tensor(11)}
    masked = build(Case("bert", "BertForMaskedLM"), 6, 3)
    for model in (gpt2(), llama(), masked):
        assert OwnLoss.of(model).reduction({**words, "position_ids": _ids(), "label_ids": None}, 4) == "tokens"
    for model in (gpt2(), llama()):
        assert OwnLoss.of(model).reduction(items, 4) == "sum"
    assert OwnLoss.of(masked).reduction(items, 4) == "tokens"  # its cross entropy is always a mean
    classes = build(Case("gpt2", "GPT2ForSequenceClassification"), 6, 3)
    assert OwnLoss.of(classes).reduction({**words, "labels": torch.zeros(4)}, 4) == "tokens"
    sparse = build(Case("mixtral", "MixtralForCausalLM"), 6, 3)
    assert OwnLoss.of(sparse).reduction(words, 4) == "tokens"
    questions, sounds = build(Case("bert", "BertForQuestionAnswering"), 6, 3), {"input_values": torch.zeros(4, 400)}
    refused = [
        (questions, _questions(), r"further targets \(start_positions, end_positions\)"),
        (build(Case("bert", "BertForPreTraining"), 6, 3), _pairs(), r"further targets \(next_sentence_label\)"),
        (build(Case("wav2vec2", "Wav2Vec2ForCTC"), 6, 3), {**sounds, "labels": _ids()}, "ctc_loss_reduction: mean"),
        (sparse, {**words, "output_router_logits": True}, "the routers' auxiliary loss"),
        (gpt2(), {**words, "labels": [{}]}, "labels is a list, not a tensor"),
    ]
    for model, batch, reason in refused:
        assert OwnLoss.of(model).reduction(batch, 1) == "microbatch"
        with pytest.raises(ConfigError, match=rf"the losses of 4 micro-batches of \w+ cannot be combined: .*{reason}"):
            OwnLoss.of(model).reduction(batch, 4)
    sparse.config.output_router_logits = True
    assert OwnLoss.of(sparse).reduction({**words, "output_router_logits": False}, 4) == "tokens"
    with pytest.raises(ConfigError, match="output_router_logits"):
        OwnLoss.of(sparse).reduction(words, 2)


@pooled(world_size=2)
def test_a_loss_with_several_targets_takes_one_micro_batch() -> None:
    plain, batch = build(Case("bert", "BertForPreTraining"), 6, 3).train(), _pairs()
    piped = autopar.initialize(copy.deepcopy(plain), _config(pp=2, microbatch_size=1))
    for settings in ({}, {"forward_only": True}):
        with raises_everywhere(ConfigError, "further targets", "Use criterion="):
            piped.execute_pipeline(batch, **settings)
    piped.execute_pipeline(batch, forward_only=True, return_loss=False)  # without a loss nothing is wrong
    piped.execute_pipeline(batch, lambda outputs, inputs: outputs.loss, forward_only=True)
    _as_on_one_process(plain, batch, pp=2, microbatch_size=4)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_losses_divided_by_the_number_of_items_add_up() -> None:
    labels = _ids()
    labels[0, 2:] = -100
    batch = {"input_ids": _ids(), "labels": labels, "num_items_in_batch": torch.tensor(40)}
    for tp, pp in ((1, 2), (2, 1)):
        _as_on_one_process(gpt2().train(), batch, pp=pp, tp=tp, microbatch_size=1)


def _ragged(empty: bool) -> dict[str, Any]:
    (batch,) = language_batches(131, count=1, batch=4)
    batch["labels"][1, 2:] = -100
    batch["labels"][2:, 1 if empty else 3 :] = -100  # the second replica: none at all, or few
    return batch


def _ragged_replicas(pp: int) -> None:
    for empty, size in ((False, 1), (False, 2), (True, 1)):
        batch = _ragged(empty)
        plain = gpt2().train()
        plain(**batch).loss.backward()
        piped = autopar.initialize(copy.deepcopy(plain), _config(pp=pp, microbatch_size=size))
        dp = piped.mpu.dp
        mine = {name: tensor.chunk(2)[dp.rank] for name, tensor in batch.items()}
        out = piped.execute_pipeline(mine, broadcast_loss=True)
        _compare(piped, plain)
        if dp.rank == 0 or not empty:
            close(out.loss, plain(**mine).loss.detach(), "the loss is this replica's")
        piped.zero_grad()
        if not empty:  # by request, the mean of the replicas' means
            plain.zero_grad()
            for rank in range(2):
                rows = split({name: tensor.chunk(2)[rank] for name, tensor in batch.items()}, 2, size, None)
                for row in rows:
                    (plain(**row).loss / len(rows) / 2).backward()
            pipeline = pipeline_of(piped)
            pipeline.config = dataclasses.replace(pipeline.config, loss_reduction="microbatch")
            piped.execute_pipeline(mine)
            _compare(piped, plain)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_replicas_with_unlike_padding() -> None:
    _ragged_replicas(pp=1)


@pytest.mark.tier("test")
@pooled(world_size=4)
def test_replicas_with_unlike_padding_in_stages() -> None:
    _ragged_replicas(pp=2)


@pytest.mark.tier("test")
@pooled(world_size=6)
def test_tied_weights_stay_the_same_over_three_replicas() -> None:
    """The stages' sizes are unlike, so that in common buffers other parts of the embedding would be added first."""
    config = _config(pp=2, microbatch_size=1, layers_per_stage=[3, 1])
    piped = autopar.initialize(gpt2(n_layer=4, vocab_size=2000), config)
    optimizer = torch.optim.SGD(piped.parameters(), lr=0.1)
    for batch in language_batches(131, count=2, batch=6):
        optimizer.zero_grad()
        piped.execute_pipeline({name: tensor.chunk(3)[piped.mpu.dp.rank] for name, tensor in batch.items()})
        optimizer.step()
    for of in (lambda p: p.grad, lambda p: p.data):
        assert "transformer.wte.weight" in whole_tensors(piped, of)  # asserts that stages hold the same bits


@pooled(world_size=2)
@told_at_once
def test_a_failed_step_leaves_earlier_gradients_of_tied_weights() -> None:
    def fail(outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
        if len(seen) == 1:
            raise ValueError("the second micro-batch")
        seen.append(outputs)
        return outputs.loss

    seen: list[Any] = []
    piped = autopar.initialize(gpt2(), _config(pp=2, microbatch_size=1))
    (batch,) = language_batches(131, count=1, batch=3)
    piped.execute_pipeline(batch)
    ((_, tied),) = pipeline_of(piped).tied._sets
    earlier = [parameter.grad.clone() for parameter in tied]
    with pytest.raises((ValueError, autopar.PipelineError)):
        piped.execute_pipeline(batch, fail)
    for parameter, gradient in zip(tied, earlier, strict=True):
        assert torch.equal(parameter.grad, gradient)
    dist.barrier()
    piped.zero_grad()
    plain = gpt2().train()
    plain(**batch).loss.backward()
    piped.execute_pipeline(batch)
    _compare(piped, plain)


def test_positions_of_several_kinds_are_cut_by_samples() -> None:
    for samples in (3, 4):
        positions = torch.arange(3 * samples * 5).view(3, samples, 5)
        batch = {"input_ids": _ids(samples), "position_ids": positions}
        parts = split(batch, samples, 1, None)
        assert [part["position_ids"].shape for part in parts] == [(3, 1, 5)] * samples
        assert torch.equal(torch.cat([part["position_ids"] for part in parts], dim=1), positions)
    shared = torch.zeros(3, 1, 5)  # the same for all samples
    assert all(p["position_ids"].shape == (3, 1, 5) for p in split({**batch, "position_ids": shared}, 4, 1, None))
    flat = torch.arange(15).view(3, 5)
    parts = split({"input_ids": _ids(3), "position_ids": flat}, 3, 1, None)
    assert torch.equal(torch.cat([part["position_ids"] for part in parts]), flat)


@pytest.mark.parametrize("policy", [{"extends": "llama", "loss": {"Unshifted": "mean"}}, "derive"])
@pooled(world_size=2)
def test_a_class_of_ones_own_says_what_its_loss_is(policy: Any) -> None:
    labels = _ids().clone()
    labels[0, 2:], labels[1, 5:] = -100, -100
    batch = {"input_ids": _ids(), "labels": labels}
    plain = Unshifted(llama().config).train()
    _as_on_one_process(plain, batch, policy, pp=2, num_microbatches=4)
    unknown = autopar.initialize(plain, _config(pp=2, num_microbatches=4))
    with pytest.raises(ConfigError, match=r"name it in a policy: loss: {Unshifted: mean}\."):
        unknown.execute_pipeline(batch)


@pooled(world_size=2)
def test_replicas_of_an_unknown_loss_are_averaged_alike_with_a_warning() -> None:
    labels = _ids().clone()
    labels[:2, 3:] = -100
    mine = slice(0, 2) if dist.get_rank() == 0 else slice(2, 4)
    plain = Unshifted(llama().config).train()
    plain(_ids(), labels=labels).loss.backward()
    for policy in (None, {"extends": "llama", "loss": {"Unshifted": "mean"}}):
        model = autopar.initialize(copy.deepcopy(plain), {}, policy=policy)
        model.zero_grad()
        batch = {"input_ids": _ids()[mine], "labels": labels[mine]}
        words = r"gradients of replicas with 6 and 14 labels are averaged\n  equally, as in DistributedDataParallel"
        for call in range(2):  # once
            with pytest.warns(ShardWarning, match=words) if policy is None and call == 0 else nullcontext():
                model.execute_pipeline(batch)
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        same = all(torch.allclose(p.grad / 2, q.grad, rtol=1e-4, atol=1e-6) for p, q in pairs)
        assert same == (policy is not None)


@pooled(world_size=2)
def test_a_model_in_one_piece_takes_micro_batches_after_steps_an_evaluation_and_a_draw_on_one_rank() -> None:
    plain = llama().train()
    model = autopar.initialize(copy.deepcopy(plain), _config(tp=2, num_microbatches=3))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (plain, model)]
    labels = _ids(5).clone()
    labels[0, 2:], labels[3, 5:] = -100, -100
    batch = {"input_ids": _ids(5), "labels": labels}
    for _ in range(3):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            each(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.eval()(**batch)
    model.train()
    if dist.get_rank() == 1:
        torch.rand(3)
    for _ in range(2):  # gradients accumulate
        loss = model.execute_pipeline(batch).loss
        plain(**batch).loss.backward()
    close(loss, plain(**batch).loss.detach(), "loss")
    same_gradients(model, plain)
