"""Broken models and their healthy neighbours, and the examination that all tests run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memtools import TrainingDoctor
from lightning_memtools.doctor.diagnosing import diagnose
from lightning_memtools.doctor.findings import Finding
from tests.lightning_models import Regression, trainer


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
    others = [finding for finding in findings if finding.severity != "info" and finding.check != check]
    assert not others, [str(other) for other in others]
    (one,) = [finding for finding in findings if finding.check == check]
    return one


def serious(findings: list[Finding]) -> list[str]:
    return [str(finding) for finding in findings if finding.severity != "info"]


def doctored(root: Any, model: Any, data: Any, **options: Any) -> list[Any]:
    doctor = TrainingDoctor(ignore="reproducibility")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callbacks = options.pop("callbacks", [])
        trainer(root, doctor, *callbacks, **({"logger": False, "max_epochs": 2} | options)).fit(model, data)
    return list(doctor.report.findings)


class Logs(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss


class Paced(Logs):
    def __init__(self, make: Callable[[Any], Any], **how: Any) -> None:
        super().__init__()
        self.make, self.how = make, how

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.make(optimizer), **self.how}}


LANGUAGE_MODELS = {
    "GPT2": "GPT2LMHeadModel",
    "Bert": "BertForMaskedLM",
    "Llama": "LlamaForCausalLM",
    "T5": "T5ForConditionalGeneration",
    "DistilBert": "DistilBertForMaskedLM",
    "Gemma2": "Gemma2ForCausalLM",
}


def language_model(kind: str, vocab_size: int = 64) -> Any:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=vocab_size, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, intermediate_size=48, tie_word_embeddings=True, decoder_start_token_id=0,
    )  # fmt: skip
    return getattr(transformers, LANGUAGE_MODELS[kind])(config)
