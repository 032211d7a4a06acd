from __future__ import annotations

import json

from lightning_memtools.batch_size.trainer.size_cache import key_of, load_sizes, store_sizes


def test_stored_sizes_are_found_under_the_same_facts_only(tmp_path):
    path = tmp_path / "deep" / "sizes.json"
    facts = {"model": "A", "capacity": 3, "other": {1, 2}}
    store_sizes(path, key_of(facts), {"train": 64, "val": 128}, facts)
    store_sizes(path, key_of({"model": "B"}), {"train": 7}, {"model": "B"})
    assert load_sizes(path, key_of(facts)) == {"train": 64, "val": 128}
    assert load_sizes(path, key_of({"model": "B"})) == {"train": 7}
    assert load_sizes(path, key_of({**facts, "capacity": 4})) is None
    assert [child.name for child in path.parent.iterdir()] == ["sizes.json"]


def test_a_file_of_another_format_counts_as_empty(tmp_path):
    path = tmp_path / "sizes.json"
    for text in ("not json", "[1, 2]", json.dumps({"key": {"sizes": 5}})):
        path.write_text(text)
        assert load_sizes(path, "key") is None
    store_sizes(path, "key", {"train": 1}, {})
    assert load_sizes(path, "key") == {"train": 1}
