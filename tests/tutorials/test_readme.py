"""The README is true: its Python runs, its table of policies is complete, what it says raises does.

UPDATE_README=1 python -m pytest tests/tutorials/test_readme.py      writes the table of policies
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM

import autopar
from autopar.config.pipeline import PipelineConfig
from autopar.config.sections import NUMBERS, SECTIONS
from autopar.policy.load import own_policies
from autopar.policy.match import supported_model_types
from autopar.policy.schema import Policy
from tests.random_models import auto_heads, of_type
from tests.small import gpt2, parallel
from tests.worlds import distributed

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "tutorials" / "README.md"]


def blocks(language: str, page: Path = README) -> list[str]:
    """The fenced code of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


HEADS = {  # ending of a class -> its task
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForMaskedLM": "masked",
    "ForConditionalGeneration": "generation",
    "MTModel": "generation",
    "ForPreTraining": "pretraining",
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "token",
    "ForQuestionAnswering": "question answering",
    "ForMultipleChoice": "choice",
    "ForImageClassification": "image",
    "ForSemanticSegmentation": "segmentation",
    "ForAudioFrameClassification": "audio",
    "ForCTC": "CTC",
    "Model": "base",
}


def versions(policy: Policy) -> str:
    """The lower ends of the ranges, of single model types too."""
    others = [f"{kind}: {wanted}" for kind, wanted in policy.ranges.items()]
    return "; ".join([policy.transformers, *others]).replace(",<6", "")


def policy_table() -> str:
    """The table between the markers: one row a policy."""
    rows = []
    for policy in own_policies().values():
        kinds = [kind for kind in policy.model_types if not of_type(kind).inside]
        heads = {head for kind in kinds for head in auto_heads(kind) - set(of_type(kind).without)}
        named = {next((word for ending, word in HEADS.items() if head.endswith(ending)), "others") for head in heads}
        shown = [word for word in dict.fromkeys([*HEADS.values(), "others"]) if word in named]
        rules = [rule for tower in policy.towers for rule in tower.blocks.values()]
        units = [unit for tower in policy.towers for unit in tower.units.values()]
        fewer = "yes" if any(unit.replicate for unit in units) else ""
        by_expert = "yes" if any(rule.by_expert for rule in rules) else ""
        rows.append(
            f"| {', '.join(policy.model_types)} | {', '.join(shown) or 'part of a model'} | {fewer} | {by_expert} "
            f"| {versions(policy)} | [{Path(policy.where.file).name}]({policy.where.file}) |"
        )
    head = "| model types | heads | fewer KV heads | by expert | transformers | policy |"
    return "\n".join([head, "|---|---|---|---|---|---|", *sorted(rows)])


def test_the_readme_counts_right() -> None:
    whole = [kind for kind in supported_model_types() if not of_type(kind).inside]
    (stated,) = re.findall(r"(\d+) model types", README.read_text())
    assert int(stated) == len(whole)


def test_the_table_of_policies_is_complete() -> None:
    text = README.read_text()
    wanted = re.sub(
        r"(?<=<!-- policies -->\n).*?(?=<!-- /policies -->)", lambda _: policy_table() + "\n", text, flags=re.DOTALL
    )
    if os.environ.get("UPDATE_README") == "1":
        README.write_text(wanted)
        text = wanted
    assert text == wanted, "run UPDATE_README=1 python -m pytest tests/tutorials/test_readme.py"


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """The README's ``dataset``."""

    def __init__(self) -> None:
        self.ids = torch.randint(0, 131, (24, 8), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def prepare(folder: Path) -> None:
    """Where a small random model goes by the name "gpt2"."""
    os.chdir(folder)
    if dist.get_rank() == 0:
        gpt2().save_pretrained("gpt2")
    dist.barrier()


@distributed(world_size=2)
def run_the_python(folder: Path) -> None:
    prepare(folder)
    namespace = {"dataset": Sequences()}
    found = blocks("python")
    assert len(found) == 7
    for code in found:
        exec(compile(code.replace("GPT2Config()", "GPT2Config(n_layer=2, n_embd=36)"), "README.md", "exec"), namespace)
    # What was attached; and that the blocks did what their comments say.
    model, plain = namespace["model"], namespace["plain"]
    for name in re.findall(r"^\| `model\.(\w+)`", README.read_text(), re.MULTILINE):
        assert callable(getattr(model, name)) or name == "mpu"
    merged = AutoModelForCausalLM.from_pretrained("merged")
    for name, weight in merged.state_dict().items():
        assert torch.equal(plain.state_dict()[name], weight), name
    own = nn.Sequential(nn.Linear(20, 37), nn.ReLU(), nn.Linear(37, 20))
    own.load_state_dict(namespace["whole"])
    namespace["Mine"]().load_state_dict(load_file("mine/model.safetensors"))
    assert namespace["logits"].shape == (1, 8, 131)
    assert not torch.equal(merged.lm_head.weight, gpt2().lm_head.weight)  # it was trained


def test_the_python_runs_and_autopar_merge_gives_the_same(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from autopar.cli import app

    run_the_python(tmp_path)
    first, later = tmp_path / "merged", tmp_path / "later"
    for command in re.findall(r"`autopar (merge|inspect) [^`]*`", README.read_text()):
        arguments = [str(tmp_path / "checkpoint"), *([str(later)] if command == "merge" else [])]
        result = CliRunner().invoke(app, [command, *arguments])
        assert result.exit_code == 0, result.output
    one, other = load_file(first / "model.safetensors"), load_file(later / "model.safetensors")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_configuration_is_documented_whole() -> None:
    text = README.read_text()
    configuration = text[text.index("## Configuration") : text.index("## What the model has")]
    (example,) = blocks("yaml")
    content = yaml.safe_load(example)
    config = autopar.ParallelConfig.parse(content)
    # What the example sets; everything else in it is the default.
    assert config == autopar.ParallelConfig(
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        pipeline=PipelineConfig(microbatch_size=1, layers_per_stage=(6, 6)),
        zero_stage=1,
        precision="fp16",
        gradient_clipping=1.0,
    )
    known = {*NUMBERS, *(f"{section}.{key}" for section, keys in SECTIONS.items() for key in keys)}
    shown = {
        f"{section}.{key}" if key else section
        for section, keys in content.items()
        for key in (keys if isinstance(keys, dict) else [""])
    }
    assert shown == known - {"pipeline.num_microbatches"}  # microbatch_size is there
    assert set(re.findall(r"^\| `(\w+(?:\.\w+)?)` \|", configuration, re.MULTILINE)) == known


@distributed(world_size=2)
def test_what_it_says_raises_does() -> None:
    text = README.read_text()
    section = text[text.index("## What raises") : text.index("## Status")]
    rows = len(re.findall(r"^\| ", section, re.MULTILINE)) - 1  # without the head of the table
    assert rows == 16  # nine here, seven in the next test
    model = parallel(gpt2(), 2)
    staged, _ = training(gpt2().eval(), stages=2)
    cache = gpt2()(torch.tensor([[1, 2]]), use_cache=True).past_key_values
    for instead, call in {
        "save_parallelized": lambda: model.save_pretrained("folder"),
        r"merge_checkpoints=True": lambda: type(model).save_pretrained(model, "folder"),
        "after autopar.deparallelize": lambda: model.resize_token_embeddings(200),
        r"after autopar.deparallelize\(model\)": lambda: model.set_input_embeddings(torch.nn.Embedding(131, 36)),
        "use pipeline_parallel_size=1": lambda: staged(torch.tensor([[3]]), past_key_values=cache),
        "autopar.deparallelize": lambda: autopar.initialize(model, {"model_parallelism": {}}),
        "get_data_parallel_group": lambda: DistributedDataParallel(model),
        "would fit|that fits": lambda: parallel(gpt2(n_head=1), 2),
        "sizes|divide": lambda: parallel(gpt2(), 3),
        "Largest number of stages that fits this model: 1": lambda: training(gpt2(n_layer=1), stages=2),
    }.items():
        with pytest.raises(autopar.ConfigError, match=instead):
            call()
    with pytest.raises(autopar.CheckpointError, match="Leave assign out"):
        model.load_state_dict(gpt2().state_dict(), assign=True)
    with pytest.raises(autopar.ConsistencyError, match=r"autopar\.prepare_dataloader"):
        model(torch.tensor([[1, 2, 3 + dist.get_rank()]]))


def training(model: Any, stages: int = 1, **sections: Any) -> Any:
    """The model and its optimizer, initialized with some sections of the config."""
    config = {"model_parallelism": {"pipeline_parallel_size": stages}, **sections}
    return autopar.initialize(model, config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


@distributed(world_size=2)
def test_what_it_says_about_training_raises() -> None:
    ids = torch.tensor([[1, 2, 3 + dist.get_rank()]])
    staged, _ = training(gpt2().train(), stages=2)
    replica, optimizer = training(gpt2(), zero={"stage": 1})
    half, half_optimizer = training(gpt2(), precision={"dtype": "fp16"})
    replica(ids, labels=ids).loss.backward()
    half(ids, labels=ids).loss.backward()
    autopar.average_gradients(half)
    for error, instead, call in [
        (autopar.ConfigError, r"model\.execute_pipeline\(batch, optimizer=optimizer\)", lambda: staged(ids)),
        (autopar.ConfigError, "Leave it out", lambda: staged.eval()(ids, output_hidden_states=True)),
        (
            autopar.ConfigError,
            r"autopar\.initialize\(model, config, optimizer=optimizer\)",
            lambda: autopar.initialize(gpt2(), {"zero": {"stage": 1}, "gradient_clipping": 1.0}),
        ),
        (autopar.ConsistencyError, r"autopar\.average_gradients\(model\)", optimizer.step),
        (autopar.ConfigError, r"optimizer\.scale_loss\(loss\)\.backward\(\)", half_optimizer.step),
        (autopar.ConfigError, r"then step\(\) without a closure", lambda: optimizer.step(lambda: 0.0)),
        (autopar.ConfigError, "gradient_clipping into the config", lambda: autopar.clip_grad_norm_(half, 1.0)),
    ]:
        with pytest.raises(error, match=instead):
            call()
    autopar.average_gradients(replica)
    optimizer.step()


@distributed(world_size=2)
def test_the_plain_clipping_is_wrong_and_adafactor_differs() -> None:
    ids = torch.arange(12).view(2, 6)
    models = [gpt2(), parallel(gpt2(), 2)]
    for model in models:
        model(ids, labels=ids).loss.backward()
    plain, sharded = models
    true = torch.nn.utils.get_total_norm(parameter.grad for parameter in plain.parameters())
    wrong = torch.nn.utils.get_total_norm(parameter.grad for parameter in sharded.parameters())
    assert abs(wrong - true) > 1e-3 * true
    torch.testing.assert_close(autopar.clip_grad_norm_(sharded, 1.0), true, rtol=1e-5, atol=0)
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    for model in models:
        torch.optim.Adafactor(model.parameters(), lr=0.05).step()
    difference = autopar.deparallelize(sharded)(ids).logits - plain(ids).logits
    assert difference.abs().max() > 1e-5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_targets_files_and_links_exist(page: Path) -> None:
    text = page.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = "\n".join([*re.findall(r"`([^`\n]+)`", text), *blocks("bash", page)])
    assert set(re.findall(r"^make ([a-z-]+)", code, re.MULTILINE)) <= targets
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / link).exists(), link
    for script in re.findall(r"tutorials/[\w./]+\.py", text):
        assert (ROOT / script).exists(), script


def test_every_tutorial_has_its_page_with_a_command_and_an_output() -> None:
    sections = re.split(r"^## ", PAGES[1].read_text(), flags=re.MULTILINE)
    for script in sorted((ROOT / "tutorials").glob("[0-9]*.py")):
        (section,) = [part for part in sections if f"({script.name})" in part]
        assert re.search(rf"^torchrun .*{re.escape(script.name)}", section, re.MULTILINE)
        assert "```text\n" in section
