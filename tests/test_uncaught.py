"""A rank that raises, ends or is interrupted in a loop of the user's own: the others say who, and why."""

import contextlib
import io
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import autopar
from autopar.distributed.failures import shorten_uncaught
from autopar.errors import AutoparError, ConfigError, PipelineError
from tests.harness.tiers import mainly
from tests.harness.worlds import pooled, spawn
from tests.parity import language_batches
from tests.scripts import ROOT, torchrun
from tests.small import gpt2, parallel

ENDS = {
    "raises": (ValueError("sample 17 is damaged"), "rank 1 said: ValueError: sample 17 is damaged"),
    "is interrupted": (KeyboardInterrupt(), "rank 1 said: KeyboardInterrupt"),
    "ends": (None, "rank 1 has ended: its process "),
}


def _loop(how: str) -> None:
    error, text = ENDS[how]
    model = parallel(gpt2(), 2).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with pytest.raises(PipelineError) as info:
        for step, batch in enumerate(language_batches(131, count=4)):
            if step == 2 and dist.get_rank() == 1:
                if error is not None:
                    sys.excepthook(type(error), error, None)  # what Python does before it ends the process
                os._exit(1)
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert text in str(info.value), str(info.value)
    assert "failed: one of the ranks [0, 1] ended, failed or hangs." in str(info.value)


def _ends(where: str) -> None:
    model = (parallel(gpt2(), 2) if where == "backward" else autopar.initialize(gpt2(), {})).train()
    loss = model(**language_batches(131)[0]).loss
    if where == "averaging":
        loss.backward()
    if dist.get_rank() == 1:
        os._exit(1)
    with pytest.raises(PipelineError) as info:
        loss.backward() if where == "backward" else autopar.average_gradients(model)
    what = {"backward": "a tensor-parallel collective failed(.|\n)*rank 1 has ended"}
    assert re.match(what.get(where, "averaging the gradients over the data-parallel replicas failed"), str(info.value))


@pytest.mark.tier("all")
@pytest.mark.every_case
@pytest.mark.parametrize(
    ("body", "how"), [*(("_loop", how) for how in ENDS), ("_ends", "backward"), ("_ends", "averaging")]
)
def test_a_rank_that_ends_is_named(body: str, how: str) -> None:
    spawn(__name__, body, 2, 60.0, (how,), expect_dead=(1,))


SCRIPT = """
import torch, autopar, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tests.small import gpt2

model = autopar.initialize(gpt2(), {})
engine = DistributedDataParallel(model, process_group=model.mpu.get_data_parallel_group())
for step in range(3):
    if step == 1 and dist.get_rank() == 1:
        raise ValueError("sample 17 is damaged")
    engine(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
"""


@pytest.mark.tier("all")
def test_the_traceback_of_a_script_names_the_rank_that_others_waited_for(tmp_path: Path) -> None:
    """Where torch's own collectives fail, in DistributedDataParallel, nobody but Python's exception hook can tell."""
    (tmp_path / "train.py").write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, str(tmp_path / "train.py")]
    ranks = [{**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    processes = [subprocess.Popen(command, env=each, stderr=subprocess.PIPE, text=True) for each in ranks]
    deadline = time.monotonic() + 120
    texts = [process.communicate(timeout=max(1.0, deadline - time.monotonic()))[1] for process in processes]
    assert all(process.returncode for process in processes)
    assert "ValueError: sample 17 is damaged" in texts[1]
    assert re.search(r"autopar: (.|\n)*rank 1 said.*: ValueError: sample 17 is damaged", texts[0]), texts[0]


def _printed(error: BaseException) -> list[str]:
    """Return the lines that Python prints where this error ends the process."""
    shorten_uncaught()
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        sys.excepthook(type(error), error, error.__traceback__)
    return re.sub(r"^(\[rank\d\]: )+", "", printed.getvalue(), flags=re.MULTILINE).splitlines()


def _refused(config: dict[str, object]) -> AutoparError:
    with pytest.raises(AutoparError) as info:
        autopar.initialize(gpt2(), config)
    return info.value


def test_an_error_ends_in_its_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    first, place, *_, last = _printed(_refused({"tpp": 2}))
    assert first == "Traceback (most recent call last):"
    assert place.startswith(f'  File "{__file__}", line ')
    assert last.startswith("autopar.errors.ConfigError: unknown section 'tpp'. Did you mean 'tp'?")
    monkeypatch.setenv("AUTOPAR_TRACEBACK", "full")
    assert "autopar/config/parallel_config.py" in "\n".join(_printed(_refused({"tpp": 2})))


def test_the_cause_of_an_error_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("{'tp': 2}")
    with pytest.raises(ConfigError) as info:
        autopar.initialize(gpt2(), file)
    assert not [line for line in _printed(info.value) if "json/decoder.py" in line or "direct cause" in line]
    try:
        raise ConfigError("layers do not fit") from KeyError("h.11")
    except ConfigError as error:
        assert _printed(error)[-2:] == ["autopar.errors.ConfigError: layers do not fit", "  Caused by KeyError: 'h.11'"]


def test_torchrun_shows_the_sentence_and_the_line_of_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, library = tmp_path / "error.json", "/env/site-packages/library.py"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    for error, text in (
        (_refused({"tp": 0}), "ConfigError: tp must be at least 1, not 0"),
        (_caught(ValueError("sample 17 is damaged")), "ValueError: sample 17 is damaged"),
    ):
        file.unlink(missing_ok=True)
        _printed(error)
        found = str(ChildFailedError("train.py", {0: ProcessFailure(0, 1, 1, str(file))}))
        assert re.search(rf"traceback : {re.escape(text)}\n +{re.escape(__file__)}:\d+, in ", found), found
    kept = file.read_text()
    _printed(_refused({"tp": 0}))
    assert file.read_text() == kept  # as the script's own @record has written it
    file.unlink()
    names: dict[str, Any] = {"refused": autopar.initialize, "model": gpt2()}
    exec(compile("def call(): refused(model, {'tp': 0})", library, "exec"), names)
    with pytest.raises(ConfigError) as info:
        names["call"]()
    _printed(info.value)
    assert f"{__file__}:" in file.read_text() and library not in file.read_text()
    file.unlink()
    exec(compile("def call(): {}['key']", library, "exec"), names)
    with pytest.raises(KeyError) as missing:
        names["call"]()
    _printed(missing.value)
    assert f"{library}:1, in call" in file.read_text()


def _caught(error: Exception) -> Exception:
    try:
        raise error
    except Exception as raised:
        return raised


@pooled(world_size=2)
def test_an_error_of_all_ranks_is_printed_by_rank_0() -> None:
    rank = dist.get_rank()
    lines = _printed(_refused({"tpp": 2}))
    if rank == 0:
        assert len(lines) > 3
    else:
        (line,) = lines
        assert re.fullmatch(r"autopar.errors.ConfigError: unknown section 'tpp'.* \(rank 0 prints the full m.*\)", line)
    assert len(_printed(_refused({"tp": 2} if rank == 0 else {"tpp": 2}))) > 3  # rank 0 says who, rank 1 what


MISSPELT = """
import autopar
from tests.small import gpt2

autopar.initialize(gpt2(), {"model_parallelism": {"tensor_paralel_size": 2}})
"""


@pytest.mark.tier("all")
def test_a_misspelt_key_on_four_ranks_is_a_few_lines(tmp_path: Path) -> None:
    done = torchrun(tmp_path, MISSPELT, 4)
    sentence = "unknown key 'tensor_paralel_size' in section 'model_parallelism'. Did you mean 'tensor_parallel_size'?"
    ours = [line for line in done.stderr.splitlines() if re.match(r"\[rank\d\]", line)]
    assert done.returncode and 4 <= len(ours) <= 12, done.stderr
    assert sum(sentence in line for line in ours if line.startswith("[rank0]")) == 1, done.stderr
    _, _, root = done.stderr.partition("Root Cause (first observed failure):")
    assert f"traceback : ConfigError: {sentence}" in root, done.stderr


BACKWARD_LAST = """
import torch
import autopar
from tests.small import gpt2

model = autopar.initialize(gpt2(), {"model_parallelism": {"tensor_parallel_size": 2}})
ids = torch.arange(12).view(2, 6)
for _ in range(3):
    model(ids, labels=ids).loss.backward()
"""


@pytest.mark.tier("all")
@pytest.mark.parametrize("times", mainly(1, 5, later="sweep"))
def test_a_script_may_end_with_a_backward_pass(tmp_path: Path, times: int) -> None:
    """gloo's threads need the interpreter once more, and abort where it has ended: a third of such scripts did."""
    for _ in range(times):
        done = torchrun(tmp_path, BACKWARD_LAST, 4)
        assert done.returncode == 0, done.stderr
