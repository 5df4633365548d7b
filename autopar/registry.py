"""Features: folders that add to the core, which imports none of them.

A feature is a package in ``autopar/features``, or a module that another distribution names as an entry point of the
group ``autopar.features``. It holds one :class:`Feature`, called ``FEATURE``: tables of names and of
``"module:attribute"`` strings, which are imported when the core needs them. ``python -m autopar.registry`` prints all.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import entry_points
from typing import Any

from autopar.errors import ConfigError

Entries = Mapping[str, str]
GROUP = "autopar.features"


@dataclass(frozen=True)
class Step:
    """A step of ``initialize``.

    Attributes:
        function: Name of ``step(model, state, given)``, as in :mod:`autopar.applied.steps`. It changes the model in
            place, and puts what takes that back onto ``state.undo``.
        after: Name of the step that comes before it: one of the core, or of a feature earlier in the alphabet.
    """

    function: str
    after: str


@dataclass(frozen=True)
class Feature:
    """The additions of one feature. Each attribute below ``about`` is a table.

    Planners and steps of a feature that :data:`SETTINGS` names are called where a configuration asks for it; those of
    another feature in every ``initialize``.

    Attributes:
        name: Name of its folder.
        about: Its purpose in a few words, for lists.
        transports: Carriers of collectives between the ranks of one axis. ``choose(axis, group, asked, control)`` is
            called once for the tensor-parallel axis when a mesh is made, on all its ranks. It returns the transport, or
            None: the process group carries them.
        planners: Plans of the feature. ``plan(plans, config, stages)`` is called when tensors and stages are planned
            (:class:`autopar.dry_run.plan_model.ModelPlans`), in the order of names. It sends nothing, and only reads
            the model. Its result (None: the feature is not used) is kept under the entry's name, in ``Plans.features``
            and ``Parallelized.features``. ``to_json()`` of the result must be equal on all ranks.
        rules: Rules of plans. ``classes(plain, plan)`` returns the class that a module of class ``plain`` becomes.
        steps: Steps of ``initialize``, by name.
        forms: Forms of weights that are no tensors of their shape, by the module of the library that makes them. Where
            that module is loaded, ``find(module)`` is called with layers, at any time but in a forward. It returns the
            :class:`autopar.stored.StoredWeight` of the layer, or None.
        quantizers: Models that another library quantizes, by its name: an object with three methods, each of which
            raises ConfigError for what cannot be sharded. ``check(what, method)`` is called before such a model is
            planned or read, and ``check_config(what, text)`` with its ``config.json`` before that.
            ``read(load, model, config)`` returns the function that loads it without memory, and the config for that.
        parts: Parts of a checkpoint, by name: an object with two methods. ``collect(model, state)`` is called by a save
            and returns tensors, plans and notes. ``restore(model, state, shards, check=True)`` is called by a load
            before anything is changed, and then without ``check``.
    """

    name: str
    about: str
    transports: Entries = field(default_factory=dict)
    planners: Entries = field(default_factory=dict)
    rules: Entries = field(default_factory=dict)
    steps: Mapping[str, Step] = field(default_factory=dict)
    forms: Entries = field(default_factory=dict)
    quantizers: Entries = field(default_factory=dict)
    parts: Entries = field(default_factory=dict)


TABLES = tuple(each.name for each in fields(Feature))[2:]
# Fields of a configuration that ask for a feature with any value but these.
SETTINGS: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "context_parallel_size": ("context_parallel", (1,)),
    "sequence_parallel": ("sequence_parallel", (False,)),
    "cpu_transport": ("host_transport", ("auto", "gloo")),
}


@functools.cache
def features() -> tuple[Feature, ...]:
    """Return the installed features, by name."""
    found: list[Feature] = []
    try:
        folder = importlib.import_module(GROUP)
    except ModuleNotFoundError:
        names: list[str] = []
    else:
        names = [f"{GROUP}.{module.name}" for module in pkgutil.iter_modules(folder.__path__)]
    found.extend(importlib.import_module(name).FEATURE for name in names)
    found.extend(point.load() for point in entry_points(group=GROUP))
    return tuple(sorted(found, key=lambda feature: feature.name))


@functools.cache
def load(entry: str) -> Any:
    """Import what a ``"module:attribute"`` string names."""
    module, _, name = entry.partition(":")
    return getattr(importlib.import_module(module), name)


def entries(table: str, config: Any = None) -> Iterator[tuple[str, Any]]:
    """Yield name and object of all entries of a table, in the order of features' names, each imported now.

    Args:
        config: A configuration, which must ask for the feature; None: entries of all features.
    """
    for feature in features() if config is None else asked(config):
        for name, entry in getattr(feature, table).items():
            yield name, load(entry)


def entry(table: str, name: str) -> Any:
    """Return the object of one entry; None if no feature has it."""
    found = (getattr(feature, table) for feature in features())
    return next((load(known[name]) for known in found if name in known), None)


def asked(config: Any) -> list[Feature]:
    """Return the features that a configuration asks for, and those that no setting turns on."""
    turned = {feature: getattr(config, key) not in without for key, (feature, without) in SETTINGS.items()}
    return [feature for feature in features() if turned.get(feature.name, True)]


def in_order(steps: Sequence[Callable[..., Any]], config: Any) -> tuple[Callable[..., Any], ...]:
    """Return the core's steps and those of features that a configuration asks for, each after the step that it names.

    Raises:
        ConfigError: no step has the name.
    """
    ordered, names = list(steps), [step.__name__ for step in steps]
    for feature in asked(config):
        for own, step in feature.steps.items():
            if step.after not in names:
                raise ConfigError(f"feature {feature.name}: step {own} follows '{step.after}', which does not exist")
            place = names.index(step.after) + 1
            ordered.insert(place, load(step.function))
            names.insert(place, own)
    return tuple(ordered)


def check_settings(config: Any) -> None:
    """Raise ConfigError if a configuration asks for a feature that is not installed."""
    for key, (feature, without) in SETTINGS.items():
        value = getattr(config, key)
        if value not in without:
            need(feature, f"{key}: {value}")


def need(feature: str, what: str) -> None:
    """Raise ConfigError unless a feature is installed.

    Args:
        what: The reason: a setting with its value, a rule with its file and line, or a kind of model.
    """
    names = [each.name for each in features()]
    if feature not in names:
        raise ConfigError(
            f"{what} needs the feature '{feature}', which is not installed.\n"
            f"  Installed: {', '.join(names) or 'none'}. Put the folder autopar/features/{feature} back."
        )


def main() -> None:
    """Print every feature and its tables."""
    for feature in features():
        print(f"{feature.name}: {feature.about}")
        for table in TABLES:
            for name, value in getattr(feature, table).items():
                where = value if isinstance(value, str) else f"{value.function}, after {value.after}"
                print(f"  {table}.{name} = {where}")


if __name__ == "__main__":
    main()
