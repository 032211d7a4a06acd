"""Differences of two peaks: which rows, in which order, and what makes two of them the same."""

from __future__ import annotations

from lightning_memtools.budgets.memory_diff import MemoryDiff
from lightning_memtools.budgets.peak_memory import PeakMemory

MIB = 2**20


def peak(allocated=100, **parts):
    return PeakMemory(allocated=allocated * MIB, reserved=2 * allocated * MIB, **parts)


def rows(changes):
    return [(one.name, one.before, one.after) for one in changes]


def test_rows_are_what_changed_largest_first():
    before = peak(categories={"parameters": 4, "activations": 10, "inputs": 1}, modules={"a": 1, "b": 5})
    after = peak(110, categories={"parameters": 4, "activations": 3, "gradients": 2, "inputs": 1}, modules={"b": 9})
    diff = MemoryDiff(before, after)
    assert rows(diff.categories) == [("activations", 10, 3), ("gradients", 0, 2)]
    assert rows(diff.modules) == [("b", 5, 9), ("a", 1, 0)]
    assert [one.difference for one in diff.totals] == [10 * MIB, 20 * MIB]
    assert "grew by 10.0 MiB (+10.0%): 100 MiB to 110 MiB" in diff.headline


def test_members_of_a_list_are_one_row():
    before = peak(modules={f"layers.{i}.mlp": 5 for i in range(12)} | {"head": 1})
    after = peak(modules={f"layers.{i}.mlp": 8 for i in range(12)} | {"head": 1})
    assert rows(MemoryDiff(before, after).modules) == [("layers.*.mlp", 60, 96)]


def test_a_line_that_moved_is_the_same_line():
    before = peak(lines={"net.py:10: x = self.a(x)": 5, "net.py:20: y = self.b(x)": 7, "": 3})
    after = peak(lines={"net.py:14: x = self.a(x)": 5, "net.py:22: y = self.b(x)": 9, "": 1})
    assert rows(MemoryDiff(before, after).lines) == [("net.py:22: y = self.b(x)", 7, 9)]


def test_a_peak_without_change_says_so_and_others_than_before_are_remarked_on():
    same = MemoryDiff(peak(engine="cuda"), peak(engine="cuda"))
    assert "is the same: 100 MiB" in same.headline
    assert not same.remarks
    other = MemoryDiff(peak(engine="cuda", torch="2.12.0"), peak(engine="simulation", torch="2.13.0"))
    assert [("engine" in text, "2.12.0" in text) for text in other.remarks] == [(True, False), (False, True)]


def test_markdown_shows_the_largest_rows_and_the_sum_of_the_others():
    after = peak(lines={f"net.py:{i}: x = f{i}(x)": i * MIB for i in range(1, 21)})
    text = MemoryDiff(peak(), after, ("main", "HEAD")).to_markdown()
    table = text[text.index("| line |") :].splitlines()
    names = [*(f"| net.py:{i}: x = f{i}(x)" for i in range(20, 5, -1)), "| 5 more"]
    assert [row.split(" | ")[0] for row in table[2:18]] == names
    assert "15.0 MiB" in table[17]
    assert "| memory | main | HEAD | change |" in text
