"""Tutorial 7: the tensor-parallel functions of Megatron-LM: groups, mappings, loss, data and the training loop.

torchrun --nproc-per-node 2 tutorials/07_megatron_toolbox.py
torchrun --nproc-per-node 4 tutorials/07_megatron_toolbox.py

It prints the result of each mapping on each rank, trains a small GPT in Megatron's loop, compares the losses with one
process, and loads the checkpoint with another tensor-parallel size.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import count, repeat
from typing import Any

import torch
import torch.distributed as dist
from offline import arguments, finish, largest_difference, load_text, mesh, say, start
from torch.nn.functional import cross_entropy
from torch.optim import Adam
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar.features.megatron.schedules import get_forward_backward_func
from autopar.tensor_parallel import (
    broadcast_data,
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
    vocab_parallel_cross_entropy,
)

VOCABULARY, LENGTH, MICROBATCHES = 100, 64, 2


def make_gpt() -> GPT2LMHeadModel:
    """Build a GPT-2 with 2 layers, hidden size 12 and 4 heads, without dropout."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=12,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    torch.manual_seed(123)
    return GPT2LMHeadModel(config)


def batches(texts: list[str], batch_size: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield micro-batches of the 95 printable characters of ASCII, as 0 to 94. The label is the next character."""
    codes = [ord(char) - 32 for text in texts for char in text if " " <= char <= "~"]
    for number in count():
        first = number * batch_size * LENGTH % (len(codes) - batch_size * LENGTH)
        part = torch.tensor(codes[first : first + batch_size * LENGTH + 1])
        yield {"tokens": part[:-1].view(batch_size, LENGTH), "labels": part[1:].view(batch_size, LENGTH)}


def show(title: str, mine: Any) -> None:
    """Print the values of all ranks in one line."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, mine)
    say(f"{title}: " + " | ".join(map(str, values)))


def show_mappings(mpu: autopar.MPU) -> None:
    """Print the four mappings of tensor-parallel layers, forward and backward."""
    size, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    full = torch.arange(float(2 * size), requires_grad=True)  # identical on all ranks
    shard = scatter_to_tensor_model_parallel_region(full, mpu)
    show("scatter forward: the shard", shard.tolist())
    (shard * (rank + 1)).sum().backward()
    show("scatter backward: the gradients of all shards", full.grad.tolist())

    own = torch.full((2,), float(rank + 1), requires_grad=True)
    show("gather forward: all shards", gather_from_tensor_model_parallel_region(own, mpu).tolist())
    show("reduce forward: the sum", reduce_from_tensor_model_parallel_region(own, mpu).tolist())
    (copy_to_tensor_model_parallel_region(own, mpu) * (rank + 1)).sum().backward()
    show("copy backward: the sum of the gradients", own.grad.tolist())


def main() -> None:
    args = arguments(__doc__, steps=5, batch_size=8).parse_args()
    _, world = start()
    size = args.tensor_parallel_size or (2 if world % 2 == 0 else 1)

    # 1. Groups. An MPU holds them. No state is global, so several MPUs can exist at the same time.
    mpu = autopar.MPU(tensor_parallel_size=size)
    say(mesh(mpu))
    show("tensor-parallel rank", mpu.get_tensor_model_parallel_rank())
    show("data-parallel rank", mpu.get_data_parallel_rank())

    # 2. Mappings.
    show_mappings(mpu)

    # 3. Loss over a sharded vocabulary: each rank has the logits of its words only.
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1)).to(mpu.device)
    labels = torch.tensor([0, 50, 99], device=mpu.device)
    mine = scatter_to_tensor_model_parallel_region(logits, mpu)  # [3, vocabulary/tp]
    losses = vocab_parallel_cross_entropy(mine, labels, group=mpu)  # [3]
    difference = (losses - cross_entropy(logits, labels, reduction="none")).abs().max().item()
    say(f"vocabulary-parallel loss with {VOCABULARY // mpu.sizes.tp} logits per rank: differs by {difference:.2e}")
    mpu.destroy()

    # 4. A GPT with two layers. initialize makes the groups by itself.
    gpt = make_gpt()
    reference = copy.deepcopy(gpt)
    model = autopar.initialize(gpt, {"tp": size})
    optimizer, mpu = Adam(model.parameters(), lr=1e-2), model.mpu
    show("parameters on each rank", sum(parameter.shape.numel() for parameter in model.parameters()))

    # 5. Train in Megatron's loop. Only the first rank of each tensor-parallel group reads data, and broadcast_data
    #    sends it to the other ranks of the group.
    seen: list[dict[Any, torch.Tensor]] = []

    def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[torch.Tensor, Any]:
        batch = broadcast_data(["tokens", "labels"], next(data_iterator), torch.int64, mpu)
        seen.append(batch)
        logits = model(batch["tokens"], use_cache=False).logits  # [batch, length, vocabulary]

        def loss_func(logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            mine = scatter_to_tensor_model_parallel_region(logits, mpu)  # [batch, length, vocabulary/tp]
            loss = vocab_parallel_cross_entropy(mine, batch["labels"], group=mpu).mean()
            return loss, {"lm loss": loss.detach()}

        return logits, loss_func

    first = mpu.get_tensor_model_parallel_rank() == 0
    data_iterator = batches(load_text(args.dataset), args.batch_size) if first else repeat(None)
    forward_backward, reached = get_forward_backward_func(), []
    for step in range(args.steps):
        reports = forward_backward(
            forward_step_func=forward_step,
            data_iterator=data_iterator,
            model=model,
            num_microbatches=MICROBATCHES,
            forward_only=False,
        )
        optimizer.step()
        optimizer.zero_grad()
        reached.append(sum(report["lm loss"].item() for report in reports) / MICROBATCHES)
        say(f"iteration {step + 1}: loss {reached[-1]:.6f}")

    # Every process also trains the single-process model, with the same micro-batches in one batch.
    expected = []
    reference.to(mpu.device)
    reference_optimizer = Adam(reference.parameters(), lr=1e-2)
    for step in range(args.steps):
        microbatches = seen[step * MICROBATCHES : (step + 1) * MICROBATCHES]
        logits = reference(torch.cat([part["tokens"] for part in microbatches]), use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), torch.cat([part["labels"] for part in microbatches]).flatten())
        loss.backward()
        reference_optimizer.step()
        reference_optimizer.zero_grad()
        expected.append(loss.item())
    say(f"largest difference of losses: {largest_difference(reached, expected)}")

    # 6. Save, and load with another tensor-parallel size: twice as large, or else 1.
    folder = args.output / "toolbox"
    model.save_parallelized(folder, optimizer=optimizer)
    wider = 2 * size if world % (2 * size) == 0 else 1
    again = autopar.initialize(make_gpt(), {"tp": wider})
    again.from_parallelized(folder, optimizer=Adam(again.parameters(), lr=1e-2))
    tokens = seen[0]["tokens"]
    with torch.no_grad():
        difference = (again(tokens).logits - model(tokens).logits).abs().max().item()
    say(f"saved at tensor parallel {size}, loaded at {wider}: logits differ by {difference:.2e}")
    finish()


if __name__ == "__main__":
    main()
