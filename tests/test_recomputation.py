"""Recomputed blocks: gradients bit for bit, what is computed and sent again, selective checkpointing."""

import collections
import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import LlamaForCausalLM

import autopar
from autopar.config import ParallelConfig
from autopar.errors import ConfigError, ConsistencyError
from autopar.features.activation_checkpointing import setup as activation_checkpoint
from autopar.features.activation_checkpointing.setup import Tape
from benchmarks.traffic import record
from tests.harness.worlds import pooled
from tests.parity import all_close, language_batches, whole
from tests.random_models import build, cases
from tests.small import gpt2, llama
from tests.three_steps import IDS, Case, case, mixtral, trained

KINDS: dict[str, list[str]] = {
    "nothing": [],
    "collectives": ["collectives"],
    "attention": ["attention"],
    "all": ["attention", "collectives", "matmuls"],
}


class Operators(TorchDispatchMode):
    """Count operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found = collections.Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def gradients(model: Any, *batches: torch.Tensor) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients of micro-batches on this rank, and the number of collectives of the last backward."""
    for part in batches:
        torch.manual_seed(5)
        found = record(model(input_ids=part, labels=part).loss.backward)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, len(found)


def equal_whatever_is_kept(plain: Any, sizes: dict[str, Any], *batches: torch.Tensor) -> None:
    """Assert that gradients are bit for bit those without anything kept."""
    found = []
    for kind in ("nothing", "all"):
        model = autopar.initialize(copy.deepcopy(plain), {**sizes, "activation_checkpointing": {"save": KINDS[kind]}})
        found.append(gradients(model, *batches)[0])
        model.mpu.destroy()
    all_close(found[1], found[0], "gradient of {}", 0.0)


@pytest.mark.tier("test", only=("tp-gpt2",))
@pytest.mark.parametrize("build", [llama, gpt2])
@pytest.mark.parametrize("mesh", ["tp", "sequence", "shared memory"])
@pooled(world_size=2)
def test_gradients_are_those_without_recomputation(mesh: str, build: Any) -> None:
    sizes = {"tensor_parallel_size": 2, "sequence_parallel": mesh == "sequence"}
    plain = build(**({"attn_pdrop": 0.2, "resid_pdrop": 0.2} if build is gpt2 else {})).train()
    counts, expected = {}, None
    for kind in (None, *KINDS):
        config: dict[str, Any] = {"model_parallelism": sizes}
        if kind is not None:
            config["activation_checkpointing"] = {"save": KINDS[kind]}
        model = autopar.initialize(copy.deepcopy(plain), config).train()
        if mesh != "shared memory":
            model.mpu.tp.transport = None  # what is sent is counted on its way to gloo
        found, counts[kind] = gradients(model, *IDS.chunk(2))
        expected = expected or found
        for name, gradient in expected.items():
            assert torch.equal(found[name], gradient), (kind, name)
        model.mpu.destroy()
    if mesh == "shared memory":
        return
    assert counts["collectives"] == counts["all"] == counts[None] < counts["nothing"] == counts["attention"], counts


@pooled(world_size=2)
def test_what_is_computed_again() -> None:
    plain, found = llama().train(), {}
    for kind, save in KINDS.items():
        model = autopar.initialize(copy.deepcopy(plain), {"tp": 2, "activation_checkpointing": {"save": save}}).train()
        loss = model(IDS, labels=IDS).loss
        with Operators() as operators:
            loss.backward()
        found[kind] = operators.found
        model.mpu.destroy()
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    again = {kind: (counts["mm"], counts[attention]) for kind, counts in found.items()}
    assert again["attention"] == (again["nothing"][0], 0) and again["nothing"][1] == 2
    assert again["collectives"] == again["nothing"]
    # of a Llama's block only the last product is not needed in its backward; the others are kept with matmuls
    assert again["all"][1] == 0 and again["nothing"][0] - again["all"][0] == 2 * 6, again


KEPT: dict[str, Any] = {"activation_checkpointing": {"save": ["collectives", "attention"]}}
ON_TWO: dict[str, Case] = {
    "cp": case(extra=KEPT, context_parallel_size=2),
    "cp, gathered": case(extra=KEPT, context_parallel_size=2, context_parallel_method="gather"),
    "zero 3": case(extra={**KEPT, "zero": {"stage": 3}}),
    "experts": case(mixtral, extra=KEPT, tensor_parallel_size=2),
    "experts by rank": case(mixtral, extra=KEPT, tensor_parallel_size=2, expert_parallel_size=2),
    "experts of replicas": case(mixtral, extra=KEPT, expert_parallel_size=2),
}
ON_FOUR: dict[str, Case] = {
    schedule: case(
        lambda: llama(num_hidden_layers=4),
        {**KEPT, "pipeline": {"schedule": schedule, "microbatch_size": 1}},
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
    )
    for schedule in ("1f1b", "gpipe", "interleaved", "zero-bubble", "zbv", "dualpipev")
}


@pytest.mark.tier("test", only=("cp",))
@pytest.mark.parametrize("name", ON_TWO)
@pooled(world_size=2)
def test_three_steps(name: str) -> None:
    trained("cpu", *ON_TWO[name], moved=False)


@pytest.mark.tier("all")
@pytest.mark.parametrize("schedule", ON_FOUR)
@pooled(world_size=4)
def test_three_steps_in_stages(schedule: str) -> None:
    trained("cpu", *ON_FOUR[schedule], moved=False)


@pooled(world_size=2)
def test_each_so_many_th_block_is_recomputed() -> None:
    every = 2
    plain = llama(num_hidden_layers=5).train()
    expected: dict[str, torch.Tensor] = {}
    for section in ({"enable": False}, {"every": every}, {"every": every, "save": KINDS["all"]}):
        model = autopar.initialize(copy.deepcopy(plain), {"tp": 2, "activation_checkpointing": section})
        calls = collections.Counter[int]()
        for place, layer in enumerate(model.model.layers):
            layer.input_layernorm.register_forward_pre_hook(lambda *_, place=place, calls=calls: calls.update([place]))
        model(IDS, labels=IDS).loss.backward()
        again = range(0, 5, every) if "every" in section else ()
        assert calls == {place: 2 if place in again else 1 for place in range(5)}
        found = {name: p.grad.clone() for name, p in model.named_parameters()}
        expected = expected or found
        all_close(found, expected, "gradient of {}", 0.0)
        model.eval().generate(IDS, max_new_tokens=2, do_sample=False)
        model.mpu.destroy()


def test_blocks_that_are_recomputed_all_or_none_are_refused() -> None:
    class Whole(LlamaForCausalLM):
        pass

    model = Whole(llama().config)
    layers = nn.ModuleList(nn.Identity() for _ in model.model.layers)
    model.model.layers, model.model.gradient_checkpointing = layers, False
    with pytest.raises(ConfigError, match=r"every=2 is not supported with Whole: it recomputes all blocks or none"):
        activation_checkpoint.check(model, (), "a policy", 2)


@pooled(world_size=2)
def test_a_graph_that_is_kept_goes_back_twice() -> None:
    model = autopar.initialize(llama().train(), {"tp": 2, "activation_checkpointing": {"save": KINDS["all"]}})
    loss = model(IDS, labels=IDS).loss
    once = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    twice = torch.autograd.grad(loss, list(model.parameters()))
    all_close({str(at): x for at, x in enumerate(twice)}, {str(at): x for at, x in enumerate(once)}, "{}", 0.0)


@pytest.mark.tier("all")
@pytest.mark.parametrize("model_type", ["mamba2", "qwen3_next", "llama"])
@pooled(world_size=2)
def test_rows_whose_layers_hand_states_on(model_type: str) -> None:
    head = cases(model_type)[0]
    plain = build(head, 6, 3, vocab=131).train()
    ids = torch.randint(2, 131, (2, 24), generator=torch.Generator().manual_seed(1))
    equal_whatever_is_kept(plain, {"cp": 2}, ids, ids[:1, :17])


@pooled(world_size=2)
def test_a_block_that_writes_into_what_is_kept() -> None:
    plain = llama().train()
    for layer in plain.model.layers:
        layer.mlp.act_fn = torch.nn.SiLU(inplace=True)  # on the output of a product
        layer.mlp.down_proj.register_forward_hook(lambda module, args, output: output.mul_(2.0))
    equal_whatever_is_kept(plain, {"tp": 2}, *IDS.chunk(2))


def test_a_tape_is_the_forward_or_an_error() -> None:
    tape, x = Tape(), torch.ones(3)
    with tape.kept():
        tape.note("all_reduce", x)
    with tape.played():
        assert tape.plays("all_reduce", torch.zeros(3))
        with pytest.raises(ConsistencyError, match=r"result 2 of a block is all_reduce of \(3,\) .* was none in"):
            tape.plays("all_reduce", torch.zeros(3))
    with tape.played(), pytest.raises(ConsistencyError, match=r"all_gather of \(3,\) .* was all_reduce of \(3,\)"):
        tape.plays("all_gather", torch.zeros(3))
    x += 1  # a block may write into what a collective gave
    with tape.played():
        y = torch.zeros(3)
        assert tape.plays("all_reduce", y) and torch.equal(y, torch.ones(3))


@pooled(world_size=1)
def test_a_model_without_blocks_to_recompute_is_refused_before_it_is_touched() -> None:
    model = build(cases("gemma4_audio")[0], 6, 3, vocab=131)
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ConfigError, match="activation_checkpointing is not supported with Gemma4AudioModel"):
        autopar.initialize(model, {"activation_checkpointing": {"enable": True}})
    assert kinds == [type(module) for module in model.modules()]


def test_words_that_are_not_known() -> None:
    for section, error in (
        ({"save": ["attention", "matmul"]}, r"save lists 'matmul'. Did you mean 'matmuls'\? Known: attention, collec"),
        ({"save": 3}, "activation_checkpointing.save must be a list, not"),
        ({"every": 0}, "every must be at least 1, not 0"),
    ):
        with pytest.raises(ConfigError, match=error):
            ParallelConfig.parse({"activation_checkpointing": section})
    with pytest.raises(ConfigError, match=r"save=\['attention'\] is not supported with compile"):
        ParallelConfig.parse({"activation_checkpointing": {"save": ["attention"]}, "compile": {"enable": True}})


_SAVED = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.embedding.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.tier("test", only=("llama-plain",))
@pytest.mark.parametrize("how", ["plain", "sequence_parallel", "process_group"])
@pytest.mark.parametrize("build", [llama, gpt2])
@pooled(world_size=2)
def test_gradients_with_a_selective_policy_are_those_of_the_plain_model(build: Any, how: str) -> None:
    plain, batches = build(), language_batches(131)
    sizes: dict[str, Any] = {"tensor_parallel_size": 2, "sequence_parallel": how == "sequence_parallel"}
    model = autopar.initialize(copy.deepcopy(plain), {"model_parallelism": sizes})
    if how == "process_group":  # whose all-reduce overlaps with the gradient of a weight
        model.mpu.tp.transport = None
    context = functools.partial(create_selective_checkpoint_contexts, _policy)
    for each in (plain, model):
        each.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": context})
        for batch in batches:
            each.train()(**batch).loss.backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}
    all_close(whole(model, lambda parameter: parameter.grad), expected, "gradient of {}")
