"""The bytes that a program says must migrate, against the migrations of its trace."""

from __future__ import annotations

import csv
import json

import bench_programs
import bench_tables
import cpp
import exports as x
import polars as pl
import pytest
from bench_tables import row
from hypothesis import given
from hypothesis import strategies as st
from made_traces import copy, made, nvtx

from nsan.info import Capture
from nsan.microbench.expecting import Expectations, ExpectedError, compared
from nsan.microbench.tapes import tape_text
from nsan.model import machine
from nsan.model.access import Stream, Strided
from nsan.model.networks import tensors as t
from nsan.model.program import (
    Allocate,
    Free,
    HostTouch,
    Kernel,
    Launch,
    PopRange,
    Program,
    PushRange,
    Synchronize,
)
from nsan.model.recording import PID as MODEL_PID
from nsan.model.recording import record
from nsan.model.settings import DEFAULT_SETTINGS
from nsan.schema import TABLES
from nsan.trace import Trace

KIB, MIB, VA = x.KIB, x.MIB, x.VA
B_VA = VA + 8 * MIB

ARRAYS = (row("a", VA, 4 * MIB, 11), row("b", B_VA, 2 * MIB, 12))
PHASES = (("init", ""), ("run", 0), ("run", 1), ("check", ""))
INIT, RUN_0, RUN_1, CHECK = range(4)
SPANS = ((100, 200), (300, 400), (500, 600), (700, 800))
"""When the phases are, in the trace; the tables have another clock."""
A, B = range(2)
EXPECTED = (
    (RUN_0, A, "htod", 2 * MIB, 4 * MIB),
    (RUN_0, A, "dtoh", 0, 0),
    (RUN_1, A, "htod", 0, 0),
    (CHECK, B, "dtoh", 2 * MIB, 2 * MIB),
)
RIGHT = (
    x.migration(310, 315, 2 * MIB, VA),
    x.migration(320, 325, 64 * KIB, VA + 2 * MIB, cause=x.PREFETCH),
    x.migration(710, 720, MIB, B_VA, kind=x.DTOH),
    x.migration(730, 740, MIB, B_VA + MIB, kind=x.DTOH),
)


def write(folder, *, rows=ARRAYS, phases=PHASES, expected=EXPECTED, **how):
    """Write the tables of a run; return their folder."""
    bench_tables.write(folder, rows, **how)
    table(
        folder / "phases.csv",
        ("phase", "name", "iteration", "start_ns", "end_ns"),
        [(i, *phase, 1000 * i, 1000 * i + 500) for i, phase in enumerate(phases)],
    )
    head = ("phase", "allocation", "direction", "least_bytes", "most_bytes")
    table(folder / "expected.csv", head, expected)
    return folder


def table(path, head, rows):
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([head, *rows])


def ranges(names=PHASES, spans=SPANS, *, domain="nsan", **how):
    created = x.nvtx(0, 0, domain, kind=75, domain=1)
    phases = zip(names, spans, strict=True)
    return [created, *(x.nvtx(*span, name, domain=1, **how) for (name, _), span in phases)]


MEMORY = (x.memory_event(20, VA, 4 * MIB), x.memory_event(30, B_VA, 2 * MIB))


def export(migrations=RIGHT, *, memory=MEMORY, shown=None, **how):
    built = x.Export(**how).add(x.MEMCPY, *migrations).add(x.MEMORY, *memory)
    return built.add(x.NVTX, *(ranges() if shown is None else shown)).add(x.KERNEL, x.kernel(1, 2))


@pytest.fixture
def check(tmp_path, trace_of):
    """Compare an export with tables; each is the right one if not given."""

    def run(made_of=None, **tables):
        trace = trace_of(export() if made_of is None else made_of)
        return compared(trace, write(tmp_path / "run.truth", **tables))

    return run


def reason(found):
    assert (found.n_checked, found.n_right, found.wrong) == (0, 0, ())
    assert found.reason
    assert "\n" not in found.reason
    return found.reason


# Right and wrong


def test_a_trace_with_the_expected_bytes_is_right(check):
    assert check() == Expectations(4, 4, (), demands_bytes=True)


def test_too_few_bytes_are_wrong_and_the_line_says_how_many(check):
    found = check(export(RIGHT[1:]))
    assert (found.n_checked, found.n_right, found.reason) == (4, 3, "")
    assert found.wrong == (
        "phase run 0, allocation a, HtoD: 64.00 KiB (65536 B) in the trace, "
        "2.00 MiB (2097152 B) to 4.00 MiB (4194304 B) expected",
    )


def test_too_many_bytes_are_wrong_and_so_is_what_moves_where_nothing_must(check):
    again = (x.migration(510, 520, 4 * KIB, VA), x.migration(750, 760, 4 * KIB, B_VA, kind=x.DTOH))
    assert check(export((*RIGHT, *again))).wrong == (
        "phase run 1, allocation a, HtoD: 4.00 KiB (4096 B) in the trace, 0 B expected",
        "phase check, allocation b, DtoH: 2.00 MiB (2101248 B) in the trace, 2.00 MiB (2097152 B) expected",
    )


def test_the_bounds_themselves_are_right(check):
    def moved(n_bytes):
        return check(export((x.migration(310, 315, n_bytes, VA),)), expected=[EXPECTED[0]]).n_right

    bounds = (2 * MIB - 1, 2 * MIB, 4 * MIB)
    assert [moved(n_bytes) for n_bytes in bounds] == [0, 1, 1]


def test_an_eviction_from_the_array_is_not_what_was_expected(check):
    evicted = x.migration(330, 340, 2 * MIB, VA, kind=x.DTOH, cause=x.EVICTION)
    assert check(export((*RIGHT, evicted))).wrong == (
        "phase run 0, allocation a, DtoH: 2.00 MiB (2097152 B) in the trace, 0 B expected",
    )


def test_what_moves_twice_counts_twice(check):
    twice = [x.migration(start, start + 5, 2 * MIB, VA) for start in (310, 320, 330)]
    [line] = check(export((*twice, *RIGHT[2:]))).wrong
    assert "6.00 MiB (6291456 B) in the trace" in line


def test_where_nothing_need_move_a_trace_without_migrations_is_right(check):
    found = check(export(()), expected=[(RUN_0, A, "htod", 0, 4 * MIB), EXPECTED[2]])
    assert found == Expectations(2, 2, (), demands_bytes=False)


# What counts


def test_a_migration_over_the_edges_of_an_allocation_counts_with_the_bytes_inside(check):
    # From 4 byte before a, over all of its 4097, and 7 byte into its neighbour.
    arrays = [row("a", VA, 4097, 11), row("b", VA + 4097, 4096, 12)]
    memory = [x.memory_event(20, VA, 4097), x.memory_event(30, VA + 4097, 4096)]
    one = x.migration(310, 320, 4 + 4097 + 7, VA - 4)
    expected = [(RUN_0, A, "htod", 4097, 4097), (RUN_0, B, "htod", 7, 7)]
    found = check(export((one,), memory=memory), rows=arrays, expected=expected)
    assert found == Expectations(2, 2, (), demands_bytes=True)


def test_a_migration_beside_an_allocation_counts_nothing_of_it(check):
    beside = [
        x.migration(310, 320, 4 * KIB, VA - 4 * KIB),
        x.migration(310, 320, 4 * KIB, VA + 4 * MIB),
    ]
    assert check(export(beside), expected=[(RUN_0, A, "htod", 0, 0)]).n_right == 1


@pytest.mark.parametrize(("start", "counts"), [(299, 0), (300, 1), (399, 1), (400, 0)])
def test_a_migration_belongs_to_the_phase_in_which_it_starts(check, start, counts):
    one = x.migration(start, 450, 4 * KIB, VA)
    expected = [(RUN_0, A, "htod", 4 * KIB, 4 * KIB)]
    assert check(export((one,)), expected=expected).n_right == counts


US = 1000
LATER = (RUN_1, A, "htod", 2 * MIB, 2 * MIB)


@pytest.mark.parametrize(
    ("start", "gap", "before", "right"),
    [
        (9_000 * US, 10 * US, 0, True),  # 1 ms before the phase
        (9_999 * US, 10 * US, 0, True),  # between the phases
        (8_999 * US, 10 * US, 0, False),  # longer before
        (9_500 * US, 10 * US, 2 * MIB, False),  # the first phase may expect it
        (9_500 * US, 1_000 * US, 0, False),  # the first does not end at once before
        (10_000 * US, 10 * US, 0, True),
    ],
)
def test_what_starts_a_moment_before_a_phase_is_of_it_if_the_phase_before_expects_nothing(
    check, start, gap, before, right
):
    """Migrations have times of the GPU, phases those of the host; the second run starts at 10 ms."""
    begin = 10_000 * US
    spans = ((100, 200), (300, begin - gap), (begin, begin + 50 * US), (20_000 * US, 20_001 * US))
    moved = (x.migration(start, start + 5, 2 * MIB, VA),)
    expected = [(RUN_0, A, "htod", 0, before), LATER]
    found = check(export(moved, shown=ranges(spans=spans)), expected=expected)
    assert (found.n_checked, found.n_right == 2) == (2, right), found


@pytest.mark.parametrize(
    "later", [(RUN_1, A, "dtoh", 0, 0), (RUN_1, B, "htod", 0, 0), (CHECK, A, "htod", 0, 2 * MIB)]
)
def test_what_no_row_of_the_next_phase_asks_for_stays_in_its_own(check, later):
    spans = ((100, 200), (300, 400), (410, 600), (610, 800))
    moved = (x.migration(350, 355, 2 * MIB, VA),)
    expected = [(RUN_0, A, "htod", 0, 0), later]
    found = check(export(moved, shown=ranges(spans=spans)), expected=expected)
    assert found.wrong == (
        "phase run 0, allocation a, HtoD: 2.00 MiB (2097152 B) in the trace, 0 B expected",
    )


def test_an_address_that_is_used_again_in_the_same_phase_is_two_allocations(check):
    rows = [row("first", VA, 2 * MIB, 11), row("second", VA, 4 * MIB, 12)]
    memory = [
        x.memory_event(20, VA, 2 * MIB),
        x.memory_event(350, VA, 2 * MIB, free=True),
        x.memory_event(360, VA, 4 * MIB),
    ]
    moved = [x.migration(349, 352, MIB, VA), x.migration(360, 370, 3 * MIB, VA)]
    expected = [(RUN_0, 0, "htod", MIB, MIB), (RUN_0, 1, "htod", 3 * MIB, 3 * MIB)]
    found = check(export(moved, memory=memory), rows=rows, expected=expected)
    assert found == Expectations(2, 2, (), demands_bytes=True)


def test_memory_of_the_gpu_at_the_same_address_before_is_not_the_allocation(check):
    rows = [row("ballast", VA, 2 * MIB, 10, kind="device"), row("a", VA, 4 * MIB, 11)]
    memory = [
        x.memory_event(10, VA, 2 * MIB, kind=2),
        x.memory_event(15, VA, 2 * MIB, kind=2, free=True),
        x.memory_event(20, VA, 4 * MIB),
    ]
    expected = [(RUN_0, 1, "htod", 2 * MIB, 4 * MIB)]
    assert check(export(memory=memory), rows=rows, expected=expected).n_right == 1


def test_another_process_adds_nothing_with_its_migrations_ranges_and_allocations(check):
    built = export((*RIGHT, x.migration(310, 320, 4 * MIB, VA, pid=x.PID + 1)))
    built.add(x.NVTX, *ranges(pid=x.PID + 1))
    built.add(x.MEMORY, x.memory_event(21, VA, 4 * MIB, pid=x.PID + 1))
    assert check(built) == Expectations(4, 4, (), demands_bytes=True)


def test_ranges_of_other_names_and_domains_are_no_phases(check):
    others = [x.nvtx(0, 900, "step", domain=1), x.nvtx(0, 900, "run"), x.nvtx(250, 600, "run")]
    assert check(export(shown=[*ranges(), *others])).n_right == 4


def test_the_highest_addresses_are_compared_too(check):
    top = (1 << 64) - 4 * MIB
    stored = top - (1 << 64)  # as SQLite holds it
    memory = [x.memory_event(20, stored, 4 * MIB)]
    built = export([x.migration(310, 320, 2 * MIB, stored + 2 * MIB)], memory=memory)
    expected = [(RUN_0, 0, "htod", 2 * MIB, 2 * MIB)]
    assert check(built, rows=[row("a", top, 4 * MIB, 11)], expected=expected).n_right == 1


RECORDED = {kind: Capture("recorded", "", "") for kind in ("migrations", "nvtx", "allocations")}
PAGES = 12


@st.composite
def runs(draw):
    """Lives of allocations on a few pages, phases, migrations over them, and what is asked."""
    lives = []
    for first in range(0, PAGES, 4):  # several lives in turn at one place
        times = draw(st.lists(st.integers(0, 100), min_size=2, max_size=6, unique=True).map(sorted))
        size = draw(st.integers(1, 4 * 4096))
        lives += [
            (first * 4096, size, *life) for life in zip(times[::2], times[1::2], strict=False)
        ]
    edges = draw(st.lists(st.integers(0, 100), min_size=2, max_size=8, unique=True).map(sorted))
    phases = list(zip(edges[::2], edges[1::2], strict=False))
    place = st.tuples(st.integers(0, PAGES - 1), st.integers(1, PAGES)).map(
        lambda at: (at[0] * 4096, at[1] * 4096)
    )
    moves = draw(st.lists(st.tuples(st.integers(0, 100), place, st.sampled_from(("htod", "dtoh")))))
    cell = st.tuples(
        st.integers(0, len(phases) - 1),
        st.integers(0, len(lives) - 1),
        st.sampled_from(("htod", "dtoh")),
    )
    return lives, phases, moves, draw(st.lists(cell, min_size=1, max_size=8))


def spread(run):
    """The same run with all times farther from each other than the two clocks are."""
    lives, phases, moves, cells = run
    ms = 1_000_000
    return (
        [(va, size, born * ms, dead * ms) for va, size, born, dead in lives],
        [(start * ms, end * ms) for start, end in phases],
        [(start * ms, *rest) for start, *rest in moves],
        cells,
    )


def by_hand(run, cell):
    """Count a cell byte by byte."""
    lives, phases, moves, _ = run
    (begin, end), (va, size, born, dead) = phases[cell[0]], lives[cell[1]]
    return sum(
        len(range(max(at, va), min(at + n, va + size)))
        for start, (at, n), direction in moves
        if direction == cell[2] and begin <= start < end and born <= start < dead
    )


@given(run=runs())
def test_any_run_adds_up_as_it_does_by_hand(run, tmp_path_factory):
    cells = run[-1]
    wanted = [by_hand(run, cell) for cell in cells]
    lives, phases, moves, _ = spread(run)
    trace = made(
        capture=RECORDED,
        migrations=[
            copy(start, VA + at, n, direction=way, pid=x.PID) for start, (at, n), way in moves
        ],
        nvtx_ranges=[nvtx(*span, "p", pid=x.PID, domain="nsan") for span in phases],
        allocations=sorted(
            (
                {"alloc_ns": born, "free_ns": dead, "pid": x.PID, "va": VA + va, "bytes": size}
                | {"kind": "managed"}
                for va, size, born, dead in lives
            ),
            key=lambda life: life["alloc_ns"],
        ),
    )
    expected = [(*cell, n, n) for cell, n in zip(cells, wanted, strict=True)]
    folder = write(
        tmp_path_factory.mktemp("run") / "run.truth",
        rows=[row(f"{i}", VA + va, size, born) for i, (va, size, born, _) in enumerate(lives)],
        phases=[("p", i) for i in range(len(phases))],
        expected=expected,
    )
    assert compared(trace, folder) == Expectations(
        len(cells), len(cells), (), demands_bytes=any(wanted)
    )


# Nothing to compare


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("COLLECT_NVTX_TRACE", "NVTX ranges were not recorded: the switch was off"),
        ("COLLECT_GPU_MEMORY_USAGE", "allocations were not recorded: the switch was off"),
    ],
)
def test_what_was_switched_off_is_the_reason_and_nothing_is_wrong(check, option, words):
    built = export(options={option: "false"})
    del built.rows[x.NVTX if "NVTX" in option else x.MEMORY]
    assert words in reason(check(built))
    assert "`nsys profile --" in reason(check(built))


def test_migrations_that_were_not_recorded_are_not_wrong(check):
    built = export(options={"COLLECT_CUDA_TRACE": "false"})
    del built.rows[x.MEMCPY], built.rows[x.KERNEL], built.rows[x.MEMORY]
    said = "migrations were not recorded: the switch was off; `nsys profile --trace=cuda` records"
    assert said in reason(check(built))


def test_migrations_of_which_it_is_unknown_whether_they_were_recorded_are_not_wrong(check):
    built = export(options={"COLLECT_CUDA_TRACE": None})
    del built.rows[x.MEMCPY], built.rows[x.KERNEL], built.rows[x.MEMORY]
    assert "whether migrations were recorded is not known" in reason(check(built))


def test_a_platform_that_does_not_let_nsys_trace_migrations_is_the_reason(check):
    text = "Unified Memory cannot be traced on devices that don't support peer-to-peer transfers."
    built = export(()).add("DIAGNOSTIC_EVENT", {"timestamp": 5, "severity": 2, "text": text})
    said = "migrations were not recorded: nsys could not trace Unified Memory on this platform"
    assert reason(check(built)) == said


def test_without_an_answer_at_all_nothing_is_compared(tmp_path):
    said = reason(compared(made(), write(tmp_path / "run.truth")))
    assert said == "whether migrations were recorded is not known"


@pytest.mark.parametrize(
    "shown",
    [
        ranges(domain="other"),
        ranges(pid=x.PID + 1),
        ranges()[:1],
        ranges()[:-1],
        [*ranges(), x.nvtx(810, 820, "check", domain=1)],
    ],
)
def test_ranges_of_another_number_than_phases_are_the_reason(check, shown):
    said = reason(check(export(shown=shown)))
    assert "it is of another run, or not whole" in said


def test_a_capture_that_ends_inside_a_phase_is_not_compared(check):
    shown = [*ranges()[:-1], x.nvtx(700, None, "check", domain=1)]
    assert reason(check(export(shown=shown))) == f"the capture ends before process {x.PID} does"


@pytest.mark.parametrize(
    "memory",
    [
        MEMORY[1:],
        (x.memory_event(20, VA, 4 * MIB + 1), MEMORY[1]),
        (x.memory_event(5, VA, 4 * MIB), x.memory_event(6, VA, 4 * MIB, free=True), *MEMORY),
        (x.memory_event(20, VA, 4 * MIB, kind=2), MEMORY[1]),
    ],
)
def test_an_allocation_that_is_not_there_as_the_program_says_is_the_reason(check, memory):
    assert reason(check(export(memory=memory))) == (
        "the capture does not have 1 allocation as run.truth says, first 'a' (4.00 MiB at 0x7f0000000000): "
        "it is of another run, or not whole"
    )


def test_tables_of_another_process_are_not_compared(check):
    assert f"of process {x.PID + 1} the capture has 0 NVTX ranges" in reason(
        check(pid=x.PID + 1),
    )


def test_a_run_of_which_nothing_is_certain_says_so(check):
    found = check(expected=())
    assert reason(found).startswith("expected.csv has no row")
    assert not found.demands_bytes


def test_a_run_that_failed_is_not_compared(check):
    found = check(about={"status": "failed"})
    assert "did not end well (status 'failed')" in reason(found)
    assert found.demands_bytes


def test_a_part_of_a_trace_is_not_compared(tmp_path, trace_of):
    part = trace_of(export()).filter(time=(0, 1000))
    assert "compare the whole one" in reason(compared(part, write(tmp_path / "run.truth")))


def test_a_migration_without_address_makes_the_sums_uncertain(check):
    lost = x.migration(310, 320, 4 * KIB, None)
    assert "does not say of 1 migration which process" in reason(check(export((*RIGHT, lost))))


def test_names_are_harmless_in_what_is_said(check):
    rows = [row("\x1b[31mred\nline", VA, 4 * MIB, 11), ARRAYS[1]]
    [line] = check(export(RIGHT[1:]), rows=rows).wrong
    assert "allocation \\x1b[31mred\\x0aline, HtoD" in line


# Damaged tables


DAMAGED = [
    ("expected.csv", None, "expected.csv is missing"),
    ("phases.csv", None, "phases.csv is missing"),
    ("allocations.csv", None, "allocations.csv is missing"),
    ("run.json", "{", "run.json is no JSON"),
    ("expected.csv", "", "expected.csv was cut short"),
    ("expected.csv", "phase,allocation\n", "expected.csv has other columns than phase, allocation"),
    ("phases.csv", "name,phase\n", "phases.csv has other columns than phase, name"),
    ("phases.csv", "phase,name,iteration,start_ns,end_ns\n0,ini", "phases.csv was cut short"),
    ("phases.csv", "phase,name,iteration,start_ns,end_ns\n1,init,,0,1\n", "line 2 of phases.csv"),
    ("phases.csv", "phase,name,iteration,start_ns,end_ns\n0,run,x,0,1\n", "line 2 of phases.csv"),
    ("phases.csv", "phase,name,iteration,start_ns,end_ns\n0\n", "line 2 of phases.csv"),
    ("phases.csv", 'phase,name,iteration,start_ns,end_ns\n0,"a"b,,0,1\n', "line 2 of phases.csv"),
]
HEAD = "phase,allocation,direction,least_bytes,most_bytes\n"
DAMAGED += [
    ("expected.csv", f"{HEAD}1,0,htod,0,0\n{line}\n", "line 3 of expected.csv is damaged")
    for line in (
        "4,0,htod,0,0",
        "1,2,htod,0,0",
        "1,0,up,0,0",
        "1,0,htod,2,1",
        "1,0,htod,-1,1",
        "1,0,htod,0",
        "1,0,htod,0,9223372036854775808",
        ",0,htod,0,0",
    )
]


@pytest.mark.parametrize(("name", "text", "words"), DAMAGED)
def test_a_damaged_table_is_one_clear_error(tmp_path, trace_of, name, text, words):
    folder = write(tmp_path / "run.truth")
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_text(text)
    with pytest.raises(ExpectedError) as error:
        compared(trace_of(export()), folder)
    said = str(error.value)
    assert said.startswith("run.truth, which should say how many bytes migrate, cannot be compared")
    assert words in said
    assert "\n" not in said


# The driver model as oracle: what the programs hold for certain, on a driver that is not theirs


@pytest.fixture(scope="module")
def uvm_bench():
    return bench_programs.uvm_bench()


class Twin:
    """The program of a run of uvm_bench in the words of the driver model: the same calls and touches."""

    def __init__(self, told, init, n_iterations):
        self.arrays, self.init, self.n_iterations = told["arrays"], init, n_iterations
        self.operations = []

    def program(self):
        inputs = [each for each in self.arrays if not each["is_temporary"]]
        temporary = [each for each in self.arrays if each["is_temporary"]]
        if inputs:
            self.phase("allocate", *(Allocate(each["name"], each["bytes"]) for each in inputs))
            self.phase("init", *(self.fill(each["name"]) for each in inputs))
        for i in range(self.n_iterations):
            self.operations.append(PushRange("step"))
            names = {each["name"]: f"{each['name']} {i}" for each in temporary}
            if temporary:
                self.phase(
                    "allocate",
                    *(Allocate(names[each["name"]], each["bytes"]) for each in temporary),
                )
            self.phase("run", Launch(self.kernel(names)))
            if temporary and i + 1 < self.n_iterations:
                self.phase("free", *(Free(name) for name in names.values()))
            self.operations.append(PopRange())
        self.phase("check", *(HostTouch(names[each["name"]]) for each in temporary))
        return Program("uvm_bench", tuple(self.operations))

    def phase(self, name, *operations):
        self.operations += [PushRange(name), *operations, Synchronize(), PopRange()]

    def fill(self, name):
        if self.init == "cpu":
            return HostTouch(name, write=True)
        return Launch(Kernel("fill", 64, 256, (Stream(allocation=name, write=True),)))

    def kernel(self, names):
        """Touch all arrays: outputs are written, inputs read, in whole or a word of each stride."""
        streams = []
        for each in self.arrays:
            name, write = names.get(each["name"], each["name"]), each["role"] == "output"
            if each["touched_bytes"] == each["bytes"]:
                streams.append(Stream(allocation=name, write=write, phase=int(write)))
            else:
                step = 4 * KIB * each["bytes"] // each["touched_bytes"]
                streams.append(Strided(allocation=name, stride_bytes=step))
        return Kernel("work", 64, 256, tuple(streams))


def modelled(program):
    """Run a program on the driver model; return its trace and where its allocations lie, in their order."""
    tables = record(machine.run(program, DEFAULT_SETTINGS), DEFAULT_SETTINGS, program.name)
    places = tables["allocations"]["va"].to_list()
    tables["nvtx_ranges"] = tables["nvtx_ranges"].with_columns(domain=pl.lit("nsan"))
    frames = {
        name: tables[name].lazy() if name in tables else table.empty()
        for name, table in TABLES.items()
    }
    return Trace(**frames, info=made(capture=RECORDED).info), places


def moved_to(folder, places):
    """Put the managed allocations of a run where the model's lie."""
    path = folder / "allocations.csv"
    with path.open(newline="") as file:
        head, *rows = csv.reader(file)
    managed = [each for each in rows if each[3] == "managed"]
    for each, va in zip(managed, places, strict=True):
        each[4] = va
    table(path, head, rows)
    about = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(about | {"pid": MODEL_PID}) + "\n")
    return folder


@pytest.mark.parametrize("init", ["cpu", "gpu"])
@pytest.mark.parametrize(
    ("pattern", "n_bytes"),
    [
        ("vector-add", 12 * MIB),
        ("stream", 12 * MIB),
        ("first-touch", 4 * MIB),
        ("signature", 4 * MIB + 4 * KIB),
        ("stride", 4 * MIB + 4 * KIB),
    ],
)
def test_the_driver_model_moves_what_uvm_bench_expects(uvm_bench, tmp_path, pattern, n_bytes, init):
    folder = tmp_path / "run.truth"
    flags = ("--pattern", pattern, "--bytes", n_bytes, "--init", init, "--iterations", 3)
    environment = {"NSAN_HOST_GPU_BYTES": str(8 << 30)}
    done = cpp.run(uvm_bench, *flags, "--out", folder, environment=environment)
    assert done.returncode == 0, done.stderr
    trace, places = modelled(Twin(json.loads(done.stdout), init, 3).program())
    found = compared(trace, moved_to(folder, places))
    assert (found.wrong, found.reason) == ((), "")
    assert found.n_right == found.n_checked > 3
    assert found.demands_bytes == (
        init == "cpu" or pattern in ("vector-add", "stream", "first-touch")
    )


def steps_of(n_steps):
    """Training steps in which the CPU fills a weight and a bias once, and a batch in each step."""
    operations = []
    for name, n_bytes in (("weight", 2 * MIB), ("bias", 8 * KIB)):
        operations += [t.Create(t.Tensor(name, n_bytes, "parameter")), t.HostWrite(name)]
    for step in range(1, n_steps + 1):
        batch, out, gradient = (f"{name}#{step}" for name in ("x", "y", "weight.grad"))
        operations += [
            t.Step(step),
            t.Create(t.Tensor(batch, 4 * MIB, "input")),
            t.HostWrite(batch),
            t.Phase("forward"),
            t.Create(t.Tensor(out, MIB, "activation")),
            t.Compute("fc forward", ("weight", "bias", batch), (out,), 1000.0),
            t.Phase("backward"),
            t.Create(t.Tensor(gradient, 2 * MIB, "gradient")),
            t.Compute("fc backward", (batch, out), (gradient,), 1000.0),
            t.Drop(out),
            t.Drop(batch),
            t.Phase("update"),
            t.Compute("sgd", ("weight", gradient), ("weight",), 1000.0),
            t.Drop(gradient),
        ]
    return t.TensorProgram("tiny", tuple(operations), {})


def twin_of(tensors):
    """Say in the words of the driver model what dl_bench does with a tape, without a cache."""
    done = [PushRange("init")]

    def end(*opened):
        done.extend([Synchronize(), PopRange(), *opened])

    for each in tensors.operations:
        if isinstance(each, t.Create):
            done.append(Allocate(each.tensor.name, each.tensor.n_bytes))
        elif isinstance(each, t.Drop):
            done.append(Free(each.name))
        elif isinstance(each, t.HostWrite):
            done.append(HostTouch(each.name, write=True))
        elif isinstance(each, t.Compute):
            reads = [Stream(allocation=name) for name in each.reads if name not in each.writes]
            writes = [Stream(allocation=name, write=True, phase=1) for name in each.writes]
            done.append(Launch(Kernel(each.name, 64, 256, (*reads, *writes))))
        elif isinstance(each, t.Step):
            end(*[PopRange()] * (each.number > 1), PushRange("step"), PushRange("input"))
        else:
            end(PushRange(each.name))
    end(PopRange(), PushRange("verify"), PopRange())
    return Program("dl_bench", tuple(done))


def test_the_driver_model_moves_what_dl_bench_expects(tmp_path):
    tensors = steps_of(3)
    (tmp_path / "net.tape").write_text(tape_text(tensors))
    flags = ("--tape", tmp_path / "net.tape", "--flops-scale", 0, "--out", tmp_path / "run.truth")
    done = cpp.run(bench_programs.dl_bench(), *flags)
    assert done.returncode == 0, done.stderr
    trace, places = modelled(twin_of(tensors))
    assert len(set(places)) < len(places)  # a batch lies where the one before lay
    found = compared(trace, moved_to(tmp_path / "run.truth", places))
    # The weight, and a batch in each step; the bias shares its VA block.
    assert found == Expectations(4, 4, (), demands_bytes=True)
