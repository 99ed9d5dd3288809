"""Managed memory for the tensors of a C++ run, over a device layer on the CPU."""

from __future__ import annotations

import csv

import cpp
import pytest

from nsan.units import MIB


@pytest.fixture(scope="module")
def memory():
    """Do what a text says with memory of a kind; the printed lines by their first word."""
    program = cpp.built("test_memory", ["test_memory.cpp"])

    def run(kind, *operations, folder="/nowhere", environment=None, limit=()):
        ended = cpp.run(
            program,
            *(kind, folder, *limit),
            stdin="\n".join(operations),
            environment=environment or {},
        )
        assert ended.returncode == 0, ended.stderr
        found = {}
        for line in ended.stdout.splitlines():
            word, _, rest = line.partition(" ")
            found.setdefault(word, []).append(rest)
        return found

    return run


def test_raw_memory_asks_the_driver_for_each_tensor_and_records_it_by_name(memory):
    said = memory("raw", "a weight 600", f"a input {3 * MIB}", "f 0", "a next 600", "e")
    assert said["call"][:4] == [
        "allocate_managed 600",
        f"allocate_managed {3 * MIB}",
        "free 600",
        "allocate_managed 600",
    ]
    assert sorted(said["call"][4:]) == [f"free {3 * MIB}", "free 600"]
    assert said["allocation"] == [
        "weight|activation|managed|600|freed",
        f"input|activation|managed|{3 * MIB}|freed",
        "next|activation|managed|600|freed",
    ]
    assert said["live"] == ["0"]


def test_cached_memory_asks_the_driver_for_segments_only(memory):
    said = memory(
        "caching", "a w0 600", "a w1 600", f"a big {3 * MIB}", "f 0", "a again 600", "f 2"
    )
    assert said["call"][:2] == [f"allocate_managed {2 * MIB}", f"allocate_managed {20 * MIB}"]
    assert sorted(said["call"][2:]) == [f"free {2 * MIB}", f"free {20 * MIB}"]
    assert said["allocation"] == [
        f"segment 1 (small)|segment|managed|{2 * MIB}|freed",
        f"segment 2 (large)|segment|managed|{20 * MIB}|freed",
    ]
    assert "overwritten" not in said
    assert said["live"] == ["0"]


def test_emptying_the_cache_frees_the_segments_that_no_tensor_is_in(memory):
    said = memory("caching", "a w0 600", f"a big {3 * MIB}", "f 1", "e", f"a more {2 * MIB}")
    assert said["call"][2:4] == [f"free {20 * MIB}", f"allocate_managed {20 * MIB}"]
    assert [line.split("|")[0] for line in said["allocation"]] == [
        "segment 1 (small)",
        "segment 2 (large)",
        "segment 3 (large)",
    ]


def test_the_record_has_a_tensor_by_itself_or_in_its_segment(memory):
    operations = ["a w0 600", f"a big {3 * MIB}", "a w1 600", "w 0", "w 1", "w 2"]
    assert memory("raw", *operations)["where"] == ["0", "1", "2"]
    assert memory("caching", *operations)["where"] == ["0", "1", "0"]


def test_a_segment_that_the_driver_refuses_is_asked_for_again_after_the_free_ones_are_gone(memory):
    said = memory(
        "caching",
        "a w0 600",
        "f 0",
        f"a big {3 * MIB}",
        environment={"NSAN_HOST_FAIL": "allocate_managed:2"},
    )
    assert said["call"][:4] == [
        f"allocate_managed {2 * MIB}",
        f"allocate_managed {20 * MIB}",
        f"free {2 * MIB}",
        f"allocate_managed {20 * MIB}",
    ]
    assert "error" not in said


UNLIMITED = {"ASAN_OPTIONS": f"exitcode={cpp.SANITIZER_STATUS}:allocator_may_return_null=1"}
"""A request that no machine can serve is refused by malloc, not reported by the sanitizer."""


def test_a_request_that_the_driver_cannot_serve_says_of_which_tensor_and_what_the_driver_said(
    memory,
):
    n_bytes = 1 << 50
    said = memory("caching", "a w0 600", f"a huge {n_bytes}", "f 0", environment=UNLIMITED)
    assert said["error"] == [
        f"tensor huge: out of memory: {n_bytes} byte asked for, {2 * MIB} byte reserved (segments: 1), of "
        "these 1024 byte in use; the driver said: cudaErrorMemoryAllocation (HostDevice): out of memory"
    ]
    raw = memory("raw", "a w0 600", f"a huge {n_bytes}", environment=UNLIMITED)
    assert raw["error"] == ["cudaErrorMemoryAllocation (HostDevice): out of memory"]
    assert said["live"] == raw["live"] == ["0"]


def test_a_tensor_beyond_the_limit_is_refused_and_not_asked_of_the_driver(memory):
    limit = (3 * MIB,)
    said = memory("raw", f"a w0 {2 * MIB}", f"a w1 {MIB}", "a w2 1", "f 1", "a w3 1", limit=limit)
    assert said["error"] == [
        "w2 would take 1 B of managed memory beside 3 MiB, more than the 3 MiB that the test has"
    ]
    assert said["status"] == ["refused"]
    assert [call for call in said["call"] if call.startswith("allocate")] == [
        f"allocate_managed {2 * MIB}",
        f"allocate_managed {MIB}",
        "allocate_managed 1",
    ]
    huge = memory("raw", f"a w0 {2**64 - 1}", limit=limit)
    assert huge["status"] == ["refused"]
    assert "call" not in huge


def test_a_segment_beyond_the_limit_is_refused_once_the_free_ones_are_gone(memory):
    limit = (21 * MIB,)
    # The small segment is free, and goes: then one of 20 MiB is within the limit. Another is not.
    said = memory("caching", "a w0 600", "f 0", f"a big {3 * MIB}", limit=limit)
    assert said["call"][:3] == [
        f"allocate_managed {2 * MIB}",
        f"free {2 * MIB}",
        f"allocate_managed {20 * MIB}",
    ]
    assert "error" not in said
    said = memory("caching", "a w0 600", f"a big {3 * MIB}", limit=limit)
    assert said["error"] == [
        f"tensor big: out of memory: {3 * MIB} byte asked for, {2 * MIB} byte reserved (segments: 1), of these 1024 byte "
        "in use; segment 2 (large) would take 20 MiB of managed memory beside 2 MiB, more than the 21 MiB that the test has"
    ]
    assert said["status"] == ["refused"]
    assert said["call"] == [f"allocate_managed {2 * MIB}", f"free {2 * MIB}"]


@pytest.mark.parametrize("kind", ["raw", "caching"])
def test_a_tensor_is_freed_once_and_an_empty_one_is_none(memory, kind):
    said = memory(kind, "a w0 600", "f 0", "f 0", "a none 0", "a w1 600", "f 0", "w 0")
    # The second tensor may lie where the first did: its memory is not freed by the name of the first.
    assert said["error"][:3] == [
        "tensor w0 is not allocated: free it once",
        "tensor none has no bytes: there is nothing to allocate",
        "tensor w0 is not allocated: free it once",
    ]
    assert said["live"] == ["0"]


@pytest.mark.parametrize("kind", ["raw", "caching"])
def test_a_driver_that_fails_at_the_end_ends_nothing_else(memory, kind):
    said = memory(kind, "a w0 600", "a w1 600", environment={"NSAN_HOST_FAIL": "free:1"})
    assert [line.split("|")[-1] for line in said["allocation"]] == (
        ["lived", "freed"] if kind == "raw" else ["lived"]
    ) or [line.split("|")[-1] for line in said["allocation"]] == ["freed", "lived"]


def rows(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def test_the_history_has_one_entry_a_line_as_pytorch_writes_them(memory, tmp_path):
    memory(
        "caching",
        *["a w0 600", 'a in,put"1" 1', "f 0", f"a big {3 * MIB}", "f 2", "e", "h"],
        folder=tmp_path,
    )
    header, *entries = rows(tmp_path / "history.csv")
    assert header == ["sequence", "time_ns", "action", "va", "bytes", "stream", "pool", "tensor"]
    small, large = int(entries[0][3]), int(entries[5][3])
    assert [(action, int(va), int(n), name) for _, _, action, va, n, _, _, name in entries] == [
        ("segment_alloc", small, 2 * MIB, "w0"),
        ("alloc", small, 600, "w0"),
        ("alloc", small + 1024, 1, 'in,put"1"'),
        ("free_requested", small, 600, "w0"),
        ("free_completed", small, 600, "w0"),
        ("segment_alloc", large, 20 * MIB, "big"),
        ("alloc", large, 3 * MIB, "big"),
        ("free_requested", large, 3 * MIB, "big"),
        ("free_completed", large, 3 * MIB, "big"),
        ("segment_free", large, 20 * MIB, ""),
    ]
    assert [int(entry[0]) for entry in entries] == list(range(10))
    times = [int(entry[1]) for entry in entries]
    assert times == sorted(times)
    assert {(entry[5], entry[6]) for entry in entries} == {("0", "0,0")}
    whole = [str(small), str(2 * MIB), "small"]
    rest = str(2 * MIB - 1536)
    assert rows(tmp_path / "blocks.csv")[1:] == [
        [*whole, str(small), "1024", "600", "inactive", ""],
        [*whole, str(small + 1024), "512", "1", "active_allocated", 'in,put"1"'],
        [*whole, str(small + 1536), rest, "0", "inactive", ""],
    ]


def test_an_out_of_memory_entry_has_no_address(memory, tmp_path):
    memory("caching", f"a huge {1 << 50}", "h", folder=tmp_path, environment=UNLIMITED)
    assert [entry[2:5] for entry in rows(tmp_path / "history.csv")[1:]] == [
        ["oom", "", str(1 << 50)]
    ]


def test_memory_without_a_cache_writes_no_history(memory, tmp_path):
    memory("raw", "a w0 600", "h", folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_history_that_cannot_be_written_leaves_nothing_half_written(memory, tmp_path):
    said = memory("caching", "a w0 600", "h", folder=tmp_path / "missing")
    path = tmp_path / "missing" / "history.csv"
    assert said["error"] == [f"cannot write {path}: choose another folder with --out"]
    assert list(tmp_path.iterdir()) == []
