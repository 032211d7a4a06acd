"""An out-of-memory report as a user reads it: in TensorBoard, in a narrow window."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_memtools import MemoryMonitor, OOMReport, VirtualDevice
from tests.browser import chromium, seen, tensorboard, wait_until
from tests.lightning_models import trainer
from tests.oom_models import Layers

# The texts that reach beyond the right edge of what shows them, or of the window.
CUT_OFF = """
let n = 0;
const found = [];
(function walk(node) {
    if (node.shadowRoot) walk(node.shadowRoot);
    for (const child of node.children || []) walk(child);
    if (!['P', 'LI', 'BLOCKQUOTE', 'PRE', 'H1', 'H2'].includes(node.tagName) || !node.textContent.trim()) return;
    n += 1;
    const right = node.getBoundingClientRect().right;
    if (node.scrollWidth > node.clientWidth + 1 || right > window.innerWidth) found.push(node.textContent);
})(document.body);
return [n, found];
"""


def test_the_lines_of_a_report_wrap_and_it_is_printed_once(tmp_path, capsys):
    logger = TensorBoardLogger(tmp_path)
    with VirtualDevice("64MiB"), pytest.raises(torch.OutOfMemoryError):
        trainer(tmp_path, MemoryMonitor(), OOMReport(), logger=logger).fit(Layers(batch=16))
    printed = capsys.readouterr().out
    assert printed.count("Out of memory on") == 1
    assert printed.count("Memory peaks on") == 1
    with tensorboard(tmp_path, tmp_path / "output") as address, chromium() as window:
        window.set_window_size(900, 1000)
        window.get(f"{address}/#text")
        assert wait_until(lambda: "What filled the device" in seen(window))
        n, cut_off = window.execute_script(CUT_OFF)
        assert n > 10
        assert cut_off == []
        window.execute_script(
            "document.body.append(Object.assign(document.createElement('pre'), {textContent: 'w'.repeat(999)}))"
        )
        assert window.execute_script(CUT_OFF)[1] == ["w" * 999]
