"""Load a sharded checkpoint of any mesh into a parallelized model in place. All checks precede the first change."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar import registry
from autopar.checkpoint import random_states
from autopar.checkpoint.arguments import absolute, check_same_call, seconds
from autopar.checkpoint.extra import fill_shards, saved_shards
from autopar.checkpoint.format import WEIGHTS
from autopar.checkpoint.optimizer_state import Targets, TrainingWeights, master_weights, prepare, unwrapped
from autopar.checkpoint.shards import ShardReader
from autopar.checkpoint.staging import MANIFEST
from autopar.checkpoint.state import State, local_tensors, state_of
from autopar.compat.tensors import local_part
from autopar.distributed.agree import all_ranks, barrier
from autopar.errors import CheckpointError, listed, nearest
from autopar.storage.json_values import decode
from autopar.storage.progress import progress_bar
from autopar.storage.safetensors_io import dtype_name, dtype_of

_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "optimizer": (lambda value: isinstance(value, torch.optim.Optimizer), "must be a torch.optim.Optimizer"),
    "lr_scheduler": (lambda value: hasattr(value, "load_state_dict"), "must have a load_state_dict method"),
    "extra": (lambda value: isinstance(value, MutableMapping), "must be a dict, which receives the saved values"),
}


def load(
    model: nn.Module, directory: Callable[[], object], timeout: float, training: Mapping[str, Any], verify: bool
) -> None:
    """See :func:`autopar.checkpoint.methods.from_parallelized`. ``directory()`` raises if the call is wrong."""
    given = {name: unwrapped(value) for name, value in training.items() if value is not None}
    state = state_of(model)
    mpu = state.mpu
    barrier(mpu, "from_parallelized", seconds(timeout, 20.0))  # check() reports a wrong timeout, on all ranks
    prepared: list[Loader] = []

    def check() -> dict[str, Any]:
        seconds(timeout)
        if torch.is_inference_mode_enabled():
            raise CheckpointError(
                "from_parallelized is not supported in torch.inference_mode: the loaded state could not be trained"
            )
        for name, value in given.items():
            if not _KINDS[name][0](value):
                raise CheckpointError(f"{name}={value!r} {_KINDS[name][1]}")
        loader = Loader(model, Path(absolute(directory())), given)
        prepared.append(loader)
        return {
            "function": "from_parallelized",
            "directory": str(loader.shards.folder),
            "the id of the checkpoint": loader.shards.manifest.save_id,
            "verify": bool(verify),
            **{name: name in given for name in training},
        }

    try:
        all_ranks(mpu, check, check=check_same_call)
        (loader,) = prepared
        share = loader.parts if verify else ()
        all_ranks(mpu, lambda: loader.shards.verify_share(share, mpu.rank, mpu.world_size))
        all_ranks(mpu, loader.fill, lambda: "The model is partly loaded.")
        _warn_of_dtypes(loader)
    finally:
        for loader in prepared:
            loader.shards.close()


class Loader:
    """Load one rank's tensors. The constructor checks everything that needs no reading of tensors.

    Args:
        training: Name -> object for those of ``optimizer``, ``lr_scheduler`` and ``extra`` that are loaded too.
    """

    def __init__(self, model: nn.Module, folder: Path, training: Mapping[str, Any]) -> None:
        self.model, self.state = model, state_of(model)
        self.training = training
        used = {"optimizer": "optimizer" in training, "extra": training.keys() & {"lr_scheduler", "extra"}}
        self.parts = [*WEIGHTS, *(part for part, wanted in used.items() if wanted)]
        self.shards = ShardReader(folder, self.parts)
        self.targets: Targets = {}
        self.finish: Callable[[], None] = lambda: None
        self.random: Any = None  # states from which this rank continues
        self.tensors = local_tensors(model, fsdp=True)
        _check_model(self.shards, self.state, self.tensors)
        self._restore_base(check=True)
        self.sharded = saved_shards(self.shards.manifest, self.state.plan)
        self._check_training()

    def _restore_base(self, *, check: bool = False) -> None:
        if self.shards.manifest.quantized:
            base = registry.entry("parts", "base", f"{self.shards.folder} with quantized weights")
            base.restore(self.model, self.state, self.shards, check=check)

    def _check_training(self) -> None:
        saved, folder = self.shards.manifest.training, self.shards.folder
        for name in self.training:
            if name not in saved:
                has = ", ".join(key for key in _KINDS if key in saved) or "nothing"
                raise CheckpointError(f"{folder} was saved without {name}=; its training state contains {has}")
        if "lr_scheduler" in self.training:
            then, now = saved["lr_scheduler"]["class"], type(self.training["lr_scheduler"]).__name__
            if then != now:
                raise CheckpointError(f"lr_scheduler must be a {then}, as saved in {folder}; got a {now}")
        states, mpu = saved.get("random_states"), self.state.mpu
        if states is not None and self.training.keys() & {"optimizer", "lr_scheduler"}:
            self.random = random_states.choose(states, mpu.tp.rank, mpu.pp.rank, mpu.dp.rank, mpu.cp.rank)
            random_states.check(self.random, mpu.random_tracker)
        optimizer, rank = self.training.get("optimizer"), mpu.shards.rank
        self.weights = TrainingWeights(optimizer, self.shards.manifest)
        if optimizer is not None:
            facts, tensors = saved["optimizer"], self.shards.manifest.parts["optimizer"].tensors
            rest = (self.state.plan, rank, facts, tensors, self.weights.state_dtype)
            self.targets, self.finish = prepare(optimizer, self.model, *rest)

    def fill(self) -> None:
        """Read this rank's ranges into the model and the training state."""
        # Steps that can still fail come first.
        saved, training, mpu = self.shards.manifest.training, self.training, self.state.mpu
        extra = self.shards.manifest.parts.get("extra")
        chosen = [name for name in ("lr_scheduler", "extra") if name in training]
        loose = [name for name in extra.tensors if name not in self.sharded] if extra and chosen else []
        tensors = {name: self.shards.lazy(name, "extra").read() for name in loose}
        plain = {name: decode(saved[name], tensors, name) for name in chosen}  # the scheduler's with its class
        if "extra" in plain:
            fill_shards(plain["extra"], self.shards, self.model, self.state, self.tensors)
        if "lr_scheduler" in training:
            training["lr_scheduler"].load_state_dict(plain["lr_scheduler"]["state"])
        plan, optimizer = self.state.plan, training.get("optimizer")
        masters = {} if optimizer is None else master_weights(optimizer, plan)
        weights = [*self.tensors.items(), *masters.items()]
        read = [tensor for _, tensor in weights] + [tensor for tensor, _ in self.targets.values()]
        with progress_bar("loading", sum(local_part(tensor).nbytes for tensor in read)) as bar:
            for name, tensor in weights:
                self.shards.read_shard(*self.weights.source(name, tensor.dtype), plan.tensors[name].layout, mpu, tensor)
                bar.update(local_part(tensor).nbytes)
            self._restore_base()
            for name, (tensor, layout) in self.targets.items():
                self.shards.read_shard(name, "optimizer", layout, mpu, tensor)
                bar.update(local_part(tensor).nbytes)
        self.finish()
        self.weights.finish()
        if "extra" in training:
            training["extra"].update(plain["extra"])
        if self.random is not None:
            mpu.random_tracker = random_states.restore(self.random, mpu.random_tracker)


def _check_model(shards: ShardReader, state: State, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise CheckpointError unless the checkpoint has exactly the model's tensors, full shapes and kinds."""
    manifest, folder, plan = shards.manifest, shards.folder, state.plan
    saved = manifest.tensors
    forms = {name: tensor.quantized for name, tensor in state.quantized.items()}
    if manifest.base.forms != forms:
        there = {**dict.fromkeys(forms, "plain"), **manifest.base.forms}
        name = next(name for name, form in there.items() if forms.get(name) != form)
        raise CheckpointError(f"{name} is {there[name]} in {folder} and {forms.get(name, 'plain')} in the model")
    missing = [name for name in plan.tensors if name not in saved]
    unexpected = [name for name in saved if name not in plan.tensors]
    if missing or unexpected:
        raise CheckpointError(
            f"{folder} has other tensors than this model: {len(missing)} missing, {len(unexpected)} unexpected\n"
            + (f"  Missing in the checkpoint: {listed(missing)}.{nearest(missing[0], unexpected)}\n" if missing else "")
            + (f"  Unexpected: {listed(unexpected)}.\n" if unexpected else "")
            + f"  The checkpoint is of a {manifest.model_type!r} model, this model is {plan.model_type!r}."
        )
    for name, mine in plan.tensors.items():
        theirs = saved[name]
        if theirs.shape != mine.shape:
            raise CheckpointError(
                f"{name} has shape {list(theirs.shape)} in {folder} and {list(mine.shape)} in the model"
            )
    for name, tensor in tensors.items():
        dtype = dtype_of(saved[name].dtype)
        if dtype != tensor.dtype and not (dtype.is_floating_point and tensor.is_floating_point()):
            raise CheckpointError(
                f"{name} is {saved[name].dtype} in {folder} and {dtype_name(tensor.dtype)} in the model"
            )


def _warn_of_dtypes(loader: Loader) -> None:
    """Warn about converted tensors, and about fp32 weights that neither the model nor the optimizer can keep."""
    saved, weights = loader.shards.manifest.tensors, loader.weights
    kinds = {name: tensor.dtype for name, tensor in loader.tensors.items()}
    cast = [n for n, dtype in kinds.items() if saved[n].dtype != dtype_name(dtype) and not weights.keeps_all(n, dtype)]
    if cast:
        warnings.warn(
            f"{len(cast)} tensors were converted on loading, {cast[0]} from {saved[cast[0]].dtype} "
            f"to {dtype_name(kinds[cast[0]])} ({MANIFEST} lists the saved dtypes)",
            stacklevel=4,
        )
    dropped = [name for name, dtype in kinds.items() if weights.drops(name, dtype)]
    if dropped:
        warnings.warn(
            f"{len(dropped)} weights (first {dropped[0]}) continue in {dtype_name(kinds[dropped[0]])} without the "
            "float32 weights of the checkpoint.\n"
            "  Use the saved run's precision in the config and pass the optimizer to autopar.initialize, or load the "
            "model in\n  float32 (from_pretrained(dtype=torch.float32)).",
            stacklevel=4,
        )
