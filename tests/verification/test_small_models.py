"""Small models and batches for them: one model type for each thing that their configs and forwards need."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import ConvNextConfig, ConvNextModel, PretrainedConfig, PreTrainedModel

import autopar
from autopar.tools.commands.models import of_task
from autopar.tools.verification.batches import halves_agree, make_batches
from autopar.tools.verification.outputs import size_of_loss, total_loss
from autopar.tools.verification.session import _Dtypes
from autopar.tools.verification.small_models import build_small

LARGEST = 5_000_000  # parameters


@pytest.mark.parametrize(
    ("model_type", "taken"),
    [
        ("ministral", {"input_ids", "attention_mask", "labels"}),  # a width of heads that its config leaves out
        ("mistral4", {"input_ids", "attention_mask", "labels"}),  # latent heads
        ("bamba", {"input_ids", "attention_mask", "labels"}),  # heads of a state space
        ("gemma4_text", {"input_ids", "attention_mask", "labels"}),  # widths by layer
        ("swin2sr", {"pixel_values"}),  # stages in tuples
        ("hunyuan_vl", {"input_ids", "attention_mask", "labels"}),  # two towers of one width
        ("shieldgemma2", {"input_ids", "attention_mask", "labels"}),  # another type's class
        ("musicgen", {"input_ids", "attention_mask"}),  # the class of its decoder
        ("dbrx", {"input_ids", "attention_mask", "labels"}),  # fields of an inner config
        ("vilt", {"input_ids", "attention_mask", "labels", "pixel_values"}),  # an image beside the text
        ("qwen3_vl_vision", {"hidden_states", "grid_thw"}),  # patches of images in one row
        ("video_llama_3_vision", {"pixel_values", "grid_thw", "merge_sizes"}),
        ("seamless_m4t", {"inputs_embeds"}),  # vectors in the place of tokens
    ],
)
def test_a_small_model_runs_with_the_batches_made_for_it(model_type: str, taken: set[str]) -> None:
    head = of_task(model_type, None)
    assert head.kind is not None and head.config is not None
    model = build_small(head.kind, head.config)
    assert sum(parameter.numel() for parameter in model.parameters()) < LARGEST
    with torch.no_grad():
        batches = make_batches(model, count=2, rows=2, length=16)
    assert len(batches) == 2 and taken <= set(batches[0])
    with torch.no_grad():
        assert torch.isfinite(total_loss(model.eval()(**batches[1])))


class OddConfig(PretrainedConfig):
    """``dim`` has a name that is known, ``n_q`` has not: small sizes do not fit each other."""

    model_type = "odd_names"

    def __init__(self, dim: int = 48, n_q: int = 6, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dim, self.n_q = dim, n_q


class Odd(PreTrainedModel):
    """Has ``n_q`` heads of ``dim // n_q`` features."""

    config_class = OddConfig

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        assert config.dim % config.n_q == 0
        self.out = nn.Linear(config.dim, config.dim)
        self.post_init()


def test_a_class_whose_small_sizes_do_not_fit_is_named() -> None:
    assert build_small(Odd, OddConfig(n_q=8)).out.in_features == 32
    with pytest.raises(autopar.ConfigError, match="Odd cannot be built small: AssertionError"):
        build_small(Odd, OddConfig())


def test_what_cannot_be_run_says_what_was_tried() -> None:
    head = of_task("lxmert", None)
    assert head.kind is not None and head.config is not None
    with pytest.raises(autopar.ConfigError) as raised:
        make_batches(build_small(head.kind, head.config), count=1, rows=2, length=16)
    message = str(raised.value)
    assert "LxmertForPreTraining does not run with generated inputs: " in message
    assert "The inputs were input_ids [2, 16]" in message and "Pass batches=[...] to autopar.verify." in message


def test_terms_that_cancel_are_measured_by_their_size() -> None:
    output = {"last_hidden_state": torch.tensor([[1.0, 1.0, 1.0, 1.0]])}
    assert abs(total_loss(output).item()) < size_of_loss(output)
    assert size_of_loss({"loss": torch.tensor(2.0), **output}) == 0.0


class Coupled(torch.nn.Module):
    """Its logits take the mean of the batch away."""

    def __init__(self, coupled: bool) -> None:
        super().__init__()
        self.coupled = coupled

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": x - x.mean(0) if self.coupled else x + 1}


def test_samples_that_depend_on_each_other_are_found_out() -> None:
    batch = {"x": torch.randn(4, 3, generator=torch.Generator().manual_seed(0))}
    assert halves_agree(Coupled(False), batch) and not halves_agree(Coupled(True), batch)


def test_computed_dtypes_are_noted() -> None:
    with _Dtypes() as dtypes:
        (torch.ones(2, dtype=torch.float64).float() + 1).double()
    assert dtypes.found == {torch.float32, torch.float64}


def test_images_are_as_large_as_the_strides_of_a_convolutional_net():
    """Patches of 4 pixels, which three stages shrink by 8: two of them are left in each direction."""
    assert build_small(ConvNextModel, ConvNextConfig()).config.image_size == 64
