"""Training techniques that read shards as if they were whole, as users write them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn.utils import prune

IDS = torch.arange(12).view(2, 6)


def first_rows(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight[:10] = 0


def head(model: Any) -> nn.Parameter:
    return model.lm_head.weight


def of_gradients(model: Any) -> None:
    loss = model(IDS, labels=IDS).loss
    sum(g.square().sum() for g in torch.autograd.grad(loss, list(model.parameters()), create_graph=True))


def hook_of_gradients(model: Any) -> None:
    handles = [p.register_hook(lambda grad: grad / grad.norm()) for p in model.parameters()]
    model(IDS, labels=IDS).loss.backward()
    for handle in handles:
        handle.remove()


def saved_by_hand(model: Any) -> None:
    torch.save({name: tensor.cpu() for name, tensor in model.state_dict().items()}, io.BytesIO())


def hook_of_a_layer(model: Any) -> None:
    norms = []
    layer = model.model.layers[0].mlp.up_proj
    handle = layer.register_forward_hook(lambda layer, args, out: norms.append(layer.weight.norm()))
    model(IDS, labels=IDS)
    with torch.no_grad():
        model(IDS, labels=IDS)
    handle.remove()


def rows(model: Any) -> int:
    return len(model.lm_head.weight)


NOTICED: dict[str, Callable[[Any], Any]] = {
    "saved by hand": saved_by_hand,
    "a saved layer": lambda model: torch.save(model.lm_head.state_dict(), io.BytesIO()),
    "hook of a layer": hook_of_a_layer,
    "rows": rows,
    "width": lambda model: head(model).size(0) ** -0.5,
    "count": lambda model: sum(p.numel() for p in model.parameters()),
    "pull": lambda model: sum(F.mse_loss(p, torch.zeros_like(p)) for p in model.parameters()),
    "finite": lambda model: all(torch.isfinite(p.grad).all() for p in model.parameters()),
    "numpy": lambda model: [p.detach().cpu().numpy().mean() for p in model.parameters()],
    "list": lambda model: max(map(max, head(model).grad.tolist())),
    "copied gradients": lambda model: [copy.deepcopy(p.grad).norm() for p in model.parameters()],
    "foreach": lambda model: [x.sum() for x in torch._foreach_mul([p.grad for p in model.parameters()], 2.0)],
    "pieces": lambda model: [piece.norm() for piece in head(model).chunk(2, dim=1)],
    "stacked": lambda model: torch.stack([head(model), head(model).grad]).norm(),
    "drawn in place": lambda model: torch.empty_like(head(model)).normal_(),
    "norm": lambda model: head(model).norm(),
    "linalg norm": lambda model: torch.linalg.vector_norm(head(model).grad),
    "squares": lambda model: sum((p.grad**2).sum() for p in model.parameters()),
    "norms": lambda model: torch._foreach_norm([p.grad for p in model.parameters()]),
    "gradients": of_gradients,
    "hook of gradients": hook_of_gradients,
    "copy": lambda model: head(model).detach().clone().norm(),
    "quantile": lambda model: head(model).detach().abs().flatten().quantile(0.3),
    "top k": lambda model: head(model).abs().view(-1).topk(3),
    "torch's pruning": lambda model: prune.L1Unstructured(0.3).compute_mask(head(model), torch.ones(head(model).shape)),
    "svd": lambda model: torch.linalg.svd(head(model)),
    "spectral": lambda model: (head(model).T @ head(model) - torch.eye(24)).square().sum(),
    "logits": lambda model: torch.ones(2, 24) @ head(model).T,
    "linear": lambda model: F.linear(torch.ones(2, 24), head(model)),
    "einsum": lambda model: torch.einsum("bi,oi->bo", torch.ones(2, 24), head(model)),
    "rows of ids": lambda model: F.embedding(IDS, model.model.embed_tokens.weight),
    "row": lambda model: head(model)[5],
    "edit": first_rows,
    "init": lambda model: nn.init.normal_(head(model), std=0.02),
    "orthogonal": lambda model: nn.init.orthogonal_(head(model)),
    "xavier": lambda model: nn.init.xavier_uniform_(head(model)),
    "prior": lambda model: -Normal(0.0, 1.0).log_prob(head(model)).sum(),
    "kl": lambda model: kl_divergence(*(Normal(head(model), std) for std in (1.0, 2.0))).sum(),
    "draw": lambda model: head(model).data.normal_(),
    "noise": lambda model: head(model).grad.add_(torch.randn_like(head(model).grad)),
    "flattened": lambda model: torch.cat([p.detach().flatten() for p in model.parameters()]),
    "vector": lambda model: nn.utils.parameters_to_vector(model.parameters()),
    "mean": lambda model: head(model).mean().item(),
    "std": lambda model: head(model).float().std().item(),
    "largest": lambda model: head(model).grad.abs().max().item(),
    "sparsity": lambda model: (head(model) == 0).sum(),
}
