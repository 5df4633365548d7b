"""Small programs of four ranks: every kind of mesh."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
import yaml
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor import Replicate
from torch.nn.parallel import DistributedDataParallel

from tests.random_models import Case as RandomCase, build as random_model, cases, kind

BATCH, SEQUENCE = 4, 16
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8}
SMALL = SIZES | {"num_key_value_heads": 4, "vocab_size": 256, "attn_implementation": "eager"}


def llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


def mixtral() -> Any:
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL, num_local_experts=8))


def mamba() -> Any:
    torch.manual_seed(0)
    small: dict[str, Any] = {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2}
    return transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**small, num_hidden_layers=4, vocab_size=64))


@dataclass(frozen=True)
class Case:
    """A program: the model, its configuration, maybe its own loop."""

    build: Callable[[], Any]
    config: dict[str, Any]
    loop: Callable[[Any, Any, dict[str, Any]], None] | None = None
    optimizer: str = "adamw"


def torchs_data_parallel(model: Any, optimizer: Any, batch: dict[str, Any]) -> None:
    """Train three steps in ``DistributedDataParallel``, which orders its buckets anew behind the first."""
    wrapped = DistributedDataParallel(model, process_group=model.mpu.dp.group, bucket_cap_mb=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        wrapped(**batch).loss.backward()
        optimizer.step()


def torchs_sharded_tensors(model: Any, optimizer: Any, batch: dict[str, Any]) -> None:
    """Train two steps with torch's own clipping and sums of DTensors, whose collectives are functional ones."""
    for _ in range(2):
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for parameter in [*model.parameters()][:3]:
            mine = parameter.grad.detach().abs().sum()
            total = mine.redistribute(placements=[Replicate()] * mine.device_mesh.ndim)
            total.add_(mine)  # a scalar each: the same operator again and again
            parameter.grad.full_tensor()
        optimizer.step()
        optimizer.zero_grad()


def numbers_of_the_host(model: Any, optimizer: Any, batch: dict[str, Any]) -> None:
    """Exchange numbers as loops do that log, balance and stop early; each must come as it does between real ranks."""
    rank, ranks = dist.get_rank(), range(4)
    own = torch.tensor([rank + 1.0, 2.0])
    sums = {"SUM": [10, 8], "MAX": [4, 2], "MIN": [1, 2], "PRODUCT": [24, 16]}
    for name, expected in sums.items():
        total = own.clone()
        dist.all_reduce(total, getattr(dist.ReduceOp, name))
        assert total.tolist() == expected, name
    total = own.clone()
    dist.reduce(total, 1, op=dist.ReduceOp.SUM)
    assert rank != 1 or total.tolist() == sums["SUM"], "by the operation of this call, not of the one before"
    assert functional.all_reduce(own, "max", dist.group.WORLD).tolist() == sums["MAX"]
    pair = torch.zeros(2)
    dist.reduce_scatter(pair, [*(torch.arange(8.0) + rank).split(2)])
    assert pair.tolist() == [8 * rank + 6, 8 * rank + 10]
    dist.scatter(pair, [torch.tensor([3.0, x]) for x in ranks] if rank == 2 else None, src=2)
    assert pair.tolist() == [3, rank]
    gathered = [torch.zeros(2) for _ in ranks] if rank == 3 else None
    dist.gather(own, gathered, dst=3)
    assert gathered is None or [x.tolist() for x in gathered] == [[x + 1, 2] for x in ranks]
    rows = [torch.zeros(2) for _ in ranks]
    dist.all_gather(rows, own)
    assert [x.tolist() for x in rows] == [[x + 1, 2] for x in ranks]
    counts = torch.zeros(4 * (rank + 1))  # to rank r go r + 1 numbers
    dist.all_to_all_single(counts, torch.full((10,), float(rank)), [rank + 1] * 4, [1, 2, 3, 4])
    assert counts.view(4, -1).tolist() == [[x] * (rank + 1) for x in ranks]
    objects: list[Any] = [None] * 4
    dist.all_gather_object(objects, {"rank": rank})
    assert [each["rank"] for each in objects] == list(ranks)
    given = [dist.P2POp(dist.isend, own, (rank + 1) % 4), dist.P2POp(dist.irecv, pair, (rank - 1) % 4)]
    for work in dist.batch_isend_irecv(given):
        work.wait()
    assert pair.tolist() == [(rank - 1) % 4 + 1, 2]


_NAMED: dict[str, Any] = {
    each.__name__: each
    for each in (llama, mixtral, mamba, torchs_data_parallel, torchs_sharded_tensors, numbers_of_the_host)
}
CASES = {
    name: Case(_NAMED[row["model"]], row["config"], _NAMED.get(row.get("loop")), row.get("optimizer", "adamw"))
    for name, row in yaml.safe_load(Path(__file__).with_name("programs.yaml").read_text()).items()
}


_TYPES = """
deepseek_v3 t5 gpt2 falcon phi3 qwen3 bloom bert deberta-v2 bart mixtral gemma2 opt gptj gpt_neox codegen mpt olmo2
cohere starcoder2 stablelm granite roberta electra pegasus mbart marian qwen2_moe glm4 mistral mpnet gpt_oss
"""
POLICIES = tuple(_TYPES.split())
"""Model types whose main head reads text, each of another policy."""

LOOPS = ("gpt_oss",)
"""Of those, which issue calls for each expert that is chosen: their number follows from the tokens."""


def of_type(model_type: str) -> Any:
    """Build a small model of a type; its routers choose every expert, as those that are rehearsed."""
    model = random_model(text_head(model_type), 8, 4)
    for module in model.modules():
        if model_type in LOOPS and hasattr(module, "top_k"):
            module.top_k = module.num_experts
    return model


def text_head(model_type: str) -> RandomCase:
    """Return the head that makes text, or fills it in."""
    order = ("seq2seq", "causal", "masked")
    heads = [case for case in cases(model_type) if kind(case.head) in order]
    return min(heads, key=lambda case: order.index(str(kind(case.head))))


def case_of_type(model_type: str) -> Case:
    """Return the program of a model type: two stages of two ranks, two micro-batches."""
    config = {"tp": 2, "pp": 2, "pipeline": {"num_microbatches": 2}}
    return Case(functools.partial(of_type, model_type), config)


def config_of(case: Case) -> dict[str, Any]:
    """Return the whole configuration, over gloo, without comparisons by value."""
    mesh = {**case.config.get("model_parallelism", {}), "cpu_transport": "gloo"}
    return {"consistency_check": {"enable": False}, **case.config, "model_parallelism": mesh}
