"""Writes docs/gpu-names.md: `python -m tests.gpu_docs`."""

from pathlib import Path

from lightning_memtools.memory.sizes import format_size, known_gpus

PAGE = Path(__file__).parents[1] / "docs/gpu-names.md"
HEAD = """# Names of GPUs

Wherever a capacity is meant (`VirtualDevice`, `estimate_memory(capacity=)`, `memtools dry-run --gpu`), one of these
names is accepted. Case, spaces, hyphens and the words NVIDIA, GeForce and Tesla make no difference, and the size may be
left out where a GPU comes with only one. A name that is not known is answered with those that resemble it.

Usable is what the driver reports to a process as the total, which is less than the number on the box. A star marks a
low estimate, made where no report of a driver was found. The sources of the figures stand in
`lightning_memtools/memory/gpus.json`.

| name | usable | compute capability | multiprocessors |
| --- | ---: | ---: | ---: |
"""


def page() -> str:
    """Return the page's text."""
    gpus = sorted(known_gpus(), key=lambda gpu: (gpu.usable_bytes, gpu.name))
    rows = (
        f"| {gpu.name} | {format_size(gpu.usable_bytes)}{' *' if gpu.estimated else ''} | {gpu.compute_capability} | "
        f"{gpu.multiprocessors} |\n"
        for gpu in gpus
    )
    return HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page())
