"""The last layer of a language model, whose output is never computed as a whole if only cross-entropy reads it.

With a vocabulary of 50,000 words, logits take more memory than all blocks of a recomputed model: they exist as logits,
as log-probabilities and as a gradient. Checkpointing does not help against that. Cross-entropy in chunks does, since
all logits never exist at the same time.
"""

from __future__ import annotations

import warnings

from torch import Tensor, nn

from lightning_memtools._torch import is_fsdp_module
from lightning_memtools.checkpointing.chains import forward_of_class, passes_through
from lightning_memtools.checkpointing.chunked_cross_entropy import chunk_rows
from lightning_memtools.checkpointing.deferred_logits import deferred_linear
from lightning_memtools.memory.user_code import line_on_stack
from lightning_memtools.warning_categories import DegradedWarning

# Fewer classes make small logits.
_LEAST_CLASSES = 1024


class LossHeadWarning(DegradedWarning):
    """Warns that a language model's loss is no longer computed in chunks, because something reads the logits."""


def possible_heads(model: nn.Module) -> list[str]:
    """Return the names of the linear layers whose output may be logits: those with at least 1,024 outputs."""
    if any(map(is_fsdp_module, model.modules())):  # weights are there within a layer's own forward only
        return []
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "forward" not in vars(module)
        and module.out_features >= _LEAST_CLASSES
    ]


class DeferredHead:
    """Replaces the forward of a linear layer, so that its output is not computed if only cross-entropy uses it.

    Once anything else has read the output, the layer runs as usual.

    Args:
        name: The layer's name.
        module: The layer.
        warns: Warn if anything but cross-entropy reads the output.

    Attributes:
        n_losses: The number of times that cross-entropy was called on the output.
        read_by: The function that read the output, not counting cross-entropy, and the line of code; "" if none.
        chunk_rows: The number of rows of logits that cross-entropy computes at a time.
        is_off: True if the layer runs as usual again.
        logits: The number of predictions, the number of classes, and the bytes of one copy of all logits.
    """

    def __init__(self, name: str, module: nn.Linear, *, warns: bool) -> None:
        self.n_losses = 0
        self.logits = 0, 0, 0
        self.read_by = ""
        self.is_off = False
        self.chunk_rows = chunk_rows(module.in_features)
        self._name, self._module = name, module
        self._trained = module.training
        self._warns = warns

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002, Linear's own name, which callers may use
        """Return an output that is computed only when read. If `is_off`, or in eval mode, compute it at once."""
        if self.is_off or passes_through(self._module, trained=self._trained):
            out: Tensor = forward_of_class(self._module)(input)
            return out
        made = deferred_linear(input, self._module.weight, self._module.bias, self)
        classes = self._module.out_features
        self.logits = made.numel() // classes, classes, made.nbytes
        return made

    def on_read(self, function: str) -> None:
        """Run the layer as usual from now on, because `function` has read its output."""
        line = line_on_stack()
        self.read_by = f"`{function}`" + (f" at {line}" if line is not None else "")
        self.is_off = True
        if self._warns:
            warnings.warn(
                f"The loss of {self._name or 'the model'} is not computed in chunks any more, because {self.read_by} "
                "reads its logits. From the next step on the logits take their memory again. Set "
                'GradientCheckpointing(loss_head="keep"), or let nothing but cross_entropy take the logits while '
                "gradients are on.",
                LossHeadWarning,
                stacklevel=2,
            )
