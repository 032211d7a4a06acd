"""The pytest plugin: `@pytest.mark.peak_memory`, recorded peaks, and the name of the test in each message.

pytest loads it at its start, so it imports neither torch nor lightning until a test has a budget.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from lightning_memtools.budgets.current_test import BudgetSettings, CurrentTest

if TYPE_CHECKING:
    from lightning_memtools.budgets.assert_peak_memory import PeakMemoryBudget

_MARK = "peak_memory"
_TEST = pytest.StashKey[CurrentTest]()
_SETTINGS = pytest.StashKey[BudgetSettings]()
_RESULTS = "memtools_peaks"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the command-line options, and the setting for the file of recorded peaks."""
    group = parser.getgroup("memory", "memory under test (lightning_memtools)")
    group.addoption(
        "--memory-record", action="store_true", help="record the peaks of tests with a budget, in place of comparing"
    )
    group.addoption(
        "--memory-tolerance", default="1%", metavar="SHARE",
        help="how much a peak may exceed the recorded one, such as 2%% (default: 1%%)",
    )  # fmt: skip
    parser.addini("memory_budgets", "the file of recorded peaks, from the root", default="memory-budgets.json")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker for memory budgets, and read the options.

    Raises:
        UsageError: The tolerance is not a percentage of at least 0%.
    """
    config.addinivalue_line(
        "markers",
        f'{_MARK}(at_most, gpu=None, stage="train"): fail if the test takes more memory than this, such as "8GiB"',
    )
    given = str(config.getoption("memory_tolerance"))
    try:
        tolerance = float(given.removesuffix("%")) / 100
    except ValueError:
        tolerance = -1
    if not given.endswith("%") or tolerance < 0:
        raise pytest.UsageError(f"--memory-tolerance={given!r}: give a share in percent of 0% or more, such as 2%.")
    config.stash[_SETTINGS] = BudgetSettings(
        file=Path(config.rootpath, config.getini("memory_budgets")),
        root=config.rootpath,
        records=config.getoption("memory_record"),
        tolerance=tolerance,
    )
    config.pluginmanager.register(_Results(config), "memtools_results")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Run a test. If it is marked with a memory budget, and its peak is over the budget, make it fail."""
    test = item.stash[_TEST] = CurrentTest(item.nodeid, item.config.stash[_SETTINGS])
    mark = item.get_closest_marker(_MARK)
    with test.running():
        budget = None if mark is None else _without_frames(lambda: _budget_of(mark).__enter__())
        try:
            result = yield
        except BaseException as error:
            if budget is not None:
                budget.__exit__(type(error), error, error.__traceback__)
            raise
        if budget is not None:
            _without_frames(lambda: budget.__exit__(None, None, None))
    return result


_T = TypeVar("_T")


def _without_frames(run: Callable[[], _T]) -> _T:
    """Call a function and return its result. If it raises an error, make the test fail, without a traceback."""
    try:
        return run()
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None


def _budget_of(mark: pytest.Mark) -> PeakMemoryBudget:
    from lightning_memtools.budgets.assert_peak_memory import assert_peak_memory  # noqa: PLC0415, only marked tests

    given = dict(zip(("at_most", "gpu", "stage"), mark.args, strict=False)) | dict(mark.kwargs)
    budget: PeakMemoryBudget = assert_peak_memory(**given)
    return budget


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Attach the test's peaks to the report of its call phase, which xdist sends to its controller."""
    report = yield
    test = item.stash.get(_TEST, None)
    if call.when == "call" and test is not None and (test.peaks or test.notes):
        setattr(report, _RESULTS, {"peaks": test.peaks, "notes": test.notes})
    return report


class _Results:
    """Collects the peaks of all tests in pytest's main process."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._settings = config.stash[_SETTINGS]
        self._peaks: dict[str, Mapping[str, Any]] = {}
        self._notes: list[str] = []
        self._written = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the peaks from a test's report."""
        found = getattr(report, _RESULTS, None)
        if found is None:
            return
        self._notes += found["notes"]
        if report.passed or not self._settings.records:
            self._peaks |= found["peaks"]

    def pytest_sessionfinish(self) -> None:
        """Write the file of recorded peaks, if recording is on."""
        if not self._settings.records or hasattr(self._config, "workerinput") or not self._peaks:
            return
        from lightning_memtools.budgets.peak_memory import write_recorded  # noqa: PLC0415, only when recording

        write_recorded(self._settings.file, self._peaks)
        self._written = f"{len(self._peaks)} recorded in {self._settings.file.name}"

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print how the memory peaks were obtained, how many were recorded, and which were lower than before."""
        if not self._peaks and not self._notes:
            return
        made = {f"engine {peak.get('engine')}, torch {peak.get('torch')}" for peak in self._peaks.values()}
        terminalreporter.section("memory under test", sep="-")
        terminalreporter.line("; ".join(filter(None, [f"peaks: {len(self._peaks)}", *sorted(made), self._written])))
        for note in self._notes:
            terminalreporter.line(note)
