"""Each diffusion transformer with a policy against the single-process model: loss, gradients, LoRA, a step."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.errors import ConfigError
from autopar.pipeline_parallel.microbatch import split
from tests.features.diffusers.models import SMALL, make
from tests.features.peft.adapted import randomise_adapters
from tests.fetched_packages import with_package
from tests.parity import close
from tests.pipeline_parallel.oracle import whole_tensors

LAYERS = (
    r".*(blocks|layers)\.\d+\..*(to_q|to_v|to_out\.0|to_add_out|to_qkv_mlp_proj|proj_mlp|proj_out|net\.2|w2|linear_in)"
)
# Classes that run on rows of the sequence -> lengths of the image, and of the text if blocks return it
ROWS = {"wan": [32], "ltx_video": [16], "pixart": [16], "sd3": [16, 7], "qwen_image": [12, 7]}
SEQUENCES = ("flux", "flux2", "ltx_video", "qwen_image", "wan")  # classes with context parallelism


class Holder(nn.Module):
    """A module of user code around a model."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)


def with_lora(model: nn.Module) -> nn.Module:
    """The model with random adapters, of which only those are trained."""
    import peft

    model.requires_grad_(False)
    add = getattr(model, "add_adapter", partial(peft.inject_adapter_in_model, model=model))
    add(peft.LoraConfig(r=3, target_modules=LAYERS))
    return randomise_adapters(model)


def recomputed(model: Any) -> Any:
    model.enable_gradient_checkpointing()
    return model.train()


def loss_of(outputs: Any, inputs: Any = None) -> torch.Tensor:
    """A sum over the samples, so that micro-batches and replicas add up."""
    return sum((each.square().sum() for each in outputs.sample), torch.zeros(()))


def of_replica(value: Any, rank: int, ranks: int) -> Any:
    """The samples of one replica."""
    if isinstance(value, list) or (isinstance(value, torch.Tensor) and len(value) == 2):
        return value[rank * 2 // ranks : (rank + 1) * 2 // ranks]
    return value


def check(name: str, heads: int = 6, *, adapt: Callable[[nn.Module], nn.Module] = nn.Module.train, **more: Any) -> Any:
    """Compare the losses and gradients of two batches, and the weights after a step; returns the parallel model.

    Args:
        adapt: what becomes of the model before it is parallelized.
        more: sizes, the policy, and the other sections of the configuration.
    """
    plain, inputs = make(name, heads)
    inputs = more.pop("inputs", lambda name, inputs: inputs)(name, inputs)
    plain = adapt(plain)
    model = copy.deepcopy(plain)
    sizes = {key: more.pop(key) for key in [*more] if key.endswith("_size") or key == "sequence_parallel"}
    made = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    policy = more.pop("policy", None)
    model, optimizer = autopar.initialize(model, {"model_parallelism": sizes, **more}, policy=policy, optimizer=made)
    mpu, microbatches = model.mpu, 1 if model.mpu.pp.size == 1 else 2
    for number in range(2):
        batch = {key: value + number / 8 if torch.is_tensor(value) and value.is_floating_point() else value
                 for key, value in inputs.items()}  # fmt: skip
        own = {key: of_replica(value, mpu.dp.rank, mpu.dp.size) for key, value in batch.items()}
        expected = loss_of(plain(**batch))
        (expected / mpu.dp.size / microbatches).backward()
        if mpu.pp.size > 1:
            actual = model.execute_pipeline(own, loss_of, broadcast_loss=True).loss * microbatches
            with torch.no_grad():
                close(loss_of(model(**own)) / expected.detach(), torch.ones(()), f"output of {name}")
        else:
            actual = loss_of(model(**own))
            actual.backward()
        if mpu.dp.size > 1:
            dist.all_reduce(actual := actual.detach(), group=mpu.dp.group)
        close(actual.detach() / expected.detach(), torch.ones(()), f"loss of {name}")
    if mpu.dp_cp.size > 1:
        autopar.average_gradients(model)
    if "zero" not in more:
        gradients = whole_tensors(model, lambda parameter: parameter.grad)
        for key, parameter in plain.named_parameters():
            assert (gradients[key] is None) == (parameter.grad is None), f"{key} of {name}"
            if parameter.grad is not None:
                largest = max(1.0, float(parameter.grad.abs().max()))
                close(gradients[key] / largest, parameter.grad / largest, f"gradient of {key} of {name}")
    other = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=1e-3)
    for each in (optimizer, other):
        each.step()
    weights = whole_tensors(model, lambda parameter: parameter.data)
    for key, parameter in plain.named_parameters():
        close(weights[key], parameter.data, f"{key} of {name} after a step")
    return model


@pytest.mark.tier("test")
@with_package("diffusers", world_size=2)
def test_one_of_each_mesh() -> None:
    import peft

    check("flux", heads=5, tensor_parallel_size=2)
    model = check("wan", adapt=with_lora, pipeline_parallel_size=2)
    assert any(p.numel() for p in model.blocks[3].parameters()) is (model.mpu.pp.rank == 1)
    assert next(model.patch_embedding.parameters()).dtype is torch.float32  # diffusers reads such dtypes
    plain, inputs = make("wan")
    holder = autopar.initialize(Holder(copy.deepcopy(plain)), {"pp": 2})
    with torch.no_grad():
        close(holder.inner(**inputs).sample, plain(**inputs).sample, "a model inside a module of user code")
    config = peft.LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False)
    adapted = peft.get_peft_model(copy.deepcopy(plain), config)
    expected = adapted(**inputs).sample.square().mean().detach()
    model = autopar.initialize(adapted, {"pp": 2})
    batch = {**inputs, "target": torch.zeros(2, 4, 2, 8, 8)}  # for the criterion only
    actual = model.execute_pipeline(batch, lambda o, b: (o.sample - b["target"]).square().mean(), broadcast_loss=True)
    close(actual.loss, expected, "loss of a PeftModel")
    model = autopar.initialize(copy.deepcopy(plain), {"pp": 2})
    with pytest.raises(ConfigError, match=r"enable_cache: this rank holds only its shards of Wan.*\n  Leave it out"):
        model.enable_cache(None)
    inputs["encoder_hidden_state"] = inputs.pop("encoder_hidden_states")
    with pytest.raises(ConfigError, match=r"take 'encoder_hidden_state'. Did you mean 'encoder_hidden_states'\?"):
        model.execute_pipeline(inputs, lambda outputs, inputs: outputs.sample.sum())
    rotary = (torch.zeros(5, 4), torch.ones(5, 4))
    parts = split({"hidden_states": torch.zeros(2, 3), "image_rotary_emb": rotary}, 2, 1, None, plain.config)
    assert all(torch.equal(part["image_rotary_emb"][1], rotary[1]) for part in parts)


@with_package("diffusers", world_size=2)
def test_sequence_parallel() -> None:
    for name, lengths in ROWS.items():
        check(name, adapt=with_lora, tensor_parallel_size=2, sequence_parallel=True)
        model = check(name, adapt=recomputed, tensor_parallel_size=2, sequence_parallel=True)
        block = next(module for module in model.modules() if hasattr(module, "rows_list"))
        assert [layout.size for layout in block.rows_list.rows.layouts] == lengths, name
    other_forms = {"wan": {"timestep": torch.rand(2, 32)}, "sd3": {"hidden_states": torch.rand(2, 4, 6, 8)}}
    for name, other in other_forms.items():
        plain, inputs = make(name)
        model, sizes = copy.deepcopy(plain), {"tensor_parallel_size": 2, "sequence_parallel": True}
        autopar.initialize(recomputed(model), {"model_parallelism": sizes})
        for each in (recomputed(plain), model):  # blocks are recomputed after a forward of another form
            (loss_of(each(**inputs)) + loss_of(each(**inputs | other))).backward()
        gradients = whole_tensors(model, lambda parameter: parameter.grad)
        for key, parameter in plain.named_parameters():
            largest = max(1.0, float(parameter.grad.abs().max()))
            close(gradients[key] / largest, parameter.grad / largest, f"gradient of {key} of {name}, two forms")


def even(name: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs with rows that two ranks can split, and another mask."""
    if "flux" in name:
        inputs |= {key: inputs[key][:rows] for key, rows in {"img_ids": 6, "txt_ids": 4}.items()}
        inputs["hidden_states"] = torch.randn(2, 6, 4)
    if name != "wan":
        masks = {key: torch.tensor([[1] * 4, [1, 1, 0, 0]]).bool() for key in inputs if "mask" in key}
        inputs |= {"encoder_hidden_states": torch.randn(2, 4, 16), **masks}
    return inputs


@with_package("diffusers", world_size=4)
def test_context_parallel() -> None:
    from diffusers.models.attention_dispatch import attention_backend

    for name in SEQUENCES:
        for heads, more in ((5, {"tensor_parallel_size": 2}), (4, {})):
            check(name, heads=heads, inputs=even, context_parallel_size=2, **more)
        check(name, inputs=even, adapt=with_lora, context_parallel_size=4 if name == "wan" else 2)
        check(name, inputs=even, adapt=recomputed, context_parallel_size=2)
    plain, inputs = make("wan")
    model = autopar.initialize(copy.deepcopy(plain), {"model_parallelism": {"context_parallel_size": 2}})
    rows: list[int] = []
    autopar.local_hooks(model.blocks[0].attn1)
    model.blocks[0].attn1.register_forward_hook(lambda module, args, out: rows.append(out.shape[1]))
    with torch.no_grad():
        for each in (model, copy.deepcopy(model)):
            for given in (inputs, {**inputs, "timestep": torch.rand(2, 32)}):
                close(each(**given).sample, plain(**given).sample, "outputs of a model and of its copy")
        assert rows == [16] * 4
        with attention_backend("_native_math"), pytest.raises(ConfigError, match="attention backend 'native'"):
            model(**inputs)
        other = {**inputs, "hidden_states": torch.randn(2, 4, 1, 6, 6)}
        with pytest.raises(ConfigError, match="result 0 of rope must have a multiple of 2 rows in dim 1, got shape "):
            model(**other)
        autopar.deparallelize(model)
        close(model(**other).sample, plain(**other).sample, "the full model")


@with_package("diffusers", world_size=3)
def test_uneven_heads() -> None:
    for name in ROWS:
        check(name, heads=4, tensor_parallel_size=3, sequence_parallel=True)
    for name in SMALL:
        check(name, heads=4, tensor_parallel_size=3)
        check(name, heads=4, adapt=with_lora, tensor_parallel_size=3)
    check("sd3", heads=4, policy="derive", tensor_parallel_size=3)


@with_package("diffusers", world_size=2)
def test_stages() -> None:
    for name in SMALL:
        check(name, pipeline_parallel_size=2)
        check(name, adapt=with_lora, pipeline_parallel_size=2)
    for sizes in ([1, 3], [3, 1]):  # a stage that starts inside a list of blocks
        for name in ("flux", "flux2", "hunyuan_video", "aura_flow"):
            check(name, pipeline_parallel_size=2, pipeline={"layers_per_stage": sizes})
    check("flux2", pipeline_parallel_size=2, pipeline={"schedule": "interleaved", "chunks": 2})


@with_package("diffusers", world_size=4)
def test_replicas() -> None:
    for name in SMALL:
        check(name, tensor_parallel_size=2, zero={"stage": 1})
    check("flux2", tensor_parallel_size=2, pipeline_parallel_size=2, pipeline={"schedule": "zero-bubble"})
    check("sd3", tensor_parallel_size=2, pipeline_parallel_size=2, sequence_parallel=True)
