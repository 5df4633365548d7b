"""Tutorial 13: verify that a parallel model gives the same results as the model on one process; find a mistake.

torchrun --nproc-per-node 2 tutorials/13_verify.py

It prints the comparisons of a correct mesh. Then it verifies a policy with a mistake, and prints the module and the
line of the policy that cause it. On the command line this is `autopar verify`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from offline import Blocks, arguments, finish, load_model, load_text, load_tokenizer, say, start

import autopar

# The policy of GPT-2 with one mistake. c_attn holds query, key and value next to each other, so its rule is
# [heads, heads, heads]. The shapes fit either way: the model would train, and compute something else.
MISTAKE = """
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
    """Print the number of comparisons, and the module where the first difference is."""
    passed = sum(row.holds is True for row in report.rows)
    failed = [f"{row.check} {row.what}" for row in report.rows if row.holds is False]
    say(f"{passed} comparisons passed, {len(failed)} failed{': ' if failed else ''}{', '.join(failed)}")
    if report.culprit is not None:
        say(f"the mistake is in {report.culprit.module}: {report.culprit.lines[0]}")


def main() -> None:
    args = arguments(__doc__, steps=4, batch_size=2).parse_args()
    start()
    tokenizer = load_tokenizer(args)
    torch.manual_seed(0)
    model = load_model(args, tokenizer)
    config = {"tp": max(2, dist.get_world_size())}  # a single process starts two ranks
    data = Blocks(load_text(args.dataset), tokenizer, args.context)
    ids = data.ids[: args.batch_size]
    batches = [{"input_ids": ids, "labels": ids}]  # optional: without batches, verify makes random ones

    # 1. Compare outputs, gradients, an optimizer step, tokens, checkpoints and random draws. The model is only read.
    report = autopar.verify(model, config, batches=batches)
    describe(report)
    for row in report.rows:
        if row.what in ("logits", "worst gradient") and row.difference is not None:
            say(f"{row.check}: {row.what}: largest difference {row.difference:.2e}, tolerance {row.allowed:.0e}")
    say(f"rank 0 holds {report.memory[0].weights:,} of {report.plain_memory.weights:,} bytes of weights")

    # 2. Verify the policy with the mistake.
    report = autopar.verify(model, config, policy=MISTAKE, batches=batches, checks=["forward"])
    describe(report)
    try:
        report.raise_if_failed()
    except autopar.VerificationError as error:
        say(f"error: {str(error).splitlines()[0]}")
    finish()


if __name__ == "__main__":
    main()
