"""Frees the memory that a failed backward pass still holds."""

from __future__ import annotations

import torch


def free_failed_backward() -> None:
    """Free the tensors that a backward pass still holds after it has raised. Nothing else refers to them.

    Autograd's queue of this thread keeps the nodes that were not run yet, with the tensors they saved, until the next
    backward pass removes them. So this runs a small one.
    """
    with torch.inference_mode(mode=False), torch.enable_grad():
        torch.ones(1, device="cpu", requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
