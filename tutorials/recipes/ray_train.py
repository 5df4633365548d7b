"""Train with Ray Train: the workers are the ranks, and a job that loses a worker resumes from the last checkpoint.

python tutorials/recipes/ray_train.py --workers 2 --folder /tmp/run
python tutorials/recipes/ray_train.py --workers 16 --gpus --folder /shared/run    # on a Ray cluster

The folder is on a file system that all nodes share.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(config: dict[str, Any]) -> None:
    """Train on this rank. Ray has started the process group, and autopar uses it."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import autopar

    torch.manual_seed(0)
    config_of_model = GPT2Config(
        n_layer=2, n_embd=64, n_head=4, vocab_size=128, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    model = GPT2LMHeadModel(config_of_model)  # your model; without dropout the losses equal those of one process
    model = autopar.initialize(model, {"tp": config["tp"]})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    extra: dict[str, Any] = {"step": 0}
    folder = Path(config["folder"])
    checkpoint = autopar.latest(folder)
    if checkpoint is not None:
        model.from_parallelized(checkpoint, optimizer=optimizer, extra=extra)
    replica = model.mpu.dp.rank
    for step in range(extra["step"], config["steps"]):
        draws = torch.Generator().manual_seed(1000 * step + replica)  # your data: the ranks of a replica read the same
        ids = torch.randint(0, 128, (4, 16), generator=draws).to(model.mpu.device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        autopar.average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 2 == 0:
            model.save_parallelized(
                folder / f"step-{step + 1}", optimizer=optimizer, extra={"step": step + 1}, keep_last=2
            )
            if model.mpu.is_master:
                print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="ranks")
    parser.add_argument("--gpus", action="store_true", help="a GPU for each rank")
    parser.add_argument("--tensor-parallel-size", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints")
    args = parser.parse_args()
    folder = str(args.folder.resolve())
    trainer = TorchTrainer(
        train,
        train_loop_config={"tp": args.tensor_parallel_size, "steps": args.steps, "folder": folder},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpus),
        run_config=RunConfig(storage_path=f"{folder}-ray", failure_config=FailureConfig(max_failures=3)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
