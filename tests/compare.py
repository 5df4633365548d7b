"""Weights and gradients of a parallel model against the plain model's."""

from torch import nn

from tests.parity import TOLERANCE, close, whole
from tests.pipeline_parallel.oracle import whole_tensors


def same_gradients(
    model: nn.Module, plain: nn.Module, tolerance: float = TOLERANCE, when: str = "", scaled: bool = False
) -> None:
    """Every parameter's gradient, put together from all shards and stages; ``when`` is for the message."""
    gradients = (whole if model.mpu.pp.size == 1 else whole_tensors)(model, lambda parameter: parameter.grad)
    for name, parameter in plain.named_parameters():
        largest = max(1.0, float(parameter.grad.abs().max())) if scaled else 1.0
        close(gradients[name] / largest, parameter.grad / largest, f"gradient of {name} {when}", tolerance)


def same_weights(model: nn.Module, plain: nn.Module, tolerance: float = TOLERANCE, when: str = "") -> None:
    """Every weight, put together from all shards and stages; ``when`` is for the message."""
    weights = (whole if model.mpu.pp.size == 1 else whole_tensors)(model, lambda parameter: parameter.data)
    for name, parameter in plain.named_parameters():
        close(weights[name], parameter.data, f"{name} {when}", tolerance)
