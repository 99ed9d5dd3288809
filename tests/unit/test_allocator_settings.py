"""Settings of a snapshot file: what is read from where, and what makes no sense in it."""

from __future__ import annotations

import pytest

from nsan.errors import UsageError
from nsan.torch_alloc.conf import parse_conf
from nsan.torch_alloc.file_settings import CONF, odd_settings
from nsan.torch_alloc.machine import CachingAllocator
from nsan.torch_alloc.settings import DEFAULT_SETTINGS, AllocatorSettings
from nsan.units import MIB

from_rows = AllocatorSettings.from_rows


def test_each_setting_of_a_file_is_read():
    values = {
        "max_split_size": str(64 * MIB),
        "garbage_collection_threshold": "0.8",
        "expandable_segments": "True",
        "torch_version": "2.13.1",
        "allocator": "plain",
        "roundup_power2_divisions.1": "2",
        "roundup_power2_divisions.32768": "8",
        CONF: "large_segment_size_mb:40,max_non_split_rounding_mb:30,per_process_memory_fraction:0.5",
    }
    assert from_rows(values) == AllocatorSettings(
        max_split_bytes=64 * MIB,
        max_non_split_rounding_bytes=30 * MIB,
        roundup_power2_divisions=(2, *[0] * 14, 8),
        garbage_collection_threshold=0.8,
        expandable_segments=True,
        memory_fraction=0.5,
        large_segment_bytes=40 * MIB,
        tie_break="segment",
        is_caching=False,
    )
    assert odd_settings(values) == []


def test_a_file_without_settings_has_the_defaults():
    for values in ({}, {"max_split_size": "-1", CONF: "", "torch_version": "2.9"}):
        assert from_rows(values) == DEFAULT_SETTINGS
        assert odd_settings(values) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(
            ("max_split_size", text)
            for text in ("inf", "-inf", "nan", "", "many", "0", "-2", str(MIB), "1e400", "2.5e7.1")
        ),
        *(("max_split_size", text) for text in ("9" * 5000, "25165824.5", "None")),
        *(("garbage_collection_threshold", t) for t in ("1.0", "-1", "nan", "inf", "x", "2")),
        *(("roundup_power2_divisions.4", t) for t in ("3", "-4", "inf", "nan", "x", "2.5", "-1")),
        ("expandable_segments", "maybe"),
        ("torch_version", "newest"),
        ("torch_version", "2"),
        ("allocator", "other"),
    ],
)
def test_an_odd_value_of_a_file_is_named_and_the_default_is_used(name, text):
    assert from_rows({name: text}) == DEFAULT_SETTINGS
    assert odd_settings({name: text}) == [name]
    # The others count all the same.
    others = {"max_split_size": str(32 * MIB), "expandable_segments": "True", name: text}
    assert from_rows(others).expandable_segments is (name != "expandable_segments")


@pytest.mark.parametrize(
    ("text", "odd"),
    [
        ("large_segment_size_mb:0", "large_segment_size_mb"),
        ("large_segment_size_mb:9", "large_segment_size_mb"),
        ("large_segment_size_mb:999999999999", "large_segment_size_mb"),
        ("max_non_split_rounding_mb:x", "max_non_split_rounding_mb"),
        ("per_process_memory_fraction:7", "per_process_memory_fraction"),
        ("garbage_collection_threshold:1", "garbage_collection_threshold"),
        ("roundup_power2_divisions:[256:3]", "roundup_power2_divisions"),
        ("roundup_power2_divisions:[256:1", CONF),
        ("backend:cudaMallocAsync", CONF),
        ("no_such_key:1", CONF),
        ("nonsense", CONF),
    ],
)
def test_what_cannot_be_read_in_the_text_of_the_variable_leaves_the_rest(text, odd):
    assert from_rows({CONF: text}) == DEFAULT_SETTINGS
    assert odd_settings({CONF: text}) == [odd]
    if "[256:1" not in text or "]" in text:
        more = {CONF: f"max_split_size_mb:64,{text},expandable_segments:True"}
        assert from_rows(more) == AllocatorSettings(
            max_split_bytes=64 * MIB, expandable_segments=True
        )
        assert odd_settings(more) == [odd]


def test_a_text_of_millions_of_commas_is_not_read():
    assert odd_settings({CONF: "," * 3_000_000}) == [CONF]


def test_a_key_of_its_own_counts_more_than_the_text_of_the_variable():
    text = "max_split_size_mb:64,roundup_power2_divisions:4,garbage_collection_threshold:9"
    own = {
        "max_split_size": str(32 * MIB),
        "roundup_power2_divisions.2": "2",
        "garbage_collection_threshold": "0.5",
    }
    both = from_rows({CONF: text, **own})
    assert both == from_rows(own)
    assert odd_settings({CONF: text, **own}) == []
    assert from_rows({CONF: text}).roundup_power2_divisions == (4,) * 16
    assert odd_settings({CONF: text}) == ["garbage_collection_threshold"]
    # An odd one does not, and is named once.
    nothing = {"garbage_collection_threshold": "nan", "max_split_size": "0"}
    assert from_rows({CONF: text, **nothing}) == from_rows({CONF: text})
    assert odd_settings({CONF: text, **nothing}) == [
        "max_split_size",
        "garbage_collection_threshold",
    ]


@pytest.mark.parametrize(
    ("version", "tie_break"),
    [
        ("2.9", "address"),
        ("2.11.0", "address"),
        ("2.12.1+cu130", "block"),
        ("2.13.0a0", "segment"),
        ("3.0", "segment"),
    ],
)
def test_the_version_decides_on_the_order_of_equal_blocks(version, tie_break):
    assert from_rows({"torch_version": version}).tie_break == tie_break


def test_what_a_user_gives_is_refused_with_the_reason():
    for size in ("9", "999999999999"):
        with pytest.raises(UsageError, match="take 10 to 1048576"):
            parse_conf(f"large_segment_size_mb:{size}")
    with pytest.raises(UsageError, match="take 10 MiB or more"):
        AllocatorSettings(large_segment_bytes=8 * MIB)


def test_a_fraction_of_a_memory_that_is_not_known_is_no_limit():
    machine = CachingAllocator(
        from_rows({CONF: "per_process_memory_fraction:0.5,garbage_collection_threshold:0.1"})
    )
    machine.free(machine.allocate(40 * MIB))
    machine.allocate(50 * MIB)
    assert machine.reserved_bytes == 90 * MIB  # nothing was collected or refused
