from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memtools.memory.sizes import MIB, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("24GiB", 24 * 2**30),
        ("24GB", 24 * 10**9),
        ("512 mib", 512 * 2**20),
        ("1.5GiB", 3 * 2**29),
        (".5KiB", 512),
        (" 7 KB ", 7000),
    ],
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
