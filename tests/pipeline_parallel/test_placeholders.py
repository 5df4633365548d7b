"""Placeholders of weights that other stages hold: what is written into them in front of the blocks, and behind."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import autopar
from autopar.pipeline_parallel.stage_weights import Placeholder, make_placeholder
from tests.parity import close, language_batches
from tests.pool import pooled
from tests.small import gpt2


def _made(in_front: bool | None) -> Placeholder:
    placeholder = make_placeholder(torch.ones(3, 2), "h.0.weight", torch.device("cpu"))
    placeholder.in_front = lambda: in_front  # type: ignore[method-assign]
    return placeholder


def test_a_write_in_front_of_the_blocks_is_left_out() -> None:
    placeholder = _made(True)
    assert placeholder.mul_(2) is placeholder and placeholder.data.div_(2).isnan().all()
    placeholder[0] = 1.0
    placeholder += 1
    placeholder[1].zero_()
    assert type(placeholder) is Placeholder and placeholder.shape == (3, 2) and placeholder.isnan().all()
    assert placeholder.untyped_storage().nbytes() == 4


def test_what_is_computed_from_it_is_a_tensor() -> None:
    placeholder = _made(True)
    assert type(placeholder * 2) is type(torch.nn.functional.linear(torch.ones(1, 2), placeholder)) is torch.Tensor
    assert (torch.ones(3, 2).mul_(placeholder)).isnan().all()


def test_a_write_behind_a_block_is_refused_and_one_outside_is_left_out() -> None:
    with pytest.raises(autopar.UnsupportedModelError, match=r"writes in place into h\.0\.weight, which another stage"):
        _made(False).mul_(2)
    outside = _made(None)
    assert outside.mul_(2) is outside
    outside.data = torch.ones(3, 2)
    assert outside.isnan().all() and outside.untyped_storage().nbytes() == 4


def test_what_is_drawn_into_it_is_drawn_and_thrown_away() -> None:
    drawn, expected = _made(None), torch.empty(3, 2)
    for weight in (drawn, expected):
        torch.manual_seed(3)
        torch.nn.init.normal_(weight, std=0.1)
        torch.nn.init.kaiming_uniform_(weight)
        torch.nn.init.xavier_normal_(weight)
        weight.data.uniform_()
        weight.after = torch.rand(())  # type: ignore[attr-defined]
    assert drawn.isnan().all() and torch.equal(drawn.after, expected.after)  # type: ignore[attr-defined]


def test_copies() -> None:
    copied = copy.deepcopy(_made(True))
    assert type(copied) is Placeholder and copied.mul_(2) is copied and copied.untyped_storage().nbytes() == 4
    assert pickle.loads(pickle.dumps(_made(True))).shape == (3, 2)


class _Rescaled(torch.nn.Module):
    """In front of the blocks, what rwkv does: another scale of the weights for inference than for training."""

    scaled = False

    def rescale(self, blocks: Any, training: bool) -> None:
        if self.scaled == (not training):
            return
        with torch.no_grad():
            for number, block in enumerate(blocks):
                block.mlp.c_proj.weight.mul_(2.0**number if training else 0.5**number)
        self.scaled = not training


def _rescaling(model: Any) -> Any:
    """A GPT-2 whose embedding rescales the blocks."""
    rescaled = _Rescaled()
    model.transformer.wte.register_forward_pre_hook(
        lambda module, args: rescaled.rescale(model.transformer.h, module.training)
    )
    return model


@pooled(world_size=2)
def test_weights_that_are_rescaled_for_inference_and_back_for_training() -> None:
    plain = _rescaling(gpt2(n_layer=4))
    piped = autopar.initialize(gpt2(n_layer=4), {"model_parallelism": {"pipeline_parallel_size": 2}})
    _rescaling(piped)
    (batch,) = language_batches(131, count=1)
    for training in (False, True, False):
        plain.train(training)
        piped.train(training)
        if training:
            out = piped.execute_pipeline(batch, broadcast_loss=True)
            expected = plain(**batch)
            expected.loss.backward()
            close(out.loss, expected.loss, "loss")
        else:
            with torch.no_grad():
                close(piped(**batch).logits, plain(**batch).logits, "logits")
    theirs = dict(plain.named_parameters())
    for name, parameter in piped.named_parameters():
        close(parameter, theirs[name], name, 0.0)
        close(parameter.grad, theirs[name].grad, name)
    piped.mpu.destroy()
