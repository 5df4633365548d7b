"""A user's own ``nn.Module``, parallelized by a policy, against itself in one process."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.checkpoint.offline import merge_checkpoint, reshard_checkpoint
from autopar.checkpoint.shards import check_checkpoint
from autopar.errors import ConfigError, PolicyError, UnsupportedModelError
from tests.harness.worlds import pooled
from tests.own_modules import GPT, GPT_POLICY, Block, gpt, tokens
from tests.parity import all_close, check, close


def parallel(model: Any, tp: int = 1, pp: int = 1, policy: Any = GPT_POLICY, **rest: Any) -> Any:
    config = {"tp": tp, "pp": pp, **rest.pop("config", {})}
    return autopar.initialize(model, config, policy=policy, **rest)


def whole(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in autopar.deparallelize(model).state_dict().items()}


@pytest.mark.tier("test")
@pooled(world_size=4)
def test_a_gpt_of_ones_own_is_exact_on_every_mesh(tmp_path: Path) -> None:
    folder = tmp_path
    for tp in (2, 4):
        model = check(gpt, [tokens(1), tokens(2)], tp, policy=GPT_POLICY)
        assert model.transformer.h[0].attn.n_head in (4, 5) if tp == 2 else (2, 3)
        assert autopar.deparallelize(model).transformer.h[0].attn.n_head == 9
        assert type(model.lm_head) is nn.Linear
        assert model.lm_head.weight is model.transformer.wte.weight
    model = parallel(gpt(), 2, 2, config={"pipeline": {"microbatch_size": 1}})
    plain = gpt()
    batch = tokens(3)
    logits, loss = plain(**batch)
    loss.backward()
    out = model.execute_pipeline(batch, lambda outputs, inputs: outputs[1], return_outputs=True)
    if out.loss is not None:
        close(out.loss, loss.detach(), "the loss in stages")
        close(out.outputs[0], logits.detach(), "the logits in stages")
    with torch.no_grad():
        close(model(**batch)[0], logits.detach(), "a plain call in stages")
    held = [name for name, _ in model.named_parameters()]
    assert ("transformer.wpe.weight" in held) == (model.mpu.pp.rank == 0)
    for optimized in (model, plain):
        torch.optim.SGD(optimized.parameters(), lr=0.1).step()
    model.save_parallelized(f"{folder}/shards")
    all_close(whole(model), plain.state_dict(), "{} after a step in stages")
    other = parallel(gpt(seed=5), 4)
    assert other.from_parallelized(f"{folder}/shards") is other
    for _ in range(2):  # the second replaces the first
        other.save_parallelized(f"{folder}/merged", merge_checkpoints=True)
    all_close(whole(other), plain.state_dict(), "{} from another mesh")
    if dist.get_rank() == 0:
        reshard_checkpoint(f"{folder}/shards", f"{folder}/resharded", tp=2, pp=1)
        assert check_checkpoint(f"{folder}/resharded")["problems"] == []
        merge_checkpoint(f"{folder}/resharded", f"{folder}/merged-bf16", dtype="bfloat16")
        merge_checkpoint(f"{folder}/resharded", f"{folder}/merged", force=True)
        assert sorted(path.name for path in Path(f"{folder}/merged").iterdir()) == ["model.safetensors"]
        merged = gpt(seed=7)
        merged.load_state_dict(load_file(f"{folder}/merged/model.safetensors"))  # strict: tied names are all there
        all_close(merged.state_dict(), plain.state_dict(), "{}")
    dist.barrier()


class Patches(nn.Module):
    """A small vision transformer without a config; its head counts are attributes, its outputs a dict."""

    def __init__(self, heads: int = 3) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 12, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, 12))
        self.layers = nn.ModuleList([Attending(12, heads) for _ in range(2)])
        self.norm = nn.LayerNorm(12)
        self.classes = nn.Linear(12, 5)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        for layer in self.layers:
            x = layer(x)
        logits = self.classes(self.norm(x[:, 0]))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Attending(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


PATCHES: dict[str, Any] = {
    "units": {"heads": "layers.0.heads"},
    "prefix": {"embed": "replicated", "token": "replicated"},
    "blocks": {
        "path": "layers",
        "modules": {
            "norm": "replicated",
            **{name: {"column": "heads"} for name in ("query", "key", "value")},
            "out": {"row": "heads"},
        },
        "attributes": {"heads": "heads"},
    },
    "suffix": {"norm": "replicated", "classes": "replicated"},
}


def patches(seed: int = 0) -> Patches:
    torch.manual_seed(seed)
    return Patches()


def images(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(4, 3, 8, 8, generator=generator)
    return {"pixels": pixels, "labels": torch.randint(0, 5, (4,), generator=generator)}


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 11), nn.ReLU(), nn.Linear(11, 3))


MLP_POLICY = {"units": {"ffn": "inferred"}, "prefix": {"0": {"column": "ffn"}, "2": {"row": "ffn"}}}


@pooled(world_size=2)
def test_a_vision_transformer_and_an_mlp_without_any_config() -> None:
    check(patches, [images(1), images(2)], 2, policy=PATCHES)
    for count in (3, "block.heads"):  # so many, and of each block
        check(patches, [images(1)], 2, policy={**PATCHES, "units": {"heads": count}})
    check(mlp, [{"input": torch.randn(4, 6, generator=torch.Generator().manual_seed(3))}], 2, policy=MLP_POLICY)
    model = gpt()
    model.config = vars(model.config)  # a dict
    assert parallel(model, 2).transformer.h[0].attn.n_head in (4, 5)
    dist.barrier()


@pooled(world_size=2)
def test_replicas_optimizers_and_recomputation(tmp_path: Path) -> None:
    plain = gpt()
    for batch in (tokens(1), tokens(2)):
        (plain(**batch)[1] / 2).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    rank = dist.get_rank()
    for config, sizes in [
        ({"zero": {"stage": 1}, "gradient_clipping": 0.1}, (1, 1)),
        ({"zero": {"stage": 3}, "gradient_clipping": 0.1}, (1, 1)),
        ({"activation_checkpointing": {"enable": True}, "gradient_clipping": 0.1}, (2, 1)),
    ]:
        model = gpt()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = parallel(model, *sizes, config=config, optimizer=optimizer)
        model.train()
        if sizes == (1, 1):
            model(**tokens(1 + rank))[1].backward()
            if "zero" in config and config["zero"]["stage"] == 1:
                autopar.average_gradients(model)
        else:
            for batch in (tokens(1), tokens(2)):
                (model(**batch)[1] / 2).backward()
        optimizer.step()
        close(optimizer.gradient_norm.detach().cpu(), norm, f"the norm with {config}")
        model.save_parallelized(tmp_path / "run", optimizer=optimizer)
        fresh = parallel(gpt(seed=3), 2).from_parallelized(tmp_path / "run")
        all_close(whole(fresh), plain.state_dict(), "{} with other settings")
        if sizes == (2, 1):
            assert type(autopar.deparallelize(model).transformer.h[0]) is Block
    model = parallel(gpt())
    engine = DistributedDataParallel(model, process_group=model.mpu.get_data_parallel_group())
    engine(**tokens(1 + rank))[1].backward()
    close(autopar.clip_grad_norm_(engine, 0.1), norm, "the norm with DDP")
    half = gpt()
    half, stepping = parallel(
        half, 2, config={"precision": {"dtype": "bf16"}}, optimizer=torch.optim.SGD(half.parameters())
    )
    half(**tokens(1))[1].backward()
    stepping.step()
    assert half.lm_head.weight.dtype == torch.bfloat16


class Noisy(nn.Module):
    """Dropout between a column and a row whose probability stands in one of three places."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.args = {"p_drop": 0.5} if number == 0 else None
        self.settings = SimpleNamespace(drop=0.5) if number == 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p = self.args["p_drop"] if self.args else self.settings.drop if self.settings else 0.5
        y = F.dropout(self.up(x), p, self.training)
        self.seen = (y != 0).float().detach()
        return self.down(y)


@pooled(world_size=2)
def test_dropout_and_inputs_are_watched() -> None:
    model = parallel(gpt(dropout=0.5), 2).train()
    seen: list[torch.Tensor] = []
    model.transformer.h[0].mlp.dropout.register_forward_hook(lambda m, a, out: seen.append(out.detach()))
    model(**tokens(1))[1].backward()
    everyone = [torch.empty_like(seen[0]) for _ in range(2)]
    dist.all_gather(everyone, seen[0])
    assert torch.equal(*everyone), "dropout of whole activations differs"
    for number in range(3):  # inside the region masks differ, wherever the probability stands
        policy = {"units": {"f": "inferred"}, "prefix": {"up": {"column": "f"}, "down": {"row": "f"}}}
        noisy = parallel(Noisy(number), 2, policy=policy).train()
        noisy(torch.ones(64, 4))
        dist.all_gather(everyone := [torch.empty(64, 4) for _ in range(2)], noisy.seen)
        assert not torch.equal(*everyone), f"case {number}"
    model = parallel(gpt(), 2)
    with pytest.raises(autopar.ConsistencyError, match="got different inputs"):
        model(**tokens(dist.get_rank()))


@pooled(world_size=2)
def test_a_policy_that_is_wrong_is_found_at_the_first_call() -> None:
    unscaled = GPT_POLICY.replace("    attn.n_embd: heads\n", "")
    model = parallel(gpt(), 2, policy=unscaled)
    with pytest.raises(PolicyError, match=r"fails in transformer\.h\.0\.attn, where the full model does not"):
        model(**tokens(1))
    partial = {**PATCHES, "units": {"heads": 3}}
    partial["blocks"] = {**partial["blocks"], "modules": {**partial["blocks"]["modules"], "query": "replicated"}}
    with pytest.raises(PolicyError, match=r"a replicated activation meets sh|fails in layers\.0"):
        parallel(patches(), 2, policy=partial)(**images(1))


class Initialized(nn.Module):
    """Its constructor has the last word about its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.same, self.zero, self.drawn = (nn.Linear(6, 6) for _ in range(3))
        nn.init.constant_(self.same.weight, 3.0)
        nn.init.normal_(self.drawn.weight, std=100)
        with torch.no_grad():
            self.zero.weight.zero_()


def test_what_it_says_without_a_policy_that_fits() -> None:
    with pytest.raises(UnsupportedModelError) as info:
        autopar.initialize(gpt())
    lines = str(info.value).splitlines()
    assert lines[0] == "GPT must be or contain a Hugging Face model, or have a custom policy."
    assert "initialize(model, config, policy=policy)" in lines[4]
    with pytest.raises(PolicyError, match=r"'heads' is n_heads, which GPTConfig lacks\. Did you mean 'n_head'\?"):
        parallel(gpt(), policy=GPT_POLICY.replace("heads: n_head", "heads: n_heads"))
    with pytest.raises(PolicyError, match=r"'heads' is layers\.0\.head, which Attending lacks\. Did you mean 'heads'"):
        parallel(patches(), policy={**PATCHES, "units": {"heads": "layers.0.head"}})
    with pytest.raises(ConfigError, match="activation_checkpointing requires 'blocks' in the policy of Sequential"):
        parallel(mlp(), policy=MLP_POLICY, config={"activation_checkpointing": {"enable": True}})
    with pytest.raises(ConfigError, match=r"must be a model class of transformers, got <class"):
        autopar.from_pretrained(GPT, "somewhere", policy=GPT_POLICY)
    with autopar.lazy_init():
        lazy = Initialized()
    parallel(lazy, policy={"units": {}, "prefix": {"same": "replicated", "zero": "replicated", "drawn": "replicated"}})
    assert (lazy.same.weight == 3).all()
    assert not lazy.zero.weight.any()
    assert 20 < lazy.drawn.weight.std() < 500
    assert isinstance(parallel(gpt()), GPT)
    model = parallel(gpt(), config={"pipeline": {"microbatch_size": 1}})
    with pytest.raises(ConfigError, match="it is a user-defined module, and its loss is unknown"):
        model.execute_pipeline(tokens(1))
