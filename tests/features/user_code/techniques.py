"""Training techniques that read shards as if they were whole, as users write them."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn.utils import prune

import autopar

IDS = torch.arange(12).view(2, 6)


@contextmanager
def silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", autopar.ShardWarning)
        yield


def told(technique: Callable[[Any], Any], model: Any) -> list[str]:
    """Texts of the warnings of a technique that is used twice; they name lines of the tests."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            technique(model)
    shard_warnings = [each for each in found if issubclass(each.category, autopar.ShardWarning)]
    assert all(Path(each.filename).parent == Path(__file__).parent for each in shard_warnings)
    return [str(each.message) for each in shard_warnings]


def sam(model: Any) -> None:
    norm = sum(p.grad.pow(2).sum() for p in model.parameters()) ** 0.5
    for p in model.parameters():
        p.data.add_(0.05 * p.grad / norm)


def adaptive_clipping(model: Any) -> None:
    for p in model.parameters():
        norm, due = p.grad.norm(dim=-1, keepdim=True), 0.01 * p.detach().norm(dim=-1, keepdim=True).clamp(min=1e-3)
        p.grad.mul_((due / norm.clamp(min=1e-6)).clamp(max=1.0))


def own_clipping(model: Any) -> None:
    norms = [p.grad.data.norm(2) for p in model.parameters() if p.grad is not None]
    total = torch.stack(norms).norm()
    for p in model.parameters():
        p.grad.mul_((1.0 / total).clamp(max=1.0))


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


def clip(p: Any) -> None:
    p.grad.mul_((1.0 / p.grad.norm()).clamp(max=1.0))


def hook_behind_gradients(model: Any) -> None:
    handles = [p.register_post_accumulate_grad_hook(clip) for p in model.parameters()]
    model(IDS, labels=IDS).loss.backward()
    for handle in handles:
        handle.remove()


def own_lamb(model: Any) -> None:
    for p in model.parameters():
        first, second = torch.zeros_like(p), torch.zeros_like(p)
        first.mul_(0.9).add_(p.grad, alpha=0.1)
        second.mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
        update = first / (second.sqrt() + 1e-3)
        p.data.add_(update / update.norm(), alpha=-0.01)


def fisher(model: Any) -> list[torch.Tensor]:
    squares = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        squares[name] += p.grad**2
    return [square.mean() for square in squares.values()]


def flat_gradients(model: Any) -> None:
    flat, start = torch.zeros(20_000), 0
    for p in model.parameters():
        part = p.grad.view(-1)
        flat[start : start + part.shape[0]] = part
        start += part.shape[0]


def trimmed_task_vector(model: Any) -> None:
    """TIES of a state dict."""
    start = copy.deepcopy(model.state_dict())
    for name, tensor in model.state_dict().items():
        vector = tensor - start[name]
        vector.abs().flatten().kthvalue(max(1, int(0.8 * len(vector))))


NOTICED: dict[str, Callable[[Any], Any]] = {
    "own LAMB": own_lamb,
    "Fisher": fisher,
    "flat": flat_gradients,
    "TIES": trimmed_task_vector,
    "saved by hand": lambda model: torch.save({n: x.cpu() for n, x in model.state_dict().items()}, io.BytesIO()),
    "pickled": lambda model: pickle.dumps(head(model).detach()),
    "a saved layer": lambda model: torch.save(model.lm_head.state_dict(), io.BytesIO()),
    "rows": lambda model: len(model.lm_head.weight),
    "width": lambda model: head(model).size(0) ** -0.5,
    "count": lambda model: sum(p.numel() for p in model.parameters()),
    "pull": lambda model: sum(F.mse_loss(p, torch.zeros_like(p)) for p in model.parameters()),
    "finite": lambda model: all(torch.isfinite(p.grad).all() for p in model.parameters()),
    "numpy": lambda model: [p.detach().cpu().numpy().mean() for p in model.parameters()],
    "list": lambda model: max(map(max, head(model).grad.tolist())),
    "copied gradients": lambda model: [copy.deepcopy(p.grad).norm() for p in model.parameters()],
    "pieces": lambda model: [piece.norm() for piece in head(model).chunk(2, dim=1)],
    "drawn in place": lambda model: torch.empty_like(head(model)).normal_(),
    "norm": lambda model: head(model).norm(),
    "linalg norm": lambda model: torch.linalg.vector_norm(head(model).grad),
    "squares": lambda model: sum((p.grad**2).sum() for p in model.parameters()),
    "norms": lambda model: torch._foreach_norm([p.grad for p in model.parameters()]),
    "own clipping": own_clipping,
    "gradients": of_gradients,
    "hook of gradients": hook_of_gradients,
    "hook behind gradients": hook_behind_gradients,
    "sharpness": sam,
    "copy": lambda model: head(model).detach().clone().norm(),
    "adaptive clipping": adaptive_clipping,
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
