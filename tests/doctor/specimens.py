"""Broken models and their healthy neighbours, and the examination that all tests run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memtools.doctor.diagnosing import diagnose
from lightning_memtools.doctor.findings import Finding


def rows(n: int = 32, batch_size: int = 8, *, flat: bool = False, drop_last: bool = False) -> DataLoader[Any]:
    """Samples of four numbers, and their sum as a target of shape (N, 1) or (N,)."""
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(0))
    y = x.sum(1) if flat else x.sum(1, keepdim=True)
    return DataLoader(TensorDataset(x, y), batch_size, drop_last=drop_last)


def network(width: int = 8, *, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width) if norm else nn.Tanh(), nn.Linear(width, 1))


class HalfUsed(nn.Module):
    """Its second part takes part in the loss times zero, as is done so that DDP finds no unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = network(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Any:
        return self.used(x) + 0.0 * sum(p.sum() for p in self.unused.parameters() if p.requires_grad)


class ZeroesGradients(torch.optim.SGD):
    """zero_grad() as it was by default before PyTorch 2.0."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none=False)


def squared(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def found(
    model: nn.Module,
    loader: Any,
    step: Callable[[nn.Module, Any], Tensor] | None = squared,
    *,
    optimizer: Any = None,
    **options: Any,
) -> list[Finding]:
    """What diagnose finds, information included, with a plain SGD unless told otherwise."""
    if optimizer is None and step is not None:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    return list(diagnose(model, loader, optimizer, step=step, **({"steps": 8} | options)).findings)


def only(findings: list[Finding], check: str) -> Finding:
    """The single finding of a check, among findings of which no other is serious."""
    others = [finding for finding in findings if finding.is_serious and finding.check != check]
    assert not others, [str(other) for other in others]
    (one,) = [finding for finding in findings if finding.check == check]
    return one


def serious(findings: list[Finding]) -> list[str]:
    return [str(finding) for finding in findings if finding.is_serious]
