"""What the writer of modelled captures puts into an nsys export, and that nsan reads it back."""

from __future__ import annotations

import itertools
import json
import sqlite3
from contextlib import closing

import exports
import polars as pl
import pytest
from exports import CPU_FAULTS, DATA, GPU_FAULTS, KERNEL, MEMCPY, MEMORY, NVTX, RUNTIME, ask
from hypothesis import given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

import nsan
import nsan.cli
from nsan.errors import (
    OutputExistsError,
    OutputWriteError,
    SchemaMismatchError,
    UnknownNameError,
)
from nsan.io.sqlite_writer import writing_database
from nsan.model.nsys_ddl import layouts, schema_version
from nsan.model.nsys_export import SCHEMAS, ExportOptions, Machine, write_export
from nsan.schema import TABLES

MACHINE = Machine(
    "nsan-model stream",
    "UVM driver model of nsan 0.1.0, profile a100-sxm4-40gb",
    session_start_utc_ns=1_755_488_485_007_621_229,
    duration_ns=9_000,
)
SAMPLE = exports.REPOSITORY / "sample_data" / "um_vector_add_rtx4060l.sqlite"

A, B = 4242, (1 << 24) - 1
"""Two processes; the second has the largest number that a global id holds."""

VA = 0x7F00_0000_0000
HIGH_VA = (1 << 64) - 4096
MIB = 1 << 20
HOLDS_SOURCE_LINES = ("3.17.2", "3.25.0")
HAS_CAPTURE_OPTIONS = ("3.7.2", "3.17.2", "3.25.0")

every_schema = pytest.mark.parametrize("schema", SCHEMAS)


def frame(table, *rows):
    """Rows of a table of ours; what a row does not say is null."""
    columns = TABLES[table].schema
    filled = [{**dict.fromkeys(columns), **row} for row in rows]
    return pl.DataFrame(filled, schema=columns, orient="row")


def event(start, end, pid=A, device=0):
    return {"start_ns": start, "end_ns": end, "pid": pid, "device_id": device}


def work(start, end, pid=A, device=0, correlation=1):
    ids = {"context_id": 1, "stream_id": 7, "correlation_id": correlation}
    return event(start, end, pid, device) | ids


def migration(start, end, direction="htod", cause=("coherence", 2), **more):
    label, number = cause
    row = {"va": VA, "bytes": 4096, "direction": direction, "cause": label, "cause_id": number}
    return event(start, end) | row | more


def call(start, end, name, *, pid=A, tid=A, correlation=1, returned=0):
    return {
        "start_ns": start,
        "end_ns": end,
        "pid": pid,
        "tid": tid,
        "correlation_id": correlation,
        "name": name,
        "return_value": returned,
    }


def nvtx(start, end, name, number, **more):
    row = {"start_ns": start, "end_ns": end, "pid": A, "tid": A, "name": name, "range_id": number}
    return row | {"kind": "push_pop", "depth": 0, "closed": True} | more


GPUS = [
    {
        "gpu_id": number,
        "name": "NVIDIA A100-SXM4-40GB",
        "chip": "GA100",
        "total_memory_bytes": 40 << 30,
        "memory_bytes_per_s": 1_555_000_000_000,
        "n_sms": 108,
        "compute_capability": "8.0",
    }
    for number in (0, 1)
]


def capture():
    """Some rows of every kind, by name; each table in the order in which nsan gives it."""
    return {
        "gpu_faults": frame(
            "gpu_faults",
            event(1_000, 2_000)
            | {"va": VA, "n_page_faults": 256, "access": "read", "access_id": 1},
            event(1_500, 2_500, B, 1)
            | {"va": HIGH_VA, "n_page_faults": 1, "access": "atomic", "access_id": 3},
            event(2_100, 2_600)
            | {"va": VA + 4096, "n_page_faults": 3, "access": "other", "access_id": 9},
        ),
        "cpu_faults": frame(
            "cpu_faults",
            {"start_ns": 3_000, "pid": A, "va": VA, "pc": 0x401_000, "function": "main"}
            | {"module": "app", "source_file": "app.cu", "source_line": 12},
            {"start_ns": 3_100, "pid": B, "va": HIGH_VA, "pc": HIGH_VA + 7},
        ),
        "migrations": frame(
            "migrations",
            migration(1_100, 1_200),
            migration(1_201, 1_900, cause=("prefetch", 3), va=VA + 4096, bytes=61_440),
            migration(3_010, 3_020, "dtoh", ("eviction", 4), pid=B, device_id=1, va=HIGH_VA),
            migration(3_030, 3_040, "dtod", ("user", 1), src_device_id=0, dst_device_id=1),
            migration(3_050, 3_060, cause=("unknown", None)),
            migration(3_070, 3_080, cause=("unknown", 0)),
            migration(3_090, 3_095, cause=("other", 77), bytes=0),
        ),
        "copies": frame(
            "copies",
            work(4_000, 4_100) | {"bytes": MIB, "kind": "htod", "kind_id": 1, "n_operations": 3},
            work(4_200, 4_300, B, 1, 9)
            | {"bytes": 64, "kind": "other", "kind_id": 40, "n_operations": 1},
        ),
        "memsets": frame(
            "memsets",
            work(4_400, 4_500) | {"bytes": 8, "kind": "managed", "kind_id": 4},
            work(4_600, 4_700) | {"bytes": 9, "kind": "unknown"},
        ),
        "kernels": frame(
            "kernels",
            work(900, 2_700, correlation=5)
            | {"name": "add", "demangled": "add(int, float*)", "graph_node_id": 3}
            | {"grid": [2, 3, 4], "block": [256, 1, 1], "is_graph_launch": False},
            work(2_800, 2_900, B, 1, 6)
            | {"name": "CUDA graph 11", "demangled": "CUDA graph 11", "is_graph_launch": True},
        ),
        "api_calls": frame(
            "api_calls",
            call(100, 200, "cudaMallocManaged_v6000"),
            call(300, 400, "cuLaunchKernel", pid=B, tid=17, correlation=6, returned=700),
            call(8_000, 9_000, "cudaDeviceSynchronize_v3020", correlation=7),
        ),
        "nvtx_ranges": frame(
            "nvtx_ranges",
            nvtx(50, 9_000, "step", 0),
            nvtx(60, 300, "load", 1, depth=1, parent=0),
            nvtx(70, 80, "io", 2, domain="files"),
            nvtx(500, 9_000, "never closed", 3, kind="start_end", closed=False),
            nvtx(600, 700, "io", 4, domain="files", pid=B, tid=17),
        ),
        "nvtx_marks": frame(
            "nvtx_marks",
            {"start_ns": 650, "pid": A, "tid": A, "domain": "disks", "name": "here"},
            {"start_ns": 660, "pid": A, "tid": A, "name": "there"},
        ),
        "allocations": frame(
            "allocations",
            {"free_ns": 8_500, "pid": A, "device_id": 0, "va": VA - MIB, "bytes": 5}
            | {"kind": "device", "correlation_id": 4},
            {"alloc_ns": 150, "free_ns": 8_600, "pid": A, "device_id": 0, "va": VA}
            | {"bytes": 4 * MIB, "kind": "managed", "name": "x", "correlation_id": 1},
            {"alloc_ns": 160, "pid": B, "device_id": 1, "va": HIGH_VA}
            | {"bytes": 4096, "kind": "unknown"},
            {"alloc_ns": 8_700, "pid": A, "device_id": 0, "va": VA}
            | {"bytes": 7, "kind": "managed_static"},
        ),
        "devices": frame(
            "devices",
            {"device_id": 0, "pid": A} | GPUS[0],
            {"device_id": 1, "pid": A} | GPUS[1],
            {"device_id": 1, "pid": B} | GPUS[1],
        ),
        "processes": frame("processes", {"pid": A, "name": "app"}, {"pid": B, "name": "worker"}),
    }


def held(tables, options):
    """What an export can hold of a capture: worked out from the schema, not from the writer."""
    tables = dict(tables)
    for name, on in (
        ("gpu_faults", options.gpu_faults),
        ("cpu_faults", options.cpu_faults),
        ("allocations", options.memory_usage),
    ):
        if not on:
            tables[name] = tables[name].clear()
    if options.schema not in HOLDS_SOURCE_LINES:
        nothing = {"source_file": None, "source_line": None}
        tables["cpu_faults"] = tables["cpu_faults"].with_columns(
            pl.lit(value, TABLES["cpu_faults"].schema[name]).alias(name)
            for name, value in nothing.items()
        )
        tables["copies"] = tables["copies"].with_columns(n_operations=pl.lit(1, pl.Int64))
        tables["devices"] = frame("devices", *({"device_id": g["gpu_id"]} | g for g in GPUS))
    return tables


def assert_same(trace, tables):
    for name in TABLES:
        expected = tables.get(name, TABLES[name].empty().collect())
        assert_frame_equal(getattr(trace, name).collect(), expected)


@pytest.fixture
def write(tmp_path):
    """Write a capture with options by name; return the file."""
    numbers = itertools.count()

    def to_file(tables, **options):
        path = tmp_path / f"model-{next(numbers)}.sqlite"
        return write_export(path, tables, MACHINE, ExportOptions(**options))

    return to_file


def pairs(path, table="META_DATA_EXPORT"):
    return dict(ask(path, f"SELECT name, value FROM {table}"))


def table_names(path):
    return {name for (name,) in ask(path, "SELECT name FROM sqlite_master WHERE type = 'table'")}


# --- What is written is read ----------------------------------------------------------------------

SWITCHES = {
    "all on": {},
    "all off": {"gpu_faults": False, "cpu_faults": False, "memory_usage": False},
    "no gpu faults": {"gpu_faults": False},
    "no cpu faults": {"cpu_faults": False},
    "no memory usage": {"memory_usage": False},
}


@every_schema
@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("switches", SWITCHES)
def test_a_capture_reads_as_it_was_written(schema, lazy, switches, write):
    options = {"schema": schema, "lazy": lazy, **SWITCHES[switches]}
    trace = nsan.open_trace(write(capture(), **options))
    assert_same(trace, held(capture(), ExportOptions(**options)))
    assert (trace.info.losses, trace.info.absent_columns) == ({}, {})
    assert (trace.info.doubtful, trace.info.warnings) == ([], [])
    assert trace.info.export_schema == schema


@every_schema
@pytest.mark.parametrize("lazy", [True, False])
def test_an_empty_capture_reads_as_one(schema, lazy, write):
    trace = nsan.open_trace(write({}, schema=schema, lazy=lazy))
    assert_same(trace, {})
    assert trace.info.losses == {}


@pytest.mark.parametrize("source", [SAMPLE, "h100_2proc_2gpu_nvtx_2026.2.1"], ids=["um", "h100"])
def test_a_real_capture_written_again_reads_the_same(source, real, write):
    trace = nsan.open_trace(source if source is SAMPLE else real(source))
    schema = trace.info.export_schema
    tables = {name: getattr(trace, name).collect() for name in TABLES if name != "diagnostics"}
    assert tables["api_calls"].height > 5
    assert_same(nsan.open_trace(write(tables, schema=schema)), tables)


def test_migration_rows_are_those_of_nsys_in_every_column(write):
    """Of a real capture: not only what nsan reads."""
    query = f"SELECT * FROM {MEMCPY} ORDER BY start"
    path = write({"migrations": nsan.open_trace(SAMPLE).migrations.collect()})
    assert ask(path, query) == ask(SAMPLE, query)
    assert len(ask(path, query)) == 72
    declared = "SELECT name, type, \"notnull\" FROM pragma_table_info('CUPTI_ACTIVITY_KIND_MEMCPY')"
    assert ask(path, declared) == ask(SAMPLE, declared)


@pytest.mark.parametrize("schema", ["2.9.1", "3.25.0"])
def test_shuffled_rows_read_the_same_and_lie_in_another_order(schema, write):
    n = 300
    tables = capture() | {
        "migrations": frame("migrations", *(migration(i, i + 1, va=VA + i) for i in range(n))),
        "gpu_faults": frame(
            "gpu_faults",
            *(
                event(i, i + 1)
                | {"va": VA + i, "n_page_faults": 1, "access": "read", "access_id": 1}
                for i in range(n)
            ),
        ),
    }
    starts = {}
    for seed in (None, 1, 1, 2):
        path = write(tables, schema=schema, shuffle_seed=seed)
        assert_same(nsan.open_trace(path), held(tables, ExportOptions(schema=schema)))
        for table in (MEMCPY, GPU_FAULTS):
            found = tuple(ask(path, f"SELECT start FROM {table} ORDER BY rowid"))
            starts.setdefault(table, {}).setdefault(seed, []).append(found)
    for by_seed in starts.values():
        assert by_seed[1][0] == by_seed[1][1]
        assert len({by_seed[None][0], by_seed[1][0], by_seed[2][0]}) == 3
        assert sorted(by_seed[None][0]) == sorted(by_seed[1][0]) == sorted(by_seed[2][0])
    # Copies lie among migrations, as in one table.
    kinds = [kind for (kind,) in ask(path, f"SELECT copyKind FROM {MEMCPY} ORDER BY rowid")]
    assert kinds[-2:] != [1, 40]


NASTY = ["it's", 'a "quoted"; DROP TABLE x; --', "two\nlines\t", "Grüße, 数字 🚀", " ", "", "NULL"]


def test_any_name_survives(write):
    short = [text.replace("/", "") for text in NASTY]
    tables = {
        "kernels": frame(
            "kernels",
            *(
                work(i, i + 1)
                | {"name": text, "demangled": f"{text}()", "grid": [1, 1, 1], "block": [1, 1, 1]}
                | {"is_graph_launch": False}
                for i, text in enumerate(short)
            ),
        ),
        "api_calls": frame("api_calls", *(call(i, i + 1, text) for i, text in enumerate(short))),
        "nvtx_ranges": frame(
            "nvtx_ranges",
            *(nvtx(i, i + 1, text, i, domain=f"d{text}") for i, text in enumerate(short)),
        ),
        "allocations": frame(
            "allocations",
            *(
                {"alloc_ns": i, "pid": A, "device_id": 0, "va": VA + i, "bytes": 1}
                | {"kind": "managed", "name": text}
                for i, text in enumerate(short)
            ),
        ),
        "cpu_faults": frame(
            "cpu_faults",
            *(
                {"start_ns": i, "pid": A, "va": VA, "function": text, "module": text}
                for i, text in enumerate(short)
            ),
        ),
        "processes": frame("processes", {"pid": A, "name": "it's 🚀"}),
        "devices": frame("devices", {"device_id": 0} | GPUS[0] | {"name": 'GPU "x"'}),
    }
    assert_same(nsan.open_trace(write(tables)), tables)


@pytest.mark.parametrize("n_rows", [1, 49, 50, 51, 250_001])
def test_no_row_is_lost_where_a_statement_or_a_piece_ends(n_rows, write):
    starts = pl.int_range(n_rows, dtype=pl.Int64, eager=True)
    one = frame("migrations", migration(0, 0))
    many = one.select(pl.all().repeat_by(n_rows).explode()).with_columns(
        start_ns=starts, end_ns=starts * 2, bytes=starts * 4096
    )
    path = write({"migrations": many})
    asked = f"SELECT count(*), sum(start), sum(end), sum(bytes) FROM {MEMCPY}"
    total = n_rows * (n_rows - 1) // 2
    assert ask(path, asked) == [(n_rows, total, 2 * total, 4096 * total)]
    assert_frame_equal(nsan.open_trace(path).migrations.collect(), many)


CELLS = {
    "number": (st.none() | st.integers(-(1 << 63), (1 << 63) - 1), pl.Int64, "INTEGER"),
    "same": (st.sampled_from([-(1 << 63)]), pl.Int64, "INTEGER"),
    "text": (st.none() | st.text(st.characters(exclude_categories=["Cs"])), pl.String, "TEXT"),
    "real": (st.none() | st.floats(allow_nan=False), pl.Float64, "REAL"),
    "nothing": (st.none(), pl.Int64, "INTEGER"),
}


@given(rows=st.lists(st.tuples(*(strategy for strategy, _, _ in CELLS.values())), max_size=120))
def test_the_database_holds_the_cells_that_were_given(rows, tmp_path_factory):
    path = tmp_path_factory.mktemp("cells") / "cells.sqlite"
    given_rows = pl.DataFrame(
        rows, schema={name: dtype for name, (_, dtype, _) in CELLS.items()}, orient="row"
    )
    declared = ", ".join(f'"{name}" {kind}' for name, (_, _, kind) in CELLS.items())
    with writing_database(path) as database:
        database.create(f'CREATE TABLE "T" ({declared})')
        database.insert("T", given_rows)
    assert ask(path, 'SELECT * FROM "T" ORDER BY rowid') == rows


# --- What the recording was -----------------------------------------------------------------------


@every_schema
@pytest.mark.parametrize("lazy", [True, False])
def test_a_switch_that_was_off_is_no_zero(schema, lazy, write):
    off = {"gpu_faults": False, "cpu_faults": False, "memory_usage": False}
    info = nsan.open_trace(write(capture(), schema=schema, lazy=lazy, **off)).info
    answers = {info.capture[kind].answer for kind in ("gpu_faults", "cpu_faults", "allocations")}
    # Before 3.4 an export does not store its options.
    assert answers == {"not_recorded" if schema in HAS_CAPTURE_OPTIONS else "unknown"}
    assert info.capture["migrations"].answer == "recorded"


@pytest.mark.parametrize("schema", HAS_CAPTURE_OPTIONS)
@pytest.mark.parametrize("lazy", [True, False])
def test_a_switch_that_was_on_without_rows_is_zero(schema, lazy, write):
    path = write({"migrations": capture()["migrations"]}, schema=schema, lazy=lazy)
    assert {c.answer for c in nsan.open_trace(path).info.capture.values()} == {"recorded"}
    assert nsan.summary(path)["gpu_faults"]["n_rows"] == 0


@every_schema
def test_a_lazy_export_has_only_tables_with_rows(schema, write):
    few = write({"migrations": capture()["migrations"]}, schema=schema)
    events = {GPU_FAULTS, CPU_FAULTS, MEMCPY, KERNEL, NVTX, MEMORY, RUNTIME}
    assert table_names(few) & events == {MEMCPY}
    for table in table_names(few):
        assert ask(few, f"SELECT count(*) FROM {table}")[0][0] > 0 or table == "StringIds"
    every = write({}, schema=schema, lazy=False)
    assert table_names(every) == set(layouts(schema))
    assert ask(every, f"SELECT count(*) FROM {GPU_FAULTS}") == [(0,)]


# --- An export tells that it is a model's ---------------------------------------------------------


@every_schema
def test_an_export_says_that_a_model_wrote_it(schema, write):
    path = write(capture(), schema=schema)
    new = schema in HAS_CAPTURE_OPTIONS
    facts = pairs(path, "META_DATA_EXPORT" if new else "EXPORT_META_DATA")
    assert facts["EXPORT_PRODUCT_NAME"] == "nsan UVM driver model"
    assert facts["EXPORT_PRODUCT_VERSION"] == nsan.__version__
    assert facts["EXPORT_SCHEMA_VERSION"] == schema
    assert facts["NSAN_DRIVER_MODEL"] == MACHINE.driver_note
    assert "NVIDIA" not in "".join(facts.values())

    info = nsan.open_trace(path).info
    assert (info.kind, info.nsys_version) == ("nsan-model", None)
    assert info.driver_version == MACHINE.driver_note
    assert info.session_start_utc_ns == MACHINE.session_start_utc_ns


def test_an_export_without_the_products_name_is_none_of_ours(built):
    info = nsan.open_trace(built(exports.Export().add(KERNEL, exports.kernel(0, 1)))).info
    assert (info.kind, info.nsys_version) == ("nsys-sqlite", "2023.4.4.54")


@pytest.mark.parametrize("command", ["summary", "info"])
def test_people_are_told_that_a_capture_is_modelled(command, write, capsys):
    path = write(capture())
    assert nsan.cli.main([command, "-q", str(path)]) == 0
    told = "modelled: written by nsan's UVM driver model, not recorded"
    assert told in capsys.readouterr().out
    assert nsan.cli.main([command, "-q", str(path), "--json"]) == 0
    health = json.loads(capsys.readouterr().out)["health"]
    assert [check["status"] for check in health if check["id"] == "modelled"] == ["ok"]
    assert nsan.cli.main([command, "-q", str(SAMPLE)]) == 0
    assert "modelled" not in capsys.readouterr().out


ASSUMED = {
    "2.9.1": set(),
    "3.0.0": set(),
    "3.7.2": set(),
    "3.17.2": {GPU_FAULTS, CPU_FAULTS, exports.MEMSET, MEMORY},
    "3.25.0": {GPU_FAULTS, CPU_FAULTS, MEMORY, exports.GPU, exports.CUDA_DEVICE},
}
"""Tables that no real export of that schema among those we know has."""


@every_schema
def test_an_export_names_its_assumed_tables(schema, write):
    wanted = ASSUMED[schema] | {exports.GRAPH}
    table = "META_DATA_EXPORT" if schema in HAS_CAPTURE_OPTIONS else "EXPORT_META_DATA"
    for lazy in (True, False):
        facts = pairs(write(capture(), schema=schema, lazy=lazy), table)
        assert set(facts["NSAN_ASSUMED_TABLES"].split(", ")) == wanted
    few = pairs(write({"migrations": capture()["migrations"]}, schema=schema), table)
    assert "NSAN_ASSUMED_TABLES" not in few
    # Tables without rows are there, and assumed, all the same.
    every = pairs(write({}, schema=schema, lazy=False), table)
    assert set(every["NSAN_ASSUMED_TABLES"].split(", ")) == wanted


def real_columns(schema, table):
    """Columns of a table in real exports of one schema, as ``{name: TYPE or TYPE!}``, or None."""
    stored = json.loads((DATA / "nsys" / "schema_by_version.json").read_text())
    of_schema = [tables for key, tables in stored.items() if key.endswith(f"(schema {schema})")]
    texts = [tables[table] for tables in of_schema if table in tables]
    return dict(column.split(" ") for column in texts[-1].split(", ")) if texts else None


@every_schema
def test_tables_are_declared_as_in_real_exports(schema):
    for table, layout in layouts(schema).items():
        columns = {
            name: kind + "!" * (name in layout.required) for name, kind in layout.columns.items()
        }
        seen = real_columns(schema, table)
        assert (seen is None) == layout.assumed, table
        if seen:
            # One old export that is known was given a column by hand.
            extra = set(seen) - set(columns)
            assert extra <= ({"name"} if schema == "2.9.1" and table != "PROCESSES" else set())
            assert list(columns.items()) == [pair for pair in seen.items() if pair[0] not in extra]


def test_an_assumed_table_of_cpu_faults_has_the_columns_of_its_neighbour_and_source_lines():
    old, new = (layouts(schema)[CPU_FAULTS].columns for schema in ("3.7.2", "3.25.0"))
    assert list(new.items())[: len(old)] == list(old.items())
    assert list(new)[len(old) :] == ["sourceFile", "sourceLine"]


# --- What cannot be written -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "meant"), [("3.17", "3.17.2"), ("3.25", "3.25.0"), ("2", "2.9.1")]
)
def test_the_beginning_of_a_schema_is_enough(asked, meant, write):
    assert schema_version(asked) == meant
    assert nsan.open_trace(write(capture(), schema=asked)).info.export_schema == meant


@pytest.mark.parametrize("asked", ["3", "3.1", "4.0", "", "latest", "3.7.20"])
def test_an_unknown_schema_is_refused_with_those_that_exist(asked, tmp_path):
    with pytest.raises(UnknownNameError) as raised:
        write_export(tmp_path / "x.sqlite", {}, MACHINE, ExportOptions(schema=asked))
    assert all(schema in str(raised.value) for schema in SCHEMAS)
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_no_table_is_refused(tmp_path):
    with pytest.raises(UnknownNameError, match=r"gpu_fault\b.*gpu_faults"):
        write_export(tmp_path / "x.sqlite", {"gpu_fault": pl.DataFrame()}, MACHINE)


def test_tables_that_nsys_has_no_place_for_are_left_out(write):
    noted = {"time_ns": 1, "pid": A, "severity": "warning", "text": "CUDA"}
    thrashing = event(1, 2) | {"va": VA, "bytes": 4096, "kind": "thrashing", "by_cpu": True}
    tables = {
        "migrations": capture()["migrations"],
        "driver_events": frame("driver_events", thrashing),
        "diagnostics": frame("diagnostics", noted),
    }
    trace = nsan.open_trace(write(tables))
    assert trace.driver_events.collect().is_empty()
    assert trace.diagnostics.collect().is_empty()


def test_columns_of_another_type_are_refused(tmp_path):
    wrong = capture()["migrations"].with_columns(pl.col("bytes").cast(pl.Int32))
    with pytest.raises(SchemaMismatchError, match="bytes"):
        write_export(tmp_path / "x.sqlite", {"migrations": wrong}, MACHINE)


@pytest.mark.parametrize(
    ("table", "column", "named"),
    [
        ("gpu_faults", "va", "address"),
        ("cpu_faults", "pid", "globalPid"),
        ("migrations", "direction", "copyKind"),
        ("kernels", "grid", "gridX"),
        ("allocations", "bytes", "bytes"),
    ],
)
def test_a_value_that_nsys_always_has_may_not_be_missing(table, column, named, tmp_path):
    tables = capture()
    nothing = pl.lit(None, TABLES[table].schema[column])
    tables[table] = tables[table].with_columns(nothing.alias(column))
    with pytest.raises(SchemaMismatchError, match=rf"^{table}: .*{named}"):
        write_export(tmp_path / "x.sqlite", tables, MACHINE)
    assert list(tmp_path.iterdir()) == []


def test_a_process_too_large_for_a_global_id_is_refused(tmp_path):
    tables = {"migrations": frame("migrations", migration(0, 1, pid=1 << 24))}
    with pytest.raises(SchemaMismatchError, match="pid"):
        write_export(tmp_path / "x.sqlite", tables, MACHINE)


def test_a_label_stands_for_a_number_that_was_not_recorded(write):
    tables = {
        "migrations": frame("migrations", migration(0, 1, "dtoh", ("eviction", None))),
        "gpu_faults": frame(
            "gpu_faults", event(0, 1) | {"va": VA, "n_page_faults": 1, "access": "write"}
        ),
    }
    path = write(tables)
    assert ask(path, f"SELECT copyKind, migrationCause FROM {MEMCPY}") == [(12, 4)]
    assert ask(path, f"SELECT faultAccessType FROM {GPU_FAULTS}") == [(2,)]


def test_each_end_of_an_allocation_is_an_event_of_its_own_call(write):
    path = write(capture())
    columns = "start, memoryOperationType, address, bytes, memKind, correlationId"
    signed = HIGH_VA - (1 << 64)
    assert ask(path, f"SELECT {columns} FROM {MEMORY} ORDER BY rowid") == [
        (150, 0, VA, 4 * MIB, 4, 1),
        (160, 0, signed, 4096, 7, None),
        # Allocated before the capture: all that is known is of its release.
        (8_500, 1, VA - MIB, 5, 2, 4),
        (8_600, 1, VA, 4 * MIB, 4, None),
        (8_700, 0, VA, 7, 6, None),
    ]


def test_what_is_not_known_of_a_cpu_fault_refers_to_no_text(write):
    path = write(capture(), schema="3.25")
    query = f"SELECT CpuInstruction, module, sourceFile, unresolvedFaultPc FROM {CPU_FAULTS}"
    known, unknown = ask(path, query + " ORDER BY start")
    texts = dict(ask(path, "SELECT id, value FROM StringIds"))
    assert [texts[number] for number in known[:3]] == ["main", "app", "app.cu"]
    assert unknown == (0, 0, None, None)
    assert 0 not in texts


def test_a_context_and_a_stream_that_were_not_recorded_are_the_default_ones(write):
    copied = event(0, 1) | {"bytes": 1, "kind": "htod", "kind_id": 1}
    path = write({"copies": frame("copies", copied)})
    query = f"SELECT contextId, streamId, correlationId, virtualAddress FROM {MEMCPY}"
    assert ask(path, query) == [(1, 7, None, None)]


def test_calls_of_the_driver_api_are_told_from_those_of_the_runtime(write):
    path = write(capture())
    query = f"SELECT eventClass, globalTid FROM {RUNTIME} ORDER BY start"
    assert ask(path, query) == [
        (0, exports.global_tid(A, A)),
        (1, exports.global_tid(B, 17)),
        (0, exports.global_tid(A, A)),
    ]


def test_every_thread_has_the_name_of_its_program(write):
    path = write(capture())
    query = "SELECT globalTid, value FROM ThreadNames JOIN StringIds ON id = nameId"
    assert dict(ask(path, query)) == {
        exports.global_tid(A, A): "app",
        exports.global_tid(B, 17): "worker",
    }


# --- The file -------------------------------------------------------------------------------------


def test_a_file_that_is_there_is_kept_unless_it_may_be_replaced(tmp_path):
    path = tmp_path / "x.sqlite"
    path.write_text("precious")
    with pytest.raises(OutputExistsError):
        write_export(path, capture(), MACHINE)
    assert path.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [path]

    assert write_export(path, capture(), MACHINE, overwrite=True) == path
    assert_same(nsan.open_trace(path), held(capture(), ExportOptions()))
    assert [left for left in tmp_path.iterdir() if left.name != "cache"] == [path]


def test_a_failed_write_leaves_what_was_there(tmp_path):
    path = tmp_path / "x.sqlite"
    write_export(path, capture(), MACHINE)
    before = path.read_bytes()
    broken = capture()
    broken["nvtx_ranges"] = broken["nvtx_ranges"].with_columns(start_ns=pl.lit(None, pl.Int64))
    with pytest.raises(SchemaMismatchError):
        write_export(path, broken, MACHINE, overwrite=True)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_database_has_its_name_only_when_it_is_whole(tmp_path):
    path = tmp_path / "x.sqlite"
    with writing_database(path) as database:
        database.create('CREATE TABLE "T" ("a" INTEGER)')
        database.insert("T", pl.DataFrame({"a": [1, 2]}))
        assert not path.exists()
    assert ask(path, 'SELECT sum("a") FROM "T"') == [(3,)]


def test_a_file_that_appears_meanwhile_is_not_replaced(tmp_path):
    path = tmp_path / "x.sqlite"
    with pytest.raises(OutputExistsError), writing_database(path):
        path.write_text("precious")
    assert path.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [path]


def test_the_log_of_the_database_before_is_not_taken_for_the_new_ones(tmp_path):
    path = tmp_path / "x.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE old (a)")
        connection.commit()
        log = path.with_name("x.sqlite-wal").read_bytes()
    path.with_name("x.sqlite-wal").write_bytes(log)
    write_export(path, {}, MACHINE, overwrite=True)
    with closing(sqlite3.connect(path)) as connection:
        names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert "META_DATA_EXPORT" in names
    assert "old" not in names


def test_a_folder_that_is_not_there_is_one_clear_error(tmp_path):
    with pytest.raises(OutputWriteError, match="No such file"):
        write_export(tmp_path / "no" / "x.sqlite", {}, MACHINE)


def test_the_same_capture_gives_the_same_bytes(write):
    first, second = (write(capture(), schema="3.25").read_bytes() for _ in range(2))
    assert first == second


def test_nothing_of_the_vendors_is_in_an_export(write):
    """No comment of its declarations, no label of its enumerations."""
    path = write(capture(), lazy=False)
    statements = "".join(sql for (sql,) in ask(path, "SELECT sql FROM sqlite_master"))
    assert "--" not in statements
    labels = dict(ask(path, "SELECT id, label FROM ENUM_CUDA_MEMCPY_OPER"))
    assert (labels[1], labels[11]) == ("htod", "um htod")
