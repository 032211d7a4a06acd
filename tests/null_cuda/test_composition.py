"""The composition that MemoryMonitor logs on a CUDA device, beside PyTorch's own allocator."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_memtools import MemoryMonitor
from tests.lightning_models import trainer
from tests.list_logger import ListLogger
from tests.null_cuda.null_processes import Classifier
from tests.zoo import torchvision_models

pytestmark = pytest.mark.cuda_memory

GIB = 2**30
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "inputs", "other")
MODELS = ["resnet18", "squeezenet1_1", "vit_b_16"]


def curves_of(folder, net, size, *callbacks):
    """The composition that is logged in three steps, as bytes: a list for each part."""
    data = TensorDataset(torch.zeros(12, 3, size, size), torch.zeros(12, dtype=torch.long))
    logger = ListLogger()
    run = trainer(folder, *callbacks, MemoryMonitor(), accelerator="gpu", devices=1, logger=logger)
    run.fit(Classifier(net), DataLoader(data, batch_size=4))
    return {part: [value * GIB for _, value in logger.curves[f"memory/composition/{part}_gib"]] for part in CATEGORIES}


class Truth(L.Callback):
    """PyTorch's own figures at the end of each step: the peak, and the blocks that hold tensors, by address."""

    def __init__(self) -> None:
        self.peaks: list[int] = []
        self.parts: list[dict[str, int]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.peaks.append(torch.cuda.max_memory_allocated())
        # What was asked for, in the allocator's units: a block may have a remainder that is too small to be split off.
        blocks = {
            block["address"]: -(-block["requested_size"] // 512) * 512
            for segment in torch.cuda.memory_snapshot()
            for block in segment["blocks"]
        }
        optimizer = trainer.optimizers[0]
        tensors = {
            "parameters": list(pl_module.parameters()),
            "gradients": [p.grad for p in pl_module.parameters() if p.grad is not None],
            "optimizer": [x for state in optimizer.state.values() for x in state.values() if x.is_cuda],
            "inputs": batch,
        }
        self.parts.append({name: sum(blocks[x.data_ptr()] for x in held) for name, held in tensors.items()})


@pytest.mark.parametrize("name", MODELS)
def test_categories_add_up_to_torchs_peak_and_what_has_an_owner_is_exact(name, tmp_path):
    truth, net = Truth(), torchvision_models().get_model(name)
    torch.cuda.reset_peak_memory_stats()
    curves = curves_of(tmp_path, net, 224, truth)
    assert len(truth.peaks) == 3
    for step, (peak, parts) in enumerate(zip(truth.peaks, truth.parts, strict=True)):
        logged = {part: curve[step] for part, curve in curves.items()}
        assert sum(logged.values()) == pytest.approx(peak, rel=0.01)
        assert {part: logged[part] for part in parts} == parts
        assert logged["activations"] > 0


class Keeps(L.Callback):
    """Holds 24 MiB that are no part of the model, as a library's workspace does."""

    def on_fit_start(self, trainer, pl_module):
        self.kept = torch.zeros(24 * 2**20, dtype=torch.uint8, device="cuda")


def test_what_outlives_the_step_and_has_no_owner_is_no_activation(tmp_path):
    net = torchvision_models().resnet18
    plain, kept = (curves_of(tmp_path, net(), 64, *callbacks) for callbacks in ((), (Keeps(),)))
    assert kept["other"][-1] - plain["other"][-1] == pytest.approx(24 * 2**20, rel=0.01)
    assert kept["activations"][-1] == pytest.approx(plain["activations"][-1], rel=0.01)
