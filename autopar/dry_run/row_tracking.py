"""Row tracking: find out whether code treats each row (position) of the sequence separately.

:class:`RowSearch` finds the modules of a model that do not.

Sequence and context parallelism shard the rows of a sequence over ranks. This is correct for operations that treat each
row separately (norms, products, dropout). It is silently wrong for operations that mix rows (a convolution, a softmax
over the rows, positions counted from the number of rows). So the code runs on the meta device with a prime number of
rows that divides no other size: the dim that the prime divides holds the rows. An operation on rows must keep exactly
one such dim and must not work along it. Unknown operations count as mixing rows.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.compat.tensors import base_of, schema_of, tree_map
from autopar.dry_run import operators
from autopar.dry_run.inputs import sample_inputs
from autopar.dry_run.operators import ALONG, NORMS, REDUCTIONS, ValuelessTracking, arguments_of, dims_of, name_of
from autopar.errors import ConfigError, first_line
from autopar.plan.stages import dropped_blocks, lies_in
from autopar.policy.match import config_of, is_hugging_face_model, library_of
from autopar.tensor_tracking import tensors_in

_PRIMES = (29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 23, 19, 17, 13, 11, 7, 5)


class MixedRows(Exception):
    """An operation mixes rows or is unknown; ``between``: True if it runs between blocks."""

    def __init__(self, operation: str, between: bool = False) -> None:
        super().__init__(operation)
        self.between = between


def distinct_prime(model: nn.Module, ranks: int, longest: int | None = None) -> int:
    """Return a prime number of rows per rank that divides no size of a parameter; 0 if no known prime fits.

    Sequences longer than ``longest`` are a last resort; many models run on them without data.
    """
    sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape if size > 1}
    sizes |= {ranks, ranks + 1}
    found = [prime for prime in _PRIMES if not any(size % prime == 0 for size in sizes)]
    return next((prime for prime in found if longest is None or prime * ranks <= longest), found[0] if found else 0)


_LENGTHS = ("max_position_embeddings", "n_positions", "max_target_positions", "n_ctx", "max_seq_len")


class Misfit(Exception):
    """A run over rows fails in the module ``path`` or ``between`` blocks, or returns a wrong result."""

    def __init__(self, path: str, reason: str, between: bool = False) -> None:
        super().__init__(reason)
        self.path, self.between = path, between


class RowSearch(ABC):
    """Search for the modules of a model that need full sequences; all other modules run on sequence shards.

    The model runs without data. After each failure, the innermost module around it gets full sequences.

    Args:
        model: Hugging Face model, which stays unchanged.
        prefix: Path of the model in the names of ``elements``.
        elements, encoder: Paths of the blocks and the encoder, and its index or None (:mod:`autopar.plan.stages`).
        ranks: Number of ranks over which sequences are sharded.

    Attributes:
        lists: Paths of the blocks in forward order; two lists for an encoder-decoder model.
        blocks: Paths of all blocks.
        longest: Longest supported sequence minus two tokens; None if the config does not say.
        sized: Modules whose sizes the number of rows must not divide.
        prime: Number of rows per rank (:func:`distinct_prime`).
        batch: Number of sequences; not a multiple of ``ranks``.
        wholes: Paths of modules that run on full sequences.
        entries: Paths of modules whose own code runs on full sequences, unless they are in ``wholes``.
        full_blocks: True if a block may be in ``wholes``.
        outside: True if sequences are sharded outside blocks too.

    Raises:
        ConfigError: The model is not supported.
    """

    full_blocks = outside = False

    def __init__(self, model: nn.Module, prefix: str, elements: Sequence[str], encoder: int | None, ranks: int) -> None:
        self.model: Any = model
        self.ranks, self.batch, self.start = ranks, ranks + 1, f"{prefix}." if prefix else ""
        if not is_hugging_face_model(model):
            raise self.refusal("the model must be a Hugging Face model, which a dry run can check")
        paths = [path.removeprefix(self.start) for path in elements]
        cut = (paths,) if encoder is None else (paths[:encoder], paths[encoder + 1 :])
        self.lists = tuple(tuple(blocks) for blocks in cut if blocks)
        self.blocks = [block for each in self.lists for block in each]
        if not self.blocks:
            raise self.refusal("its policy must name blocks, around which sequences are sharded")
        if dropped := dropped_blocks(model):
            raise self.refusal(f"{dropped} skips blocks at random, but the last block must gather sequences")
        self.kinds = {path: type(module) for path, module in model.named_modules(remove_duplicate=False)}
        self.wholes: tuple[str, ...] = ()
        self.entries: tuple[str, ...] = ()
        config = config_of(model)
        if library_of(model) is None:
            config = config.get_text_config(decoder=True)  # an encoder may have a different length
        known = (getattr(config, name, None) for name in _LENGTHS)
        self.longest = next((length - 2 for length in known if type(length) is int and length > 0), None)
        self.sized = model if self.outside else nn.ModuleList([model.get_submodule(path) for path in self.blocks])
        self.prime = distinct_prime(self.sized, ranks, self.longest)
        if not self.prime:
            raise self.refusal("no sequence length differs from all other sizes")

    @abstractmethod
    def attempt(self) -> None:
        """Run the model with the current plan. Raises Misfit."""

    @abstractmethod
    def refusal(self, reason: str) -> ConfigError:
        """Return the error for a model that is not supported."""

    def otherwise(self, failure: Misfit) -> bool:
        """Change the plan after a failure that :meth:`widen` cannot repair; return whether the plan changed."""
        return False

    def words(self, failure: Misfit) -> str:
        """Return the reason of a refusal."""
        if self.longest is not None and self.prime * self.ranks > self.longest:
            return f"no sequence length up to {self.longest + 2} differs from all other sizes"
        return f"in {self.start}{failure.path}: {failure}" if failure.path else str(failure)

    def settle(self) -> None:
        """Change the plan until the model runs. Raises ConfigError if no plan works."""
        while True:
            try:
                return self.attempt()
            except Misfit as failure:
                if not self.widen(failure) and not self.otherwise(failure):
                    raise self.refusal(self.words(failure)) from None

    def run(self, model: nn.Module, inputs: dict[str, Any], tracking: ValuelessTracking, stack: list[str]) -> Any:
        """Run a copy of the model; raise Misfit for the last path in ``stack`` if rows do not fit."""
        try:
            with torch.no_grad(), warnings.catch_warnings(), tracking:
                warnings.simplefilter("ignore")
                with nullcontext() if library_of(self.model) is None else torch.device("meta"):
                    return model(**inputs)
        except MixedRows as error:
            raise Misfit(stack[-1] if stack else "", str(error), error.between) from error
        except Exception as error:
            raise Misfit(stack[-1] if stack else "", f"{type(error).__name__}: {first_line(error)}") from error

    def widen(self, failure: Misfit) -> bool:
        """Run the innermost module around a failure on full sequences; return False if all of them already do."""
        path, block = failure.path, self.block_of(failure.path)
        while block and lies_in(path, block) and (self.full_blocks or path != block):
            known = any(lies_in(path, each) for each in self.wholes)
            if not known and not any(path.startswith(f"{entry}.") for entry in self.entries):
                self.run_in_full(self.counterparts(path))
                return True
            path = path.rpartition(".")[0]
        return False

    def run_in_full(self, paths: Iterable[str]) -> None:
        """Run these modules, with all modules inside, on full sequences."""
        self.wholes = outermost((*self.wholes, *paths))
        self.entries = outermost(self.entries, self.wholes)

    def sample(self) -> dict[str, Any]:
        """Return inputs for all ranks, on the meta device."""
        try:
            return sample_inputs(self.model, self.batch, self.ranks * self.prime)
        except ValueError as error:
            raise self.refusal(str(error)) from None

    def block_of(self, path: str) -> str:
        """Return the block around a module; empty outside blocks."""
        return next((block for block in self.blocks if lies_in(path, block)), "")

    def counterparts(self, path: str) -> list[str]:
        """Return the modules of the same class at the same place in the other blocks of the list."""
        own = self.block_of(path)
        blocks, below = next(blocks for blocks in self.lists if own in blocks), path.removeprefix(own)
        return [block + below for block in blocks if self.kinds.get(block + below) is self.kinds[path]]


def outermost(paths: Iterable[str], others: Collection[str] = ()) -> tuple[str, ...]:
    """Return the paths that are not inside another path of ``paths``, and not in or inside ``others``."""
    listed = tuple(dict.fromkeys(paths))
    above = tuple(f"{path}." for path in (*listed, *others))
    return tuple(path for path in listed if path not in others and not path.startswith(above))


class RowTracking(ValuelessTracking):
    """A dispatch mode that follows the tensors that hold rows.

    Args:
        prime: Number of local rows (:func:`distinct_prime`).
        ranks: Number of ranks; the sequence has ``ranks * prime`` rows. The batch size is not a multiple of it.

    Raises:
        MixedRows: In the forward, at an operation that mixes rows.
    """

    def __init__(self, prime: int, ranks: int) -> None:
        super().__init__()
        self.prime, self.ranks = prime, ranks
        self._rows: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._tables: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._paused = 0

    def mark_rows(self, value: Any) -> Any:
        """Mark the tensors in ``value`` that have a dim of rows; return ``value``."""
        for tensor in tensors_in(value):
            if self._dims(tensor):
                self._rows[tensor] = True
        return value

    def mark_table(self, tensor: torch.Tensor) -> None:
        """Mark a table of all rows by all rows, which tracked code must not use."""
        self._tables[tensor] = True

    def holds_rows(self, value: Any) -> bool:
        """Return whether any tensor in ``value`` holds rows."""
        return any(tensor in self._rows for tensor in tensors_in(value))

    def unmarked(self, value: Any) -> Any:
        """Return new tensors of the same shapes that are not marked as rows."""
        with self.paused():
            return tree_map(lambda x: torch.empty_like(x) if isinstance(x, torch.Tensor) else x, value)

    mixed = MixedRows

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Disable tracking inside."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = name_of(func)
        if name in _READING and not self._paused and self.holds_rows(args):
            raise MixedRows(f"{name}: its result would differ between ranks")
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
        if name in operators.CONSTANT | operators.EMPTY | operators.SIZES:
            return
        if torch.Tag.pointwise not in func.tags and name not in _APART:
            rule, row = _BY_DIM.get(name), self._dims(held[0])
            if rule is None:
                raise MixedRows(f"{name}: not known to work on each row by itself")
            if row and row[0] in {dim % held[0].ndim for dim in rule(held[0], arguments_of(func, args, kwargs))}:
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


# Operations that read values in Python.
_READING = frozenset(("_local_scalar_dense", "nonzero"))
# Operations that count positions.
_COUNTING = frozenset(("arange", "linspace", "tril_indices", "triu_indices", "range", "eye"))
# Operations that treat each row separately if their result has one dim of rows.
_APART = frozenset(
    (
        *(*REDUCTIONS, "mm", "bmm", "addmm", "addmv", "mv", "dot", "baddbmm", "linear", "matmul"),
        *("native_dropout", "bernoulli", "bernoulli_", "rand_like", "randn_like", "dropout"),
        *("clone", "copy_", "_to_copy", "contiguous", "detach", "alias", "lift_fresh", "fill_", "zero_", "copy"),
        *("view", "_unsafe_view", "reshape", "_reshape_alias", "transpose", "t", "permute", "unsqueeze", "squeeze"),
        *("expand", "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "repeat", "movedim", "narrow"),
        *("masked_fill", "masked_fill_", "where", "is_same_size", "uniform_", "normal_", "_conj", "view_as_real"),
        *("view_as_complex", "real", "imag", "diagonal", "constant_pad_nd", "flatten", "unflatten", "_softplus"),
        *("set_", "record_stream", "swapaxes", "_fused_dropout", "resolve_conj", "polar"),
    )
)


# Operations along dims that keep their sizes; none of these dims may hold rows.
_BY_DIM: dict[str, Callable[[torch.Tensor, dict[str, Any]], list[int]]] = {
    **dict.fromkeys((*ALONG, "flip", "roll", "renorm", "cat", "stack", "glu", "gather", "index_select"), dims_of),
    **dict.fromkeys(("scatter", "scatter_", "scatter_add", "scatter_add_", "index_add", "index_add_"), dims_of),
    **dict.fromkeys(("index_copy", "index_copy_", "index_fill", "repeat_interleave"), dims_of),
    **dict.fromkeys(NORMS, dims_of),
    **dict.fromkeys(("convolution", "native_group_norm"), lambda held, _: list(range(1, held.ndim))),
    **dict.fromkeys(
        ("index", "index_put", "index_put_", "_unsafe_index"),  # picking rows mixes them; rows as indices do not
        lambda held, given: [
            n for n, index in enumerate(given["indices"]) if index is not None and given["self"] is held
        ],
    ),
    "embedding": lambda held, given: [] if given["indices"] is held else [0],
}
