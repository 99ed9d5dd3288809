"""A trace for Perfetto, in Perfetto's own trace processor: what its SQL finds is what SQLite finds in the export."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from itertools import pairwise

import exports as x
import polars as pl
import pytest
from perfetto_engine import engine, rows

from nsan.cli import main

SAMPLES = x.REPOSITORY / "sample_data"
ADD = SAMPLES / "um_vector_add_rtx4060l.sqlite"
MODEL = SAMPLES / "model"
PCA_ON = MODEL / "pca_on" / "pca_on.sqlite"
EVIL = "</script><img src=x onerror=alert(1)>\x1b[31m"


@pytest.fixture(scope="module")
def load():
    with engine() as started:
        yield started


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def opened(load, cache, tmp_path, monkeypatch, capsys):
    """Export a trace for Perfetto, and load it: gives what answers a query."""
    monkeypatch.setenv("NSAN_CACHE_DIR", str(cache))  # each trace is imported once

    def export(trace, *arguments):
        place = tmp_path / f"{len(list(tmp_path.iterdir()))}.pftrace"
        words = ["export", trace, "--to", "perfetto", "-o", place, *arguments]
        assert main([*map(str, words)]) == 0, capsys.readouterr().err
        processor = load(place)
        return lambda query: rows(processor, query)

    return export


def ask(trace, query):
    with closing(sqlite3.connect(trace)) as connection:
        return connection.execute(query).fetchall()


def on_tracks(answer, category):
    """Slices of a category: track, how many, their time, and their bytes."""
    return answer(
        "select t.name, count(*), sum(s.dur), sum(extract_arg(s.arg_set_id, 'debug.bytes')) from slice s "
        f"join track t on s.track_id = t.id where s.category = '{category}' group by t.name order by t.name"
    )


WAYS = {11: "HtoD", 12: "DtoH", 13: "DtoD"}
CAUSES = {1: "user prefetch", 2: "page fault", 3: "speculative prefetch", 4: "eviction"}


def migrations_of(trace):
    found = ask(
        trace,
        f"select copyKind, migrationCause, count(*), sum(end - start), sum(bytes) from {x.MEMCPY} "
        "where copyKind in (11, 12, 13) group by 1, 2",
    )
    return sorted((f"{WAYS[kind]} {CAUSES[cause]}", *rest) for kind, cause, *rest in found)


def is_sound(answer):
    """Nothing was dropped, nothing misread, no slice was left open."""
    assert answer("select name, value from stats where severity != 'info' and value > 0") == []
    assert answer("select count(*) from slice where dur < 0") == [(0,)]


SAMPLE_TRACES = [
    ADD,
    *(MODEL / name / f"{name}.sqlite" for name in ("oversubscribed_sweep", "two_gpus", "pca_on")),
]


@pytest.mark.parametrize("trace", SAMPLE_TRACES, ids=lambda path: path.stem)
def test_every_row_is_there_once_with_its_time_and_its_bytes(opened, trace):
    answer = opened(trace)
    is_sound(answer)
    assert on_tracks(answer, "migration") == migrations_of(trace)
    tables = {name for (name,) in ask(trace, "select name from sqlite_master")}
    for table, category in ((x.KERNEL, "kernel"), (x.RUNTIME, "api")):
        expected = ask(trace, f"select count(*), sum(end - start) from {table}")
        assert (
            answer(f"select count(*), sum(dur) from slice where category = '{category}'")
            == expected
        )
    if x.NVTX in tables:
        query = "count(*), sum(coalesce(end, start) - start)"
        expected = ask(trace, f"select {query} from {x.NVTX} where eventType in (34, 59, 60)")
        assert answer("select count(*), sum(dur) from slice where category = 'nvtx'") == expected
    if x.CPU_FAULTS in tables:
        expected = ask(trace, f"select count(*) from {x.CPU_FAULTS}")
        assert answer("select count(*) from slice where category = 'fault'") == expected
    if x.GPU_FAULTS in tables:
        # One slice for each row: what these rows are is a driver batch, from raised to replayed.
        expected = ask(trace, f"select count(*), sum(end - start) from {x.GPU_FAULTS}")
        assert answer("select count(*), sum(dur) from slice where category = 'batch'") == expected


def test_only_calls_and_ranges_are_nested(opened):
    answer = opened(PCA_ON)
    deep = answer("select distinct category from slice where depth > 0 order by 1")
    assert deep == [("nvtx",)]
    [(lanes,)] = answer("select count(*) from track where name = 'Driver batches'")
    assert lanes == most_at_a_time(ask(PCA_ON, f"select start, end from {x.GPU_FAULTS}")) > 1


def most_at_a_time(intervals):
    ends = [(end, -1) for _, end in intervals]
    running = most = 0
    for _, step in sorted([(start, 1) for start, _ in intervals] + ends):
        running += step
        most = max(most, running)
    return most


def test_a_launch_leads_to_its_kernel_and_a_batch_to_its_copies(opened):
    trace = MODEL / "oversubscribed_sweep" / "oversubscribed_sweep.sqlite"
    answer = opened(trace)
    ways = dict(
        answer(
            "select a.category || ' ' || b.category, count(*) from flow f join slice a on a.id = f.slice_out "
            "join slice b on b.id = f.slice_in group by 1"
        )
    )
    [(launched,)] = ask(
        trace, f"select count(*) from {x.KERNEL} k join {x.RUNTIME} r using (correlationId)"
    )
    assert ways["api kernel"] == launched > 0
    # By the model's own account: which batch each copy was made for.
    truth = pl.read_parquet(trace.parent / "truth" / "copy_batches.parquet")
    assert ways["batch migration"] == truth["batch"].drop_nulls().n_unique()
    same = "extract_arg({}.arg_set_id, 'debug.batch_id')"
    [(wrong,)] = answer(
        "select count(*) from flow f join slice a on a.id = f.slice_out join slice b on b.id = f.slice_in "
        f"where a.category != 'api' and {same.format('a')} != {same.format('b')}"
    )
    assert wrong == 0


def counter(answer, name):
    return answer(
        f"select c.ts, c.value, t.unit from counter c join counter_track t on t.id = c.track_id "
        f"where t.name = '{name}' order by c.ts"
    )


def integral(values):
    return sum(value * (later - at) for (at, value, _), (later, *_) in pairwise(values)) / 1e9


def test_what_a_rate_adds_up_to_is_what_was_moved(opened):
    answer = opened(ADD)
    for name, kind in (("Migrated in", 11), ("Migrated out", 12)):
        found = counter(answer, name)
        [(moved,)] = ask(ADD, f"select sum(bytes) from {x.MEMCPY} where copyKind = {kind}")
        assert {unit for *_, unit in found} == {"B/s"}
        assert integral(found) == pytest.approx(moved, rel=1e-9)


def test_managed_memory_on_the_gpu_is_what_a_replay_of_the_pages_gives(opened):
    found = counter(opened(ADD), "Resident (reconstructed)")
    assert {unit for *_, unit in found} == {"bytes"}
    here, levels = set(), {}
    copies = ask(
        ADD, f"select start, end, copyKind, bytes, virtualAddress from {x.MEMCPY} order by start"
    )
    for _, end, kind, size, va in copies:
        pages = set(range(va // 4096, (va + size) // 4096))
        here = here | pages if kind == 11 else here - pages
        levels[end] = 4096 * len(here)
    assert found[-1][1] == 4096 * len(here)
    assert max(value for _, value, _ in found) == max(levels.values()) == 8 << 20


def test_the_allocator_is_drawn_on_the_clock_of_the_trace(opened):
    answer = opened(PCA_ON)
    reserved = counter(answer, "PyTorch reserved")
    active, allocated = counter(answer, "PyTorch active"), counter(answer, "PyTorch allocated")
    # A caching allocator gives nothing back here: what it took is what it held.
    taken = ask(
        PCA_ON, f"select sum(bytes) from {x.MEMORY} where memKind = 6 and memoryOperationType = 0"
    )
    levels = [value for _, value, _ in reserved]
    assert levels == sorted(levels)
    assert all(a[1] <= r[1] for a, r in zip(active, reserved, strict=True))
    assert all(a[1] <= r[1] for a, r in zip(allocated, active, strict=True))
    assert levels[-1] <= (taken[0][0] or levels[-1])
    # Segments are mapped inside the calls that allocate them.
    first = ask(PCA_ON, f"select min(start) from {x.MEMORY} where bytes > 1 << 20")[0][0]
    assert abs(next(at for at, value, _ in reserved if value) - first) < 1_000_000


def hand_made(place):
    export = x.Export("2025.5.1")
    export.strings |= {5: EVIL, 6: "k" * 50_000}
    export.add(
        x.KERNEL,
        x.kernel(100, 300, name=5),
        x.kernel(200, 400, name=6),  # cuts through the one before on its stream
        x.kernel(400, 400),  # empty
        x.kernel(400, 500),
    )
    export.add(
        x.NVTX,
        x.nvtx(0, 1000, "outer"),
        x.nvtx(100, 1000, "inner"),
        x.nvtx(100, 200, EVIL),
        x.nvtx(500, 1500, "started", kind=60),  # reaches out of its neighbours
        x.nvtx(250, None, "moment", kind=34),
    )
    export.add(
        x.RUNTIME,
        x.api_call(10, 90, correlation=1),
        x.api_call(20, 80, correlation=2),
        x.api_call(15, 15, tid=77),
    )
    top = (1 << 64) - (4 << 20)
    export.add(x.MEMCPY, x.migration(-50, 60, 4096, top - (1 << 64)), x.migration(30, 70, 8192))
    export.add(x.MEMCPY, x.migration(80, 90, 4096, pid=99), x.copy(5, 15, 100))
    export.add(
        "PROCESSES", {"globalPid": x.global_pid(x.PID), "pid": x.PID, "name": f"/home/{EVIL}"}
    )
    return export.write(place / "hand.sqlite")


def test_what_overlaps_is_laid_side_by_side_and_what_nests_is_nested(opened, tmp_path):
    answer = opened(hand_made(tmp_path))
    is_sound(answer)
    kernels = answer("select ts, dur from slice where category = 'kernel' order by ts, dur")
    # What began 50 ns before the session start is at 0.
    assert kernels == [(150, 200), (250, 200), (450, 0), (450, 100)]
    assert answer("select max(depth) from slice where category = 'kernel'") == [(0,)]
    nested = answer("select name, dur, depth from slice where category = 'nvtx' order by name")
    assert ("outer", 1000, 0) in nested
    assert ("inner", 900, 1) in nested
    assert ("started", 1000, 0) in nested
    assert {(dur, depth) for name, dur, depth in nested if "onerror" in name} == {(100, 2)}
    calls = answer("select dur, depth from slice where category = 'api' order by dur")
    assert calls == [(0, 0), (60, 1), (80, 0)]


def test_addresses_are_hexadecimal_text_and_names_are_only_text(opened, tmp_path):
    answer = opened(hand_made(tmp_path))
    addresses = answer(
        "select a.display_value from args a join slice s using (arg_set_id) "
        "where a.key = 'debug.va' and s.category = 'migration' order by 1"
    )
    assert ("0xffffffffffc00000",) in addresses
    names = [
        name for (name,) in answer("select distinct name from slice where category = 'kernel'")
    ]
    assert any("<img src=x onerror=alert(1)>\\x1b[31m" in name for name in names)
    assert max(map(len, names)) == 400
    assert answer("select pid, name from process where pid > 0 order by pid")[1][0] == x.PID
    [(program,)] = answer(f"select name from process where pid = {x.PID}")
    assert "/home" not in program


def facts_of(answer):
    """What the mark at the beginning says of the file."""
    return dict(
        answer(
            "select substr(a.key, 7), a.display_value from args a join slice s using (arg_set_id) "
            "where s.category = 'about'"
        )
    )


def test_the_file_says_what_it_is_of_and_what_was_modelled(opened):
    facts = facts_of(opened(ADD))
    assert facts["source"] == "um_vector_add_rtx4060l.sqlite"
    assert facts["times"] == "ns, from the session start"
    assert facts["gpu faults"].startswith("not recorded")
    assert "modelled" not in facts
    answer = opened(MODEL / "ping_pong" / "ping_pong.sqlite")
    assert facts_of(answer)["modelled"].startswith(
        "Everything here was written by nsan's UVM driver model"
    )
    assert all("(modelled)" in name for (name,) in answer("select name from process where pid > 0"))
    kinds = answer(
        "select distinct extract_arg(arg_set_id, 'debug.kind') from slice where category = 'batch'"
    )
    assert kinds == [("modelled",)]


def test_reconstructed_batches_have_a_track_of_their_own_that_says_so(opened):
    answer = opened(ADD)
    assert [(name, n) for name, n, *_ in on_tracks(answer, "batch")] == [
        ("Driver batches (reconstructed)", 12)
    ]


def test_filters_choose_what_is_in_the_file(opened, capsys):
    answer = opened(ADD, "--filter-time", "/266ms")
    query = f"select count(*) from {x.MEMCPY} where copyKind in (11, 12, 13) and start < 266000000"
    assert answer("select count(*) from slice where category = 'migration'") == ask(ADD, query)
    facts = facts_of(answer)
    assert facts["part"] == "Filters chose a part of the capture."
    assert "left out" not in facts
    assert capsys.readouterr().err == ""


def level_at(values, moment):
    return [value for at, value, _ in values if at <= moment][-1]


def test_what_is_held_in_a_part_is_what_the_whole_capture_says_of_that_time(opened):
    names = ("Resident (reconstructed)", "PyTorch reserved")
    answer = opened(PCA_ON)
    whole = {name: counter(answer, name) for name in names}
    times = [at for at, *_ in whole["PyTorch reserved"]]
    first, last = times[len(times) // 3] + 1, times[2 * len(times) // 3] + 1
    answer = opened(PCA_ON, "--filter-time", f"{first}ns/{last}ns")
    for name, values in whole.items():
        part = counter(answer, name)
        # What was held before holds in it, from its first moment on.
        assert part[0] == (first, level_at(values, first), "bytes")
        assert part[0][1] > 0
        assert part[1:] == [row for row in values if first < row[0] < last]
        assert len(part) > 5


def test_only_the_gpus_and_processes_that_filters_left_have_levels(opened):
    trace = MODEL / "two_gpus" / "two_gpus.sqlite"
    query = (
        "select p.name, count(*) from counter c join track t on t.id = c.track_id join track p "
        "on p.id = t.parent_id where t.name = 'Resident (reconstructed)' group by 1 order by 1"
    )
    zero, one = opened(trace)(query)
    assert opened(trace, "--gpu", "1")(query) == [one] != [zero]


def test_levels_from_before_the_session_hold_at_its_start(opened, tmp_path):
    export = x.Export().add(x.MEMORY, x.memory_event(-500, x.VA, 4096))
    # Leaves without having come: it was there from its allocation on, before the session start.
    export.add(x.MEMCPY, x.migration(100, 200, 4096, kind=12))
    answer = opened(export.write(tmp_path / "a.sqlite"))
    is_sound(answer)
    held = counter(answer, "Resident (reconstructed)")
    assert held[0] == (0, 4096, "bytes")
    assert held[-1][1] == 0


def test_a_capture_without_a_row_is_a_file_that_says_what_it_is(opened, tmp_path):
    trace = x.Export().write(tmp_path / "empty.sqlite")
    answer = opened(trace)
    is_sound(answer)
    assert answer("select name from slice") == [("About this trace",)]
    facts = facts_of(answer)
    assert facts["source"] == "empty.sqlite"
    assert facts["left out"] == "any event: there is none"


def test_all_that_is_left_out_is_said_and_the_rest_is_written(opened, tmp_path, capsys):
    other = SAMPLES / "snapshots" / "decomfl_opt125m_full_history.pickle.gz"
    export = x.Export().add(x.MEMCPY, x.migration(0, 10, 4096), x.migration("?", 20, 4096))
    export.write(tmp_path / "run.sqlite")
    (tmp_path / "snapshot.pickle").write_bytes(other.read_bytes())
    answer = opened(tmp_path / "run.sqlite")
    said = capsys.readouterr().err
    facts = facts_of(answer)
    assert facts["left out"].startswith("the allocator's memory: ")
    assert facts["left out (2)"] == "1 row without a time"
    assert all(f"Not in the file: {facts[name]}" in said for name in ("left out", "left out (2)"))
    assert counter(answer, "PyTorch reserved") == []
    assert [n for _, n, *_ in on_tracks(answer, "migration")] == [1]
