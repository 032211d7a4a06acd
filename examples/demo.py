"""What this project is for, in a minute: train, run out of memory, fit, meet a NaN, and find its cause.

python examples/demo.py [--logs logs]   learns scikit-learn's handwritten digits on a simulated GPU of 40 MiB
"""

import argparse
import logging
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
from digits import DigitClassifier, loaders
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_memtools as memtools

SETTINGS: dict[str, Any] = {"accelerator": "cpu", "log_every_n_steps": 1, "enable_checkpointing": False}
SETTINGS |= {"enable_model_summary": False, "enable_progress_bar": False}


class TunedDigits(DigitClassifier):
    """The classifier with a batch size of its own, which the tuner sets."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        """The training digits."""
        return loaders(self.batch_size)[0]


class Standardized(DigitClassifier):
    """Divides each picture by its standard deviation, which is zero for an empty one."""

    eps = 0.0

    def forward(self, pictures: Tensor) -> Tensor:
        """Logits."""
        return super().forward(pictures / (pictures.std(dim=(1, 2, 3), keepdim=True) + self.eps))


class Mended(Standardized):
    """The same with a divisor that is never zero."""

    eps = 1e-5


def fit(logs: str, model: L.LightningModule, callbacks: list[L.Callback], *data: Any, epochs: int = 1) -> None:
    """Train on the simulated GPU."""
    L.seed_everything(0, verbose=False)  # each scene by itself, whatever was drawn before
    with memtools.VirtualDevice("40MiB"):  # leave this line out where you have a GPU
        trainer = L.Trainer(logger=TensorBoardLogger(logs, name=""), max_epochs=epochs, callbacks=callbacks, **SETTINGS)
        trainer.fit(model, *data)


def main() -> None:
    """Five scenes, each a few lines on the console."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--logs", default="logs", help="where event files and reports go")
    logs = parser.parse_args().logs
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", ".*(many workers|LeafSpec|no `val_dataloader`).*")
    L.seed_everything(0, verbose=False)
    train, val, _ = loaders(256)
    print("\n1. Train with batches of 256 on a simulated GPU of 40 MiB. TensorBoard: Memory, Run; Scalars, loss.")
    fit(f"{logs}/1-train", DigitClassifier(), memtools.default_callbacks(), train, val, epochs=4)

    print("\n2. Batches of 1024 run out of memory: what filled the device, what helps? TensorBoard: Memory, Reports.")
    with suppress(torch.OutOfMemoryError):
        fit(f"{logs}/2-out-of-memory", TunedDigits(1024), [memtools.OOMReport()])

    print("\n3. Recompute activations, and find the largest batch that fits. TensorBoard: Memory, Compare runs.")
    model = TunedDigits(256)
    checkpointing, tuner = memtools.GradientCheckpointing(bn_dropout="recompute"), memtools.BatchSizeTuner(max_trials=5)
    fit(f"{logs}/3-fits", model, [memtools.MemoryMonitor(), checkpointing, tuner])
    print(f"It trains with batches of {model.batch_size}.")

    print("\n4. An empty picture makes the loss NaN: the operation and sample are named. TensorBoard: Memory, Reports.")
    train.dataset.dataset.tensors[0][train.dataset.indices[700]] = 0.0  # type: ignore[attr-defined]
    try:
        fit(f"{logs}/4-nan", Standardized(), [memtools.HaltOnNaN()], train)
    except memtools.NonFiniteError as error:
        print(*str(error).splitlines()[:3], sep="\n")  # what, why and where
        print("\n5. The bad step again from its file, with the class as it was and with a mended one.")
        print(f"the same in every bit: {memtools.replay(str(error.step_path), model=Standardized()).exact}")
        print(f"finite with the mended class: {memtools.replay(str(error.step_path), model=Mended()).is_finite}")

    print(f"\n{len([*Path(logs).rglob('memtools/*.md')])} reports lie below {logs}; charts and reports:")
    print(f"tensorboard --logdir {logs}   then open http://localhost:6006/#lightning_memtools")


if __name__ == "__main__":
    main()
