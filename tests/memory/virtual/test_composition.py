"""Every byte in its category and at its module, by arithmetic."""

from __future__ import annotations

import torch
from torch import nn

from lightning_memtools.memory.virtual import VirtualDevice


def blocks(*n_floats: int) -> int:
    """What storages of so many floats take: multiples of 512 bytes."""
    return sum(-(-n * 4 // 512) * 512 for n in n_floats)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(300, 500)
        self.second = nn.Linear(500, 200)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


BATCH = 64
# Saved for backward: the result of tanh. first's output dies as soon as tanh has run.
ACTIVATIONS = blocks(BATCH * 500)
OUTPUT = blocks(BATCH * 200)


def test_mlp_is_charged_to_its_modules() -> None:
    with VirtualDevice() as device:
        net = Mlp()
        optimizer = torch.optim.Adam(net.parameters())
        x = torch.randn(BATCH, 300)
        net(x).sum().backward()
        optimizer.step()
        out = net(x)
        first, second = blocks(300 * 500, 500), blocks(500 * 200, 200)
        found = {
            module: {category: size for category, size in sizes.items() if size}
            for module, sizes in device.composition().by_module.items()
        }
        assert found == {
            "Mlp": {"activation": ACTIVATIONS},
            "Mlp.first": {"parameter": first, "gradient": first, "optimizer": 2 * first + 2 * 512},
            "Mlp.second": {
                "parameter": second,
                "gradient": second,
                "optimizer": 2 * second + 2 * 512,
                "activation": OUTPUT,
            },
            "(outside)": {"input": blocks(BATCH * 300)},
        }
        del out


def test_inputs_are_known_by_being_passed_in_any_way() -> None:
    class Keywords(nn.Module):
        def forward(self, x: torch.Tensor, *, batch: dict[str, list[torch.Tensor]]) -> torch.Tensor:
            return x + batch["more"][0]

    with VirtualDevice() as device:
        x, more, other = torch.ones(1000), torch.ones(1000), torch.ones(1000)
        Keywords()(x, batch={"more": [more]})
        found = device.composition().by_category
        assert (found["input"], found["other"]) == (2 * 4096, 4096)
        del x, more, other
