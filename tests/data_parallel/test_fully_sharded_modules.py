"""ZeRO stages 2 and 3 where modules are left out on one replica, or called by themselves."""

import copy
import os
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BartForConditionalGeneration, OPTConfig, OPTForCausalLM

import autopar
from autopar.errors import ConfigError, ConsistencyError
from tests.data_parallel.test_fully_sharded_compositions import bart
from tests.exchange import raises_everywhere
from tests.harness.tiers import mainly
from tests.harness.worlds import pooled, spawn
from tests.parity import close
from tests.small import llama

IDS = torch.arange(40).view(4, 10)


def opt(**changes: Any) -> OPTForCausalLM:
    sizes = {"num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 6, "ffn_dim": 37, "vocab_size": 131}
    return OPTForCausalLM(
        OPTConfig(**sizes, word_embed_proj_dim=24, max_position_embeddings=64, dropout=0.0, **changes)
    )


@pooled(world_size=2)
def test_layer_drop_is_refused() -> None:
    for stage in (2, 3):
        model = opt(layerdrop=0.5)
        before = copy.deepcopy(model.state_dict())
        with raises_everywhere(ConfigError, f"zero.stage={stage} is not supported with config.layerdrop=0.5, which"):
            autopar.initialize(model, {"zero": {"stage": stage}})
        assert all(torch.equal(now, before[name]) for name, now in model.state_dict().items())
    encoder_only = BartForConditionalGeneration(copy.deepcopy(bart().config))
    encoder_only.model.encoder.layerdrop = 0.25
    with raises_everywhere(ConfigError, "BartEncoder.layerdrop=0.25, which skips blocks at random"):
        autopar.initialize(encoder_only, {"zero": {"stage": 3}})
    one_replica = autopar.initialize(opt(layerdrop=0.5), {"tp": 2, "zero": {"stage": 3}})
    one_replica.mpu.destroy()


def leave_out(model: Any, *numbers: int) -> None:
    layers = model.model.layers
    model.model.layers = nn.ModuleList(layer for place, layer in enumerate(layers) if place not in numbers)
    model.config.num_hidden_layers = len(model.model.layers)


def loss_of(model: Any) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    return loss


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pooled(world_size=2)
def test_replicas_that_run_different_modules_raise(compiled: bool) -> None:
    compiling = {"enable": compiled, "backend": "eager"}
    model = autopar.initialize(llama(num_hidden_layers=3), {"zero": {"stage": 3}, "compile": compiling})
    for _ in range(2):
        loss_of(model).backward()
    leave_out(model, *range(model.mpu.rank + 1))  # rank 0 begins with layer 1, rank 1 with layer 2
    said = "rank 0 reads the weights of model.layers.1 (block 0 of a forward, sharded by zero.stage 3); rank 1 reads"
    with raises_everywhere(ConsistencyError, said, "must run the same modules in the same order"):
        loss_of(model)


def one_leaves_out_the_last_block() -> None:
    model = autopar.initialize(llama(num_hidden_layers=3), {"zero": {"stage": 2}, "pipeline": {"timeout": 2}})
    loss_of(model).backward()
    if model.mpu.rank == 0:
        leave_out(model, 2)
    said = r"rank 0 reads no more weights in .*:\d+, and rank 1 did not within 2 s"
    alone = model.mpu.rank == 0
    with pytest.raises(
        ConsistencyError if alone else RuntimeError, match=said if alone else "onnection closed by peer"
    ):
        loss_of(model).backward()
    if alone:
        os._exit(0)


@pytest.mark.tier("test")
def test_a_replica_that_runs_fewer_modules_does_not_hang() -> None:
    spawn(__name__, "one_leaves_out_the_last_block", 2, expect_dead=(0,))


class FailsOnce:
    """A hook that raises the first time."""

    def __init__(self, *, fails: bool = True) -> None:
        self.fails = fails

    def __call__(self, *_: Any) -> None:
        if self.fails:
            self.fails = False
            raise ValueError("out of memory")


@pooled(world_size=2)
def test_a_first_forward_that_fails() -> None:
    """After the last block on one replica, or in a block on both: all skip the batch, and train."""
    expected = loss_of(llama()).detach()
    for stage in (2, 3):
        for path, everywhere in (("lm_head", False), ("model.layers.0.mlp", True)):
            model = autopar.initialize(llama(), {"zero": {"stage": stage}})
            fails = everywhere or model.mpu.rank == 0
            model.get_submodule(path).register_forward_hook(FailsOnce(fails=fails))
            with pytest.raises(ValueError, match="out of memory") if fails else nullcontext():
                loss_of(model)
            for _ in range(2):
                loss = loss_of(model)
                loss.backward()
                close(loss.detach(), expected, f"loss after a failure in {path}")
            model.mpu.destroy()


def embedded(model: Any) -> torch.Tensor:
    table = model.get_input_embeddings()
    loss: torch.Tensor = (
        model(inputs_embeds=table(IDS) * 2, labels=IDS, use_cache=False).loss + table(IDS).square().mean()
    )
    return loss


def headed(model: Any) -> torch.Tensor:
    states = model.model(input_ids=IDS).last_hidden_state
    return model.lm_head(states[:, -1]).square().mean() + states.mean()


def one_block(model: Any) -> torch.Tensor:
    states = model.model.embed_tokens(IDS)
    place = model.model.rotary_emb(states, torch.arange(10)[None])
    return model.model.norm(model.model.layers[1](states, position_embeddings=place)).square().mean()


def encoded(model: Any) -> torch.Tensor:
    states = model.get_encoder()(IDS).last_hidden_state
    return model.model.decoder(IDS, encoder_hidden_states=states).last_hidden_state.square().mean()


def from_encoder(model: Any) -> torch.Tensor:
    states = model.get_encoder()(IDS)
    loss: torch.Tensor = model(encoder_outputs=states, labels=IDS).loss + states.last_hidden_state.mean()
    return loss


PARTS = [(llama, embedded), (llama, headed), (llama, one_block), (bart, encoded), (bart, from_encoder)]


@pytest.mark.parametrize("stage", mainly(3, 2, later="all"))
@pooled(world_size=2)
def test_parts_that_are_called_by_themselves(stage: int) -> None:
    for build, loss_of_parts in PARTS:
        plain = build().train()
        model = copy.deepcopy(plain)
        model, optimizer = autopar.initialize(
            model, {"zero": {"stage": stage}}, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
        )
        reference = torch.optim.SGD(plain.parameters(), lr=0.1)
        for _ in range(2):
            loss, expected = loss_of_parts(model), loss_of_parts(plain)
            close(loss.detach(), expected.detach(), f"loss of {loss_of_parts.__name__}")
            loss.backward()
            expected.backward()
            for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
                if other.grad is not None:
                    close(parameter.grad.full_tensor(), other.grad, f"{loss_of_parts.__name__}: gradient of {name}")
            for each in (optimizer, reference):
                each.step()
                each.zero_grad()
            with torch.no_grad():
                close(loss_of_parts(model), loss_of_parts(plain), f"{loss_of_parts.__name__} without gradients")
        for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            close(parameter.data.full_tensor(), other.data, f"{loss_of_parts.__name__}: {name}")
        model.mpu.destroy()
