"""Features: folders that add to the core, which imports none of them.

A feature is a package in ``autopar/features``, or ``autopar.tools``, or a module that another distribution names as an
entry point of the group ``autopar.features``. It holds one :class:`Feature`, called ``FEATURE``: tables of names and of
``"module:attribute"`` strings, which are imported when the core needs them. ``autopar features`` prints all.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from autopar.errors import ConfigError

Entries = Mapping[str, str]
GROUP, TOOLS = "autopar.features", "autopar.tools"
TRACE = "AUTOPAR_TRACE"


@dataclass(frozen=True)
class Step:
    """A step of ``initialize``.

    Attributes:
        function: The path of ``step(model, state, given)``, as in :mod:`autopar.setup.steps`. It changes the model in
            place, and appends a function that undoes the change to ``state.undo``.
        after: The name of the step before it, a step of the core or of a feature earlier in the alphabet. Steps after
            the same step run in the reverse order of their features' names.
        always: True if ``initialize`` runs it also if the configuration does not use the feature.
    """

    function: str
    after: str
    always: bool = False

    def __str__(self) -> str:
        return f"{self.function}, after {self.after}"


@dataclass(frozen=True)
class Extension:
    """A rule of policies that extends a rule of the core, such as ``{scaled_row: heads, scale: 0.5}``.

    Attributes:
        rule: The rule of the core that shards the layer: ``column``, ``row`` or ``embedding``.
        numbers: The further keys, each with a number. They are in ``ModulePlan.extension`` of the module's plan, for a
            step of the feature that swaps its class (:func:`autopar.swap.swap`).
    """

    rule: str
    numbers: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.rule} with {', '.join(self.numbers) or 'nothing more'}"


@dataclass(frozen=True)
class Feature:
    """The entries of one feature. Each attribute below ``library`` is a table.

    Planners and steps of a feature in :data:`SETTINGS` are called if the configuration uses it (or with ``always``),
    and entries of other features in every ``initialize``. Functions that plan must not change the model or communicate,
    and their results must be identical on all ranks.

    Attributes:
        name: The name of its folder.
        about: The purpose in a few words, for lists.
        library: The package whose objects it is for, or "". The feature adds nothing until the user has imported it.
        names: The public names of ``autopar`` in :data:`OF_FEATURES`, imported at their first use.
        commands: The commands of the command line. Importing one adds it to :data:`autopar.cli.app.app`, without torch.
        policies: The words that a user may write instead of a policy; the core requests ``derive``. ``tree(model)`` is
            called once in an ``initialize``, and returns the YAML of a policy as plain data.
        variables: The variables of the environment. ``begin()`` is called first in every ``initialize`` if one is set.
        toolbox: The names of ``autopar.tensor_parallel``, imported at their first use.
        mesh_names: The classes whose methods are added to the mesh (:class:`autopar.distributed.mesh.MPU`, ``self``),
            looked up for a name that the mesh lacks.
        transports: The transports of collectives between the ranks of one axis.
            ``choose(axis, group, asked, control)`` is called once for the tensor-parallel axis of a new mesh, on
            all its ranks. It returns the transport, or None to use the process group.
        planners: The plans of the feature. ``plan(plans, config, stages)`` is called with planned tensors and stages
            (:class:`autopar.dry_run.plan_model.ModelPlans`), in the order of names. Its result (None: the feature is
            not used) is kept under the entry's name in ``Plans.features`` and ``Parallelized.features``; ranks compare
            its ``to_json()``.
        matches: The keys of a policy's rules that shard modules over more ranks than tensor parallelism; the core
            requests ``by_expert``. ``lay(matches, root, ranks)`` is called before matches become layouts. It returns
            the matches to continue with (``RuleMatch.rules`` makes the layouts), the attributes that change, and the
            kinds of rules of these modules.
        additions: The modules in a model that its policy does not describe. ``addition(root)`` is made for each plan.
            ``check(tp, pp)`` is called before planning, and raises ConfigError. ``rules(matches, modules, tp)`` is
            called after the policy's modules have plans. It yields each rule with the match whose units it has.
        guards: The checks of values that ranks compare. ``forward``:
            ``make(inner, mpu, config, failures, draws, steps)`` is called for each model of which several ranks get the
            same batch. The model's hooks call ``before_forward``, ``after_forward``, ``report``, ``reset``,
            ``check_call`` and ``first_only(compare, watch)`` of the returned object on every rank. They read its
            ``is_silent``, and set ``begun`` to the values of the functions in ``Region.beginning``. ``step``:
            ``make(mpu, failures, full_every, experts)`` is called if there are replicas, and
            ``compare(optimizer, progress, closure, scaled)`` of its result before each step.
        rules: The rules of plans. An entry is the mixin that
            :func:`autopar.tensor_parallel.region_modules.region_class` puts before the class of a module when layers
            are swapped, or a function of that class that returns the mixin. ``autopar_state`` of a mixin lists the
            attributes that its instances add.
        extensions: The rules of policies, by name.
        steps: The steps of ``initialize``, by name.
        models: The models of a library in :data:`LIBRARIES`: an object with its ``name``, and the start ``stem`` of the
            names of its files of weights. ``owns(module)`` is called with the modules of a user's model.
            ``policy(model)`` returns the policy of such a model, or raises UnsupportedModelError.
            ``sample(model, batch, length)`` returns small inputs on the meta device, or raises ValueError.
            ``rows(model, ranks)`` returns a plan for context parallelism, or raises ConfigError
            (:class:`autopar.features.context_parallel.state.RowPlan`).
            ``config_writer(model)`` returns a function that writes ``config.json`` into a folder. ``wrote(path)``
            returns whether the library wrote the ``config.json`` at a path, ``class_of(path)`` the class of its model,
            and ``build(path)`` the model.
            ``tokens(model, frames, height, width)`` counts the tokens of an image or video.
        forms: The forms in which a library stores weights (packed, with scales), by the library's module. If that
            module is loaded, ``find(module)`` is called with layers, at any time outside of a forward. It returns the
            :class:`autopar.stored.StoredWeight` of the layer, or None.
        quantizers: The models that another library quantizes, by its name: an object with three methods, which raise
            ConfigError for unsupported models. ``check(what, method)`` is called before such a model is planned or
            read, and ``check_config(what, text)`` with its ``config.json`` before that. ``read(load, model, config)``
            returns the function that loads it without memory, and its config.
        parts: The parts of a checkpoint, by name: an object with two methods. ``collect(model, state)`` is called by a
            save and returns tensors, plans and notes. ``restore(model, state, shards, check=True)`` is called by a load
            before anything changes, and then without ``check``.
    """

    name: str
    about: str
    library: str = ""
    names: Entries = field(default_factory=dict)
    commands: Entries = field(default_factory=dict)
    policies: Entries = field(default_factory=dict)
    variables: Entries = field(default_factory=dict)
    toolbox: Entries = field(default_factory=dict)
    mesh_names: Entries = field(default_factory=dict)
    transports: Entries = field(default_factory=dict)
    planners: Entries = field(default_factory=dict)
    matches: Entries = field(default_factory=dict)
    additions: Entries = field(default_factory=dict)
    guards: Entries = field(default_factory=dict)
    rules: Entries = field(default_factory=dict)
    extensions: Mapping[str, Extension] = field(default_factory=dict)
    steps: Mapping[str, Step] = field(default_factory=dict)
    models: Entries = field(default_factory=dict)
    forms: Entries = field(default_factory=dict)
    quantizers: Entries = field(default_factory=dict)
    parts: Entries = field(default_factory=dict)


TABLES = tuple(each.name for each in fields(Feature))[3:]
# Fields of a configuration that use a feature with any value except these.
SETTINGS: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "activation_checkpointing": ("activation_checkpointing", (False,)),
    "context_parallel_size": ("context_parallel", (1,)),
    "expert_parallel_size": ("experts", (1,)),
    "sequence_parallel": ("sequence_parallel", (False,)),
    "cpu_transport": ("host_transport", ("auto", "gloo")),
}

# Rules of policies and plans that features add: entries of their tables ``matches`` and ``rules``.
RULES = ("by_expert", "calls_experts", "expert_modules", "experts")

# Libraries with models that are not models of transformers: keys of a policy's ``match``, and of the table ``models``.
LIBRARIES = ("diffusers",)

# Public names of the package that features add.
OF_FEATURES: Mapping[str, str] = {
    **dict.fromkeys(("metrics", "plan_memory", "rehearse", "summary", "verify"), "tools"),
    "expert_load": "experts",
    **dict.fromkeys(("full_params", "full_tensor", "local_hooks"), "user_code"),
    **dict.fromkeys(("gather_for_metrics", "prepare_dataloader"), "data_loader"),
}

# Entries that a policy, a model, user code or the environment uses -> the feature that has them.
HOMES: Mapping[str, str] = {
    **OF_FEATURES,
    **dict.fromkeys((*RULES, "router_loss"), "experts"),
    **dict.fromkeys((TRACE, "derive"), "tools"),
    **dict.fromkeys(("transformers", "base"), "quantized"),
    **dict.fromkeys(("toolbox", "RandomStateTracker"), "megatron"),
    "adapters": "peft",
    "generate": "generation",
    "guards": "rank_checks",
    **{name: name for name in LIBRARIES},
}


class MissingFeatureError(ConfigError, AttributeError):
    """A public name belongs to a feature that is not installed."""


@functools.cache
def features() -> tuple[Feature, ...]:
    """Return the installed features, by name.

    Raises:
        ConfigError: A feature of another distribution cannot be imported, or two have the same name.
    """
    names = [TOOLS] if _is_there(TOOLS) else []
    if _is_there(GROUP):
        folder = importlib.import_module(GROUP)
        names += [f"{GROUP}.{module.name}" for module in pkgutil.iter_modules(folder.__path__)]
    found = {name.rpartition(".")[2]: importlib.import_module(name).FEATURE for name in names}
    for point in _entry_points():
        try:
            feature = point.load()
        except Exception as error:
            raise ConfigError(f"feature {point.name} ({point.value}) cannot be imported: {error}") from error
        if feature.name in found:
            raise ConfigError(f"feature {feature.name} ({point.value}) is installed already\n  Rename one of them.")
        found[feature.name] = feature
    return tuple(found[name] for name in sorted(found))


def _entry_points() -> Iterable[Any]:
    from importlib.metadata import entry_points  # takes half of the time of import autopar

    return entry_points(group=GROUP)


def _is_there(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # None for a folder with only caches


def load(entry: str) -> Any:
    """Import the object of a ``"module:attribute"`` string."""
    module, _, name = entry.partition(":")
    return getattr(importlib.import_module(module), name)


def entries(table: str, config: Any = None) -> Iterator[tuple[str, Any]]:
    """Import and yield all entries ``(name, object)`` of a table, in the order of features' names.

    Args:
        config: The configuration that must use the feature; None for all features.
    """
    for feature in asked(config):
        for name, entry in getattr(feature, table).items():
            yield name, load(entry)


def entry(table: str, name: str, what: str = "") -> Any:
    """Return the object of one entry; None if no feature has it.

    Args:
        what: The reason why its feature in :data:`HOMES` must be installed; "" if it is optional.

    Raises:
        ConfigError: The feature is required and not installed.
    """
    found = next((known[name] for known in (getattr(each, table) for each in features()) if name in known), None)
    if what and name in HOMES:
        need(name, what)
    return None if found is None else load(found)


def library_of_config(path: Path) -> Any:
    """Return the entry of the table ``models`` whose library wrote a ``config.json``, or None."""
    found = (entry("models", name) for name in LIBRARIES if path.is_file())
    return next((library for library in found if library is not None and library.wrote(path)), None)


def extensions() -> Mapping[str, Extension]:
    """Return the rules of policies that features add, by name."""
    return {name: extension for feature in features() for name, extension in feature.extensions.items()}


def public_name(name: str) -> Any:
    """Return the object of a public name that a feature adds, or raise MissingFeatureError."""
    try:
        need(name, f"autopar.{name}")
    except ConfigError as error:
        raise MissingFeatureError(str(error)) from None
    return entry("names", name)


def lazy_names(
    package: str, homes: Mapping[str, str | Callable[[str], Any]], hint: Callable[[str], str] = lambda name: ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package that imports its public names at their first use.

    Args:
        package: The ``__name__`` of the package.
        homes: Name -> the module that has it (``package.name`` for a module), or a function that finds it.
        hint: A function of a missing name that returns the end of the error.
    """

    def find(name: str) -> Any:
        if name not in homes:
            more = hint(name)
            raise AttributeError(f"module '{package}' has no attribute '{name}'{'.' if more else ''}{more}")
        home = homes[name]
        if isinstance(home, str):
            module = importlib.import_module(home)
            value = module if home == f"{package}.{name}" else getattr(module, name)
        else:
            value = home(name)
        setattr(sys.modules[package], name, value)
        return value

    return find, lambda: sorted({*vars(sys.modules[package]), *homes})


def asked(config: Any) -> list[Feature]:
    """Return the features that a configuration uses, and features without a setting; None: all features."""
    if config is None:
        return _usable()
    turned = {feature: getattr(config, key) not in without for key, (feature, without) in SETTINGS.items()}
    return [feature for feature in _usable() if turned.get(feature.name, True)]


def _usable() -> list[Feature]:
    return [feature for feature in features() if not feature.library or feature.library in sys.modules]


def in_order(steps: Sequence[Callable[..., Any]], config: Any) -> tuple[Callable[..., Any], ...]:
    """Return the steps of the core and of the configuration's features, each after its ``after``.

    Raises:
        ConfigError: A step in ``after`` does not exist.
    """
    ordered: list[Callable[..., Any] | None] = list(steps)
    names, turned_on, usable = [step.__name__ for step in steps], asked(config), _usable()
    for feature in features():
        for own, step in feature.steps.items():
            if step.after not in names:
                raise ConfigError(f"feature {feature.name}: step {own} follows '{step.after}', which does not exist")
            used = feature in turned_on or (step.always and feature in usable)
            place = names.index(step.after) + 1
            ordered.insert(place, load(step.function) if used else None)
            names.insert(place, own)
    return tuple(filter(None, ordered))


def begin_asked() -> None:
    """Start the features of the environment's variables. Raises ConfigError if one is not installed."""
    for name in dict.fromkeys([TRACE, *(name for each in features() for name in each.variables)]):
        if value := os.environ.get(name):
            entry("variables", name, f"{name}={value}")()


def check_settings(config: Any) -> None:
    """Raise ConfigError if a configuration uses a feature that is not installed."""
    for key, (feature, without) in SETTINGS.items():
        value = getattr(config, key)
        if value not in without:
            need(feature, f"{key}: {value}")


def installed(name: str) -> bool:
    """Return whether a feature, or the feature of an entry in :data:`HOMES`, is installed."""
    return any(each.name == HOMES.get(name, name) for each in features())


def missing(name: str, what: str) -> str:
    """Return the end of an error, that ``what`` needs a feature (:func:`installed`); "" if it is installed."""
    return "" if installed(name) else f" {what} need the feature '{HOMES.get(name, name)}', which is not installed."


def need(name: str, what: str) -> None:
    """Raise ConfigError unless a feature is installed (:func:`installed`).

    Args:
        what: The reason: a setting with its value, a rule with its file and line, or a kind of model.
    """
    if not installed(name):
        feature, names = HOMES.get(name, name), [each.name for each in features()]
        folder = "autopar/tools" if feature == "tools" else f"autopar/features/{feature}"
        raise ConfigError(
            f"{what} needs the feature '{feature}', which is not installed.\n"
            f"  Installed: {', '.join(names) or 'none'}. Restore the folder {folder}."
        )
