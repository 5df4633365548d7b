"""A made-up architecture takes one YAML file and no code: a layout that nobody stored before."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.parity import check
from tests.pool import pooled
from tests.tensor_parallel.toys import ToyConfig, batches, toy


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


@pooled(world_size=3)
def test_a_layout_that_nobody_stored_before_takes_one_file() -> None:
    for heads, keys in ((6, 3), (6, 2), (4, 1)):
        check(lambda h=heads, k=keys: toy(Ipsum, heads=h, groups=k), batches(), 3, policy=IPSUM)
