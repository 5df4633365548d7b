"""``loss.chunk`` without tensor parallelism: the head's logits are made some tokens at a time on every mesh."""

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

import autopar
from tests.harness.worlds import pooled
from tests.parity import all_close, close
from tests.small import gpt2, llama
from tests.tensor_parallel.test_sharded_logits import Shapes
from tests.three_steps import IDS, Case, case, mixtral, trained

CHUNK: dict[str, Any] = {"loss": {"chunk": 5}}  # of 8 or 9 tokens a sample, 4 samples
ALONE: dict[str, Any] = {"model_parallelism": {"tensor_parallel_size": 1}, **CHUNK}


@pooled(world_size=1)
@pytest.mark.parametrize("build", [llama, gpt2])  # GPT-2's head is tied to its embedding
def test_one_process_makes_chunks_of_logits(build: Any) -> None:
    plain = build().train()
    model, ids = autopar.initialize(copy.deepcopy(plain), ALONE), IDS.repeat(3, 1)  # 108 tokens
    for part in (ids, IDS[:3, :7]):  # two micro-batches
        expected = plain(part, labels=part).loss
        expected.backward()
        with Shapes() as shapes:
            found = model(part, labels=part).loss
            found.backward()
        rows = max(math.prod(shape[:-1]) for shape in shapes.made if shape[-1:] == (131,))
        assert 0 < rows <= 36  # a chunk, or the width of the model where the head's gradient is transposed
        close(found.detach(), expected.detach(), "loss")
    due = {name: p.grad for name, p in plain.named_parameters()}
    all_close({name: p.grad for name, p in model.named_parameters()}, due, "gradient of {}")
    assert torch.equal(model.eval()(IDS).logits.argmax(-1), plain.eval()(IDS).logits.argmax(-1))
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(IDS, **settings), plain.generate(IDS, **settings))
    back = autopar.deparallelize(model)
    assert type(back.get_output_embeddings()) is torch.nn.Linear and "autopar_layouts" not in vars(back.lm_head)


ON_TWO: dict[str, Case] = {
    "dp": case(extra=CHUNK),
    "zero 1": case(extra={**CHUNK, "zero": {"stage": 1}, "gradient_clipping": 1.0}),
    "zero 3": case(gpt2, extra={**CHUNK, "zero": {"stage": 3}}),
    "pp": case(extra={**CHUNK, "pipeline": {"microbatch_size": 2}}, pipeline_parallel_size=2),
    "pp of GPT-2": case(gpt2, {**CHUNK, "pipeline": {"schedule": "zero-bubble"}}, pipeline_parallel_size=2),
    "cp": case(extra=CHUNK, context_parallel_size=2),
    "recomputed": case(extra={**CHUNK, "activation_checkpointing": {"enable": True}}),
    "experts of replicas": case(mixtral, extra=CHUNK, expert_parallel_size=2),
}


@pytest.mark.tier("test", only=("pp", "dp"))
@pytest.mark.parametrize("name", ON_TWO)
@pooled(world_size=2)
def test_three_steps_on_every_mesh(name: str) -> None:
    trained("cpu", *ON_TWO[name], moved=False)


@pooled(world_size=1)
def test_adapters_on_the_head() -> None:
    peft = pytest.importorskip("peft")
    from tests.features.peft.adapted import with_lora

    for target in (["q_proj", "v_proj"], ["q_proj", "lm_head"]):
        plain = with_lora(llama(), target_modules=target).train()
        model = with_lora(llama(), target_modules=target).train()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            model = autopar.initialize(model, ALONE)
        assert isinstance(model, peft.PeftModel)
        assert ("loss.chunk=5 has no effect" in str([w.message for w in found])) is ("lm_head" in target)
        for each in (plain, model):
            each(input_ids=IDS, labels=IDS).loss.backward()
        due = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
        all_close({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, due, "gradient of {}")


@pooled(world_size=1)
def test_a_model_without_logits_of_tokens_says_so() -> None:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    with pytest.warns(UserWarning, match=r"loss\.chunk=5 has no effect on BertForSequenceClassification: its output"):
        autopar.initialize(BertForSequenceClassification(BertConfig(**sizes, vocab_size=20)), ALONE)
