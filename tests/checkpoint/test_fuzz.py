"""200 random damages of one checkpoint with optimizer, scheduler and data: every one is found, by name, or harmless.

Harmless is only an edit of the manifest whose checksum was made right again (a forgery, which a checksum cannot tell),
and then what is loaded must be what was saved.
"""

from __future__ import annotations

import copy
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.checkpoint import merge_checkpoint
from autopar.checkpoint.shards import check_checkpoint
from autopar.distributed.mesh import MPU
from autopar.errors import CheckpointError
from autopar.storage.safetensors_io import SafetensorsReader
from tests.checkpoint.tiny import local, moment, rewrite_manifest, same, save_alone, state_tensors, tiny, with_moments

COUNT = 200
VALUES = [None, True, -1, 0, 1, 2**70, 1e308, float("nan"), "", "x", "../x", "0" * 16, [], {}, [[0, 1]], {"$": "tuple"}]


@dataclass
class Damage:
    """What was done.

    Attributes:
        file: whose bytes are not those that were saved.
        tensor: of which bytes were changed, and nothing else; or None.
        other: a second file of which that is true, or whose content the first one has.
        harmless: it may be, because the manifest's checksum was made right again.
    """

    what: str
    file: str
    tensor: str | None = None
    other: str | None = None
    harmless: bool = False


def shards(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


def any_file(draw: random.Random, folder: Path) -> str:
    return draw.choice([*shards(folder), "autopar.json", "config.json"])


def flip(draw: random.Random, folder: Path) -> Damage:
    name = any_file(draw, folder)
    tensor = None
    if name.endswith(".safetensors"):
        with SafetensorsReader(folder / name) as reader:
            entries = reader.entries
    data = bytearray((folder / name).read_bytes())
    at = draw.randrange(len(data))
    data[at] ^= 1 << draw.randrange(8)
    (folder / name).write_bytes(data)
    if name.endswith(".safetensors"):
        tensor = next((key for key, entry in entries.items() if entry.start <= at < entry.stop), None)
    return Damage(f"byte {at} flipped", name, tensor)


def truncate(draw: random.Random, folder: Path) -> Damage:
    name = any_file(draw, folder)
    size = (folder / name).stat().st_size
    kept = draw.choice([0, 4, size - 1, draw.randrange(size)])
    os.truncate(folder / name, kept)
    return Damage(f"truncated to {kept} bytes", name)


def append(draw: random.Random, folder: Path) -> Damage:
    name = any_file(draw, folder)
    with open(folder / name, "ab") as file:
        file.write(draw.randbytes(draw.choice([1, 8, 1000])))
    return Damage("appended to", name)


def delete(draw: random.Random, folder: Path) -> Damage:
    name = any_file(draw, folder)
    os.remove(folder / name)
    return Damage("deleted", name)


def swap(draw: random.Random, folder: Path) -> Damage:
    one, other = draw.sample(shards(folder), 2)
    for source, target in ((one, "x"), (other, one), ("x", other)):
        os.rename(folder / source, folder / target)
    return Damage("swapped with another", one, other=other)


def copy_over(draw: random.Random, folder: Path) -> Damage:
    one, other = draw.sample(shards(folder), 2)
    shutil.copy(folder / one, folder / other)
    return Damage("replaced by another", other, other=one)


def mix(draw: random.Random, folder: Path) -> Damage:
    name = draw.choice([*shards(folder), "autopar.json"])
    shutil.copy(folder.parent / "other" / name, folder / name)
    return Damage("replaced by that of another save", name)


def scramble(draw: random.Random, folder: Path) -> Damage:
    name = draw.choice(shards(folder))
    size = (folder / name).stat().st_size
    (folder / name).write_bytes(draw.randbytes(size))
    return Damage("replaced by random bytes", name)


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def edit(draw: random.Random, data: Any) -> str:
    """One random edit somewhere in the manifest, at every depth as often."""
    everywhere = list(places(data))
    depth = draw.choice(sorted({len(path) for path in everywhere}))
    *path, key = draw.choice([path for path in everywhere if len(path) == depth])
    holder = data
    for step in path:
        holder = holder[step]
    old = copy.deepcopy(holder[key])
    ways = ["remove", "replace", "more"] + (["rename"] if isinstance(holder, dict) else ["repeat"])
    way = draw.choice(ways)
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
    return f"{way} {'.'.join(map(str, [*path, key]))}"


def forge(draw: random.Random, folder: Path, honest: bool) -> Damage:
    said = ""

    def change(data: Any) -> Any:
        nonlocal said
        said = edit(draw, data)
        return data

    rewrite_manifest(folder, change, checksum_too=not honest)
    return Damage(f"manifest edited: {said}", "autopar.json", harmless=not honest)


def edit_manifest(draw: random.Random, folder: Path) -> Damage:
    return forge(draw, folder, honest=True)


def forge_manifest(draw: random.Random, folder: Path) -> Damage:
    return forge(draw, folder, honest=False)


KINDS: list[Callable[[random.Random, Path], Damage]] = [
    flip, flip, flip, truncate, append, delete, swap, copy_over, mix, scramble, edit_manifest, forge_manifest,
    forge_manifest,
]  # fmt: skip


def training(seed: int) -> dict[str, Any]:
    scheduler = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([torch.zeros(1)], 0.1), lambda step: 1.0)
    return {"lr_scheduler": scheduler, "extra": {"epoch": seed, "ema": [torch.arange(50.0) + seed, ("x", {"y": 1.5})]}}


@pytest.fixture
def mpu() -> Iterator[MPU]:
    state = torch.get_rng_state()
    yield MPU()  # a world of this one process
    dist.destroy_process_group()
    torch.set_rng_state(state)


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
    return model, optimizer, extra


def refused(action: Callable[[], Any]) -> str | None:
    """The message of the CheckpointError; any other exception goes through."""
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return None


def is_what_was_saved(loaded: Any, plain: Any) -> None:
    model, optimizer, _ = loaded
    assert same(local(model), local(plain)), "other weights were loaded"
    plan = model._autopar_checkpoint.plan
    for name, parameter in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            due = moment(name, key, 0, plan.tensors[name])
            assert torch.equal(optimizer.state[parameter][key], due), f"another {key} of {name} was loaded"


@pytest.mark.tier("all")
def test_every_damage_is_found(tmp_path, mpu):
    plain = save_alone(tmp_path / "good", 2, pp=2, optimizer=True, **training(0))
    save_alone(tmp_path / "other", 2, pp=2, seed=1, save_id="f" * 16, optimizer=True, **training(1))
    is_what_was_saved(load(mpu, tmp_path / "good"), plain)
    assert check_checkpoint(tmp_path / "good")["problems"] == []
    harmless = 0
    named = 0
    for number in range(COUNT):
        draw = random.Random(number)
        folder = tmp_path / "ckpt"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(tmp_path / "merged", ignore_errors=True)
        shutil.copytree(tmp_path / "good", folder)
        damage = draw.choice(KINDS)(draw, folder)
        case = f"{number}: {damage}"
        loaded: list[Any] = []
        try:
            said = {
                "check": refused(lambda: problems(folder)),  # noqa: B023
                "load": refused(lambda: loaded.append(load(mpu, folder))),  # noqa: B023
                "merge": refused(lambda: merge_checkpoint(folder, tmp_path / "merged")),  # noqa: B023
            }
        except Exception as error:
            raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
        if loaded:
            is_what_was_saved(loaded[0], plain)
        if damage.harmless:
            harmless += not said["load"]
            continue
        matters = {"check", "load", "merge"}
        if damage.file == "config.json":
            matters.remove("load")
        files = [damage.file] + ([damage.other] if damage.other and "swapped" in damage.what else [])
        if not any(file.startswith(("model", "autopar", "config")) for file in files):
            matters.remove("merge")
        for who in matters:
            text = said[who]
            assert text is not None, f"{who} accepts {case}"
            # Of a manifest that belongs to another save the shards are the strangers.
            named_file = any(file in text for file in files) or (files == ["autopar.json"] and "another save" in text)
            assert named_file, f"{who} does not name the file: {case}: {text}"
            if damage.tensor is not None:
                named += 1
                assert damage.tensor in text, f"{who} does not name the tensor: {case}: {text}"
        assert (tmp_path / "merged").exists() == (said["merge"] is None), case
        for who in {"load", "merge"} - matters:
            assert said[who] is None, f"{who} refuses what does not concern it: {case}: {said[who]}"
    assert 0 < harmless < COUNT / 8 and named > COUNT / 10


def problems(folder: Path) -> None:
    found = check_checkpoint(folder)["problems"]
    if found:
        raise CheckpointError("\n".join(found))
