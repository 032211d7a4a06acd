"""One of litgpt's fine-tuning scripts as its published table ran it, with synthetic tokens and without weights.

The script of a dry run; benchmarks/litgpt.py runs it. Arguments: the folder of litgpt's source, a config in it, the
number of devices, and the number of tokens of each sample.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml

STEPS = 2


def main() -> None:
    """Run the script's own `setup`, `main` and `fit` for two optimizer steps."""
    source, config, devices, length = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    sys.path.insert(0, str(source))
    script: Any = importlib.import_module(f"litgpt.finetune.{config.stem}")
    args, litgpt_config, data = (importlib.import_module(f"litgpt.{name}") for name in ("args", "config", "data"))
    wanted = yaml.safe_load((source / "config_hub" / "finetune" / config).read_text(encoding="utf-8"))

    class Tokens(data.DataModule):  # type: ignore[misc, name-defined] # a class of a checkout
        """Samples of one length."""

        def connect(self, *, batch_size: int, max_seq_length: int, **_: Any) -> None:
            sample = torch.ones(length, dtype=torch.int64)
            samples: Any = [{"input_ids": sample, "labels": sample}] * 64
            collate = data.get_sft_collate_fn(max_seq_length=max_seq_length)
            self.loader: Any = torch.utils.data.DataLoader(samples, batch_size=batch_size, collate_fn=collate)

        def train_dataloader(self) -> Any:
            return self.loader

        val_dataloader = train_dataloader

    fit = script.fit

    def fit_and_end(*arguments: Any, **options: Any) -> None:
        fit(*arguments, **options)
        raise SystemExit(0)  # here the script prints the published figure; what follows saves a checkpoint

    # Files that a download would have brought.
    script.auto_download_checkpoint = lambda model_name, **_: Path(model_name)
    script.check_valid_checkpoint_dir = script.load_checkpoint = lambda *_, **__: None
    script.Tokenizer = lambda _: SimpleNamespace()
    script.check_nvlink_connectivity = lambda *_: None  # asks nvidia-smi
    script.fit = fit_and_end
    with tempfile.TemporaryDirectory() as folder:
        model = dataclasses.asdict(litgpt_config.Config.from_name(Path(wanted["checkpoint_dir"]).name))
        Path(folder, "model_config.yaml").write_text(yaml.dump(model), encoding="utf-8")
        script.setup(
            **wanted
            | {
                "checkpoint_dir": Path(folder),
                "out_dir": Path(folder, "out"),
                "devices": devices,
                "data": Tokens(),
                "train": args.TrainArgs(**wanted["train"] | {"max_steps": STEPS}),
                "eval": args.EvalArgs(**wanted["eval"]),
            }
        )


if __name__ == "__main__":
    main()
