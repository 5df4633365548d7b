"""Tutorial 18: prove it. A model parallelized and plain on the same inputs; then a mistake, and where it is found.

python tutorials/18_prove_it.py
torchrun --nproc-per-node 2 tutorials/18_prove_it.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from offline import Blocks, arguments, load_model, load_text, load_tokenizer, say, start

import autopar

# GPT-2's policy, with one mistake: query, key and value lie side by side in c_attn, three runs of heads and not one.
# All shapes fit, and nothing is refused: it would train, and learn something else.
MISTAKEN = """
match: {model_type: gpt2}
units: {heads: num_attention_heads, ffn: inferred, vocab: vocab_size}
prefix: {wte: {embedding: vocab}, wpe: replicated, drop: replicated}
blocks:
  path: h
  modules:
    ln_1: replicated
    attn.c_attn: {column: [heads]}
    attn.c_proj: {row: heads}
    ln_2: replicated
    mlp.c_fc: {column: ffn}
    mlp.c_proj: {row: ffn}
  attributes: {attn.split_size: heads}
suffix: {ln_f: replicated}
head: {lm_head: {column: vocab, gather_output: true}}
"""


def describe(report: Any) -> None:
    """Print what was compared, and where the first difference is."""
    held = [row for row in report.rows if row.holds]
    wrong = [f"{row.check} {row.what}" for row in report.rows if row.holds is False]
    say(f"{len(held)} comparisons hold, {len(wrong)} do not: {', '.join(wrong) or 'it is the plain model'}")
    if report.culprit is not None:
        say(f"the fault is in {report.culprit.module}: {report.culprit.lines[0]}")


def main() -> None:
    args = arguments(__doc__, steps=4, batch_size=2).parse_args()
    start()
    tokenizer = load_tokenizer(args)
    torch.manual_seed(0)
    model = load_model(args, tokenizer)
    # Under torchrun the ranks of the job compare; a process that is alone starts two of its own.
    size = max(2, dist.get_world_size())
    config = {"model_parallelism": {"tensor_parallel_size": size}}
    data = Blocks(load_text(args.dataset), tokenizer, args.context)
    ids = torch.stack([data[row]["input_ids"] for row in range(args.batch_size)])
    batches = [{"input_ids": ids, "labels": ids}]

    # Your own batches, or none: then some are made at random. The model itself is only read.
    report = autopar.verify(model, config, batches=batches)
    describe(report)
    for row in report.rows:
        if row.what in ("logits", "worst gradient") and row.difference is not None:
            say(f"{row.check}: {row.what} differ by {row.difference:.2e} at most, allowed is {row.allowed:.0e}")
    say(f"rank 0 holds {report.memory[0].weights:,} of {report.plain_memory.weights:,} bytes of weights")

    # A policy of one's own, with a mistake.
    report = autopar.verify(model, config, policy=MISTAKEN, batches=batches, checks=["forward"])
    describe(report)
    try:
        report.raise_if_failed()
    except autopar.VerificationError as error:
        say(str(error).splitlines()[0])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
