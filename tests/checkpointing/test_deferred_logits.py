"""Logits that are not computed behave as those that are: bit for bit where they are read, else as their loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_memtools.checkpointing.apply_plan import AppliedPlan
from lightning_memtools.checkpointing.deferred_logits import DeferredLogits
from lightning_memtools.checkpointing.loss_head import LossHeadWarning

BATCH, LENGTH, WIDTH, CLASSES = 4, 160, 8, 1030


class Ends(nn.Module):
    """A linear layer and what follows it."""

    def __init__(self, then: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.then = then

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.then(self.head(self.body(x)), labels)
        return loss


def given() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (BATCH, LENGTH), generator=generator)
    labels[:, ::7] = -100
    return torch.randn(BATCH, LENGTH, WIDTH, generator=generator), labels


def loss_and_gradients(then: Any, *, deferred: bool) -> tuple[Tensor, list[Tensor], Any]:
    model = Ends(then)
    with AppliedPlan(model, (), heads=["head"] if deferred else ()) as applied:
        loss = model(*given())
        loss.backward()
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    return loss.detach(), gradients, applied.heads.get("head")


def flat(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    logits = logits.float()[..., :-1, :].contiguous()
    loss: Tensor = nn.CrossEntropyLoss()(logits.view(-1, logits.size(-1)), labels[..., 1:].reshape(-1))
    return loss


def masked(logits: Tensor, labels: Tensor) -> Tensor:
    mask = labels != -100
    return F.cross_entropy(logits[mask], labels[mask], label_smoothing=0.1)


def averaged_by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    mask = (labels != -100).float()
    return (losses * mask).sum() / mask.sum()


CHUNKED = {
    "flat": flat,
    "shifted": shifted,
    "masked": masked,
    "averaged by hand": averaged_by_hand,
    "classes second": lambda logits, labels: F.cross_entropy(logits.transpose(1, 2), labels),
    "classes second, permuted": lambda logits, labels: F.cross_entropy(logits.permute(0, 2, 1), labels),
    "of each place": lambda logits, labels: F.cross_entropy(logits.movedim(-1, 1), labels, reduction="none").sum(),
    "one row": lambda logits, labels: F.cross_entropy(logits[0, 1], labels[0, 1]),
    "last place": lambda logits, labels: F.cross_entropy(logits[:, -2], labels[:, -2]),
    "other type": lambda logits, labels: flat(logits.to(torch.float64), labels),
    "capped": lambda logits, labels: flat(torch.tanh(logits / 3) * 3, labels),
    "two losses": lambda logits, labels: flat(logits, labels) + 0.5 * shifted(logits, labels),
    "weights": lambda logits, labels: F.cross_entropy(
        logits.reshape(-1, CLASSES), labels.reshape(-1), weight=torch.linspace(0.1, 1, CLASSES), ignore_index=-100
    ),
    "no row": lambda logits, labels: F.cross_entropy(logits[labels == -1], labels[labels == -1]),
    "no row, sum": lambda logits, labels: F.cross_entropy(logits[labels == -1], labels[labels == -1], reduction="sum"),
}


@pytest.mark.parametrize("name", CHUNKED)
def test_cross_entropy_takes_them_in_chunks(name):
    loss, gradients, head = loss_and_gradients(CHUNKED[name], deferred=True)
    plain, others, _ = loss_and_gradients(CHUNKED[name], deferred=False)
    assert head.n_losses >= 1
    assert not head.read_by
    assert not head.is_off
    torch.testing.assert_close(loss, plain, equal_nan=True)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)


def in_place(logits: Tensor, labels: Tensor) -> Tensor:
    logits.div_(2.0)
    return flat(logits, labels)


def in_place_after_a_view(logits: Tensor, labels: Tensor) -> Tensor:
    rows = logits.view(-1, CLASSES)
    logits[:, :, 3] = -1.0
    return F.cross_entropy(rows, labels.view(-1))


class _Own(torch.autograd.Function):
    """A loss as other libraries write it, with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits * 2)
        return logits.square().sum()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        return ctx.saved_tensors[0] * upstream[0]


READ = {
    "squared": lambda logits, labels: logits.square().mean(),
    "accuracy": lambda logits, labels: flat(logits, labels) + (logits.argmax(-1) == labels).float().mean(),
    "accuracy first": lambda logits, labels: (
        (logits.detach().argmax(-1) == labels).float().mean() + flat(logits, labels)
    ),
    "probabilities": lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), torch.full((640, CLASSES), 0.001)),
    "logits as target": lambda logits, labels: F.cross_entropy(torch.zeros(640, CLASSES), logits.flatten(0, 1)),
    "fewer classes": lambda logits, labels: F.cross_entropy(logits[..., :1000].flatten(0, 1), labels.flatten() % 1000),
    "joined": lambda logits, labels: F.cross_entropy(
        torch.cat([logits, logits]).flatten(0, 1), labels.repeat(2, 1).flatten()
    ),
    "in place": in_place,
    "in place after a view": in_place_after_a_view,
    "old reduction": lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduce=False).sum(),
    "own gradient": lambda logits, labels: _Own.apply(logits),
    "own gradient of a view": lambda logits, labels: _Own.apply(logits[:, 1:].float()),
    "classes among places": lambda logits, labels: logits.transpose(1, 2).flatten(1).logsumexp(1).sum(),
}


@pytest.mark.filterwarnings("ignore:size_average and reduce")
@pytest.mark.parametrize("name", READ)
def test_whatever_else_takes_them_is_given_the_real_ones_bit_for_bit(name):
    loss, gradients, head = loss_and_gradients(READ[name], deferred=True)
    plain, others, _ = loss_and_gradients(READ[name], deferred=False)
    assert head.read_by
    assert head.is_off
    assert "test_deferred_logits.py:" in head.read_by
    if name == "accuracy":  # its loss was computed before they were read
        torch.testing.assert_close(loss, plain)
        return
    assert torch.equal(loss, plain)
    assert all(torch.equal(one, other) for one, other in zip(gradients, others, strict=True))


def test_they_can_be_asked_for_their_shape():
    def then(logits: Tensor, labels: Tensor) -> Tensor:
        assert isinstance(logits, DeferredLogits)
        assert (logits.shape, logits.ndim, logits.dtype) == ((BATCH, LENGTH, CLASSES), 3, torch.float32)
        assert (len(logits), logits.size(-1), logits.numel()) == (BATCH, CLASSES, BATCH * LENGTH * CLASSES)
        assert logits.requires_grad
        assert logits.device == labels.device
        assert logits.view(-1, CLASSES).shape == (BATCH * LENGTH, CLASSES)
        return flat(logits, labels)

    assert loss_and_gradients(then, deferred=True)[2].read_by == ""


@pytest.mark.parametrize(("first", "reduction", "words"), [(1, "mean", "batch_size"), (0, "avg", "avg is not a valid")])
def test_what_torch_refuses_is_refused_in_its_words(first, reduction, words):
    model = Ends(
        lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten()[first:], reduction=reduction)
    )
    with pytest.raises(ValueError, match=words) as plain:
        model(*given())
    with AppliedPlan(model, (), heads=["head"]), pytest.raises(ValueError, match=words) as error:
        model(*given())
    assert str(error.value) == str(plain.value)


def test_read_after_the_weights_have_changed_they_raise():
    model = Ends(lambda logits, labels: (flat(logits, labels), logits))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with AppliedPlan(model, (), heads=["head"]):
        loss, logits = model(*given())
        loss.backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="weights that make them have changed"):
            logits.argmax(-1)


def test_read_in_a_later_step_the_layer_warns_and_runs_as_usual():
    model = Ends(flat)
    with AppliedPlan(model, (), heads=["head"], prove=True) as applied:
        model(*given()).backward()
        model.then = READ["accuracy"]
        with pytest.warns(LossHeadWarning, match=r"`argmax` at .*test_deferred_logits.py:\d+ reads its logits"):
            model(*given()).backward()
        model.then = lambda logits, labels: logits
        assert type(model(*given())) is Tensor
        assert applied.heads["head"].is_off


def test_in_evaluation_and_without_gradients_the_layer_runs_as_usual():
    model = Ends(lambda logits, labels: logits)
    with AppliedPlan(model, (), heads=["head"]):
        with torch.no_grad():
            assert type(model(*given())) is Tensor
        assert type(model.eval()(*given())) is Tensor
    assert "forward" not in vars(model.head)


def test_a_frozen_layer_on_an_input_without_a_gradient():
    model = Ends(flat).requires_grad_(requires_grad=False)
    plain = model(*given())
    with AppliedPlan(model, (), heads=["head"], prove=True) as applied:
        torch.testing.assert_close(model(*given()), plain)
    assert not applied.heads["head"].is_off


@pytest.mark.parametrize("look", [lambda logits: logits.type(), lambda logits: logits.view(torch.int32).dtype])
def test_types_are_those_of_the_real_logits(look):
    model, seen = Ends(lambda logits, labels: logits), []
    for heads in ((), ("head",)):
        with AppliedPlan(model, (), heads=heads):
            seen.append(look(model(*given())))
    assert seen[0] == seen[1]
