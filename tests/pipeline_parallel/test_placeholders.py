"""Placeholders of weights that other stages hold: what is written into them in front of the blocks, and behind."""

import copy
import pickle

import pytest
import torch

import autopar
from autopar.pipeline_parallel.stage_weights import Placeholder, make_placeholder


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
