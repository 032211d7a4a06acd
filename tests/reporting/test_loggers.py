from __future__ import annotations

import pytest
from lightning.pytorch.loggers import Logger, TensorBoardLogger

from lightning_memtools import LossCurves, MemoryMonitor
from lightning_memtools.reporting.loggers import log_scalars
from tests.event_files import scalars
from tests.lightning_models import Regression, loader, trainer


class Recorder(Logger):
    """A logger of another kind: "-" between groups, text with `log_text` as W&B's logger takes it."""

    name = "recorder"
    version = 0
    group_separator = "-"
    experiment: object = None

    def __init__(self) -> None:
        super().__init__()
        self.points: list[tuple[dict[str, float], int | None]] = []
        self.texts: dict[str, str] = {}

    def log_metrics(self, metrics, step=None):
        self.points.append((metrics, step))

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_text(self, key, columns, data):
        self.texts[key] = data[0][0]


class MlflowLike(Recorder):
    """Text goes to the experiment as an artifact, as MLflow's client takes it."""

    run_id = "run7"
    log_text = property()  # no such method on the logger itself

    def __init__(self) -> None:
        super().__init__()
        self.experiment = self.Client(self.texts)

    class Client:
        def __init__(self, texts):
            self.texts = texts

        def log_text(self, run_id, text, artifact_file):
            self.texts[artifact_file] = f"{run_id}: {text}"


class Broken(Recorder):
    """Whatever is written to it fails."""

    def log_metrics(self, metrics, step=None):
        if any("memory" in tag or tag.startswith("loss-") for tag in metrics):
            raise ConnectionError("the server is gone")

    def log_text(self, key, columns, data):
        raise ConnectionError("the server is gone")


def test_every_logger_gets_the_scalars_with_its_own_separator(tmp_path):
    recorder, board = Recorder(), TensorBoardLogger(tmp_path)
    run = trainer(tmp_path, logger=[recorder, board])
    log_scalars(run, {"memory/train/allocated_gib": 1.5}, step=7)
    board.finalize("success")
    assert recorder.points == [({"memory-train-allocated_gib": 1.5}, 7)]
    assert scalars(board.log_dir) == {"memory/train/allocated_gib": [(7, 1.5)]}


@pytest.mark.parametrize(
    ("uri", "tag"),
    [
        ("file:///runs", "loss.train"),
        ("mlruns", "loss.train"),
        ("sqlite:///mlflow.db", "loss/train"),
        ("http://localhost:5000", "loss/train"),
    ],
)
def test_a_store_that_keeps_metrics_in_files_gets_no_directories(uri, tag, tmp_path):
    """Else `loss/train` is a directory there, and the user's own `loss` cannot be written."""
    mlflow = MlflowLike()
    mlflow.group_separator = "/"
    mlflow.experiment.tracking_uri = uri
    log_scalars(trainer(tmp_path, logger=[mlflow]), {"loss/train": 1.0}, step=7)
    assert mlflow.points == [({tag: 1.0}, 7)]


class HistoryLike(Recorder):
    """Keeps what it is given as the history of the user's model, as scVI's logger does."""

    @property
    def history(self) -> dict[str, list[float]]:
        return {name: [value] for metrics, _ in self.points for name, value in metrics.items() if name != "epoch"}


def test_what_a_library_shows_as_the_users_metrics_stays_the_users(tmp_path):
    class Logs(Regression):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("elbo_train", loss)
            return loss

    history, board = HistoryLike(), TensorBoardLogger(tmp_path)
    callbacks = (MemoryMonitor(), LossCurves())
    trainer(tmp_path, *callbacks, logger=[history, board], log_every_n_steps=1).fit(Logs(), loader(16))
    board.finalize("success")
    assert history.history.keys() == {"elbo_train"}
    assert {"memory/host_rss_gib", "loss/train", "elbo_train"} <= scalars(board.log_dir).keys()


def test_a_logger_that_fails_gives_one_warning_and_the_others_still_get_everything(tmp_path):
    recorder = Recorder()
    callbacks = [MemoryMonitor(), LossCurves()]
    run = trainer(tmp_path, *callbacks, logger=[Broken(), recorder], max_epochs=2)
    with pytest.warns(UserWarning, match="Broken failed while writing") as caught:
        run.fit(Regression(), loader(), loader(8))
    (said,) = [w for w in caught if "failed while writing" in str(w.message)]
    assert "ConnectionError: the server is gone" in str(said.message)
    assert run.global_step == 8
    assert [step for metrics, step in recorder.points if "loss-train" in metrics] == [*range(8)]
    assert "memtools/memory_summary" in recorder.texts
