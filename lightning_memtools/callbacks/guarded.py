"""The guard of callbacks that only watch: an error in one of them never changes how training goes or ends."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_memtools._lightning import EitherCallback, refuse_other_package, training_step
from lightning_memtools.memory.error_frames import in_one_line
from lightning_memtools.reporting.loggers import log_text
from lightning_memtools.reporting.neighbours import Neighbour
from lightning_memtools.reporting.ranks import RankPosts
from lightning_memtools.warning_categories import DegradedWarning

T = TypeVar("T")
Hook = TypeVar("Hook", bound=Callable[..., Any])
# The Trainers whose present call has failed, and no errors: these would keep the Trainer, and the step's tensors.
_ENDED: weakref.WeakSet[Trainer] = weakref.WeakSet()


def watched(hook: Hook, name: str = "") -> Hook:
    """Wrap a WatchingCallback's hook so that errors in it switch the callback off. `name` overrides the hook's name."""
    name = name or hook.__name__
    # Here it is not too slow to ask whether another rank has switched the callback off.
    is_rare = hasattr(Callback, name) and "batch" not in name and not name.startswith(("on_before_", "on_after_"))

    @functools.wraps(hook)
    def guarded(self: WatchingCallback, trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
        if name == "setup":
            refuse_other_package(trainer)
            self.switch_on(trainer)
        if self.is_off or (is_rare and self.is_off_elsewhere()):
            return None
        try:
            return hook(self, trainer, *args, **kwargs)
        except Exception as error:
            if isinstance(error, self.documented) and name != "on_exception":  # there, another error is on its way
                raise
            self.switch_off(error, notes_on=args[-1] if name == "on_exception" else None)
        finally:
            if name == "on_exception":
                _log_ending(trainer, args[-1])

    return guarded  # type: ignore[return-value]


class WatchingCallback(EitherCallback, Neighbour):
    """Base class of callbacks whose own errors never end a run.

    Each hook that a subclass defines is guarded: an error gives one warning, and switches the callback off for the rest
    of the run. The other ranks switch it off at the next hook that does not run in every batch.

    Attributes:
        documented: The types of errors that the hooks raise on purpose.
        page: The name of the callback's page in docs/.
        is_off: True if the callback is switched off.
    """

    documented: ClassVar[tuple[type[Exception], ...]] = ()
    page: ClassVar[str] = "guide"
    is_off = False
    _posts: RankPosts | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        is_ours = cls.__module__.startswith("lightning_memtools.")  # the code of a user's subclass may raise
        for name, hook in list(vars(cls).items()) if is_ours else ():
            if name.startswith(("on_", "setup", "teardown")) and hasattr(Callback, name):
                setattr(cls, name, watched(hook, name))

    @watched
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin a run with the callback switched on, even if an earlier run switched it off."""

    def stop_watching(self) -> None:
        """Release all tensors and undo all changes to the run. Idempotent. Subclasses override it."""

    def switch_on(self, trainer: Trainer) -> None:
        """Switch the callback on for a new run of the Trainer."""
        vars(self).pop("is_off", None)
        _ENDED.discard(trainer)
        self._posts = RankPosts(type(self).__name__) if trainer.world_size > 1 else None

    def switch_off(self, error: Exception | str, *, notes_on: BaseException | None = None) -> None:
        """Switch the callback off for the rest of the run, on this rank and on all others, and warn once.

        Args:
            error: The reason.
            notes_on: An error that is about to be raised. The message is added to it as a note instead of a warning.
        """
        self.is_off = True
        why = error if isinstance(error, str) else in_one_line(error)
        with suppress(Exception):
            self.stop_watching()
        if self._posts is not None:
            self._posts.post({"off": why})
        text = (
            f"{type(self).__name__} failed itself, and is off for the rest of this run, which goes on: {why} "
            f"(read more in docs/{self.page}.md and docs/guide.md)"
        )
        if notes_on is None:
            warnings.warn(text, DegradedWarning, stacklevel=3)
        else:
            notes_on.add_note(text)

    def is_off_elsewhere(self) -> bool:
        """Return True if another rank has switched this callback off. If so, switch it off here too."""
        read = [] if self._posts is None else self._posts.read()
        if reasons := [rank.values["off"] for rank in read if "off" in rank.values]:
            self.switch_off(f"on another rank, {reasons[0]}")
        return bool(reasons)


def _log_ending(trainer: Trainer, error: BaseException) -> None:
    """Log the error that ended a Trainer run, once, for TensorBoard's Memory tab. KeyboardInterrupt is not logged."""
    if isinstance(error, Exception) and trainer not in _ENDED:
        _ENDED.add(trainer)
        with suppress(Exception):
            log_text(trainer, "memtools/ended", in_one_line(error, most=1000), training_step(trainer))


def unless_it_fails(work: Callable[[], T], otherwise: Callable[[str], T]) -> T:
    """Return `work()`. If that raises, return `otherwise(message)`, where `message` describes the error.

    Wrap the work between two collective calls in this, so that a rank that fails still takes part in the second.
    """
    try:
        return work()
    except Exception as error:  # noqa: BLE001, the purpose of this function
        return otherwise(in_one_line(error))
