"""Habits of one process on a model of which a rank has a part: saving, loading and counting the whole."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_model, save_file, save_model
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import autopar
from tests.harness.worlds import pooled
from tests.small import gpt2, llama

SIZES = {"tp": (2, 1), "pp": (1, 2)}
INSTEAD = r"save_parallelized\(dir, merge_checkpoints=True\)"


def parallel(model: Any, how: str = "tp", **config: Any) -> Any:
    tp, pp = SIZES.get(how, (1, 1))
    return autopar.initialize(model, {"tp": tp, "pp": pp, **config})


def mine(folder: Path, rank: int | None = None) -> Path:
    return folder / f"rank{dist.get_rank() if rank is None else rank}.pt"


def same(model: nn.Module, expected: nn.Module) -> None:
    weights = model.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in expected.state_dict().items())


@pytest.mark.parametrize("how", ["tp", "pp"])
@pooled(world_size=2)
def test_torch_save_of_a_state_dict_warns_once_and_the_file_knows_its_rank(tmp_path: Path, how: str) -> None:
    model, rank = parallel(llama(), how), dist.get_rank()
    axis = "tensor-parallel" if how == "tp" else "pipeline"
    text = f"only the shards of LlamaForCausalLM on {axis} rank {rank} of 2.*\n.*{INSTEAD}"
    with pytest.warns(autopar.ShardWarning, match=text) as seen:
        torch.save(model.state_dict(), mine(tmp_path))
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(model.state_dict(), mine(tmp_path))
    dist.barrier()
    own, other = torch.load(mine(tmp_path)), torch.load(mine(tmp_path, 1 - rank))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(own)
    assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())
    had, is_now = f"the state dict of {axis} rank {1 - rank} of 2", f"this is {axis} rank {rank} of 2"
    with pytest.raises(autopar.CheckpointError, match=f"{had}; {is_now}"):
        model.load_state_dict(other)
    with pytest.raises(RuntimeError, match=r"size mismatch|Missing key"):
        llama().load_state_dict(own)


@pooled(world_size=2)
def test_a_state_dict_inside_of_another_module_s_warns_too(tmp_path: Path) -> None:
    around = nn.ModuleDict({"module": parallel(gpt2())})  # as DistributedDataParallel names it
    with pytest.warns(autopar.ShardWarning, match="holds only the shards of GPT2LMHeadModel"):
        torch.save({"model": around.state_dict(), "step": 3}, mine(tmp_path))
    around.load_state_dict(torch.load(mine(tmp_path))["model"])
    around.load_state_dict({f"module.{name}": value for name, value in gpt2(1).state_dict().items()})
    same(autopar.deparallelize(around["module"]), gpt2(1))


@pooled(world_size=2)
def test_copies_of_a_model_and_of_its_state_dict_are_quiet() -> None:
    model = parallel(gpt2())
    ids = torch.arange(6).view(1, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        best = copy.deepcopy(model.state_dict())
        average = copy.deepcopy(model)
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight.add_(1.0)
    assert not torch.equal(model(ids).logits, average(ids).logits)
    model.load_state_dict(best)
    average.load_state_dict(model.state_dict())
    assert torch.equal(model(ids).logits, average(ids).logits)


def called_by(module: str, function: str) -> Callable[[nn.Module], Any]:
    """``function`` of a library that is not installed here, which asks for the state dict."""
    names: dict[str, Any] = {"__name__": module}
    exec(f"def {function}(model): return dict(model.state_dict())", names)
    found: Callable[[nn.Module], Any] = names[function]
    return found


@pytest.mark.tier("test", only=("tp",))
@pytest.mark.parametrize("how", ["tp", "pp", "zero3"])
@pooled(world_size=2)
def test_what_saves_a_whole_model_raises(tmp_path: Path, how: str) -> None:
    sections = {"zero": {"stage": 3}} if how == "zero3" else {}
    model = parallel(llama(), how, **sections)
    calls: dict[str, Callable[[], Any]] = {
        "save_pretrained": lambda: model.save_pretrained(tmp_path / "x"),
        "save_pretrained of the class": lambda: type(model).save_pretrained(model, tmp_path / "x"),
        "save_pretrained with a state dict": lambda: PreTrainedModel.save_pretrained(
            model, tmp_path / "x", state_dict=model.state_dict()
        ),
        "of the base model": lambda: model.base_model.save_pretrained(tmp_path / "x"),
        "push_to_hub of the base model": lambda: model.base_model.push_to_hub("nobody/nothing"),
        "save_model": lambda: save_model(model, str(tmp_path / "x.safetensors")),
        "peft": lambda: called_by("peft.peft_model", "save_pretrained")(model),
        "accelerate": lambda: called_by("accelerate.accelerator", "get_state_dict")(model),
    }
    for name, call in calls.items():
        with pytest.raises(autopar.ConfigError, match=rf"holds only its shards(?s:.*){INSTEAD}"):
            call()
            pytest.fail(f"{name} did not raise")
    assert not any((tmp_path / "x").glob("*.safetensors"))
    with pytest.raises(autopar.ConfigError, match=rf"cannot be pickled \(torch.save\)(?s:.*){INSTEAD}"):
        torch.save(model, mine(tmp_path))
    with pytest.raises(autopar.ConfigError, match=r"set_input_embeddings.*\n.*autopar.deparallelize\(model\)"):
        model.set_input_embeddings(nn.Embedding(131, 24))
    own = called_by("__main__", "best_weights")(model)  # not a saver
    assert own.keys() == model.state_dict().keys()


@pooled(world_size=2)
def test_savers_that_read_the_dict_warn(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with pytest.warns(autopar.ShardWarning, match=f"safetensors reads state_dict.*\n.*{INSTEAD}"):
        save_file(parallel(llama()).state_dict(), mine(tmp_path))
    with (
        warnings.catch_warnings(),
        pytest.warns(autopar.ShardWarning, match=r"use autopar\.checkpoint\.to_dtensor_state_dict\(model\)"),
    ):
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        dcp.save({"model": parallel(llama()).state_dict()}, checkpoint_id=tmp_path / "dcp")


@pooled(world_size=2)
def test_a_model_that_is_whole_is_saved_as_ever(tmp_path: Path) -> None:
    model = parallel(llama(), "dp")
    model.save_pretrained(tmp_path / "saved")  # transformers writes on rank 0
    dist.barrier()
    same(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), llama())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(model.state_dict(), mine(tmp_path).with_suffix(".bin"))
    save_model(model, str(mine(tmp_path).with_suffix(".safetensors")))
    model.load_state_dict(llama(1).state_dict(), assign=True)
    assert model.num_parameters() == llama().num_parameters()


class Wrapped(nn.Module):
    """A model of the user's own around a Hugging Face model."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.inner, self.scale = gpt2(seed), nn.Parameter(torch.full((1,), float(seed)))


@pytest.mark.tier("test", only=("tp",))
@pytest.mark.parametrize("how", ["tp", "pp"])
@pooled(world_size=2)
def test_a_whole_state_dict_loads(tmp_path: Path, how: str) -> None:
    for make in (llama, gpt2, Wrapped):
        model = parallel(make(0), how)
        assert not any(model.load_state_dict(make(1).state_dict()))
        same(autopar.deparallelize(model), make(1))
    model = parallel(llama(), how)
    model.model.load_state_dict(llama(1).model.state_dict())
    whole = str(mine(tmp_path)) + ".safetensors"
    save_model(llama(2), whole)
    load_model(model, whole)
    same(autopar.deparallelize(model), llama(2))
    model = parallel(llama(), how)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*elsewhere"):
        model.load_state_dict({**llama(1).state_dict(), "model.elsewhere": torch.zeros(1)})


@pooled(world_size=2)
def test_a_whole_state_dict_loads_into_zero_stage_3(tmp_path: Path) -> None:
    model = parallel(llama(), "zero3", zero={"stage": 3})
    model.load_state_dict(llama(1).state_dict())
    model.save_parallelized(tmp_path / "merged", merge_checkpoints=True)
    same(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), llama(1))
    model.load_state_dict(model.state_dict())


@pooled(world_size=2)
def test_state_dicts_that_do_not_fit_are_refused_before_anything_is_changed() -> None:
    model, whole = parallel(llama()), llama(1).state_dict()
    before, part = copy.deepcopy(model.state_dict()), model.state_dict()
    table, rows = "model.embed_tokens.weight", len(part["model.embed_tokens.weight"])
    mixed = {**whole, table: part[table]}
    other = {**whole, table: torch.zeros(40, 24)}
    shapes = rf"{table}: got \[40, 24\], expected \[131, 24\] .full. or \[{rows}, 24\] .this rank."
    for given, text in (
        (mixed, rf"are full, but the rest are shards(?s:.*){table}: got \[{rows}, 24\], expected \[131, 24\]"),
        (other, rf"1 tensors have neither the full nor this rank's shape(?s:.*){shapes}"),
    ):
        with pytest.raises(autopar.CheckpointError, match=text):
            model.load_state_dict(given)
    with pytest.raises(autopar.CheckpointError, match="Leave assign out"):
        model.load_state_dict(whole, assign=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    staged = parallel(llama(), "pp")
    far = f"model.layers.{1 - dist.get_rank()}.self_attn.q_proj.weight"
    with pytest.raises(autopar.CheckpointError, match=rf"has no tensor of this rank(?s:.*){far}"):
        staged.load_state_dict({far: whole[far]}, strict=False)


@pytest.mark.parametrize("how", ["tp", "pp", "zero3"])
@pooled(world_size=2)
def test_num_parameters_counts_the_whole_model(how: str) -> None:
    sections = {"zero": {"stage": 3}} if how == "zero3" else {}
    for make in (llama, gpt2):
        plain = make()
        plain.get_input_embeddings().requires_grad_(False)
        model = parallel(copy.deepcopy(plain), how, **sections)
        for which in ({}, {"only_trainable": True}, {"exclude_embeddings": True}):
            assert model.num_parameters(**which) == plain.num_parameters(**which), which
            assert model.base_model.num_parameters(**which) == plain.base_model.num_parameters(**which), which
