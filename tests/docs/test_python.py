"""The Python of every page runs, on two ranks, page by page; and does what the comments in it say."""

import os
import re
import shlex
import shutil
import signal
import socket
import threading
import time
import warnings
from contextlib import nullcontext, suppress
from http.client import HTTPConnection
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM
from typer.testing import CliRunner

import autopar
from autopar.cli import app
from tests.compare import same_gradients
from tests.docs.pages import DOCS, PAGES, codes
from tests.features.generation.test_text_generation import tokenizer
from tests.features.peft.adapted import batch
from tests.fetched_packages import with_package
from tests.harness.worlds import distributed
from tests.integrations.runs import Sequences, launched
from tests.parity import close
from tests.small import gpt2, llama


def blocks(page: Path) -> list[str]:
    return [code.text for code in codes(page.read_text(), "python") if not code.file]


def test_every_page_with_blocks_is_run() -> None:
    run_here = set(re.findall(r'"([\w-]+\.md)"', Path(__file__).read_text()))
    assert {page.name for page in PAGES if blocks(page)} == run_here


def run(page: Path, folder: Path, count: int | None = None, /, **given: Any) -> dict[str, Any]:
    """The names that are there when the blocks of a page (the first ones) have run; a small model is called "gpt2"."""
    os.chdir(folder)
    if dist.get_rank() == 0:
        gpt2().save_pretrained("gpt2")
    dist.barrier()
    namespace: dict[str, Any] = {"dataset": Sequences(24), **given}
    for code in blocks(page)[:count]:
        exec(compile(code.replace("GPT2Config()", "GPT2Config(n_layer=2, n_embd=36)"), page.name, "exec"), namespace)
    return namespace


@distributed(world_size=2)
def test_own_code(tmp_path: Path) -> None:
    for page in ("attention-kernels.md", "sequence-parallel.md"):
        run(DOCS / page, tmp_path)
    names = run(DOCS / "own-code.md", tmp_path)
    pruned = autopar.full_tensor(names["weight"])
    assert 0.25 < float((pruned == 0).float().mean()) < 0.35
    assert all(parameter.grad is not None for parameter in names["model"].parameters())


@distributed(world_size=2)
def test_launching(tmp_path: Path) -> None:
    run(DOCS / "launching.md", tmp_path)
    dist.barrier()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step-2", "step-4"]
    again = run(DOCS / "launching.md", tmp_path)  # there is nothing left to do
    assert again["extra"] == {"step": 4}


@distributed(world_size=2)
def test_quantized(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from tests.features.quantized.models import quantized, write, write_fp8

    if dist.get_rank() == 0:
        write(tmp_path / "base")
        quantized("nf4").save_pretrained(tmp_path / "base in 4 bits")
    write_fp8(tmp_path / "base in FP8", "llama")
    names = run(DOCS / "quantized.md", tmp_path)
    assert names["lazy"].get_base_model().model.layers[0].mlp.up_proj.base_layer.weight.dtype == torch.uint8
    assert names["small"].model.layers[0].mlp.up_proj.weight.dtype == torch.uint8
    assert (tmp_path / "adapters" / "adapter_model.safetensors").is_file()
    assert not names["model"].is_quantized and names["model"].model.layers[0].mlp.up_proj.weight.is_floating_point()


@distributed(world_size=2)
def test_peft(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    if dist.get_rank() == 0:
        llama().save_pretrained(tmp_path / "model")
    dist.barrier()
    names = run(DOCS / "peft.md", tmp_path, folder=tmp_path / "model", batches=[batch(0), batch(1)])
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in Path("adapters").iterdir()}
    assert type(names["model"]).__name__ == "PeftModelForCausalLM" and names["model"].mpu.tp.size == 2


@with_package("diffusers", world_size=2)
def test_diffusion(tmp_path: Path) -> None:
    from diffusers import WanPipeline

    from tests.features.diffusers.test_pipelines import pipelines

    pipeline, prompt = pipelines()["wan"]
    if dist.get_rank() == 0:
        pipeline.transformer.save_pretrained(tmp_path / "transformer")
    dist.barrier()
    embeds, sizes = torch.ones(1, 5, 16), {"height": 16, "width": 16, "num_inference_steps": 2, "output_type": "pt"}
    prompt |= sizes | {"prompt_embeds": embeds, "negative_prompt_embeds": -embeds}
    WanPipeline.from_pretrained = lambda folder: pipeline
    data = [(torch.randn(2, 4, 2, 8, 8), torch.randn(2, 5, 16))] * 2
    names = run(DOCS / "diffusion.md", tmp_path, folder=tmp_path, prompt=prompt, dataset=data)
    assert names["video"].shape == (1, 5, 3, 16, 16) and pipeline.get_active_adapters()


@distributed(world_size=2)
def test_experts_and_long_sequences(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = MixtralForCausalLM(MixtralConfig(num_hidden_layers=1, vocab_size=131, num_local_experts=4, **sizes))
    names = run(DOCS / "experts.md", tmp_path, model=model)
    assert names["model"].mpu.ep.size == 2 and names["model"].model.layers[0].mlp.experts.num_experts == 2
    names = run(DOCS / "long-sequences.md", tmp_path)
    plain = gpt2().train()
    loss = plain(input_ids=names["ids"], labels=names["ids"]).loss
    loss.backward()
    torch.testing.assert_close(names["loss"], loss, rtol=0, atol=1e-5)
    same_gradients(names["model"], plain)


@distributed(world_size=2)
def test_nan_planner_and_verify(tmp_path: Path) -> None:
    assert run(DOCS / "verify.md", tmp_path)["report"].ok
    names = run(DOCS / "nan.md", tmp_path)
    assert names["first_nonfinite"](names["model"], names["batch"]) is None and names["norm"] > 0
    if dist.get_rank() == 0:
        names["model"].transformer.h[1].mlp.c_proj.weight.data[0, 0] = torch.nan
    assert names["first_nonfinite"](names["model"], names["batch"]) == "transformer.h.1.mlp.c_proj"
    names = run(DOCS / "planner.md", tmp_path)
    held = names["plan"].ranks[0, 0, names["model"].mpu.tp.rank]
    assert held.weights == sum(parameter.nbytes for parameter in names["model"].parameters())
    assert names["step"]["tokens_per_second"] == 256 and names["step"]["mfu"] > 0


@pytest.mark.tier("all")
def test_rehearsal() -> None:
    for code in blocks(DOCS / "rehearsal.md"):
        exec(compile(code, "rehearsal.md", "exec"), {})


def _average(code: str, page: str) -> None:
    """Two steps of the loop that averages in its last backward, against one process with the batches of both ranks."""
    plain, model = gpt2(), autopar.initialize(gpt2(), {})
    names: dict[str, Any] = {"autopar": autopar, "model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    ids = torch.arange(40).view(2, 2, 2, 5)  # [step, rank, batch, tokens]
    for mine in ids:
        batches = [{"input_ids": row[None], "labels": row[None]} for row in mine[dist.get_rank()]]
        exec(compile(code, page, "exec"), names | {"micro_batches": batches})
        plain(mine.flatten(0, 1), labels=mine.flatten(0, 1)).loss.backward()
        torch.optim.SGD(plain.parameters(), 0.1).step()
        for each in (plain, model):
            each.zero_grad()
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        close(q, p, name)


@distributed(world_size=2)
def test_training(tmp_path: Path) -> None:
    page = DOCS / "training.md"
    names = run(page, tmp_path, 2)
    model, optimizer = names["model"], names["optimizer"]
    assert 0 <= names["accuracy"] <= 1 and len(names["correct"]) == 3
    assert (names["out"].loss is None) == (dist.get_rank() == 0), "out.loss is that of the last stage"
    assert optimizer.skipped_steps < 3 and optimizer.gradient_norm > 0
    average, last = blocks(page)[2:]
    _average(average, page.name)
    exec(compile(last, page.name, "exec"), names)
    plain = names["plain"]
    assert plain is model and not hasattr(plain, "mpu"), "deparallelize gives back the same object"
    assert not torch.equal(plain.lm_head.weight, gpt2().lm_head.weight), "it was trained"


@distributed(world_size=2)
def run_the_checkpoints(folder: Path) -> None:
    names = run(DOCS / "checkpoints.md", folder)
    assert names["extra"] == {"epoch": 3}


@pytest.mark.tier("all")
def test_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_the_checkpoints(tmp_path)
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "checkpoints.md").read_text()
    (commands,) = [code.text.splitlines() for code in codes(text, "bash")]
    for line in commands:
        result = CliRunner().invoke(app, shlex.split(line)[1:])
        assert result.exit_code == 0, f"{line}: {result.output}"
    first, later = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "merged-later"))
    assert first.keys() == later.keys() and all(torch.equal(first[name], later[name]) for name in first)
    named = {shlex.split(line)[1] for line in commands}
    assert named == set(re.findall(r"^\| `autopar (\w+) ", text, re.MULTILINE)), "each command of the table is shown"


@distributed(world_size=2)
def test_policies(tmp_path: Path) -> None:
    names = run(DOCS / "policies.md", tmp_path)
    own = nn.Sequential(nn.Linear(20, 37), nn.ReLU(), nn.Linear(37, 20))
    own.load_state_dict(names["full"])
    names["Mine"]().load_state_dict(load_file("mine/model.safetensors"))
    assert names["logits"].shape == (1, 8, 131)


@distributed(world_size=2)
def test_inference(tmp_path: Path) -> None:
    if dist.get_rank() == 0:
        tokenizer().save_pretrained(tmp_path / "gpt2")
    names = run(DOCS / "inference.md", tmp_path)
    batch = names["batch"]
    expected = gpt2().eval().generate(**batch, max_new_tokens=5, do_sample=False)
    assert torch.equal(names["same"], expected), "stages generate what the plain model does"
    served: Any = AutoModelForCausalLM.from_pretrained("for-vllm", dtype=torch.bfloat16)
    assert torch.equal(served.generate(**batch, max_new_tokens=5, do_sample=False), names["tokens"])
    assert [answer[0]["generated_text"] for answer in names["answers"]]
    assert [len(output.generated_tokens) for output in names["outputs"].values()] == [5, 5]
    assert names["logits"].shape == (*batch["input_ids"].shape, 131)


def ask(port: int, answers: list[str]) -> None:
    """Ask a server of this process three times, as soon as it is there, and end it."""
    while not answers:
        time.sleep(0.1)
        with suppress(ConnectionRefusedError):
            for text in ("w5 w6 w7", "w9 w3", "w5 " * 200):
                connection = HTTPConnection("localhost", port, timeout=60)
                connection.request("POST", "/", text)
                reply = connection.getresponse()
                answers.append(reply.read().decode() if reply.status == 200 else str(reply.status))
    os.kill(os.getpid(), signal.SIGTERM)


@distributed(world_size=2)
def test_serving(tmp_path: Path) -> None:
    words, plain = tokenizer(), gpt2().eval()
    if dist.get_rank() == 0:
        words.save_pretrained(tmp_path / "gpt2")
    run(DOCS / "serving.md", tmp_path, 0)
    asked = [words(text, return_tensors="pt")["input_ids"] for text in ("w5 w6 w7", "w9 w3")]
    due = [words.decode(plain.generate(x, max_new_tokens=5, do_sample=False)[0, x.shape[1] :]) for x in asked]
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    answers: list[str] = []
    client = threading.Thread(target=ask, args=(port, answers), daemon=True)
    if dist.get_rank() == 0:
        client.start()
    server, broadcast = blocks(DOCS / "serving.md")
    names: dict[str, Any] = {}
    exec(compile(server.replace("8000", str(port)), "serving.md", "exec"), names)
    assert answers == ([*due, "400"] if dist.get_rank() == 0 else [])
    exec(compile(broadcast, "serving.md", "exec"), names)
    prompts = [*asked, None] if dist.get_rank() == 0 else [None] * 3
    found = [names["answer"](None if ids is None else ids[0].tolist()) for ids in prompts]
    assert [None if tokens is None else words.decode(tokens) for tokens in found] == [*due, None]


def sides(diff: str) -> tuple[str, str]:
    lines = diff.splitlines()
    before, after = ([line[1:] for line in lines if line[:1] in (" ", "", sign)] for sign in "-+")
    return "\n".join(before), "\n".join(after)


@distributed(world_size=2)
def run_the_start(folder: Path) -> None:
    page = DOCS / "start.md"
    run(page, folder, 0)
    for diff in codes(page.read_text(), "diff"):
        for code in sides(diff.text):
            names: dict[str, Any] = {"dataset": Sequences(24)}
            folder_of_rank = "trained" if "autopar" in code else f"trained-{dist.get_rank()}"
            exec(compile(code.replace('"trained"', f'"{folder_of_rank}"'), page.name, "exec"), names)
        trained = AutoModelForCausalLM.from_pretrained("trained").lm_head.weight
        assert not torch.equal(trained, gpt2().lm_head.weight)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree("trained")
        dist.barrier()
    (text,) = blocks(page)
    for config, steps in (('{"tp": 2}', 3), ('{"tp": 1}', 3), ('{"pp": 2}', 3)):
        names = {"dataset": Sequences(24)}
        exec(compile(text.replace('{"tp": 2}', config, 1), page.name, "exec"), names)
        assert names["extra"]["step"] == steps and (names["checkpoint"] is None) == (config == '{"tp": 2}')


@pytest.mark.tier("all")
def test_start(tmp_path: Path) -> None:
    run_the_start(tmp_path)
    result = CliRunner().invoke(app, ["merge", str(tmp_path / "run" / "step-2"), str(tmp_path / "merged")])
    assert result.exit_code == 0, result.output


@distributed(world_size=2)
def run_the_libraries(folder: Path) -> None:
    """Run all blocks but DeepSpeed's, which tests/integrations/test_deepspeed.py runs."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    warnings.simplefilter("ignore")  # from other libraries
    page = DOCS / "coming-from.md"
    run(page, folder, 0)
    accelerate, _, *others = blocks(page)
    for block in [accelerate, *others] if util.find_spec("accelerate") else others:
        names: dict[str, Any] = {"dataset": Sequences(24)}
        with launched() if block == accelerate else nullcontext():
            exec(compile(block, page.name, "exec"), names)
        names["model"].mpu.destroy()


@pytest.mark.tier("all")
def test_coming_from_others(tmp_path: Path) -> None:
    run_the_libraries(tmp_path)
    for folder in ["from-accelerate", "from-oslo", "from-colossalai/merged"][not util.find_spec("accelerate") :]:
        trained = AutoModelForCausalLM.from_pretrained(tmp_path / folder).lm_head.weight
        assert torch.equal(trained, gpt2().lm_head.weight) == (folder == "from-oslo"), folder


@distributed(world_size=2)
def test_trainer(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    with launched():
        names = run(DOCS / "trainer.md", tmp_path)
        trainer = names["trainer"]
        assert trainer.state.global_step == 4 and trainer.mpu.tp.size == 2
        assert {"checkpoint-2", "checkpoint-4"} <= {path.name for path in (tmp_path / "run").iterdir()}
        ids = names["dataset"].ids[:2]
        with torch.no_grad():
            mine, whole = (model.eval()(input_ids=ids).logits for model in (trainer.model, names["plain"]))
        assert torch.allclose(mine, whole, atol=1e-5)
