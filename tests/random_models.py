"""Small random models of every model type that a policy lists, one per task head, and inputs for them."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from autopar.tools.commands.models import classes_of
from autopar.tools.verification.session import switch_off
from autopar.tools.verification.small_models import randomise
from tests.zoo.configs import fields_of, plain_fields, with_sizes
from tests.zoo.engine import cross_inputs, head_kind, kind_of, labels_of
from tests.zoo.form import Draw, Kind

VOCAB, SEQ, LABELS = 131, 7, 3

_CROSS = {"is_decoder": True, "add_cross_attention": True}

_WORDS = ("seq2seq", "causal", "masked", "ctc")  # what makes text; variants are of the first head found

_CHOICES = ("choice", "double")  # heads that read several texts for each sample, three here


@dataclass(frozen=True)
class Case:
    """One model to build: a model type, the class of a task head, and a variant of the config."""

    model_type: str
    head: str
    variant: str = ""

    def __str__(self) -> str:
        return f"{self.model_type} {self.head}{f' ({self.variant})' if self.variant else ''}"


# The forward of Llama4ForConditionalGeneration reads it of an output that lacks it, in transformers 5.24.0.
MoeCausalLMOutputWithPast.image_outputs = None  # type: ignore[attr-defined]


def of_type(model_type: str) -> Kind:
    """What a model type needs beside the settings that all share."""
    return kind_of(model_type)


def kind(head: str) -> str | None:
    """What a head does, from the ending of its class name; None if it is unknown."""
    return head_kind(head)


@functools.cache
def heads_of(model_type: str) -> dict[str, type[PreTrainedModel]]:
    """Every class of transformers whose config is of this model type, by name."""
    return classes_of(model_type, CONFIG_MAPPING[model_type])


def cases(model_type: str, excluded: frozenset[str] = frozenset()) -> list[Case]:
    """All cases of a model type: every head, and the variants of the one that makes text."""
    described = of_type(model_type)
    if described.inside:
        return []
    heads = [head for head in sorted(heads_of(model_type)) if head not in {*excluded, *described.without}]
    result = [Case(model_type, head) for head in heads]
    words = sorted((head for head in heads if kind(head) in _WORDS), key=lambda head: _WORDS.index(str(kind(head))))
    result += [Case(model_type, (words or heads)[0], name) for name in described.variants]
    if words and described.make is None:
        result.append(Case(model_type, words[0], "other tie"))
        if described.crosses:
            result.append(Case(model_type, words[0], "cross-attention"))
    return result


def _config(case: Case, heads: int, kv_heads: int, vocab: int) -> PretrainedConfig:
    config_class, described = CONFIG_MAPPING[case.model_type], of_type(case.model_type)
    if described.make is not None:
        config = described.make(heads, kv_heads, vocab, described.variants.get(case.variant, {}))
        if case.head.endswith("EncoderModel") and getattr(config, "is_encoder_decoder", False):
            config.is_encoder_decoder = False
        return config
    sizes = {"heads": heads, "kv_heads": kv_heads, "vocab": vocab}
    changes = plain_fields(case.model_type, described.settings, sizes, kind_of)
    fields = fields_of(config_class)
    if kind(case.head) == "causal" and "is_decoder" in fields:
        changes["is_decoder"] = True
    if kind(case.head) == "base" and not case.variant:
        changes.pop("is_decoder", None)
    if case.variant == "other tie":
        changes["tie_word_embeddings"] = not config_class().tie_word_embeddings
    elif case.variant == "cross-attention" and described.crosses:
        changes |= _CROSS
    elif case.variant:
        changes |= with_sizes(described.variants[case.variant], sizes, kind_of)
    if "embedding_size" in changes and changes["embedding_size"] is None:
        changes["embedding_size"] = changes["hidden_size"]
    return config_class(**changes, num_labels=2 if kind(case.head) == "question" else LABELS)


def build(case: Case, heads: int, kv_heads: int, *, vocab: int = VOCAB, seed: int = 0) -> PreTrainedModel:
    """The model of a case, with random norms and biases."""
    torch.manual_seed(seed)
    config = _config(case, heads, kv_heads, vocab)
    implementation = getattr(config, "attn_implementation", None)
    model_class = heads_of(case.model_type)[case.head]
    model = model_class._from_config(config, **({"attn_implementation": implementation} if implementation else {}))
    switch_off(model)
    randomise(model)
    return model.double() if of_type(case.model_type).double else model


def small(model_type: str, head: str, **changes: Any) -> Any:
    """The model of a head with 6 heads and 3 KV heads; with changes of its config, which only its forward reads."""
    model = build(Case(model_type, head), 6, 3)
    for name, value in changes.items():
        setattr(model.config, name, value)
    return model


def batches(
    case: Case, config: PretrainedConfig, count: int = 2, *, seq: int = SEQ, left: bool = False
) -> list[dict[str, Any]]:
    """Micro-batches with ragged padding and the labels of the head."""
    draw = _Draw(torch.Generator().manual_seed(1))
    result = []
    for _ in range(count):
        batch = _batch(case, config, draw, seq, left=left)
        if of_type(case.model_type).double:
            floats = [key for key, value in batch.items() if getattr(value, "dtype", None) == torch.float32]
            batch |= {key: batch[key].double() for key in floats}
        result.append(batch)
    return result


class _Draw:
    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __call__(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)


def _batch(case: Case, config: PretrainedConfig, draw: Draw, seq: int, *, left: bool) -> dict[str, Any]:
    what, described = kind(case.head), of_type(case.model_type)
    shape = (2, 3, seq) if what in _CHOICES else (2, seq)
    try:
        vocab = getattr(config.get_text_config(), "vocab_size", VOCAB)
    except ValueError:  # MusicGen has two texts
        vocab = config.get_text_config(encoder=True).vocab_size
    ids = draw(min(3, vocab - 1), vocab, *shape)  # not the padding
    mask = torch.ones_like(ids)
    mask[-1, ..., slice(2) if left else slice(seq - 2, None)] = 0
    batch: dict[str, Any] = {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
    batch = (described.labels.get(str(what)) or labels_of(what))(case.head, config, batch, draw)
    if case.variant == "cross-attention":
        batch = (described.cross or cross_inputs())(case.head, config, batch, draw)
    return batch if described.inputs is None else described.inputs(case.head, config, batch, draw)
