"""torch.compile: off while a device is active, and said once."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch

from lightning_memtools.memory.virtual.patches import Patches


class EagerCompilation:
    """Has compiled code run eagerly, and leaves the compiler as it was.

    Under a dispatch mode torch does not compile. But it would run what it has compiled before, whose memory no mode
    sees, and it would remember of each function called that it is not to be compiled, for good.
    """

    def __init__(self) -> None:
        self._stance: Any = None
        self._said = False

    def begin(self, patches: Patches) -> None:
        """Switch compilation off; where the compiler is not loaded yet, only when somebody first compiles."""
        if "torch._dynamo" in sys.modules:
            self._force_eager()

        def make(original: Any) -> Any:
            def compile_(*args: Any, **kwargs: Any) -> Any:
                self.say()
                self._force_eager()
                return original(*args, **kwargs)

            return compile_

        patches.replace(torch, "compile", make)

    def say(self) -> None:
        """Warn, the first time."""
        if self._said:
            return
        self._said = True
        warnings.warn(
            "torch.compile has no effect inside a VirtualDevice: compiled code runs eagerly there, and its memory is "
            "that of the eager run.",
            UserWarning,
            stacklevel=3,
        )

    def end(self) -> None:
        """Switch compilation on again, if it was."""
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None

    def _force_eager(self) -> None:
        if self._stance is None:
            # Takes effect at once; used as a context manager it remembers what to go back to.
            self._stance = torch.compiler.set_stance("force_eager")
