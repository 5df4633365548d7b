"""Load a sharded checkpoint of any mesh into a parallelized model, in place. All checks come before any change."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.checkpoint import random_states
from autopar.checkpoint.arguments import absolute, check_timeout, patience, same_call
from autopar.checkpoint.format import MANIFEST
from autopar.checkpoint.fsdp_shards import read
from autopar.checkpoint.optimizer_state import Restoration, prepare
from autopar.checkpoint.optimizer_weights import TrainingWeights, owns
from autopar.checkpoint.rotation import place_in_series
from autopar.checkpoint.shards import Shards
from autopar.checkpoint.state import State, listed, local_tensors, state_of
from autopar.checkpoint.verification import share_of_verification
from autopar.distributed.barrier import barrier
from autopar.distributed.consensus import all_ranks
from autopar.errors import CheckpointError, nearest
from autopar.storage.json_values import decode
from autopar.storage.safetensors_io import dtype_name, dtype_of

__all__ = ["Wanted", "load"]


class Wanted:
    """What besides the model is to be loaded.

    Attributes:
        optimizer, lr_scheduler: filled in place.
        extra: a dict that receives the user's own data.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: Any = None,
        extra: MutableMapping[str, Any] | None = None,
    ) -> None:
        self.optimizer, self.lr_scheduler, self.extra = optimizer, lr_scheduler, extra

    def check(self) -> None:
        """Raise CheckpointError if an argument is not what it should be."""
        if self.optimizer is not None and not isinstance(self.optimizer, torch.optim.Optimizer):
            raise CheckpointError(f"optimizer={self.optimizer!r} must be a torch.optim.Optimizer")
        if self.lr_scheduler is not None and not hasattr(self.lr_scheduler, "load_state_dict"):
            raise CheckpointError(f"lr_scheduler={self.lr_scheduler!r} has no load_state_dict")
        if self.extra is not None and not isinstance(self.extra, MutableMapping):
            raise CheckpointError("extra= must be a dict here: it receives what was saved with extra=")

    def present(self) -> dict[str, bool]:
        """Which were given."""
        return {
            "optimizer": self.optimizer is not None,
            "lr_scheduler": self.lr_scheduler is not None,
            "extra": self.extra is not None,
        }


def load(model: nn.Module, directory: Callable[[], object], timeout: float, wanted: Wanted, verify: bool) -> None:
    """See :func:`autopar.checkpoint.methods.from_parallelized`. ``directory`` raises for a wrong call."""
    state = state_of(model)
    mpu = state.mpu
    barrier(mpu, "from_parallelized", patience(timeout))
    loading: _Loading | None = None

    def check() -> dict[str, Any]:
        nonlocal loading
        check_timeout(timeout)
        if torch.is_inference_mode_enabled():
            raise CheckpointError("from_parallelized inside torch.inference_mode makes state that cannot be trained")
        wanted.check()
        loading = _Loading(model, Path(absolute(directory())), wanted)
        return {
            "function": "from_parallelized",
            "directory": str(loading.shards.folder),
            "the id of the checkpoint": loading.shards.manifest.save_id,
            "verify": bool(verify),
            **wanted.present(),
        }

    def read_all() -> None:
        assert loading is not None
        if verify:
            loading.verify()

    def fill() -> None:
        assert loading is not None
        loading.fill()

    try:
        all_ranks(mpu, check, check=same_call)
        all_ranks(mpu, read_all)
        all_ranks(mpu, fill, lambda: "The model is partly loaded.")
        assert loading is not None
        state.went_on_from.clear()
        state.went_on_from.update(place_in_series(loading.shards.folder, loading.shards.manifest.order))
        _warn_of_casts(loading)
    finally:
        if loading is not None:
            loading.shards.close()


class _Loading:
    """One rank's part in one call. Making it checks everything that can be checked without reading tensors."""

    def __init__(self, model: nn.Module, folder: Path, wanted: Wanted) -> None:
        self.state = state_of(model)
        self.wanted = wanted
        self.shards = Shards(folder, self._parts(wanted))
        self.restoration: Restoration | None = None
        self.weights: TrainingWeights | None = None
        try:
            self.tensors = local_tensors(model, shares=True)
            _check_model(self.shards, self.state, self.tensors)
            self._check_training(model)
        except BaseException:
            self.shards.close()
            raise

    @staticmethod
    def _parts(wanted: Wanted) -> list[str]:
        chosen = {"optimizer": wanted.optimizer, "extra": wanted.lr_scheduler or wanted.extra}
        return ["model", *(part for part, given in chosen.items() if given is not None)]

    def _check_training(self, model: nn.Module) -> None:
        training, folder = self.shards.manifest.training, self.shards.folder
        for name, given in self.wanted.present().items():
            if given and name not in training:
                has = (
                    ", ".join(key for key in ("optimizer", "lr_scheduler", "extra") if key in training) or "none of it"
                )
                raise CheckpointError(f"{folder} was saved without {name}=; of the training state it holds {has}")
        if self.wanted.lr_scheduler is not None:
            _check_scheduler(self.wanted.lr_scheduler, training["lr_scheduler"], folder)
        optimizer, plan = self.wanted.optimizer, self.state.plan
        if optimizer is not None:
            self.weights = TrainingWeights(optimizer, model, plan, self.shards.manifest)
            parameters = {plan.canonical(name): parameter for name, parameter in model.named_parameters()}
            self.restoration = prepare(
                optimizer,
                model,
                plan,
                self.state.mpu.tp.rank,
                training["optimizer"],
                self.weights.states,
                owns=lambda name: owns(optimizer, parameters[name]),
                dtype_here=self.weights.state_dtype,
            )

    def verify(self) -> None:
        """This rank's share of reading everything once and comparing checksums."""
        mpu, manifest = self.state.mpu, self.shards.manifest
        parts = [part for part in self._parts(self.wanted) if part in manifest.parts]
        for held in share_of_verification(list(self.shards.held(parts)), manifest.sizes, mpu.sizes, mpu.rank):
            self.shards.verify(held)

    def fill(self) -> None:
        """Read this rank's ranges into their places."""
        plain = self._decode()  # what could still fail comes first
        for name, tensor in self.tensors.items():
            self._fill(tensor, name, tensor.dtype)
        if self.restoration is not None and self.weights is not None:
            for name, weight in self.weights.wanted().items():
                self._fill(weight, name, weight.dtype)
            for name, place in self.restoration.wanted.items():
                read(self.shards.lazy(name, "optimizer"), place.layout, self.state.mpu, place.tensor)
            self.restoration.finish()
            self.weights.finish()
        self._restore(plain)

    def _fill(self, tensor: torch.Tensor, name: str, dtype: torch.dtype) -> None:
        """Read a weight, or the fp32 weight that stands for it, from where the checkpoint has it."""
        source = (name, "model") if self.weights is None else self.weights.source(name, dtype)
        read(self.shards.lazy(*source), self.state.plan.tensors[name].layout, self.state.mpu, tensor)

    def _decode(self) -> dict[str, Any]:
        training, wanted = self.shards.manifest.training, self.wanted
        extra = self.shards.manifest.parts.get("extra")
        chosen = [name for name in ("lr_scheduler", "extra") if getattr(wanted, name) is not None]
        tensors = {name: self.shards.lazy(name, "extra").read() for name in extra.tensors} if extra and chosen else {}
        return {name: decode(training[name], tensors, name) for name in chosen}  # the scheduler's with its class

    def _restore(self, plain: Mapping[str, Any]) -> None:
        wanted, mpu = self.wanted, self.state.mpu
        if wanted.lr_scheduler is not None:
            wanted.lr_scheduler.load_state_dict(plain["lr_scheduler"]["state"])
        if wanted.extra is not None:
            wanted.extra.update(plain["extra"])
        states = self.shards.manifest.training.get("random_states")
        if states is not None and (wanted.optimizer is not None or wanted.lr_scheduler is not None):
            chosen = random_states.choose(states, mpu.tp.rank, mpu.pp.rank, mpu.dp.rank)
            mpu.random_tracker = random_states.restore(chosen, mpu.random_tracker)


def _check_scheduler(scheduler: Any, saved: Any, folder: Path) -> None:
    then, now = saved.get("class") if isinstance(saved, Mapping) else None, type(scheduler).__name__
    if then != now:
        raise CheckpointError(f"{folder} holds the state of a {then}, lr_scheduler= is a {now}")


def _check_model(shards: Shards, state: State, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise CheckpointError unless the checkpoint holds exactly the model's tensors, whole shapes and kinds."""
    manifest, folder, plan = shards.manifest, shards.folder, state.plan
    saved = manifest.tensors
    missing = [name for name in plan.tensors if name not in saved]
    unexpected = [name for name in saved if name not in plan.tensors]
    if missing or unexpected:
        raise CheckpointError(
            f"{folder} does not hold this model's tensors: {len(missing)} missing, {len(unexpected)} unexpected\n"
            + (f"  Missing in the checkpoint: {listed(missing)}.{nearest(missing[0], unexpected)}\n" if missing else "")
            + (f"  Unexpected: {listed(unexpected)}.\n" if unexpected else "")
            + f"  It holds a {manifest.model_type!r} model, this one is {plan.model_type!r}."
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


def _warn_of_casts(loading: _Loading) -> None:
    saved, weights = loading.shards.manifest.tensors, loading.weights
    cast = [
        name
        for name, tensor in loading.tensors.items()
        if saved[name].dtype != dtype_name(tensor.dtype)
        and not (weights is not None and weights.keeps_all(name, tensor.dtype))
    ]
    if cast:
        warnings.warn(
            f"{len(cast)} tensors were converted on loading, {cast[0]} from {saved[cast[0]].dtype} "
            f"to {dtype_name(loading.tensors[cast[0]].dtype)} ({MANIFEST} says what was saved)",
            stacklevel=4,
        )
