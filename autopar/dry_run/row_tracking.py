"""Row tracking: whether what runs between two points of a forward works on each row of the sequence by itself.

Also the search for the modules of a model that do not (:class:`RowSearch`).

Sequence and context parallelism leave rows of the sequence on different ranks. That is right for a block whose
operations treat rows alike and apart (norms, products, dropout), and wrong, with fitting shapes, for one that mixes
them (a convolution, a softmax over the rows, positions counted from the number of rows). So the block runs on the meta
device with a number of rows that is a prime which no other size has: a tensor holds rows in the one dim that the prime
divides. An operation on rows must keep exactly one such dim and must not work along it; of what is not known, that is
not assumed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel

from autopar.compat.tensors import base_of, schema_of, tree_map
from autopar.dry_run.inputs import sample_inputs
from autopar.dry_run.operators import ALONG, CONSTANT, EMPTY, SIZES, ValuelessTracking, name_of
from autopar.errors import ConfigError
from autopar.plan.stages import dropped_blocks, lies_in
from autopar.tensor_tracking import tensors_in

_PRIMES = (29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 23, 19, 17, 13, 11, 7, 5)
_TRIES = 100


class MixedRows(Exception):
    """An operation on rows that mixes them, or of which that is not known.

    Attributes:
        between: it is what runs between blocks.
    """

    def __init__(self, operation: str, between: bool = False) -> None:
        super().__init__(operation)
        self.between = between


def prime_beside(model: nn.Module, ranks: int, longest: int | None = None) -> int | None:
    """Return a number of rows for each of ``ranks`` that divides no size of a parameter; None if there is none.

    Args:
        longest: sequence that the model takes.
    """
    sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape if size > 1}
    sizes |= {ranks, ranks + 1}
    fitting = (p for p in _PRIMES if longest is None or p * ranks <= longest)
    return next((p for p in fitting if not any(size % p == 0 for size in sizes)), None)


LENGTHS = ("max_position_embeddings", "n_positions", "max_target_positions", "n_ctx", "max_seq_len")
"""Names of the longest sequence of a model in its config."""


def longest_of(config: Any, names: Sequence[str] = LENGTHS) -> int | None:
    """Return the longest sequence that a model takes, as far as its config says."""
    found = (getattr(config, name, None) for name in names)
    return next((length for length in found if type(length) is int and length > 0), None)


class Misfit(Exception):
    """A run over rows that fails in the module ``path``, or ``between`` blocks, or makes something else.

    ``inputs``: names of other arguments of blocks that are as long as the sequence.
    """

    def __init__(self, path: str, reason: str, between: bool = False, inputs: tuple[str, ...] = ()) -> None:
        super().__init__(reason)
        self.path, self.between, self.inputs = path, between, inputs


class RowSearch(ABC):
    """Runs of a model over rows of the sequence, without data, in one way after another until nothing mixes rows.

    Args:
        model: the Hugging Face model, only read.
        ranks: over which sequences are sharded.
        lists: paths of its blocks, each list in forward order.

    Attributes:
        blocks: paths of all blocks.
        prime: of :func:`prime_beside`: rows of one rank.

    Raises:
        ConfigError: a setting of the model may leave out its last block.
    """

    prime: int

    def __init__(self, model: PreTrainedModel, ranks: int, lists: Sequence[tuple[str, ...]]) -> None:
        self.model, self.ranks, self.lists = model, ranks, tuple(lists)
        self.blocks = [block for each in lists for block in each]
        self.kinds = {path: type(module) for path, module in model.named_modules(remove_duplicate=False)}
        dropped = dropped_blocks(model)
        if dropped:
            raise self.refusal(f"{dropped} leaves out blocks, and the last of them makes sequences whole")

    @abstractmethod
    def attempt(self) -> None:
        """Run the model as it is planned now. Raises Misfit."""

    @abstractmethod
    def change(self, failure: Misfit) -> bool:
        """Change the plan after a failure: the next module around it is made whole; False if nothing is left."""

    @abstractmethod
    def refusal(self, reason: str) -> ConfigError:
        """Return the error of a model that does not fit."""

    def words(self, failure: Misfit) -> str:
        """Return the reason of a refusal."""
        return str(failure)

    def runs(self) -> bool:
        """Return whether the plan holds."""
        try:
            self.attempt()
        except Misfit:
            return False
        return True

    def settle(self) -> None:
        """Change the plan until it holds. Raises ConfigError if it never does."""
        failures: list[Misfit] = []
        while len(failures) < _TRIES:
            try:
                self.attempt()
                return
            except Misfit as error:
                failures.append(error)
            if not self.change(failures[-1]):
                raise self.refusal(self.words(failures[-1]))
        raise self.refusal(self.words(failures[0]))

    def sample(self, batch: int) -> dict[str, Any]:
        """Return inputs for all ranks, on the meta device."""
        try:
            return sample_inputs(self.model, batch, self.ranks * self.prime)
        except ValueError as error:
            raise self.refusal(f"the dry run has {error}") from None

    def block_of(self, path: str) -> str:
        """Return the block that a module lies in; empty outside of blocks."""
        return next((block for block in self.blocks if lies_in(path, block)), "")

    def alike(self, path: str, blocks: Sequence[str]) -> list[str]:
        """Return the modules of the same class in the same place of these blocks."""
        own = path.removeprefix(self.block_of(path))
        return [block + own for block in blocks if self.kinds.get(block + own) is self.kinds[path]]


class RowTracking(ValuelessTracking):
    """A dispatch mode that follows the tensors which hold rows.

    Args:
        prime: of :func:`prime_beside`: rows of this rank.
        ranks: the sequence has ``ranks * prime`` rows. The batch is not a multiple of ``ranks``.

    Raises:
        MixedRows: in the forward, at the operation.
    """

    def __init__(self, prime: int, ranks: int) -> None:
        super().__init__()
        self.prime, self.ranks = prime, ranks
        self._rows: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._tables: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._paused = 0

    def mark_rows(self, value: Any) -> Any:
        """Mark the tensors in ``value`` that have a dim of rows; returns ``value``."""
        for tensor in tensors_in(value):
            if self._dims(tensor):
                self._rows[tensor] = True
        return value

    def mark_table(self, tensor: torch.Tensor) -> None:
        """Mark a table of all rows by all rows, which nothing that follows rows may use."""
        self._tables[tensor] = True

    def holds_rows(self, value: Any) -> bool:
        """Return whether some tensor in ``value`` holds rows."""
        return any(tensor in self._rows for tensor in tensors_in(value))

    def whole(self, value: Any) -> Any:
        """Return other tensors of the same shapes, which hold no rows."""
        with self.paused():
            return tree_map(lambda x: torch.empty_like(x) if isinstance(x, torch.Tensor) else x, value)

    mixed = MixedRows

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Follow nothing inside: what runs there is known."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = name_of(func)
        if name in _READING and not self._paused and self.holds_rows(args):
            raise MixedRows(f"{name}: what it finds is another thing on each rank")
        return super().__torch_dispatch__(func, types, args, kwargs)

    def track(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if self._paused:
            return
        name = name_of(func)
        if any(tensor in self._tables for tensor in tensors_in((args, kwargs))):
            raise MixedRows(f"{name}: uses a table of rows by rows")
        held = [tensor for tensor in tensors_in((args, kwargs)) if tensor in self._rows]
        if not held:
            sizes = [size for x in tensors_in(result) for size in x.shape] if name in _COUNTING else []
            if any(size and size % self.prime == 0 and size // self.prime % self.ranks for size in sizes):
                raise MixedRows(f"{name}: counts the rows of one rank from 0")
            return
        if name in CONSTANT | EMPTY | SIZES:
            return
        if torch.Tag.pointwise not in func.tags and name not in _APART:
            rule, row = _BY_DIM.get(name), self._dims(held[0])
            if rule is None:
                raise MixedRows(f"{name}: not known to work on each row by itself")
            if row and row[0] in {dim % held[0].ndim for dim in rule(held[0], _named(func, args, kwargs))}:
                raise MixedRows(f"{name}: works along the rows of {list(held[0].shape)}")
        for tensor in tensors_in(result):
            dims = self._dims(tensor)
            if len(dims) != 1:
                does = "leaves no dim of rows" if not dims else "makes a table of rows by rows"
                raise MixedRows(f"{name}: {does}, {[list(x.shape) for x in held]} -> {list(tensor.shape)}")
            self._rows[tensor] = True
            if base_of(tensor) is not None and schema_of(func).is_mutable:
                self._rows[base_of(tensor)] = True

    def _dims(self, tensor: torch.Tensor) -> list[int]:
        return [dim for dim, size in enumerate(tensor.shape) if size and size % self.prime == 0]


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operation by name, with their defaults."""
    named = {a.name: a.default_value for a in schema_of(func).arguments if a.has_default_value()}
    named.update(zip((a.name for a in schema_of(func).arguments), args, strict=False))
    return {**named, **kwargs}


def _along(held: torch.Tensor, given: dict[str, Any]) -> list[int]:
    value = next((given[name] for name in ("dim", "dims") if given.get(name) is not None), None)
    return list(range(held.ndim)) if value is None else [value] if isinstance(value, int) else list(value)


# What tells values to Python.
_READING = frozenset(("_local_scalar_dense", "nonzero"))
# What counts positions.
_COUNTING = frozenset(("arange", "linspace", "tril_indices", "triu_indices", "range", "eye"))
# What treats each row by itself whenever one dim of rows is left: the size of the result tells.
_APART = frozenset(
    (
        *("mm", "bmm", "addmm", "addmv", "mv", "dot", "baddbmm", "linear", "matmul", "sum", "mean", "var", "std"),
        *("var_mean", "amax", "amin", "max", "min", "any", "all", "prod", "argmax", "argmin", "logsumexp", "norm"),
        *("linalg_vector_norm", "native_dropout", "bernoulli", "bernoulli_", "rand_like", "randn_like", "dropout"),
        *("clone", "copy_", "_to_copy", "contiguous", "detach", "alias", "lift_fresh", "fill_", "zero_", "copy"),
        *("view", "_unsafe_view", "reshape", "_reshape_alias", "transpose", "t", "permute", "unsqueeze", "squeeze"),
        *("expand", "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "repeat", "movedim", "narrow"),
        *("masked_fill", "masked_fill_", "where", "is_same_size", "uniform_", "normal_", "_conj", "view_as_real"),
        *("view_as_complex", "real", "imag", "diagonal", "constant_pad_nd", "flatten", "unflatten", "_softplus"),
        *("set_", "record_stream", "swapaxes", "_fused_dropout", "resolve_conj", "polar"),
    )
)


# What works along one dim, or several, and keeps its size: those must not be the rows'.
_BY_DIM: dict[str, Callable[[torch.Tensor, dict[str, Any]], list[int]]] = {
    **dict.fromkeys((*ALONG, "flip", "roll", "renorm", "cat", "stack", "glu", "gather", "index_select"), _along),
    **dict.fromkeys(("scatter", "scatter_", "scatter_add", "scatter_add_", "index_add", "index_add_"), _along),
    **dict.fromkeys(("index_copy", "index_copy_", "index_fill", "repeat_interleave"), _along),
    **dict.fromkeys(
        ("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm"),
        lambda _, given: [-1 - n for n in range(len(given["normalized_shape"]))],
    ),
    **dict.fromkeys(("convolution", "native_group_norm"), lambda held, _: list(range(1, held.ndim))),
    **dict.fromkeys(
        ("index", "index_put", "index_put_", "_unsafe_index"),  # of rows that are picked; not where rows look one up
        lambda held, given: [
            n for n, index in enumerate(given["indices"]) if index is not None and given["self"] is held
        ],
    ),
    "embedding": lambda held, given: [] if given["indices"] is held else [0],
}
