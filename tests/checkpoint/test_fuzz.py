"""Random damages of one checkpoint with optimizer, scheduler and data: every one is found, by name, or harmless.

Harmless is only an edit of the manifest whose checksum was made right again (a forgery, which a checksum cannot tell),
and then what is loaded must be what was saved. Files that are missing, swapped or of another save: test_broken.py.
"""

import copy
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.checkpoint import merge_checkpoint
from autopar.checkpoint.shards import check_checkpoint
from autopar.distributed.mesh import MPU
from autopar.errors import CheckpointError
from autopar.storage.safetensors_io import SafetensorsReader
from tests.checkpoint.tiny import local, moment, rewrite_manifest, same, save_alone, state_tensors, tiny, with_moments

COUNT = 150
VALUES = [None, True, -1, 0, 1, 2**70, 1e308, float("nan"), "", "x", "../x", "0" * 16, [], {}, [[0, 1]], {"$": "tuple"}]
BYTES = ["flip", "flip", "truncate", "append", "scramble"]


def damage_bytes(draw: random.Random, path: Path) -> str | None:
    """Change a file; return the tensor of which bytes were changed, and nothing else."""
    way, data, entries = draw.choice(BYTES), bytearray(path.read_bytes()), {}
    if way == "flip" and path.suffix == ".safetensors":
        with SafetensorsReader(path) as reader:
            entries = reader.entries
    at = draw.randrange(len(data))
    if way == "flip":
        data[at] ^= 1 << draw.randrange(8)
    elif way == "truncate":
        del data[draw.choice([0, 4, len(data) - 1, at]) :]
    elif way == "append":
        data += draw.randbytes(draw.choice([1, 8, 1000]))
    else:
        data = bytearray(draw.randbytes(len(data)))
    path.write_bytes(data)
    return next((name for name, entry in entries.items() if entry.start <= at < entry.stop), None)


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def edited(draw: random.Random, data: Any) -> Any:
    """One random edit somewhere in the manifest, at every depth as often."""
    everywhere = list(places(data))
    depth = draw.choice(sorted({len(path) for path in everywhere}))
    *path, key = draw.choice([path for path in everywhere if len(path) == depth])
    holder = data
    for step in path:
        holder = holder[step]
    old = copy.deepcopy(holder[key])
    way = draw.choice(["remove", "replace", "more"] + (["rename"] if isinstance(holder, dict) else ["repeat"]))
    if way == "more" and type(old) is int:
        holder[key] += draw.choice([-1, 1, 100])
    elif way == "remove":
        del holder[key]
    elif way == "rename":
        holder[draw.choice(["x", f"{key}x", "../x"])] = holder.pop(key)
    elif way == "repeat":
        holder.insert(key, old)
    else:
        holder[key] = draw.choice([value for value in VALUES if value != old or type(value) is not type(old)])
    return data


def training(seed: int) -> dict[str, Any]:
    scheduler = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([torch.zeros(1)], 0.1), lambda step: 1.0)
    return {"lr_scheduler": scheduler, "extra": {"epoch": seed, "ema": [torch.arange(50.0) + seed, ("x", {"y": 1.5})]}}


def load(mpu: MPU, folder: Path) -> Any:
    """Load everything into something new; whatever is refused leaves the model as it was."""
    model = tiny(mpu, seed=7)
    optimizer, extra = with_moments(model, seed=7), {}
    before = (local(model), state_tensors(optimizer))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    try:
        model.from_parallelized(folder, optimizer=optimizer, lr_scheduler=scheduler, extra=extra)
    except CheckpointError as error:
        if "rand" not in str(error):
            assert same(local(model), before[0]), f"it was refused after it had been loaded: {error}"
            assert all(torch.equal(*pair) for pair in zip(state_tensors(optimizer), before[1], strict=True))
        raise
    return model, optimizer


def is_what_was_saved(loaded: Any, plain: Any) -> None:
    model, optimizer = loaded
    assert same(local(model), local(plain)), "other weights were loaded"
    plan = model._autopar_checkpoint.plan
    for name, parameter in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            due = moment(name, key, 0, plan.tensors[name])
            assert torch.equal(optimizer.state[parameter][key], due), f"another {key} of {name} was loaded"


def refused(action: Callable[[], Any]) -> str | None:
    """The message of the CheckpointError, or what the check lists; any other exception goes through."""
    try:
        done = action()
    except CheckpointError as error:
        return str(error)
    return "\n".join(done.get("problems", ())) or None if isinstance(done, dict) else None


@pytest.mark.tier("all")
def test_every_damage_is_found(tmp_path: Path, alone: MPU) -> None:
    plain, folder, merged = (
        save_alone(tmp_path / "good", 2, pp=2, optimizer=True, **training(0)),
        *(tmp_path / name for name in ("ckpt", "merged")),
    )
    is_what_was_saved(load(alone, tmp_path / "good"), plain)
    harmless = named = 0
    for number in range(COUNT):
        draw = random.Random(number)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(merged, ignore_errors=True)
        shutil.copytree(tmp_path / "good", folder)
        name, tensor, forged = "autopar.json", None, number % 4 == 0
        if number % 4 < 2:
            rewrite_manifest(folder, lambda data, draw=draw: edited(draw, data), checksum_too=forged)
        else:
            name = draw.choice(sorted(name for name in os.listdir(folder) if name.endswith((".safetensors", ".json"))))
            tensor = damage_bytes(draw, folder / name)
        loaded: list[Any] = []
        said = {
            "check": refused(lambda: check_checkpoint(folder)),
            "load": refused(lambda loaded=loaded: loaded.append(load(alone, folder))),
            "merge": refused(lambda: merge_checkpoint(folder, merged)),
        }
        if loaded:
            is_what_was_saved(loaded[0], plain)
        if forged:
            harmless += not said["load"]
            continue
        unconcerned = (
            {"load"} if name == "config.json" else {"merge"} if name.startswith(("optimizer", "extra")) else ()
        )
        for who, text in said.items():
            case = f"{who}, damage {number} of {name}: {text}"
            assert (text is None) == (who in unconcerned), case
            assert text is None or (name in text and (tensor is None or tensor in text)), case
        named += tensor is not None
        assert merged.exists() == (said["merge"] is None), number
    assert 0 < harmless < COUNT / 8 and named > COUNT / 10, (harmless, named)


def test_extra_that_is_not_a_dict_is_refused_before_weights_are_loaded(tmp_path: Path, alone: MPU) -> None:
    folder = tmp_path / "ckpt"
    save_alone(folder, 2, pp=2, optimizer=True, **training(0))
    rewrite_manifest(folder, lambda data: {**data, "training": {**data["training"], "extra": [1]}})
    with pytest.raises(CheckpointError, match="is damaged: extra must be a dict, got list"):
        load(alone, folder)
