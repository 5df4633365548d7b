"""Habits of one process on a model of which a rank has a part: saving, loading and counting the whole."""

import copy
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, PreTrainedModel
from transformers.utils import hub

import autopar
from autopar.errors import CheckpointError, ConfigError, ConsistencyError
from tests.exchange import everyones, raises_everywhere
from tests.harness.worlds import pooled
from tests.random_models import Case, build
from tests.small import gpt2, llama

SECTIONS: dict[str, Any] = {"tp": {"tp": 2}, "pp": {"pp": 2}, "dp": {}, "zero3": {"zero": {"stage": 3}}}
INSTEAD = r"save_parallelized\(dir, merge_checkpoints=True\)"


def parallel(model: Any, how: str = "tp") -> Any:
    return autopar.initialize(model, SECTIONS[how])


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
    model = parallel(llama(), how)
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
    around = nn.ModuleDict({"module": parallel(gpt2())})  # as DistributedDataParallel names it
    with pytest.warns(autopar.ShardWarning, match="holds only the shards of GPT2LMHeadModel"):
        torch.save({"model": around.state_dict(), "step": 3}, mine(tmp_path))
    around.load_state_dict(torch.load(mine(tmp_path))["model"])
    around.load_state_dict({f"module.{name}": value for name, value in gpt2(1).state_dict().items()})
    same(autopar.deparallelize(around["module"]), gpt2(1))
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
    model = parallel(llama(), "zero3")
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
    for make in (llama, gpt2):
        plain = make()
        plain.get_input_embeddings().requires_grad_(False)
        model = parallel(copy.deepcopy(plain), how)
        for which in ({}, {"only_trainable": True}, {"exclude_embeddings": True}):
            assert model.num_parameters(**which) == plain.num_parameters(**which), which
            assert model.base_model.num_parameters(**which) == plain.base_model.num_parameters(**which), which


def grouped() -> Any:
    return llama(hidden_size=32, num_attention_heads=8, num_key_value_heads=1, tie_word_embeddings=True)


def written(plain: Any) -> dict[str, torch.Tensor]:
    """What ``save_pretrained`` writes, on rank 0."""
    found = {}
    if dist.get_rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            plain.save_pretrained(folder)
            found = load_file(f"{folder}/model.safetensors")
    return everyones(found)[0]


def as_saved(model: Any, plain: Any, **options: Any) -> None:
    found, expected = dict(autopar.hf_weights(model, **options)), written(plain)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype, name
    own = {parameter.data_ptr() for parameter in model.parameters()}
    assert not own & {tensor.data_ptr() for tensor in found.values()}, "they are copies"


def mixture() -> Any:
    return build(Case("mixtral", "MixtralForCausalLM"), 6, 3)


@pooled(world_size=4)
def test_names_and_values_are_those_of_save_pretrained() -> None:
    for make in (gpt2, grouped, mixture):
        for sizes in ({"tensor_parallel_size": 4}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}):
            if make is mixture and len(sizes) == 2:
                continue
            plain = make()
            model = autopar.initialize(copy.deepcopy(plain), {"model_parallelism": sizes})
            as_saved(model, plain)
            as_saved(model, plain, bucket_size=1)  # each tensor by itself
    plain = gpt2()
    config = {"model_parallelism": {"tensor_parallel_size": 2}, "zero": {"stage": 3}}
    model = copy.deepcopy(plain)
    model, _ = autopar.initialize(model, config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    as_saved(model, plain)


@pooled(world_size=2)
def test_a_rank_that_leaves_early_hangs_nobody() -> None:
    model = autopar.initialize(gpt2(), {"model_parallelism": {"tensor_parallel_size": 2}})
    total = len(dict(autopar.hf_weights(model)))
    for number, _ in enumerate(autopar.hf_weights(model, bucket_size=1)):  # all leave at the same one
        if number == 2:
            break
    message = f"rank 1 left the loop early; this rank has 3 of {total} tensors"
    for how in (StopIteration, ZeroDivisionError):
        seen = 0
        try:
            for _ in autopar.hf_weights(model, bucket_size=1):
                seen += 1
                if dist.get_rank() == 1 and seen == 3:
                    raise how
        except how:
            assert dist.get_rank() == 1
        except ConsistencyError as error:
            assert dist.get_rank() == 0 and message in str(error), error
        assert seen == 3
    for number, _ in enumerate(autopar.hf_weights(DistributedDataParallel(model, process_group=model.mpu.dp.group))):
        if dist.get_rank() == 1 and number == total - 1:
            break  # in the last bucket: the others have all of them
    dist.barrier()
    with pytest.raises(CheckpointError, match="is not parallelized"):
        autopar.hf_weights(gpt2())


class Hub:
    """What is uploaded instead of sending it; fails if it is told to."""

    def __init__(self, folder: Path, fails: bool) -> None:
        self.folder, self.fails, self.calls = folder, fails, []

    def create_repo(self, repo_id: str, **options: Any) -> Any:
        self.calls.append(options)
        return SimpleNamespace(repo_id=f"user/{repo_id}")

    def create_commit(self, repo_id: str, operations: Any, **options: Any) -> str:
        self.calls.append({"repo_id": repo_id, **options})
        if self.fails:
            raise ConnectionError("the hub is away")
        self.folder.mkdir()
        for operation in operations:
            (self.folder / operation.path_in_repo).write_bytes(Path(operation.path_or_fileobj).read_bytes())
        return f"https://hub/{repo_id}/commit/1"


def replaced(folder: Path, fails: bool = False) -> Hub:
    made = Hub(folder, fails)
    hub.hf_api = lambda: made
    hub.create_and_tag_model_card = lambda repo_id, tags, token: SimpleNamespace(
        save=lambda path: Path(path).write_text(f"tags: {tags}")
    )
    return made


@pooled(world_size=2)
def test_one_upload_of_the_whole_model(tmp_path: Path) -> None:
    before = hub.hf_api, hub.create_and_tag_model_card
    os.environ["TMPDIR"] = str(tmp_path)
    first = dist.get_rank() == 0
    try:
        for sizes in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
            model = autopar.initialize(gpt2(), {"model_parallelism": sizes})
            here = tmp_path / next(iter(sizes))
            here.mkdir(exist_ok=True)
            sent = replaced(here / "a")
            address = model.push_to_hub("mine", private=True, token="secret", commit_message="new", tags=["small"])
            assert address == "https://hub/user/mine/commit/1"  # on every rank
            assert len(sent.calls) == (2 if first else 0)
            if first:
                assert sent.calls[0]["private"] is True and sent.calls[0]["token"] == "secret"
                assert sent.calls[1]["commit_message"] == "new" and sent.calls[1]["repo_id"] == "user/mine"
                same(GPT2LMHeadModel.from_pretrained(here / "a"), gpt2())
                assert (here / "a" / "README.md").read_text() == "tags: ['small']"
        replaced(tmp_path / "never", fails=True)
        with raises_everywhere(CheckpointError, "ConnectionError: the hub is away"):
            model.push_to_hub("mine")
        with raises_everywhere(CheckpointError, "repo_id is 'name-0' on rank 0 and 'name-1'"):
            model.push_to_hub(f"name-{dist.get_rank()}")
        with raises_everywhere(CheckpointError, "has no argument 'privat'"):
            model.push_to_hub("mine", privat=True)
        with raises_everywhere(CheckpointError, "repo_id=3 must be a name such as 'user/model'"):
            model.push_to_hub(3)
        with pytest.raises(ConfigError, match="holds only its shards of GPT2Model"):
            model.transformer.push_to_hub("mine")
        assert not list(tmp_path.glob("autopar-hub-*")), "the temporary folders are gone"
    finally:
        hub.hf_api, hub.create_and_tag_model_card = before
        del os.environ["TMPDIR"]
