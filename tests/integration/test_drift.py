"""Schemas that change, columns that go, cells that are wrong: right figures, or none."""

from __future__ import annotations

import functools
import random
import shutil
import sqlite3
from contextlib import closing

import exports as x
import polars as pl
import pytest
from conftest import SOAK
from polars.testing import assert_frame_equal

import nsan
from nsan.io import nsys_context, nsys_tables, store
from nsan.io.manifest import default_store, fingerprint, read_manifest
from nsan.io.nsys_sqlite import NsysExport
from nsan.schema import TABLES

GRAPH_NAMES = {5: "cudaLaunchKernel_v7000"}
CAPTURE, ENV, SESSION = (
    "META_DATA_CAPTURE",
    "TARGET_INFO_SYSTEM_ENV",
    "TARGET_INFO_SESSION_START_TIME",
)
DIAGNOSTIC, PROCESSES, STRINGS = "DIAGNOSTIC_EVENT", "PROCESSES", "StringIds"
EARLY_NS, LATE_NS = 100, 9_000
"""Where the first and the last event are of the table that is to be damaged."""


def rich(version, *, lazy=True, outer=None):
    """All kinds of rows; with ``outer``, the first and the last event are of that table."""
    export = x.Export(version, lazy=lazy)
    export.strings |= GRAPH_NAMES
    work = {"globalPid": x.global_pid(x.PID), "deviceId": 0, "contextId": 1, "streamId": 7}
    export.add(
        x.GPU_FAULTS,
        x.gpu_fault(1000, 1400, n=3),
        x.gpu_fault(1300, 1700, x.VA + 2 * x.MIB, n=5, access=x.WRITE),
        x.gpu_fault(1350, 1650, x.VA + 2 * x.MIB + 4096, n=7, access=x.ATOMIC, device=1),
    )
    export.add(
        x.CPU_FAULTS, x.cpu_fault(2000), x.cpu_fault(2100), x.cpu_fault(2200, x.VA + 4 * x.MIB)
    )
    export.add(
        x.MEMCPY,
        x.migration(3000, 3100, 4096),
        x.migration(3050, 3200, 61440, x.VA + 4096, cause=x.PREFETCH),
        x.migration(3300, 3400, 65536, kind=x.DTOH, cause=x.EVICTION),
        x.migration(3300, 3360, 8192, x.VA + 2 * x.MIB, kind=x.DTOH, device=1),
        x.copy(3700, 3800, 1000),
        x.copy(3750, 3900, 24, kind=2),
        x.migration(3500, 3600, 2 * x.MIB, x.VA + 8 * x.MIB, kind=x.DTOD, cause=x.USER, device=1),
    )
    export.add(
        x.MEMSET,
        {**work, "start": 3950, "end": 3990, "bytes": 512, "memKind": 2},
        {**work, "start": 3960, "end": 3995, "bytes": 512, "memKind": 4},
    )
    export.add(x.KERNEL, x.kernel(4000, 4500), x.kernel(4400, 4600), x.kernel(4400, 4500, device=1))
    export.add(
        x.GRAPH,
        {**work, "start": 4550, "end": 4800, "graphId": 1},
        {**work, "start": 5000, "end": 5050, "graphId": 2},
    )
    export.add(x.RUNTIME, x.api_call(500, 600), x.api_call(700, 800, name=5))
    export.add(
        x.NVTX,
        x.nvtx(600, 5000, "outer"),
        x.nvtx(590, None, "library", kind=75, domain=1),
        x.nvtx(650, None, "mark", kind=34, domain=1),
        x.nvtx(700, 900, text_id=1),
        x.nvtx(720, 950, "in a domain", kind=60, domain=1),
    )
    export.add(
        x.MEMORY,
        x.memory_event(800, x.VA, 4 * x.MIB),
        x.memory_event(820, x.VA + 16 * x.MIB, x.MIB, kind=2),
        x.memory_event(5010, x.VA, 4 * x.MIB, free=True),
    )
    export.add(
        x.GPU, *({"id": i, "cuDevice": i, "name": f"NVIDIA {i}", "smCount": 8} for i in (0, 1))
    )
    if "TARGET_INFO_CUDA_DEVICE" in export.tables:
        export.add(x.CUDA_DEVICE, *({"gpuId": i, "cudaId": i, "pid": x.PID} for i in (0, 1)))
    export.add(PROCESSES, {"globalPid": x.global_pid(x.PID), "pid": x.PID, "name": "/opt/app"})
    export.add(DIAGNOSTIC, {"timestamp": 1, "severity": 2, "text": "dropped 1 buffer"})
    export.add(ENV, {"name": "NvDriverVersion", "value": "550.54.15"})
    export.add(SESSION, {"utcEpochNs": 1_700_000_000_000_000_000})
    if outer in export.rows and "start" in export.rows[outer][0]:
        rows = export.rows[outer]
        rows[0]["start"] = EARLY_NS
        rows[-1]["end" if "end" in rows[-1] else "start"] = LATE_NS
    return export


def figures(summary):
    """The top-level figures of a summary, flat."""
    parts = ("migrations", "gpu_faults", "cpu_faults", "kernels", "managed")
    flat = {f"{part}.{name}": value for part in parts for name, value in summary[part].items()}
    flat["duration_ns"] = summary["duration_ns"]
    return {name: value for name, value in flat.items() if not name.endswith("groups")}


RICH = {
    "migrations.n": 5,
    "migrations.bytes": 2_236_416,
    "migrations.htod_bytes": 65_536,
    "migrations.dtoh_bytes": 73_728,
    "migrations.dtod_bytes": 2_097_152,
    "migrations.by_cause": {
        "coherence": {"n": 2, "bytes": 12_288},
        "prefetch": {"n": 1, "bytes": 61_440},
        "eviction": {"n": 1, "bytes": 65_536},
        "user": {"n": 1, "bytes": 2_097_152},
    },
    # GPU 0: 3000-3200 and 3300-3400. GPU 1: 3300-3360 and 3500-3600.
    "migrations.busy_ns": 200 + 100 + 60 + 100,
    "migrations.min_va": "0x00007f0000000000",
    "migrations.max_va": "0x00007f0000800000",
    "gpu_faults.n_rows": 3,
    "gpu_faults.n_page_faults": 15,
    "gpu_faults.n_addresses": 3,
    "gpu_faults.n_va_blocks": 2,
    # GPU 0: 1000-1700. GPU 1: 1350-1650.
    "gpu_faults.busy_ns": 700 + 300,
    "gpu_faults.by_access": {
        "read": {"n_rows": 1, "n_page_faults": 3},
        "write": {"n_rows": 1, "n_page_faults": 5},
        "atomic": {"n_rows": 1, "n_page_faults": 7},
    },
    "cpu_faults.n": 3,
    "cpu_faults.n_addresses": 2,
    "cpu_faults.n_va_blocks": 2,
    "kernels.n": 3,
    "kernels.n_graph_launches": 2,
    # GPU 0: 4000-4800 (two kernels and a graph) and 5000-5050. GPU 1: 4400-4500.
    "kernels.busy_ns": 800 + 50 + 100,
    "managed.n_allocations": 1,
    "managed.bytes": 4 * x.MIB,
    "managed.n_calls": 1,
    # From the first API call to the end of the last graph.
    "duration_ns": 5050 - 500,
}


@pytest.mark.parametrize("version", x.versions())
def test_every_schema_loads_with_the_right_totals(version, summary_of):
    export = rich(version)
    placed = "virtualAddress" in export.columns(x.MEMCPY)
    summary = summary_of(export)
    places = {} if placed else {"migrations.min_va": None, "migrations.max_va": None}
    assert figures(summary) == RICH | places
    assert not [check for check in summary["health"] if check["status"] == "fail"]
    assert summary["nsys_version"] == (None if version == "unversioned" else version)


@pytest.mark.parametrize("version", x.versions() if SOAK else ["2022.1.3.3", "2026.2.1.210"])
def test_every_schema_loads_with_no_rows_at_all(version, summary_of):
    summary = summary_of(x.Export(version, lazy=False))
    assert summary["migrations"]["n"] in (0, None)
    assert summary["duration_ns"] is None


# The columns of an event table on which figures depend; every other column is harmless.
_TIMES = {"gpu_faults.busy_ns", "duration_ns"}
_MIGRATIONS = {name for name in RICH if name.startswith("migrations.")}
_MANAGED = {"managed.n_allocations", "managed.bytes"}
_SIZES = {f"migrations.{name}" for name in ("bytes", "htod_bytes", "dtoh_bytes", "dtod_bytes")}
_PLACES = ("n_addresses", "n_va_blocks")

DEPENDS = {
    x.GPU_FAULTS: {
        "start": {"gpu_faults.busy_ns", "duration_ns"},
        "end": {"gpu_faults.busy_ns", "duration_ns"},
        "deviceId": {"gpu_faults.busy_ns"},
        "address": {f"gpu_faults.{place}" for place in _PLACES},
        "numberOfPageFaults": {"gpu_faults.n_page_faults"},
        "faultAccessType": {"gpu_faults.by_access"},
    },
    x.CPU_FAULTS: {
        "start": {"duration_ns"},
        "address": {f"cpu_faults.{place}" for place in _PLACES},
    },
    x.MEMCPY: {
        "start": {"migrations.busy_ns", "duration_ns"},
        "end": {"migrations.busy_ns", "duration_ns"},
        "deviceId": {"migrations.busy_ns"},
        "bytes": _SIZES,
        "copyKind": _MIGRATIONS | {"duration_ns"},
        "migrationCause": {"migrations.by_cause"},
        "virtualAddress": {"migrations.min_va", "migrations.max_va"},
    },
    x.MEMSET: {"start": {"duration_ns"}, "end": {"duration_ns"}},
    x.KERNEL: {
        "start": {"kernels.busy_ns", "duration_ns"},
        "end": {"kernels.busy_ns", "duration_ns"},
        "deviceId": {"kernels.busy_ns"},
    },
    x.GRAPH: {
        "start": {"kernels.busy_ns", "duration_ns"},
        "end": {"kernels.busy_ns", "duration_ns"},
        "deviceId": {"kernels.busy_ns"},
    },
    x.RUNTIME: {
        "start": {"duration_ns"},
        "end": {"duration_ns"},
        "nameId": {"managed.n_calls"},
    },
    x.NVTX: {"start": {"duration_ns"}, "end": {"duration_ns"}, "eventType": {"duration_ns"}},
    x.MEMORY: {
        "start": _MANAGED,
        "globalPid": _MANAGED,
        "address": _MANAGED,
        "bytes": {"managed.bytes"},
        "memKind": _MANAGED,
        "memoryOperationType": _MANAGED,
    },
    STRINGS: {"id": {"managed.n_calls"}, "value": {"managed.n_calls"}},
}
"""By table and column: the figures that may be unknown when the column is damaged."""

LABELS = {"migrationCause": "migrations.by_cause", "faultAccessType": "gpu_faults.by_access"}
"""Columns whose damage may turn labels into `unknown`, with right sums."""


def _read_columns():
    sources = (
        *nsys_tables.STREAMED,
        nsys_context.NVTX,
        nsys_context.MEMORY_EVENTS,
        nsys_context.DIAGNOSTIC_EVENTS,
    )
    pairs = ("name", "value")
    return {source.table: tuple(source.columns) for source in sources} | {
        x.GPU: (
            *("id", "cuDevice", "totalMemory", "memoryBandwidth", "smCount", "computeMajor"),
            *("computeMinor", "name", "chipName"),
        ),
        x.CUDA_DEVICE: ("gpuId", "cudaId", "pid"),
        PROCESSES: ("globalPid", "name"),
        STRINGS: ("id", "value"),
        SESSION: ("utcEpochNs",),
        "META_DATA_EXPORT": pairs,
        "EXPORT_META_DATA": pairs,
        CAPTURE: pairs,
        ENV: pairs,
    }


READ_COLUMNS = _read_columns()
DAMAGES = ("drop", "null in all", "null in one", "text in all", "real in one")


def columns_of(connection, table):
    return [row[1] for row in connection.execute(f'PRAGMA table_info("{table}")')]


def damage(source, target, table, columns, how):
    """Copy an export, with columns of one table damaged; its cells may be of any type then."""
    shutil.copyfile(source, target)
    with closing(sqlite3.connect(target)) as connection:
        dropped = set(columns) if how == "drop" else set()
        kept = ", ".join(f'"{c}"' for c in columns_of(connection, table) if c not in dropped)
        connection.executescript(
            f"PRAGMA synchronous = OFF; CREATE TABLE loose ({kept or 'empty'});"
            f'INSERT INTO loose SELECT {kept or "NULL"} FROM "{table}" ORDER BY rowid;'
            f'DROP TABLE "{table}"; ALTER TABLE loose RENAME TO "{table}";'
        )
        value = {"null": None, "text": "abc", "real": 1.5}.get(how.split(" ")[0])
        where = "" if how.endswith("all") else "WHERE rowid = 1"
        for column in columns if how != "drop" else ():
            connection.execute(f'UPDATE "{table}" SET "{column}" = ? {where}', [value])
        connection.commit()
    return target


def wrong_figures(summary, right, *, unknown=frozenset(), labels=None):
    """Name each figure that is neither right nor, where it may be, unknown."""
    found = []
    for name, value in figures(summary).items():
        fits = value == right[name] or (value is None and name in unknown)
        if not fits and isinstance(value, dict):
            fits = _labels_fit(value, right[name], moved=name == labels, unknown=unknown)
        if not fits:
            found.append(f"{name} is {value} instead of {right[name]}")
    return found


def _labels_fit(got, right, *, moved, unknown):
    sums = {"bytes": "migrations.bytes", "n_page_faults": "gpu_faults.n_page_faults"}
    if not moved:
        return got.keys() == right.keys() and all(
            value == right[label][key] or (value is None and sums.get(key) in unknown)
            for label, row in got.items()
            for key, value in row.items()
        )
    keys = next(iter(right.values())).keys()
    whole = {key: sum(row[key] for row in right.values()) for key in keys}
    none_grew = all(
        row[key] <= right.get(label, {}).get(key, 0)
        for label, row in got.items()
        for key in keys
        if label != "unknown"
    )
    return none_grew and whole == {key: sum(row[key] for row in got.values()) for key in keys}


def worst_health(summary):
    found = {check["status"] for check in summary["health"]}
    return next(status for status in ("fail", "warn", "unknown", "ok") if status in found)


def harmless(table):
    return [column for column in READ_COLUMNS[table] if column not in DEPENDS.get(table, {})]


def _jobs(version, table, present):
    """What to damage: each telling column alone, the harmless ones together (or alone in a soak)."""
    telling = [([column], how) for column in DEPENDS.get(table, {}) for how in DAMAGES]
    rest = [column for column in harmless(table) if column in present]
    groups = [[column] for column in rest] if SOAK else [rest] * bool(rest)
    hows = DAMAGES if SOAK else (DAMAGES[len(table) % 5],)
    if not SOAK:  # of each five damages of a column one, in one of the three versions
        phase = 5 * VERSIONS.index(version)
        telling = [job for i, job in enumerate(telling) if (i // 5 + i % 5 + phase) % 15 == 0]
    jobs = telling + [(group, how) for group in groups for how in hows]
    return [job for job in jobs if job[0][0] in present and _is_damage(table, *job)]


def _is_damage(table, columns, how):
    # A range that was never closed has no end, and any text is a text.
    never_closed = table == x.NVTX and columns == ["end"] and how.startswith("null")
    is_text = table == STRINGS and columns == ["value"] and how in ("text in all", "real in one")
    return not never_closed and not is_text


VERSIONS = ("2022.2.1", "2023.4.4", "2026.1")


def _tables(version):
    export = rich(version)
    capture = [CAPTURE] if CAPTURE in export.tables else []
    return [*export.rows, export._metadata()[0], *capture, STRINGS]


CELLS = [(version, table) for version in VERSIONS for table in _tables(version)]


@pytest.mark.parametrize(("version", "table"), CELLS)
def test_a_damaged_column_gives_right_figures_or_none(version, table, tmp_path):
    whole = rich(version, outer=table).write(tmp_path / "whole.sqlite")
    right = figures(nsan.summary(whole))
    with closing(sqlite3.connect(whole)) as connection:
        present = columns_of(connection, table)
    problems = []
    for number, (columns, how) in enumerate(_jobs(version, table, present)):
        path = damage(whole, tmp_path / f"{number}.sqlite", table, columns, how)
        what = f"{table}.{','.join(columns)}, {how}: "
        try:
            summary = nsan.summary(path)
        except Exception as error:  # noqa: BLE001 - any error is the finding
            problems.append(f"{what}{type(error).__name__}: {error}")
            continue
        unknown = DEPENDS.get(table, {}).get(columns[0], set())
        wrong = wrong_figures(summary, right, unknown=unknown, labels=LABELS.get(columns[0]))
        problems += [what + text for text in wrong]
        lost = [name for name, value in figures(summary).items() if value is None]
        # An address is not in every schema: its absence is a warning.
        said = {"fail", "warn"} if columns == ["virtualAddress"] else {"fail"}
        if lost and worst_health(summary) not in said:
            problems.append(f"{what}{lost} unknown, but health says {worst_health(summary)}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("table", "column", "value", "unknown"),
    [
        (x.MEMCPY, "start", 1 << 62, {"migrations.busy_ns", "duration_ns"}),
        (x.MEMCPY, "end", -(1 << 62), {"migrations.busy_ns", "duration_ns"}),
        (x.MEMCPY, "bytes", 1 << 62, _SIZES),
        (x.MEMCPY, "bytes", -4096, _SIZES),
        (x.GPU_FAULTS, "end", (1 << 63) - 1, {"gpu_faults.busy_ns", "duration_ns"}),
        (x.GPU_FAULTS, "numberOfPageFaults", 1 << 62, {"gpu_faults.n_page_faults"}),
        (x.GPU_FAULTS, "numberOfPageFaults", -1, {"gpu_faults.n_page_faults"}),
        (x.MEMORY, "bytes", 1 << 62, {"managed.bytes"}),
        (x.KERNEL, "start", -(1 << 63), {"kernels.busy_ns", "duration_ns"}),
    ],
)
def test_a_value_out_of_range_makes_its_figures_unknown(table, column, value, unknown, summary_of):
    export = rich("2023.4.4")
    export.rows[table][0][column] = value
    summary = summary_of(export)
    got = figures(summary)
    assert {name for name in unknown if got[name] is not None} <= {
        "migrations.dtoh_bytes",  # the damaged row went to the GPU
        "migrations.dtod_bytes",
    }
    assert wrong_figures(summary, RICH, unknown=unknown) == []
    assert worst_health(summary) == "fail"


def test_addresses_in_the_upper_half_are_read_as_unsigned(trace_of):
    low = -140737488355328
    export = x.Export().add(
        x.MEMCPY, x.migration(0, 10, 4096, low), x.migration(20, 30, 4096, x.VA)
    )
    export.add(x.GPU_FAULTS, x.gpu_fault(0, 5, -1))
    export.add(x.CPU_FAULTS, x.cpu_fault(0, low, pc=-2))
    trace = trace_of(export)
    assert trace.migrations.collect()["va"].to_list() == [0xFFFF_8000_0000_0000, x.VA]
    assert trace.gpu_faults.collect()["va"].to_list() == [0xFFFF_FFFF_FFFF_FFFF]
    assert trace.cpu_faults.select("va", "pc").collect().rows() == [
        (0xFFFF_8000_0000_0000, 0xFFFF_FFFF_FFFF_FFFE)
    ]
    migrations = nsan.summary(trace)["migrations"]
    assert (migrations["min_va"], migrations["max_va"]) == (
        "0x00007f0000000000",
        "0xffff800000000000",
    )


@pytest.mark.parametrize("how", [None, "drop", "null in one", "text in all"])
def test_which_gpu_a_process_means_must_be_readable_for_busy_time(how, tmp_path):
    # Both processes call their GPU device 0, and it is not the same one.
    export = x.Export("2026.1")
    export.add(x.MEMCPY, x.migration(0, 10, 4096, pid=1), x.migration(0, 10, 4096, pid=2))
    export.add(
        x.CUDA_DEVICE, {"gpuId": 1, "cudaId": 0, "pid": 1}, {"gpuId": 0, "cudaId": 0, "pid": 2}
    )
    path = export.write(tmp_path / "whole.sqlite")
    if how is not None:
        path = damage(path, tmp_path / "damaged.sqlite", x.CUDA_DEVICE, ["gpuId"], how)
    busy = nsan.summary(path)["migrations"]["busy_ns"]
    assert busy in ((20,) if how is None else (20, None))


# Tables that go


EVENT_PARTS = {
    x.GPU_FAULTS: "gpu_faults",
    x.CPU_FAULTS: "cpu_faults",
    x.MEMCPY: "migrations",
    x.KERNEL: "kernels",
    x.MEMORY: "managed",
    x.RUNTIME: "managed",
}
DROPPED_ZERO = {
    x.GPU_FAULTS: {name: 0 for name in RICH if name.startswith("gpu_faults.n")},
    x.CPU_FAULTS: {name: 0 for name in RICH if name.startswith("cpu_faults.")},
    x.MEMCPY: {"migrations.n": 0, **dict.fromkeys(_SIZES, 0)},
    x.KERNEL: {"kernels.n": 0},
    x.GRAPH: {"kernels.n_graph_launches": 0},
    x.MEMORY: {"managed.n_allocations": 0, "managed.bytes": 0},
    x.RUNTIME: {"managed.n_calls": 0},
}
"""What a lazy export without the table says: none of it."""


def _own_figures(table):
    """Figures that change with the table."""
    part = {x.GRAPH: "kernels", STRINGS: "managed.n_calls"}.get(table, EVENT_PARTS.get(table))
    own = {name for name in RICH if part and name.startswith(part)}
    if table == x.MEMORY:
        own -= {"managed.n_calls"}
    if table == x.RUNTIME:
        own = {"managed.n_calls"}
    return own


def without(export, tables, path):
    export.write(path)
    with closing(sqlite3.connect(path)) as connection:
        for table in tables:
            connection.execute(f'DROP TABLE IF EXISTS "{table}"')
        connection.commit()
    return nsan.summary(path)


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_missing_table_is_no_rows_or_unknown(version, lazy, tmp_path):
    problems = []
    for table, zero in DROPPED_ZERO.items():
        export = rich(version, lazy=lazy)
        got = figures(without(export, [table], tmp_path / f"{table}.sqlite"))
        others = set(RICH) - _own_figures(table) - {"duration_ns"}
        problems += [
            f"without {table}, {name} is {got[name]}, not {RICH[name]}"
            for name in others
            if got[name] != RICH[name]
        ]
        # Old exports do not store their options, and old nsys has no graph table.
        told = CAPTURE in export.tables or table in (x.MEMCPY, x.KERNEL, x.GRAPH, x.RUNTIME)
        for name, value in zero.items():
            allowed = (value, None) if (lazy and not told) or table == x.GRAPH else (value,)
            allowed = allowed if lazy or table == x.GRAPH else (None,)
            if got[name] not in allowed:
                problems.append(f"without {table}, {name} is {got[name]}, not one of {allowed}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("version", VERSIONS)
def test_missing_context_tables_change_no_figure_of_events(version, tmp_path):
    context = [table for table in _tables(version) if table not in DROPPED_ZERO]
    context = [table for table in context if table not in (x.MEMSET, x.NVTX)]
    jobs = [[table] for table in context] if SOAK else [context]
    for number, tables in enumerate(jobs):
        got = figures(without(rich(version), tables, tmp_path / f"{number}.sqlite"))
        # Without texts, which calls allocate managed memory is unknown.
        unknown = {"managed.n_calls"} if STRINGS in tables else set()
        wrong = {name for name in RICH if got[name] != RICH[name] and name not in unknown}
        assert not wrong, tables
        assert {got[name] for name in unknown} <= {None}, tables


@pytest.mark.parametrize("version", VERSIONS)
def test_the_span_is_that_of_the_tables_that_are_there(version, summary_of):
    export = rich(version)
    del export.rows[x.RUNTIME]  # now the NVTX domain at 590 is no event: the first is the range
    assert summary_of(export)["first_ns"] == 600


# Rows in any order


def many_rows(seed, *, without_start):
    """Rows of every event table, in order of their start, many with equal starts."""
    rng = random.Random(seed)
    export = x.Export("2026.1")
    export.strings |= GRAPH_NAMES

    def times(n):
        starts = sorted(rng.randrange(0, 400) * 10 for _ in range(n))
        return [(start, start + rng.randrange(0, 300)) for start in starts]

    def va():
        return x.VA + rng.randrange(0, 4000) * 4096

    for start, end in times(60):
        kind, cause = rng.choice((x.HTOD, x.DTOH, x.DTOD)), rng.randrange(0, 7)
        size, device = rng.choice((4096, 65536)), rng.randrange(2)
        row = x.migration(start, end, size, va(), kind=kind, cause=cause, device=device)
        export.add(x.MEMCPY, row)
    export.add(x.MEMCPY, *(x.copy(a, b, 100, correlation=a) for a, b in times(20)))
    export.add(
        x.GPU_FAULTS,
        *(x.gpu_fault(a, b, va(), n=b - a + 1, access=a % 6) for a, b in times(50)),
    )
    export.add(x.CPU_FAULTS, *(x.cpu_fault(a, va()) for a, _ in times(30)))
    export.add(x.KERNEL, *(x.kernel(a, b, device=a // 10 % 2, correlation=b) for a, b in times(40)))
    export.add(x.RUNTIME, *(x.api_call(a, b, name=2 + 3 * (b % 2)) for a, b in times(40)))
    for at in range(0, 300, 10):
        export.add(x.NVTX, x.nvtx(at, at + rng.randrange(1, 100), f"range {at}"))
        export.add(x.MEMORY, x.memory_event(at, x.VA + at * x.MIB, 4096))
    if without_start:
        for table in (x.MEMCPY, x.GPU_FAULTS, x.KERNEL):
            export.rows[table][3]["start"] = export.rows[table][-1]["start"] = 1 << 62
    return export


def in_small_pieces(monkeypatch):
    """Read seven rows at a time and write eleven to a part: many parts, to sort and to merge."""
    monkeypatch.setitem(NsysExport.__init__.__kwdefaults__, "rows_per_range", 7)
    small = functools.partial(store.StoreWriter, rows_per_part=11)
    monkeypatch.setattr(store, "StoreWriter", small)


def _without_source(summary):
    return {key: value for key, value in summary.items() if key != "source"}


@pytest.mark.parametrize("without_start", [False, True])
@pytest.mark.parametrize("seed", range(50 if SOAK else 3))
def test_the_order_of_rows_does_not_matter(seed, without_start, tmp_path, monkeypatch):
    export = many_rows(seed, without_start=without_start)
    ordered = nsan.open_trace(export.write(tmp_path / "ordered.sqlite"))
    shuffled = {
        table: random.Random(seed).sample(rows, len(rows)) for table, rows in export.rows.items()
    }
    export.rows = shuffled
    in_small_pieces(monkeypatch)
    path = export.write(tmp_path / "shuffled.sqlite")
    trace = nsan.open_trace(path)

    manifest = read_manifest(default_store(path, fingerprint(path)))
    assert all(len(manifest["tables"][name]["parts"]) > 1 for name in ("migrations", "gpu_faults"))
    for name in TABLES:
        got, right = getattr(trace, name).collect(), getattr(ordered, name).collect()
        assert_frame_equal(got, right, check_row_order=False)
        if "start_ns" in got.columns:
            known = got["start_ns"].drop_nulls()
            assert known.is_sorted()
            assert got["start_ns"].head(len(known)).null_count() == 0, f"{name}: nulls come last"
    assert _without_source(nsan.summary(path)) == _without_source(
        nsan.summary(tmp_path / "ordered.sqlite")
    )
    assert _without_source(nsan.summary(trace)) == _without_source(nsan.summary(ordered))


@pytest.mark.parametrize("seed", range(50 if SOAK else 2))
def test_rows_in_order_stay_whole_when_they_come_in_many_ranges(seed, tmp_path, monkeypatch):
    export = many_rows(seed, without_start=False)
    whole = nsan.summary(export.write(tmp_path / "whole.sqlite"))
    in_small_pieces(monkeypatch)
    path = export.write(tmp_path / "pieces.sqlite")
    assert _without_source(nsan.summary(path)) == _without_source(whole)
    assert nsan.open_trace(path).migrations.select(pl.len()).collect().item() == 60


# Traps of SQLite and ADBC


def change(path, *statements):
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()
    return path


NOT_UTF8 = "CAST(X'0ADF01' AS TEXT)"
REPLACED = "\n\ufffd\x01"


def test_text_that_is_not_utf8_is_replaced_and_the_rest_of_the_table_kept(tmp_path):
    export = x.Export().add(x.KERNEL, x.kernel(0, 10, name=1), x.kernel(20, 30, name=3))
    export.add(x.NVTX, x.nvtx(0, 5, "good"), x.nvtx(6, 7, "bad"), x.nvtx(8, 9, "\U0001f525" * 9))
    export.add(ENV, {"name": "NvDriverVersion", "value": "550.54.15"}, {"name": "x", "value": "y"})
    path = export.write(tmp_path / "bytes.sqlite")
    change(
        path,
        f"UPDATE StringIds SET value = {NOT_UTF8} WHERE id = 1",
        f"UPDATE NVTX_EVENTS SET text = {NOT_UTF8} WHERE text = 'bad'",
        f"UPDATE {ENV} SET value = {NOT_UTF8} WHERE name = 'x'",
        f"INSERT INTO {ENV} SELECT 0, '', 'CpuDescription', 0, {NOT_UTF8}",
    )
    trace = nsan.open_trace(path)
    assert trace.kernels.collect()["name"].to_list() == [REPLACED, "main"]
    assert trace.nvtx_ranges.collect()["name"].to_list() == ["good", REPLACED, "\U0001f525" * 9]
    summary = nsan.summary(path)
    assert (summary["driver_version"], summary["cpu"]) == ("550.54.15", REPLACED)


def test_a_column_that_is_null_for_seventy_thousand_rows_is_read_to_its_end(tmp_path):
    path = x.Export().add(x.NVTX, x.nvtx(0, 1)).write(tmp_path / "nulls.sqlite")
    change(
        path,
        "DELETE FROM NVTX_EVENTS",
        'INSERT INTO NVTX_EVENTS (start, "end", eventType) '
        "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 69999) "
        "SELECT i * 10, i * 10 + 5, 59 FROM n",
        'INSERT INTO NVTX_EVENTS (start, "end", eventType, text, domainId, globalTid) '
        f"VALUES (700000, 700005, 59, 'last', 3, {x.global_tid(x.PID, 7)})",
    )
    ranges = nsan.open_trace(path).nvtx_ranges.select("name", "pid", "tid").collect()
    assert ranges.height == 70_001
    assert ranges.row(-1) == ("last", x.PID, 7)


@pytest.mark.parametrize("cell", ["2.5", "'4096'", "'a'", "X'1000'"])
@pytest.mark.parametrize("row", [1, 2, 3])
def test_one_cell_of_another_type_spoils_only_its_own_figures(cell, row, tmp_path):
    export = x.Export().add(x.MEMCPY, *(x.migration(i, i + 1, 4096) for i in (0, 10, 20)))
    path = damage(export.write(tmp_path / "a.sqlite"), tmp_path / "b.sqlite", x.MEMCPY, [], "drop")
    change(path, f"UPDATE {x.MEMCPY} SET bytes = {cell} WHERE rowid = {row}")
    summary = nsan.summary(path)
    migrations = summary["migrations"]
    assert (migrations["n"], migrations["bytes"], migrations["busy_ns"]) == (3, None, 3)
    assert worst_health(summary) == "fail"
    sizes = nsan.open_trace(path).migrations.collect()["bytes"].to_list()
    assert sizes == [None if i == row else 4096 for i in (1, 2, 3)]


@pytest.mark.parametrize(
    "ids",
    [
        (1, 2, 1 << 40),
        (-(1 << 62), 0, 1 << 62),
        (-(1 << 63), -1, (1 << 63) - 1),
        ((1 << 63) - 3, (1 << 63) - 2, (1 << 63) - 1),
    ],
)
def test_row_ids_with_huge_gaps_lose_no_row(ids, tmp_path, monkeypatch):
    export = x.Export().add(x.MEMCPY, *(x.migration(i, i + 1, 4096) for i in (0, 10, 20)))
    path = export.write(tmp_path / "gaps.sqlite")
    # The last row first, lest a new id meets an old one.
    order = [(3, ids[2]), (2, ids[1]), (1, ids[0])]
    change(
        path, *(f"UPDATE {x.MEMCPY} SET rowid = {new} WHERE rowid = {old}" for old, new in order)
    )
    monkeypatch.setitem(NsysExport.__init__.__kwdefaults__, "rows_per_range", 2)
    migrations = nsan.open_trace(path).migrations.collect()
    assert migrations["start_ns"].to_list() == [0, 10, 20]


@pytest.mark.parametrize(
    "name",
    [
        "with space.sqlite",
        "#1.sqlite",
        "100%.sqlite",
        "%41.sqlite",
        "what?.sqlite",
        "a?mode=rwc.sqlite",
        "a&b=c;d.sqlite",
        "naïve-日本.sqlite",
        "[x]*.sqlite",
        "quote'\".sqlite",
        "no_suffix",
        "-dash.sqlite",
    ],
)
def test_odd_file_names_are_opened_as_they_are(name, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    path = x.Export().add(x.MEMCPY, x.migration(0, 1, 4096)).write(tmp_path / "plain.sqlite")
    path = path.rename(folder / name)
    summary = nsan.summary(path)
    assert (summary["source"], summary["migrations"]["bytes"]) == (name, 4096)
    assert nsan.open_trace(path).migrations.collect().height == 1
    assert [entry.name for entry in folder.iterdir()] == [name]


def test_unknown_columns_and_tables_are_passed_over(tmp_path):
    path = rich("2026.1").write(tmp_path / "extra.sqlite")
    change(
        path,
        f"ALTER TABLE {x.MEMCPY} ADD COLUMN futureColumn TEXT DEFAULT 'x'",
        f'ALTER TABLE {x.GPU_FAULTS} ADD COLUMN "odd name; --" BLOB',
        'CREATE TABLE "FUTURE ""TABLE" (a, b)',
        "CREATE VIEW future_view AS SELECT 1",
    )
    assert figures(nsan.summary(path)) == RICH


@pytest.mark.parametrize("schema", ["3.99.0", "4.0.0"])
def test_a_newer_schema_warns_and_loads(schema, tmp_path):
    path = rich("2026.1").write(tmp_path / "newer.sqlite")
    change(
        path,
        f"UPDATE META_DATA_EXPORT SET value = '{schema}' WHERE name = 'EXPORT_SCHEMA_VERSION'",
    )
    summary = nsan.summary(path)
    assert figures(summary) == RICH
    check = next(check for check in summary["health"] if check["id"] == "schema")
    assert check["status"] == "warn"
    assert schema in check["text"]


@pytest.mark.parametrize("spelt", [str.lower, str.upper])
def test_the_case_of_table_and_column_names_does_not_matter(spelt, tmp_path):
    path = rich("2026.1").write(tmp_path / "case.sqlite")
    with closing(sqlite3.connect(path)) as connection:
        tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master")]
        for table in tables:
            for column in columns_of(connection, table):
                connection.execute(
                    f'ALTER TABLE "{table}" RENAME COLUMN "{column}" TO "{spelt(column)}"'
                )
            connection.execute(f'ALTER TABLE "{table}" RENAME TO "{table}_"')
            connection.execute(f'ALTER TABLE "{table}_" RENAME TO "{spelt(table)}"')
        connection.commit()
    assert figures(nsan.summary(path)) == RICH
