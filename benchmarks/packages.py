r"""Plans of GradientCheckpointing for the models of ten public packages, beside the peaks of real runs.

Each model is trained by its own package: its LightningModule, its loader and its collate function where it has them,
random data and random weights, a real Trainer on the CPU within a `VirtualDevice`. It trains twice, without a plan and
with one, for a few steps on batches of one size. Peaks are those of the third step, as
in GradientCheckpointing's report. Install the packages into an environment of their own, beside this library:

    python -m venv /tmp/packages && /tmp/packages/bin/pip install -e . torch torchvision \
        --extra-index-url https://download.pytorch.org/whl/cpu
    /tmp/packages/bin/pip install chemprop lightly segmentation-models-pytorch darts neuralforecast scvi-tools \
        anomalib torchgeo pytorch-forecasting lightning-uq-box
    OMP_NUM_THREADS=1 /tmp/packages/bin/python benchmarks/packages.py

Names on the command line measure these models, or those of a package, alone. The other results are kept.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))
# darts and neuralforecast use the other of Lightning's two packages. Of both, lightning_memtools takes the first one
# that was imported.
if TYPE_CHECKING or not {"darts", "neuralforecast"} & {*sys.argv}:
    import lightning.pytorch as pl
else:
    import pytorch_lightning as pl

import numpy as np
import torch
from machine import known, save
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_memtools import GradientCheckpointing, VirtualDevice
from lightning_memtools._lightning import EitherCallback
from lightning_memtools.memory.peaks import PeakWindow, peak_counter
from lightning_memtools.memory.readers import reader_for

STEPS = 4
MEASURED = 2  # the third: GradientCheckpointing measures it too
_TRAINER: dict[str, Any] = {
    "accelerator": "cpu",
    "max_steps": STEPS,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}

Fit = Callable[[list[Any]], object]
"""Trains a model with these callbacks."""


class MeasuredPeak(EitherCallback):
    """The peak of allocated memory of the third step. It comes after GradientCheckpointing, which plans before it."""

    def __init__(self) -> None:
        self.peak_bytes: int | None = None
        self._steps = 0
        self._window: PeakWindow | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        del batch, batch_idx, pl_module
        reader = reader_for(trainer.strategy.root_device)
        if self._steps == MEASURED and reader is not None:
            self._window = peak_counter(reader).open()
            self._window.resume()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        del trainer, outputs, batch, batch_idx, pl_module
        self._steps += 1
        if self._window is not None:
            self._window.pause()
            self.peak_bytes = self._window.allocated
            self._window.close()
            self._window = None


class Training(pl.LightningModule):
    """What the examples of packages of plain models do: a loss of the batch, and Adam."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        del batch_idx
        return self.loss(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def fitted(module: Any, loader: Any) -> Fit:
    """A fit of a LightningModule on the batches of a loader, or of a data module."""
    return lambda callbacks: pl.Trainer(callbacks=callbacks, **_TRAINER).fit(module, loader)


# --- chemprop


MOLECULES = [
    "CC(=O)Oc1ccccc1C(=O)O", "Cn1cnc2c1c(=O)n(C)c(=O)n2C", "CC(C)Cc1ccc(cc1)C(C)C(=O)O", "c1ccc2ccccc2c1", "CCO",
    "CC(=O)Nc1ccc(O)cc1", "C1CCCCC1", "O=C(O)c1ccccc1O", "CCN(CC)CC", "Clc1ccccc1", "CC(C)=O", "c1ccncc1",
]  # fmt: skip


def chemprop_network(*, of_atoms: bool) -> Fit:
    from chemprop import data, models  # noqa: PLC0415
    from chemprop import nn as parts  # noqa: PLC0415

    points = [data.MoleculeDatapoint.from_smi(smi, np.array([float(at)])) for at, smi in enumerate(MOLECULES * 16)]
    loader = data.build_dataloader(data.MoleculeDataset(points), batch_size=len(points) // STEPS, shuffle=False)
    passing = (parts.AtomMessagePassing if of_atoms else parts.BondMessagePassing)(d_h=300, depth=4)
    readout = parts.AttentiveAggregation(output_size=300) if of_atoms else parts.MeanAggregation()
    return fitted(models.MPNN(passing, readout, parts.RegressionFFN(), batch_norm=True), loader)


def chemprop_of_two() -> Fit:
    from chemprop import data, models  # noqa: PLC0415
    from chemprop import nn as parts  # noqa: PLC0415

    sets = [
        data.MoleculeDataset(
            [data.MoleculeDatapoint.from_smi(smi, np.array([float(at)])) for at, smi in enumerate(smis * 16)]
        )
        for smis in (MOLECULES, MOLECULES[::-1])
    ]
    pairs = data.MulticomponentDataset(sets)
    loader = data.build_dataloader(pairs, batch_size=len(pairs) // STEPS, shuffle=False)
    passing = parts.MulticomponentMessagePassing([parts.BondMessagePassing() for _ in sets], n_components=2)
    network = models.MulticomponentMPNN(passing, parts.NormAggregation(), parts.RegressionFFN(input_dim=600))
    return fitted(network, loader)


# --- lightly: images in several views


def images(n: int, transform: Any) -> DataLoader[Any]:
    """Pictures through a package's transform and its collate function."""
    from lightly.data import LightlyDataset  # noqa: PLC0415
    from PIL import Image  # noqa: PLC0415
    from torchvision.datasets import VisionDataset  # noqa: PLC0415

    class Pictures(VisionDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return n * STEPS

        def __getitem__(self, index: int) -> Any:
            noise = np.random.default_rng(index).integers(0, 255, (80, 80, 3), dtype=np.uint8)
            return self.transform(Image.fromarray(noise)), index % 10

    return DataLoader(LightlyDataset.from_torch_dataset(Pictures("", transform=transform)), batch_size=n)


def simclr() -> Fit:
    import torchvision  # noqa: PLC0415
    from lightly.loss import NTXentLoss  # noqa: PLC0415
    from lightly.models.modules import SimCLRProjectionHead  # noqa: PLC0415
    from lightly.transforms import SimCLRTransform  # noqa: PLC0415

    backbone = nn.Sequential(*list(torchvision.models.resnet18().children())[:-1], nn.Flatten())
    criterion = NTXentLoss()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        first, second = batch[0]
        found: Tensor = criterion(model(first), model(second))
        return found

    model = nn.Sequential(backbone, SimCLRProjectionHead(512, 512, 128))
    return fitted(Training(model, loss), images(16, SimCLRTransform(input_size=64)))


def dino() -> Fit:
    import torchvision  # noqa: PLC0415
    from lightly.loss import DINOLoss  # noqa: PLC0415
    from lightly.models.modules import DINOProjectionHead  # noqa: PLC0415
    from lightly.models.utils import deactivate_requires_grad, update_momentum  # noqa: PLC0415
    from lightly.transforms.dino_transform import DINOTransform  # noqa: PLC0415

    def network() -> nn.Module:
        backbone = nn.Sequential(*list(torchvision.models.resnet18().children())[:-1], nn.Flatten())
        return nn.Sequential(backbone, DINOProjectionHead(512, 256, 64, 1024))

    class Dino(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = network(), network()
            deactivate_requires_grad(self.teacher)
            self.criterion = DINOLoss(output_dim=1024)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            del batch_idx
            update_momentum(self.student, self.teacher, m=0.99)
            views = batch[0]
            teacher = [self.teacher(view) for view in views[:2]]
            student = [self.student(view) for view in views]
            loss: Tensor = self.criterion(teacher, student, epoch=self.current_epoch)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    return fitted(Dino(), images(8, DINOTransform(global_crop_size=64, local_crop_size=32, n_local_views=2)))


def mae() -> Fit:
    from lightly.models import utils  # noqa: PLC0415
    from lightly.models.modules import MAEDecoderTIMM, MaskedVisionTransformerTIMM  # noqa: PLC0415
    from lightly.transforms import MAETransform  # noqa: PLC0415
    from timm.models.vision_transformer import VisionTransformer  # noqa: PLC0415

    vit = VisionTransformer(img_size=64, patch_size=8, embed_dim=96, depth=6, num_heads=3)

    class Mae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = MaskedVisionTransformerTIMM(vit=vit)
            self.n = self.backbone.sequence_length
            self.decoder = MAEDecoderTIMM(
                num_patches=vit.patch_embed.num_patches, patch_size=8, embed_dim=96, decoder_embed_dim=64,
                decoder_depth=2, decoder_num_heads=2,
            )  # fmt: skip

    def loss(model: Any, batch: Any) -> Tensor:
        pictures = batch[0][0]
        n = pictures.shape[0]
        kept, masked = utils.random_token_mask(size=(n, model.n), mask_ratio=0.75, device=pictures.device)
        encoded = model.backbone.encode(images=pictures, idx_keep=kept)
        embedded = model.decoder.embed(encoded)
        tokens = utils.set_at_index(
            utils.repeat_token(model.decoder.mask_token, (n, model.n)), kept, embedded.type_as(encoded)
        )
        predicted = model.decoder.predict(utils.get_at_index(model.decoder.decode(tokens), masked))
        patches = utils.patchify(pictures, vit.patch_embed.patch_size[0])
        return F.mse_loss(predicted, utils.get_at_index(patches, masked - 1))

    return fitted(Training(Mae(), loss), images(16, MAETransform(input_size=64)))


# --- segmentation-models-pytorch


def smp(name: str, **options: Any) -> Fit:
    import segmentation_models_pytorch as smp  # noqa: PLC0415

    model = smp.create_model(name, encoder_weights=None, in_channels=3, classes=4, **options)
    criterion = smp.losses.DiceLoss(smp.losses.MULTICLASS_MODE, from_logits=True)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, mask = batch
        logits = model(x)
        counts = smp.metrics.get_stats(logits.argmax(1), mask, mode="multiclass", num_classes=4)
        assert counts[0].shape == (x.shape[0], 4)
        found: Tensor = criterion(logits, mask) + F.cross_entropy(logits, mask)
        return found

    pairs = list(zip(torch.randn(8 * STEPS, 3, 96, 96), torch.randint(0, 4, (8 * STEPS, 96, 96)), strict=True))
    return fitted(Training(model, loss), DataLoader(pairs, batch_size=8))  # type: ignore[arg-type]


# --- darts


def darts(name: str, **options: Any) -> Fit:
    from darts import TimeSeries, models  # noqa: PLC0415

    series = TimeSeries.from_values(np.random.default_rng(0).normal(size=(400, 2)).astype(np.float32))

    def fit(callbacks: list[Any]) -> None:
        given = {"callbacks": callbacks, **_TRAINER}
        model = getattr(models, name)(
            input_chunk_length=48, random_state=0, batch_size=64, pl_trainer_kwargs=given, save_checkpoints=False,
            **options,
        )  # fmt: skip
        model.fit(series, max_samples_per_ts=64 * STEPS)

    return fit


# --- neuralforecast


def neuralforecast(name: str, **options: Any) -> Fit:
    import pandas as pd  # noqa: PLC0415
    from neuralforecast import models  # noqa: PLC0415
    from neuralforecast.tsdataset import TimeSeriesDataset  # noqa: PLC0415

    n = 120
    table = pd.concat(
        [
            pd.DataFrame({"unique_id": str(at), "ds": np.arange(n), "y": np.random.default_rng(at).normal(size=n)})
            for at in range(8 * STEPS)
        ]
    )
    data, *_ = TimeSeriesDataset.from_df(table)

    def fit(callbacks: list[Any]) -> None:
        given = {one: value for one, value in _TRAINER.items() if one != "max_steps"}
        model = getattr(models, name)(
            h=12, input_size=48, max_steps=STEPS, batch_size=8, windows_batch_size=256, callbacks=callbacks,
            **options, **given,
        )  # fmt: skip
        # Not by NeuralForecast.fit, which trains a copy of the model, with copies of the callbacks.
        model.fit(data)

    return fit


# --- scvi-tools


def scvi(name: str, **options: Any) -> Fit:
    import anndata  # noqa: PLC0415
    import scvi as package  # noqa: PLC0415

    rng = np.random.default_rng(0)
    cells = anndata.AnnData(rng.poisson(2, (128 * STEPS, 400)).astype(np.float32))
    cells.obs["batch"] = np.tile(["a", "b"], 64 * STEPS)
    cells.obs["kind"] = np.tile(["x", "y", "unknown", "z"], 32 * STEPS)
    kind = getattr(package.model, name)
    if name == "TOTALVI":
        cells.obsm["protein"] = rng.poisson(5, (128 * STEPS, 20)).astype(np.float32)
        kind.setup_anndata(cells, batch_key="batch", protein_expression_obsm_key="protein")
    elif name == "SCANVI":
        kind.setup_anndata(cells, batch_key="batch", labels_key="kind", unlabeled_category="unknown")
    else:
        kind.setup_anndata(cells, batch_key="batch")
    package.settings.dl_num_workers = 0
    model = kind(cells, **options)
    given = {one: value for one, value in _TRAINER.items() if one in {"accelerator", "enable_progress_bar"}}
    # TOTALVI cannot do without cells to validate on.
    share, batch_size = (460 / 512, 115) if name == "TOTALVI" else (1.0, 128)
    return lambda callbacks: model.train(
        max_epochs=1, train_size=share, batch_size=batch_size, shuffle_set_split=False, early_stopping=False,
        callbacks=callbacks, **given,
    )  # fmt: skip


# --- anomalib


def anomalib(name: str, **options: Any) -> Fit:
    from anomalib import models  # noqa: PLC0415
    from anomalib.data import Folder  # noqa: PLC0415
    from anomalib.engine import Engine  # noqa: PLC0415
    from PIL import Image  # noqa: PLC0415

    root = Path.cwd() / "pictures"
    for kind in ("good", "broken"):
        (root / kind).mkdir(parents=True, exist_ok=True)
        for at in range(4 * STEPS):
            noise = np.random.default_rng(at).integers(0, 255, (128, 128, 3), dtype=np.uint8)
            Image.fromarray(noise).save(root / kind / f"{at}.png")
    kind = getattr(models, name)
    data = Folder(
        name="pictures", root=root, normal_dir="good", abnormal_dir="broken", train_batch_size=4, eval_batch_size=4,
        num_workers=0, val_split_mode="none", test_split_mode="none",
        augmentations=kind.configure_pre_processor(image_size=(128, 128)).transform,
    )  # fmt: skip
    model = kind(pre_processor=kind.configure_pre_processor(image_size=(128, 128)), evaluator=False, **options)

    def fit(callbacks: list[Any]) -> None:
        given = {one: value for one, value in _TRAINER.items() if one != "enable_checkpointing"}
        given["max_steps"] = STEPS * (2 if name == "Ganomaly" else 1)  # which has two optimizers
        Engine(callbacks=callbacks, default_root_dir=Path.cwd(), limit_val_batches=0, **given).fit(model, data)

    return fit


# --- torchgeo


def torchgeo(name: str, target: Callable[[int], dict[str, Tensor]], **options: Any) -> Fit:
    from torchgeo import trainers  # noqa: PLC0415
    from torchgeo.datasets import stack_samples  # noqa: PLC0415

    module = getattr(trainers, name)(**options)
    samples: Any = [{"image": torch.randn(4, 64, 64), **target(at)} for at in range(8 * STEPS)]
    loader: DataLoader[Any] = DataLoader(samples, batch_size=8, collate_fn=stack_samples)
    # Its schedule reads val_loss.
    return lambda callbacks: pl.Trainer(callbacks=callbacks, **_TRAINER).fit(module, loader, loader)


# --- pytorch-forecasting


def forecasting(name: str, *, lengths: tuple[int, int] = (24, 24), **options: Any) -> Fit:
    import pandas as pd  # noqa: PLC0415
    import pytorch_forecasting as package  # noqa: PLC0415

    n = 60
    table = pd.concat(
        [
            pd.DataFrame(
                {
                    "series": str(at),
                    "time": np.arange(n),
                    "value": np.random.default_rng(at).normal(size=n) + 10,
                    "day": [str(one % 7) for one in range(n)],
                }
            )
            for at in range(4)
        ],
        ignore_index=True,
    )
    known = {} if name == "NBeats" else {
        "static_categoricals": ["series"], "time_varying_known_categoricals": ["day"],
        "time_varying_known_reals": ["time"], "add_relative_time_idx": name == "TemporalFusionTransformer",
    }  # fmt: skip
    data = package.TimeSeriesDataSet(
        table, time_idx="time", target="value", group_ids=["series"], min_encoder_length=lengths[0],
        max_encoder_length=lengths[1], min_prediction_length=6, max_prediction_length=6,
        time_varying_unknown_reals=["value"],
        target_normalizer=package.GroupNormalizer(groups=["series"]) if name == "DeepAR" else "auto", **known,
    )  # fmt: skip
    if name == "DeepAR":
        options["loss"] = package.NormalDistributionLoss()
    model = getattr(package, name).from_dataset(data, log_interval=-1, **options)
    loader = data.to_dataloader(train=True, batch_size=len(data) // STEPS, shuffle=False, num_workers=0)
    return fitted(model, loader)


# --- lightning-uq-box


def uncertain(make: Callable[[Any, nn.Module], Any]) -> Fit:
    from lightning_uq_box import uq_methods  # noqa: PLC0415
    from lightning_uq_box.models import MLP  # noqa: PLC0415

    network = MLP(n_inputs=16, n_hidden=[512, 512, 512], n_outputs=2, dropout_p=0.1)

    class Numbers(Dataset[dict[str, Tensor]]):
        def __init__(self) -> None:
            device = VirtualDevice.current()
            assert device is not None
            with device.host():
                self._numbers = torch.randn(512 * STEPS, 17)

        def __len__(self) -> int:
            return len(self._numbers)

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {"input": self._numbers[index, :16], "target": self._numbers[index, 16:]}

    data = pl.LightningDataModule.from_datasets(Numbers(), batch_size=512, num_workers=0)
    return fitted(make(uq_methods, network), data)


def label(at: int) -> dict[str, Tensor]:
    return {"label": torch.tensor(at % 5)}


def mask(at: int) -> dict[str, Tensor]:
    return {"mask": torch.full((64, 64), at % 5)}


def number(at: int) -> dict[str, Tensor]:
    return {"label": torch.tensor([float(at)])}


PACKAGES: dict[str, dict[str, Callable[[], Fit]]] = {
    "chemprop": {
        "MPNN, bonds": lambda: chemprop_network(of_atoms=False),
        "MPNN, atoms, attention": lambda: chemprop_network(of_atoms=True),
        "MulticomponentMPNN": chemprop_of_two,
    },
    "lightly": {"SimCLR": simclr, "DINO": dino, "MAE": mae},
    "segmentation-models-pytorch": {
        "Unet, ResNet-18": lambda: smp("unet", encoder_name="resnet18"),
        "Segformer, MiT-B0": lambda: smp("segformer", encoder_name="mit_b0"),
    },
    "darts": {
        "NBEATSModel": lambda: darts("NBEATSModel", output_chunk_length=12, layer_widths=128, num_stacks=6),
        "TCNModel": lambda: darts("TCNModel", output_chunk_length=12, num_filters=32, num_layers=5),
        "TFTModel": lambda: darts("TFTModel", output_chunk_length=12, add_relative_index=True),
    },
    "neuralforecast": {
        "NHITS": lambda: neuralforecast("NHITS"),
        "PatchTST": lambda: neuralforecast("PatchTST"),
        "TFT": lambda: neuralforecast("TFT", hidden_size=32),
    },
    "scvi-tools": {
        "SCVI": lambda: scvi("SCVI", n_layers=3),
        "TOTALVI": lambda: scvi("TOTALVI"),
        "SCANVI": lambda: scvi("SCANVI", n_layers=2),
    },
    "anomalib": {
        "Fastflow": lambda: anomalib("Fastflow", backbone="resnet18", pre_trained=False),
        "ReverseDistillation": lambda: anomalib("ReverseDistillation", backbone="resnet18", pre_trained=False),
        "Ganomaly": lambda: anomalib("Ganomaly", n_features=32),
    },
    "torchgeo": {
        "SemanticSegmentationTask": lambda: torchgeo(
            "SemanticSegmentationTask", mask, model="unet", backbone="resnet18", in_channels=4, num_classes=5,
            task="multiclass",
        ),
        "ClassificationTask": lambda: torchgeo(
            "ClassificationTask", label, model="resnet18", in_channels=4, num_classes=5, task="multiclass"
        ),
    },
    "pytorch-forecasting": {
        "TemporalFusionTransformer": lambda: forecasting("TemporalFusionTransformer", lengths=(12, 24), hidden_size=32),
        "DeepAR": lambda: forecasting("DeepAR", hidden_size=64, rnn_layers=2),
        "NBeats": lambda: forecasting("NBeats"),
    },
    "lightning-uq-box": {
        "MVERegression": lambda: uncertain(lambda uq, net: uq.MVERegression(net, burnin_epochs=0)),
        "BNN_VI_Regression": lambda: uncertain(
            lambda uq, net: uq.BNN_VI_ELBO_Regression(net, nn.MSELoss(), burnin_epochs=0, num_mc_samples_train=3)
        ),
    },
}  # fmt: skip


def run(package: str, model: str, *, with_plan: bool) -> dict[str, Any]:
    """Train a model, with a plan or without, and say what was predicted and measured."""
    measured, planner = MeasuredPeak(), GradientCheckpointing(bn_dropout="recompute")
    pl.seed_everything(0, verbose=False)
    with warnings.catch_warnings(), VirtualDevice():
        warnings.simplefilter("ignore")
        PACKAGES[package][model]()([planner, measured] if with_plan else [measured])
    plan = planner.plan
    if plan is None:
        return {"outcome": "no plan", "measured": measured.peak_bytes}
    outcome = "nothing worth recomputing" if plan.refused else "plan"
    return {"outcome": outcome, "measured": measured.peak_bytes,
            "predicted": [plan.plain_peak_bytes, plan.peak_bytes]}  # fmt: skip


def measure(package: str, model: str) -> dict[str, Any]:
    """Both runs of a model, in a process and a folder of its own."""
    version = importlib.metadata.version(package)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--run", package, model]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
        return row(version, "the run failed")
    plain, planned = json.loads(done.stdout.splitlines()[-1])
    measured = [plain["measured"], planned["measured"] if planned["outcome"] == "plan" else None]
    return row(version, planned["outcome"], planned.get("predicted", ()), measured)


def row(
    version: str, outcome: str, predicted: Sequence[int | None] = (), measured: Sequence[int | None] = ()
) -> dict[str, Any]:
    """A model's result: measured peaks without and with a plan in MiB, and the predicted ones over them."""
    pairs = [(one, of) for one, of in zip(predicted, measured, strict=False) if one and of]
    return {
        "version": version,
        "outcome": outcome,
        "measured_mib": [round(of / 2**20, 2) for _, of in pairs],
        "predicted_over_measured": [round(one / of, 4) for one, of in pairs],
    }


REMARKS = {
    "scvi-tools: SCANVI": "Its loader repeats the labelled cells by itertools.cycle, which holds all batches of them. "
    "They are in host memory where training runs on a GPU; on the CPU they are the batches on the device.",
}
"""Why some measured peaks are not the predicted ones."""


def summary(models: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns how many models have a plan, and how near the predicted peaks come."""
    ratios = [one["predicted_over_measured"] for one in models.values() if one["predicted_over_measured"]]
    return {
        "packages": len({name.partition(":")[0] for name in models}),
        "planned": sum(one["outcome"] == "plan" for one in models.values()),
        "nothing_worth_recomputing": sum(one["outcome"] == "nothing worth recomputing" for one in models.values()),
        "predicted": len(ratios),
        "within_1_pct": sum(all(abs(one - 1) <= 0.01 for one in each) for each in ratios),
        "models": models,
    }


def main(asked: Sequence[str]) -> None:
    if asked and asked[0] == "--run":
        if importlib.util.find_spec("torchvision") is None:
            from tests.zoo import torchvision_models  # noqa: PLC0415, where it is installed apart

            torchvision_models()
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        runs = [run(asked[1], asked[2], with_plan=with_plan) for with_plan in (False, True)]
        print("\n" + json.dumps(runs))
        return
    order = [f"{package}: {model}" for package, cases in PACKAGES.items() for model in cases]
    for name in order:
        package, _, model = name.partition(": ")
        if asked and package not in asked and name not in asked:
            continue
        measured = measure(package, model) | ({"remark": REMARKS[name]} if name in REMARKS else {})
        models = known("packages").get("models", {}) | {name: measured}  # read only now: it takes minutes
        save("packages", summary({name: models[name] for name in order if name in models}))


if __name__ == "__main__":
    main(sys.argv[1:])
