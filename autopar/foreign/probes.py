"""Does this release of the libraries have the private names that autopar reads? ``python -m autopar.foreign.probes``.

Each probe uses one reader of this package on something small. It fails when a library has renamed or changed what it
reads, and says what would stop working.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch._C._distributed_c10d import FakeWork
from torch.distributed import distributed_c10d
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import _api, placement_types
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.core_model_loading import revert_weight_conversion

from autopar.foreign import c10d, fake_world, tensors, transformers


class Probe(NamedTuple):
    """One private name.

    Attributes:
        check: returns whether it is what it was.
        lost: what stops working without it.
    """

    check: Callable[[], bool]
    lost: str


def _held() -> bool:
    module = nn.Sequential(nn.BatchNorm1d(2))
    norm = tensors.own_modules(module)["0"]
    named = set(tensors.own_parameters(norm)) == {"weight", "bias"}
    return named and "running_mean" in tensors.own_buffers(norm) and set(vars(module)) >= tensors.HELD


def _hooks() -> bool:
    module = nn.Linear(1, 1)
    module.register_forward_hook(print, always_call=True)
    module.register_forward_pre_hook(print, with_kwargs=True)
    module.register_full_backward_hook(print)
    seen = [len(tensors.hooks_of(module, kind)) for kind in ("forward", "forward_pre", "backward", "backward_pre")]
    tensors.remove_forward_hooks(module, type(print))
    return seen == [1, 1, 1, 0] and not list(tensors.forward_hooks(module))


def _called_instead() -> bool:
    module, seen = nn.Linear(1, 1), list[int]()
    module.register_forward_hook(lambda *_: seen.append(0))
    with tensors.called_instead([(module, lambda call, x: x + 1 + 0 * call(x))]):
        inside = bool(module(torch.ones(1)) == 2)
    module(torch.ones(1))
    return inside and seen == [0, 0]


def _state_dict_hooks() -> bool:
    module = nn.Linear(1, 1)
    tensors.add_state_dict_hook(module, lambda *_: None)
    saved, loaded = tensors.state_dict_hooks(module)
    return len(saved) == 1 and not loaded and not tensors.unsaved_buffers(module)


def _versions() -> bool:
    x = torch.zeros(2)
    view, before = x[:1], tensors.version_of(x)
    view.add_(1)
    x.data.add_(1)
    return tensors.version_of(x) == before + 1 and tensors.base_of(view) is x and tensors.base_of(x) is None


def _places() -> bool:
    one, other = torch.zeros(1), torch.ones(1)
    key = tensors.storage_id(one.untyped_storage())
    tensors.swap_implementation(one, other)
    return bool(one == 1) and tensors.storage_id(other.untyped_storage()) == key


def _subclass() -> bool:
    class Empty(torch.Tensor):
        __torch_function__ = tensors.disabled_torch_function  # type: ignore[assignment]

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
            return torch.ones(1)

    made: Any = tensors.wrapper_subclass(Empty, (2, 3), dtype=torch.float32, device=torch.device("cpu"))
    with tensors.no_overrides():
        return tuple(made.shape) == (2, 3) and bool(made.neg() == 1)


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        if tensors.in_backward() and tensors.current_backward() >= 0:
            tensors.after_backward(lambda: _RAN.append(1))
        return 2 * gradient


_RAN: list[int] = []


def _backward() -> bool:
    _RAN.clear()
    x = torch.ones(1, requires_grad=True)
    tensors.run_backward(_Double.apply(x).sum())
    return _RAN == [1] and not tensors.in_backward() and float(x.grad) == 2  # type: ignore[arg-type]


def _nodes() -> bool:
    before = tensors.next_sequence_number()
    node = _Double.apply(torch.ones(3, requires_grad=True)).grad_fn
    known = tensors.forward_class(node) is _Double and tensors.sequence_number(node) >= before
    return known and tuple(tensors.input_metadata(node)[0].shape) == (3,)


def _transforms() -> bool:
    seen: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(tensors.is_functorch_active())
        return x

    torch.func.vmap(look)(torch.ones(2))
    with torch.autograd.forward_ad.dual_level():
        seen.append(tensors.is_transformed())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        seen.append(getattr(torch.autograd.profiler, tensors.PROFILER_RUNS))
    return seen == [True] * 3 and not tensors.is_transformed()


def _modes() -> bool:
    class Sees(tensors.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            inside.append(len(tensors.dispatch_modes()))
            if tensors.schema_of(func).name == "aten::add_" and tensors.schema_of(func).is_mutable:
                inside.append(str(tensors.operator_of(func)))
            return func(*args, **(kwargs or {}))

    inside: list[Any] = []
    x = torch.zeros(1)
    with Sees():
        alone = len(tensors.dispatch_modes())
        x.add_(1)
        with tensors.no_dispatch_modes():
            x.add_(1)
    return alone == 1 and inside == [0, "aten.add_"] and tensors.function_modes() == []


def _operators() -> bool:
    scores = torch.full((1, 2), float("-inf"))
    one = torch.ones(1)
    return (
        bool((tensors.safe_softmax(scores, -1) == 0).all())
        and tensors.ITEM(one) == 1
        and tensors.TO_COPY.default(one, dtype=torch.float64).dtype == torch.float64
        and tensors.UNSAFE_VIEW(one, [1, 1]).shape == (1, 1)
        and tensors.schema_of(tensors.GROUPED_MM).name == "aten::_grouped_mm"
    )


def _calls() -> bool:
    class Looks(nn.Module):
        def forward(self) -> bool:
            return sys._getframe(1).f_code is tensors.CALL or sys._getframe(2).f_code is tensors.CALL

    return bool(Looks()())


class _Own(nn.Parameter):
    pass


def _foreach() -> bool:
    tensors.let_foreach_take([_Own])
    return [known.pop() for known in tensors.FOREACH_TYPES] == [_Own, _Own]


def _dtensors() -> bool:
    table, drawn = tensors.operators_of_dtensors(), {tensors.name_of_operator(each) for each in tensors.RANDOM}
    return torch.ops.aten.is_same_size.default in table and drawn >= {"normal_", "randn_like"}


def _assertion() -> bool:
    try:
        tensors.assert_soon(torch.tensor(False), "said")
    except RuntimeError as error:
        return "said" in str(error)
    return False


def _convolution() -> bool:
    layer, x = nn.Conv1d(1, 2, 3), torch.randn(1, 1, 8)
    kinds = isinstance(layer, tensors.Convolution) and issubclass(nn.BatchNorm2d, tensors.BatchNorm)
    same = torch.equal(tensors.convolve(layer, x, layer.weight, layer.bias), F.conv1d(x, layer.weight, layer.bias))
    return kinds and same and issubclass(nn.Dropout2d, tensors.Dropout)


def _trees() -> bool:
    paths, _ = tensors.tree_flatten_with_path({"a": [1, 2]})
    named = [tensors.keystr(path) for path, _ in paths]
    return named == ["['a'][0]", "['a'][1]"] and tensors.tree_leaves([1, (2,)]) == [1, 2]


def _model() -> bool:
    config = GPT2Config(n_layer=1, n_embd=4, n_head=1, vocab_size=8, bos_token_id=0, eos_token_id=0)
    model = transformers.from_config(GPT2LMHeadModel, config, attn_implementation="eager")
    transformers.initialize_weights(model, model.transformer.ln_f)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    blocks = transformers.unsplit_modules(model)
    known = transformers.attention_of(model.config) == "eager" and blocks == {"GPT2Block"}
    fp32 = transformers.fp32_modules(model, strict=True) | transformers.fp32_modules(model, strict=False)
    recomputes = transformers.recompute_function(model.transformer.h[0]) is not None
    return known and recomputes and not fp32 and not transformers.has_own_adapters(model)


def _private_of_models() -> bool:
    names = ("_keys_to_ignore_on_save", "_get_dtype_plan", "_tp_plan")
    reverts = transformers._CONVERSIONS in inspect.getsource(revert_weight_conversion)
    return reverts and all(hasattr(GPT2LMHeadModel, name) for name in names)


def _fsdp() -> bool:
    source = inspect.getsource(FSDPParam) + inspect.getsource(FSDPState)
    names = ("unsharded_accumulated_grad", "_unsharded_param", "all_states", "_root_post_backward_final_callback")
    return all(name in source for name in names) and callable(getattr(FSDPParamGroup, "post_backward", None))


def _muon() -> bool:
    """Compare a first step of Muon, in which the momentum is a share of the gradient, with one of its parts."""
    weight, gradient = torch.randn(6, 4), torch.randn(6, 4)
    matrix = nn.Parameter(weight.clone())
    matrix.grad = gradient
    made = torch.optim.Muon([matrix], lr=0.1, nesterov=False)
    made.step()
    (group,) = made.param_groups
    kept, rate = tensors.muon_rates(group, [6, 4])
    update = tensors.newton_schulz(gradient.lerp(torch.zeros(6, 4), group["momentum"]), group)
    return torch.allclose(matrix, weight * kept - rate * update, atol=1e-3) and rate > group["lr"]


def _groups() -> bool:
    named = (c10d.default_group, c10d.default_store, c10d.PrefixStore)
    left_out = "_ddp_params_and_buffers_to_ignore" in inspect.getsource(DistributedDataParallel.__init__)
    return all(map(callable, named)) and not c10d.is_flat_parameter(torch.ones(1)) and left_out


def _operators_of_collectives() -> bool:
    tables = {"c10d": c10d.OPERATORS, "_c10d_functional": c10d.FUNCTIONAL}
    rows = [(getattr(getattr(torch.ops, kind), name), row) for kind in tables for name, row in tables[kind].items()]
    places = all("group" in operator.default._schema.arguments[row.group].name for operator, row in rows)
    reduced = [operator.default._schema.arguments[row.reduction] for operator, row in rows if row.reduction >= 0]
    places = places and all("op" in argument.name for argument in reduced)
    by_name = callable(getattr(distributed_c10d, "_resolve_process_group", None))
    given = [*inspect.signature(distributed_c10d._new_group_with_tag).parameters]
    made = given[:2] == ["ranks", "timeout"] and {"backend", "backend_options", "group_desc"} <= {*given}
    held = hasattr(distributed_c10d._world, "pg_map") and hasattr(distributed_c10d.ProcessGroup, "_register_backend")
    held = held and callable(getattr(ShardingPropagator, fake_world.SIZES_OF_DTENSORS, None))
    sent = all(hasattr(place, "mesh_broadcast") for place in (_api, placement_types)) and "wait" in vars(FakeWork)
    places = places and by_name and made and held and sent
    known = c10d.operator_of(torch.ops.c10d.send.default) is not None and c10d.done([]) is not None
    checked = callable(getattr(FSDPParamGroup, "_validate_no_meta_params", None)) and not hasattr(torch, "meta")
    stored = all(f"{name}(" in inspect.getsource(FSDPParam) for name in ("alloc_storage", "free_storage"))
    compared = "_verify_param_shape_across_processes(" in inspect.getsource(DistributedDataParallel)
    return places and known and checked and stored and compared and "fake" in torch.distributed.Backend.backend_list


def _batching() -> bool:
    """Look for the places at which continuous batching asks an object about its ranks."""
    from transformers.generation.continuous_batching import cache, continuous_api

    asked = inspect.getsource(continuous_api) + inspect.getsource(cache)
    kept = "self.model._cached_continuous_batching_manager = self" in asked
    heads = "find_num_key_value_heads(config)" in asked and "self.model.config.get_text_config()" in asked
    return transformers.takes_ranks() and kept and heads and transformers.kept_manager(nn.Module()) is None


PROBES: dict[str, Probe] = {
    "parameters, buffers and children of a module": Probe(_held, "layers are swapped and sharded"),
    "hooks around a forward": Probe(_hooks, "deparallelize, meta copies, warnings of hooks"),
    "gradients that FSDP2 accumulates": Probe(_fsdp, "zero.stage 2 and 3 through pipeline stages"),
    "hooks of a state dict": Probe(_state_dict_hooks, "marks of partial state dicts, loading whole ones"),
    "versions and bases of tensors": Probe(_versions, "gradients that are computed once, checks of weights"),
    "two tensors that change places": Probe(_places, "lazy_init, parameters that keep their identity"),
    "tensors without memory": Probe(_subclass, "logits that stay sharded, lazy conversions"),
    "the backward pass that runs": Probe(_backward, "context parallelism, recomputation"),
    "nodes of the graph": Probe(_nodes, "zero-bubble schedules, the planner's measurements"),
    "transforms, forward mode, profilers": Probe(_transforms, "refusals of torch.func, names in profiles"),
    "dispatch modes": Probe(_modes, "dry runs, verify, selective checkpointing"),
    "operators without a public name": Probe(_operators, "dry runs, verify's dropout, resharding"),
    "what a call of a module runs": Probe(_called_instead, "expert_parallel_size of experts that are modules"),
    "the call of a module": Probe(_calls, "warnings of shards that are read"),
    "classes that foreach takes": Probe(_foreach, "optimizers that step many shards at once"),
    "operators of DTensors": Probe(_dtensors, "numbers that are read of parameters under zero.stage 2 and 3"),
    "assertions on the device": Probe(_assertion, "errors of ids outside of the vocabulary"),
    "convolutions": Probe(_convolution, "sharded convolutions and batch norms"),
    "nested containers": Probe(_trees, "micro-batches, names of arguments in errors"),
    "what a model of transformers says of itself": Probe(_model, "initialize of every model"),
    "private attributes of models": Probe(_private_of_models, "saved form, dtypes, imported plans"),
    "parts of a step of Muon": Probe(_muon, "optimizer.whole=sharded, optimizer.split_fused"),
    "operators of collectives": Probe(_operators_of_collectives, "traces, rehearsals"),
    "ranks in continuous batching": Probe(_batching, "generate_batch with tensor parallelism"),
    "groups and stores": Probe(_groups, "collectives, deadlines, agreement between ranks"),
}
"""Name -> what reads it."""


def failures() -> Iterator[str]:
    """Yield a line for each probe that fails."""
    for name, probe in PROBES.items():
        try:
            right = probe.check()
            reason = "it is something else now"
        except Exception as error:  # any: that is what is asked
            right, reason = False, f"{type(error).__name__}: {error}"
        if not right:
            yield f"{name}: {reason}\n  stops working: {probe.lost}"


if __name__ == "__main__":
    found = list(failures())
    for line in found:
        print(line)
    sys.exit(f"{len(found)} of {len(PROBES)} private names have changed" if found else 0)
