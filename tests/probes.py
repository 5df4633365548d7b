"""Check that the libraries have the private names that autopar reads: ``python -m tests.probes``.

Names that a module of :mod:`autopar.compat` or :mod:`autopar.tools.compat` imports, or reads when it is imported, need
no probe. The others are listed here by what has them. Functions that use some of them are tried on something small.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C._distributed_c10d import FakeWork
from torch.autograd import forward_ad
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor, _api, placement_types
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GradientCheckpointingLayer

from autopar.compat import c10d, tensors, transformers
from autopar.tools.compat import fake_world, operators


class Probe(NamedTuple):
    """Private names that belong together.

    Attributes:
        check: a function that returns whether the library still has them.
        lost: the features that stop working without them.
    """

    check: Callable[[], bool]
    lost: str


def _gpt2() -> Any:
    config = GPT2Config(n_layer=1, n_embd=4, n_head=1, vocab_size=8, bos_token_id=0, eos_token_id=0)
    return transformers.from_config(GPT2LMHeadModel, config, attn_implementation="eager")


def _have(holder: Any, names: str) -> Callable[[], bool]:
    """Return a check of attributes: of an object, or of what a function returns."""
    made = inspect.isfunction(holder)
    return lambda: all(hasattr(holder() if made else holder, name) for name in names.split())


def _written(holder: Any, *texts: str) -> Callable[[], bool]:
    """Return a check of texts in the source of a function or class."""
    return lambda: all(text in inspect.getsource(holder) for text in texts)


def _versions() -> bool:
    x = torch.zeros(2)
    alone, other = tensors.shares_memory(x), x.detach()
    if alone or not tensors.shares_memory(other):
        return False
    view, before = x[:1], tensors.version_of(x)
    view.add_(1)
    x.data.add_(1)
    return tensors.version_of(x) == before + 1 and tensors.base_of(view) is x and tensors.base_of(x) is None


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


def _graph() -> bool:
    _RAN.clear()
    x, before = torch.ones(1, requires_grad=True), tensors.next_sequence_number()
    node = _Double.apply(x).grad_fn
    known = tensors.forward_class(node) is _Double and tensors.sequence_number(node) >= before
    tensors.run_backward(_Double.apply(x).sum())
    ran = _RAN == [1] and not tensors.in_backward() and float(x.grad) == 2  # type: ignore[arg-type]
    return known and ran and tuple(tensors.input_metadata(node)[0].shape) == (1,)


def _muon_step() -> bool:
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


def _operators_of_collectives() -> bool:
    kinds = ("c10d", "_c10d_functional")
    rows = [(getattr(getattr(torch.ops, k), name), row) for k in kinds for name, row in operators.TABLES[k].items()]
    places = all("group" in operator.default._schema.arguments[row.group].name for operator, row in rows)
    reduced = [operator.default._schema.arguments[row.reduction] for operator, row in rows if row.reduction >= 0]
    given = [*inspect.signature(distributed_c10d._new_group_with_tag).parameters]
    made = given[:2] == ["ranks", "timeout"] and {"backend", "backend_options", "group_desc"} <= {*given}
    sent = all(hasattr(place, "mesh_broadcast") for place in (_api, placement_types)) and "wait" in vars(FakeWork)
    return places and all("op" in argument.name for argument in reduced) and made and sent


def _batching() -> bool:
    """Look for the places at which continuous batching asks an object about its ranks."""
    from transformers.generation.continuous_batching import cache, continuous_api, distributed

    helper = "tp_all_reduce_state tp_all_reduce_min are_kv_heads_tp_ed destroy_cpu_comm_group"
    manager = "_create_batch_processor _generation_step warmup start stop pause is_running"
    kinds = (distributed.DistributedHelper, helper), (continuous_api.ContinuousBatchingManager, manager)
    there = all(hasattr(kind, name) for kind, names in kinds for name in names.split())
    kept = _written(continuous_api, "self.model._cached_continuous_batching_manager = self")()
    asked = inspect.getsource(continuous_api) + inspect.getsource(cache)
    heads = "find_num_key_value_heads(config)" in asked and "self.model.config.get_text_config()" in asked
    return there and kept and heads


_OF_MODULES = (
    "_parameters _buffers _modules _non_persistent_buffers_set _call_impl _forward_hooks _forward_pre_hooks "
    "_forward_pre_hooks_with_kwargs _forward_hooks_with_kwargs _forward_hooks_always_called _state_dict_hooks "
    "_load_state_dict_pre_hooks _register_state_dict_hook _compiled_call_impl"
)
_OF_MODELS = (
    "_init_weights _keys_to_ignore_on_save _keep_in_fp32_modules _keep_in_fp32_modules_strict _get_dtype_plan "
    "_no_split_modules _tp_plan _from_config"
)
_OF_FSDP = (
    *("unsharded_accumulated_grad", "_unsharded_param", "all_states", "_root_post_backward_final_callback"),
    *("alloc_storage(", "free_storage(", "def reset_sharded_param("),
)

PROBES: dict[str, Probe] = {
    "attributes of modules": Probe(_have(nn.Module(), _OF_MODULES), "layers are swapped and sharded"),
    "convolutions": Probe(_have(nn.Conv1d, "_conv_forward"), "sharded convolutions"),
    "versions, bases and memory of tensors": Probe(_versions, "gradients that are computed once, checks of weights"),
    "storages": Probe(_have(torch.zeros(1).untyped_storage(), "_cdata"), "lazy_init, stages, the planner"),
    "steps of a scheduler": Probe(_written(torch.optim.lr_scheduler.LRScheduler, "_step_count"), "accelerate"),
    "the graph and its backward": Probe(_graph, "zero-bubble schedules, context parallelism, recomputation"),
    "transforms of torch.func": Probe(_have(forward_ad, "_current_level"), "refusals of torch.func"),
    "profilers": Probe(_have(torch.autograd.profiler, tensors.PROFILER_RUNS), "names in profiles"),
    "operators of DTensors": Probe(
        lambda: torch.ops.aten.is_same_size.default in DTensor._op_dispatcher._custom_op_handlers,
        "numbers that are read of parameters under zero.stage 2 and 3",
    ),
    "the attention of a config": Probe(lambda: transformers.attention_of(_gpt2().config) == "eager", "all models"),
    "private attributes of models": Probe(_have(_gpt2, _OF_MODELS), "saved form, dtypes, imported plans"),
    "recomputed blocks": Probe(
        _written(GradientCheckpointingLayer, transformers.RECOMPUTE), "cpu_checkpointing, selective checkpointing"
    ),
    "conversions of weights": Probe(
        _written(revert_weight_conversion, transformers._CONVERSIONS), "saving what was dequantized"
    ),
    "ranks in continuous batching": Probe(_batching, "generate_batch with tensor parallelism"),
    "a step of Muon": Probe(_muon_step, "optimizer.full_matrix=sharded, optimizer.split_fused"),
    "FSDP2's parameters": Probe(
        lambda: all(text in inspect.getsource(FSDPParam) + inspect.getsource(FSDPState) for text in _OF_FSDP),
        "zero.stage 2 and 3",
    ),
    "FSDP2's groups": Probe(_have(FSDPParamGroup, "post_backward _validate_no_meta_params"), "zero.stage 2 and 3"),
    "FSDP2's modules": Probe(_have(FSDPModule, "_get_fsdp_state"), "zero.stage 2 and 3"),
    "parameters that DDP leaves out": Probe(
        _written(DistributedDataParallel, c10d._LEFT_OUT, "_verify_param_shape_across_processes("),
        "experts, rehearsals",
    ),
    "process groups": Probe(
        _have(torch.distributed.ProcessGroup, "_get_backend _device_types _register_backend"), "deadlines"
    ),
    "the table of groups": Probe(_have(distributed_c10d._world, "pg_map group_count"), "traces, rehearsals"),
    "operators of collectives": Probe(_operators_of_collectives, "traces, rehearsals"),
    "sizes of DTensors": Probe(_have(ShardingPropagator, fake_world.SIZES_OF_DTENSORS), "rehearsals with FSDP2"),
    "shards of DTensors": Probe(_have(ShardingPropagator, fake_world.SHARDS_OF_DTENSORS), "rehearsals with FSDP2"),
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
