"""Pipelines of diffusers with a parallel transformer, and training loops as in its scripts."""

import copy
from typing import Any

import torch
import torch.distributed as dist

import autopar
from tests.features.diffusers.models import make
from tests.features.diffusers.test_saving import MESHES
from tests.fetched_packages import with_package
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


def train(model: Any, optimizer: Any, ema: Any, trained: Any, own: Any = None) -> list[float]:
    """Flow matching, as in the scripts of diffusers: noise, a time for each sample, the velocity as the target."""
    losses, generator = [], torch.Generator().manual_seed(3)

    def loss_of(outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
        error = (outputs.sample.float() - inputs["target"].float()).square()
        return (inputs["weighting"] * error).flatten(1).mean(1).mean()

    for _ in range(3):
        latents, noise, text = (torch.randn(4, *size, generator=generator) for size in ((4, 2, 8, 8),) * 2 + ((5, 16),))
        sigma = torch.rand(4, 1, 1, 1, 1, generator=generator)
        batch = {"hidden_states": (1 - sigma) * latents + sigma * noise, "timestep": 1000 * sigma.flatten()}
        batch |= {"encoder_hidden_states": text, "target": noise - latents, "weighting": 1 + sigma}
        batch |= {name: batch[name].to(model.dtype) for name in ("hidden_states", "encoder_hidden_states")}
        batch = {key: own(value) for key, value in batch.items()} if own else batch
        if hasattr(model, "execute_pipeline"):
            loss = model.execute_pipeline(batch, loss_of, broadcast_loss=True).loss
        else:
            given = ("hidden_states", "timestep", "encoder_hidden_states")
            loss = loss_of(model(**{name: batch[name] for name in given}), batch)
            loss.backward()
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


def check_training(name: str) -> None:
    from diffusers.training_utils import EMAModel

    sizes = {"pp": MESHES[1], "checkpointing": MESHES[1]}.get(name, {} if "zero" in name else MESHES[0])
    config: dict[str, Any] = {"model_parallelism": sizes} if sizes else {"zero": {"stage": int(name[-1])}}
    config |= {"pipeline": {"num_microbatches": 2}} if sizes else {}
    config |= {"precision": {"dtype": "bf16"}} if name == "bf16" else {}
    plain = in_four_bits() if name == "nf4" else make("wan")[0]
    model = in_four_bits() if name == "nf4" else copy.deepcopy(plain)
    for each in (plain, model):
        each.train()
        if name == "checkpointing":
            each.enable_gradient_checkpointing()
    trained = [[weight for weight in each.parameters() if weight.requires_grad] for each in (plain, model)]
    optimizers = [torch.optim.AdamW(weights, lr=1e-3, eps=1e-3) for weights in trained]
    expected = train(plain, optimizers[0], average := EMAModel(trained[0], decay=0.5), trained[0])
    model, optimizer = autopar.initialize(model, config, optimizer=optimizers[1])
    trained[1] = [weight for weight in model.parameters() if weight.requires_grad]  # FSDP2 makes new objects
    ours = EMAModel(trained[1], decay=0.5)
    replica = dist.get_rank() if not sizes else None
    own = None if replica is None else lambda value: value.chunk(2)[replica]
    losses = train(model, optimizer, ours, trained[1], own)
    if replica is None:
        close(torch.tensor(losses), torch.tensor(expected), "losses", tolerance=2e-2 if name == "bf16" else 1e-5)
    if name in ("bf16", "nf4"):
        return
    all_close(dict(autopar.hf_weights(model)), dict(plain.state_dict()), f"trained with {name}")
    ours.copy_to(trained[1])
    average.copy_to(trained[0])
    all_close(dict(autopar.hf_weights(model)), dict(plain.state_dict()), f"averaged with {name}")


@with_package("diffusers", world_size=2)
def test_training_as_in_one_process() -> None:
    for name in ("tp", "pp", "zero 1", "zero 2", "zero 3", "checkpointing", "bf16", "nf4"):
        check_training(name)
