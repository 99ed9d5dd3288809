"""Memory snapshots of PyTorch: real files with golden values, and every format by hand."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import pickle
from collections import defaultdict

import polars as pl
import pytest
import snapshots as s
from polars.testing import assert_frame_equal

import nsan
from nsan.analysis.allocator.call_sites import call_sites
from nsan.errors import (
    InputMissingError,
    NotASnapshotError,
    OutputExistsError,
    SchemaMismatchError,
    SnapshotError,
)
from nsan.io.torch_snapshot import flatten, write_snapshot
from nsan.io.torch_snapshot.refusal import RefusedError
from nsan.torch_alloc import tables

MIB = s.MIB


@pytest.fixture
def opened(tmp_path):
    """Open plain containers as the snapshot that they would be on disk."""
    return lambda content, **how: nsan.open_snapshot(s.write(tmp_path / "s.pickle", content, **how))


@pytest.fixture(scope="module")
def plain():
    """Open the small allocator once."""
    return s.opened_here(s.snapshot((2, 12)))


@pytest.fixture(scope="module")
def real():
    """Open the real files once."""
    return {
        name: nsan.open_snapshot(s.FOLDER / f"{file}.pickle.gz") for name, file in s.REAL.items()
    }


def loaded(name):
    """Load a real file by Python's own unpickler: the sample data is trusted."""
    return pickle.loads(s.real_bytes(name))


def rows(frame):
    return frame.collect().rows(named=True)


def readme_tables():
    """The rows of each table of the README of the snapshots, as texts."""
    found, table = [], None
    for line in (s.FOLDER / "README.md").read_text().splitlines():
        cells = [cell.strip(" `") for cell in line.split("|")[1:-1]]
        if not cells:
            table = None
        elif table is None:
            table = []
            found.append(table)
        else:
            table.append(cells)
    return [{row[0]: row[1:] for row in table[1:]} for table in found]


def numbers(text):
    return [int("".join(filter(str.isdigit, part))) for part in text.replace("(", ",").split(",")]


def test_the_real_files_are_the_ones_that_the_readme_lists():
    sums = readme_tables()[1]
    assert len(sums) == len(s.REAL) == 5
    for name, file in s.REAL.items():
        data = s.real_bytes(name)
        assert hashlib.sha256(data).hexdigest() == sums[name][0]
        assert len(data) == numbers(readme_tables()[0][f"{file}.pickle.gz"][3])[0]


@pytest.mark.parametrize("name", s.REAL)
def test_a_real_file_has_its_golden_values(real, name):
    blocks, segments = rows(real[name].blocks), rows(real[name].segments)
    n_bytes, n_blocks = defaultdict(int), defaultdict(int)
    of_segment = defaultdict(list)
    for block in blocks:
        n_bytes[block["state"]] += block["bytes"]
        n_blocks[block["state"]] += 1
        of_segment[block["segment_id"]].append(block)
    held = [block for block in blocks if block["state"] != "inactive"]
    free = [
        x for x in segments if all(b["state"] == "inactive" for b in of_segment[x["segment_id"]])
    ]
    allocated, pending = n_bytes["active_allocated"], n_bytes["active_pending_free"]
    counted = [
        [len(segments)],
        [
            len(blocks),
            n_blocks["active_allocated"],
            n_blocks["inactive"],
            n_blocks["active_pending_free"],
        ],
        [sum(x["bytes"] for x in segments)],
        [allocated],
        [allocated + pending],
        [sum(b["requested_bytes"] for b in held)],
        [sum(b["bytes"] - b["requested_bytes"] for b in held)],
        [n_bytes["inactive"], max(b["bytes"] for b in blocks if b["state"] == "inactive")],
        [len(free), sum(x["bytes"] for x in free)],
    ]
    assert counted == [numbers(cell) for cell in readme_tables()[2][name]]
    assert sum(x["allocated_bytes"] for x in segments) == allocated
    assert sum(x["active_bytes"] for x in segments) == allocated + pending


@pytest.mark.parametrize("name", s.REAL)
def test_every_cell_of_a_real_file_arrives(real, name):
    content, snapshot = loaded(name), real[name]
    stacks = defaultdict(list)
    for row in rows(snapshot.stacks):
        stacks[row["stack_id"]].append((row["function"], row["source_file"], row["source_line"]))

    def stack(frames):
        return [(f["name"], f["filename"], f["line"]) for f in frames]

    by_address = sorted(content["segments"], key=lambda x: x["address"])
    expected = []
    for number, segment in enumerate(by_address):
        va = segment["address"]
        for block in segment["blocks"]:
            frames = block["frames"] if "frames" in block else block["history"][0]["frames"] if block.get("history") else []  # fmt: skip
            assert block.get("address", va) == va
            expected.append(
                (number, va, block["size"], block["requested_size"], block["state"], stack(frames))
            )
            va += block["size"]
    got = [
        (
            b["segment_id"],
            b["va"],
            b["bytes"],
            b["requested_bytes"],
            b["state"],
            stacks[b["stack_id"]],
        )
        for b in rows(snapshot.blocks)
    ]
    assert got == expected
    expected = [
        (
            e["action"],
            e["addr"],
            e["size"],
            e["stream"],
            e.get("time_us"),
            stack(e.get("frames", [])),
        )
        for e in content["device_traces"][0]
    ]
    got = [
        (e["action"], e["va"], e["bytes"], e["stream"], e["time_us"], stacks[e["stack_id"]])
        for e in rows(snapshot.allocator_events)
    ]
    assert got == expected


def test_the_pools_of_a_real_file_are_told_apart(real):
    counts = real["verl"].segments.group_by("pool").agg(pl.len(), pl.col("bytes").sum()).collect()
    assert sorted(counts.rows()) == [
        ("0,0", 59, 3634 * MIB),
        ("0,1", 44, 558 * MIB),
        ("0,2", 24, 24 * 866 * MIB),
    ]


@pytest.mark.parametrize(
    ("name", "version", "n_entries", "history"),
    [
        ("decomfl", "2.9", 23105, "complete"),
        ("verl", "2.5 to 2.8", 0, "none"),
        ("kivi", "2.3 to 2.4", 1, "partial"),
        ("flexgen_opt1.3b", "2.0", 1, "partial"),
        ("flexgen_oom", "2.0", 1, "partial"),
    ],
)
def test_what_is_known_about_a_real_file(real, name, version, n_entries, history):
    info = real[name].info
    assert info.torch_versions == version
    assert info.kind == "torch-snapshot"
    assert [(d.device_id, d.n_entries, d.history) for d in info.devices] == [
        (0, n_entries, history)
    ]
    assert info.devices[0].suspect_overflow == (n_entries == 1)
    assert not info.unknown_keys
    assert not info.unknown_actions
    assert not info.odd_cells
    assert json.loads(json.dumps(info.to_dict()))["source"] == f"{s.REAL[name]}.pickle.gz"


def expected_events(version):
    return [
        (
            0,
            i,
            s.START_US + 10 * i if version >= (2, 2) else None,
            action,
            None if action == "oom" else va,
            size,
            stream,
            f"{pool[0]},{pool[1]}" if version >= (2, 12) else None,
            va if action == "oom" else None,
            None,
            0,
        )
        for i, (action, va, size, stream, pool) in enumerate(s.HISTORY)
    ]


def expected_blocks(version):
    stream, pool = {s.SMALL: 0, s.LARGE: 7}, {s.SMALL: "0,0", s.LARGE: "0,1"}
    return [
        (i, 0, *block, stream[va], pool[va] if version >= (2, 1) else "0,0", 0)
        for i, va in enumerate((s.SMALL, s.LARGE))
        for block in s.BLOCKS[va]
    ]


def expected_segments(version):
    pools = ("0,0", "0,1") if version >= (2, 1) else ("0,0", "0,0")
    stack = 0 if version >= (2, 1) else None
    return [
        (0, 0, s.SMALL, 2 * MIB, 512, 1024, 612, 0, "small", pools[0], False, stack),
        (1, 0, s.LARGE, 20 * MIB, 2 * MIB, 2 * MIB, 2_000_000, 7, "large", pools[1], False, stack),
    ]


TOLD = {
    0: "2.0",
    1: "2.1",
    2: "2.2",
    3: "2.3 to 2.4",
    4: "2.3 to 2.4",
    5: "2.5 to 2.7",
    6: "2.5 to 2.7",
    7: "2.5 to 2.7",
    8: "2.8",
    9: "2.9",
    10: "2.10 to 2.11",
    11: "2.10 to 2.11",
    12: "2.12",
    13: "2.13",
    14: "2.14 or newer",
}


@pytest.mark.parametrize("version", s.VERSIONS)
def test_the_format_of_every_version_gives_the_same_frames(opened, version):
    protocol = 2 + version[1] % 4
    snapshot = opened(s.snapshot(version), protocol=protocol, packed=version[1] % 3 == 1)
    assert snapshot.segments.collect().rows() == expected_segments(version)
    assert snapshot.blocks.collect().rows() == expected_blocks(version)
    assert snapshot.allocator_events.collect().rows() == expected_events(version)
    assert snapshot.stacks.collect().rows() == [
        (0, 0, "forward", "net.py", 12),
        (0, 1, "<module>", "train.py", 3),
    ]
    if version >= (2, 5):
        assert snapshot.annotations.collect().rows() == [
            (0, s.START_US + 5, "step", "START"),
            (0, s.START_US + 105, "step", "END"),
        ]
    info = snapshot.info
    assert info.torch_versions == TOLD[version[1]]
    assert info.torch_version == TOLD[version[1]].split()[0]
    assert info.protocol == protocol
    assert (info.n_host_segments, info.n_host_entries) == ((2, 3) if version >= (2, 14) else (0, 0))
    assert [(d.device_id, d.n_entries, d.history) for d in info.devices] == [(0, 11, "complete")]
    assert not info.unknown_keys
    assert not info.unknown_actions
    assert not info.odd_cells


def test_settings_are_flat_rows_and_the_version_is_marked_as_inferred():
    found = s.opened_here(s.snapshot((2, 13))).allocator_settings.collect().rows()
    assert found[:4] == [
        ("PYTORCH_CUDA_ALLOC_CONF", "", True),
        ("max_split_size", "-1", True),
        ("garbage_collection_threshold", "0.0", True),
        ("expandable_segments", "False", True),
    ]
    assert ("roundup_power2_divisions.32768", "0", True) in found
    assert found[-1] == ("torch_version", "2.13", False)


def test_a_bare_list_of_segments_is_a_snapshot_without_history():
    snapshot = s.opened_here(s.segments((2, 9)))
    assert snapshot.blocks.collect().rows() == expected_blocks((2, 9))
    assert snapshot.allocator_events.collect().is_empty()
    assert snapshot.info.shape == "list"
    assert snapshot.info.torch_versions == "2.1 or newer"
    assert [d.history for d in snapshot.info.devices] == ["none"]


@pytest.mark.parametrize("content", [[], {"segments": [], "device_traces": []}])
def test_a_snapshot_of_nothing_has_empty_frames(content):
    snapshot = s.opened_here(content)
    for name, table in tables.SNAPSHOT_TABLES.items():
        frame = getattr(snapshot, name).collect()
        assert frame.schema == table.schema
        assert frame.height == (name == "allocator_settings")
    assert snapshot.info.devices == []


def test_segments_come_by_device_and_address_and_keep_their_blocks():
    at = [(1, 9 * MIB), (0, 7 * MIB), (1, 1 * MIB), (0, 3 * MIB)]
    made = [
        s.segment(va, [s.block(va, n, n, "inactive") for n in (512, 2 * MIB - 512)], device=device)
        for device, va in at
    ]
    snapshot = s.opened_here({"segments": made, "device_traces": []})
    assert snapshot.segments.select("segment_id", "device_id", "va").collect().rows() == [
        (0, 0, 3 * MIB),
        (1, 0, 7 * MIB),
        (2, 1, 1 * MIB),
        (3, 1, 9 * MIB),
    ]
    segments = dict(snapshot.segments.select("segment_id", "va").collect().rows())
    blocks = rows(snapshot.blocks)
    assert [b["segment_id"] for b in blocks] == [0, 0, 1, 1, 2, 2, 3, 3]
    # The recorded addresses follow the helper's, which gives both blocks that of the segment.
    assert all(b["va"] == segments[b["segment_id"]] for b in blocks)


def test_the_blocks_of_torch_2_0_lie_one_behind_the_other():
    sizes = ((512, 1024), (), (4096,), (512, 512, 2 * MIB))
    made = []
    for i, of_segment in enumerate(sizes):
        blocks = [s.block(0, n, n, "inactive", version=(2, 0)) for n in of_segment]
        made.append(s.segment(s.VA + i * 64 * MIB, blocks, version=(2, 0)))
    found = s.opened_here({"segments": made, "device_traces": []}).blocks.select("va").collect()
    base = [s.VA + i * 64 * MIB for i in range(4)]
    expected = [base[0], base[0] + 512, base[2], base[3], base[3] + 512, base[3] + 1024]
    assert found["va"].to_list() == expected


def test_the_newest_entry_of_a_block_history_counts():
    block = {"size": 1024, "state": "active_allocated"}
    block["history"] = [
        {"addr": s.VA, "real_size": 1000, "frames": [s.MODULE]},
        {"addr": s.VA, "real_size": 700, "frames": [s.MAIN]},
    ]
    old = s.segment(s.SMALL, version=(2, 0)) | {"total_size": 1024, "blocks": [block]}
    snapshot = s.opened_here({"segments": [old], "device_traces": []})
    assert snapshot.blocks.select("requested_bytes").collect().item() == 1000
    assert snapshot.stacks.select("function").collect().item() == "forward"


def changed(change):
    content = s.snapshot((2, 12))
    change(content)
    return content


def first(content):
    return content["segments"][0]


def entries(content):
    return content["device_traces"][0]


@pytest.mark.parametrize(
    ("change", "counted", "where", "expected"),
    [
        (lambda c: entries(c)[1].update(addr=-(1 << 40)), "trace.addr", ("allocator_events", "va", 1), (1 << 64) - (1 << 40)),
        (lambda c: entries(c)[1].update(addr=1 << 64), "trace.addr", ("allocator_events", "va", 1), None),
        (lambda c: entries(c)[1].update(addr="0x10"), "trace.addr", ("allocator_events", "va", 1), None),
        (lambda c: entries(c)[1].update(addr=None), "trace.addr", ("allocator_events", "va", 1), None),
        (lambda c: entries(c)[1].update(addr=True), "trace.addr", ("allocator_events", "va", 1), None),
        (lambda c: entries(c)[1].update(size=-5), "trace.size", ("allocator_events", "bytes", 1), None),
        (lambda c: entries(c)[1].update(size=1 << 63), "trace.size", ("allocator_events", "bytes", 1), None),
        (lambda c: entries(c)[1].update(size=100.0), "trace.size", ("allocator_events", "bytes", 1), 100),
        (lambda c: entries(c)[1].update(size=float("nan")), "trace.size", ("allocator_events", "bytes", 1), None),
        (lambda c: entries(c)[1].update(time_us=1.5), "trace.time_us", ("allocator_events", "time_us", 1), None),
        (lambda c: entries(c)[1].update(pool_id=7), "trace.pool_id", ("allocator_events", "pool", 1), None),
        (lambda c: entries(c)[1].update(pool_id=(1, 2, 3)), "trace.pool_id", ("allocator_events", "pool", 1), None),
        (lambda c: entries(c)[1].update(pool_id=[4, 0]), None, ("allocator_events", "pool", 1), "4,0"),
        (lambda c: entries(c)[1].update(frames="here"), "trace.frames", ("allocator_events", "stack_id", 1), None),
        (lambda c: entries(c)[1].update(compile_context=3), "trace.compile_context", ("allocator_events", "compile_context", 1), None),
        (lambda c: entries(c)[1].update(compile_context="0/1"), None, ("allocator_events", "compile_context", 1), "0/1"),
        (lambda c: entries(c)[1].pop("size"), None, ("allocator_events", "bytes", 1), None),
        (lambda c: first(c).update(segment_type=5), "segments.segment_type", ("segments", "size_class", 0), None),
        (lambda c: first(c).update(is_expandable="yes"), "segments.is_expandable", ("segments", "is_expandable", 0), False),
        (lambda c: first(c).update(device=None), "segments.device", ("segments", "device_id", 0), 0),
        (lambda c: first(c).update(allocated_size=[1]), "segments.allocated_size", ("segments", "allocated_bytes", 0), None),
        (lambda c: first(c)["blocks"][0].update(state="lost"), "blocks.state", ("blocks", "state", 0), "other"),
        (lambda c: first(c)["blocks"][0].update(state="active_awaiting_free"), None, ("blocks", "state", 0), "active_pending_free"),
        (lambda c: first(c)["blocks"][0].update(requested_size=-1), "blocks.requested_size", ("blocks", "requested_bytes", 0), None),
        (lambda c: first(c)["blocks"][1].pop("address"), None, ("blocks", "va", 1), s.SMALL + 512),
        (lambda c: c["external_annotations"][0].update(stage="MIDDLE"), "annotations.stage", ("annotations", "stage", 0), "other"),
        (lambda c: c["external_annotations"][0].update(name=b"x"), "annotations.name", ("annotations", "name", 0), None),
    ],
)  # fmt: skip
def test_a_cell_of_the_wrong_kind_is_read_sensibly_or_as_null_and_counted(
    plain, change, counted, where, expected
):
    table, column, row = where
    snapshot = s.opened_here(changed(change))
    assert getattr(snapshot, table).collect()[column][row] == expected
    assert snapshot.info.odd_cells == ({counted: 1} if counted else {})
    # All other cells are as they were.
    others = getattr(plain, table).collect()
    keep = pl.int_range(pl.len()) != row
    assert_frame_equal(
        getattr(snapshot, table).collect().filter(keep).select(column),
        others.filter(keep).select(column),
    )


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda c: first(c).pop("address"), "segments[0] has no 'address'"),
        (lambda c: first(c).update(address="x"), "segments[0] has no readable 'address'"),
        (lambda c: first(c).update(total_size=-1), "segments[0] has no readable 'total_size'"),
        (lambda c: first(c)["blocks"][1].pop("size"), "blocks[1] has no 'size'"),
        (lambda c: first(c).update(blocks=7), "segments[0]['blocks'] is an int where a list"),
        (lambda c: first(c)["blocks"].insert(2, None), "segments[0]['blocks'][2] is nothing"),
        (lambda c: c.update(segments={}), "segments is a dict where a list must be"),
        (lambda c: c["segments"].append("x"), "segments[2] is a str where a dict must be"),
        (lambda c: c.pop("segments"), "a dict without 'segments'"),
        (lambda c: c.update(device_traces={0: []}), "device_traces is a dict"),
        (lambda c: entries(c).insert(3, [1]), "device_traces[0][3] is a list"),
        (lambda c: c["device_traces"].append(3), "device_traces[2] is an int"),
        (lambda c: entries(c)[0].update(frames=[1]), "a call stack of trace holds an int"),
        (lambda c: c.update(external_annotations=[1]), "external_annotations[0] is an int"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named_with_its_place(change, place):
    with pytest.raises(RefusedError) as refused:
        s.opened_here(changed(change))
    assert refused.value.kind == "other"
    assert place in str(refused.value)


def test_unknown_keys_and_actions_are_counted_and_tolerated():
    def change(content):
        content["future"] = {"deep": [1]}
        for each in entries(content)[:3]:
            each["colour"] = "red"
        entries(content)[4]["action"] = "defragment"
        first(content)["blocks"][0][7] = 1
        content["allocator_settings"]["new_setting"] = [1, 2]

    snapshot = s.opened_here(changed(change))
    assert snapshot.info.unknown_keys == {
        "snapshot.future": 1,
        "trace.colour": 3,
        "blocks.(int)": 1,
    }
    assert snapshot.info.unknown_actions == {"defragment": 1}
    assert snapshot.allocator_events.collect()["action"][4] == "other"
    settings = dict(snapshot.allocator_settings.select("name", "value").collect().rows())
    assert settings["new_setting"] == "1, 2"


def test_names_that_a_file_chooses_are_cut_and_have_no_control_characters():
    content = s.snapshot() | {f"\x1b[31m{'k' * 500}{i}": 0 for i in range(100)}
    found = s.opened_here(content).info.unknown_keys
    assert len(found) <= 41
    assert sum(found.values()) == 100
    assert all(len(name) < 100 and name.isprintable() for name in found)


HISTORIES = {
    "whole": (lambda e: e, "complete", []),
    "first entry lost": (lambda e: e[1:], "partial", []),
    "last entries": (lambda e: e[-4:], "partial", []),
    "no completed free": (
        lambda e: [x for x in e if x["action"] != "free_completed"], "partial", ["free_completed"],
    ),
    "no requested free": (
        lambda e: [x for x in e if x["action"] != "free_requested"], "partial", ["free_requested"],
    ),
    "no alloc": (lambda e: [x for x in e if x["action"] != "alloc"], "partial", ["alloc"]),
    "no segment entries": (
        lambda e: [x for x in e if not x["action"].startswith("segment")], "partial", [],
    ),
    "a segment that went, without its entry": (
        lambda e: [*e, s.entry("segment_alloc", s.VA + 99 * MIB, 2 * MIB)], "partial",
        ["segment_free"],
    ),
    "a segment that came and went": (
        lambda e: [
            *e,
            s.entry("segment_map", s.VA + 99 * MIB, 2 * MIB),
            s.entry("segment_unmap", s.VA + 99 * MIB, 2 * MIB),
        ],
        "complete", [],
    ),
    "a segment that went and came": (
        lambda e: [
            e[0],
            s.entry("segment_free", s.VA + 99 * MIB, 20 * MIB),
            s.entry("segment_alloc", s.VA + 99 * MIB, 20 * MIB),
            *e[1:],
        ],
        "partial", [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HISTORIES)
def test_a_history_is_complete_only_if_it_begins_with_nothing(name):
    change, history, missing = HISTORIES[name]
    content = s.snapshot()
    content["device_traces"][0] = change(entries(content))
    device = s.opened_here(content).info.devices[0]
    assert (device.history, device.missing_actions) == (history, missing)


@pytest.mark.parametrize(
    ("n", "is_suspect"), [(999, False), (1000, True), (1024, True), (3000, True)]
)
def test_a_round_number_of_entries_is_suspect(n, is_suspect):
    content = s.snapshot()
    content["device_traces"] = [[], [s.entry("alloc", s.VA, 512) for _ in range(n)]]
    info = s.opened_here(content).info
    assert [(d.device_id, d.history, d.suspect_overflow) for d in info.devices] == [
        (0, "none", False),
        (1, "partial", is_suspect),
    ]
    assert any("ring buffer" in text for text in info.warnings) == is_suspect


def test_a_whole_history_of_a_round_number_of_entries_is_not_suspect():
    content = s.snapshot()
    content["device_traces"][0] += [s.entry("snapshot", 0, 0) for _ in range(1000 - 11)]
    (device,) = s.opened_here(content).info.devices
    assert (device.n_entries, device.history, device.suspect_overflow) == (1000, "complete", False)


def test_a_very_long_text_is_cut_and_counted():
    content = s.snapshot()
    content["external_annotations"][0]["name"] = "n" * 20_000
    snapshot = s.opened_here(content)
    assert snapshot.annotations.collect()["name"].str.len_chars().to_list() == [10_000, 4]
    assert snapshot.info.odd_cells == {"texts.cut": 1}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: first(c).update(total_size=3 * MIB), "1 segments are not filled"),
        (lambda c: first(c).update(allocated_size=0), "1 segments name another number"),
        (lambda c: first(c)["blocks"][0].update(requested_size=600), "1 blocks name an amount asked for that cannot be"),
        (lambda c: c["segments"][1].update(address=s.SMALL + MIB), "1 segments overlap"),
        (lambda c: c["segments"].append(c["segments"][1]), "1 segments are given more than once"),
        (lambda c: first(c)["blocks"][1].update(address=s.SMALL), "1 blocks overlap"),
        (lambda c: first(c)["blocks"][3].update(address=s.SMALL + 2 * MIB - 512), "1 blocks reach outside"),
        (lambda c: first(c)["blocks"][0].update(address=s.SMALL - 512), "1 blocks reach outside"),
    ],
)  # fmt: skip
def test_what_does_not_add_up_is_said(plain, change, words):
    warnings = s.opened_here(changed(change)).info.warnings
    assert [text for text in warnings if words in text]
    assert plain.info.warnings == []


def test_a_long_segment_overlaps_all_that_begin_in_it():
    lengths = {0: 100, 10: 10, 30: 10, 200: 10}
    made = [
        s.segment(s.VA + at * MIB, [s.block(s.VA + at * MIB, n * MIB, 0, "inactive")])
        for at, n in lengths.items()
    ]
    other_gpu = s.segment(s.VA, made[0]["blocks"], device=1)
    warnings = s.opened_here([*made, other_gpu]).info.warnings
    assert warnings == ["2 segments overlap one before them."]


LIMIT = 1 << 47
OVER = LIMIT + 1


def sized(va, n, **more):
    """A segment of one cached block."""
    return s.segment(va, [s.block(va, n, 0, "inactive")], **more)


@pytest.mark.parametrize(
    ("change", "counted", "table"),
    [
        (lambda c: c["segments"].append(sized(s.VA + (1 << 40), OVER)), "segments.total_size", "segments"),
        (lambda c: c["segments"].append(sized(s.VA + (1 << 40), (1 << 63) - 1)), "segments.total_size", "segments"),
        (lambda c: c["segments"].append(sized(s.VA + (1 << 40), 1 << 70)), "segments.total_size", "segments"),
        (lambda c: c["segments"].append(sized((1 << 64) - MIB, 2 * MIB)), "segments.address", "segments"),
        (lambda c: c["segments"].append(sized(-MIB, 2 * MIB)), "segments.address", "segments"),
        (lambda c: c["segments"].append(sized(s.VA, 2 * MIB, device=128)), "segments.device", "segments"),
        (lambda c: c["segments"].append(sized(s.VA, 2 * MIB, device=-1)), "segments.device", "segments"),
        (lambda c: first(c)["blocks"].insert(1, s.block(s.SMALL, OVER, 0, "inactive")), "blocks.size", "blocks"),
        (lambda c: first(c)["blocks"].append(s.block((1 << 64) - 511, 512, 0, "inactive")), "blocks.address", "blocks"),
        (lambda c: c["device_traces"].extend([[]] * 126 + [[s.entry("alloc", s.VA, 512)]]), "trace.device", "allocator_events"),
    ],
)  # fmt: skip
def test_what_no_machine_can_have_is_left_out_counted_and_said(plain, change, counted, table):
    snapshot = s.opened_here(changed(change))
    assert snapshot.info.odd_cells == {counted: 1}
    assert [text for text in snapshot.info.warnings if "1 " in text and "left out" in text]
    for name in ("segments", "blocks", "allocator_events"):
        assert_frame_equal(getattr(snapshot, name).collect(), getattr(plain, name).collect())
    assert getattr(plain, table).collect().height > 0


def test_the_largest_sizes_and_numbers_that_can_be_are_read():
    top = (1 << 64) - 2 * MIB
    made = [sized(s.VA, LIMIT), sized(top, 2 * MIB), sized(s.VA, 2 * MIB, device=127)]
    history = [*[[]] * 127, [s.entry("alloc", s.VA, LIMIT)]]
    snapshot = s.opened_here({"segments": made, "device_traces": history})
    assert not snapshot.info.odd_cells
    assert sorted(snapshot.segments.select("device_id", "va", "bytes").collect().rows()) == [
        (0, s.VA, LIMIT),
        (0, top, 2 * MIB),
        (127, s.VA, 2 * MIB),
    ]
    assert snapshot.allocator_events.select("device_id", "bytes").collect().rows() == [(127, LIMIT)]


@pytest.mark.parametrize(
    ("change", "counted", "where"),
    [
        (lambda c: entries(c)[1].update(size=OVER), "trace.size", ("allocator_events", "bytes", 1)),
        (lambda c: entries(c)[1].update(addr=(1 << 64) - 99), "trace.size", ("allocator_events", "bytes", 1)),
        (lambda c: entries(c)[9].update(device_free=OVER), "trace.device_free", ("allocator_events", "device_free_bytes", 9)),
        (lambda c: entries(c)[9].update(size=(1 << 62) + 1), "trace.size", ("allocator_events", "bytes", 9)),
        (lambda c: first(c).update(allocated_size=2 * MIB + 1), "segments.allocated_size", ("segments", "allocated_bytes", 0)),
        (lambda c: first(c).update(active_size=2 * MIB + 1), "segments.active_size", ("segments", "active_bytes", 0)),
        (lambda c: first(c).update(requested_size=1 << 40), "segments.requested_size", ("segments", "requested_bytes", 0)),
        (lambda c: first(c)["blocks"][0].update(requested_size=513), "blocks.requested_size", ("blocks", "requested_bytes", 0)),
        (lambda c: first(c)["blocks"][2].update(requested_size=1 << 40), "blocks.requested_size", ("blocks", "requested_bytes", 2)),
        (lambda c: first(c)["blocks"][1].update(requested_size=OVER), "blocks.requested_size", ("blocks", "requested_bytes", 1)),
        (lambda c: c["external_annotations"][0].update(device=128), "annotations.device", ("annotations", "device_id", 0)),
    ],
)  # fmt: skip
def test_a_value_that_no_machine_can_have_is_null_and_counted(plain, change, counted, where):
    table, column, row = where
    snapshot = s.opened_here(changed(change))
    found = getattr(snapshot, table).collect()[column]
    assert found[row] is None
    assert snapshot.info.odd_cells == {counted: 1}
    before = getattr(plain, table).collect()[column]
    assert found.null_count() == before.null_count() + 1


def test_a_free_block_may_have_been_asked_for_more_before_it_was_split():
    content = changed(lambda c: first(c)["blocks"][1].update(requested_size=5 * MIB))
    snapshot = s.opened_here(content)
    assert snapshot.blocks.collect()["requested_bytes"][1] == 5 * MIB
    assert not snapshot.info.odd_cells


def test_the_request_that_failed_may_be_larger_than_any_memory():
    snapshot = s.opened_here(changed(lambda c: entries(c)[9].update(size=1 << 60)))
    assert snapshot.allocator_events.collect()["bytes"][9] == 1 << 60
    assert not snapshot.info.odd_cells


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(segments=[sized(0, LIMIT)] * 32769), "the sizes of its segments add up"),
        (lambda c: first(c).update(blocks=[s.block(0, LIMIT, 0, "inactive")] * 32769), "the sizes of its blocks add up"),
        (lambda c: entries(c).extend([s.entry("alloc", 0, LIMIT)] * 32769), "the sizes of its entries add up"),
        (lambda c: c.update(segments=[sized(0, MIB, device=i) for i in range(129)]), "segments of 129 GPUs"),
        (lambda c: c.update(device_traces=[[s.entry("alloc", 0, 1)]] * 129), "histories of 129 GPUs"),
    ],
)  # fmt: skip
def test_sums_that_wrap_and_more_gpus_than_pytorch_knows_are_refused(change, words):
    content = changed(change)
    # As large as if each item stood in it by itself.
    content["future"] = "." * 6_000_000
    with pytest.raises(RefusedError, match=words) as refused:
        s.opened_here(content)
    assert refused.value.kind == "unsafe"


PATHS = {
    "/home/someone/venv/lib/python3.12/site-packages/torch/nn/modules/module.py": "site-packages/torch/nn/modules/module.py",
    "/usr/lib/python3/dist-packages/numpy/core.py": "dist-packages/numpy/core.py",
    "/home/someone/miniconda3/envs/x/lib/python3.9/runpy.py": "lib/python3.9/runpy.py",
    "/usr/lib64/python3.13t/copy.py": "lib64/python3.13t/copy.py",
    "/home/someone/pytorch/torch/_tensor.py": "pytorch/torch/_tensor.py",
    "/home/someone/secret/train.py": "train.py",
    "secret/train.py": "train.py",
    "../aten/src/ATen/native/Blas.cpp": "Blas.cpp",
    "/home/someone/lib/python/secret/x.py": "x.py",
    "/home/someone/mysite-packages/x.py": "x.py",
    "C:\\Users\\someone\\venv\\Lib\\site-packages\\torch\\functional.py": "site-packages\\torch\\functional.py",
    "C:\\Users\\someone\\Python311\\Lib\\copy.py": "Python311\\Lib\\copy.py",
    "D:\\secret\\train.py": "train.py",
    "train.py": "train.py",
    "<frozen importlib._bootstrap>": "<frozen importlib._bootstrap>",
    "<eval_with_key>.3": "<eval_with_key>.3",
    "??": "??",
    "": "",
}  # fmt: skip


def with_paths(paths):
    content = s.snapshot()
    entries(content)[1]["frames"] = [
        {"name": "f", "filename": path, "line": i} for i, path in enumerate(paths)
    ]
    return content


def test_folders_of_the_user_are_cut_off_the_paths_of_frames(opened):
    files = opened(with_paths(PATHS)).stacks.filter(pl.col("function") == "f").collect()
    assert files["source_file"].to_list() == list(PATHS.values())
    assert not [file for file in files["source_file"] if "someone" in file or "secret" in file]


def test_paths_that_were_cut_stay_as_they_are():
    files = s.opened_here(with_paths(PATHS.values())).stacks.filter(pl.col("function") == "f")
    assert files.collect()["source_file"].to_list() == list(PATHS.values())


def test_paths_are_kept_whole_if_that_is_asked_for(tmp_path):
    path = s.write(tmp_path / "s.pickle", with_paths(PATHS))
    files = nsan.open_snapshot(path, keep_paths=True).stacks.filter(pl.col("function") == "f")
    assert files.collect()["source_file"].to_list() == list(PATHS)


def test_a_cut_path_tells_the_program_from_its_libraries_as_the_whole_one_does(tmp_path):
    content = s.snapshot()
    # Of these two only the cut path tells: the library's own folder, and a folder of that name.
    python = [p for p in PATHS if p.endswith(".py") and "lib64" not in p and "lib/python/" not in p]
    for i, path in enumerate(python):
        frame = {"name": f"f{i}", "filename": path, "line": i}
        entries(content).append(s.entry("alloc", s.VA, 512) | {"frames": [frame]})
    path = s.write(tmp_path / "s.pickle", content)
    cut, whole = (
        call_sites(nsan.open_snapshot(path, keep_paths=keep).stacks)
        .filter(pl.col("function").str.starts_with("f"))
        .sort("function")
        .collect()
        for keep in (False, True)
    )
    assert cut["part"].to_list() == whole["part"].to_list()
    assert set(cut["part"]) == {"program", "library"}


def test_stacks_that_differ_in_their_folders_only_are_one():
    content = s.snapshot()
    for entry, folder in zip(entries(content), ("a", "b"), strict=False):
        entry["frames"] = [{"name": "f", "filename": f"/home/{folder}/x.py", "line": 1}]
    ids = s.opened_here(content).allocator_events.collect()["stack_id"]
    assert ids[0] == ids[1] != ids[2]


def modelled(allocator, tmp_path):
    frames = {t: getattr(s.opened_here(s.snapshot((2, 9))), t) for t in tables.SNAPSHOT_TABLES}
    facts = {"nsan": "0.1", "allocator": allocator, "network": "gpt"}
    write_snapshot(tmp_path / "w.pickle", frames, model=facts)
    return nsan.open_snapshot(tmp_path / "w.pickle")


def test_a_model_without_a_caching_allocator_says_so_and_claims_no_pytorch(tmp_path):
    snapshot = modelled("raw", tmp_path)
    rows = snapshot.allocator_settings.collect().rows()
    assert rows[-2:] == [("allocator", "plain", False), ("torch_version", "2.9", False)]
    assert (snapshot.info.torch_version, snapshot.info.torch_versions) == ("", "")
    assert snapshot.info.model["allocator"] == "raw"
    assert repr(snapshot) == "<Snapshot w.pickle, plain allocator>"


def test_a_model_of_the_caching_allocator_has_its_version_and_no_such_setting(tmp_path):
    snapshot = modelled("caching", tmp_path)
    names = snapshot.allocator_settings.collect()["name"].to_list()
    assert "allocator" not in names
    assert names.count("torch_version") == 1
    assert snapshot.info.torch_versions == "2.9"


def test_a_file_cannot_say_by_its_settings_that_its_allocator_is_plain():
    content = s.snapshot()
    content["allocator_settings"] |= {"allocator": "plain", "torch_version": "9.9"}
    snapshot = s.opened_here(content)
    found = snapshot.allocator_settings.filter(pl.col("name").is_in(["allocator", "torch_version"]))
    assert found.collect().rows() == [("torch_version", "2.9", False)]


def test_no_path_of_a_stack_is_in_the_information(opened, tmp_path):
    info = json.dumps(opened(s.snapshot()).info.to_dict())
    assert "someone" not in info
    assert str(tmp_path) not in info


def test_opening_a_file_leaves_it_and_its_folder_alone(tmp_path):
    path = s.write(tmp_path / "s.pickle", s.snapshot())
    path.chmod(0o444)
    before = path.stat().st_mtime_ns, path.read_bytes()
    nsan.open_snapshot(path)
    assert (path.stat().st_mtime_ns, path.read_bytes()) == before
    assert [p.name for p in tmp_path.iterdir()] == ["s.pickle"]


@pytest.mark.parametrize("name", s.REAL)
def test_what_is_written_reads_back_to_the_same_frames(real, tmp_path, name):
    frames = {table: getattr(real[name], table).collect() for table in tables.SNAPSHOT_TABLES}
    write_snapshot(tmp_path / "w.pickle", frames, model={"allocator": "caching", "n": 3})
    again = nsan.open_snapshot(tmp_path / "w.pickle")
    for table, frame in frames.items():
        assert_frame_equal(getattr(again, table).collect(), frame)
    assert again.info.kind == "nsan-model"
    assert again.info.model == {
        "torch_version": real[name].info.torch_version,
        "allocator": "caching",
        "n": "3",
    }
    assert [d.history for d in again.info.devices] == [d.history for d in real[name].info.devices]


@pytest.mark.parametrize("name", ["decomfl", "verl"])
def test_what_is_written_is_what_pytorch_wrote(real, tmp_path, name):
    frames = {table: getattr(real[name], table) for table in tables.SNAPSHOT_TABLES}
    write_snapshot(tmp_path / "w.pickle", frames)
    assert pickle.loads((tmp_path / "w.pickle").read_bytes()) == loaded(name)


def test_what_is_written_names_the_pools_of_entries_where_they_are_known(opened, tmp_path):
    frames = {t: getattr(opened(s.snapshot((2, 12))), t) for t in tables.SNAPSHOT_TABLES}
    write_snapshot(tmp_path / "w.pickle", frames)
    content = pickle.loads((tmp_path / "w.pickle").read_bytes())
    assert [e["pool_id"] for e in content["device_traces"][0]] == [e[4] for e in s.HISTORY]
    assert content["device_traces"][0][9]["device_free"] == 3 * MIB
    assert "addr" not in content["device_traces"][0][9]
    assert content["segments"][1]["segment_pool_id"] == (0, 1)


def test_a_written_file_never_replaces_another_unasked(opened, tmp_path):
    frames = {"segments": opened(s.snapshot()).segments}
    place = tmp_path / "w.pickle"
    place.write_bytes(b"mine")
    with pytest.raises(OutputExistsError):
        write_snapshot(place, frames)
    assert place.read_bytes() == b"mine"
    with pytest.raises(SchemaMismatchError):
        write_snapshot(place, {"segments": pl.DataFrame({"a": [1]})}, overwrite=True)
    assert place.read_bytes() == b"mine"
    write_snapshot(place, frames, overwrite=True)
    assert nsan.open_snapshot(place).segments.collect().height == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s.pickle", "w.pickle"]


def test_the_labels_of_the_child_are_those_of_the_tables():
    assert list(flatten.SIZE_CLASSES) == tables.POOL_SIZE.categories.to_list()
    assert list(flatten.STATES) == tables.BLOCK_STATE.categories.to_list()
    assert list(flatten.ACTIONS) == tables.ACTION.categories.to_list()
    assert list(flatten.STAGES) == tables.STAGE.categories.to_list()


OTHER_FILES = {
    "an empty file": b"",
    "a SQLite database": b"SQLite format 3\0" + bytes(100),
    "a zip archive, as torch.save writes": b"PK\x03\x04" + bytes(60),
    "a checkpoint of torch.save": b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.",
    "JSON": b' {"segments": []}',
    "HTML": b"<!DOCTYPE html>\n<html><body>PyTorch memory_viz</body></html>",
    "a Parquet file": b"PAR1" + bytes(50),
    "a text": b"==1234== NVPROF is profiling\n",
    "a pickle of protocol 0 or 1": pickle.dumps({"segments": []}, protocol=0),
    "a pickle of protocol 9": b"\x80\x09}.",
    "an nsys report": b"....NVIDIA Tegra Profiler Report",
    "a file that begins with zeros": bytes(5000),
    "no pickle": b"\xff\xfe\xfd" * 50,
    "zstandard data": b"\x28\xb5\x2f\xfd" + bytes(20),
}


@pytest.mark.parametrize("what", OTHER_FILES)
def test_another_kind_of_file_is_named(tmp_path, what):
    path = tmp_path / "x.pickle"
    path.write_bytes(OTHER_FILES[what])
    with pytest.raises(NotASnapshotError) as refused:
        nsan.open_snapshot(path)
    assert f"x.pickle is {what}" in str(refused.value)
    assert str(refused.value).count("\n") == 1


@pytest.mark.parametrize(
    ("content", "what"),
    [("text", "holds a str"), (None, "holds nothing"), ({"state_dict": {}}, "without 'segments'"), ([1], "segments[0] is an int")],
)  # fmt: skip
def test_another_kind_of_pickle_is_named(content, what):
    with pytest.raises(RefusedError) as refused:
        s.opened_here(content)
    assert refused.value.kind == "other"
    assert what in str(refused.value)


def test_a_folder_a_pipe_and_nothing_are_named(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, what in (("", "a folder"), ("pipe", "not a regular file")):
        with pytest.raises(NotASnapshotError) as refused:
            nsan.open_snapshot(tmp_path / name)
        assert what in str(refused.value)
    with pytest.raises(InputMissingError):
        nsan.open_snapshot(tmp_path / "none")


def test_a_packed_file_that_is_damaged_is_named(tmp_path):
    whole = gzip.compress(pickle.dumps(s.snapshot()))
    path = tmp_path / "x.pickle.gz"
    for data, what in (
        (whole[:-20], "cut short"),
        (whole + b"more", "behind its gzip data"),
        (whole[:40] + b"\xff" * 8 + whole[48:], "corrupt"),
    ):
        path.write_bytes(data)
        with pytest.raises(SnapshotError) as refused:
            nsan.open_snapshot(path)
        assert what in str(refused.value)
