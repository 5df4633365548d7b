"""A user's script: it runs, and mypy --strict finds the lines of ``mistakes`` and no others (test_distributions.py)."""

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar import checkpoint
from autopar.tensor_parallel import ColumnParallelLinear


def main(plain: GPT2LMHeadModel, folder: Path) -> None:
    print(autopar.plan_memory(plain, {"tp": 2}, sequence=8).peak.total)
    print(autopar.rehearse(plain.config, {"tp": 2}, world=2, batch=2, sequence=8))
    config = autopar.ParallelConfig(tensor_parallel_size=1, pipeline_parallel_size=1)
    model, optimizer = autopar.initialize(plain, config, optimizer=torch.optim.AdamW(plain.parameters()))
    mpu: autopar.MPU = model.mpu
    samples = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 67, (4, 8))]
    for batch in autopar.prepare_dataloader(samples, batch_size=2 // mpu.dp.size, mpu=mpu):
        loss = model.execute_pipeline(batch, broadcast_loss=True).loss
        assert loss is not None and autopar.clip_grad_norm_(model, 1.0) > 0
        optimizer.step()
        figures: dict[str, float | None] = autopar.metrics(model, batch, 0.5, log="run.csv", loss=loss.item())
    model.save_parallelized(folder / "saved", optimizer=optimizer, async_save=True)
    model.wait_for_save()
    loaded: autopar.ParallelModel = model.from_parallelized(folder / "saved", optimizer=optimizer)
    with loaded.no_sync(), autopar.full_params(loaded):
        print(sum(weight.numel() for weight in loaded.parameters()), figures["tokens_per_second"])
    checkpoint.merge_checkpoint(folder / "saved", folder / "merged")
    checkpoint.reshard_checkpoint(folder / "saved", folder / "of_two", tp=2)
    print(checkpoint.Manifest.read(folder / "of_two").tp, ColumnParallelLinear(4, 4, group=mpu).weight.shape)


def mistakes(plain: GPT2LMHeadModel, model: autopar.ParallelModel) -> None:
    autopar.ParallelConfig(tensor_parallel_size="2")
    autopar.ParallelConfig(tensor_paralel_size=2)
    print(autopar.initialize(plain, {"tp": 2}).mpu.tp.szie)
    model.execute_pipeline({}, broadcast_loss="yes")
    model.execute_pipeline({}).loss.item()
    model.from_parallelized("saved", optimizer="adamw")
    autopar.metrics(model, {}, "0.5")
    autopar.initialise(plain)


main(GPT2LMHeadModel(GPT2Config(vocab_size=67, n_positions=16, n_embd=24, n_layer=2, n_head=3)), Path())
