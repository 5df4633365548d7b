"""The kind of loss that policies say is that of the model, by numbers: for every head of every model type."""

from typing import Any

import pytest
import torch
from transformers import BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

import autopar.pipeline_parallel.microbatch
from autopar.errors import ConfigError
from autopar.pipeline_parallel.microbatch import OwnLoss, batch_size, loss_in, split, weights_of
from autopar.policy.load import own_policies, read_user_policy
from autopar.policy.match import loss_kind
from autopar.tools.verification.small_models import losses_of, measured_kind
from tests.random_models import Case, batches, build, cases, heads_of, kind
from tests.representatives import REPRESENTATIVES, first_types
from tests.small import Unshifted, gpt2, llama
from tests.test_every_policy import MODEL_TYPES, WHOLE

SMALL_BERT = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
USUAL = {"ForCausalLM": "loss_function", "ForConditionalGeneration": "loss_function", "ForCTC": "other"}
APART = ("molmo2", "musicgen_decoder", "musicgen_melody_decoder")  # whose rows are not told apart, with an error


@pytest.mark.every_case
@pytest.mark.parametrize("model_type", first_types(REPRESENTATIVES, WHOLE, later="all"))
@pytest.mark.filterwarnings("ignore")  # of models
@torch.no_grad()
def test_losses_of_samples_add_up_to_that_of_the_batch(model_type: str) -> None:
    for case in cases(model_type):
        if not case.variant and kind(case.head) != "base":
            _adds_up(case)


def _adds_up(case: Case) -> None:
    model: Any = build(case, 6, 3).eval()
    batch = batches(case, model.config, 1)[0]
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor) or case.model_type in APART:
        return
    if labels.ndim == 2 and labels.shape[1] > 2 and not labels.is_floating_point():
        batch["labels"] = torch.cat([labels[:1].index_fill(1, torch.arange(2, labels.shape[1]), -100), labels[1:]])
    own, main_input = OwnLoss.of(model), getattr(model, "main_input_name", "")
    try:
        reduction = own.reduction(batch, 2)
    except ConfigError:
        return
    samples = split(batch, batch_size(batch, main_input), 1, None, model.config)
    weights = weights_of(samples, main_input, reduction, own.shifted)
    whole, alone = model(**_copied(batch)), [model(**_copied(sample)) for sample in samples]
    if loss_in(whole) is None:
        return
    if _are_apart(whole, alone):
        found = sum(loss_in(outputs) * weight for outputs, weight in zip(alone, weights, strict=True) if weight)
        torch.testing.assert_close(found, loss_in(whole), rtol=1e-4, atol=1e-4, msg=lambda text: f"{case}: {text}")
    counted = batch["labels"][..., 1:] if own.shifted else batch["labels"]
    items = {"num_items_in_batch": 2 * (counted != -100).sum()}
    if own.divides_by_items({**batch, **items}):
        halved = loss_in(model(**_copied(batch), **items))
        torch.testing.assert_close(2 * halved, loss_in(whole), rtol=1e-4, atol=1e-4, msg=lambda text: f"{case}: {text}")


@torch.no_grad()
def test_weights_of_another_kind_make_another_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("llama", "LlamaForCausalLM")
    _adds_up(case)
    monkeypatch.setattr(autopar.pipeline_parallel.microbatch, "loss_kind", lambda model, given: "mean")
    with pytest.raises(AssertionError, match="LlamaForCausalLM: "):
        _adds_up(case)


def _copied(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def _are_apart(whole: Any, alone: list[Any]) -> bool:
    """Whether the logits of a sample do not depend on the others in its batch, which no loss can mend."""
    logits = whole.get("logits")
    if not isinstance(logits, torch.Tensor) or len(logits) != len(alone):
        return True
    each = torch.cat([outputs["logits"] for outputs in alone])
    return each.shape == logits.shape and torch.allclose(each, logits, rtol=1e-3, atol=1e-4)


def test_every_class_that_a_policy_names_is_of_its_file_and_not_as_usual() -> None:
    classes = {name: head for model_type in MODEL_TYPES for name, head in heads_of(model_type).items()}
    for policy in own_policies().values():
        for name, said in policy.loss.items():
            usual = next((kind for end, kind in USUAL.items() if name.endswith(end)), "mean")
            seq2seq = name.endswith("ForConditionalGeneration") and said == "loss_function"  # encoder and decoder
            assert name in classes and (said != usual or seq2seq), f"{policy.name}: {name}"


class Passes(LlamaForCausalLM):
    pass


class Named(torch.nn.Linear):
    pass


def test_a_class_that_inherits_its_forward_has_the_same_loss_and_another_may_not() -> None:
    config = llama().config
    assert loss_kind(Passes(config)) == "loss_function" and OwnLoss.of(Passes(config)).shifted
    assert loss_kind(Unshifted(config)) is None
    given = read_user_policy({"extends": "llama", "loss": {"Unshifted": "mean", "Linear": "shifted_mean"}})
    assert loss_kind(Unshifted(config), given) == "mean" and not OwnLoss.of(Unshifted(config), given).shifted
    assert loss_kind(llama(), given) == "loss_function"
    assert loss_kind(Named(2, 2), given) == "shifted_mean"  # by the class that it takes its forward from
    ids = torch.arange(8).view(2, 4)
    batch = {"input_ids": ids, "labels": ids}
    assert OwnLoss.of(Unshifted(config), given).reduction(batch, 2) == "tokens"
    assert OwnLoss.of(Unshifted(config)).reduction(batch, 1) == "microbatch"
    words = (
        r"the losses of 2 micro-batches of Unshifted cannot be combined: its forward is none of transformers', and its "
        r"loss is unknown; name it in a policy: loss: {Unshifted: mean}"
    )
    with pytest.raises(ConfigError, match=words):
        OwnLoss.of(Unshifted(config)).reduction(batch, 2)


class HandsOn(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, labels=labels, **kwargs)


class Squares(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        outputs = super().forward(input_ids, **kwargs)
        outputs.loss = None if labels is None else outputs.logits.mean() ** 2
        return outputs


def test_a_class_of_ones_own_is_measured_and_stays_as_it_was() -> None:
    config = llama().config
    kinds = {Unshifted: "mean", HandsOn: "loss_function", Squares: "other"}
    assert {kind: losses_of(kind(config)) for kind in kinds} == {kind: {kind.__name__: kinds[kind]} for kind in kinds}
    assert losses_of(llama()) == losses_of(Passes(config)) == {}
    model, own, before = gpt2().train(), Unshifted(config), torch.get_rng_state()
    assert measured_kind(model) == "loss_function" and model.training
    assert losses_of(own) == {"Unshifted": "mean"}
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("model_type", "head", "kind"),
    [
        ("bert", "BertForMaskedLM", "mean"),
        ("bart", "BartForCausalLM", "mean"),
        ("blip", "BlipForConditionalGeneration", "shifted_mean"),
        ("t5", "T5ForConditionalGeneration", "mean"),
        ("llama", "LlamaForSequenceClassification", "mean"),
    ],
)
def test_what_policies_say_is_measured_too(model_type: str, head: str, kind: str) -> None:
    model = build(Case(model_type, head), 6, 3)
    assert measured_kind(model) == loss_kind(model) == kind


def test_the_loss_of_a_class_that_the_policy_does_not_name() -> None:
    bare = read_user_policy({"match": {"model_type": "gpt2"}, "units": {}, "blocks": {"path": "h", "modules": {}}})
    assert loss_kind(gpt2(), bare) == "loss_function"
    own = type("GPT2LMHeadModel", (GPT2LMHeadModel,), {"forward": lambda self, **inputs: None, "__module__": "mine"})
    assert loss_kind(own(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16))) is None
    model = llama()
    model.config.model_type = "not-listed"
    assert loss_kind(model) == "loss_function"
    other: Any = BertForMaskedLM(BertForMaskedLM.config_class(**SMALL_BERT))
    assert loss_kind(other) == "mean"
    other.config.model_type = "not-listed"
    assert loss_kind(other) is None


def test_items_divide_cross_entropies_alone() -> None:
    items = {"num_items_in_batch": torch.tensor(3)}
    assert OwnLoss.of(gpt2()).divides_by_items({"labels": torch.zeros(2, 4, dtype=torch.long), **items})
    assert not OwnLoss.of(gpt2()).divides_by_items({"labels": torch.zeros(2, 4), **items})
    classes = build(Case("llama", "LlamaForSequenceClassification"), 6, 3)  # which does not hand the number on
    assert OwnLoss.of(classes).reduction({"labels": torch.zeros(2, dtype=torch.long), **items}, 2) == "tokens"
