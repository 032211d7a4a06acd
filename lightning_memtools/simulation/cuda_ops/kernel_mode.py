"""Counts what operators make, with other kernels in the place of some of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning_memtools.memory.virtual.ledger import Ledger
from lightning_memtools.memory.virtual.mode import AccountingMode
from lightning_memtools.simulation.cuda_ops.kernels import Kernel


class KernelMode(AccountingMode):  # type: ignore[no-untyped-call]
    """An `AccountingMode` that runs kernels such as `KERNELS` in place of their operators.

    Attributes:
        work_with: Counts memory that a kernel takes while it runs, in bytes.
    """

    def __init__(self, ledger: Ledger, *args: Any, kernels: Mapping[Any, Kernel], **options: Any) -> None:
        super().__init__(ledger, *args, **options)
        self._kernels = kernels
        self.work_with: Callable[[int], None] = ledger.work_with

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, or what there is in its place."""
        kernel = self._kernels.get(func)
        if kernel is None or self.silent:
            return super().__torch_dispatch__(func, types, args, kwargs)

        def run(func: Any, *args: Any, **kwargs: Any) -> Any:
            return AccountingMode.__torch_dispatch__(self, func, types, args, kwargs)

        return kernel(self, run, func, args, kwargs or {})
