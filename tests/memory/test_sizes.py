from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memtools.memory import sizes
from lightning_memtools.memory.sizes import GIB, MIB, find_gpu, format_size, known_gpus, parse_capacity, parse_size


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("24GiB", 24 * 2**30), ("24GB", 24 * 10**9), ("512 mib", 512 * 2**20), ("1.5GiB", 3 * 2**29), (".5KiB", 512)],
)
def test_a_size_means_its_number_times_its_unit(text, n_bytes):
    assert parse_size(text) == n_bytes


@pytest.mark.parametrize("text", ["", "24", "GiB", "-1GiB", "24 G", "24GiBs", "1e3MB", "24GiB 3", "٣GiB"])
def test_what_is_not_a_size_is_refused_with_the_text_and_the_units(text):
    with pytest.raises(ValueError, match=r"Not a size: .*GiB") as error:
        parse_size(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (10 * MIB, "10.0 MiB"),
        (MIB - 1, "1.00 MiB"),
        (1536 * MIB, "1.50 GiB"),
        (-3 * MIB, "-3.00 MiB"),
    ],
)
def test_sizes_are_printed_in_the_largest_unit_with_three_digits(n_bytes, text):
    assert format_size(n_bytes) == text


@given(st.integers(0, 2**50))
def test_a_printed_size_reads_back_within_its_three_digits(n_bytes):
    assert parse_size(format_size(n_bytes)) == pytest.approx(n_bytes, rel=0.0051, abs=0)


def rows():
    path = Path(sizes.__file__).with_name("gpus.json")
    return json.loads(path.read_text(encoding="utf-8"))["gpus"]


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("24GiB", 24 * GIB), ("24 GB", 24 * 10**9), ("RTX 3060", 12_622_168_064), ("T4", 14_930 * 2**20)],
)
def test_a_capacity_is_a_size_or_a_gpus_usable_bytes(text: str, n_bytes: int) -> None:
    assert parse_capacity(text) == n_bytes


@pytest.mark.parametrize("text", ["RTX 4090", "rtx4090", "NVIDIA GeForce RTX 4090", "RTX-4090 24GB", " rtx_4090 "])
def test_names_may_be_written_as_people_write_them(text: str) -> None:
    assert parse_capacity(text) == parse_capacity("RTX 4090 24GB")
    assert 23.63 * GIB < parse_capacity(text) < 23.64 * GIB


def test_a_name_with_several_sizes_needs_one() -> None:
    with pytest.raises(ValueError, match=r"'A100' .*'A100 80GB' or 'A100 40GB'"):
        parse_capacity("A100")
    assert parse_capacity("A100 40GB") == 42_298_834_944


@pytest.mark.parametrize(
    ("text", "suggested"),
    [
        ("RTX 4900", "'RTX 4090 24GB'"),
        ("24", "'24GiB' or '24GB'"),
        ("H10O 80GB", "'H100 80GB'"),
        ("A100 60GB", "'A100 80GB'"),
    ],
)
def test_an_unknown_name_gets_near_ones(text: str, suggested: str) -> None:
    with pytest.raises(ValueError, match="Did you mean") as caught:
        parse_capacity(text)
    message = str(caught.value)
    assert f"Not a capacity: {text!r}" in message
    assert suggested in message
    assert '"24GiB"' in message


def test_estimates_say_so_and_stay_below_the_shares_that_drivers_report():
    estimate = find_gpu("RTX 3070")
    assert (estimate.estimated, estimate.usable_bytes) == (True, int(8 * GIB * 0.95))
    with_ecc = find_gpu("A10")
    assert with_ecc.usable_bytes == int(24 * GIB * 0.91)
    for row in rows():
        if row["usable_bytes"] is not None:
            share = 0.91 if row.get("inline_ecc") else 0.95
            assert share < row["usable_bytes"] / (int(row["marketing"].removesuffix("GB")) * GIB) < 1, row["name"]


def test_every_row_names_its_sources() -> None:
    assert len(rows()) >= 25
    for row in rows():
        assert row["source"]
        assert (row["usable_bytes"] is None) == (row["usable_source"] is None)
    assert len(known_gpus()) == len(rows())
