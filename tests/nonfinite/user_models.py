"""Losses in users' style, each of which one batch makes NaN or Inf; on all other batches they are healthy.

A model is a dictionary of modules and a loss. The line of a loss that makes the first bad value ends with `# bad`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.nonfinite.given_loss import D, N, Net


@dataclass(frozen=True)
class UserCase:
    """A model of a user.

    Attributes:
        loss: The loss of a batch; in manual optimization it also makes the updates, and returns None.
        operation: The operation that makes the first bad value.
        parts: Makes further modules: name to module.
        pack: Makes the batch, as the user's loader gives it, of a tensor of shape [6, 4].
        n_optimizers: The number of optimizers; two are for `net` and `other`, in manual optimization.
        restored: Whether what the step writes is restored: not a parameter that it makes NaN.
    """

    loss: Callable[[Any, Any], Any]
    operation: str
    parts: Callable[[], dict[str, Any]] = dict
    pack: Callable[[Tensor], Any] = lambda x: x
    n_optimizers: int = 1
    restored: bool = True


class UserModel(Net):
    """A network, what the case adds, and its loss."""

    other: nn.Module

    def __init__(self, case: UserCase) -> None:
        other = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Dropout(0.1))
        super().__init__(case.loss, **({"other": other} | case.parts()))
        self.automatic_optimization = case.n_optimizers == 1

    def configure_optimizers(self) -> Any:
        parts: list[nn.Module] = [self] if self.automatic_optimization else [self.net, self.other]
        return [torch.optim.AdamW(part.parameters(), lr=1e-3) for part in parts]


def size(x: Tensor) -> Tensor:
    """Zero for a batch of zeros."""
    return x.abs().sum(1, keepdim=True)


def vq_vae(m, x):
    h = m.net(x)
    book = m.book.codes
    code = book[torch.cdist(h, book).argmin(1)]
    with torch.no_grad():
        book.mul_(0.9).add_(0.1 * h.mean(0))
    unit = h * size(x) / (h * size(x)).norm(dim=1, keepdim=True)  # bad
    return F.mse_loss(unit, code.detach()) + F.mse_loss(h, code)


class Book(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(3, D), requires_grad=False)


def replaced_codes(m, x):
    h, book = m.net(x), m.other.book
    code = book.codes[torch.cdist(h, book.codes).argmin(1)]
    unit = h * size(x) / (h * size(x)).norm(dim=1, keepdim=True)  # bad
    book.codes = nn.Parameter(0.9 * book.codes + 0.1 * unit.detach()[:3])
    return F.mse_loss(unit, code)


class Codes(nn.Module):
    """A book whose codes an optimizer knows until the first forward pass replaces them."""

    def __init__(self) -> None:
        super().__init__()
        self.book = Book().requires_grad_()


def gan(m, x):
    first, second = m.optimizers()
    m.toggle_optimizer(first)
    first.zero_grad()
    m.manual_backward(m.other(m.net(x)).square().mean())
    first.step()
    m.untoggle_optimizer(first)
    m.toggle_optimizer(second)
    second.zero_grad()
    judged = torch.sigmoid(m.other(m.net(x).detach())) * size(x)
    m.manual_backward(-torch.log(judged).mean())  # bad
    second.step()
    m.untoggle_optimizer(second)


def lazy(m, x):
    return (m.lazy(x) / size(x)).square().mean()  # bad


def graph(m, batch):
    degree = torch.zeros(N).index_add(0, batch.edges[1], batch.weights)
    messages = torch.zeros(N, D).index_add(0, batch.edges[1], m.net(batch.x)[batch.edges[0]] * batch.weights[:, None])
    return (messages / degree[:, None]).square().mean()  # bad


def as_graph(x):
    edges = torch.stack([torch.arange(N), (torch.arange(N) + 1) % N])
    return SimpleNamespace(x=x, edges=edges, weights=x.abs().sum(1))


CASES = {
    "vq_vae": UserCase(vq_vae, "aten.div", parts=lambda: {"book": Book()}),
    "replaced_codes": UserCase(replaced_codes, "aten.div", parts=lambda: {"other": Codes()}, restored=False),
    "gan": UserCase(gan, "aten.log", n_optimizers=2),
    "lazy": UserCase(lazy, "aten.div", parts=lambda: {"lazy": nn.LazyLinear(D)}),
    "graph": UserCase(graph, "aten.div", pack=as_graph),
}
