"""Forward hooks of a tensor-parallel model, and the methods of transformers that are replaced.

Hooks are objects and methods are bound, so that ``copy.deepcopy`` of the model carries over both.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.stopping_criteria import ConfidenceCriteria
from transformers.generation.streamers import BaseStreamer, TextStreamer

from autopar import activation_checkpoint
from autopar.distributed import gloo_collectives
from autopar.distributed.collectives import run
from autopar.distributed.derivatives import refuse_transforms
from autopar.distributed.digest import extremes
from autopar.distributed.failures import FailureLog
from autopar.distributed.mesh import MPU
from autopar.distributed.rng import sync_generators
from autopar.distributed.shard_reads import hidden, switch
from autopar.errors import ConfigError, first_line
from autopar.foreign.modules import forward_hooks, remove_forward_hooks
from autopar.guards.forward import ForwardCheck, named_arguments, parameters_of
from autopar.guards.model_changes import ModuleTree
from autopar.layout import Layout
from autopar.plan.plan import Plan
from autopar.swap import bind, unbind
from autopar.tensor_parallel import continuous_batching
from autopar.tensor_parallel.attentions import gather_attentions, gather_hidden_states, head_layouts
from autopar.tensor_parallel.compiled_forward import CompiledCheck, checked_arguments, no_graph_of_its_own
from autopar.tensor_parallel.given_caches import MarkCaches, ShardCaches, cache_layouts, goes_on
from autopar.tensor_parallel.regions import Region
from autopar.tensor_parallel.whole_hooks import WholeHooks

_OF_TOKENS = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria, ConfidenceCriteria)


class AgreedCriteria(StoppingCriteria):
    """Stop a sequence on all ranks of a model replica as soon as one of the criteria says so on one of them."""

    def __init__(self, criteria: Sequence[Any], failures: FailureLog) -> None:
        self.criteria, self.failures = StoppingCriteriaList(criteria), failures

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        """Return which sequences are done, ``[batch]``. A collective of the replica."""
        axis = self.failures.mpu.model
        done = self.criteria(input_ids, scores, **kwargs).to(torch.int32)
        with self.failures.blame("agreeing whether generate has come to its end", axis.ranks):
            run(gloo_collectives.all_reduce, axis, done)
        return done > 0

    def __getattr__(self, name: str) -> Any:
        """Return what one of the criteria has: generate looks for ``eos_token_id``."""
        for one in vars(self).get("criteria", ()):
            if hasattr(one, name):
                return getattr(one, name)
        raise AttributeError(name)


class GuardedStreamer(BaseStreamer, StoppingCriteria):
    """A streamer that may raise on one rank alone: then ``generate`` stops on all ranks of the replica.

    Args:
        streamer: None on a rank without one.

    Attributes:
        error: raised by the streamer.
    """

    def __init__(self, streamer: Any) -> None:
        self.streamer = streamer
        self.error: Exception | None = None

    def put(self, value: Any) -> None:
        """Give tokens to the streamer, until it raises."""
        self._try("put", value)

    def end(self) -> None:
        """Tell the streamer that there are no more tokens."""
        self._try("end")

    def _try(self, method: str, *args: Any) -> None:
        try:
            if self.streamer is not None and self.error is None:
                getattr(self.streamer, method)(*args)
        except Exception as error:
            self.error = error

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return which sequences are done: all of them, if the streamer has raised."""
        return torch.full((len(input_ids),), self.error is not None, device=input_ids.device)


def agreed(criteria: Sequence[Any], failures: FailureLog) -> StoppingCriteriaList:
    """Return the criteria, with those on which ranks may differ as one on which they agree, the last one."""
    apart = [one for one in criteria if type(one) not in _OF_TOKENS]
    alike = [one for one in criteria if type(one) in _OF_TOKENS]
    return StoppingCriteriaList([*alike, AgreedCriteria(apart, failures)] if apart else alike)


class Hook:
    """Base of the forward hooks that :func:`autopar.tensor_parallel.hooks.detach` takes away."""


_NAMES = ("_autopar_failures", "_autopar_check", "_autopar_region")
_OWNER = "tensor parallelism"
T = TypeVar("T")


def attach(
    model: nn.Module,
    plan: Plan,
    mpu: MPU,
    region: Region,
    failures: FailureLog,
    check: ForwardCheck | None,
) -> None:
    """Register hooks and methods on ``model`` and its base model (which users call by itself, too).

    A plain module gets the hooks only.

    Args:
        failures: where ``generate`` publishes its errors.
        check: compares over tp and cp when a forward begins; None for no checks.
    """
    layouts = head_layouts(plan) if plan.tp > 1 and isinstance(model, PreTrainedModel) else []
    for module in _callable_alone(model):
        tree = ModuleTree(module) if plan.tp > 1 else None
        before = BeforeForward(region, check, tree, parameters_of(module))
        before.outermost, before.sharded = module is model, plan.shards > 1 or mpu.pp.size > 1
        before.together = before.sharded or mpu.cp.size > 1
        if check is not None or plan.tp > 1:
            before.model = module
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(AfterForward(mpu, region, layouts, check), always_call=True)
        if isinstance(module, PreTrainedModel):
            if mpu.tp_pp.size > 1:
                module.register_forward_pre_hook(ShardCaches(mpu, cache_layouts(module)), with_kwargs=True)
                module.register_forward_hook(MarkCaches())
            bind(module, _OWNER, resize_token_embeddings=_refuse_resize)
            if (mpu.model.size > 1 or plan.experts) and callable(getattr(module, "generate", None)):
                bind(module, _OWNER, generate=_generate, _get_stopping_criteria=_get_stopping_criteria)
            if mpu.world_size > 1 and callable(getattr(module, "init_continuous_batching", None)):
                bind(module, _OWNER, init_continuous_batching=continuous_batching.init_continuous_batching)
                bind(module, _OWNER, generate_batch=continuous_batching.generate_batch)
        module._autopar_failures = failures  # type: ignore[assignment]
        module._autopar_check = check  # type: ignore[assignment]
        module._autopar_region = region  # type: ignore[assignment]


def look_again(model: nn.Module) -> None:
    """Take the parameters that ``model`` has now for its own: FSDP has made others, and keeping these costs memory."""
    for module in _callable_alone(model):
        for _, _, hook in forward_hooks(module):
            if isinstance(hook, BeforeForward) and hook.tree is not None:
                hook.tree.check(module)


def detach(model: nn.Module) -> None:
    """Undo :func:`attach`."""
    for module in _callable_alone(model):
        continuous_batching.forget(module)
    unbind(model, _OWNER)
    for module in _callable_alone(model):
        for _, _, hook in forward_hooks(module):
            if isinstance(hook, BeforeForward):
                hook.whole_hooks.unwrap()
        remove_forward_hooks(module, _HOOKS)
        for name in _NAMES:
            module.__dict__.pop(name, None)


def _callable_alone(model: nn.Module) -> Iterator[nn.Module]:
    """The model, and the Hugging Face models inside."""
    yield from (module for module in model.modules() if module is model or isinstance(module, PreTrainedModel))


class BeforeForward(Hook, CompiledCheck):
    """Forward pre-hook: check weights, modules, and consistency over tp and cp, before the outermost model runs."""

    outermost = sharded = together = False
    model: nn.Module

    def __init__(
        self,
        region: Region,
        check: ForwardCheck | None,
        tree: ModuleTree | None,
        names: tuple[str, ...],
    ) -> None:
        self.region, self.check, self.tree, self.names = region, check, tree, names
        self.whole_hooks = WholeHooks(region.axis)
        self.register()

    @no_graph_of_its_own
    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        compiling, changed = torch.compiler.is_compiling(), None
        if self.region.batching is not None and not compiling:
            continuous_batching.check_thread(self.region.batching())
        silent = self.tree is None if self.check is None else self.check.is_silent
        if self.sharded and not compiling:
            switch.off = True  # layers read their shards
            if not torch.is_grad_enabled():
                switch.hide(True)
        if self.outermost and not compiling:
            self.region.running = 0  # an interrupted forward (Ctrl-C) did not end
        if self.region.running == 0 and compiling and not silent:  # a step of decoding may become a CUDA graph
            changed = checked_arguments(self, named_arguments(self.names, args, kwargs), args, kwargs)
        elif self.region.running == 0 and not compiling:
            named = named_arguments(self.names, args, kwargs)
            if self.whole_hooks.may_gather:
                self.note_hooks(self._or_report(lambda: self.whole_hooks.wrap(model)))
            self._check(model, named, going_on=not silent and self.check is not None and goes_on(args, kwargs))
            self.region.expect_logits(kwargs.get("labels") is not None)
        self.region.start()
        return changed

    def note_hooks(self, places: str) -> None:
        """Let the ranks compare where hooks are that gather, before they do."""
        if self.check is not None:
            self.check.hooks = places

    def run(self, arguments: Mapping[str, Any]) -> None:
        """Check a forward that is a graph."""
        self._check(self.model, arguments, compiled=True)

    def _check(
        self, model: nn.Module, arguments: Mapping[str, Any], *, compiled: bool = False, going_on: bool = False
    ) -> None:
        if self.together:
            refuse_transforms(lambda: [*model.parameters(), arguments])
        if self._or_report(lambda: self.tree is not None and self.tree.check(model)):
            self.region.find_dropout(model)  # also in new modules
            if self.check is not None:
                self.check.reset()
        if self.check is not None:
            before = functools.partial(self.check.before_forward, model, compiled=compiled, going_on=going_on)
            before(arguments)

    def _or_report(self, step: Callable[[], T]) -> T:
        """Do what this rank alone may refuse the forward for; then the others raise as well."""
        try:
            return step()
        except Exception as error:
            if self.check is not None:
                self.check.report(f"refused: {first_line(error)}")
            raise


class AfterForward(Hook):
    """Forward hook, called after an error too: end the region, gather attention maps."""

    def __init__(self, mpu: MPU, region: Region, layouts: list[Layout], check: ForwardCheck | None) -> None:
        self.mpu, self.region, self.layouts, self.check = mpu, region, layouts, check

    @no_graph_of_its_own
    def __call__(self, model: Any, args: Any, output: Any) -> Any:
        self.region.finish()
        if not self.region.running and not torch.compiler.is_compiling():
            switch.off = False
            switch.hide(switch.generating)
        if output is not None and self.region.row_tensors:
            output = gather_hidden_states(output, self.region)
        if self.region.rows_are_out and output is not None and self.mpu.pp.size == 1:
            raise ConfigError(
                f"sequence_parallel: the last block of {type(model).__name__} did not run in this forward, so what its "
                "blocks made are rows of the sequence.\n  Leave no last block out, or leave out sequence_parallel."
            )
        if self.region.running or self.mpu.tp_cp.size == 1:
            return output  # inside another of the model's forwards
        check = None if torch.compiler.is_compiling() else self.check
        if check is not None and (output is not None or getattr(sys.exc_info()[1], "completes", False)):
            check.after_forward(model)
        return None if output is None else gather_attentions(output, self.mpu.tp, self.layouts)


_HOOKS = (Hook, ShardCaches, MarkCaches)


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``generate`` that samples alike on all ranks of a model replica, from the first one's random state.

    A ``TextStreamer`` prints on the first rank of the replica only; what gives the text to a program does so on all.
    A streamer that raises ends this call on all ranks. It raises where it did; other ranks return what there is.
    Replicas that share experts go on until the last of them has come to its end.
    """
    failures: FailureLog = self._autopar_failures
    check: ForwardCheck | None = self._autopar_check
    mpu, batching = failures.mpu, self._autopar_region.batching
    if batching is not None:
        continuous_batching.check_thread(batching())
    if mpu.model.rank != 0 and _prints(kwargs.get("streamer")):
        kwargs["streamer"] = None
    if mpu.shards.size > mpu.tp.size:
        kwargs["synced_gpus"] = True
    with failures.deadline(), failures.blame("a collective in generate", mpu.model.ranks):
        if check is not None and mpu.pp.size == 1:
            check.check_call("generate")
        sync_generators(mpu.model)
        guard = GuardedStreamer(kwargs.get("streamer"))
        given = guard.streamer is not None
        if extremes([int(given)], mpu.model.group)[0][0] if mpu.model.size > 1 else given:  # on some rank
            self._autopar_region.streamer = kwargs["streamer"] = guard
        first = contextlib.nullcontext() if check is None else check.first_only()
        try:
            with first, activation_checkpoint.paused(self), hidden():
                tokens = type(self).generate(self, *args, **kwargs)
        finally:
            self._autopar_region.streamer = None
    if guard.error is not None:
        raise guard.error
    return tokens


def _get_stopping_criteria(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the criteria that ``generate`` asks after each token; transformers' own method of this private name."""
    guard, criteria = self._autopar_region.streamer, type(self)._get_stopping_criteria(self, *args, **kwargs)
    return agreed([*criteria, *([] if guard is None else [guard])], self._autopar_failures)


def _prints(streamer: Any) -> bool:
    return isinstance(streamer, TextStreamer) and type(streamer).on_finalized_text is TextStreamer.on_finalized_text


def _refuse_resize(self: Any, *_: Any, **__: Any) -> NoReturn:
    raise ConfigError(
        f"resize_token_embeddings: the vocabulary of this {type(self).__name__} is sharded already. "
        "Resize before autopar.initialize, or after autopar.deparallelize(model)."
    )


_SEED = re.compile(r"_init_(\w*seed)")


def draw_seeds_alike(model: nn.Module) -> None:
    """Let layers draw the seed that they take for each forward from torch's CPU generator; :func:`detach` undoes it.

    Reversible layers compute their activations twice, and seed the generators before. A seed that each process takes
    from its operating system would let the ranks of a tensor-parallel group drop other elements of the same activation,
    and hash it into other buckets. The default generator is the same on all of them.
    """
    for module in model.modules():
        kind: Any = type(module)
        for name, attribute in _renewals(kind):
            if attribute in vars(module):
                bind(module, _OWNER, **{name: _drawn(attribute)})


@functools.cache
def _renewals(kind: Any) -> tuple[tuple[str, str], ...]:
    """Methods ``_init_..._seed`` that renew the attribute ``..._seed`` of a module."""
    found = [(name, match) for name in dir(kind) if (match := _SEED.fullmatch(name)) is not None]
    return tuple((name, str(match[1])) for name, match in found if callable(getattr(kind, name)))


def _drawn(attribute: str) -> Callable[[Any], None]:
    def renew(self: Any) -> None:
        seed = int(torch.randint(2**62, (), device="cpu").item())
        setattr(self, attribute, seed)
        torch.manual_seed(seed)

    return renew
