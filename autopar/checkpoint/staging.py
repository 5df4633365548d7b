"""Replace a folder in one step, so that it is complete at any moment.

A checkpoint is written into the hidden sibling ``.name.tmp-<id>-<pid>-<host>``, which is then renamed to its target. A
process that is killed leaves the previous or the new checkpoint. The next save removes hidden folders of killed saves;
the process id in the name protects the folder of a running job.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from autopar.errors import CheckpointError
from autopar.storage.files import checksum
from autopar.storage.safetensors_io import SafetensorsReader

MANIFEST = "autopar.json"
REMOVED = ".autopar.json.removed"  # the manifest of a checkpoint whose files are being deleted
# The files of a checkpoint, in autopar's and in Hugging Face's form. Other files in a target belong to the user.
_OURS = re.compile(
    r"autopar\.json|\.autopar\.json\.removed|config\.json|generation_config\.json"
    r"|(model|base|optimizer|extra)-tp\d+-pp\d+(-dp\d+)?\.safetensors"
    r"|(model|(diffusion_)?pytorch_model)((-\d{5}-of-\d{5})?\.(safetensors|bin)|\.(safetensors|bin)\.index\.json)"
    r"|wrapper\.safetensors"
)
HIDDEN = re.compile(r"\.(.+)\.(tmp|old)-[0-9a-f]{16}(?:-(\d+)-([0-9a-f]{8}))?", re.DOTALL)
MERGED = "autopar_merged"  # in the header of a file that was merged from the shards of a custom module
ABANDONED = 24 * 3600  # seconds after which a temporary folder counts as abandoned
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def fsync_files(folder: Path) -> None:
    """Force all files below a folder to the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            fsync(path)


def fsync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def link(source: str, destination: str) -> None:
    """Make a hard link, or a copy where the file system does not support links."""
    try:
        os.link(source, destination, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, destination, follow_symlinks=False)


def leftovers(target: Path) -> list[Path]:
    """Return the temporary siblings of ``target``, of killed and of running saves."""
    try:
        found = [(path, HIDDEN.fullmatch(path.name)) for path in target.parent.iterdir()]
    except OSError:
        return []
    return sorted(path for path, hidden in found if hidden and hidden[1] == target.name)


@functools.cache
def _host() -> str:
    """Return a token for the namespace of process ids: the host, and on Linux the container."""
    space = "/proc/self/ns/pid"
    return checksum(f"{os.uname().nodename} {os.readlink(space) if os.path.islink(space) else ''}".encode())[:8]


def _in_use(path: Path) -> bool:
    """Return whether a process may be writing into a temporary folder; other hosts' count as running for a day."""
    hidden = HIDDEN.fullmatch(path.name)
    try:
        if hidden is None or hidden[3] is None or time.time() - path.stat().st_mtime > ABANDONED:
            return False
        if hidden[4] == _host():
            os.kill(int(hidden[3]), 0)
    except PermissionError:
        return True  # a process of another user
    except (OSError, OverflowError):
        return False
    return True


class Staging:
    """A temporary folder that replaces ``target`` when it is complete.

    Args:
        target: The absolute path of the folder to make or to replace; symbolic links are followed.
        replace: True to allow replacing an existing checkpoint.

    Attributes:
        id: The random token of this save.
        temp: The folder to write into; it exists.
        committed: True once :meth:`commit` has put it in the target's place.

    Raises:
        CheckpointError: The target must not be replaced, or no folder can be made next to it.
    """

    def __init__(self, target: Path, replace: bool = True) -> None:
        self.target = Path(os.path.realpath(target))
        self.id = secrets.token_hex(8)
        self._owned = f"{self.id}-{os.getpid()}-{_host()}"
        self.temp = self.target.parent / f".{self.target.name}.tmp-{self._owned}"
        self.committed = False
        if self.target.exists():
            _check_replaceable(self.target, replace)
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self.temp.mkdir()
        except OSError as error:
            raise CheckpointError(
                f"cannot make {self.target}: {error.strerror}\n  Make {self.target.parent} a writable folder; the "
                "temporary folder is made in it."
            ) from error

    def commit(self) -> None:
        """Rename the folder to the target, keep the user's files of the old target, and remove leftovers."""
        if self.target.exists():
            _carry_over(self.target, self.temp)
            shutil.copymode(self.target, self.temp)
        fsync(self.temp)
        if not self.target.exists():
            os.rename(self.temp, self.target)
        elif not _exchange(self.temp, self.target):
            old = self.target.parent / f".{self.target.name}.old-{self._owned}"
            os.rename(self.target, old)
            os.rename(self.temp, self.target)
        self.committed = True
        fsync(self.target.parent)
        for path in leftovers(self.target):
            if path.name.endswith(self._owned) or not _in_use(path):
                shutil.rmtree(path, ignore_errors=True)

    def discard(self) -> None:
        """Remove the temporary folder unless it was committed."""
        if not self.committed:
            shutil.rmtree(self.temp, ignore_errors=True)


@contextlib.contextmanager
def output_folder(verb: str, source: Path, destination: str | os.PathLike[str], force: bool) -> Iterator[Staging]:
    """Stage a folder while the body writes into it, then commit it; after an error remove it.

    Raises:
        CheckpointError: ``destination`` cannot be written, or is ``source`` or one of its parents.
    """
    target, real = Path(os.path.abspath(destination)), source.resolve()
    if target.resolve() in (real, *real.parents):
        raise CheckpointError(f"cannot {verb} {source} into {target}: the output would replace its source")
    staging = Staging(target, replace=force)
    try:
        yield staging
        fsync_files(staging.temp)
        staging.commit()
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        staging.discard()


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return ``torch.bfloat16`` for ``bfloat16``. Raises CheckpointError unless it is a floating-point dtype."""
    if dtype is None:
        return None
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype), None)
    if not isinstance(found, torch.dtype) or found not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise CheckpointError(f"dtype={dtype!r} must be float32, bfloat16, float16 or float64")
    return found


def _check_replaceable(target: Path, replace: bool) -> None:
    if not target.is_dir():
        raise CheckpointError(f"{target} must be a folder, got a file")
    if os.path.ismount(target) or target == Path(os.path.realpath(os.curdir)):
        kind = "a mount point" if os.path.ismount(target) else "the current working directory"
        raise CheckpointError(f"{target} is {kind} and cannot be replaced\n  Choose a folder inside it.")
    names = sorted(os.listdir(target))
    if not names:
        return
    lost = [name for name in names if _OURS.fullmatch(name)]
    if lost and not {MANIFEST, REMOVED, "config.json"} & set(names) and not _merged(target / lost[0]):
        raise CheckpointError(
            f"{target} holds {lost[0]} without autopar.json or config.json and may not be a checkpoint\n"
            f"  It holds {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}. Choose another folder."
        )
    if not replace:
        raise CheckpointError(f"{target} is not empty\n  Pass force=True (--force) to replace the checkpoint in it.")


def _merged(path: Path) -> bool:
    """Return whether a file was merged from the shards of a custom module, which has no ``config.json``."""
    if path.suffix == ".json":  # the index of several files
        path = next(iter(sorted(path.parent.glob("model-*.safetensors"))), path)
    with contextlib.suppress(CheckpointError), SafetensorsReader(path) as reader:
        return MERGED in reader.metadata
    return False


def _carry_over(target: Path, temp: Path) -> None:
    """Link the user's files (a tokenizer, notes) into the new folder."""
    for entry in os.scandir(target):
        new = temp / entry.name
        if _OURS.fullmatch(entry.name) or os.path.lexists(new):
            continue
        if entry.is_dir(follow_symlinks=False):
            shutil.copytree(entry.path, new, symlinks=True, copy_function=link)
        else:
            link(entry.path, str(new))


def _exchange(one: Path, other: Path) -> bool:
    """Swap two paths in one step. Return False where this is not supported (old kernels, some network disks)."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    return bool(function(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)
