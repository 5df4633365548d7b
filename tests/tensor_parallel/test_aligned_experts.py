"""Experts whose width a grouped matmul refuses: shares are aligned where they can be, else go one by one."""

import copy

import torch
import torch.distributed as dist
from transformers import MixtralConfig, MixtralForCausalLM

import autopar
from autopar.plan.units import UnitTable
from autopar.policy.schema import UnitSpec
from autopar.policy.yaml_reader import Where
from tests.parity import check, language_batches, randomise
from tests.pool import pooled


def _mixtral(ffn: int) -> MixtralForCausalLM:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=131, hidden_size=32, intermediate_size=ffn, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, initializer_range=0.1,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    assert model.config._experts_implementation == "grouped_mm"
    randomise(model)
    return model


def test_units_are_aligned_where_there_are_enough() -> None:
    spec = UnitSpec("ffn", "inferred", Where("p", 1), align=8)
    for count, size, shares in [(24, 2, ((0, 16), (16, 24))), (24, 4, ((0, 6), (6, 12), (12, 18), (18, 24)))]:
        assert UnitTable({"ffn": spec}, None, "Model", size, frozenset()).ranges("ffn", count, size) == shares


@pooled(world_size=4)
def test_a_share_that_is_not_aligned_runs_and_is_exact() -> None:
    for ffn in (24, 32):  # 6 a rank, which is no multiple of 16 bytes; 8 a rank
        plain = _mixtral(ffn)
        parallel = check(lambda plain=plain: copy.deepcopy(plain), language_batches(131), 4)
        experts = parallel.model.layers[0].mlp.experts
        assert experts.config._experts_implementation == ("eager" if ffn == 24 else "grouped_mm")
        whole = autopar.deparallelize(parallel)
        assert whole.model.layers[0].mlp.experts.config is whole.config
        dist.barrier()
