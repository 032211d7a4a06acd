from __future__ import annotations

import pytest

from lightning_memtools.memory.allocator import AllocatorConfig

MIB = 2**20


def test_an_empty_setting_means_torchs_defaults() -> None:
    config = AllocatorConfig.parse("")
    assert config == AllocatorConfig()
    assert config.max_split_size is None
    assert not config.expandable_segments
    assert config.large_segment_size == 20 * MIB


def test_every_setting_is_read() -> None:
    config = AllocatorConfig.parse(
        "expandable_segments:True, max_split_size_mb:64,max_non_split_rounding_mb:48,"
        "garbage_collection_threshold:0.6,pinned_num_register_threads:4,"  # ignored
        "per_process_memory_fraction:0.5,large_segment_size_mb:32,roundup_power2_divisions:4"
    )
    assert config == AllocatorConfig(
        expandable_segments=True,
        max_split_size=64 * MIB,
        max_non_split_rounding=48 * MIB,
        per_process_memory_fraction=0.5,
        large_segment_size=32 * MIB,
        roundup_power2_divisions=(4,) * 16,
    )


@pytest.mark.parametrize(
    ("text", "divisions"),
    [
        # The first entry holds for all smaller sizes, ">" for all larger ones; what is skipped (4 MiB here) has none.
        ("[2:1,8:4,>:8]", (1, 1, 0, 4, *(8,) * 12)),
        ("[1:2,65536:0]", (2,) + (0,) * 15),  # switches rounding off, and names sizes beyond the last interval
    ],
)
def test_a_list_of_divisions_fills_intervals_as_torch_does(text, divisions):
    assert AllocatorConfig.parse(f"roundup_power2_divisions:{text}").roundup_power2_divisions == divisions


@pytest.mark.parametrize(
    "text",
    [
        "",
        "expandable_segments:True",
        "max_split_size_mb:64,per_process_memory_fraction:0.25",
        "large_segment_size_mb:40,max_non_split_rounding_mb:50,roundup_power2_divisions:[1:2,2:4,>:8]",
    ],
)
def test_a_config_and_its_string_say_the_same(text: str) -> None:
    config = AllocatorConfig.parse(text)
    assert AllocatorConfig.parse(config.to_string()) == config


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("expandable_segment:True", "'expandable_segment:True'"),
        ("expandable_segments", "'expandable_segments'"),
        ("max_split_size_mb:64,,", "''"),
        ("max_split_size_mb:10", "'max_split_size_mb:10'"),
        ("max_split_size_mb:x", "'x' is not a whole number"),
        # 64 would do for 20 MiB segments, but must be at least the large segment size, wherever that stands.
        ("max_split_size_mb:64,large_segment_size_mb:80", "'max_split_size_mb:64'"),
        ("roundup_power2_divisions:3", "'3' is not a power of two"),
        ("roundup_power2_divisions:[256:1", "no closing bracket"),
        ("roundup_power2_divisions:[100:2]", "'100' is not a power of two"),
        ("per_process_memory_fraction:high", "'high' is not a number"),
        ("per_process_memory_fraction:2", "'per_process_memory_fraction:2'"),
    ],
)
def test_errors_quote_the_bad_part_and_list_the_accepted_keys(text: str, quoted: str) -> None:
    with pytest.raises(ValueError, match="ccepted") as caught:
        AllocatorConfig.parse(text)
    message = str(caught.value)
    assert quoted in message
    assert "expandable_segments, max_split_size_mb, max_non_split_rounding_mb, roundup_power2_divisions" in message


@pytest.mark.parametrize("text", ["backend:cudaMallocAsync", "throw_on_cudamalloc_oom:True"])
def test_settings_that_torch_has_and_the_simulation_lacks_are_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=f"'{text}' in .* is not simulated"):
        AllocatorConfig.parse(text)
