"""Run by torchrun in a tree without one folder: train at tp 2 x pp 2, save, load, merge; or try a configuration.

A configuration is tried on a plain Llama, or on the kind of model in :data:`MODELS` that the last argument names.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.cli import app

CONFIG = LlamaConfig(
    vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32, attn_implementation="eager",
)  # fmt: skip


def built() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


def quantized() -> Any:
    """Return the model with layers of bitsandbytes, as a user puts them there."""
    from bitsandbytes.nn import Linear4bit

    model = built()
    for path, module in [*model.model.named_modules()]:
        if isinstance(module, torch.nn.Linear):
            layer = Linear4bit(module.in_features, module.out_features, bias=False, quant_type="nf4")
            layer.load_state_dict(module.state_dict())
            model.model.set_submodule(path, layer)
    return model.to("cpu")


def with_adapters() -> Any:
    sys.path.remove(str(Path(__file__).parent))  # a folder of tests here is called peft, too
    import peft

    return peft.get_peft_model(built(), peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))


MODELS = {"plain": built, "peft": with_adapters, "quantized": quantized}


def train(folder: Path) -> list[float]:
    """Return losses of four steps, a difference after loading, and one of the merged weights; both must be 0."""
    model = built()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = autopar.initialize(model, {"tp": 2, "pp": 2}, optimizer=optimizer)
    ids = torch.randint(0, 61, (4, 7), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(4):
        out = model.execute_pipeline({"input_ids": ids, "labels": ids}, optimizer=optimizer)
        loss = torch.tensor(0.0) if out.loss is None else out.loss.detach().clone()
        dist.all_reduce(loss, op=dist.ReduceOp.MAX)  # the last stage has it
        losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    model.save_parallelized(folder / "saved", optimizer=optimizer)
    model.eval()
    with torch.no_grad():
        logits = torch.as_tensor(model(input_ids=ids).logits).clone()
    second = autopar.initialize(built(), {"tp": 2, "pp": 2})
    second.from_parallelized(folder / "saved")
    second.eval()
    with torch.no_grad():
        again = torch.as_tensor(second(input_ids=ids).logits)
    if dist.get_rank() == 0:
        app(["merge", str(folder / "saved"), str(folder / "merged")], standalone_mode=False)
    dist.barrier()
    plain = LlamaForCausalLM.from_pretrained(folder / "merged").eval()
    with torch.no_grad():
        merged = plain(input_ids=ids).logits
    torch.testing.assert_close(merged, logits, rtol=1e-4, atol=1e-5)
    return [*losses, float((again - logits).abs().max())]


def main() -> None:
    assert Path(autopar.__file__).parents[1] == Path.cwd(), autopar.__file__
    if len(sys.argv) == 2:
        found = train(Path(sys.argv[1]))
        if os.environ["RANK"] == "0":
            print(json.dumps(found), flush=True)
        return
    try:
        kind, *methods = sys.argv[3:] or ["plain"]
        model = autopar.initialize(MODELS[kind](), json.loads(sys.argv[2]))
        for name in methods:
            getattr(model.eval(), name)(torch.ones(1, 3, dtype=torch.int64))
    except autopar.ConfigError as error:
        print(error, flush=True)


if __name__ == "__main__":
    main()
