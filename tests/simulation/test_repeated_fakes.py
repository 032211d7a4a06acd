"""What is made of shapes known already is what a FakeTensorMode makes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_memtools._torch import FakeTensor, OperatorMode
from lightning_memtools.simulation import repeated_fakes
from lightning_memtools.simulation.fakes import TensorExchange, borrowed, fake_mode
from lightning_memtools.simulation.repeated_fakes import RepeatedFakes, _known
from tests.checkpointing.foreign_models import made
from tests.simulation.compared_fakes import ComparedWithFakeTensorMode, aten, described


@pytest.mark.parametrize("name", ["gpt2", "swin", "timm_convnext", "deeplabv3"])
def test_a_step_of_a_model_gets_the_same_tensors(name):
    model, batch = made(name)
    with fake_mode() as mode, borrowed([model], exchange := TensorExchange()):
        batch = {key: exchange(value) if isinstance(value, Tensor) else value for key, value in batch.items()}
        with ComparedWithFakeTensorMode(mode) as both:
            model(batch).backward()
    assert len(both.compared) > 20
    assert both.compared.total() > 300


def test_what_changes_tensors_returns_them_and_counts_as_a_change():
    with fake_mode() as mode, RepeatedFakes(mode):
        for _ in range(2):
            x = torch.ones(3, 4)
            assert x.add_(1) is x
            assert (x.relu_() is x, x._version) == (True, 2)
            with pytest.raises(RuntimeError, match="shape"):
                x.add_(torch.ones(5, 3, 4))
            assert x.resize_(2, 2).shape == (2, 2)


def test_results_that_are_not_there():
    with fake_mode() as mode, RepeatedFakes(mode):
        tensors = [torch.ones(2, 4, 6, 6), torch.ones(2, 3, 8, 8), torch.ones(4, 3, 3, 3)]
        settings = [None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False]]
        found = [aten.convolution_backward(*tensors, *settings) for _ in range(2)]
    assert [[None if one is None else one.shape for one in three] for three in found] == [
        [None, (4, 3, 3, 3), None]
    ] * 2


@pytest.mark.parametrize("strided", ["input", "gradient"])
def test_the_gradient_that_a_layer_norm_returns_is_contiguous_as_kernels_make_it(strided):
    def gradient():
        tensors = {"input": torch.ones(2, 3, 5), "gradient": torch.ones(2, 3, 5)}
        tensors[strided] = torch.ones(2, 5, 3).transpose(1, 2)
        source = tensors["input"].requires_grad_()
        return torch.autograd.grad(nn.functional.layer_norm(source, (5,)), source, tensors["gradient"])[0]

    with fake_mode() as mode, RepeatedFakes(mode):
        fake = gradient()
    assert fake.stride() == gradient().stride() == (15, 5, 1)


def test_what_depends_on_values_is_left_to_the_mode():
    with fake_mode() as mode, RepeatedFakes(mode):
        x = torch.ones(3, 4)
        assert torch.zeros(3, 4, out=x) is x
        with pytest.raises(Exception, match="nonzero"):
            x.nonzero()
        constant = torch.tensor(3)
        assert constant.item() == 3
        assert (constant + 1).item() == 4


@pytest.mark.parametrize("name", ["add_", "mul_", "copy_", "zero_", "addcdiv_", "lerp_"])
def test_values_that_are_changed_again_leave_a_tensor_as_the_mode_leaves_it(name):
    def change(one):
        other = torch.ones(4, dtype=torch.float64)
        given = {"zero_": (), "addcdiv_": (one.clone(), one.clone()), "lerp_": (one.clone(), 0.5)}.get(name, (other,))
        return getattr(one, name)(*given)

    with fake_mode() as mode, RepeatedFakes(mode):
        made = [torch.ones(3, 4), torch.ones(3, 4)]
        places = [one.untyped_storage()._cdata for one in made]
        for one in made:
            assert change(one) is one
            assert one._version == 1
        assert described(made[0], []) == described(made[1], [])
        assert [one.untyped_storage()._cdata for one in made] == places
        known = {key[0]._schema.name for key, found in _known.items() if found == "the first argument"}
        assert f"aten::{name}" in known


def test_a_change_that_is_refused_is_refused_again_and_one_of_a_constant_is_noted():
    with fake_mode() as mode, RepeatedFakes(mode):
        for _ in range(2):
            torch.ones(3, 4).add_(torch.ones(4))
            with pytest.raises(RuntimeError, match="broadcast"):
                torch.ones(3, 4).add_(torch.ones(5))
        constant = torch.tensor(3)
        constant.add_(torch.ones((), dtype=torch.int64))
        assert constant.shape == ()
        layer = nn.Linear(4, 4)
        for _ in range(2):
            layer(torch.ones(2, 4)).mul_(2.0).sum().backward()
        assert layer.weight.grad is not None


def test_the_type_of_a_number_and_the_default_type_count():
    with fake_mode() as mode, RepeatedFakes(mode):
        x = torch.ones(3, dtype=torch.int64)
        for _ in range(2):
            assert [(x * one).dtype for one in (1, 1.0, True)] == [torch.int64, torch.float32, torch.int64]
            assert (x / 2).dtype == torch.float32
            torch.set_default_dtype(torch.float64)
            try:
                assert (x * 1.0).dtype == (x / 2).dtype == torch.empty(2).dtype == torch.float64
            finally:
                torch.set_default_dtype(torch.float32)


def test_every_result_has_memory_of_its_own_and_views_share_theirs():
    with fake_mode() as mode, RepeatedFakes(mode):
        x = torch.empty(6, 4)
        sums = [x + 1 for _ in range(3)]
        assert len({one.untyped_storage()._cdata for one in sums}) == 3
        assert all(type(one) is FakeTensor for one in sums)
        views = [x.t(), *x.split(2), x.view(4, 6), aten._unsafe_view.default(x, [24])]
        assert {one.untyped_storage()._cdata for one in views} == {x.untyped_storage()._cdata}
        assert [one.storage_offset() for one in views] == [0, 0, 8, 16, 0, 0]
        with pytest.raises(RuntimeError, match="shape"):
            x.view(5, 5)


def test_gradients_pass_through_results_and_views():
    with fake_mode() as mode, RepeatedFakes(mode):
        layer = nn.Linear(4, 4)
        for _ in range(2):
            layer(torch.ones(2, 4)).t().sum().backward()
        assert layer.weight.grad.shape == (4, 4)


def test_another_thread_may_forget_what_is_known_at_any_time(monkeypatch):
    class ForgottenOnceSeen(dict):
        def __contains__(self, key):
            found = super().__contains__(key)
            self.clear()
            return found

        def get(self, key, default=None):
            found = super().get(key, default)
            self.clear()
            return found

    monkeypatch.setattr(repeated_fakes, "_known", known := ForgottenOnceSeen())
    with fake_mode() as mode, RepeatedFakes(mode):
        for _ in range(3):
            assert torch.ones(2, 3).shape == (2, 3)
    assert len(known) == 1  # made anew the third time


def of_numbers():
    """What becomes of numbers and of their changes."""
    steps = torch.tensor(0.0, dtype=torch.float32)
    same = steps.detach()
    seen = [steps, steps.item()]
    steps += 1
    steps.mul_(3).sub_(0.5)
    seen += [steps.item(), same.item(), same._version, (steps + 1).item(), torch.sqrt(steps), int(steps)]
    whole = torch.tensor(3)
    assert whole.add_(1) is whole
    seen += [
        whole,
        whole.item(),
        bool(whole == 4),
        torch.tensor([1, 2]),
        torch.tensor([[5]]),
        torch.tensor(1.5).double(),
    ]
    with pytest.raises(RuntimeError, match="can't be cast"):
        whole.mul_(0.5)
    steps.add_(torch.ones(()).mul(2))  # of a value that is not known
    try:
        seen.append(steps.item())
    except Exception as error:  # noqa: BLE001, the kind is what is compared
        seen.append(type(error).__name__)
    return seen


def test_numbers_have_the_values_that_the_mode_gives_them():
    def told(seen):
        return [
            (described(one, []), None if one.constant is None else one.constant.tolist())
            if isinstance(one, FakeTensor)
            else one
            for one in seen
        ]

    with fake_mode() as mode:
        plain = of_numbers()
        with RepeatedFakes(mode):
            found = of_numbers()
    assert told(found) == told(plain)
    assert found[2:4] == [2.5, 2.5]


def test_a_step_of_adam_asks_the_mode_for_no_count_of_steps():
    class Asked(OperatorMode):
        def __init__(self):
            super().__init__()
            self.number = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.number += 1
            return func(*args, **(kwargs or {}))

    with fake_mode() as mode:
        parameters = [nn.Parameter(torch.ones(3)) for _ in range(50)]
        for one in parameters:
            one.grad = torch.ones(3)
        optimizer = torch.optim.Adam(parameters, foreach=False)
        with Asked() as asked, RepeatedFakes(mode):
            optimizer.step()
            asked.number = 0
            optimizer.step()
    assert asked.number < 10 < len(parameters)  # two operators whose factors differ from step to step, once for all
    assert optimizer.state[parameters[0]]["step"].item() == 2
