"""Tutorial 3: save a parallel model, load it again, and merge its shards into one Hugging Face checkpoint.

python tutorials/03_merge_checkpoints.py
torchrun --nproc-per-node 2 tutorials/03_merge_checkpoints.py
torchrun --nproc-per-node 4 tutorials/03_merge_checkpoints.py --model gpt2 --output /tmp/gpt2
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import cycle, islice
from pathlib import Path

import torch
import torch.distributed as dist
from offline import Blocks, arguments, load_model, load_text, load_tokenizer, say, start, whole_world
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import autopar


def listing(folder: Path) -> str:
    return ", ".join(sorted(f"{path.name} ({path.stat().st_size:,} bytes)" for path in folder.glob("*.safetensors")))


def main() -> None:
    args = arguments(__doc__, steps=5, batch_size=4).parse_args()
    rank, _ = start()
    tokenizer = load_tokenizer(args)
    config = {"model_parallelism": {"tensor_parallel_size": whole_world(args)}}
    model = autopar.initialize(load_model(args, tokenizer), config)
    device = model.mpu.device

    # Some steps, so that there is something to save.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = Blocks(load_text(args.dataset), tokenizer, args.context)
    loader = autopar.prepare_dataloader(data, batch_size=args.batch_size, shuffle=True, mpu=model.mpu)
    for batch in islice(cycle(loader), args.steps):
        model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    probe = data.ids[:1].to(device)
    with torch.no_grad():
        logits = model(probe).logits

    # 1. One file a rank. Every rank calls it.
    sharded = args.output / "sharded"
    model.save_parallelized(sharded)
    say(f"sharded: {listing(sharded)}")

    # 2. Into a parallel model again. Its weights were others before.
    again = autopar.initialize(load_model(args, tokenizer), config).eval()
    with torch.no_grad():
        before = (again(probe).logits - logits).abs().max().item()
        again = again.from_parallelized(sharded)
        after = (again(probe).logits - logits).abs().max().item()
    say(f"difference of logits before and after from_parallelized: {before:.2e}, {after:.2e}")

    # 3. Merged on the way: a folder that from_pretrained reads. Every rank calls it.
    merged = args.output / "merged"
    model.save_parallelized(merged, merge_checkpoints=True)
    say(f"merged: {listing(merged)}")

    # 4. Merged later, by one process that needs neither the model's code nor a process group:
    #    autopar merge SHARDED DESTINATION
    if rank == 0:
        later = args.output / "merged-later"
        folders = [os.path.relpath(sharded), os.path.relpath(later), "--force"]
        command = [sys.executable, "-m", "autopar", "merge", *folders]
        subprocess.run(command, check=True)
        one, other = load_file(merged / "model.safetensors"), load_file(later / "model.safetensors")
        same = one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        say(f"both merged checkpoints hold the same {len(one)} tensors: {same}")

        # 5. Plain transformers, without autopar.
        plain = AutoModelForCausalLM.from_pretrained(later, dtype=torch.float32).to(device)
        with torch.no_grad():
            difference = (plain(probe).logits - logits).abs().max().item()
        say(f"largest difference of logits: {difference:.2e}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
