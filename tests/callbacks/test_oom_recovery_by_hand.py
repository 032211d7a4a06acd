"""A recovered run is bit for bit the loop over micro-batches that anyone would write, in all usual ways to train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

from tests.callbacks.recovery_runs import FailsOnce, Watched, batches, recovery
from tests.lightning_models import trainer

pytestmark = pytest.mark.filterwarnings("ignore:OOMRecovery. A batch")

N_BATCHES = 6
# The second batch fails in its forward pass, and those after it are as large.
PARTS = [[16], *[[8, 8]] * (N_BATCHES - 1)]
HALF: dict[str, torch.dtype] = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def loop(
    model: Any, data: Any, *, precision: str = "32-true", gradient_clip_val: float | None = None,
    accumulate_grad_batches: int = 1,
) -> Iterator[float]:  # fmt: skip
    """Train over micro-batches; yields the scale of the losses after each step of the optimizer."""
    configured = model.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=2, enabled=precision == "16-mixed")
    parameters = list(model.parameters())
    for index, (batch, sizes) in enumerate(zip(data, PARTS, strict=True)):
        if index % accumulate_grad_batches == 0:
            optimizer.zero_grad()
        earlier = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        for x, y in zip(batch[0].split(sizes), batch[1].split(sizes), strict=True):
            with torch.autocast("cpu", HALF[precision]) if precision in HALF else nullcontext():
                loss = nn.functional.mse_loss(model.net(x), y)
            scaler.scale(loss / accumulate_grad_batches * (len(x) / sum(sizes))).backward()
        for parameter, gradient in zip(parameters, earlier, strict=True):
            parameter.grad = parameter.grad if gradient is None else gradient + parameter.grad
        if (index + 1) % accumulate_grad_batches == 0 or index + 1 == N_BATCHES:
            scaler.unscale_(optimizer)
            if gradient_clip_val is not None:
                nn.utils.clip_grad_norm_(parameters, gradient_clip_val)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            yield scaler.get_scale()


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_clip_val": 0.1},
        {"accumulate_grad_batches": 4},
        {"precision": "bf16-mixed"},
        {"precision": "16-mixed", "gradient_clip_val": 0.1, "accumulate_grad_batches": 4},
    ],
    ids=["plain", "clipping", "accumulation", "bf16", "fp16_with_clipping_and_accumulation"],
)
def test_weights_scales_and_random_streams_are_those_of_the_loop(options, optimizer, tmp_path):
    data = batches((8,) * N_BATCHES)
    torch.manual_seed(3)
    model = Watched(dropout=0.5, optimizer=optimizer)
    torch.manual_seed(3)
    hand = Watched(dropout=0.5, optimizer=optimizer)
    start = nn.utils.parameters_to_vector(hand.parameters()).detach().clone()
    own = dict(options)
    if own.get("precision") == "16-mixed":
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=2)
        own["plugins"] = MixedPrecision(own.pop("precision"), "cpu", scaler)
    run: Any = trainer(tmp_path, recovery(), logger=False, **own)
    with FailsOnce(model, 12, batch=1):
        run.fit(model, DataLoader(data, batch_size=None))
    assert model.seen == [16, 16, *[8] * 10]
    torch.set_rng_state(model.streams[0])
    scales = list(loop(hand, data, **options))
    assert run.global_step == len(scales)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), hand.parameters(), strict=True))
    assert torch.equal(model.streams[-1], torch.get_rng_state())
    if "plugins" in own:
        assert own["plugins"].scaler.get_scale() == scales[-1]
    assert float((nn.utils.parameters_to_vector(model.parameters()).detach() - start).abs().max()) > 0.001
