"""The user's own loss through stages: a mean over something else than labels, penalties on weights, other results."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import autopar
from autopar.errors import ConfigError, PipelineError
from tests.compare import same_gradients
from tests.harness.worlds import pooled
from tests.parity import close, language_batches
from tests.small import llama

WEIGHTS = torch.linspace(0.2, 3.0, 131)


def shifted(inputs: dict[str, Any]) -> torch.Tensor:
    return inputs["labels"][:, 1:]


def weighted(outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """The mean of a cross entropy with class weights."""
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), shifted(inputs).flatten(), weight=WEIGHTS)


def weight_of_labels(inputs: dict[str, Any]) -> torch.Tensor:
    labels = shifted(inputs)
    return WEIGHTS[labels[labels != -100]].sum()


def config(**sizes: int) -> dict[str, Any]:
    pipeline = {"num_microbatches": 3, "timeout": 20}
    return {"model_parallelism": {"pipeline_parallel_size": 2, **sizes}, "pipeline": pipeline}


def whole(batches: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def _class_weights(tp: int, dp: int) -> None:
    plain = llama().train()
    model = autopar.initialize(copy.deepcopy(plain), config(tensor_parallel_size=tp))
    replicas = language_batches(131, count=dp, batch=3)
    for _ in range(2):
        batch = whole(replicas)
        weighted(plain(**batch), batch).backward()
        own = replicas[model.mpu.dp.rank]
        loss = model.execute_pipeline(own, criterion=weighted, count=weight_of_labels, broadcast_loss=True).loss
        close(loss, weighted(plain(**own), own), "loss of this replica")
    same_gradients(model, plain, 2e-5)
    model.mpu.destroy()


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_class_weights_are_those_of_the_whole_batch() -> None:
    _class_weights(1, 1)


@pooled(world_size=4)
def test_class_weights_with_tensor_parallelism_and_with_replicas() -> None:
    _class_weights(2, 1)
    _class_weights(1, 2)


def refused(model: Any, criterion: Any, words: str) -> None:
    (batch,) = language_batches(131, count=1, batch=3)
    with pytest.raises((ConfigError, PipelineError), match=words):
        model.execute_pipeline(batch, criterion=criterion)
    dist.barrier()
    model.zero_grad()


class _SumOfSquares(torch.autograd.Function):
    """A user's own derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient * ctx.saved_tensors[0]


@pooled(world_size=2)
def test_a_penalty_on_all_weights_is_refused_and_one_on_the_head_is_not() -> None:
    plain = llama().train()
    model = autopar.initialize(copy.deepcopy(plain), config())
    (batch,) = language_batches(131, count=1, batch=3)

    def penalty(outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
        return outputs.loss + 0.1 * sum(p.square().sum() for p in model.parameters())

    def of_a_list(outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
        return outputs.loss + torch.stack(torch._foreach_norm(list(model.parameters()))).sum()

    words = r"weights of blocks, got 9 .first model.layers.1.input_layernorm.weight.: the last stage"
    calls = [0]

    def of_the_second_microbatch(outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
        calls[0] += 1
        return penalty(outputs, inputs) if calls[0] > 1 else outputs.loss

    def of_a_function(outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
        return outputs.loss + sum(_SumOfSquares.apply(p) for p in model.parameters())

    for criterion in (penalty, penalty, of_a_list, of_the_second_microbatch, of_a_function):
        refused(model, criterion, words)

    def scaled(by: float) -> Any:
        """The same code each time, of which one reads and the other does not."""

        def criterion(outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
            return outputs.loss + (by * sum(p.square().sum() for p in model.parameters()) if by else 0.0)

        return criterion

    model.execute_pipeline(batch, criterion=scaled(0.0))
    model.zero_grad()
    refused(model, scaled(0.1), words)

    def of_the_head(of: Any) -> Any:
        def criterion(outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
            shown = [p.detach().norm().item() for p in of.parameters()] + [p.norm().item() for p in of.parameters()]
            assert min(shown) >= 0
            return outputs.loss + 0.1 * of.lm_head.weight.square().sum()

        return criterion

    for _ in range(2):
        model.execute_pipeline(batch, criterion=of_the_head(model))
        of_the_head(plain)(plain(**batch), batch).backward()
    same_gradients(model, plain, 2e-5)
    pair = "criterion must return one tensor, the mean over a micro-batch; got tuple.*class weights.*count="
    refused(model, lambda outputs, inputs: (outputs.loss, 3), r"(?s)" + pair)
    model.mpu.destroy()
