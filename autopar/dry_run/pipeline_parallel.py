"""Find the tensors that each block reads, and run the planned stages, on the meta device, before the model is split.

A stage holds every tensor that it reads, such as relative positions that one embedding makes for all layers, or an
image encoder that every layer reads. From earlier blocks, a block may read only the output of the previous block. The
policy does not list these reads. A forward with the graph detached after every block shows them. It takes about 50 ms
and no memory; a model that does not run on the meta device runs once with its weights, on five tokens.

The graph contains only the paths of gradients. So all stages also run one after the other in this process, and every
operation is tracked: on integers and masks, and on values that a model collects outside its blocks.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from transformers import PreTrainedModel

from autopar.compat.tensors import own_buffers, tree_map_only
from autopar.distributed.rng import kept
from autopar.dry_run.inputs import meta_copy, sample_inputs
from autopar.errors import UnsupportedModelError, first_line
from autopar.pipeline_parallel.backward import nodes
from autopar.pipeline_parallel.outputs import examine
from autopar.pipeline_parallel.p2p import map_tensors
from autopar.pipeline_parallel.stage_forward import (
    StageContext,
    StageForward,
    mark_boundaries,
    unmark_boundaries,
)
from autopar.plan.stages import Reads, StagePlan, elements_of
from autopar.policy.match import Described, base_of, is_hugging_face_model
from autopar.policy.schema import Policy


def find_reads(model: nn.Module, policy: Policy | Described) -> Reads | None:
    """Trace the reads of the blocks of a model, or of its base model if the head needs values.

    Return None for a plain module, and for a model that does not run on sample inputs.
    """
    described = Described.of(model, policy)
    prefix, inner = described.prefix, described.model
    if not is_hugging_face_model(inner):
        return None
    name, base = base_of(inner)
    for traced, below in ((inner, ""), (base, name)):
        if is_hugging_face_model(traced):
            try:
                inputs = sample_inputs(traced)
            except ValueError:
                continue
            path = ".".join(filter(None, (prefix, below)))
            reads = trace_reads(traced, path, *elements_of(model, described), inputs)
            if reads is not None:
                return reads
    return None


def trace_reads(
    model: PreTrainedModel, prefix: str, elements: tuple[str, ...], encoder: int | None, inputs: Mapping[str, Any]
) -> Reads | None:
    """Run ``model`` once on the meta device, or with its weights if that fails; return None if it does not run.

    Args:
        model: Full model, which stays unchanged.
        prefix: Path of the model in the names of ``elements``, module paths in forward order.
        encoder: Index of the encoder in ``elements``, or None.
        inputs: Small inputs on the meta device.
    """
    start = f"{prefix}." if prefix else ""
    no_cache = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    for copied in (meta_copy(model, gradients=True), model):
        device = next((parameter.device for parameter in copied.parameters()), torch.device("cpu"))
        if copied is model and device.type == "meta":
            return None
        real = tree_map_only(torch.Tensor, functools.partial(torch.zeros_like, device=device), dict(inputs))
        for variant in _variants(copied, real):
            given = {**variant, **no_cache}
            try:
                reads = _trace(copied, start, elements, encoder, given)
            except Exception:  # the inputs may not fit; try the next variant
                continue
            reads.within = start
            reads.dry_run = functools.partial(rehearse_stages, copied, start, inputs=given)
            return reads
    return None


def _trace(
    model: PreTrainedModel, start: str, elements: tuple[str, ...], encoder: int | None, inputs: dict[str, Any]
) -> Reads:
    reading = _Reading({id(p): start + name for name, p in model.named_parameters()}, encoder)
    modules = dict(model.named_modules(remove_duplicate=False))
    hooks = []
    try:
        for place, path in enumerate(elements):
            hooks.append(modules[path.removeprefix(start)].register_forward_hook(reading.after(place)))
        with evaluating(model), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reading.note(len(elements), model(**inputs))
    finally:
        for hook in hooks:
            hook.remove()
    return reading.reads


def _variants(model: PreTrainedModel, inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the inputs; then with a mask of ``input_ids``; then with images of the size in the config.

    Without a mask, some models search the values for padding. Some models do not run on text alone.
    """
    taken, ids = inspect.signature(model.forward).parameters, inputs.get("input_ids")
    yield dict(inputs)
    if ids is not None and ids.ndim == 2 and "attention_mask" in taken:
        yield {"attention_mask": torch.ones_like(ids), **inputs}
    vision, first = getattr(model.config, "vision_config", None), next(iter(inputs.values()))
    size, channels = getattr(vision, "image_size", None), getattr(vision, "num_channels", 3)
    if type(size) is int:
        pixels = torch.zeros(first.shape[0], channels, size, size, dtype=model.dtype, device=first.device)
        yield {**dict.fromkeys((name for name in taken if name.endswith("pixel_values")), pixels), **inputs}


class _Reading:
    def __init__(self, names: dict[int, str], encoder: int | None) -> None:
        self.names, self.encoder = names, encoder
        self.reads = Reads()
        self.outputs: dict[int, int] = {}  # id of a detached output -> place
        self.alive: list[torch.Tensor] = []

    def after(self, place: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            self.reads.order.append(place)
            self.reads.own_backward |= not torch.is_grad_enabled()
            self.note(place, output)
            return map_tensors(output, lambda tensor: self.detach(place, tensor))

        return hook

    def detach(self, place: int, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        leaf = tensor.detach().requires_grad_()
        self.outputs[id(leaf)] = place
        self.alive.append(leaf)
        return leaf.clone()  # models may write into it in place, which a leaf does not allow

    def note(self, place: int, output: Any) -> None:
        tensors: list[torch.Tensor] = []
        map_tensors(output, tensors.append)
        graph = nodes(get_gradient_edge(tensor).node for tensor in tensors if tensor.requires_grad)
        for leaf in (node.variable for node in graph if hasattr(node, "variable")):
            if id(leaf) in self.outputs:
                origin = self.outputs[id(leaf)]
                if origin < place - 1 and origin != self.encoder:
                    self.reads.earlier.setdefault(place, set()).add(origin)
            elif id(leaf) in self.names:
                self.reads.parameters.setdefault(self.names[id(leaf)], set()).add(place)


def rehearse_stages(
    model: PreTrainedModel, start: str, plan: StagePlan, inputs: Mapping[str, Any]
) -> dict[str, set[int]]:
    """Return the tensors that stages read but the plan does not assign to them: name -> stages.

    Args:
        model: Full model, changed while this function runs; its names in the plan start with ``start``.
        inputs: Arguments with which the full model runs.

    Raises:
        UnsupportedModelError: A stage fails, or reads an activation other than the output of the previous block.
    """
    names: dict[int, list[str]] = {}
    by_id: dict[int, torch.Tensor] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        if start + name in plan.tensors:
            names.setdefault(id(tensor), []).append(start + name)
            by_id[id(tensor)] = tensor
    missing: dict[str, set[int]] = {}
    received: Any = None
    context = StageContext(plan)
    with torch.no_grad(), warnings.catch_warnings(), evaluating(model), ExitStack() as stack:
        warnings.simplefilter("ignore")
        stack.callback(unmark_boundaries, model, plan, start)
        mark_boundaries(model, plan, context, start)
        for stage in range(plan.stages):
            context.placeholders = {
                same[0]: by_id[key] for key, same in names.items() if stage not in plan.tensors[same[0]]
            }
            forward = StageForward(context, plan.bounds[stage : stage + 2], stage == plan.stages - 1, received)
            try:
                received, read, _ = examine(forward, model, (), dict(inputs))
            except Exception as error:
                raise UnsupportedModelError(
                    f"{type(model).__name__} cannot be split into pipeline stages: its forward does not run with the "
                    f"blocks {forward.start} to {forward.stop - 1} alone ({type(error).__name__}: "
                    f"{first_line(error)}).\n  It reads more from its blocks than the output of the last block. "
                    "Use pipeline_parallel_size=1."
                ) from error
            for name in read:
                if name not in plan.tensors:
                    raise UnsupportedModelError(
                        f"{type(model).__name__} cannot be split into pipeline stages before block {forward.start}: "
                        f"later code reads {name}, not only the output of the previous block.\n"
                        "  Split it elsewhere (pipeline.layers_per_stage), or use pipeline_parallel_size=1."
                    )
                for same in next(same for same in names.values() if same[0] == name):
                    missing.setdefault(same, set()).add(stage)
    return missing


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode; afterwards restore modes, random generators and attributes.

    Attributes are restored because some forwards change them, such as the capacity of experts.
    """
    training = [module for module in model.modules() if module.training]
    before = [(module, dict(vars(module)), dict(own_buffers(module))) for module in model.modules()]
    try:
        with kept():
            if training:
                model.eval()
            yield
    finally:
        for module, attributes, buffers in before:
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
            own_buffers(module).update(buffers)
        for module in training:
            module.training = True
