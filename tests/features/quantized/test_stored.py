"""Quantized weights cut and joined: the shard's numbers are the whole one's to the bit, its bytes a rank's part."""

from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import ConfigError
from autopar.layout import Block, Layout, even_shards
from autopar.stored import as_plain, block_of, stored_weight, stored_weights

bitsandbytes = pytest.importorskip("bitsandbytes")
FOUR = [(kind, nested) for kind in ("nf4", "fp4") for nested in (False, True)]


def layer(kind: str, rows: int, columns: int, nested: bool = False) -> Any:
    torch.manual_seed(0)
    if kind == "int8":
        made = bitsandbytes.nn.Linear8bitLt(columns, rows, has_fp16_weights=False)
    else:
        made = bitsandbytes.nn.Linear4bit(columns, rows, quant_type=kind, compress_statistics=nested)
    made.load_state_dict(nn.Linear(columns, rows).state_dict())
    return made.to("cpu")


def units(dim: int, size: int, ranks: int, width: int) -> Layout:
    return Layout.of(dim, [Block("unit", size // width, width, even_shards(size // width, ranks))])


def everything(made: Any) -> dict[str, torch.Tensor]:
    stored: Any = stored_weight(made)
    return {"parameter": made.weight.data.clone(), **{name: x.clone() for name, x in stored.beside().items()}}


@pytest.mark.parametrize(("kind", "nested"), [*FOUR, ("int8", False)])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("shape", [(96, 320), (1024, 1024)])
def test_shards(kind: str, nested: bool, dim: int, ranks: int, shape: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    width = 64 if dim else 16
    layout = units(dim, shape[dim], ranks, width)
    plain = layer(kind, *shape, nested)
    before, whole = everything(plain), stored_weight(plain).dequantized()
    assert sum(x.nbytes for x in before.values()) == stored_weight(plain).kind.nbytes(shape, None, 0)
    shards = []
    for rank in range(ranks):
        made = layer(kind, *shape, nested)
        stored: Any = stored_weight(made)
        parameter = made.weight
        stored.shard(layout, rank)
        assert made.weight is parameter
        assert stored.shape == layout.local_shape(shape, rank)
        assert torch.equal(stored.dequantized(), layout.shard(whole, rank))
        numbers = stored.pieces()["numbers" if kind == "int8" else "bytes"].tensor
        assert sum(x.nbytes for x in everything(made).values()) == stored.kind.nbytes(shape, layout, rank)
        assert numbers.nbytes * shape[dim] == before["parameter"].nbytes * layout.local_size(rank)
        setattr(made, "in_features" if dim else "out_features", layout.local_size(rank))
        shards.append(made)
    pieces = [stored_weight(made).pieces() for made in shards]

    def gather(tensor: torch.Tensor, axis: Any, scaled: Layout) -> torch.Tensor:
        (name,) = [name for name, piece in pieces[0].items() if piece.tensor is tensor or same(piece.tensor, tensor)]
        return scaled.unshard([piece[name].tensor for piece in pieces])

    monkeypatch.setattr("autopar.features.quantized.stored.all_gather", gather)
    stored_weight(shards[0]).join(layout, None)
    setattr(shards[0], "in_features" if dim else "out_features", shape[dim])
    joined = everything(shards[0])
    assert set(joined) == set(before) and all(torch.equal(joined[name], before[name]) for name in before)
    assert torch.equal(stored_weight(shards[0]).dequantized(), whole)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.data_ptr() == other.data_ptr()


def test_parts_of_blocks_other_numbers_and_quantized_scales() -> None:
    stored: Any = stored_weight(layer("nf4", 32, 192))
    with pytest.raises(ValueError, match="2 unit of 96 cannot be sharded in steps of 64"):
        stored.shard(units(1, 192, 2, 96), 0)

    made = bitsandbytes.nn.Linear4bit(64, 32, quant_type="nf4", quant_storage=torch.float32).to("cpu")
    with pytest.raises(ConfigError, match=r"bnb_4bit_quant_storage must be torch.uint8, its default, got torch.float3"):
        stored_weight(made)
    plain = bitsandbytes.nn.Linear4bit(64, 32, quant_type="nf4")
    with pytest.raises(ConfigError, match="a Linear4bit must be quantized before initialize"):
        stored_weight(plain)

    made = layer("nf4", 1024, 1024, nested=True)
    stored: Any = stored_weight(made)
    stored.shard(units(0, 1024, 2, 16), 1)
    assert made.weight.quant_state.nested and stored.beside()["groups"].shape == (32,)
    stored.shard(units(1, 1024, 2, 64), 0)
    assert not made.weight.quant_state.nested and stored.beside()["scales"].dtype == torch.float32


def test_a_model_with_plain_layers_in_their_place() -> None:
    model = nn.Sequential(layer("nf4", 32, 128, nested=True), nn.Linear(4, 4), layer("int8", 8, 32))
    kinds, weights = [type(module) for module in model], [module.weight for module in model]
    before = [everything(module) for module in (model[0], model[2])]
    assert list(stored_weights(model)) == ["0", "2"] and block_of(model) == 1
    with as_plain(model):
        assert [type(module) for module in model] == [nn.Linear] * 3
        assert [tuple(module.weight.shape) for module in model] == [(32, 128), (4, 4), (8, 32)]
        assert model[0].weight.is_meta and not model[0].weight.requires_grad and block_of(model) == 64
        assert set(model.state_dict()) == {f"{n}.{name}" for n in range(3) for name in ("weight", "bias")}
    assert [type(module) for module in model] == kinds
    assert all(module.weight is weight for module, weight in zip(model, weights, strict=True))
    for module, kept in zip((model[0], model[2]), before, strict=True):
        assert all(torch.equal(tensor, kept[name]) for name, tensor in everything(module).items())
    with pytest.raises(RuntimeError, match="stop"), as_plain(model):
        raise RuntimeError("stop")
    assert [type(module) for module in model] == kinds
