"""What a backward pass that failed still holds."""

from __future__ import annotations

import torch


def let_go_of_failed_backward() -> None:
    """Free what a backward pass that raised still holds, which nobody can reach.

    Autograd's queue of this thread keeps the nodes that were still to be run, with the tensors they saved, until the
    next backward pass takes them out. So a small one is run.
    """
    with torch.inference_mode(mode=False), torch.enable_grad():
        torch.ones(1, device="cpu", requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
