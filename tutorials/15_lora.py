"""Tutorial 15: LoRA. Adapters of PEFT on a sharded model, saved in PEFT's files, merged in place. Needs `peft`.

python tutorials/15_lora.py
torchrun --nproc-per-node 2 tutorials/15_lora.py
torchrun --nproc-per-node 4 tutorials/15_lora.py --tensor-parallel-size 2
"""

from __future__ import annotations

import copy
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
from offline import Blocks, arguments, load_model, load_text, load_tokenizer, mesh, say, start, whole_world

import autopar


def train(model: Any, loader: Any, steps: int, parallel: bool) -> list[float]:
    """The loop of any other model; the optimizer gets what is trained. Returns the losses."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    device, losses = next(model.parameters()).device, []
    for batch in islice(cycle(loader), steps):
        loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
        loss.backward()
        if parallel:
            autopar.average_gradients(model)
            autopar.clip_grad_norm_(model, max_norm=1.0)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """On the CPU."""
    return model.eval()(input_ids=ids.to(next(model.parameters()).device)).logits[:].cpu()


def main() -> None:
    args = arguments(__doc__, steps=20, batch_size=4).parse_args()
    rank, _ = start()
    tokenizer = load_tokenizer(args)
    base = load_model(args, tokenizer).eval()
    config = peft.LoraConfig(r=4, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
    model = peft.get_peft_model(copy.deepcopy(base), config)
    plain = copy.deepcopy(model)

    # Adapters come first. Whatever the policy says of a layer, its adapters follow.
    size = whole_world(args)
    model = autopar.initialize(model, {"model_parallelism": {"tensor_parallel_size": size}})
    block = model.get_base_model().transformer.h[0].attn.c_attn
    shapes = [list(each.default.weight.shape) for each in (block.lora_A, block.lora_B)]
    say(f"{mesh(model.mpu)}: on rank 0 A {shapes[0]}, B {shapes[1]}")

    data = Blocks(load_text(args.dataset), tokenizer, args.context)
    loader = autopar.prepare_dataloader(data, batch_size=args.batch_size, shuffle=True, seed=0, mpu=model.mpu)
    losses = train(model, loader, args.steps, parallel=True)
    say(f"loss {losses[0]:.6f} -> {losses[-1]:.6f}")

    folder = Path(args.output) / "lora"
    model.save_pretrained(folder / "adapters")  # every rank calls it, rank 0 writes
    ids = data[0]["input_ids"].unsqueeze(0)
    with model.disable_adapter():
        say(
            f"without the adapters: logits of the base model differ by {_differ(logits(model, ids), logits(base, ids))}"
        )
    trained = logits(model, ids)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder / "adapters")
    say(f"plain PEFT reads them: logits differ by {_differ(logits(again, ids), trained)}")
    model.merge_adapter()  # in place, shard by shard
    model.save_parallelized(folder / "merged", merge_checkpoints=True)
    merged = type(base).from_pretrained(folder / "merged")
    say(f"merged, plain transformers: logits differ by {_differ(logits(merged, ids), trained)}")

    if model.mpu.dp.size == 1 and rank == 0:
        expected = train(plain, loader, args.steps, parallel=False)
        say(f"largest difference of losses: {max(abs(a - b) for a, b in zip(losses, expected, strict=True)):.2e}")
    dist.barrier()
    dist.destroy_process_group()


def _differ(one: torch.Tensor, other: torch.Tensor) -> str:
    return f"{(one - other).abs().max().item():.2e}"


if __name__ == "__main__":
    main()
