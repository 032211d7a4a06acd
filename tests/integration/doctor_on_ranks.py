"""A run on two ranks with TrainingDoctor, started by test_doctor_on_ranks.py: python doctor_on_ranks.py FOLDER."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning as L

from lightning_memtools import TrainingDoctor, TrainingMistakeError
from tests.lightning_models import Regression, loader, trainer


class KeepsOnOneRank(Regression):
    """Rank 1 alone adds up losses with their graphs."""

    total: Any = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.global_rank == 1:
            self.total = self.total + loss
        return loss


def main(root: Path) -> None:
    L.seed_everything(0, verbose=False)
    doctor = TrainingDoctor(steps=8, on_finding="raise")
    run = trainer(root, doctor, strategy="ddp", devices=2, logger=False)
    said = ""
    try:
        run.fit(KeepsOnOneRank(), loader(160), loader(32))
    except TrainingMistakeError as error:
        said = str(error)
    rank = run.global_rank
    (root / f"rank{rank}.json").write_text(json.dumps({"said": said, "steps": run.global_step}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
