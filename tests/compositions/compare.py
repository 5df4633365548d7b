"""Train one composition of options on the ranks of a world, and the plain model beside it, and compare the two."""

import contextlib
import copy
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.errors import ConfigError, UnsupportedModelError
from tests.compositions.draw import Composition
from tests.exchange import everyones
from tests.parity import all_close, close, randomise
from tests.random_models import build, cases, kind

STEPS = 4
_BLOCKS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
_SEQ, _ROWS = 12, 4  # tokens of a sample; samples of a replica's step
_REFUSED = (ConfigError, UnsupportedModelError)


def compare(composition: Composition) -> str:
    """Train with one process and with the composition; return why it is refused, or nothing."""
    plain = _model(composition)
    model = copy.deepcopy(plain)
    optimizer = _optimizer(composition, model)
    given = _given(composition, optimizer)
    refused = ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            autopar.initialize(model, composition.whole_config, **given)
    except _REFUSED as error:
        refused = str(error)
    everyone = everyones(refused)
    assert len(set(everyone)) == 1, f"some ranks refuse: {everyone}"
    if refused:
        return refused
    optimizer = _optimizer(composition, model) if not given else optimizer
    expected = _train_plain(composition, plain)
    losses = _train(composition, model, optimizer)
    for step, (loss, whole) in enumerate(zip(losses, expected, strict=True)):
        close(torch.tensor(loss), torch.tensor(whole), f"loss {step}", 2e-5)
    all_close(*_saved(model, plain), "{} at the end", 1e-4)
    model.mpu.destroy()
    return ""


def _model(composition: Composition) -> Any:
    """Make the main head of the type, with blocks enough for any number of stages that is drawn."""
    order = ("seq2seq", "causal", "masked")
    case = min((c for c in cases(composition.model_type) if kind(c.head) in order), key=lambda c: (c.variant, c.head))
    small = build(case, 8, 4)
    config = copy.deepcopy(small.config)
    for name in _BLOCKS:
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, 8)
    if vars(config).get("layer_types"):
        config.layer_types = (config.layer_types * 8)[:8]
    torch.manual_seed(0)
    return randomise(type(small)(config)).float().train()


def _optimizer(composition: Composition, model: nn.Module) -> torch.optim.Optimizer:
    if composition.loop["optimizer"] == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)


def _batch(step: int, replica: int) -> dict[str, torch.Tensor]:
    """One replica's batch of a step: as many labels in each row, so that a mean over rows is one over labels."""
    draw = torch.Generator().manual_seed(100 * step + replica)
    ids = torch.randint(3, 131, (_ROWS, _SEQ), generator=draw)
    mask = torch.ones_like(ids)
    mask[:, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _parts(batch: dict[str, torch.Tensor], count: int) -> list[dict[str, torch.Tensor]]:
    pieces = {name: value.chunk(count) for name, value in batch.items()}
    return [{name: piece[number] for name, piece in pieces.items()} for number in range(count)]


def _train_plain(composition: Composition, model: nn.Module) -> list[float]:
    optimizer, losses = _optimizer(composition, model), list[float]()
    limit, replicas = composition.config.get("gradient_clipping"), composition.replicas
    for step in range(STEPS):
        total = 0.0
        for replica in range(replicas):
            for part in _parts(_batch(step, replica), composition.loop["micro"]):
                loss = model(**part).loss / composition.loop["micro"] / replicas
                loss.backward()
                total += loss.item()
        if limit:
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        losses += [_evaluate(model) or 0.0] if step == 1 and composition.loop.get("evaluate") else []
    return losses


def _train(composition: Composition, model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    mpu, micro, losses = model.mpu, composition.loop["micro"], list[float]()
    called = model
    if composition.loop.get("wrapper") == "ddp":
        group = mpu.get_data_parallel_group(with_context_parallel=True)
        called = DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
    for step in range(STEPS):
        batch = _batch(step, mpu.get_data_parallel_rank())
        if mpu.pp.size > 1:
            total = _number(model.execute_pipeline(batch, **_given(composition, optimizer)).loss)
        else:
            total = 0.0
            for number, part in enumerate(_parts(batch, micro)):
                waits = number < micro - 1 and called is not model
                with called.no_sync() if waits else contextlib.nullcontext():
                    loss = called(**part).loss / micro
                    loss.backward()
                total += loss.item()
            if called is model:
                autopar.average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(_mean(total))
        losses += [_mean(_evaluate(model))] if step == 1 and composition.loop.get("evaluate") else []
    return losses


def _given(composition: Composition, optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    return {"optimizer": optimizer} if composition.loop.get("given") else {}


@torch.no_grad()
def _evaluate(model: Any) -> float | None:
    model.eval()
    loss = _number(model(**_batch(99, 0)).loss)
    model.train()
    return loss


def _number(loss: torch.Tensor | None) -> float | None:
    return None if loss is None else loss.item()


def _mean(loss: float | None) -> float:
    """Return the mean over the ranks that have a loss: those of the last stage."""
    known = [each for each in everyones(loss) if each is not None]
    return sum(known) / len(known)


def _saved(model: Any, plain: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the tensors of a merged checkpoint, and those that the plain model saves; on every rank."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    try:
        model.save_parallelized(f"{folder[0]}/merged", merge_checkpoints=True)
        if dist.get_rank() == 0:
            plain.save_pretrained(f"{folder[0]}/plain")
        dist.barrier()
        merged, expected = (_tensors(Path(folder[0]) / name) for name in ("merged", "plain"))
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0])
    assert merged.keys() == expected.keys(), f"other tensors: {merged.keys() ^ expected.keys()}"
    return merged, expected


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}
