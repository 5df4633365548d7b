"""Hooks on the layers of a loaded model: the first use of one by itself is that of the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from autopar.storage.takeover import Takeover

__all__ = ["wait_in_layers"]


def wait_in_layers(model: nn.Module, parameters: Iterable[nn.Parameter], takeover: Takeover) -> None:
    """Let layers with these weights wait for ``takeover`` before they run, as long as it is not done.

    Hugging Face models have a hook of their own, which tells other ranks if a file has changed.
    """
    weights = {id(parameter) for parameter in parameters}
    wait = _Wait(takeover)
    for module in model.modules():
        alone = module is model or isinstance(module, PreTrainedModel)
        if not alone and any(id(parameter) in weights for parameter in module._parameters.values()):
            wait.handles.append(module.register_forward_pre_hook(wait))
    takeover.at_end = wait.remove


class _Wait:
    def __init__(self, takeover: Takeover) -> None:
        self.takeover = takeover
        self.handles: list[RemovableHandle] = []

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            self._while_traced()
        else:
            self.takeover.wait()

    @torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
    def _while_traced(self) -> None:
        """Wait while a graph is traced, and not each time that it runs."""
        self.takeover.wait(traced=True)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def __deepcopy__(self, memo: dict[int, Any]) -> _Wait:
        return self
