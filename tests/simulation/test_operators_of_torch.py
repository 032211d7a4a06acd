"""Operators of torch's own list are traced, forward and backward, or named as not traced."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributions as D
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db

from lightning_memtools import estimate_memory
from lightning_memtools.memory.nested_tensors import tensors_in

WANTED = ("linalg.", "fft.", "special.", "nn.functional.ctc_loss", "cholesky", "lu", "svd", "qr", "pinverse",
          "matrix_exp", "logdet", "triangular_solve", "geqrf", "ormqr", "orgqr", "symeig")  # fmt: skip
OPERATORS = [one for one in op_db if one.name.startswith(WANTED) and torch.float32 in one.dtypes]
NOT_TRACED = {"linalg.lstsq", "linalg.lstsq grad_oriented"}


class Whole(nn.Module):
    """Has one parameter, which is added to the first input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))


def traced(operator: Any) -> str:
    """Return "" where the operator's first sample is traced, and else the error."""
    sample = next(iter(operator.sample_inputs("cpu", torch.float32, requires_grad=False)))

    def step(model: Whole, batch: Any) -> Tensor:
        first, *others = batch
        first = [one + model.weight for one in first] if isinstance(first, list | tuple) else first + model.weight
        with torch.set_grad_enabled(operator.supports_autograd):
            out = operator.op(first, *others, **sample.kwargs)
        found = [one.abs().sum() for one in tensors_in(out) if one.is_floating_point() or one.is_complex()]
        return sum(found) + model.weight

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            estimate_memory(Whole(), [sample.input, *sample.args], step=step, optimizer=torch.optim.SGD)
    except Exception as error:  # noqa: BLE001, whatever it is
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


@pytest.mark.filterwarnings("ignore")
def test_every_operator_of_linear_algebra_fourier_transforms_and_special_functions_is_traced_or_named():
    assert len(OPERATORS) > 100
    failed = {f"{one.name} {one.variant_test_name}".strip(): why for one in OPERATORS if (why := traced(one))}
    assert failed.keys() == NOT_TRACED
    for why in failed.values():
        assert "aten.linalg_lstsq.default At" in why
        assert "an operator has no kernel for tensors without values" in why


EYE = torch.eye(4)
DISTRIBUTIONS: dict[str, Any] = {
    "MultivariateNormal": lambda one: D.MultivariateNormal(torch.zeros(4) + one, EYE + one),
    "Gamma": lambda one: D.Gamma(torch.ones(4) + one, torch.ones(4)),
    "VonMises": lambda one: D.VonMises(torch.zeros(4) + one, torch.ones(4)),
    "Wishart": lambda one: D.Wishart(torch.tensor(5.0), EYE + one),
    "LKJCholesky": lambda one: D.LKJCholesky(4, torch.ones(()) + one),
    "MixtureSameFamily": lambda one: D.MixtureSameFamily(
        D.Categorical(logits=torch.zeros(4) + one), D.Normal(torch.zeros(4), torch.ones(4))
    ),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_log_probability_of_a_sample_is_traced(name):
    def step(model, batch):
        made = DISTRIBUTIONS[name](model.weight * batch.mean())
        return made.log_prob(made.sample()).sum() + model.weight

    assert estimate_memory(Whole(), torch.ones(3), step=step, optimizer=torch.optim.SGD).peak_allocated > 0
