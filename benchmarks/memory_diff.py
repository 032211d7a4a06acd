"""`memtools diff`: changes of one line in models of timm and transformers, found and their lines named.

Each model is trained by a Lightning module of a file of its own. Its step is estimated before and after a change of one
line: a copy of an activation that the model keeps, in a copy of the library's own source; a `del` that the step drops;
an optimizer's second state. A change is found if the peak grew and the line with the largest growth is the one that
allocates what is kept.

    python -m lightning_memtools.null_cuda benchmarks/memory_diff.py
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from machine import save

from lightning_memtools.budgets.measuring import peak_of_estimate
from lightning_memtools.budgets.memory_diff import MemoryDiff
from lightning_memtools.estimate import estimate_memory

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.zoo import timm

KEPT = "self.memtools_kept = [*getattr(self, 'memtools_kept', ()), {}.detach().clone()]"
# module, class, method, variable to keep, and how the model and its batch are made.
IMAGES, TOKENS = "torch.zeros(4, 3, 224, 224)", "torch.zeros(2, 128, dtype=torch.long)"
CASES = {
    "timm resnet18": ("timm.models.resnet", "ResNet", "forward_features", "x", "resnet18()", IMAGES),
    "timm vit_tiny": (
        "timm.models.vision_transformer", "VisionTransformer", "forward_features", "x", "vit_tiny_patch16_224()",
        IMAGES,
    ),
    "timm convnext_atto": ("timm.models.convnext", "ConvNeXt", "forward_features", "x", "convnext_atto()", IMAGES),
    "timm efficientnet_b0": (
        "timm.models.efficientnet", "EfficientNet", "forward_features", "x", "efficientnet_b0()", IMAGES,
    ),
    "timm mixer_s32": ("timm.models.mlp_mixer", "MlpMixer", "forward_features", "x", "mixer_s32_224()", IMAGES),
    "transformers gpt2": (
        "transformers.models.gpt2.modeling_gpt2", "GPT2Model", "forward", "hidden_states",
        "GPT2Model(GPT2Config(n_layer=4, n_embd=256, n_head=4))", TOKENS,
    ),
    "transformers llama": (
        "transformers.models.llama.modeling_llama", "LlamaModel", "forward", "hidden_states",
        "LlamaModel(LlamaConfig(num_hidden_layers=4, hidden_size=256, intermediate_size=512, vocab_size=8000))", TOKENS,
    ),
    "transformers bert": (
        "transformers.models.bert.modeling_bert", "BertModel", "forward", "sequence_output",
        "BertModel(BertConfig(num_hidden_layers=4, hidden_size=256, intermediate_size=512, num_attention_heads=4))",
        TOKENS,
    ),
    "transformers distilbert": (
        "transformers.models.distilbert.modeling_distilbert", "DistilBertModel", "forward", "embeddings",
        "DistilBertModel(DistilBertConfig(n_layers=4, dim=256, hidden_dim=512, n_heads=4))", TOKENS,
    ),
    "transformers vit": (
        "transformers.models.vit.modeling_vit", "ViTModel", "forward", "sequence_output",
        "ViTModel(ViTConfig(num_hidden_layers=4, hidden_size=192, intermediate_size=384, num_attention_heads=3))",
        IMAGES,
    ),
}  # fmt: skip
TASK = """
import lightning as L
import torch


class Task(L.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def training_step(self, batch):
        self.scratch = torch.stack([batch] * {copies})
        del self.scratch
        out = self.net(batch)
        return out.mean() if isinstance(out, torch.Tensor) else out.last_hidden_state.mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""
CHANGES = {
    "a dropped del": ("        del self.scratch\n", "\n", "self.scratch = torch.stack"),
    "a second optimizer state": ("lr=0.1)", "lr=0.1, momentum=0.9)", "torch.optim.SGD"),
}


def imported(name: str, file: Path, package: str = "") -> ModuleType:
    """Import a file, as a module of a package where its relative imports need one."""
    full = f"{package}.{name}" if package else name
    spec = importlib.util.spec_from_file_location(full, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[full] = module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # timm says that a model is registered twice
        spec.loader.exec_module(module)
    return module


def with_kept(source: str, cls: str, method: str, variable: str) -> tuple[str, int]:
    """Return a source whose method keeps a variable before its last return, and the number of the new line."""
    (found,) = (
        part
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and node.name == cls
        for part in node.body
        if isinstance(part, ast.FunctionDef) and part.name == method
    )
    last = max(node.lineno for node in ast.walk(found) if isinstance(node, ast.Return))
    lines = source.splitlines(keepends=True)
    indent = lines[last - 1][: len(lines[last - 1]) - len(lines[last - 1].lstrip())]
    lines.insert(last - 1, f"{indent}{KEPT.format(variable)}\n")
    return "".join(lines), last


def measured(task: ModuleType, library: ModuleType, make: str, batch: str, engine: Any) -> Any:
    """Return the peak of the training step."""
    configs = importlib.import_module(library.__package__ or "") if "Config(" in make else library
    names = {**vars(configs), **vars(library)}
    with torch.device("meta"):
        net = eval(make, names)  # noqa: S307, of the table above
        inputs = eval(batch)  # noqa: S307, as above
    return peak_of_estimate(estimate_memory(task.Task(net), inputs, engine=engine, steps=3), gpu=None)


def changed(name: str, folder: Path, engine: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each change of a model, and what the comparison says of it."""
    module, cls, method, variable, make, batch = CASES[name]
    base_file, net_file = folder / "task.py", folder / "net.py"
    task = TASK.format(copies=1024 if batch == TOKENS else 2)
    source = Path(importlib.import_module(module).__file__ or "").read_text(encoding="utf-8")
    package = module.rpartition(".")[0]
    net_file.write_text(source, encoding="utf-8")
    base_file.write_text(task, encoding="utf-8")
    library, base_task = imported("memtools_net", net_file, package), imported("task", base_file)
    before = measured(base_task, library, make, batch, engine)

    kept, number = with_kept(source, cls, method, variable)
    net_file.write_text(kept, encoding="utf-8")
    after = measured(base_task, imported("memtools_net", net_file, package), make, batch, engine)
    yield "a kept activation", verdict(before, after, f"{net_file.name}:{number}: ")

    net_file.write_text(source, encoding="utf-8")
    library = imported("memtools_net", net_file, package)
    for change, (old, new, text) in CHANGES.items():
        edited = task.replace(old, new)
        assert edited != task
        base_file.write_text(edited, encoding="utf-8")
        at = 1 + next(at for at, line in enumerate(edited.splitlines()) if text in line)
        after = measured(imported("task", base_file), library, make, batch, engine)
        yield change, verdict(before, after, f"{base_file.name}:{at}: ")


def verdict(before: Any, after: Any, place: str) -> dict[str, Any]:
    """Return whether the growth was found, and its line named first."""
    diff = MemoryDiff(before, after)
    total, lines = diff.totals[0], diff.lines
    grown = [one for one in lines if one.difference > 0]
    return {
        "grew_bytes": total.difference,
        "first_line": Path(grown[0].name.partition(": ")[0]).name if grown else "",
        "first_line_bytes": grown[0].difference if grown else 0,
        "found": total.difference > 0 and bool(grown) and f"{grown[0].name}".rpartition("/")[2].startswith(place),
    }


def main() -> None:
    """Measure all models."""
    timm()
    result = {}
    for engine in ("simulation", "cuda"):
        started = time.perf_counter()
        models: dict[str, dict[str, Any]] = {}
        for name in CASES:
            with tempfile.TemporaryDirectory() as folder:
                models[name] = dict(changed(name, Path(folder), engine))
            print(engine, name, {change: one["found"] for change, one in models[name].items()}, file=sys.stderr)
        all_of = [one for changes in models.values() for one in changes.values()]
        found, seconds = sum(one["found"] for one in all_of), round(time.perf_counter() - started, 1)
        result[engine] = {"found": found, "of": len(all_of), "seconds": seconds, "models": models}
    save("memory_diff", result)


if __name__ == "__main__":
    main()
