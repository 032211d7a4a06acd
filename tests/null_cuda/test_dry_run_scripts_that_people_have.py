"""Dry runs of the scripts that people have, judged against the same steps with sizes that were computed on the CPU."""

from __future__ import annotations

import json

import pytest

from lightning_memtools.null_cuda.dry_run.api import dry_run
from lightning_memtools.null_cuda.dry_run.result import DryRunResult
from tests.null_cuda.dry_run_scripts import TRAINER, write_script

pytestmark = pytest.mark.cuda_memory

# Each step finds its sizes on the device, or on the CPU (`early`), where values are computed.
STEPS = """
    import gc
    import json
    from pathlib import Path
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
    from transformers import BertConfig, BertForMaskedLM

    def packed_lstm(early):
        x, lengths = torch.randn(16, 200, 64), torch.randint(50, 150, (16,))
        model = nn.LSTM(64, 256, batch_first=True).cuda()
        def step():
            n = lengths if early else (lengths.cuda() + 0).cpu()
            packed = pack_padded_sequence(x.cuda(), n, batch_first=True, enforce_sorted=False)
            return pad_packed_sequence(model(packed)[0])[0].square().mean()
        return model, step

    def padded_transformer(early):
        lengths = torch.randint(20, 60, (16, 1))
        ids = torch.where(torch.arange(64) < lengths, torch.randint(1, 5000, (16, 64)), 0)
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
        model = BertForMaskedLM(BertConfig(vocab_size=5000, **sizes)).cuda()
        kept = (ids != 0).flatten().nonzero()[:, 0]
        def step():
            on_device = ids.cuda()
            mask = on_device != 0
            logits = model(on_device, attention_mask=mask).logits
            if early:
                places = kept.cuda()
                return cross_entropy(logits.flatten(0, 1)[places], on_device.flatten()[places])
            return cross_entropy(logits[mask], on_device[mask])
        return model, step

    def detector(early):
        boxes = torch.rand(4, 50, 5)
        boxes[..., 4] = (torch.arange(50) < torch.tensor([[3], [40], [11], [25]])).float()  # the rest is padding
        model = nn.ModuleList([nn.Linear(32, 1024), nn.Linear(1024, 4), nn.Linear(1024, 4096)]).cuda()
        features = torch.randn(4, 100, 32)
        def step():
            hidden = model[0](features.cuda())
            found, loss = model[1](hidden), 0.0
            for one, predicted, given in zip(hidden, found, boxes):
                given = given[given[:, 4] > 0].cuda() if early else (on := given.cuda())[on[:, 4] > 0]
                matched = torch.cdist(predicted, given[:, :4]).argmin(0)  # the nearest prediction to each box
                loss = loss + (predicted[matched] - given[:, :4]).abs().mean() + model[2](one[matched]).square().mean()
            return loss
        return model, step

    def graph_network(early):
        nodes, edges = torch.randn(500, 64), torch.randint(0, 500, (2, 20000))
        edges[1, ::3] = edges[0, ::3]  # loops, which the step takes out
        model = nn.Linear(64, 256).cuda()
        def step():
            ends = edges if early else edges.cuda()
            ends = ends[:, ends[0] != ends[1]].cuda()
            hidden = model(nodes.cuda())
            passed = torch.zeros_like(hidden).index_add(0, ends[1], hidden[ends[0]] ** 2)
            return passed.square().mean()
        return model, step

    def speech(early):  # as transformers computes the loss of Wav2Vec2 and Hubert
        x, labels = torch.randn(50, 16, 64), torch.randint(0, 32, (16, 20))
        model = nn.Linear(64, 512).cuda()
        def step():
            scores, given = model(x.cuda()).log_softmax(2), labels if early else labels.cuda()
            lengths, there = torch.full((16,), 50), given > 0
            return nn.functional.ctc_loss(scores, given[there].cuda(), lengths, there.sum(1))
        return model, step

    def peak(build, early):
        torch.manual_seed(1)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        model, step = build(early)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            step().backward()
            optimizer.step()
        return torch.cuda.max_memory_allocated()

    torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")  # cuBLAS's workspace
    builds = (packed_lstm, padded_transformer, detector, graph_network, speech)
    peaks = {build.__name__: [peak(build, early) for early in (True, False)] for build in builds}

    def scaled_loop(scaler):
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 16)).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = model(torch.rand(256, 1024).cuda()).float().square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return torch.cuda.max_memory_allocated()

    peaks["scaled_loop"] = [scaled_loop(torch.amp.GradScaler("cuda", enabled=on)) for on in (False, True)]
    Path("peaks.json").write_text(json.dumps(peaks))
"""

CLI = """
    from lightning.pytorch.cli import LightningCLI

    class Data(L.LightningDataModule):
        def __init__(self, batch_size: int):
            super().__init__()
            self.batch_size = batch_size
        def train_dataloader(self):
            return DataLoader(torch.randn(self.batch_size * 4, 1024), batch_size=self.batch_size)
        val_dataloader = train_dataloader

    LightningCLI(Model, Data, save_config_callback=None)
"""
CONFIG = """
trainer: {max_epochs: 1000, logger: false, log_every_n_steps: 1}
data: {batch_size: 64}
"""


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> tuple[DryRunResult, dict[str, list[int]]]:
    folder = tmp_path_factory.mktemp("steps")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        result = dry_run(write_script(folder, STEPS))
    assert result.status == 0, result.error
    return result, json.loads((folder / "peaks.json").read_text())


@pytest.mark.parametrize(
    "name", ["packed_lstm", "padded_transformer", "detector", "graph_network", "speech", "scaled_loop"]
)
def test_sizes_that_a_step_reads_from_its_data_are_true(steps, name):
    known, read = steps[1][name]
    assert read == pytest.approx(known, rel=0.002)


def test_nothing_is_assumed_for_them(steps):
    result, _ = steps
    assert result.optimizer_steps == 2 * 2 * 5 + 2 * 3
    assert result.assumed == []
    assert result.fits


def test_lightnings_command_line_with_yaml_takes_what_the_same_trainer_takes(script, trained, tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    path = script(TRAINER.split("    batch_size = int")[0] + CLI)
    result = dry_run(path, ["fit", "--config", "config.yaml"])
    assert result.verdict == "It fits."
    assert result.optimizer_steps == 3
    ours, theirs = (next(one for one in run.stages if one.stage == "train") for run in (result, trained))
    assert ours.peak_allocated_bytes == theirs.peak_allocated_bytes
