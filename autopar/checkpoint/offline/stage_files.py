"""Which stage's file a tensor goes into, when files are made without the model. Pure.

Loading reads any tensor from any file, so this decides only which files a rank opens: blocks stay together, stages
are about equally large, and the order is that of the state dict.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["stages_by_size"]


def stages_by_size(sizes: Mapping[str, int], pp: int) -> dict[str, int]:
    """Tensor name -> stage.

    Args:
        sizes: tensor name -> bytes, in state-dict order.
        pp: number of stages.
    """
    blocks: dict[str, int] = {}
    block_of = {}
    for name, size in sizes.items():
        found = re.match(r"(.*?\.\d+)\.", name)
        block_of[name] = found[1] if found else name
        blocks[block_of[name]] = blocks.get(block_of[name], 0) + size
    total = sum(blocks.values())
    stage, reached = {}, 0
    for block, size in blocks.items():
        middle = reached + size / 2
        stage[block] = min(pp - 1, int(pp * middle / total)) if total else 0
        reached += size
    return {name: stage[block] for name, block in block_of.items()}
