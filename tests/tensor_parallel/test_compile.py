"""torch.compile of a parallelized model, whole or block by block: as many graphs and breaks as the plain one's."""

import copy
import functools
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from transformers import CompileConfig

import autopar
from autopar.errors import ConfigError, ConsistencyError
from tests.compare import same_gradients
from tests.exchange import same_random_states
from tests.harness.tiers import mainly
from tests.harness.worlds import pooled
from tests.parity import check, close, language_batches, reseed
from tests.small import gpt2, llama, parallel
from tests.three_steps import case, trained

BUILD: dict[str, Callable[..., Any]] = {"llama": llama, "gpt2": gpt2}
BLOCKS: dict[str, Any] = {"backend": "aot_eager", "fullgraph": True}
needs_a_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")


def forget() -> None:
    """Forget the graphs that were compiled, and their numbers."""
    torch._dynamo.reset()
    counters.clear()


def compiled(model: Any, backend: str = "eager", **options: Any) -> Any:
    forget()
    return torch.compile(model, backend=backend, **options)


def called_by_a_function(model: nn.Module) -> Callable[..., Any]:
    def call(**inputs: Any) -> Any:
        return model(**inputs)

    return call


def graphs() -> tuple[int, int]:
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pooled(world_size=2)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_compiled_blocks(kind: str) -> None:
    forget()
    check(BUILD[kind], language_batches(131), 2, config={"compile": BLOCKS})
    assert graphs()[0] in (1, 2)  # equal blocks share theirs


@pooled(world_size=2)
@pytest.mark.parametrize("kind", mainly("llama", "gpt2", later="sweep"))
def test_a_compiled_model_has_the_graphs_of_the_plain_one(kind: str) -> None:
    one = {"llama": {"num_hidden_layers": 1}, "gpt2": {"n_layer": 1}}[kind]
    plain = BUILD[kind](**one).train()
    model = parallel(copy.deepcopy(plain), 2).train()
    lengths = (7, 7, 9, 12)
    batches = [language_batches(131, count=1, seq=length, seed=length)[0] for length in lengths]
    found = []
    for each in (plain, model):
        run = compiled(each)
        losses = [run(**batch).loss for batch in batches]
        sum(losses).backward()
        with torch.no_grad():
            logits = run.eval()(batches[1]["input_ids"]).logits
        found.append((losses, logits, graphs()))
    assert found[0][2] == found[1][2], "graphs and breaks of the plain and the parallelized model"
    for number, (expected, actual) in enumerate(zip(found[0][0], found[1][0], strict=True)):
        close(actual, expected, f"loss {number}")
    close(found[1][1], found[0][1], "logits in evaluation")
    same_gradients(model, plain)


@pooled(world_size=2)
@pytest.mark.parametrize("where", mainly("function", "module", "method", later="sweep"))
def test_a_whole_graph_however_it_is_compiled(where: str) -> None:
    (batch,) = language_batches(131, count=1)
    plain = llama()
    model = parallel(copy.deepcopy(plain), 2)
    run = compiled(called_by_a_function(model) if where == "function" else model, **BLOCKS)
    if where == "method":
        model.compile(**BLOCKS)
        run = model
    for _ in range(2):
        run(**batch).loss.backward()
        plain(**batch).loss.backward()
    assert graphs() == (1, 0)
    same_gradients(model, plain)


@pooled(world_size=2)
@pytest.mark.parametrize("where", mainly("module", "function", later="sweep"))
def test_checks_run_with_every_graph(where: str) -> None:
    (batch,) = language_batches(131, count=1)
    model = parallel(llama(), 2)
    called = model if where == "module" else called_by_a_function(model)
    run = compiled(called)
    for _ in range(2):
        run(**batch).loss.backward()
    other = {**batch, "input_ids": batch["input_ids"].clone()}
    other["input_ids"][0, 0] = 7 + dist.get_rank()
    with pytest.raises(ConsistencyError, match="different inputs"):
        run(**other)
    run(**batch)
    model.score = nn.Linear(3, 3)
    with pytest.raises(ConfigError, match=r"added to LlamaForCausalLM after autopar\.initialize"):
        run(**batch)


@pytest.mark.tier("sweep")
@pooled(world_size=2, timeout=400)
def test_a_compiled_model_over_context() -> None:
    """Graphs break at the boundaries, and at logits and embeddings of own rows; the numbers are the plain model's."""
    (batch,) = language_batches(131, count=1)
    plain = llama(num_hidden_layers=1)
    model = autopar.initialize(copy.deepcopy(plain), {"cp": 2})
    expected, actual = plain(**batch), compiled(model, "aot_eager")(**batch)
    close(actual.loss, expected.loss, "loss")
    close(actual.logits + 0, expected.logits, "logits")
    expected.loss.backward()
    actual.loss.backward()
    autopar.average_gradients(model)
    same_gradients(model, plain)
    assert graphs()[1], "it broke nowhere: was it compiled?"


@pooled(world_size=2)
def test_gradients_of_embeddings_that_are_given() -> None:
    plain = llama(num_hidden_layers=1)
    model = parallel(copy.deepcopy(plain), 2)
    torch.manual_seed(5)
    given = torch.randn(2, 5, 24)
    others = {"labels": torch.arange(10).view(2, 5), "attention_mask": torch.ones(2, 5, dtype=torch.long)}
    gradients = []
    for run in (plain, compiled(called_by_a_function(model), "aot_eager", fullgraph=True)):
        embeddings = given.clone().requires_grad_()
        run(inputs_embeds=embeddings, **others).loss.backward()
        gradients.append(embeddings.grad)
    close(gradients[1], gradients[0], "gradient of the embeddings")
    assert gradients[0].abs().max() > 1e-2


@pooled(world_size=2)
def test_an_id_outside_of_the_vocabulary() -> None:
    run = compiled(parallel(llama(), 2))
    run(torch.tensor([[1, 130]]))
    for wrong in (131, -1):
        with pytest.raises((IndexError, RuntimeError), match="index out of range in an embedding of 131 rows"):
            run(torch.tensor([[1, wrong]]))


@pytest.mark.tier("sweep")
@pooled(world_size=2)
@pytest.mark.parametrize("where", ["model", "blocks"])
def test_dropout_draws_as_without_compiling(where: str) -> None:
    dropout = {"attn_pdrop": 0.2, "resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_implementation": "eager"}
    (batch,) = language_batches(131, count=1)
    eager = parallel(gpt2(**dropout).train(), 2)
    model = parallel(gpt2(**dropout).train(), 2, **({"compile": {"backend": "aot_eager"}} if where == "blocks" else {}))
    run = model if where == "blocks" else compiled(model, "aot_eager")
    for seed in range(2):
        losses = []
        for each in (eager, run):
            reseed(seed)
            loss = each(**batch).loss
            loss.backward()
            losses.append(loss)
        close(losses[1], losses[0], f"loss with seed {seed}")
    for (name, expected), actual in zip(eager.named_parameters(), model.parameters(), strict=True):
        close(actual.grad, expected.grad, f"gradient of {name}")
    same_random_states()


@pooled(world_size=2)
def test_decoding_with_a_static_cache_in_one_graph() -> None:
    plain = llama().eval()
    model = parallel(copy.deepcopy(plain), 2).eval()
    ids, found = torch.arange(5)[None], []
    for each in (plain, model):
        forget()
        how = CompileConfig(backend="aot_eager", mode=None, dynamic=None)
        how._compile_all_devices = True
        settings = {"max_new_tokens": 6, "do_sample": False}
        found.append(each.generate(ids, **settings, cache_implementation="static", compile_config=how))
        assert graphs() == (1, 0)
        assert torch.equal(found[-1], each.generate(ids, **settings))
    assert torch.equal(*found)


@pytest.mark.tier("all")
@pooled(world_size=2)
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_compiled_blocks_in_stages(schedule: str) -> None:
    pipeline = {"pipeline": {"schedule": schedule, "num_microbatches": 4}}
    deep = functools.partial(llama, num_hidden_layers=4)
    trained(
        "cpu", *case(deep, {**pipeline, "compile": {"backend": "aot_eager"}}, pipeline_parallel_size=2), moved=False
    )


@pytest.mark.tier("all")
@pooled(world_size=2)
def test_compiled_blocks_with_zero_3() -> None:
    trained("cpu", *case(extra={"zero": {"stage": 3}, "compile": {"backend": "aot_eager"}}), moved=False)


@needs_a_compiler
@pytest.mark.tier("all")
@pooled(world_size=2, timeout=400)
@pytest.mark.parametrize("where", mainly("blocks", "model", later="sweep"))
def test_inductor(where: str) -> None:
    plain = llama(num_hidden_layers=1)
    model = parallel(copy.deepcopy(plain), 2, **({"compile": {"enable": True}} if where == "blocks" else {}))
    torch._dynamo.reset()
    run = model if where == "blocks" else torch.compile(model)
    for batch in language_batches(131):
        expected, actual = plain(**batch), run(**batch)
        close(actual.loss, expected.loss, "loss")
        close(actual.logits, expected.logits, "logits")
        expected.loss.backward()
        actual.loss.backward()
    same_gradients(model, plain)


@pooled(world_size=2)
def test_what_cannot_be_compiled() -> None:
    with pytest.raises(ConfigError, match=r"compile.backend: torch has no 'inducto'. Did you mean 'inductor'"):
        parallel(llama(), 2, compile={"backend": "inducto"})
    with pytest.raises(ConfigError, match=r"compile.mode=max-autotune needs the backend inductor, not eager"):
        parallel(llama(), 2, compile={"backend": "eager", "mode": "max-autotune"})
    with pytest.raises(ConfigError, match="cpu_transport=shm is not supported with compile: graphs use"):
        parallel(llama(), 2, compile={}, model_parallelism={"tensor_parallel_size": 2, "cpu_transport": "shm"})
    with pytest.raises(ConfigError, match=r"compile.mode must be default, reduce-overhead,"):
        parallel(llama(), 2, compile={"mode": "fast"})


@pooled(world_size=2)
def test_nothing_is_compiled_after_deparallelize() -> None:
    model = parallel(llama(), 2, compile=BLOCKS)
    assert model.mpu.tp.transport is None  # a rank that gives up compiling goes on over what the others' graphs use
    assert [block._compiled_call_impl is None for block in model.model.layers] == [False] * 2
    autopar.deparallelize(model)
    assert all(module._compiled_call_impl is None for module in model.modules())
