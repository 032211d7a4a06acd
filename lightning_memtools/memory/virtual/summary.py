"""The table that ``torch.cuda.memory_summary`` prints, for a simulated device."""

from __future__ import annotations

from collections.abc import Mapping

_ROWS = (
    ("Allocated memory", "allocated_bytes"),
    ("Active memory", "active_bytes"),
    ("Requested memory", "requested_bytes"),
    ("GPU reserved memory", "reserved_bytes"),
    ("Non-releasable memory", "inactive_split_bytes"),
    ("Allocations", "allocation"),
    ("Active allocs", "active"),
    ("GPU reserved segments", "segment"),
    ("Non-releasable allocs", "inactive_split"),
)
_POOLS = (("      from large pool", "large_pool"), ("      from small pool", "small_pool"))
_COLUMNS = (("Cur Usage", "current"), ("Peak Usage", "peak"), ("Tot Alloc", "allocated"), ("Tot Freed", "freed"))
_WIDTH = 75


def summary_table(stats: Mapping[str, int], *, title: str) -> str:
    """Lay out allocator statistics as torch does.

    Args:
        stats: Values under the names of ``torch.cuda.memory_stats``.
        title: What the table is of; centred in the heading.
    """
    counts = f"CUDA OOMs: {stats['num_ooms']:<12d} | cudaMalloc retries: {stats['num_alloc_retries']:<8d}"
    columns = " | ".join(f"{name:<10}" for name, _ in _COLUMNS)
    lines = ["=" * _WIDTH, title.center(_WIDTH), "-" * _WIDTH, counts.center(_WIDTH), "=" * _WIDTH]
    lines.append(f" {'       Metric':<21} | {columns} ")
    for name, metric in _ROWS:
        lines.append("-" * _WIDTH)
        totals = [stats[f"{metric}.all.{kind}"] for _, kind in _COLUMNS]
        write = _size if metric.endswith("bytes") else _count
        for row_name, pool in ((name, "all"), *_POOLS):
            values = (stats[f"{metric}.{pool}.{kind}"] for _, kind in _COLUMNS)
            cells = " | ".join(write(value, total) for value, total in zip(values, totals, strict=True))
            lines.append(f" {row_name:<21} | {cells} ")
    lines.append("=" * _WIDTH)
    return "".join(f"|{line}|\n" for line in lines)


def _size(n_bytes: int, scale: int) -> str:
    """A size in the unit in which ``scale`` has at most six digits, as all rows of one metric share it."""
    unit = 0
    units = ("B  ", "KiB", "MiB", "GiB", "TiB", "PiB")
    # The threshold is torch's.
    while scale >= 768 * 1024 and unit < len(units) - 1:
        scale //= 1024
        n_bytes //= 1024
        unit += 1
    return f"{n_bytes:6d} {units[unit]}"


def _count(number: int, scale: int) -> str:
    unit = 0
    units = (" ", "K", "M")
    while scale >= 750 * 1000 and unit < len(units) - 1:
        scale //= 1000
        number //= 1000
        unit += 1
    return f"{number:7d} {units[unit]} "
