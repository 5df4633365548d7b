"""The policy of a large model, from a small one of its class: how features meet does not depend on how many they are.

Following each feature of a model of billions takes minutes. So the policy is derived from the class with a config of
small sizes, and tried on the model itself in a dry run, which takes a second. The kind of its own loss is measured: the
losses of samples beside that of their batch.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from autopar.distributed.rng import kept
from autopar.dry_run.tensor_parallel import check_plan
from autopar.errors import AutoparError
from autopar.pipeline_parallel.losses import OwnLoss, loss_in
from autopar.pipeline_parallel.microbatch import batch_size, split, weights_of
from autopar.plan.make_plan import make_plan
from autopar.policy.load import read_user_policy
from autopar.policy.match import loss_kind
from autopar.tools.derivation.derive import derive
from autopar.tools.verification.batches import make_batches
from autopar.tools.verification.small_models import LARGE, build_small

_SAMPLES, _TOKENS, _SEEN = 3, 10, 1e-6  # of a batch whose loss is measured; the difference that is one


def derived_tree(model: PreTrainedModel) -> dict[str, Any]:
    """Return the derived policy of a model as plain data. The model is only read.

    Raises:
        UnsupportedModelError: as :func:`~autopar.tools.derivation.derive.derive`.
    """
    tree = None
    if sum(parameter.numel() for parameter in model.parameters()) >= LARGE:
        try:
            with kept():
                tree = derive(build_small(type(model), model.config)).tree
            check_plan(model, "", make_plan(model, read_user_policy(tree), 2))
        except AutoparError:  # it cannot be small, or is another one then
            tree = None
    tree, losses = tree or derive(model).tree, losses_of(model)
    return {**tree, "loss": losses} if losses else tree


def losses_of(model: PreTrainedModel) -> dict[str, str]:
    """Return what a policy of the model says under ``loss``: nothing where its class is known.

    A small random model of its class is measured.
    """
    if loss_kind(model) is not None:
        return {}
    try:
        with kept():
            found = measured_kind(build_small(type(model), model.config))
    except AutoparError:  # it cannot be small
        return {}
    return {} if found is None else {type(model).__name__: found}


def measured_kind(model: PreTrainedModel) -> str | None:
    """Return one of :data:`~autopar.policy.schema.LOSSES`; None if the model has no loss, or no inputs are known.

    A copy in fp64 is measured, so that samples whose losses are nearly the same still tell how they are weighed.
    """
    with kept(), torch.no_grad():
        try:
            (batch,) = make_batches(model, count=1, rows=_SAMPLES, length=_TOKENS)
            labels = batch["labels"]
            if labels.ndim == 2 and not labels.is_floating_point():
                counted = labels[:1].index_fill(1, torch.arange(2, labels.shape[1]), -100)
                batch["labels"] = torch.cat([counted, labels[1:]])
            floats = {name: x.double() for name, x in batch.items() if torch.is_tensor(x) and x.is_floating_point()}
            return _measured(copy.deepcopy(model).eval().double(), batch | floats)
        except Exception:  # it takes no labels, or its code fails with fp64 or a single sample
            return None


def _measured(model: Any, batch: dict[str, Any]) -> str | None:
    def loss(inputs: dict[str, Any], **more: Any) -> torch.Tensor | None:
        copied = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
        found: torch.Tensor | None = loss_in(model(**copied, **more))
        return found

    whole, main_input = loss(batch), getattr(model, "main_input_name", "")
    if whole is None:
        return None
    samples = split(batch, batch_size(batch, main_input), 1, None, model.config)
    alone = [loss(sample) for sample in samples]

    def close(found: torch.Tensor) -> bool:
        return torch.allclose(found.double(), whole.double(), rtol=_SEEN, atol=_SEEN)

    def adds_up(shifted: bool) -> bool:
        weights = weights_of(samples, main_input, "tokens", shifted)
        counted = [each * weight for each, weight in zip(alone, weights, strict=True) if weight and each is not None]
        return close(torch.stack(counted).sum())

    plainly, shifted = adds_up(False), adds_up(True)
    if plainly and shifted and batch["labels"].ndim > 1:
        return None  # the losses of all samples are the same
    if not plainly and not shifted:
        return "other"
    shifted = not plainly
    counted = batch["labels"][..., 1:] if shifted else batch["labels"]
    try:
        halved = loss(batch, num_items_in_batch=2 * (counted != -100).sum())
    except TypeError:  # its forward takes no such argument
        halved = None
    if halved is None or not close(2 * halved):
        return "shifted_mean" if shifted else "mean"
    return "loss_function" if OwnLoss(model, "loss_function").shifted is shifted else "other"
