"""Files and classes that do not keep a rule yet; see house_rules.py. The lists only shrink."""

from __future__ import annotations

PENDING: dict[str, set[str]] = {
    "WRONG_IMPORTS": set(),
    "PRIVATE_NAMES": set(),
    "SUPPRESSED_PRIVATE_ACCESS": set(),
    "DUPLICATE_CLASSES": set(),
    "QUESTIONING_DOCSTRINGS": {
        "memory/allocator/replay.py",
        "memory/virtual/accounting_mode.py",
        "memory/virtual/attribution.py",
        "memory/virtual/categories.py",
        "memory/virtual/device.py",
        "memory/virtual/module_scopes.py",
        "memory/virtual/operators.py",
        "memory/virtual/storages.py",
        "memory/virtual/surroundings.py",
    },
}
