"""The effect and the fix of each mistake, in one line each. The checks add place and evidence."""

from __future__ import annotations

from typing import Any

from lightning_memtools.doctor.findings import Finding, Severity

# The check's name, or that and the kind of mistake: severity, effect and fix, with fields that the check fills in.
MISTAKES: dict[str, tuple[Severity, str, str]] = {
    "batch_norm_one_sample": (
        "error",
        "The first epoch ends with 'Expected more than 1 value per channel when training'.",
        "DataLoader(..., drop_last=True), or a batch size that leaves no single sample.",
    ),
    "shared_memory": (
        "warning",
        "Workers die with a bus error (insufficient shared memory) as soon as loading runs ahead of training.",
        "Fewer workers or a smaller prefetch_factor, or more shared memory: docker run --shm-size or --ipc=host.",
    ),
    "checkpoint_keys/statistics": (
        "error",
        "load_state_dict raises, although a counter matters only to BatchNorm(momentum=None).",
        "Add state[key] = torch.tensor(0) for each missing counter; del state[key] for each unexpected key.",
    ),
    "checkpoint_keys/others": (
        "error",
        "load_state_dict raises, for other sizes also with strict=False; what is missing keeps its initial values.",
        "Build the model as it was saved, or rename the keys: key.removeprefix('module.') for those of a wrapper.",
    ),
    "optimizer_parameters": (
        "warning",
        "They are never trained, and their gradients add up and cost time and memory.",
        "Add them to the optimizer, or call requires_grad_(False) on them.",
    ),
    "symmetric_weights": (
        "warning",
        "The outputs stay copies of one another: the layer has the capacity of one.",
        "Initialise with random values: nn.init.kaiming_uniform_(weight), in place of a constant.",
    ),
    "devices": (
        "warning",
        "The forward pass raises 'Expected all tensors to be on the same device' where they meet.",
        "model.to({home!r}) once everything is registered (tensor.to() alone returns a copy).",
    ),
    "devices/plain": (
        "info",
        "model.to() does not move plain attributes: where they meet the model's tensors, the step raises.",
        "self.register_buffer(name, tensor, persistent=False)",
    ),
    "reproducibility": (
        "info",
        "Weights, dropout and shuffling differ from run to run.",
        "lightning.seed_everything(0, workers=True), before the model is built.",
    ),
    "missing_gradients/none": (
        "info",  # parts of a model that a loss leaves out on purpose, such as a pooler, are common
        "They are never trained, and DDP raises unless find_unused_parameters is set.",
        "requires_grad_(False) if meant; else detach(), no_grad(), checkpoint(use_reentrant=True) or dead ReLUs do it.",
    ),
    "missing_gradients/shrunk": (
        "warning",
        "They shrink towards zero without learning.",
        "Give them weight_decay=0 in a group of their own, requires_grad_(False), or zero_grad(set_to_none=True).",
    ),
    "retained_graphs": (
        "error",
        "Memory grows with every step until it runs out.",
        "Keep numbers and not graphs: total += loss.detach(), outputs.append(out.detach()).",
    ),
    "evaluation_graphs": (
        "warning",
        "Evaluation keeps the activations of the whole forward pass, as training does, for nothing.",
        "with torch.no_grad(): around evaluation, and no enable_grad() in it; detach what is returned.",
    ),
    "loss_broadcast": (
        "error",
        "Every prediction is compared with every target: training runs and learns the mean.",
        "Give both the same shape: target.unsqueeze(1), or prediction.squeeze(1).",
    ),
    "loss_sum": (
        "warning",
        "The gradient grows with the batch, and the best learning rate with it; a larger batch can diverge.",
        'reduction="mean", or divide the sum by the number of samples.',
    ),
    "frozen_batch_norm": (
        "warning",
        "The frozen part normalizes with each batch, and its pretrained statistics are overwritten.",
        "Call eval() on it in on_train_epoch_start, or in your module's train(); requires_grad_(False) is not enough.",
    ),
    "scheduler_interval": (
        "warning",
        "The learning rate hardly changes in this training, or goes up and down many times.",
        'In configure_optimizers: "lr_scheduler": {{"scheduler": scheduler, "interval": "{interval}"}}.',
    ),
    "step": (
        "error",
        "Training ends there; the checks that need more steps say nothing.",
        "Mend the step first, and examine again.",
    ),
}


def finding(mistake: str, place: str, evidence: str, **fields: Any) -> Finding:
    """Return a Finding with the texts of `MISTAKES[mistake]`. `fields` fill in the placeholders in these texts."""
    severity, effect, fix = MISTAKES[mistake]
    check = mistake.partition("/")[0]
    return Finding(check, severity, place, evidence, effect.format(**fields), fix.format(**fields))
