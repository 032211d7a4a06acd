"""What HaltOnNaN can see of the gradients under each strategy."""

from __future__ import annotations

from lightning_memtools.nonfinite.step_guard import Gradients

# By the names of the strategy's classes: a callback of `lightning` may serve a Trainer of `pytorch_lightning`, whose
# classes are other objects of the same names. The first name found along the class's ancestors decides.
_SEEN_AS: dict[str, Gradients] = {
    "SingleDeviceStrategy": "whole",
    "FSDPStrategy": "sharded",
    "ModelParallelStrategy": "sharded",
    "DDPStrategy": "replicated",
}


_REFUSED = {
    "DeepSpeedStrategy": "DeepSpeed keeps gradients in partitions of its own and leaves p.grad empty, so that a check "
    "would see none. DeepSpeed skips overflowing steps itself when it trains in fp16.",
    "XLAStrategy": "reading a number in every step would cut XLA's graph in two.",
    "SingleDeviceXLAStrategy": "reading a number in every step would cut XLA's graph in two.",
}


def gradients_under(strategy: type, *, world_size: int) -> Gradients:
    """How a rank's gradients relate to those of the other ranks under this strategy.

    Raises:
        ValueError: The gradients cannot be seen under it; the message says why.
    """
    names = [ancestor.__name__ for ancestor in strategy.__mro__]
    for name in names:
        if name in _REFUSED:
            raise ValueError(
                f"HaltOnNaN cannot guard a run under {strategy.__name__}: {_REFUSED[name]} Remove HaltOnNaN, or train "
                "with a strategy that lets it see the gradients: single device, DDP, FSDP or ModelParallelStrategy."
            )
    for name in names:
        if name in _SEEN_AS:
            return _SEEN_AS[name]
    # Of a strategy nobody here knows, only this is sure: an agreement in each step is right whatever it does.
    return "whole" if world_size == 1 else "sharded"
