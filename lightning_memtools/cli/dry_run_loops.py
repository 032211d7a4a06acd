"""Hand-written training loops in a dry run: what their models and optimizers hold, and what layers keep."""

from __future__ import annotations

import weakref

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_memtools._torch import has_compiled
from lightning_memtools.cli.dry_run_trainers import RunObserver
from lightning_memtools.memory.living_objects import instances_of, outermost


class LoopWatch:
    """Looks at models and optimizers after each step of an optimizer, unless a Trainer runs, which is observed itself.

    Args:
        observer: Is told what is found.

    Attributes:
        n_steps: The number of optimizer steps so far, those of Trainers included.
    """

    def __init__(self, observer: RunObserver) -> None:
        self._observer = observer
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.n_steps = 0
        register_optimizer_step_post_hook(lambda optimizer, *_: self._end_step(optimizer))

    def _end_step(self, optimizer: Optimizer) -> None:
        self.n_steps += 1
        if self._observer.is_watching:
            return
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            trained = {id(one) for group in optimizer.param_groups for one in group["params"]}
            models = outermost(instances_of(nn.Module))
            self._models.update(one for one in models if any(id(weight) in trained for weight in one.parameters()))
            # From the second step on: in the first, cuBLAS makes its workspaces within some layer. Hooks would change
            # what is compiled.
            if not has_compiled():
                for model in self._models:
                    self._observer.watch_layers(model)
        self._note()

    def look(self) -> None:
        """Called when the script ends with an error: note models and optimizers if no step was finished."""
        if not self._observer.is_watching and not self._optimizers:
            self._models.update(outermost(instances_of(nn.Module)))
            self._note()

    def _note(self) -> None:
        models = list(self._models)
        self._observer.see(models[0] if len(models) == 1 else nn.ModuleList(models), list(self._optimizers), None)
