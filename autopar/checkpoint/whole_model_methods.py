"""Methods of a Hugging Face model that speak of the whole model, where a rank holds a part of it."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from autopar.checkpoint.local_shard import share_of
from autopar.checkpoint.partial_state_dict import described, use_instead
from autopar.errors import ConfigError

__all__ = ["METHODS", "refuse_pickle"]


def _refuse(model: Any, call: str) -> None:
    """Raise ConfigError if the model is not whole here."""
    share = share_of(model)
    if share is not None:
        raise ConfigError(
            f"{call}: this rank holds only its share of {type(model).__name__}: that of "
            f"{described(share.places(model))}.\n{use_instead()}"
        )


def _save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``save_pretrained`` of a whole model; of a part it raises ConfigError."""
    _refuse(self, "save_pretrained")
    return type(self).save_pretrained(self, *args, **kwargs)


def _push_to_hub(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``push_to_hub`` of a whole model; of a part it raises ConfigError."""
    _refuse(self, "push_to_hub")
    return type(self).push_to_hub(self, *args, **kwargs)


def _should_save_on_this_rank(self: Any, *args: Any, **kwargs: Any) -> Any:
    """What ``save_pretrained`` asks before it writes, also when it is called through the class."""
    _refuse(self, "save_pretrained")
    return type(self).should_save_on_this_rank(self, *args, **kwargs)


def _set_input_embeddings(self: Any, *args: Any, **kwargs: Any) -> Any:
    _refuse_embeddings(self, "set_input_embeddings")
    return type(self).set_input_embeddings(self, *args, **kwargs)


def _set_output_embeddings(self: Any, *args: Any, **kwargs: Any) -> Any:
    _refuse_embeddings(self, "set_output_embeddings")
    return type(self).set_output_embeddings(self, *args, **kwargs)


def _refuse_embeddings(model: Any, call: str) -> None:
    share = share_of(model)
    if share is not None:
        raise ConfigError(
            f"{call}: the embeddings of this {type(model).__name__} lie on several ranks: this is "
            f"{described(share.places(model))}.\n"
            "  Set them before autopar.initialize, or after autopar.deparallelize(model)."
        )


def _num_parameters(self: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """The number of parameters of the whole model, as before ``initialize``; no communication."""
    share = share_of(self)
    if share is None:
        count: int = type(self).num_parameters(self, only_trainable, exclude_embeddings)
        return count
    found: dict[str, nn.Parameter] = dict(self.named_parameters(remove_duplicate=False))
    paths = {id(module): path for path, module in self.named_modules()}
    for module, order in _elsewhere(self):
        if id(module) in paths:
            start = f"{paths[id(module)]}." if paths[id(module)] else ""
            found |= {start + name: p for name, p in order.items() if p is not None and start + name not in found}
    if exclude_embeddings:
        tables = {f"{path}.weight" for path, module in self.named_modules() if isinstance(module, nn.Embedding)}
        excluded = {id(found[name]) for name in tables if name in found}
        found = {name: parameter for name, parameter in found.items() if id(parameter) not in excluded}
    counted: dict[int, int] = {}
    for name, parameter in found.items():
        due = share.planned(name)
        if parameter.requires_grad or not only_trainable:
            shape = parameter.shape if due is None else due.shape
            counted.setdefault(id(parameter), _product(shape))
    return sum(counted.values())


def _elsewhere(model: Any) -> Any:
    """Modules whose parameters are on other stages, with all parameters that they had."""
    pipeline = vars(model).get("_autopar_pipeline")
    return () if pipeline is None else pipeline.released.orders


def _product(shape: Any) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


METHODS = {
    function.__name__.removeprefix("_"): function
    for function in (
        _save_pretrained,
        _push_to_hub,
        _should_save_on_this_rank,
        _set_input_embeddings,
        _set_output_embeddings,
        _num_parameters,
    )
    if hasattr(PreTrainedModel, function.__name__.removeprefix("_"))
}
"""By the name that they have on the model."""


def refuse_pickle(self: Any, protocol: Any) -> Any:
    """``__reduce_ex__`` of a root model: copies go on, pickling raises ConfigError."""
    if sys._getframe(1).f_globals.get("__name__") == "copy":
        kind: Any = type(self)
        return kind.__reduce_ex__(self, protocol)
    share = share_of(self)
    part = "" if share is None else f", and this rank holds only what {described(share.places(self))} has of it"
    raise ConfigError(
        f"{type(self).__name__} is parallelized and cannot be pickled (torch.save): it has process groups{part}.\n"
        f"{use_instead()}\n  Or pickle what autopar.deparallelize(model) gives back."
    )
