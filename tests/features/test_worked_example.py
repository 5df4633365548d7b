"""The feature in docs/design.md, in a distribution of its own: it scales, trains, is saved, merged and undone."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = re.search(r"```python\n(# scaled_rows\.py.*?)```", (ROOT / "docs" / "design.md").read_text(), re.S)

SCRIPT = """
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.cli import app

SIZES = dict(vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=32)
folder = Path(sys.argv[1])


def built():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).double()


rule = {"scaled_row": "heads", "scale": 0.5}
policy = {"extends": "llama", "match": {"model_type": "llama"}, "blocks": {"modules": {"self_attn.o_proj": rule}}}
ids = torch.randint(0, 61, (2, 7), generator=torch.Generator().manual_seed(1))

plain = built()
for layer in plain.model.layers:
    layer.self_attn.o_proj.register_forward_hook(lambda module, args, output: output * 0.5)
model = autopar.initialize(built(), {"tp": 2}, policy=policy)
for each in (plain, model):
    optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
    for _ in range(3):
        loss = each(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
expected = plain(input_ids=ids, labels=ids).loss
torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, expected, rtol=0, atol=1e-6)
model.save_parallelized(folder / "saved")
if dist.get_rank() == 0:
    app(["merge", str(folder / "saved"), str(folder / "merged")], standalone_mode=False)
dist.barrier()
merged = LlamaForCausalLM.from_pretrained(folder / "merged", dtype=torch.float64).state_dict()
torch.testing.assert_close(merged, dict(plain.state_dict()), rtol=0, atol=1e-6)
autopar.deparallelize(model)
assert type(model.model.layers[0].self_attn.o_proj) is torch.nn.Linear
"""


@pytest.mark.tier("all")
def test_the_feature_of_the_design_page_works_from_another_distribution(tmp_path: Path) -> None:
    assert CODE is not None and len(CODE[1].splitlines()) <= 40
    (tmp_path / "scaled_rows.py").write_text(CODE[1])
    info = tmp_path / "scaled_rows-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scaled-rows\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[autopar.features]\nscaled_rows = scaled_rows:FEATURE\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "script.py"]
    done = subprocess.run(
        [*command, str(tmp_path)], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
