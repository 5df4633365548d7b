"""Whether a line adds up numbers that it reads, as its source says."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from autopar.distributed.summed_lines import adds_up

SUMS = {
    "a count": "n = sum(p.numel() for p in model.parameters())  #",
    "an extreme": "big = max([p.grad.abs().max().item() for p in model.parameters()])  #",
    "on one line": "n = sum(p.numel() for p in ps); optimizer = SGD(ps, lr=1 / n)  #",
    "in a condition": """
        if any(torch.isnan(p.grad).any() for p in model.parameters()):  #
            step = False
        """,
    "a loop": """
        total = 0.0
        for p in model.parameters():
            total += p.grad.norm().item() ** 2  #
        """,
    "over lines": """
        for p in model.parameters():
            self.total += float(
                p.grad.norm()  #
            )
        """,
    "of groups": """
        for group in optimizer.param_groups:
            for p in group["params"]:
                total += p.grad.norm().item()  #
        """,
    "of groups, at once": """
        for group in optimizer.param_groups:
            total += sum(p.grad.norm().item() for p in group["params"])  #
        """,
    "in each step": """
        for batch in loader:
            total = 0.0
            for p in model.parameters():
                total += p.grad.norm().item()  #
            norm = sum(p.numel() for p in model.parameters())
        """,
    "without +=": """
        for p in model.parameters():
            total = total + p.grad.norm().item() ** 2  #
        """,
    "the largest so far": """
        for p in model.parameters():
            largest = max(largest, p.grad.abs().max().item())  #
        """,
    "a list": """
        def norm(ps):
            norms = [p.grad.norm().item() for p in ps]  #
            return np.mean(norms)
        """,
    "a list that grows": """
        for p in model.parameters():
            norms.append(p.grad.norm().item())  #
        print(sum(norms) / len(norms))
        """,
    "a dict": """
        for name, p in model.named_parameters():
            norms[name] = p.grad.norm().item()  #
        print(max(norms.values()))
        """,
    "a flag": """
        for p in model.parameters():
            if not torch.isfinite(p.grad).all():  #
                bad = True
        """,
    "an end": """
        while True:
            for p in model.parameters():
                if p.grad.isnan().any():  #
                    break
        """,
}
OTHERS = {
    "one by one": """
        for p in model.parameters():
            norm = p.grad.norm().item()  #
            p.grad.mul_(min(1, 1 / norm))
        """,
    "a rate of each": "groups = [{'params': [p], 'lr': 1 / p.numel()} for p in model.parameters()]  #",
    "a condition of each": """
        for p in model.parameters():
            if p.grad.norm() > 1:  #
                p.grad.mul_(0.5)
        """,
    "a function of one": """
        def is_small(p):
            if p.norm() < 1:  #
                return True
            return False
        """,
    "by name": """
        for name, p in model.named_parameters():
            sums[name] += p.norm().item()  #
        """,
    "names that are only printed": """
        for name, p in model.named_parameters():
            norms[name] = p.norm().item()  #
        print(norms)
        """,
    "a list of another function": """
        def one(ps):
            norms = [p.norm().item() for p in ps]  #
            return norms

        def other(norms):
            return sum(norms)
        """,
    "places in a flat vector": """
        for p in model.parameters():
            start += p.numel()  #
            p.grad = flat[start - 1 : start]
        """,
    "of each layer": """
        for layer in model.layers:
            total = 0.0
            for p in layer.parameters():
                total += p.norm().item()  #
            print(total)
        """,
    "of each layer, at once": """
        for layer in model.layers:
            print(sum(p.norm().item() for p in layer.parameters()))  #
        """,
    "a limit": """
        for p in model.parameters():
            p.grad.mul_(min(1.0, 0.1 / p.grad.norm().item()))  #
        """,
    "one after the other, each by itself": """
        for p in model.parameters():
            both = 0.0
            both += p.norm().item() + p.grad.norm().item()  #
        """,
    "a constant": "scale = p.norm().item() + 1e-6  #",
    "no python": "n = sum(p.numel() for p in model.parameters()  #",
}


def _said(tmp_path: Path, text: str) -> bool:
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(text))
    line = next(n for n, each in enumerate(file.read_text().splitlines(), 1) if each.endswith("#"))
    return adds_up(str(file), line)


@pytest.mark.parametrize("name", SUMS)
def test_lines_that_add_up(tmp_path: Path, name: str) -> None:
    assert _said(tmp_path, SUMS[name])


@pytest.mark.parametrize("name", OTHERS)
def test_lines_that_do_not(tmp_path: Path, name: str) -> None:
    assert not _said(tmp_path, OTHERS[name])


def test_without_source() -> None:
    assert not adds_up("<stdin>", 1)
