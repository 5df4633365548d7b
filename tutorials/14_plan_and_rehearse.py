"""Tutorial 14: plan the memory of a job, and rehearse it on one machine, before you rent the GPUs.

python tutorials/14_plan_and_rehearse.py

It prints the planned memory of four configurations, and compares a plan with a real step. Then it rehearses a job of
64 ranks, and a training loop with a mistake that hangs on a cluster. It runs without torchrun. On the command line
the tools are `autopar plan` and `autopar rehearse`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from offline import arguments
from transformers import AutoModelForCausalLM, GPT2Config
from transformers.utils import logging

import autopar


def loop_with_a_mistake(model: Any, optimizer: Any, batch: dict[str, Any]) -> None:
    """Rank 0 logs the loss, and calls a collective that the other ranks do not call."""
    loss = model(**batch).loss
    loss.backward()
    if dist.get_rank() == 0:
        dist.all_reduce(loss.detach())
    autopar.average_gradients(model)
    optimizer.step()


def held(model: Any, optimizer: Any) -> tuple[int, ...]:
    """Return the bytes of weights, gradients and optimizer state on this rank."""
    gradients = [parameter.grad for parameter in model.parameters()]
    states = [entry for state in optimizer.state.values() for entry in state.values()]
    return tuple(sum(tensor.nbytes for tensor in each) for each in (model.parameters(), gradients, states))


def main() -> None:
    args = arguments(__doc__, steps=1, batch_size=4).parse_args()
    logging.set_verbosity_error()
    args.output.mkdir(parents=True, exist_ok=True)
    config = GPT2Config(n_layer=4, n_head=8, n_embd=256, vocab_size=args.vocab_size)
    with torch.device("meta"):  # no weights
        model = AutoModelForCausalLM.from_config(config)

    # 1. Plan the memory of the fullest rank, without weights and without a process group.
    sizes: dict[str, Any] = {"sequence": args.context, "batch": args.batch_size, "device": "cpu"}
    for name, changes in {
        "one process": {},
        "activation checkpointing": {"activation_checkpointing": {"enable": True}},
        "tp 2": {"tp": 2},
        "pp 2": {"pp": 2, "pipeline": {"microbatch_size": 1}},
    }.items():
        peak = autopar.plan_memory(model, changes, **sizes).peak
        print(f"{name}: {peak.total / 1e6:.1f} MB, of which {peak.activations / 1e6:.1f} MB are activations")

    # 2. Rehearse: some ranks of the job run here, on tensors without memory. Their collectives are compared.
    job = {"tp": 4, "pp": 2, "zero": {"stage": 1}, "pipeline": {"num_microbatches": args.batch_size}}
    found = autopar.rehearse(model, job, 64, batch=args.batch_size, sequence=args.context, gpu="h100")
    print(f"{found.mesh}: {len(found.traces)} of {found.world} ranks rehearsed, problems: {found.problems}")
    for axis, traffic in found.traffic.items():
        print(f"over {axis} a rank sends {traffic.bytes:,} bytes in a step, {traffic.between:,} of them between nodes")
    assert found.timeline is not None
    found.write_timeline(args.output / "step.json")
    idle = found.timeline.spent(0)["wait"] / found.timeline.time
    print(f"rank 0 waits {idle:.0%} of the step; open step.json in ui.perfetto.dev to see the timeline")

    # 3. Rehearse the loop with the mistake: the report names the collective and the line.
    wrong = autopar.rehearse(model, {"tp": 2}, 8, batch=2, sequence=args.context, loop=loop_with_a_mistake)
    print(f"a loop with a mistake:\n{wrong.problems[0]}")

    # 4. Compare the plan of one process with a real step.
    plan = autopar.plan_memory(model, {}, **sizes).ranks[0, 0, 0]
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = autopar.initialize(model, {}, optimizer=optimizer)
    ids = torch.randint(0, args.vocab_size, (args.batch_size, args.context))
    model.execute_pipeline({"input_ids": ids, "labels": ids}, optimizer=optimizer)
    optimizer.step()
    for kind, planned, real in zip(("weights", "gradients", "optimizer"), plan, held(model, optimizer), strict=False):
        print(f"{kind}: planned {planned:,} bytes, held {real:,} bytes")


if __name__ == "__main__":
    main()
