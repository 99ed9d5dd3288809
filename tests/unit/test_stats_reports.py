"""What nsan's reports for `nsys stats` are made of: words of Python 3.8, the rules of nsan, and their parts."""

from __future__ import annotations

import ast
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import exports as x
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nsan
from nsan.analysis.attribution import causes, work
from nsan.analysis.health import MAX_CLOCK_SKEW_NS
from nsan.io import nsys_context, nsys_info, nsys_tables
from nsan.io.nsys_sqlite import NsysExport
from nsan.stats_reports import (
    _allocations,
    _causes,
    _export,
    _kernels,
    _recorded,
    _refaults,
    _report,
    _work,
)
from nsan.stats_reports._address_map import AddressMap
from nsan.text import CAUSE_WORDS, DIRECTION_WORDS
from nsan.uvm import constants as uvm

FOLDER = Path(_export.__file__).parent
FILES = [*sorted(FOLDER.glob("*.py")), Path(nsan.__file__)]
every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)


@every_file
def test_a_file_is_python_3_8(path):
    assert ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 8)).body


@every_file
def test_a_file_needs_the_standard_library_only(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = [node for node in tree.body if not isinstance(node, ast.If)]  # not if TYPE_CHECKING
    names = set()
    for node in (child for top in inside for child in ast.walk(top)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    others = {name for name in names if name.partition(".")[0] not in sys.stdlib_module_names}
    assert {name for name in others if not name.startswith("nsan.stats_reports")} == set()


@every_file
def test_a_file_evaluates_no_newer_type(path):
    text = path.read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(text)))
    notes = [getattr(node, name, None) for node in nodes for name in ("annotation", "returns")]
    evaluated = [node.value for node in nodes if isinstance(node, ast.Assign)]
    if "from __future__ import annotations" not in text:
        evaluated += [note for note in notes if note is not None]
    assert not [part for value in evaluated for part in ast.walk(value) if _is_newer(part)]


def _is_newer(part):
    """Say whether a part of an expression is a type of later versions: list[int], int | None."""
    if isinstance(part, ast.BinOp) and isinstance(part.op, ast.BitOr):
        return isinstance(part.right, ast.Constant) and part.right.value is None
    of = part.value if isinstance(part, ast.Subscript) else None
    return isinstance(of, ast.Name) and of.id in {"list", "dict", "set", "tuple", "type"}


def test_the_numbers_are_those_of_nsan():
    assert _work.MAX_CLOCK_SKEW_NS == MAX_CLOCK_SKEW_NS
    assert _work.NEIGHBOUR_NS == work._NEIGHBOUR_NS
    assert _kernels.MAKES_ROOM_WITHIN_NS == causes.MAKES_ROOM_WITHIN_NS
    assert _export.BLOCK_BYTES == uvm.VA_BLOCK_BYTES
    assert dict(zip(_export.MIGRATED, ("htod", "dtoh", "dtod"), strict=True)) == uvm.DIRECTIONS
    assert (_export.USER, _export.FAULT, _export.PREFETCH, _export.EVICTION) == (1, 2, 3, 4)
    assert (uvm.CAUSE_USER, uvm.CAUSE_COHERENCE, uvm.CAUSE_PREFETCH) == (1, 2, 3)
    assert uvm.CAUSE_EVICTION == 4
    limits = {"start": nsys_tables.TIMES, "end": nsys_tables.TIMES, "bytes": nsys_tables.SIZES}
    assert {**limits, "numberOfPageFaults": nsys_tables.COUNTS} == _export._LIMITS
    assert _report._RANGES == (59, 60, 70, 71)
    assert {*nsys_context.PUSH_POP, *nsys_context.START_END} == set(_report._RANGES)
    assert uvm.PUSH_GAPS_NS == (0, 1)


def test_the_words_are_those_of_nsan():
    assert {uvm.DIRECTIONS[k]: v for k, v in _causes.DIRECTIONS.items()} == DIRECTION_WORDS
    words = {uvm.CAUSES[k]: v[0].lower() + v[1:] for k, v in _causes.CAUSES.items()}
    assert words == {"unknown": "unknown", **CAUSE_WORDS}
    assert _work._COPIES == uvm.COPY_KINDS
    kinds = {number for number, name in uvm.MEMORY_KINDS.items() if name in uvm.MANAGED_KINDS}
    assert kinds == _allocations.MANAGED
    others = set(uvm.MEMORY_KINDS) - kinds - {7}
    assert others == _allocations._KNOWN_OTHERS == _work._MEMORY_THAT_DOES_NOT


def test_the_switches_are_those_of_nsan():
    names = {"memory_events": "allocations"}
    for kind, about in _recorded.KINDS.items():
        assert about.switch == nsys_info.SWITCHES[names.get(kind, kind)]
        assert about.option == nsys_info._OPTIONS[names.get(kind, kind)]
    assert _recorded._REFUSED in nsys_info.NOT_TRACED


# --- Whether something was recorded --------------------------------------------------------------

ROWS = {
    "nothing": (),
    "a kernel": ((x.KERNEL, x.kernel(0, 1)),),
    "a copy": ((x.MEMCPY, x.copy(0, 1, 1)),),
    "a migration": ((x.MEMCPY, x.migration(0, 1, 4096)),),
    "faults": ((x.GPU_FAULTS, x.gpu_fault(0, 1)), (x.CPU_FAULTS, x.cpu_fault(0))),
    "an allocation": ((x.MEMORY, x.memory_event(0, x.VA, 4096)),),
    "a refusal": (
        ("DIAGNOSTIC_EVENT", {"text": "CUDA Unified Memory cannot be traced here", "severity": 2}),
        (x.KERNEL, x.kernel(0, 1)),
    ),
}


@pytest.mark.parametrize("version", ["2022.2.1", "2022.4.2", "2023.4.4", "2025.3.2.474"])
@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("option", ["true", "false", None])
def test_what_was_recorded_is_answered_as_nsan_does(tmp_path, version, lazy, option):
    switches = ("COLLECT_UVM_GPU_PAGE_FAULTS", "COLLECT_GPU_MEMORY_USAGE", "COLLECT_CUDA_TRACE")
    for rows in ROWS.values():
        export = x.Export(version, lazy=lazy, options=dict.fromkeys(switches, option))
        for table, row in rows:
            export.add(table, row)
        path = export.write(tmp_path / "export.sqlite")
        with NsysExport(path) as theirs:
            theirs.copy_tables(lambda *_: None, lambda *_: None)
            expected = theirs.info().capture
        with closing(sqlite3.connect(path)) as connection:
            mine = _recorded.Recorded(_opened(connection))
            answers = {kind: mine.has(kind) for kind in _recorded.KINDS}
        path.unlink()
        assert answers == {
            kind: expected["allocations" if kind == "memory_events" else kind].answer == "recorded"
            for kind in _recorded.KINDS
        }


def _opened(connection):
    names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master")]
    return _export.Export(connection, names)


# --- Parts ---------------------------------------------------------------------------------------

spans = st.tuples(st.integers(0, 40), st.integers(1, 12)).map(lambda s: (s[0], s[0] + s[1]))


@given(st.lists(st.tuples(spans, st.integers(0, 3)), max_size=30), spans)
def test_the_last_owner_of_an_address_holds_it(given_to, asked):
    held, expected = AddressMap(), {}
    for (low, high), owner in given_to:
        before = held.give(low, high, owner)
        pieces = [(va, piece.owner) for piece in before for va in range(piece.low, piece.high)]
        assert pieces == [(va, expected.get(va)) for va in range(low, high)]
        expected.update(dict.fromkeys(range(low, high), owner))
    assert [held.owner(va) for va in range(60)] == [expected.get(va) for va in range(60)]
    pieces = held.pieces(*asked)
    found = [(va, piece.owner) for piece in pieces for va in range(piece.low, piece.high)]
    assert found == [(va, expected.get(va)) for va in range(*asked)]


@given(st.lists(spans, max_size=20), spans)
def test_intervals_cover_what_any_of_them_covers(given_spans, asked):
    intervals, covered = _work.Intervals(), set()
    for start, end in sorted(given_spans):
        intervals.add(start, end)
        covered |= set(range(start, end))
    assert intervals.total == len(covered)
    assert [intervals.covers(time) for time in range(60)] == [time in covered for time in range(60)]
    assert intervals.within(*asked) == len(covered & set(range(*asked)))


@given(st.lists(st.tuples(spans, st.integers(0, 5), st.booleans()), max_size=12))
def test_one_kernel_at_a_time_can_be_named(pieces):
    steps = _work.Steps()
    for (start, end), item, is_kernel in pieces:
        steps.add(start, end, item, is_kernel=is_kernel)
    steps.close()
    for time in range(60):
        running = [(k, item) for (start, end), item, k in pieces if start <= time < end]
        first = [item for k, item in running if k] or [item for _, item in running]
        expected = first[0] if len(first) == 1 else _work.AMBIGUOUS if first else _work.UNATTRIBUTED
        assert steps.at(time) == expected


def test_a_fault_belongs_to_the_work_that_its_replay_ends_in():
    steps = _work.Steps()
    steps.add(0, 100, 1, is_kernel=True)
    steps.add(110, 200, 2, is_kernel=True)
    steps.close()
    assert steps.during(90, 150) == 2
    assert steps.during(90, 105) == 1  # nothing runs at its end
    assert steps.during(90, None) == 1
    assert steps.during(105, 106) == _work.UNATTRIBUTED


def test_an_allocation_ends_where_another_one_takes_its_bytes():
    first = _allocations.Allocation(1, 10, 0, 100, None, None, 4)
    second = _allocations.Allocation(1, 30, 50, 100, 90, None, 4)
    elsewhere = _allocations.Allocation(2, 20, 0, 100, None, None, 4)
    closed = list(_refaults._closed([second, elsewhere, first]))
    assert {each.va + each.pid: each.free_ns for each in closed} == {1: 30, 51: 90, 2: None}


def test_a_life_begins_where_nothing_was_there():
    assert _refaults._begins([(0, 1), (5, 1), (8, -1), (9, -1), (9, 1), (12, -1)]) == [0, 9]


def test_what_sqlite_cannot_hold_is_a_float():
    assert _report._fitting(1 << 63) == float(1 << 63)
    assert _report._fitting((1 << 63) - 1) == (1 << 63) - 1


def test_a_report_without_nsys_says_what_to_do():
    script = FOLDER / "nsan_um_sum.py"
    done = subprocess.run(
        [sys.executable, "-I", "-B", str(script), "file.sqlite"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 28
    assert f"nsys stats --report-dir {FOLDER} -r nsan_um_sum FILE" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("path", sorted(FOLDER.glob("nsan_um_*.py")), ids=lambda path: path.stem)
def test_a_report_names_its_script_and_itself(path):
    """nsys lists what these say; a name that is inherited would hide the report."""
    text = path.read_text(encoding="utf-8")
    assert f'script_name = "{path.stem}"' in text
    assert f"nsys stats -r {path.stem}`" in text
    assert text.startswith("#!/usr/bin/env python3\n")
