"""Whole weights of a parallelized model, streamed under the names of save_pretrained."""

import copy
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2LMHeadModel
from transformers.utils import hub

import autopar
from autopar.errors import CheckpointError, ConfigError, ConsistencyError
from tests.exchange import everyones, raises_everywhere
from tests.harness.worlds import pooled
from tests.random_models import Case, build
from tests.small import gpt2, llama


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


def same(model: Any, plain: Any, **options: Any) -> None:
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
            same(model, plain)
            same(model, plain, bucket_size=1)  # each tensor by itself
            model.mpu.destroy()
    plain = gpt2()
    config = {"model_parallelism": {"tensor_parallel_size": 2}, "zero": {"stage": 3}}
    model = copy.deepcopy(plain)
    model, _ = autopar.initialize(model, config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    same(model, plain)


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


# -- uploads: merged by all ranks, sent once, the same verdict everywhere ----------------------------------------------


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


def assert_whole(folder: Path) -> None:
    model = GPT2LMHeadModel.from_pretrained(folder)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), gpt2().parameters(), strict=True))


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
                assert_whole(here / "a")
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
