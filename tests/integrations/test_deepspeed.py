"""DeepSpeed's engine over a parallelized model, on CPUs and without operations that it would have to compile."""

import copy
import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, GPTBigCodeConfig, GPTBigCodeForCausalLM

import autopar
from autopar.errors import ConfigError
from tests.compare import same_weights
from tests.fetched_packages import need_package, put_on_path
from tests.harness.worlds import distributed
from tests.parity import close, language_batches
from tests.small import gpt2, grouped

LIMIT = 0.5


def start() -> Any:
    """DeepSpeed, with none of its own operations."""
    put_on_path("deepspeed")
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank())}
    warnings.simplefilter("ignore")  # its own
    import deepspeed

    deepspeed.ops.__compatible_ops__ = dict.fromkeys(deepspeed.ops.__compatible_ops__, False)
    return deepspeed


def engine_of(deepspeed: Any, model: Any, stage: int, **changes: Any) -> Any:
    mpu = changes.pop("mpu", model.mpu)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": LIMIT,
        **changes,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, mpu=mpu, config=config)[0]


def fused() -> Any:
    """Both ranks hold the one KV head, beside their query heads in one weight."""
    config = GPTBigCodeConfig(n_layer=2, n_embd=32, n_head=8, vocab_size=131, n_positions=32, initializer_range=0.3)
    for part in ("attn", "resid", "embd"):
        setattr(config, f"{part}_pdrop", 0.0)
    torch.manual_seed(0)
    return GPTBigCodeForCausalLM(config)


@distributed(world_size=4, timeout=240.0)
def train() -> None:
    """Losses, norms and weights of two clipped steps of two micro-batches, at tp 2 x dp 2."""
    deepspeed = start()
    for build, stages in ((grouped, (0, 1, 2)), (fused, (0,))):
        for stage in stages:
            plain = build().train()
            model = autopar.initialize(copy.deepcopy(plain), {"model_parallelism": {"tensor_parallel_size": 2}})
            engine = engine_of(deepspeed, model, stage)
            reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-3)
            batches = language_batches(131, count=8)
            for step in range(2):
                for number in range(2):
                    both = batches[4 * step + 2 * number :][:2]
                    losses = [plain(**batch).loss for batch in both]
                    (sum(losses) / 4).backward()
                    loss = engine(**both[model.mpu.dp.rank]).loss
                    engine.backward(loss)
                    engine.step()
                reference_norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), LIMIT)
                assert reference_norm > LIMIT
                close(loss.detach(), losses[model.mpu.dp.rank].detach(), f"loss of ZeRO {stage}")
                norm = engine.get_global_grad_norm()
                if stage:  # without ZeRO it clips and does not say by which norm
                    close(torch.tensor(float(norm)), reference_norm, f"norm of ZeRO {stage}", 2e-5)
                reference.step()
                reference.zero_grad()
            same_weights(model, plain, 2e-5, f"ZeRO {stage}")
            engine.destroy()
            model.mpu.destroy()
    refuse(deepspeed)


def refuse(deepspeed: Any) -> None:
    """What DeepSpeed would get wrong: half precision with clipping but without ZeRO, and its ZeRO 3."""
    batch = language_batches(131)[0]
    for changes, error in (
        ({"zero_optimization": {"stage": 1}}, r"heads of transformer\.h\.0\.attn\.c_attn\.weight several times"),
        ({"bf16": {"enabled": True}}, r"FP16_UnfusedOptimizer \(half(.|\n)*first rank only(.|\n)*stage 1 or 2"),
        ({"zero_optimization": {"stage": 3}}, "must keep the shape of its shard"),
        ({"mpu": None}, r"deepspeed.initialize requires mpu= for(.|\n)*deepspeed\.initialize\(model=model, mpu=model"),
    ):
        build = fused if "several times" in error else grouped
        model = autopar.initialize(build().train(), {"model_parallelism": {"tensor_parallel_size": 2}})
        with pytest.raises(ConfigError, match=error):
            engine = engine_of(deepspeed, model, 0, gradient_accumulation_steps=1, **changes)
            engine.backward(engine(**batch).loss)
            engine.step()
        model.mpu.destroy()
    model = autopar.initialize(grouped().train(), {"model_parallelism": {"context_parallel_size": 2}})
    with pytest.raises(ConfigError, match=r"context_parallel_size=2: DeepSpeed averages gradients over mpu\.dp\.group"):
        engine_of(deepspeed, model, 1)
    model.mpu.destroy()


@distributed(world_size=2, timeout=240.0)
def run_page(code: str) -> None:
    """Run a block of the documentation with a small model."""
    start()
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutoModelForCausalLM, "from_pretrained", lambda name: gpt2())
        exec(compile(code, "coming-from.md", "exec"), {"dataset": rows})


@pytest.mark.tier("all")
def test_the_block_of_the_page_runs_as_printed() -> None:
    need_package("deepspeed")
    page = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text()
    (block,) = [each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "deepspeed.initialize" in each]
    run_page(block)


@pytest.mark.tier("all")
def test_losses_norms_and_weights_are_the_plain_models() -> None:
    need_package("deepspeed")
    train()
