"""Tiny models that isolate one rule each: two residual blocks of one kind, and nothing around them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from autopar.distributed.axis import Axis
from autopar.dry_run.tensor_parallel import check_plan
from autopar.plan.make_plan import make_plan
from autopar.plan.plan import Plan
from autopar.policy.load import read_user_policy
from autopar.tensor_parallel.parallelize import apply
from autopar.tensor_parallel.regions import Region

REFUSED = yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text())


class ToyConfig(PretrainedConfig):
    """The counts that policies of toys read."""

    model_type = "toy"

    def __init__(self, hidden_size: int = 6, heads: int = 4, groups: int = 2, ffn: int = 5, **more: Any) -> None:
        super().__init__(**more)
        self.hidden_size, self.heads, self.groups, self.ffn = hidden_size, heads, groups, ffn


class Toy(PreTrainedModel):
    """``x + block(x)``, twice: gradients of the first block show what the second hands back."""

    config_class = ToyConfig
    base_model_prefix = "model"
    main_input_name = "inputs_embeds"

    def __init__(self, config: ToyConfig, block: Callable[[ToyConfig], nn.Module]) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(block(config) for _ in range(2))

    def forward(self, inputs_embeds: torch.Tensor) -> BaseModelOutput:
        for layer in self.layers:
            inputs_embeds = inputs_embeds + layer(inputs_embeds)
        return BaseModelOutput(last_hidden_state=inputs_embeds)


def filled(model: nn.Module, seed: int = 0) -> Any:
    """Every parameter at random, norms and scales around one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.copy_(values + 1 if "norm" in name else values)
    return model


def toy(block: Callable[[ToyConfig], nn.Module], **counts: Any) -> Any:
    return filled(Toy(ToyConfig(**counts), block))


def batches(hidden: int = 6, count: int = 2) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    return [{"inputs_embeds": torch.randn(2, 5, hidden, generator=generator)} for _ in range(count)]


def toy_policy(units: dict[str, Any], modules: dict[str, Any], **blocks: Any) -> dict[str, Any]:
    """A policy for toys; ``blocks`` are further sections of ``blocks``."""
    return {"match": {"model_type": "toy"}, "units": units, "blocks": {"path": "layers", "modules": modules, **blocks}}


def checked_plan(model: Any, policy: Any, tp: int = 2, **options: Any) -> Plan:
    """The plan, after its dry run."""
    plan = make_plan(model, read_user_policy(policy), tp, **options)
    assert check_plan(model, "", plan)
    return plan


def share(model: Any, policy: Any, tp: int, rank: int) -> Any:
    """``model`` as the share of one rank; without processes, so only to look at."""
    axis = Axis("tp", None, range(tp), rank)
    apply(model, make_plan(model, read_user_policy(policy), tp), axis, Region(axis))
    return model


class MLP(nn.Module):
    """up -> what stands between -> down."""

    def __init__(self, config: ToyConfig, between: nn.Module | None = None, width: int | None = None) -> None:
        super().__init__()
        width = config.ffn if width is None else width
        self.up = nn.Linear(config.hidden_size, width)
        self.between = between or nn.GELU()
        self.down = nn.Linear(width, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.between(self.up(x)))


MLP_RULES = {"up": {"column": "ffn"}, "down": {"row": "ffn"}}


class Mean(nn.Module):
    """RMSNorm, spelled out; with a gate as in state-space models."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        x = x.float() if gate is None else x.float() * F.silu(gate.float())
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class GroupedMean(nn.Module):
    """RMSNorm over each group of ``group_size`` features."""

    def __init__(self, width: int, group_size: int) -> None:
        super().__init__()
        self.weight, self.group_size = nn.Parameter(torch.ones(width)), group_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.view(*x.shape[:-1], x.shape[-1] // self.group_size, self.group_size)
        parts = parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * parts.view(x.shape)
