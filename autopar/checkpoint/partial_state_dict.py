"""``model.state_dict()`` of a model that is not whole on this rank: it says so when somebody writes it to a file.

The dict itself is needed: copies of a model, averages of weights and ``load_state_dict`` of the same rank work on
it. Whoever pickles it (``torch.save``) also pickles its metadata, where a :class:`Mark` lies that warns then. In the
file the mark is plain data, by which ``load_state_dict`` later knows another rank's part. Savers that do not pickle are
known by their names: those that mean to write the whole model raise.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn

from autopar.call_site import calls, warn_user
from autopar.checkpoint.local_shard import share_of
from autopar.errors import ConfigError

__all__ = ["MARK", "Mark", "MarkPart", "PartialStateDict", "part_of", "use_instead"]

MARK = "autopar"

_WHOLE_MODEL_SAVERS = {
    "transformers": ("save_pretrained",),
    "peft": ("save_pretrained",),
    "accelerate": ("save_model", "save_state", "get_state_dict"),
    "safetensors": ("save_model",),
    "huggingface_hub": ("save_torch_model", "save_pretrained"),
    "sentence_transformers": ("save", "save_pretrained"),
}
_DCP = ("get_model_state_dict", "get_state_dict")
_READERS = ("safetensors", "accelerate", "huggingface_hub", "torch.distributed.checkpoint")


def use_instead() -> str:
    """What writes the whole model."""
    return (
        "  Use model.save_parallelized(dir, merge_checkpoints=True), on every rank, for a folder that from_pretrained "
        "reads;\n  without merge_checkpoints, for one that model.from_parallelized reads, on any mesh."
    )


class Mark:
    """In the metadata of a partial state dict: whose it is. Pickling it warns, once; copying it does not."""

    def __init__(self, name: str, places: Mapping[str, list[int]]) -> None:
        self.name, self.places = name, dict(places)
        self.warned = False

    def __copy__(self) -> Mark:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Mark:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.warn("state_dict() is written to a file or sent to another process")
        return OrderedDict, (list(self.places.items()),)  # what torch.load reads with weights_only

    def warn(self, what: str) -> None:
        """Say that this is a part, the first time."""
        if not self.warned:
            self.warned = True
            warn_user(
                f"{what}: it is what {described(self.places)} has of {self.name}, not all of it.\n{use_instead()}"
            )


def described(places: Mapping[str, Any]) -> str:
    """``tensor-parallel rank 0 of 2, pipeline rank 1 of 2``."""
    return ", ".join(f"{axis} {rank} of {size}" for axis, (rank, size) in places.items())


def part_of(metadata: Mapping[str, Any]) -> Mapping[str, list[int]] | None:
    """Whose part a state dict is, by the metadata of its root; None if it does not say."""
    mark = metadata.get(MARK)
    if isinstance(mark, Mark):
        return mark.places
    return mark if isinstance(mark, Mapping) else None


class PartialStateDict(OrderedDict[str, Any]):
    """What ``state_dict()`` returns; pickled as an ordinary ``OrderedDict``."""

    mark: Mark | None = None

    def items(self) -> Any:
        """As ever; savers that take this for a whole model's state dict are warned about."""
        caller = sys._getframe(1)
        module = str(caller.f_globals.get("__name__"))
        if self.mark is not None and module.startswith(_READERS) and caller.f_code.co_name != "_find_shared_tensors":
            self._warn(module)
        return super().items()

    def _warn(self, module: str) -> None:
        assert self.mark is not None
        if not module.startswith("torch"):
            self.mark.warn(f"{module.partition('.')[0]} reads state_dict()")
        elif "tensor-parallel rank" in self.mark.places:
            self.mark.warn(_of_dcp())

    def __reduce_ex__(self, protocol: Any) -> Any:
        attributes = {name: value for name, value in vars(self).items() if name != "mark"}
        return OrderedDict, (), attributes, None, iter(super().items())


def _of_dcp() -> str:
    return (
        "torch.distributed.checkpoint reads state_dict(), and takes tensors of one name for the same on all ranks "
        "(autopar.checkpoint.to_dtensor_state_dict(model) makes a dict for it)"
    )


class MarkPart:
    """State-dict hook of a root model and of the Hugging Face models inside it, which have one mark together."""

    def __init__(self) -> None:
        self._marks: dict[tuple[str, ...], Mark] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> MarkPart:
        return self

    def __call__(self, model: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> Any:
        share = share_of(model)
        if share is None:
            return None
        places = share.places(model)
        mark = self._marks.setdefault(tuple(places), Mark(share.name, places))
        for module, function in calls():
            package = module.partition(".")[0]
            if function in _WHOLE_MODEL_SAVERS.get(package, ()):
                raise ConfigError(
                    f"{package}'s {function}: this rank holds only its share of {share.name}: that of "
                    f"{described(places)}.\n{use_instead()}"
                )
            if share.plan.tp > 1 and module.startswith("torch.distributed.checkpoint") and function in _DCP:
                mark.warn(_of_dcp())
        metadata[MARK] = mark
        if prefix:
            return None  # part of another module's state dict, which goes on filling its own
        result = PartialStateDict(state)
        vars(result).update(vars(state))
        result.mark = mark
        return result
