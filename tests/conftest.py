"""What all tests share."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
from torch.nn.modules import module as module_hooks
from torch.utils.data import BatchSampler, DataLoader

from lightning_memtools.memory.gc_frozen import gc_frozen
from lightning_memtools.memory.virtual import VirtualDevice

# The models are small: a second thread would only wait, and slow down what runs beside it.
torch.set_num_threads(1)

# On some processors MKL adds up in another order where memory is aligned otherwise, which differs from run to run: what
# is compared bit by bit must not depend on it. MKL reads this when it is first called.
os.environ["MKL_CBWR"] = "COMPATIBLE"

# Processes that tests start import this source, and Lightning in less time.
TESTS = Path(__file__).parent
os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS / "faster_imports")])

# A shell that starts the suite in the background lets it ignore Ctrl-C, and so would every process that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# An example that takes longer on a busy machine is no failure: times belong in benchmarks/. CI tries the same examples
# each time, so that a change is judged by itself; new examples are for those who work on the code.
hypothesis.settings.register_profile("untimed", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("untimed")


# The files that take longest begin first, so that no process works on one of them alone at the end.
LONGEST = (
    *("test_tutorial.py", "test_faults.py", "test_planning.py", "test_gradient_checkpointing.py", "test_docs.py"),
    *("test_memory_tab_in_browser.py", "test_two_ranks.py"),
    *("test_batch_size_tuner.py", "test_recovery_on_ranks.py", "test_step_file.py", "test_exact_recomputation.py"),
    *("test_site.py", "test_host_memory.py", "test_oom_report.py", "test_either_lightning.py"),
    *("test_empty_cache_ledger.py", "test_gallery.py", "test_pytest_plugin.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files; skip tests marked gpu where no CUDA device is, or one that computes nothing."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
    has_allocator = torch.cuda.is_available()
    computes = has_allocator and not torch.cuda.get_device_name().endswith("(dry run)")
    for item in items:
        if "gpu" in item.keywords and not computes:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if "cuda_memory" in item.keywords and not has_allocator:
            item.add_marker(pytest.mark.skip(reason="needs PyTorch's CUDA allocator: make test-cuda"))


@pytest.fixture(autouse=True)
def _the_device_is_empty(request: pytest.FixtureRequest) -> None:
    """Start a test of CUDA's memory on an empty device: without garbage of earlier tests and workspaces of cuBLAS."""
    if request.node.get_closest_marker("cuda_memory") and torch.cuda.is_initialized():
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()


@pytest.fixture(autouse=True)
def _loaders_are_made_as_before() -> Iterator[None]:
    """Fail the test that leaves Lightning's changes to loaders behind, and not those after it."""
    before = {cls: cls.__init__ for cls in (DataLoader, BatchSampler)}
    yield
    assert before == {cls: cls.__init__ for cls in (DataLoader, BatchSampler)}


@pytest.fixture(autouse=True)
def _the_process_is_as_before() -> Iterator[None]:
    """Restore what a Trainer with strategy="ddp" changes for good, from which processes of later tests would start.

    With LOCAL_RANK in the environment, Lightning takes a script for one that a cluster started, and waits for a second
    rank that nobody starts. With a second thread, a forked child waits for a thread that it does not have.
    """
    environment, threads = dict(os.environ), torch.get_num_threads()
    yield
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)


@pytest.fixture
def quick_collections() -> Iterator[None]:
    """Collections look at what comes from now on; no global that was there before is looked for either."""
    with gc_frozen():
        yield


@pytest.fixture(autouse=True)
def _no_hook_on_all_modules_is_left() -> Iterator[None]:
    """Fail the test that leaves a hook on all modules behind: with one, torch.compile warns in every test after it."""
    yield
    hooks = (module_hooks._global_forward_hooks, module_hooks._global_forward_pre_hooks)
    left = [hook for each in hooks for hook in each.values()]
    for each in hooks:
        each.clear()
    assert not left


@pytest.fixture(autouse=True)
def _no_virtual_device_is_left() -> Iterator[None]:
    """Fail the test that leaves a VirtualDevice entered, and not those after it, which would count twice."""
    module_call = torch.nn.Module.__call__
    yield
    left = []
    while (device := VirtualDevice.current()) is not None:
        left.append(device)
        device.__exit__()
    assert not left
    assert torch.nn.Module.__call__ is module_call
