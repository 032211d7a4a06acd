"""What a dry run says of scripts that read values, reset peaks, or never step: nothing better than its evidence."""

from __future__ import annotations

import json

import pytest

from lightning_memtools.memory.sizes import known_gpus
from lightning_memtools.null_cuda.dry_run.api import dry_run
from tests.null_cuda.dry_run_scripts import MIB, command
from tests.null_cuda.null_processes import forks

pytestmark = pytest.mark.cuda_memory

LOOP = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)).cuda()
optimizer = torch.optim.Adam(model.parameters())
for step in range(3):
    loss = model(torch.rand(2048, 1024).cuda()).square().mean()
    {condition}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total = step * 0.5 + loss.item()
    print(f"{{total:.3f}}")
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("plain") / "train.py"
    path.write_text(LOOP.format(condition="pass"))
    return dry_run(path)


def test_a_value_that_is_only_printed_is_no_condition(plain):
    assert plain.fits
    assert plain.assumed == []
    assert plain.optimizer_steps == 3
    assert plain.verdict == "It fits."


def test_a_step_that_depends_on_the_loss_fits_under_a_condition_that_names_its_line(script, plain):
    path = script(LOOP.format(condition="if loss < 0.5: continue"))
    done = command("--json", str(path))
    result = json.loads(done.stdout)
    (line,) = result["assumed"]
    assert line.startswith("train.py:9: ")
    assert result["optimizer_steps"] == 3
    assert result["stages"][0]["peak_allocated_bytes"] == plain.stages[0].peak_allocated_bytes
    assert done.returncode == 0


@pytest.mark.parametrize("condition", ["if loss.item() > 0: continue", "continue"])
def test_a_run_without_an_optimizer_step_does_not_fit_and_says_so_first(script, condition):
    done = command(str(script(LOOP.format(condition=condition))))
    verdict = next(line for line in done.stdout.splitlines() if "step" in line)
    assert verdict.startswith("No optimizer step ran")
    assert "It fits" not in done.stdout
    assert done.returncode == 1


def test_weights_that_are_drawn_on_the_device_until_all_are_in_range_are_drawn_once(script):
    result = dry_run(script("import torch\ntorch.nn.init.trunc_normal_(torch.empty(4 * 2**20, device='cuda'))\n"))
    # The weights, what replaces those out of range, and the choice of both; a mask of a byte each.
    assert (result.status, result.assumed) == (0, [])
    assert result.stages[0].peak_allocated_bytes == (3 * 4 + 1) * 4 * MIB


def test_peaks_that_the_script_resets_still_count(script, plain):
    resets = "torch.cuda.reset_peak_memory_stats(); torch.cuda.reset_max_memory_allocated()"
    (stage,) = dry_run(
        script(LOOP.format(condition="pass") + f"    optimizer.zero_grad(); del loss; {resets}\n")
    ).stages
    assert stage.peak_allocated_bytes == plain.stages[0].peak_allocated_bytes


def test_a_mask_that_comes_from_the_data_is_true_and_one_that_does_not_selects_all_and_is_named(script):
    masked = """
        import torch
        from torch import nn
        layer = nn.Linear(1024, 1024).cuda()
        optimizer = torch.optim.SGD(layer.parameters())
        x = torch.rand(4096, 1024).cuda()
        labels = torch.arange(4096).cuda()
        mask = {mask}
        layer(x[mask]).sum().backward()
        optimizer.step()
    """
    known = dry_run(script(masked.format(mask="labels % 4 == 0")))
    unknown = dry_run(script(masked.format(mask="layer(x)[:, 0] > 0")))
    whole = dry_run(script(masked.format(mask="slice(None)")))
    quarter = 1024 * 1024 * 4
    assert known.assumed == []
    assert unknown.assumed
    # Selected rows and their product: a quarter of the rows, or all.
    of_known, of_unknown, of_whole = (one.stages[0].peak_allocated_bytes for one in (known, unknown, whole))
    assert of_unknown - of_known >= 2 * 3 * quarter - MIB
    assert of_unknown >= of_whole


SORTED = """
import lightning as L, torch
from torch import nn
from torch.utils.data import DataLoader

rows = [torch.rand(length, 256) for length in sorted({lengths})]

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    def training_step(self, batch, _):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())

trainer = L.Trainer(logger=False, max_epochs=1)
trainer.fit(Model(), DataLoader(rows, batch_size=4, collate_fn=lambda rows: nn.utils.rnn.pad_sequence(rows)))
"""


def test_the_largest_batch_of_a_sorted_loader_runs_last(script):
    path = script(SORTED.format(lengths=list(range(1, 801, 10))))
    cut, whole = dry_run(path), dry_run(path, steps=None)
    assert cut.stages[0].peak_allocated_bytes == whole.stages[0].peak_allocated_bytes
    (note,) = (one for one in cut.notes if "largest" in one)
    assert "from 256 to" in note
    assert not any("largest" in one for one in whole.notes)


KERNELS = """
import os
os.environ.update({environment!r})
import ctypes, torch
ctypes.CDLL(None).null_begin()
from torch import nn
F = torch.nn.functional
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    def made(*shape):
        return torch.zeros(*shape, device="cuda", dtype=dtype, requires_grad=True)
    # torch itself refuses this cuDNN before compute capability 7.5, where an LSTM asks for it.
    is_served = torch.cuda.get_device_capability() >= (7, 5)
    recurrent = [(nn.LSTM(16, 32), made(5, 2, 16))] if is_served else []
    q, few = made(2, 8, 64, 64), made(2, 2, 64, 64)
    mask = made(2, 1, 64, 64)
    for options in ({{"is_causal": True}}, {{"attn_mask": mask}}, {{"dropout_p": 0.1}}, {{"enable_gqa": True}}):
        k = few if "enable_gqa" in options else q
        F.scaled_dot_product_attention(q, k, k, **options).sum().backward()
    for module, x in (
        (nn.Conv2d(8, 16, 3), made(2, 8, 16, 16)), *recurrent,
        (nn.Embedding(10, 16), torch.zeros(4, dtype=torch.long, device="cuda")), (nn.LayerNorm(16), made(4, 16)),
    ):
        module = module.to("cuda", dtype)
        out = module(x)
        (out[0] if isinstance(out, tuple) else out).sum().backward()
        for options in ({{}}, {{"foreach": False}}, {{"fused": True}}):
            torch.optim.AdamW(module.parameters(), **options).step()
        torch.optim.SGD(module.parameters(), momentum=0.9).step()
print(torch.cuda.get_device_capability(), torch.cuda.max_memory_allocated() > 0)
"""


def test_the_kernels_of_every_gpu_of_the_table_run_in_every_precision():
    with forks() as run:
        for gpu in {(one.compute_capability, one.multiprocessors): one for one in known_gpus()}.values():
            environment = {
                "NULL_CUDA_CAPABILITY": gpu.compute_capability.replace(".", ""),
                "NULL_CUDA_MULTIPROCESSORS": str(gpu.multiprocessors),
            }
            printed = run(KERNELS.format(environment=environment))
            assert printed == f"({gpu.compute_capability.replace('.', ', ')}) True", gpu.name
