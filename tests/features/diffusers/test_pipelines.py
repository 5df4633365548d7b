"""Pipelines of diffusers with a parallel transformer, and training loops as in its scripts."""

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

import autopar
from tests.features.diffusers.models import make
from tests.features.diffusers.test_saving import MESHES
from tests.fetched_packages import with_package
from tests.integrations.test_accelerate_calls import accelerator_of
from tests.parity import all_close, close


def pipelines() -> dict[str, Any]:
    """A pipeline of images and one of videos, with an encoder of text and arguments of its call."""
    import diffusers
    from transformers import UMT5Config, UMT5EncoderModel

    torch.manual_seed(2)
    channels = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    video = diffusers.AutoencoderKLWan(base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, **channels)
    blocks = {"block_out_channels": (4, 4), "norm_num_groups": 2, "latent_channels": 4}
    kinds = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    image = diffusers.AutoencoderKL(**blocks, **kinds, shift_factor=0.1, scaling_factor=1.5)
    text = UMT5EncoderModel(UMT5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2))
    kinds_of_text = ("text_encoder", "tokenizer")
    text_models = dict.fromkeys(f"{kind}{place}" for kind in kinds_of_text for place in ("", "_2", "_3"))
    scheduler = diffusers.UniPCMultistepScheduler(
        flow_shift=7.0, use_flow_sigmas=True, prediction_type="flow_prediction"
    )
    wan = diffusers.WanPipeline(None, text.eval(), video.eval(), scheduler, make("wan")[0].eval())
    images = (make("sd3")[0].eval(), diffusers.FlowMatchEulerDiscreteScheduler(), image.eval())
    sd3 = diffusers.StableDiffusion3Pipeline(*images, **text_models)
    pooled = {"pooled_prompt_embeds": torch.randn(1, 12), "negative_pooled_prompt_embeds": torch.randn(1, 12)}
    return {"wan": (wan, {"num_frames": 5}), "sd3": (sd3, pooled)}


def call(pipeline: Any, given: dict[str, Any]) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    embeds = [torch.randn(1, 5, 16, generator=generator) for _ in range(2)]
    texts = dict(zip(("prompt_embeds", "negative_prompt_embeds"), embeds, strict=True))
    sizes = {"height": 16, "width": 16, "num_inference_steps": 3, "guidance_scale": 4.0, "output_type": "pt"}
    return pipeline(**texts, **given, **sizes, generator=generator)[0]


@with_package("diffusers", world_size=2)
def test_pipelines_return_the_picture_of_one_process() -> None:
    from accelerate import cpu_offload_with_hook

    for sizes in MESHES:
        config = {"model_parallelism": sizes}
        for name, (pipeline, given) in pipelines().items():
            expected = call(pipeline, given)
            assert expected.std() > 1e-2
            autopar.initialize(pipeline.transformer, config)
            close(call(pipeline, given), expected, f"{name} with {sizes}", tolerance=1e-4)
            _, hook = cpu_offload_with_hook(pipeline.transformer, "cpu")  # as enable_model_cpu_offload
            close(call(pipeline, given), expected, f"{name} with {sizes}, offloaded", tolerance=1e-4)
            hook.remove()
        encoder, ids = pipelines()["wan"][0].text_encoder, torch.arange(8)[None]
        expected = encoder(ids).last_hidden_state
        close(autopar.initialize(encoder, config)(ids).last_hidden_state, expected, f"encoder with {sizes}")


def noisy(kind: str, step: int) -> dict[str, Any]:
    """Flow matching, as in the scripts of diffusers: noise, a time for each sample, the velocity as the target."""
    generator = torch.Generator().manual_seed(step)
    shape: tuple[int, ...] = {"wan": (4, 2, 8, 8), "sd3": (4, 8, 8), "flux": (8, 4)}[kind]
    latents, noise, text = (torch.randn(4, *size, generator=generator) for size in (shape, shape, (5, 16)))
    sigma = torch.rand(4, *[1] * len(shape), generator=generator)
    batch = {"hidden_states": (1 - sigma) * latents + sigma * noise, "timestep": 1000 * sigma.flatten()}
    batch |= {"encoder_hidden_states": text, "target": noise - latents, "weighting": 1 + sigma}
    if kind != "wan":
        batch |= {"pooled_projections": text[:, 0, :12], "return_dict": False}
    if kind == "flux":
        batch |= {"timestep": sigma.flatten(), "guidance": torch.tensor([3.5]).expand(4), "txt_ids": torch.zeros(5, 3)}
        batch["img_ids"] = torch.arange(24.0).view(8, 3)
    return batch


def loss_of(outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
    error = (outputs[0].float() - inputs["target"].float()).square()
    return (inputs["weighting"] * error).flatten(1).mean(1).mean()


def train(kind: str, model: Any, optimizer: Any, ema: Any, own: Any = None, script: Any = None, first: int = 0) -> Any:
    """Three steps, or with ``first=3`` a fourth one. ``script``: the accelerator of a script."""
    losses, trained = [], [weight for weight in model.parameters() if weight.requires_grad]
    staged = hasattr(model, "execute_pipeline") and (script is None or model.mpu.pp.size > 1)
    for step in range(first, 4 if first else 3):
        batch = noisy(kind, step)
        batch |= {name: batch[name].to(trained[-1].dtype) for name in ("hidden_states", "encoder_hidden_states")}
        batch = {name: own(v) if own and torch.is_tensor(v) and len(v) == 4 else v for name, v in batch.items()}
        if staged:
            loss = model.execute_pipeline(batch, loss_of, broadcast_loss=True).loss
        else:
            loss = loss_of(model(**{key: batch[key] for key in batch if key not in ("target", "weighting")}), batch)
            (script.backward if script else torch.Tensor.backward)(loss)
        if kind != "wan":
            (script or torch.nn.utils).clip_grad_norm_(trained, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        ema.step(trained)
        losses.append(loss.item())
    return losses


def in_four_bits() -> Any:
    """A model with blocks in NF4 and adapters, as ``from_pretrained(quantization_config=)`` makes it on a GPU."""
    import bitsandbytes
    from diffusers import WanTransformer3DModel
    from peft import LoraConfig

    torch.manual_seed(4)
    sizes = {"in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 16, "ffn_dim": 320}
    model = WanTransformer3DModel(num_attention_heads=3, attention_head_dim=64, num_layers=2, **sizes)
    model.requires_grad_(False)
    for path, layer in [*model.blocks.named_modules()]:
        if isinstance(layer, torch.nn.Linear):
            new = bitsandbytes.nn.Linear4bit(layer.in_features, layer.out_features, quant_type="nf4")
            new.weight = bitsandbytes.nn.Params4bit(layer.weight.data, False, quant_type="nf4", module=new)
            new.bias, new.support_avx512bf16_for_cpu = layer.bias, False
            model.blocks.set_submodule(path, new.to("cpu"))
    model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_v", "to_out.0"], init_lora_weights=False))
    return model


def check_training(mesh: str, kind: str = "wan", folder: Any = None) -> None:
    """Train a Wan; or adapters of an image model with accelerate, as the DreamBooth scripts do, and resume."""
    from diffusers.training_utils import EMAModel
    from peft import LoraConfig, get_peft_model_state_dict

    name, lora = f"{kind} in {mesh}", kind != "wan"
    config: dict[str, Any] = {"precision": {"dtype": "bf16" if mesh == "bf16" else "fp32"}}
    stages = {"model_parallelism": MESHES[mesh == "pp"], "pipeline": {"num_microbatches": 2}}
    config |= {"zero": {"stage": int(mesh[-1])}} if (replicas := "zero" in mesh) else stages
    plain = in_four_bits() if mesh == "nf4" else make(kind)[0]
    if lora:
        plain.requires_grad_(False).enable_gradient_checkpointing()
        plain.add_adapter(LoraConfig(r=4, init_lora_weights="gaussian", target_modules=["to_k", "to_q", "to_v"]))
    model = in_four_bits() if mesh == "nf4" else copy.deepcopy(plain)
    trained = [[weight for weight in each.train().parameters() if weight.requires_grad] for each in (plain, model)]
    optimizers = [torch.optim.AdamW(weights, lr=1e-3, eps=1e-3) for weights in trained]
    expected = train(kind, plain, optimizers[0], average := EMAModel(trained[0], decay=0.5))
    model, optimizer = autopar.initialize(model, config, optimizer=optimizers[1])
    trained[1] = [weight for weight in model.parameters() if weight.requires_grad]  # FSDP2 makes new objects
    ours = EMAModel(trained[1], decay=0.5)
    own = (lambda value: value.chunk(2)[dist.get_rank()]) if replicas else None
    script = accelerator_of() if lora else None
    loop, optimizer = script.prepare(model, optimizer) if script else (model, optimizer)
    losses = train(kind, loop, optimizer, ours, own, script)
    if mesh == "bf16":
        assert {name for name, p in model.named_parameters() if p.dtype == torch.float32} > {"scale_shift_table"}
    if not replicas:
        close(torch.tensor(losses), torch.tensor(expected), "losses", tolerance=2e-2 if mesh == "bf16" else 1e-5)
    if lora:
        model.save_parallelized(folder, optimizer=optimizer)  # the one of accelerate
        train(kind, loop, optimizer, ours, own, script, first=3)
        model.from_parallelized(folder, optimizer=optimizer)
        train(kind, loop, optimizer, ours, own, script, first=3)
        train(kind, plain, optimizers[0], average, first=3)
        model.save_parallelized(folder, adapter_only=True)
        adapters = {f"transformer.{key}": value for key, value in get_peft_model_state_dict(plain).items()}
        all_close(load_file(folder / "pytorch_lora_weights.safetensors"), adapters, f"resumed: {name}")
    elif mesh not in ("bf16", "nf4"):
        all_close(dict(autopar.hf_weights(model)), dict(plain.state_dict()), f"trained with {name}")
        ours.copy_to(trained[1])
        average.copy_to(trained[0])
        all_close(dict(autopar.hf_weights(model)), dict(plain.state_dict()), f"averaged with {name}")


@with_package("diffusers", world_size=2)
def test_training_as_in_one_process(tmp_path: Path) -> None:
    for mesh in ("tp", "pp", "zero 1", "zero 2", "zero 3", "bf16", "nf4"):
        check_training(mesh)
    for number, mesh in enumerate(("tp", "pp", "zero 1") * 2):
        check_training(mesh, "sd3" if number < 3 else "flux", tmp_path / str(number))
