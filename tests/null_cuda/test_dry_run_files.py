"""The files of a script in a dry run: those of the user stay, and checkpoints are found again wherever they went."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from lightning import Trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_memtools.null_cuda.dry_run.api import dry_run
from lightning_memtools.null_cuda.dry_run.script_files import ScriptFiles
from tests.null_cuda.dry_run_models import Resumed
from tests.null_cuda.dry_run_scripts import write_script

pytestmark = pytest.mark.cuda_memory

SAVES = """
    import sys
    import lightning as L
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import TensorBoardLogger
    from torch import nn
    from torch.utils.data import DataLoader

    class ProjectLogger(TensorBoardLogger):
        def __init__(self, project):
            super().__init__(save_dir="my_logs", name=project)
            self.project = project

    class Model(L.LightningModule):
        def __init__(self, width):
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Linear(width, width, bias=False)
        def training_step(self, batch, _):
            return self.net(batch).mean()
        def test_step(self, batch, _):
            self.net(batch)
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    loader = DataLoader(torch.zeros(64, 1000), batch_size=4)
    model = Model(1000)
    later = ModelCheckpoint(every_n_epochs=5, dirpath="my_checkpoints")
    trainer = L.Trainer(max_epochs=20, callbacks=later, logger=ProjectLogger("cats"))
    trainer.fit(model, loader)
    assert trainer.logger.project == "cats"
    assert trainer.global_step == 3
    trainer.save_checkpoint("mine.ckpt")
    found = Model.load_from_checkpoint("mine.ckpt")
    assert found.hparams.width == 1000
    trainer.test(found, loader, ckpt_path="mine.ckpt")
    trainer.test(found, loader, ckpt_path=later.best_model_path)  # none was written in so few steps
    trainer.test(dataloaders=loader)

    for name in ("final.pt", "final.pt", "new.pt", "new.pt"):
        torch.save(model.state_dict(), name)
    assert set(torch.load("final.pt")) == {"net.weight"}
    fabric = L.Fabric(accelerator="cuda", devices=1)
    wrapped = fabric.setup(nn.Linear(3, 3))
    fabric.save("fabric.ckpt", {"model": wrapped, "step": 7})
    assert fabric.load("fabric.ckpt")["step"] == 7
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The dry run beside files of the names that the script writes, and its folder."""
    folder = tmp_path_factory.mktemp("saved")
    for name in ("final.pt", "fabric.ckpt", "mine.ckpt"):
        (folder / name).write_text("precious")
    with contextlib.chdir(folder):
        return dry_run(write_script(folder, SAVES)), folder


def test_files_that_were_there_are_untouched_and_new_ones_are_where_the_script_says(saved):
    result, folder = saved
    assert result.status == 0, result.error
    assert {path.name for path in folder.iterdir()} == {"train.py", "final.pt", "fabric.ckpt", "mine.ckpt", "new.pt"}
    for name in ("final.pt", "fabric.ckpt", "mine.ckpt"):
        assert (folder / name).read_text() == "precious"
    assert torch.load(folder / "new.pt", map_location="cpu")["net.weight"].shape == (1000, 1000)


def test_a_logger_whose_constructor_is_the_users_own_writes_into_the_runs_folder(saved):
    result, folder = saved
    assert result.status == 0, result.error
    assert list(Path(result.directory, "cats").rglob("events.out.*"))
    assert not (folder / "my_logs").exists()


def test_an_evaluation_loads_no_checkpoint_as_none_may_be_there(saved):
    result, _ = saved
    assert [stage.stage for stage in result.stages] == ["train", "test"]
    assert "No checkpoint was loaded for an evaluation: the model was used as it was." in result.notes


def test_a_large_tensor_is_a_small_file_and_takes_its_memory_again_when_it_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "save", torch.save)
    monkeypatch.setattr(torch, "load", torch.load)
    ScriptFiles(tmp_path / "run", print).guard_torch()
    model = nn.Sequential(nn.Linear(4096, 4096), nn.BatchNorm1d(4096)).cuda().half()
    saved = {"state": model.state_dict(), "list": [torch.arange(3)], "pair": ({"step": 2},)}
    torch.save(saved, tmp_path / "model.pt")
    assert (tmp_path / "model.pt").stat().st_size < 2**20 < model[0].weight.nbytes
    before = torch.cuda.memory_allocated()
    found = torch.load(tmp_path / "model.pt")
    assert torch.cuda.memory_allocated() - before == sum(
        -(-one.nbytes // 512) * 512 for one in model.state_dict().values()
    )
    assert found["state"]._metadata == saved["state"]._metadata
    for key, one in model.state_dict().items():
        loaded = found["state"][key]
        assert (loaded.shape, loaded.dtype, loaded.stride()) == (one.shape, one.dtype, one.stride())
        assert loaded.device == one.device
    assert (found["list"][0].tolist(), found["pair"]) == ([0, 1, 2], ({"step": 2},))


RESUMES = """
    import sys
    import torch
    from lightning import Trainer
    from torch.utils.data import DataLoader
    from tests.null_cuda.dry_run_models import Resumed

    model = Resumed()
    trainer = Trainer(max_epochs=9, min_epochs=8, callbacks=[])
    trainer.fit(model, DataLoader(torch.zeros(64, 100), batch_size=4), ckpt_path=sys.argv[1])
    assert model.seen == [(2, 9), (2, 9)], model.seen
    assert trainer.global_step == 2 * 16 + 2
"""


@pytest.mark.filterwarnings("ignore:GPU available but not used", "ignore:`isinstance.treespec, LeafSpec")
def test_a_run_goes_on_from_a_checkpoint_of_a_later_epoch(script, tmp_path):
    trainer = Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False)
    trainer.fit(Resumed(), DataLoader(torch.zeros(64, 100), batch_size=4))
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    before = checkpoint.read_bytes()
    result = dry_run(script(RESUMES), [str(checkpoint)], steps=2)
    assert result.status == 0, result.error
    assert checkpoint.read_bytes() == before
    (train,) = result.stages
    assert train.bytes_by_category["optimizer"] == 2 * train.bytes_by_category["parameters"]


RANKS = """
    import sys
    import lightning as L
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from tests.null_cuda.dry_run_models import Evaluated
    from torch.utils.data import DataLoader

    strategy = sys.argv[1]
    loader = DataLoader(torch.zeros(64, 100), batch_size=4)
    model = Evaluated()
    trainer = L.Trainer(max_epochs=9, devices=4, strategy=strategy, callbacks=ModelCheckpoint(monitor="loss"))
    trainer.fit(model, loader)
    trainer.test(Evaluated(), loader, ckpt_path="best")
    if strategy == "ddp":
        Evaluated.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
"""


@pytest.mark.parametrize(("strategy", "is_written"), [("ddp", True), ("fsdp", False)])
def test_any_rank_finds_the_best_checkpoint_or_is_told_that_it_was_not_written(script, strategy, is_written):
    result = dry_run(script(RANKS), [strategy], devices=4, rank=2)
    assert result.status == 0, result.error
    assert [stage.stage for stage in result.stages] == ["train", "test"]
    assert any(note.startswith("Checkpoints were not written") for note in result.notes) != is_written
