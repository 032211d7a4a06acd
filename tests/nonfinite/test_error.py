"""The error survives the way between processes."""

from __future__ import annotations

import math
import pickle
from pathlib import Path

from lightning_memtools.nonfinite.bad_step import NonFiniteError
from lightning_memtools.nonfinite.finite_checks import BadTensor


def test_pickle_keeps_message_and_fields():
    error = NonFiniteError(
        "loss is nan",
        step=3,
        batch_idx=1,
        rank=2,
        stage="val",
        cause="dirty data",
        losses=[1.0, 2.0],
        parameters=[BadTensor("w", 1, 0, 4, math.inf)],
        norms=[3.0],
        path=Path("report.md"),
        checkpoint_path=Path("good.ckpt"),
    )
    error.add_note("from the launcher")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301, our own
    assert isinstance(copy, RuntimeError)
    assert str(copy) == "loss is nan"
    assert vars(copy) == vars(error)
