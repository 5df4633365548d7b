"""Policies of diffusers' classes: how they are found, what the dry run sees, what is refused."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from autopar.config import ParallelConfig
from autopar.dry_run.plan_model import ModelPlans
from autopar.errors import ConfigError, PolicyError, UnsupportedModelError
from autopar.features.context_parallel.plan import make as plan_context
from autopar.features.diffusers.models import check_version
from autopar.features.sequence_parallel.plan import sequence
from autopar.policy.load import own_policies, read_user_policy
from autopar.policy.match import find_policy
from tests.features.diffusers.models import SMALL, make
from tests.fetched_packages import with_package
from tests.small import gpt2

UNSAMPLED = {"lumina2"}  # its forward reads the lengths of the texts


@with_package("diffusers", world_size=1)
def test_each_class_has_a_policy_that_runs_without_data() -> None:
    listed = {policy.name: policy for policy in own_policies().values() if policy.library}
    assert set(listed) == set(SMALL)
    for name, (kind, _, _) in SMALL.items():
        model = make(name, heads=4)[0]
        assert find_policy(model).name == name and listed[name].names == (kind,)
        plans = ModelPlans.of(nn.ModuleDict({"inside": model}))  # the model in a module of the user
        assert (plans.prefix, plans.inner) == ("inside", model)
        assert plans.tried(3) is (name not in UNSAMPLED), name
        stages = plans.stages(2)
        assert all(len(holders) == 1 for tensor, holders in stages.tensors.items() if "blocks." in tensor)
        plan = plans.tensors(3)
        sharded = sum(tensor.layout is not None for tensor in plan.tensors.values())
        assert 4 * sharded > len(plan.tensors), f"{name}: {sharded} of {len(plan.tensors)} tensors"


def test_lists_of_blocks_in_a_policy() -> None:
    policy = read_user_policy({"extends": {"net": "flux"}})
    paths = [each.blocks_path for each in policy.towers[0].lists]
    assert paths == ["net.transformer_blocks", "net.single_transformer_blocks"]
    assert {"attn.to_q", "proj_mlp"} <= {*policy.towers[0].then[0].blocks}
    assert {*policy.units} == {"heads", "ffn", "mlp"}
    rule = {"sharded": ["heads", "heads"], "dim": 0}
    for blocks, words in (
        ([{"path": "a"}], "'blocks' has no 'modules'"),
        ([], "'blocks' must hold keys, not []"),
        ([{"path": "a", "modules": {}}, {"path": "b"}], "'blocks' has no 'modules'"),
        ({"path": "a", "modules": {}, "inputs": {"x": rule}}, "'sharded' takes the name of one unit"),
    ):
        with pytest.raises(PolicyError) as info:
            read_user_policy({"units": {"heads": 2}, "blocks": blocks})
        assert words in str(info.value)


def refusal(model: Any, policy: Any = None, **sizes: int) -> str:
    with pytest.raises((ConfigError, UnsupportedModelError, PolicyError)) as info:
        ModelPlans.of(model, policy).stages(2) if "pp" in sizes else ModelPlans.of(model, policy).tensors(2)
    return str(info.value)


@with_package("diffusers", world_size=1)
def test_what_is_refused() -> None:
    import diffusers
    from diffusers.hooks import apply_layerwise_casting

    net = diffusers.UNet2DModel(sample_size=8, block_out_channels=(8, 8, 8, 8), norm_num_groups=2, layers_per_block=1)
    assert refusal(net).startswith("UNet2DModel is a convolutional net (a UNet or an autoencoder), which autopar does")
    assert ModelPlans.of(nn.ModuleDict({"net": net, "lm": gpt2()})).prefix == "lm"
    other = diffusers.DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=4, num_layers=1, sample_size=8)
    text = refusal(other)
    assert "no policy lists the class DiTTransformer2DModel of diffusers. Did you mean" in text
    assert "policy='derive'" in text
    plain = make("wan")[0]
    for change, words in {
        "device_map": "the device_map (0, cpu) of WanTransformer3DModel.\n  Call from_pretrained without it",
        "hook": "the hook 'layerwise_casting' at patch_embedding of WanTransformer3DModel.\n  Call initialize without",
        "compiled": "the compiled blocks.0 of WanTransformer3DModel.\n  Leave out compile_repeated_blocks",
        "parallel": "enable_parallelism of WanTransformer3DModel.\n  Leave it out",
    }.items():
        model = copy.deepcopy(plain)
        if change == "device_map":
            model.hf_device_map = {"blocks": 0, "proj_out": "cpu"}
        elif change == "hook":
            apply_layerwise_casting(model.patch_embedding, torch.bfloat16, torch.float32)
        elif change == "compiled":
            model.compile_repeated_blocks(backend="eager")
        else:
            model._parallel_config = object()
        assert f"tensor_parallel_size=2 is not supported with {words}" in refusal(model), change
        assert "pipeline_parallel_size=2" in refusal(model, pp=2)
    old = {"extends": "wan", "match": {"diffusers": {"WanTransformer3DModel": "<0.42"}}}
    policy = read_user_policy(old)
    assert policy.names == ("WanTransformer3DModel",) and policy.range_of("WanTransformer3DModel") == "<0.42"
    assert ModelPlans.of(nn.ModuleDict({"inside": plain}), policy).prefix == "inside"
    with pytest.raises(UnsupportedModelError, match=r"for WanTransformer3DModel needs diffusers <0.42, got 0.42"):
        check_version(policy, "WanTransformer3DModel")
    for name, words in {
        "flux": "in single_transformer_blocks.0: cat: works along the rows of",
        "flux2": "Flux2Transformer2DModel: cat: works along the rows of",
        "sana": "in transformer_blocks.0: RuntimeError: unflatten",
    }.items():
        plans = ModelPlans.of(make(name)[0])
        with pytest.raises(ConfigError, match="sequence_parallel does not fit") as info:
            sequence(plans, 2, plans.stages(1))
        assert words in str(info.value), name
    other = make("wan", heads=2)[0]
    other.condition_embedder.text_embedder.dropout = nn.Dropout(0.25)
    cp = {"context_parallel_size": 2}
    for model, more, words in (
        (make("sd3")[0], {}, "does not fit SD3Transformer2DModel: of diffusers, it supports Flux, Flux2, LTXVideo,"),
        (other, {}, "with dropout 0.25 at condition_embedder.text_embedder.dropout of Wan"),
        (
            plain,
            {"pipeline_parallel_size": 2},
            "with the 2 pipeline stages of WanTransformer3DModel.\n  Use tensor_par",
        ),
        (plain, {"context_parallel_method": "gather"}, "with context_parallel_method=gather of WanTransformer3DModel."),
        (plain, {"tensor_parallel_size": 4}, "with the 6 heads for 8 ranks of WanTransformer3DModel.\n  Each rank"),
        (plain, {"tensor_parallel_size": 2, "sequence_parallel": True}, "with sequence_parallel, its code between"),
    ):
        plans, config = ModelPlans.of(model), ParallelConfig.parse({"model_parallelism": {**cp, **more}}, 8)
        with pytest.raises(ConfigError) as info:
            plan_context(plans, config, plans.stages(1))
        assert "context_parallel_size=2" in str(info.value) and words in str(info.value)
