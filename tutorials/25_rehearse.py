"""Tutorial 25: rehearse a job of 64 ranks on this machine, see where its ranks would hang, look at its step.

python tutorials/25_rehearse.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from offline import arguments
from transformers import AutoModelForCausalLM, GPT2Config
from transformers.utils import logging

import autopar


def log_on_the_first(model: Any, optimizer: Any, batch: dict[str, Any]) -> None:
    """A loop with a mistake that no test on one rank finds: the loss is summed over all ranks, where it is printed."""
    loss = model(**batch).loss
    loss.backward()
    if dist.get_rank() == 0:
        dist.all_reduce(loss.detach())
    autopar.average_gradients(model)
    optimizer.step()


def main() -> None:
    args = arguments(__doc__, steps=1, batch_size=4).parse_args()
    logging.set_verbosity_error()
    args.output.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):  # no weights
        model = AutoModelForCausalLM.from_config(
            GPT2Config(n_layer=4, n_head=8, n_embd=256, vocab_size=args.vocab_size)
        )

    config = {"tp": 4, "pp": 2, "zero": {"stage": 1}, "pipeline": {"num_microbatches": args.batch_size}}
    found = autopar.rehearse(model, config, 64, batch=args.batch_size, sequence=args.context, gpu="h100")
    print(f"{found.mesh}: {len(found.traces)} of {found.world} ranks rehearsed, {found.calls('step')} calls in a step")
    print(f"problems: {found.problems}")
    for axis, traffic in found.traffic.items():
        print(f"over {axis} a rank sends {traffic.bytes:,} bytes, {traffic.between:,} of them to other nodes")

    found.write_timeline(args.output / "step.json")
    assert found.timeline is not None
    waits = found.timeline.spent(0)["wait"] / found.timeline.time
    print(f"the first rank waits {waits:.0%} of a step: step.json shows it in ui.perfetto.dev")

    wrong = autopar.rehearse(model, {"tp": 2}, 8, batch=2, sequence=args.context, loop=log_on_the_first)
    print("a loop in which one rank logs alone:")
    print(wrong.problems[0])


if __name__ == "__main__":
    main()
