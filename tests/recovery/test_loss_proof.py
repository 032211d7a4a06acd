"""A loss that cannot be split by numbers of samples is found out from the gradients of a few samples."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memtools.recovery.loss_proof import without_randomness
from tests.callbacks.recovery_runs import StepResult, Steps


class Tokens(nn.Module):
    """Predicts tokens; the loss is a mean over those that are there."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embedding, self.head, self.dropout = nn.Embedding(50, 16), nn.Linear(16, 50), dropout

    def forward(self, batch):
        hidden = F.dropout(self.embedding(batch["ids"]), self.dropout, self.training)
        return F.cross_entropy(self.head(torch.tanh(hidden)).flatten(0, 1), batch["labels"].flatten())


def texts(*lengths):
    ids, labels = torch.randint(1, 50, (2, len(lengths), 20))
    for row, length in enumerate(lengths):
        ids[row, length:], labels[row, length:] = 0, -100
    return {"ids": ids, "labels": labels}


def tokens_in(batch):
    return (batch["labels"] != -100).sum()


def run_of(model, **options):
    return Steps(model, lambda batch: len(batch["ids"]), 5, **options)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


EVEN, UNEVEN, ONE_SHORTER = (20,) * 8, (20, 20, 20, 20, 3, 3, 3, 3), (*(20,) * 7, 19)


@pytest.mark.parametrize("lengths", [UNEVEN, UNEVEN[::-1], ONE_SHORTER])
def test_a_mean_over_tokens_is_refused_with_the_numbers_and_the_way_out(lengths):
    run = run_of(Tokens())
    with pytest.raises(torch.OutOfMemoryError, match=r"in parts: the losses of 2 and 2") as caught:
        run.step(texts(*lengths))
    assert "give loss_weight=" in str(caught.value)
    if lengths is ONE_SHORTER:  # losses of an untrained model are all alike, and tell nothing
        assert re.search(r"from the mean of theirs by \d\.\d%", str(caught.value))
    assert run.told == []  # a run that has memory enough is not tried
    assert all(parameter.grad is None for parameter in run.model.parameters())


@pytest.mark.parametrize("lengths", [UNEVEN, ONE_SHORTER, (*(20,) * 7, 0)])
def test_with_a_function_that_counts_tokens_the_gradients_are_those_of_the_whole_batch(lengths):
    run = run_of(Tokens(), loss_weight=tokens_in)
    assert run.step(texts(*lengths)) < 1e-5
    assert run.told == []


def test_each_batch_is_tried_though_an_earlier_one_had_equally_many_tokens_in_all_samples():
    run = run_of(Tokens())
    assert run.step(texts(*EVEN)) < 1e-5
    assert run.told == []
    with pytest.raises(torch.OutOfMemoryError, match="did not run this step"):
        run.step(texts(*UNEVEN))  # it is split from the beginning


def test_without_the_trial_the_gradients_would_be_wrong():
    assert run_of(Tokens(), loss="mean").step(texts(*UNEVEN)) > 0.5


def test_dropout_that_is_no_module_is_switched_off_for_the_trial_and_on_again():
    run = run_of(Tokens(dropout=0.5))
    assert run.step(texts(*EVEN)) > 0.1  # the parts draw other masks than the whole batch
    assert run.told == []
    assert all(module.training for module in run.model.modules())


def test_where_the_loss_is_random_that_is_said_and_a_given_one_is_taken():
    class Noisy(Tokens):
        def forward(self, batch):
            return super().forward(batch) * torch.rand(())

    run = run_of(Noisy())
    with pytest.raises(torch.OutOfMemoryError, match="random numbers, and not for dropout alone"):
        run.step(texts(*EVEN))
    given = run_of(Noisy(), loss="mean")
    given.step(texts(*EVEN))
    assert given.recovery.recoveries.n_recovered == 1
    assert given.told == []


def test_a_weight_that_is_no_number_of_anything_is_quoted():
    for weight in (-1.0, float("nan")):
        with pytest.raises(
            torch.OutOfMemoryError, match=rf"loss_weight gave \[{weight}, {weight}\] for parts of \[4, 4\]"
        ):
            run_of(Tokens(), loss="mean", loss_weight=lambda _, weight=weight: weight).step(texts(*EVEN))
    run = run_of(Tokens(), loss="mean", loss_weight=lambda batch: batch["mask"].sum())
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run.step(texts(*EVEN))
    assert run.told == ["loss_weight raised KeyError: 'mask'"]
    assert run.told[0] in caught.value.__notes__[0]


def test_single_samples_are_run_where_an_earlier_batch_has_shown_the_loss():
    run = run_of(Tokens())
    run.step(texts(*EVEN))
    run.fits = 1
    assert run.step(texts(*EVEN)) < 1e-5
    unknown = run_of(Tokens())
    unknown.fits = 1
    with pytest.raises(torch.OutOfMemoryError, match="two samples together do not fit"):
        unknown.step(texts(*EVEN))


def test_a_step_that_fits_is_run_once():
    run, sizes = run_of(Tokens()), []

    def forward(batch):
        sizes.append(len(batch["ids"]))
        return StepResult(run.model(batch))

    run.forward = forward
    assert run.step(texts(*UNEVEN)) == 0
    assert sizes == [8]
    assert run.told == []


def test_a_rare_class_with_a_weight_of_its_own_is_among_the_samples_that_are_tried():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 2)

        def forward(self, batch):
            return F.cross_entropy(self.head(batch["ids"]), batch["labels"], torch.tensor([1.0, 50.0]))

    labels = torch.zeros(16, dtype=torch.long)
    labels[5] = 1
    with pytest.raises(torch.OutOfMemoryError, match="differs from the mean"):
        run_of(Weighted()).step({"ids": torch.randn(16, 4), "labels": labels})


def test_losses_without_gradients_on_the_samples_prove_nothing():
    class Hinge(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, batch):
            return (torch.relu(batch["ids"] - 10) * self.scale).mean()

    with pytest.raises(torch.OutOfMemoryError, match="of its samples are 0"):
        run_of(Hinge()).step({"ids": torch.zeros(8, 1)})


def test_a_loss_in_training_alone_is_not_left_out_of_the_trial():
    class Balanced(Tokens):
        def forward(self, batch):
            hidden = torch.tanh(self.embedding(batch["ids"])).mean((0, 1))
            return super().forward(batch) + (10 * hidden.square().sum() if self.training else 0)

    with pytest.raises(torch.OutOfMemoryError, match="did not run this step in parts"):
        run_of(Balanced()).step(texts(*EVEN))


def test_a_step_may_take_gradients_itself():
    class Forces(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1, bias=False))

        def forward(self, batch):
            places = batch["ids"].requires_grad_()
            (forces,) = torch.autograd.grad(self.net(places).sum(), places, create_graph=True)
            return (forces - 1).square().mean() + self.net(places).square().mean()

    run = run_of(Forces())
    batch = {"ids": torch.randn(8, 3)}
    parameters = list(run.model.parameters())
    right = torch.autograd.grad(run.model(batch), parameters, allow_unused=True)
    run.run(batch)
    assert run.recovery.recoveries.n_recovered == 1
    for parameter, gradient in zip(parameters, right, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


class Recurrent(Tokens):
    """Has dropout between the layers of an LSTM, and dropout that is no module."""

    def __init__(self):
        super().__init__(dropout=0.5)
        self.lstm = nn.LSTM(16, 16, 2, dropout=0.5, batch_first=True)
        self.seen = []

    def forward(self, batch):
        self.seen.append((len(batch["ids"]), self.training, self.lstm.training, self.lstm.dropout))
        hidden, _ = self.lstm(F.dropout(self.embedding(batch["ids"]), self.dropout, self.training))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), batch["labels"].flatten())


def test_recurrent_layers_stay_in_training_without_their_dropout_while_the_loss_is_tried():
    model = Recurrent()
    run = run_of(model)
    run.step(texts(*EVEN))
    assert run.recovery.recoveries.n_recovered == 1
    whole_step = model.seen.pop()  # of the comparison with the whole batch
    failed, *tried, one, other = model.seen
    assert failed == whole_step
    assert [size for size, *_ in tried] == [2, 2, 4, 4, 2, 2] * 2
    # With dropout that is no module it had to be asked again.
    assert [rest for _, *rest in tried] == [[True, True, 0.0]] * 6 + [[False, True, 0.0]] * 6
    assert one == other == (4, True, True, 0.5)
    assert whole_step == (8, True, True, 0.5)


@pytest.mark.cuda_memory
def test_cudnn_runs_recurrent_layers_backward_while_the_loss_is_tried():
    model = nn.Sequential(nn.LSTM(8, 8, 2, dropout=0.5)).cuda()
    x = torch.zeros(4, 3, 8, device="cuda")
    model.eval()
    with pytest.raises(RuntimeError, match="cudnn RNN backward can only be called in training mode"):
        model(x)[0].sum().backward()
    model.train()
    with without_randomness(model, is_all=True):
        assert not model.training
        model(x)[0].sum().backward()
    assert model.training
    assert model[0].weight_hh_l1.grad.shape == (32, 8)
