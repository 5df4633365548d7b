"""Methods of PEFT on a parallelized model: save adapters in PEFT's files, and reject unsupported methods.

The ranks gather the adapters. Rank 0 lets PEFT write its files into a hidden folder, and moves them into place.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from autopar.checkpoint.arguments import absolute
from autopar.checkpoint.hf_weights import FullWeights
from autopar.checkpoint.methods import PART, num_parameters, refused
from autopar.checkpoint.save import Snapshot, prepare_alike, snapshot
from autopar.checkpoint.staging import fsync
from autopar.checkpoint.state import STATE, State, local_tensors, parameters_elsewhere, state_of
from autopar.checkpoint.state_dict import shard_of
from autopar.compat.peft import is_adapted, is_peft_model, is_tuner, is_wrapper, uses_peft
from autopar.compat.tensors import own_parameters
from autopar.distributed.agree import rank_zero
from autopar.distributed.failures import waiting
from autopar.errors import CheckpointError, ConfigError, listed
from autopar.setup.steps import Given, Parallelized
from autopar.storage.safetensors_io import dtype_of
from autopar.swap import bind, unbind

_OWNER = "adapters"
_PUSH = "Use model.save_pretrained(dir) on every rank, then huggingface_hub.upload_folder on rank 0."
_CARD = "README.md"


def adapter_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the full adapters of a parallelized ``PeftModel`` by parameter names; every rank must iterate over all."""
    yield from Adapters(model, state_of(model), {}).full(local_tensors(model, fsdp=True))


def save_adapters(
    model: nn.Module, directory: Callable[[], object], timeout: float, options: Mapping[str, Any]
) -> None:
    """Write ``adapter_model.safetensors`` and ``adapter_config.json`` of each adapter; every rank must call it.

    Args:
        model: Parallelized model that is a ``PeftModel`` or contains one.
        directory: Function that returns the folder. Other files in it stay.
        timeout: Seconds to wait for the other ranks.
        options: Further arguments of ``PeftModel.save_pretrained``.

    Raises:
        CheckpointError: There are no adapters, an argument is wrong, a replicated weight differs between ranks, or a
            rank timed out or could not write. Identical on all ranks; the folder is unchanged.
    """

    def prepare() -> tuple[dict[str, Any], tuple[Adapters, Path], Snapshot]:
        target = absolute(directory())
        adapters = Adapters(model, state_of(model), options)
        call = {"adapter_only": True, "directory": target, "adapters": sorted(adapters.names)}
        call |= {key: repr(value) for key, value in options.items()}
        return call, (adapters, Path(target)), snapshot(model)

    (adapters, target), _ = prepare_alike(model, timeout, prepare)
    adapters.write(target, local_tensors(model, fsdp=True))


def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
    """Save adapters for ``PeftModel.save_pretrained``, which every rank must call; raise as :func:`save_adapters`."""
    saver = type(self).save_pretrained
    if shard_of(self) is None:
        saver(self, save_directory, *args, **kwargs)
        return
    named = inspect.signature(saver).bind(self, save_directory, *args, **kwargs).arguments
    given = {**named, **named.get("kwargs", {})}
    for name in (name for name in _NOT_OF_PEFT if given.get(name)):
        raise CheckpointError(f"PeftModel.save_pretrained of a parallelized model does not support {name}=")
    options = {name: given[name] for name in _OF_PEFT if name in given}
    save_adapters(self, lambda: save_directory, 20.0, options)


def check_merged(model: nn.Module) -> None:
    """Raise CheckpointError if active adapters of ``model`` are not merged into its weights."""
    for path, module in model.named_modules():
        adapted: Any = module if is_adapted(module) else None
        plain = adapted is not None and (adapted.merged or adapted.disable_adapters)
        if plain or not (adapted is not None or is_wrapper(module)):
            continue
        what = "a copy in modules_to_save" if is_wrapper(module) else "adapters"
        raise CheckpointError(
            f"merge_checkpoints=True is not supported with {what} at {path}\n"
            "  Use adapter_only=True, which writes PEFT's files; or call model.merge_adapter() first, which merges "
            "adapters of layers."
        )


_OF_PEFT = ("selected_adapters", "save_embedding_layers", "safe_serialization")
_NOT_OF_PEFT = ("state_dict", "path_initial_model_for_weight_conversion", "push_to_hub")


class Adapters:
    """The adapters of one model, which PEFT writes.

    Args:
        model: Parallelized model that contains one ``PeftModel``.
        options: Arguments of ``PeftModel.save_pretrained``.

    Raises:
        CheckpointError: The model contains no or several of them, or PEFT would write other values than its tensors.
    """

    def __init__(self, model: nn.Module, state: State, options: Mapping[str, Any]) -> None:
        self.state, self.options = state, options
        found = [(path, module) for path, module in model.named_modules() if is_peft_model(module)]
        if len(found) != 1:
            raise CheckpointError(
                f"adapter_only=True requires one PeftModel in {type(model).__name__}, got {len(found)}\n"
                "  Create it with peft.get_peft_model before autopar.initialize."
            )
        path, self.peft_model = found[0]
        self._start = f"{path}." if path else ""
        self.elsewhere = parameters_elsewhere(model)
        with self._all_parameters():
            self.names = self._names()

    @contextlib.contextmanager
    def _all_parameters(self) -> Iterator[None]:
        """Put the parameters of all stages into the modules, since PEFT writes the parameters that it finds there."""
        here = [(module, dict(own_parameters(module))) for module, _ in self.elsewhere]
        try:
            for module, had in self.elsewhere:
                own_parameters(module).clear()
                own_parameters(module).update(had)
            yield
        finally:
            for module, has in here:
                own_parameters(module).clear()
                own_parameters(module).update(has)

    def _names(self) -> frozenset[str]:
        """Return the canonical names of the tensors that PEFT selects from a state dict without data."""
        from peft import get_peft_model_state_dict

        peft_model: Any = self.peft_model
        chosen = self.options.get("selected_adapters") or list(peft_model.peft_config)
        unknown = [name for name in chosen if name not in peft_model.peft_config]
        if unknown:
            raise CheckpointError(
                f"selected_adapters={chosen} must be adapters of the model: {', '.join(peft_model.peft_config)}"
            )
        plans = self.state.plan.tensors
        empty = {name: torch.empty(t.shape, dtype=dtype_of(t.dtype), device="meta") for name, t in plans.items()}
        named = self._by_peft_name(empty)
        found: set[str] = set()
        canonical = {id(tensor): name for name, tensor in empty.items()}
        for name in chosen:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PEFT warns again when it writes
                embeddings = self.options.get("save_embedding_layers", "auto")
                picked = get_peft_model_state_dict(
                    peft_model, state_dict=dict(named), adapter_name=name, save_embedding_layers=embeddings
                )
            computed = [saved for saved, tensor in picked.items() if id(tensor) not in canonical]
            if computed and peft_model.peft_config[name].is_prompt_learning:
                continue  # computed from parameters that every rank has
            if computed:
                raise CheckpointError(f"adapter '{name}': PEFT computes {listed(computed)} when it saves")
            found |= {canonical[id(tensor)] for tensor in picked.values()}
        return frozenset(found)

    def _by_peft_name(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Rename tensors from canonical names to all their names in the state dict of the ``PeftModel``."""
        plans = self.state.plan.tensors
        return {
            alias.removeprefix(self._start): tensor
            for name, tensor in tensors.items()
            for alias in (name, *plans[name].aliases)
            if alias.startswith(self._start)
        }

    def full(self, local: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather the adapters from this rank's tensors, one after the other. Collective."""
        weights = FullWeights(self.state, local)
        yield from ((name, weights.gather(name)) for name in sorted(self.names))

    def write(self, target: Path, local: dict[str, torch.Tensor]) -> None:
        """Gather and write the adapters. A collective of the world."""
        mpu = self.state.mpu
        with waiting(mpu, "gathering the adapters", range(mpu.world_size)):
            full = {name: tensor.cpu() for name, tensor in self.full(local) if mpu.rank == 0}
        untouched = f"The adapters in {target} are unchanged."
        rank_zero(mpu, lambda: self.write_files(full, target), lambda: untouched)

    def write_files(self, full: Mapping[str, torch.Tensor], target: Path) -> None:
        """Let PEFT write its files into a hidden folder, and move them into place, configs last."""
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".adapters.tmp-", dir=target, ignore_cleanup_errors=True) as folder:
            temp = Path(folder)
            if (target / _CARD).is_file():
                shutil.copy(target / _CARD, temp / _CARD)  # PEFT updates an existing card
            kind: Any = type(self.peft_model)
            with self._all_parameters():
                kind.save_pretrained(self.peft_model, str(temp), state_dict=self._by_peft_name(full), **self.options)
            written = sorted(path.relative_to(temp) for path in temp.rglob("*") if path.is_file())
            for file in sorted(written, key=lambda path: path.name == "adapter_config.json"):
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                fsync(temp / file)
                os.replace(temp / file, target / file)
            fsync(target)


def adapt_methods(model: nn.Module, state: Parallelized, given: Given) -> None:
    """Let saves handle adapters, and replace methods of PEFT that would be wrong on shards."""
    if not uses_peft(model):
        return
    saver = save_adapters if any(is_peft_model(module) for module in model.modules()) else None
    vars(model)[STATE] = replace(state_of(model), save_adapters=saver, before_merge=(check_merged,))
    if is_peft_model(model):
        push = refused("push_to_hub", f"{PART}  {_PUSH}")
        bind(model, _OWNER, save_pretrained=save_pretrained, push_to_hub=push)
        bind(model, _OWNER, get_nb_trainable_parameters=_nb_trainable)
    if state.plan.tp > 1:
        quantized = any(tensor.quantized for tensor in state.plan.tensors.values())
        for module in model.modules():
            _refuse_methods(module, quantized)
    state.undo.append(lambda model, own: unbind(model, _OWNER))


def _refuse_methods(module: nn.Module, quantized: bool) -> None:
    names: tuple[str, ...] = ("add_adapter", "delete_adapter") if is_peft_model(module) else ()
    if is_tuner(module):
        names = tuple(name for name in _OF_TREES if hasattr(type(module), name))
        if hasattr(type(module), "_enable_peft_forward_hooks"):
            bind(module, _OWNER, _enable_peft_forward_hooks=_hooks_without_names)
    if names:
        bind(module, _OWNER, **{name: _refused(name, quantized) for name in names})


def _hooks_without_names(self: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("adapter_names") is not None:
        raise ConfigError(
            "adapter_names is not supported with tensor_parallel_size: PEFT's order of adapters may differ between "
            "ranks\n  Compute the samples of one adapter after the other, with model.set_adapter(name)."
        )
    return type(self)._enable_peft_forward_hooks(self, *args, **kwargs)


_OF_TREES = ("merge_and_unload", "unload", "delete_adapter", "add_weighted_adapter", "add_adapter")


def _refused(name: str, quantized: bool) -> Callable[..., NoReturn]:
    def method(self: Any, *_: Any, **__: Any) -> NoReturn:
        if name == "add_adapter":
            raise ConfigError(
                f"add_adapter is not supported on a parallelized {type(self).__name__}, whose layers are sharded\n"
                "  Use autopar.integrations.add_adapter(model, name, config); then model.load_adapter(dir, name) reads "
                "an adapter's files."
            )
        instead = (
            " Or merge in place with model.merge_adapter(),\n  and write the merged model with "
            "model.save_parallelized(dir, merge_checkpoints=True)."
        )
        raise ConfigError(
            f"{name} is not supported on a parallelized {type(self).__name__}, whose layers are sharded\n"
            f"  Call autopar.deparallelize(model).{name}(...) on the full model.{'' if quantized else instead}"
        )

    return method


def _nb_trainable(self: Any) -> tuple[int, int]:
    """Count the trained and all parameters of the full model, as ``PeftModel`` does; no communication."""
    if shard_of(self) is None:
        return type(self).get_nb_trainable_parameters(self)
    return num_parameters(self, only_trainable=True), num_parameters(self)
