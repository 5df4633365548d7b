"""A made-up architecture takes one YAML file and no code: a renamed fork, and a layout that nobody stored before."""

from __future__ import annotations

import inspect
import re
import sys
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama import configuration_llama, modeling_llama

from tests.parity import check, language_batches, randomise
from tests.tensor_parallel.toys import ToyConfig, batches, toy
from tests.worlds import distributed

NAMES = {
    "self.norm": "self.norm_out",
    "Llama": "Lorem",
    "llama": "lorem",
    "self_attn": "mixer",
    "q_proj": "ask",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "answer",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
    "embed_tokens": "words",
    "input_layernorm": "norm_in",
    "post_attention_layernorm": "norm_between",
    "self.layers": "self.stack",
    "lm_head": "unembed",
}

LOREM = """
match: {model_type: lorem}
units:
  keys: {count: num_key_value_heads, replicate: true}
  queries: {count: num_attention_heads, follows: keys}
  neurons: intermediate_size
  words: vocab_size
prefix:
  words: {embedding: words}
blocks:
  path: stack
  modules:
    norm_in: replicated
    mixer.ask: {column: queries}
    mixer.key: {column: keys}
    mixer.value: {column: keys}
    mixer.answer: {row: queries}
    norm_between: replicated
    mlp.w1: {column: neurons}
    mlp.w3: {column: neurons}
    mlp.w2: {row: neurons}
  attributes:
    mixer.num_key_value_groups: queries / keys  # transformers reads it there
suffix:
  norm_out: replicated
head:
  unembed: {column: words, gather_output: true}
"""


def lorem() -> Any:
    """Llama's source with other names for its classes, modules and attributes."""
    if "lorem" not in sys.modules:
        module = types.ModuleType("lorem")
        sys.modules["lorem"] = module
        for part in (configuration_llama, modeling_llama):
            source = inspect.getsource(part)
            source = re.sub(r"^from \.configuration_llama import .*$", "", source, flags=re.M)
            source = re.sub(r"from \.\.\.", "from transformers.", source)
            source = re.sub(r"^ *@auto_docstring.*$", "", source, flags=re.M)  # looks for the file of the source
            for old, new in NAMES.items():
                source = source.replace(old, new)
            exec(compile(source, "lorem", "exec"), vars(module))
    fork = sys.modules["lorem"]
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2}
    config = fork.LoremConfig(vocab_size=61, intermediate_size=17, initializer_range=0.1, **sizes)
    return randomise(fork.LoremForCausalLM(config))


def test_the_fork_has_no_name_of_the_original() -> None:
    model = lorem()
    names = " ".join(name for name, _ in model.named_modules())
    assert model.config.model_type == "lorem" and type(model).__name__ == "LoremForCausalLM"
    assert "model.stack.0.mixer.ask" in names
    assert not re.search("llama|_proj|self_attn|layers|lm_head", names)


@distributed(world_size=3)
def test_a_renamed_fork_takes_one_file() -> None:
    check(lorem, language_batches(61), 3, policy=LOREM)


class Ipsum(nn.Module):
    """Everything in one projection, stored ``v0 q0 v1 q1 ... | k | strength of each head | gate | up``."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.heads, self.keys, self.ffn, hidden = config.heads, config.groups, config.ffn, config.hidden_size
        self.parts = [self.heads * 5, self.keys * 2, self.heads, 2 * self.ffn]
        self.everything = nn.Linear(hidden, sum(self.parts))
        self.sharpness = nn.Parameter(torch.ones(self.keys, 2))
        self.back = nn.Linear(self.ffn + self.heads * 3, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = [self.heads * 5, self.keys * 2, self.heads, 2 * self.ffn]
        qv, k, strength, both = self.everything(x).split(sizes, -1)
        v, q = qv.unflatten(-1, (self.heads, 5)).transpose(1, 2).split([3, 2], -1)  # [batch, heads, seq, 3 and 2]
        k = k.unflatten(-1, (self.keys, 2)) * self.sharpness
        k = k.transpose(1, 2).repeat_interleave(self.heads // self.keys, 1)
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v * strength.transpose(1, 2).unsqueeze(-1)
        gate, up = both.chunk(2, -1)
        return self.back(torch.cat([F.silu(gate) * up, mixed.transpose(1, 2).flatten(-2)], -1))


IPSUM = """
match: {model_type: toy}
units:
  keys: {count: groups, replicate: true}
  heads: {count: heads, follows: keys}
  ffn: ffn
blocks:
  path: layers
  modules:
    everything: {column: [heads * 5, keys * 2, heads, ffn, ffn]}
    sharpness: {sharded: keys}
    back: {row: [ffn, heads * 3]}
  attributes:
    heads: heads
    keys: keys
    ffn: ffn
"""


@distributed(world_size=3)
def test_a_layout_that_nobody_stored_before_takes_one_file() -> None:
    for heads, keys in ((6, 3), (6, 2), (4, 1)):
        check(lambda h=heads, k=keys: toy(Ipsum, heads=h, groups=k), batches(), 3, policy=IPSUM)
