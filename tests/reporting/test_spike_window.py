"""SpikeWindow against noise of twenty kinds, and against jumps in it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from lightning_memtools.reporting.spike_window import SpikeWindow

N = 5000
T = np.arange(N)
DECAY = 3 + 8 * np.exp(-T / 100)


CURVES: dict[str, Callable[[np.random.Generator, np.ndarray], np.ndarray]] = {
    "language model": lambda _, normal: DECAY * (1 + 0.02 * normal),
    "noisy decay": lambda _, normal: DECAY * np.abs(1 + 0.3 * normal),
    "lognormal, 0.5": lambda _, normal: np.exp(0.5 * normal),
    "lognormal, 1": lambda _, normal: np.exp(normal),
    "warm restarts": lambda _, normal: (0.01 + 0.3 * (1 - (T % 500) / 500)) * np.exp(0.2 * normal),
    "curriculum, 1.4 times": lambda _, normal: np.where(T // 1000 % 2, 1, 1.4) * np.exp(0.05 * normal),
    "gan, around 0": lambda _, normal: np.sin(T / 37) + 0.3 * normal,
    "policy gradient, a random walk": lambda rng, normal: np.cumsum(0.1 * rng.standard_normal(N)) + normal,
    "returns, exponential": lambda rng, normal: -rng.exponential(size=N),
    "exponential": lambda rng, normal: rng.exponential(size=N),
    "squared error of one sample": lambda _, normal: normal**2,
    "tiny": lambda _, normal: 1e-8 * normal**2,
    "contrastive, log of the batch": lambda _, normal: math.log(256) * np.exp(-T / 2000) + 0.05 * np.abs(normal),
    "uniform": lambda rng, normal: rng.random(N),
    "sawtooth of batches": lambda _, normal: 1 + (T % 20) / 20,
    "zero but for a few": lambda rng, normal: np.where(rng.random(N) < 0.02, rng.random(N), 0),
    "constant": lambda _, normal: np.ones(N),
    "zero": lambda _, normal: np.zeros(N),
    "power law": lambda _, normal: np.exp(0.2 * normal) / (1 + T),
    "negative log likelihood": lambda _, normal: -50 + 100 * np.exp(-T / 300) + normal,
}


def curve(name: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    return CURVES[name](rng, rng.standard_normal(N))


@pytest.mark.parametrize("name", CURVES)
def test_healthy_noise_of_5000_steps_holds_no_spike(name):
    window = SpikeWindow()
    assert [step for step, value in enumerate(curve(name)) if window.judge(float(value))] == []


@pytest.mark.parametrize(
    ("name", "times"),
    [("language model", 1.7), ("noisy decay", 20), ("gan, around 0", 30), ("constant", 1.6), ("power law", 10)],
)
def test_a_jump_is_found_at_its_step_and_only_there(name, times):
    values = curve(name)
    values[3000] = abs(values[3000]) * times + 1e-9
    values[3000] = max(values[3000], times * float(np.median(values[2900:3000])))
    window = SpikeWindow()
    found = {step: spike for step, value in enumerate(values) if (spike := window.judge(float(value)))}
    assert list(found) == [3000]
    assert found[3000].median == pytest.approx(np.sort(values[2900:3000])[50])
    assert found[3000].limit < found[3000].value == values[3000]


def test_a_level_that_lasts_is_accepted_once_it_fills_a_twentieth_of_the_window():
    window = SpikeWindow(size=100, warm_up=50)
    found = [step for step in range(300) if window.judge(1.0 if step < 200 else 10.0)]
    assert found == [200, 201, 202, 203, 204]


def test_values_before_the_warm_up_and_values_that_are_not_finite_are_not_judged():
    window = SpikeWindow(warm_up=10)
    assert [window.judge(100.0 if step == 5 else 1.0) for step in range(10)] == [None] * 10
    assert [window.judge(value) for value in (math.nan, math.inf, -math.inf)] == [None] * 3
    assert [window.judge(1.0) for _ in range(50)] == [None] * 50
    assert window.judge(200.0) is not None


def test_a_larger_sensitivity_and_ratio_find_less():
    def found(**options: float) -> int:
        window = SpikeWindow(**options)  # type: ignore[arg-type]
        return sum(window.judge(value) is not None for value in [1.0 + 0.01 * (i % 7) for i in range(99)] + [1.9])

    assert (found(), found(least_ratio=2.0), found(sensitivity=30.0)) == (1, 0, 0)
