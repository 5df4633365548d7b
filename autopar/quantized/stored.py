"""A weight that is stored in several tensors, none of which has its shape; cut for a rank, and joined again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from autopar.layout import Layout


class Piece(NamedTuple):
    """One tensor of a stored weight, viewed with a dim for the outputs and one for the inputs, ``[out, in, ...]``.

    Attributes:
        block: elements of the weight that one entry stands for, along each of the two; 0: it stands for all of them.
    """

    tensor: torch.Tensor
    block: tuple[int, int]


class InFile(NamedTuple):
    """A tensor of a stored weight as ``save_pretrained`` writes it.

    Attributes:
        name: in the file, after the path of the layer.
        shape: that it is viewed in, ``[out, in, ...]``.
        block: as :attr:`Piece.block`.
    """

    name: str
    shape: tuple[int, ...]
    block: tuple[int, int]


class ToFile(NamedTuple):
    """A tensor of a stored weight, or of a shard of one, on its way into a file.

    Attributes:
        tensor: viewed as in :class:`Piece`.
        block: as :attr:`Piece.block`.
        flat: dims that the file has it in: 1: ``[n]``, 2: ``[n, 1]``; 0: as it is.
    """

    tensor: torch.Tensor
    block: tuple[int, int] = (0, 0)
    flat: int = 0


class Kind(NamedTuple):
    """A form of weights, before there are any.

    Attributes:
        form: as :attr:`StoredWeight.format`.
        block: as :attr:`StoredWeight.block`.
        takes_rows: its layer quantizes its inputs, with a scale for each token.
        parts: returns the bytes of a rank's part of a weight of this shape, with all that stands beside it; the layout
            is None of a weight that every rank has.
        config: makes transformers' ``quantization_config``, where the name alone says all of it.
    """

    form: str
    block: tuple[int, int]
    takes_rows: bool
    parts: Callable[[tuple[int, int], Layout | None, int], int]
    config: Callable[[], Any] | None = None

    def nbytes(self, shape: tuple[int, int], layout: Layout | None, rank: int) -> int:
        """Return the bytes of a rank's part of a weight of this shape, with all that stands beside it."""
        return self.parts(shape, layout if layout is not None and layout.axis_size > 1 else None, rank)


class Part(NamedTuple):
    """A rank's part of a weight, and what the ranks that have the others do together.

    Attributes:
        layout: None of a weight that every rank has.
        gather: returns the whole of a shard, given its layout.
        largest: returns the largest numbers of all ranks.
    """

    layout: Layout | None
    rank: int
    gather: Callable[[torch.Tensor, Layout], torch.Tensor]
    largest: Callable[[torch.Tensor], torch.Tensor]


class StoredWeight:
    """The weight of one linear layer in the form of one library.

    Attributes:
        format: its name, for messages; ``kind``: the form without the weight.
        shape: of the weight, ``(out, in)``.
        block: elements beside each other along each of the two that no rank may part.
        pending: it has no memory yet, and :meth:`fill` quantizes it.
        hidden: attributes of the layer that hold tensors of the weight, too.
        dtype: of a parameter that looks like the weight and has no memory: all tensors are beside it; else None.
        whole_rows: of a layer that quantizes its inputs: what a rank with some of them adds, given a function that
            returns the largest numbers of all ranks; else None.
    """

    format: str
    kind: Kind
    shape: tuple[int, int]
    block: tuple[int, int] = (1, 1)
    pending: bool
    hidden: tuple[str, ...] = ()
    dtype: torch.dtype | None = None
    whole_rows: Any = None

    def pieces(self, layout: Layout | None = None) -> dict[str, Piece]:
        """Return the tensors that stand for the weight, by name, in a form that can be cut by ``layout``."""
        raise NotImplementedError

    def beside(self) -> dict[str, torch.Tensor]:
        """Return the tensors that stand for the weight beside the parameter itself, as they are, by name."""
        raise NotImplementedError

    def open(
        self, small: Mapping[str, torch.Tensor], shape: tuple[int, int], layout: Layout | None
    ) -> dict[str, InFile]:
        """Return where the tensors lie that stand for a weight of this shape, in a form that can be cut by ``layout``.

        Args:
            small: those of a file that are the same for all shards, by the names that they have there.
        """
        raise NotImplementedError

    def files(self, shape: tuple[int, int]) -> dict[str, ToFile]:
        """Return the tensors that stand for a part of a weight of this shape in files, by the names that they have."""
        raise NotImplementedError

    def note(self, shape: tuple[int, int]) -> str:
        """Return what the head of a file says of a weight of this shape; "" if all of it is in tensors."""
        return ""

    def take(self, tensors: dict[str, torch.Tensor], layout: Layout | None, rank: int) -> None:
        """Take what ``rank`` has of the pieces of a whole weight."""
        rows, columns = self.shape if layout is None else layout.local_shape(self.shape, rank)
        self.put((rows, columns), tensors)

    def put(self, shape: tuple[int, int], tensors: dict[str, torch.Tensor]) -> None:
        """Take other ones, viewed likewise, in their place; the parameter stays the same object."""
        raise NotImplementedError

    def fill(self, values: torch.Tensor, part: Part) -> None:
        """Quantize this rank's part of a weight that has no memory yet, to what a part of the whole one is."""
        raise NotImplementedError

    def keep_form(self, keep: bool) -> None:
        """Keep evaluation from storing the weight in another form, or let it again."""

    def drop(self) -> None:
        """Free the memory of all of them."""
        raise NotImplementedError

    def dequantized(self) -> torch.Tensor:
        """Return the weight, ``[out, in]``, that the layer multiplies with."""
        raise NotImplementedError


def shard(stored: StoredWeight, layout: Layout, rank: int) -> None:
    """Keep the shard of ``rank``.

    Raises:
        ValueError: a rank would hold a part of a block.
    """
    tensors = {
        name: layout.in_steps(step).shard(tensor, rank) if (step := block[layout.dim]) else tensor
        for name, (tensor, block) in stored.pieces(layout).items()
    }
    stored.take(tensors, layout, rank)


def join(stored: StoredWeight, layout: Layout, gather: Callable[[torch.Tensor, Layout], torch.Tensor]) -> None:
    """Undo :func:`shard`.

    Args:
        gather: returns the whole of a shard, given its layout.
    """
    tensors = {
        name: gather(tensor, layout.in_steps(step)) if (step := block[layout.dim]) else tensor
        for name, (tensor, block) in stored.pieces().items()
    }
    whole = list(stored.shape)
    whole[layout.dim] = layout.size
    stored.put((whole[0], whole[1]), tensors)
