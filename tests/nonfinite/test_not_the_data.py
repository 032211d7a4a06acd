"""Where the data is not to blame: masks that come too late, infinities that are meant, weights as bad operands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_memtools.nonfinite.bad_step import NonFiniteCause, NonFiniteError
from tests.nonfinite.given_loss import BAD, D, N, Net, bad_line, batches
from tests.nonfinite.observe import error_at_halt


def halted(model: Net, data: list[Any], root: Path, **options: Any) -> NonFiniteError:
    L.seed_everything(0, verbose=False)
    return error_at_halt(model, data, root, save_step=False, save_last_good=False, options=options)


# --- NaN in the batch that is meant, and masked too late


def where_afterwards(m, batch):
    distance = (m.net(batch["x"]) - batch["y"]).square()  # bad
    return torch.where(distance.isnan(), 0.0, distance).mean()


def selected_afterwards(m, batch):
    error = F.mse_loss(m.net(batch["x"]), batch["y"], reduction="none")  # bad
    return error[~error.isnan()].mean()


def times_a_mask(m, batch):
    seen = (~batch["y"].isnan()).float()
    return (seen * (m.net(batch["x"]) - batch["y"]).abs()).sum() / seen.sum()  # bad


def targets(index: int) -> Tensor:
    y = torch.ones(N, D)
    if index == BAD:
        y[1, 2:] = y[4, 0] = torch.nan
    return y


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 4}], ids=["", "accumulation"])
@pytest.mark.parametrize("loss", [where_afterwards, selected_afterwards, times_a_mask])
def test_a_mask_that_comes_too_late_is_named_and_no_sample_is_to_be_dropped(loss, options, tmp_path):
    error = halted(Net(loss), batches(y=targets), tmp_path, **options)
    assert (error.cause, error.batch_idx) == (NonFiniteCause.LATE_MASK, BAD)
    assert (error.explanation.file, error.explanation.line) == (__file__, bad_line(loss))
    assert error.explanation.samples == ()
    assert 'batch["y"] of batch 2 holds 3 NaN' in error.explanation.because
    assert "Select before you compute" in error.explanation.advice
    assert "drop" not in str(error)


def contrasted(m, batch):
    """After BatchNorm all rows are NaN, and in backward gradients of zeros meet them."""
    rows = F.normalize(F.batch_norm(m.net(batch["x"]), None, None, training=True), dim=1)
    return F.cross_entropy(rows @ rows.T, torch.arange(N))


def overlap(m, batch):
    """As a Dice loss has it: the sample has no foreground."""
    share, y = m.net(batch["x"]).sigmoid(), torch.ones(N, D)
    y[3] = 0.0
    return 1 - 2 * (share * y).sum() / (share + y).sum()


@pytest.mark.parametrize("loss", [contrasted, overlap])
def test_a_product_with_zeros_that_the_loss_does_not_rest_on_is_no_mask(loss, tmp_path):
    data = batches()
    data[BAD]["x"][3] = torch.nan
    error = halted(Net(loss), data, tmp_path)
    assert error.cause == NonFiniteCause.DIRTY_DATA
    assert "in sample 3" in error.explanation.because


def test_nan_that_no_mask_removes_is_dirty_beside_targets_that_are_missing_on_purpose(tmp_path):
    """Dropout multiplies by zeros too, and another tensor of the batch holds NaN by right."""

    def loss(m, batch):
        seen = ~batch["y"].isnan()
        return (m.net(F.dropout(batch["x"], 0.5))[seen] - batch["y"][seen]).square().mean()

    data = batches(y=targets)
    data[BAD]["x"][5, 1] = torch.nan
    L.seed_everything(1)
    error = error_at_halt(Net(loss), data, tmp_path)
    assert error.cause == NonFiniteCause.DIRTY_DATA
    assert error.explanation.because == 'batch["x"] of batch 2 holds 1 NaN in 24 elements, in sample 5.'
    assert error.explanation.samples == (5,)


# --- infinities that are meant


def biased_attention(m, batch):
    scores = m.net(batch["x"]) + batch["bias"]
    return torch.softmax(scores, 1).square().mean()  # bad


def attention_in_half(m, batch):
    weights = torch.softmax(m.net(batch["x"]) + batch["bias"].bfloat16().float(), 1)  # bad
    return (weights * batch["x"]).sum()


def entropy(m, batch):
    scores = torch.log_softmax(m.net(batch["x"]) + batch["bias"], 1)  # bad
    return (scores.exp() * scores.clamp(min=-9)).sum(1).mean()


def bias(index: int) -> Tensor:
    """ALiBi's slopes, and -inf at the last position; in the bad batch, sample 3 has nothing else."""
    made = -0.5 * torch.arange(D).float().repeat(N, 1)
    made[:, 3] = -torch.inf
    if index == BAD:
        made[3] = -torch.inf
    return made


@pytest.mark.parametrize("loss", [biased_attention, attention_in_half, entropy])
def test_only_the_sample_whose_mask_leaves_nothing_is_named(loss, tmp_path):
    error = halted(Net(loss), batches(bias=bias), tmp_path)
    assert error.cause == NonFiniteCause.DOMAIN
    assert error.explanation.line == bad_line(loss)
    assert error.explanation.samples == (3,)
    assert 'batch["bias"] of batch 2 holds -Inf in 9 of 24 elements, as masks do' in str(error)
    assert "repair" not in str(error)


def averaged(m, batch):
    return m.net(batch["x"] - batch["x"].mean()).square().mean()


@pytest.mark.parametrize("loss", [averaged, lambda m, batch: m.net(batch["x"]).square().mean()])
def test_minus_infinity_in_data_that_is_computed_with_is_dirty(loss, tmp_path):
    data = batches()
    data[BAD]["x"][1, 2] = -torch.inf
    error = halted(Net(loss), data, tmp_path)
    assert error.cause == NonFiniteCause.DIRTY_DATA
    assert error.explanation.what.startswith('The first bad value was in batch["x"]')


# --- operands that are weights


def cosine(m, batch):
    rows = m.classes / m.classes.norm(dim=1, keepdim=True)  # bad
    return (m.net(batch["x"]) @ rows.T).square().mean()


def standardized(m, batch):
    x = torch.cat([batch["x"][:, :1], 0 * batch["x"][:, 1:2], batch["x"][:, 2:]], 1)
    return m.net(x / m.std).square().mean()  # bad


def rows_with_zero() -> nn.Parameter:
    rows = torch.ones(3, D)
    rows[2] = 0
    return nn.Parameter(rows)


def std_with_zero() -> nn.Buffer:
    return nn.Buffer(torch.tensor([1.0, 0.0] + [1.0] * (D - 2)))


def ids(index: int) -> Tensor:
    return torch.tensor([1, 2, 0 if index == BAD else 1, 1, 2, 1])


@pytest.mark.parametrize(
    ("loss", "parts"), [(cosine, {"classes": rows_with_zero}), (standardized, {"std": std_with_zero})]
)
def test_where_a_weight_or_buffer_is_0_its_line_is_named_and_no_single_sample(loss, parts, tmp_path):
    error = halted(Net(loss, **{name: make() for name, make in parts.items()}), batches(), tmp_path)
    assert (error.cause, error.explanation.line) == (NonFiniteCause.DOMAIN, bad_line(loss))
    assert error.explanation.samples in {(), tuple(range(6))}, "all or none"
    assert "away from 0" in error.explanation.advice
    assert "drop" not in str(error)


def test_an_embedding_that_is_nan_is_named_and_not_the_samples_that_look_it_up(tmp_path):
    words = nn.Embedding(5, D)
    words.weight.data[0, 1] = torch.nan
    error = halted(Net(lambda m, batch: m.net(m.words(batch["ids"])).square().mean(), words=words),
                   batches(ids=ids), tmp_path)  # fmt: skip
    assert (error.cause, error.step) == (NonFiniteCause.BAD_PARAMETER, BAD)
    assert "words.weight (1 NaN of 20, 5%) was already NaN" in error.explanation.because
    assert (error.explanation.samples, error.explanation.confirmed) == ((), "")


def test_a_row_of_a_batch_of_graphs_is_not_called_a_sample(tmp_path):
    data = batches(energies=lambda _: torch.ones(2))
    data[BAD]["x"][1, 2] = torch.nan
    error = halted(Net(lambda m, batch: m.net(batch["x"]).square().mean()), data, tmp_path)
    assert "in row 1" in error.explanation.because
    assert error.explanation.samples == ()


def narrow(m: Any, batch: Any) -> Any:
    """One unit of the layer is 0, in all samples."""
    units = m.net(batch["x"]).square().mean(0) * torch.tensor([1.0, 1, 1, batch["last"]])
    return units.log().mean()


def test_a_unit_is_not_called_a_sample_where_there_are_as_many(tmp_path):
    data = [batch | {"x": batch["x"][:D]} for batch in batches(last=lambda index: float(index != BAD))]
    error = halted(Net(narrow), data, tmp_path)
    assert error.explanation.operation == "aten.log"
    assert error.explanation.samples == ()


def writes_a_number(m, batch):
    out = m.net(batch["x"]).clone()
    out[3] = torch.nan  # bad
    return out.mean()


def writes_where(m, batch):
    out = m.net(batch["x"]).clone()
    out[out > out.median()] = torch.nan  # bad
    return out.mean()


@pytest.mark.parametrize("loss", [writes_a_number, writes_where])
def test_nan_that_the_code_writes_into_a_tensor_is_the_codes(loss, tmp_path):
    error = halted(Net(loss), batches(), tmp_path)
    assert (error.cause, error.explanation.line) == (NonFiniteCause.DOMAIN, bad_line(loss))
    assert "the code itself writes it" in str(error)
