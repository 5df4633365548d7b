"""Folders and adapters of diffusion transformers, as diffusers writes and reads them."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

import autopar
from autopar.checkpoint import merge_checkpoint, reshard_checkpoint
from autopar.cli import app
from autopar.errors import ConfigError
from tests.exchange import by_rank_0
from tests.features.diffusers.models import make
from tests.fetched_packages import with_package
from tests.parity import close

MESHES: list[dict[str, int]] = [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}]


def contents(folder: Path) -> dict[str, Any]:
    """The tensors and the JSON of each file."""
    read: dict[str, Any] = {".safetensors": load_file, ".json": lambda path: json.loads(path.read_text())}
    return {path.name: read[path.suffix](path) for path in sorted(folder.iterdir())}


def same_files(folder: Path, expected: Path) -> None:
    ours, theirs = contents(folder), contents(expected)
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        if name.endswith(".safetensors"):
            torch.testing.assert_close(ours[name], values, rtol=0, atol=0)
        else:
            ours[name].get("metadata", {}).pop("total_parameters", None)
            assert ours[name] == values


@pytest.mark.tier("test")
@with_package("diffusers", world_size=2)
def test_merged_folders_are_those_of_diffusers(tmp_path: Path) -> None:
    from diffusers import AutoModel, SD3Transformer2DModel

    plain, inputs = make("wan")
    for number, sizes in enumerate(MESHES):
        folder = tmp_path / str(number)
        model = autopar.initialize(copy.deepcopy(plain), {"model_parallelism": sizes})
        model.save_parallelized(folder / "shards")
        model.save_parallelized(folder / "one", merge_checkpoints=True)
        if dist.get_rank() == 0:
            plain.save_pretrained(folder / "one plain")
            plain.save_pretrained(folder / "several plain", max_shard_size="100KB")
            merge_checkpoint(folder / "shards", folder / "several", max_shard_size="100KB")
            merge_checkpoint(folder / "shards", folder / "one", force=True)  # replaces the files of the save
            merge_checkpoint(folder / "shards", folder / "half", dtype="bfloat16")
            reshard_checkpoint(folder / "shards", folder / "resharded", tp=3)
        dist.barrier()
        for name in ("one", "several"):
            same_files(folder / name, folder / f"{name} plain")
            read = type(plain).from_pretrained(folder / name)
            torch.testing.assert_close(dict(read.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)
        half = type(plain).from_pretrained(folder / "half", torch_dtype=torch.bfloat16)
        assert half.proj_out.weight.dtype == torch.bfloat16 and half.config.num_layers == plain.config.num_layers
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
            model.from_parallelized(folder / "resharded")
            close(model(**inputs).sample, plain(**inputs).sample, f"loaded with {sizes}")
        assert model.num_parameters() == plain.num_parameters()
        for name, kind in (("shards", type(plain)), ("shards", AutoModel), ("several", AutoModel)):
            read = autopar.from_pretrained(kind, folder / name, {"model_parallelism": sizes})
            with torch.no_grad():
                close(read(**inputs).sample, plain(**inputs).sample, f"read from {name}")
        config = {"model_parallelism": sizes}
        kept = autopar.from_pretrained(type(plain), folder / "shards", config, dtype=torch.bfloat16)
        assert {p.dtype for p in kept.parameters()} == {torch.bfloat16, torch.float32}  # diffusers keeps norms in fp32
        with pytest.raises(ConfigError, match=f"holds shards of a {type(plain).__name__}, got SD3Transformer2DModel"):
            autopar.from_pretrained(SD3Transformer2DModel, folder / "shards", config)
        with pytest.raises(ConfigError, match=f"holds shards of a {type(plain).__name__}, got num_layers="):
            autopar.from_pretrained(type(plain), folder / "shards", config, num_layers=2)
        with pytest.raises(ConfigError, match="save_pretrained: this rank holds only its shards"):
            model.save_pretrained(folder / "shard")


@with_package("diffusers", world_size=1)
def test_a_plan_needs_only_the_config(tmp_path: Path) -> None:
    for name in ("pixart", "wan"):  # pixart has no method for adapters
        make(name)[0].save_config(tmp_path)
        sizes = ["--frames", "5", "--height", "32", "--width", "64", "--lora", "2", "--json"]
        printed = CliRunner().invoke(app, ["plan", str(tmp_path), "--gpus", "2", "--global-batch", "2", *sizes]).stdout
        plan = json.loads(printed[printed.index("{") :])
    assert plan["sequence"] == 2 * 2 * 4 and {each["tp"] for each in plan["best"]} == {1, 2}
    assert any(each["checkpointing"] for each in plan["best"])


@with_package("diffusers", world_size=2)
def test_adapters_are_in_files_of_pipelines(tmp_path: Path) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, WanPipeline
    from peft import LoraConfig, get_peft_model_state_dict

    def adapted(kind: str = "wan") -> tuple[Any, dict[str, Any]]:
        model, inputs = make(kind)
        torch.manual_seed(1)
        config = LoraConfig(r=3, target_modules=["to_q", "to_v", "to_out.0", "ffn.net.0.proj"], init_lora_weights=False)
        model.add_adapter(config)
        return model, inputs

    torch.set_grad_enabled(False)
    plain, inputs = adapted()
    flux, of_flux = adapted("flux")
    expected = plain(**inputs).sample
    for name, kind, each in (("plain", WanPipeline, plain), ("flux", FluxPipeline, flux)):
        layers, settings = get_peft_model_state_dict(each), each.peft_config["default"].to_dict()
        saved = {"transformer_lora_layers": layers, "transformer_lora_adapter_metadata": settings}
        by_rank_0(kind.save_lora_weights)(tmp_path / name, **saved)
    for number, sizes in enumerate(MESHES):
        folder, config = tmp_path / str(number), {"model_parallelism": sizes}
        model = autopar.initialize(adapted()[0], config)
        model.save_parallelized(folder, adapter_only=True)
        same_files(folder, tmp_path / "plain")
        with safe_open(folder / "pytorch_lora_weights.safetensors", "pt") as file:
            assert json.loads(file.metadata()["lora_adapter_metadata"])["transformer.r"] == 3
        with pytest.raises(ConfigError, match=r"save_lora_adapter: this rank holds only its shards"):
            model.save_lora_adapter(folder)
        with pytest.warns(autopar.ShardWarning, match="PEFT reads state_dict"):
            get_peft_model_state_dict(model)
        loaded = autopar.initialize(make("wan")[0], config)
        state, metadata = WanPipeline.lora_state_dict(folder, return_lora_metadata=True)
        WanPipeline.load_lora_into_transformer(state, loaded, metadata=metadata)
        close(loaded(**inputs).sample, expected, f"adapters loaded with {sizes}")
        loaded.fuse_lora()
        close(loaded(**inputs).sample, expected, f"adapters fused with {sizes}")
        pipeline = FluxPipeline(FlowMatchEulerDiscreteScheduler(), *[None] * 5, make("flux")[0])
        autopar.initialize(pipeline.transformer, config)
        pipeline.load_lora_weights(tmp_path / "flux")
        close(pipeline.transformer(**of_flux).sample, flux(**of_flux).sample, f"Flux loaded with {sizes}")
        trained = adapted()[0]
        model, _ = autopar.initialize(trained, config, optimizer=torch.optim.SGD(trained.parameters(), lr=1.0))
        with pytest.raises(ConfigError, match="unload_lora is not supported on a WanTransformer3DModel"):
            model.unload_lora()
