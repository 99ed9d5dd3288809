"""Databases of nvprof and sessions of the Visual Profiler: two real ones, and built ones.

No real file with Unified Memory rows is public under a licence, so those are built here from the
real schema (versions 9 to 23 have the same table).
"""

from __future__ import annotations

import base64
import gzip
import sqlite3
from contextlib import closing

import polars as pl
import pytest
from exports import DATA

import nsan
from nsan.cli import main
from nsan.errors import DamagedExportError, NotAnExportError
from nsan.io.nvprof_sqlite import NvprofDatabase
from nsan.io.nvprof_tables import short_name
from nsan.schema import TABLES

NVPROF = DATA / "nvprof"
SESSIONS = {
    # kernels, copies, memsets, API calls, GPU name, GPU memory, process: counted with plain SQL
    "session_v9_gtx1070": (100, 3, 1, 504 + 171, "GeForce GTX 1070", 8504868864, 7003),
    "session_v12_k20m_openacc": (27, 87, 28, 28 + 511, "Tesla K20m", 4974313472, 32167),
}

UM = "CUPTI_ACTIVITY_KIND_UNIFIED_MEMORY_COUNTER"
ID = "_id_ INTEGER PRIMARY KEY AUTOINCREMENT"
SCHEMA = {
    "StringTable": "_id_ INTEGER PRIMARY KEY AUTOINCREMENT, value TEXT NOT NULL UNIQUE",
    "Version": "version INTEGER",
    UM: f"{ID}, counterKind INT NOT NULL, value INT NOT NULL, start INT NOT NULL, end INT NOT NULL, "
    "address INT NOT NULL, srcId INT NOT NULL, dstId INT NOT NULL, streamId INT NOT NULL, "
    "processId INT NOT NULL, flags INT NOT NULL",
    "CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL": f"{ID}, start INT, end INT, deviceId INT, contextId INT, "
    "streamId INT, gridX INT, gridY INT, gridZ INT, blockX INT, blockY INT, blockZ INT, "
    "correlationId INT, name INT",
    "CUPTI_ACTIVITY_KIND_RUNTIME": f"{ID}, cbid INT, start INT, end INT, processId INT, threadId INT, "
    "correlationId INT, returnValue INT",
    "CUPTI_ACTIVITY_KIND_MEMSET": f"{ID}, value INT, bytes INT, start INT, end INT, deviceId INT, "
    "contextId INT, streamId INT, correlationId INT, flags INT, memoryKind INT",
    "CUPTI_ACTIVITY_KIND_DEVICE": f"{ID}, id INT, name INT, globalMemorySize INT, "
    "globalMemoryBandwidth INT, numMultiprocessors INT, computeCapabilityMajor INT, "
    "computeCapabilityMinor INT",
}
T0 = 1_608_667_294_000_000_000
VA = 0x7F00_0000_0000
PID = 4242
HIGH = -(1 << 40)
"""A signed address of which the unsigned one has its highest bit set."""

# counterKind, value, start, end, address, srcId, dstId, streamId, processId, flags; copies before
# their fault, as in real files
UM_ROWS = [
    (1, 4096, T0 + 500, T0 + 600, VA, 0, 0, 0, PID, 2),
    (1, 61440, T0 + 600, T0 + 900, VA + 4096, 0, 0, 0, PID, 3),
    (4, 7, T0 + 100, T0 + 1000, VA, 0, 0, 0, PID, 1),
    (2, 8192, T0 + 5000, T0 + 5100, VA, 0, 0, 0, PID, 4),
    (8, 65536, T0 + 6000, T0 + 6500, HIGH, 0, 0, 0, PID, 1),
    (3, 0x401234, T0 + 4000, 0, VA + 8192, -1, -1, 0, PID, 1),
    (5, 4096, T0 + 7000, 0, VA, 1, 0, 0, PID, 1),
    (6, 0, T0 + 7100, T0 + 7600, VA, 0, 0, 0, PID, 0),
    (6, 0, T0 + 8100, T0 + 8900, VA, 0xFFFFFFFF, 0, 0, PID, 1),
    (7, 4096, T0 + 9000, 0, VA, 0, -1, 0, PID, 2),
]
KERNEL = (T0 + 120, T0 + 1100, 0, 1, 7, 60, 1, 1, 512, 1, 1, 11, 2)


def insert(connection, table, rows):
    for row in rows:
        marks = ", ".join("?" * len(row))
        names = [part.split()[0] for part in SCHEMA[table].split(", ")][-len(row) :]
        connection.execute(f"INSERT INTO {table} ({', '.join(names)}) VALUES ({marks})", row)


def database(path, um=UM_ROWS, *, without=(), more=()):
    with closing(sqlite3.connect(path)) as connection:
        for table, columns in SCHEMA.items():
            if table not in without:
                connection.execute(f"CREATE TABLE {table} ({columns})")
        strings = ["secret/prog --key", "_ZN2ns4loopIfEEvPT_", "GPU X"]
        connection.executemany(
            "INSERT INTO StringTable VALUES (?, ?)", [(0, "-- null --"), *enumerate(strings, 1)]
        )
        connection.execute("INSERT INTO Version VALUES (12)")
        if UM not in without:
            insert(connection, UM, um)
        insert(connection, "CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL", [KERNEL])
        calls = [(206, T0, T0 + 50, PID, -2, 10, 0), (9999, T0 + 60, T0 + 70, PID, 5, 11, 0)]
        insert(connection, "CUPTI_ACTIVITY_KIND_RUNTIME", calls)
        memset = (0, 1028, T0 + 80, T0 + 90, 0, 1, 7, 9, 0, 5)
        insert(connection, "CUPTI_ACTIVITY_KIND_MEMSET", [memset])
        insert(connection, "CUPTI_ACTIVITY_KIND_DEVICE", [(0, 3, 1 << 33, 256_000_000, 15, 6, 1)])
        for statement in more:
            connection.execute(statement)
        connection.commit()
    return path


def pieces(raw, size=5000):
    packed = (gzip.compress(raw[at : at + size], mtime=0) for at in range(0, len(raw), size))
    return "".join(f"<split>{base64.b64encode(piece).decode()}</split>" for piece in packed)


def session(path, body, *, uvm='uvmprofiling="true"', version=2):
    path.write_text(
        f'<?xml version="1.0"?>\n<session version="{version}" name="a.nvvp">\n'
        f'<executable file="/secret/prog" args="--key" {uvm}><envs>KEY=1</envs></executable>\n'
        f"<timelinepdm>\n{body}\n</timelinepdm>\n"
        "<analysispdm><pdm><split>never opened</split></pdm></analysispdm></session>\n"
    )
    return path


@pytest.fixture
def built(tmp_path):
    return database(tmp_path / "timeline.prof")


@pytest.fixture
def wrapped(tmp_path, built):
    return session(tmp_path / "a.nvvp", f"<pdm>\n{pieces(built.read_bytes())}</pdm>")


def tables(path):
    trace = nsan.open_trace(path)
    return {name: getattr(trace, name).collect() for name in TABLES}


def test_both_containers_give_equal_tables(built, wrapped):
    plain, in_session = tables(built), tables(wrapped)
    for name in TABLES:
        assert plain[name].equals(in_session[name]), name
    assert plain["migrations"].height == 4
    assert nsan.open_trace(built).info.kind == "nvprof-sqlite"
    assert nsan.open_trace(wrapped).info.kind == "visual-profiler"


def test_a_gzipped_session_is_read_too(tmp_path, wrapped):
    packed = tmp_path / "a.nvvp.gz"
    packed.write_bytes(gzip.compress(wrapped.read_bytes()))
    assert nsan.open_trace(packed).info.kind == "visual-profiler"


def test_times_count_from_the_earliest_event_and_rows_are_sorted(built):
    trace = nsan.open_trace(built)
    assert trace.info.session_start_utc_ns == T0
    assert trace.api_calls.collect()["start_ns"].to_list() == [0, 60]
    assert trace.gpu_faults.collect()["start_ns"].to_list() == [100]
    for name in ("migrations", "driver_events"):
        assert getattr(trace, name).collect()["start_ns"].is_sorted()
    assert nsan.summary(built)["duration_ns"] == 9000


def test_migrations_have_their_direction_from_the_kind_and_their_cause_from_the_flags(built):
    rows = tables(built)["migrations"]
    assert rows.select("start_ns", "end_ns", "bytes", "direction", "cause", "cause_id").rows() == [
        (500, 600, 4096, "htod", "coherence", 2),
        (600, 900, 61440, "htod", "prefetch", 3),
        (5000, 5100, 8192, "dtoh", "eviction", 4),
        (6000, 6500, 65536, "dtod", "user", 1),
    ]
    assert rows["va"].to_list() == [VA, VA + 4096, VA, (1 << 64) + HIGH]
    assert rows["device_id"].to_list() == [0] * 4
    assert rows["src_device_id"].null_count() == rows["dst_device_id"].null_count() == 4
    assert rows["pid"].unique().to_list() == [PID]


def test_faults_have_what_their_kind_stores(built):
    found = tables(built)
    gpu = found["gpu_faults"].row(0, named=True)
    assert (gpu["end_ns"], gpu["n_page_faults"], gpu["access"], gpu["access_id"]) == (
        1000,
        7,
        "read",
        1,
    )
    assert (gpu["device_id"], gpu["va"], gpu["sequence"]) == (0, VA, None)
    cpu = found["cpu_faults"].row(0, named=True)
    assert (cpu["start_ns"], cpu["va"], cpu["pc"]) == (4000, VA + 8192, 0x401234)


def test_driver_events_say_what_the_driver_did_and_to_whom(built):
    columns = ("start_ns", "end_ns", "kind", "by_cpu", "bytes", "device_id")
    assert tables(built)["driver_events"].select(columns).rows() == [
        (7000, 7000, "thrashing", True, 4096, 0),
        (7100, 7600, "throttling", False, None, 0),
        (8100, 8900, "throttling", True, None, None),
        (9000, 9000, "remote_map", True, 4096, 0),
    ]
    events = nsan.summary(built)["driver_events"]
    assert events == {"thrashing": 1, "throttling": 2, "remote_map": 1}


def test_kernels_calls_and_gpus_are_named(built):
    found = tables(built)
    kernel = found["kernels"].row(0, named=True)
    assert (kernel["name"], kernel["demangled"]) == ("loop", "_ZN2ns4loopIfEEvPT_")
    assert (kernel["grid"], kernel["block"], kernel["pid"]) == ([60, 1, 1], [512, 1, 1], PID)
    calls = found["api_calls"].select("name", "tid", "return_value").rows()
    assert calls == [("cudaMallocManaged_v6000", (1 << 32) - 2, 0), ("cbid 9999", 5, 0)]
    memset = found["memsets"].select("bytes", "kind", "kind_id").rows()
    assert memset == [(1028, "managed", 5)]
    device = found["devices"].row(0, named=True)
    assert (device["name"], device["memory_bytes_per_s"], device["n_sms"]) == (
        "GPU X",
        256 * 10**9,
        15,
    )
    assert device["compute_capability"] == "6.1"
    assert nsan.summary(built)["managed"]["n_calls"] == 1


@pytest.mark.parametrize(
    ("mangled", "name"),
    [
        ("_Z18calculate_velocityRK9ParticlesRS_if", "calculate_velocity"),
        (
            "_ZN6spfreq35SuperpixelFreqKernel_12Zero_chunkedIifEEvPKT_PT0_i",
            "SuperpixelFreqKernel_12Zero_chunked",
        ),
        ("_ZNK2at3addEv", "add"),
        ("_ZL5localPf", "local"),
        ("_Z99tooshort", "_Z99tooshort"),
        ("_Z", "_Z"),
        ("main", "main"),
        ("", ""),
    ],
)
def test_simple_mangled_names_are_made_readable(mangled, name):
    assert short_name(mangled) == name


def test_health_finds_the_built_rows_in_order(built):
    health = nsan.summary(built)["health"]
    assert {check["status"] for check in health} == {"ok"}, health
    assert "schema" not in {check["id"] for check in health}


def test_small_ranges_give_the_same_tables(built):
    parts = {name: [] for name in TABLES}
    with NvprofDatabase(built, rows_per_range=2) as source:
        source.copy_tables(lambda name, _, frame: parts[name].append(frame), lambda *_: None)
        assert source.n_source_rows() == len(UM_ROWS) + 1 + 2 + 1
    whole = tables(built)
    for name, frames in parts.items():
        n_rows = sum(frame.height for frame in frames)
        assert n_rows == whole[name].height, name


def test_nothing_private_is_kept(tmp_path, wrapped):
    out = tmp_path / "store"
    assert main(["import", str(wrapped), "-o", str(out), "-q"]) == 0
    kept = b"".join(path.read_bytes() for path in out.rglob("*") if path.is_file())
    for word in (b"secret", b"--key", b"KEY=1", b"/secret/"):
        assert word not in kept


def test_two_gpus_in_use_leave_the_gpu_of_a_migration_open(tmp_path):
    other = (*KERNEL[:2], 1, *KERNEL[3:])
    values = ", ".join(map(str, other))
    names = "start, end, deviceId, contextId, streamId, gridX, gridY, gridZ, blockX, blockY, blockZ, correlationId, name"
    more = [f"INSERT INTO CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL ({names}) VALUES ({values})"]
    found = tables(database(tmp_path / "a.prof", more=more))
    assert found["migrations"]["device_id"].null_count() == 4
    assert found["gpu_faults"]["device_id"].to_list() == [0]


def test_two_processes_leave_the_process_of_a_kernel_open(tmp_path):
    rows = [*UM_ROWS, (*UM_ROWS[2][:8], PID + 1, 1)]
    found = tables(database(tmp_path / "a.prof", rows))
    assert found["kernels"]["pid"].to_list() == [None]
    assert found["gpu_faults"]["pid"].to_list() == [PID, PID + 1]
    assert found["processes"]["pid"].to_list() == [PID, PID + 1]


def test_rows_without_a_time_or_of_an_unknown_kind_are_losses(tmp_path):
    rows = [
        *UM_ROWS,
        (1, 4096, 0, 0, VA, 0, 0, 0, PID, 2),
        (99, 1, T0 + 1, T0 + 2, VA, 0, 0, 0, PID, 0),
    ]
    trace = nsan.open_trace(database(tmp_path / "a.prof", rows))
    assert trace.info.losses == {UM: {"start": 1, "counterKind": 1}}
    assert trace.info.session_start_utc_ns == T0
    assert trace.migrations.collect().height == 5


def test_figures_of_unified_memory_are_unknown_where_a_row_does_not_tell_its_kind(tmp_path):
    """A migration may be among such rows: what the others add up to is no total."""
    path = database(tmp_path / "a.prof", [*UM_ROWS, (99, 1, T0 + 1, T0 + 2, VA, 0, 0, 0, PID, 0)])
    summary = nsan.summary(path)
    for kind, figure in (("migrations", "bytes"), ("gpu_faults", "n_rows"), ("cpu_faults", "n")):
        assert summary["capture"][kind] == "unknown"
        assert summary[kind][figure] is None
    assert summary["duration_ns"] is None
    assert summary["kernels"]["n"] == 1
    assert main([str(path)]) == 0


def test_a_database_that_lost_its_names_is_still_one_of_nvprof(tmp_path):
    path = database(tmp_path / "a.prof", more=["DROP TABLE StringTable"])
    trace = nsan.open_trace(path)
    assert trace.info.kind == "nvprof-sqlite"
    assert trace.migrations.collect().height == 4
    assert trace.kernels.collect()["name"].to_list() == [None]


def test_a_size_that_cannot_be_is_a_loss(tmp_path):
    rows = [*UM_ROWS, (1, -5, T0 + 1, T0 + 2, VA, 0, 0, 0, PID, 2)]
    path = database(tmp_path / "a.prof", rows)
    assert nsan.open_trace(path).info.losses == {UM: {"value": 1}}
    assert nsan.summary(path)["migrations"]["bytes"] is None


def answers(path):
    capture = nsan.open_trace(path).info.capture
    return {kind: (answer.answer, answer.reason) for kind, answer in capture.items()}


@pytest.mark.parametrize(
    ("uvm", "answer", "reason"),
    [
        ('uvmprofiling="true"', "recorded", "table is empty"),
        ('uvmprofiling="false"', "not_recorded", "was not profiled"),
        ("", "unknown", "table is empty"),
    ],
)
def test_a_session_says_whether_an_empty_table_means_none(uvm, answer, reason, tmp_path):
    raw = database(tmp_path / "empty.prof", []).read_bytes()
    path = session(tmp_path / "a.nvvp", f"<pdm>{pieces(raw)}</pdm>", uvm=uvm)
    found = answers(path)
    for kind in ("gpu_faults", "cpu_faults", "migrations"):
        assert found[kind][0] == answer
        assert reason in found[kind][1]
    assert found["kernels"][0] == "recorded"
    assert found["allocations"][0] == "not_recorded"


def test_a_database_alone_does_not_say_whether_an_empty_table_means_none(tmp_path):
    found = answers(database(tmp_path / "a.prof", []))
    assert found["gpu_faults"][0] == "unknown"
    assert "is empty, and nvprof does not store" in found["gpu_faults"][1]
    found = answers(database(tmp_path / "b.prof", without=[UM]))
    assert found["migrations"] == ("unknown", "the database has no Unified Memory table")


def test_one_row_of_any_kind_shows_that_all_were_profiled(tmp_path):
    found = answers(database(tmp_path / "a.prof", UM_ROWS[:1]))
    assert {found[kind][0] for kind in ("gpu_faults", "cpu_faults", "migrations")} == {"recorded"}


@pytest.mark.parametrize("name", SESSIONS)
def test_a_real_session_has_its_known_values(name):
    path = NVPROF / f"{name}.nvvp"
    kernels, copies, memsets, calls, gpu, memory, pid = SESSIONS[name]
    found = tables(path)
    counts = {t: found[t].height for t in ("kernels", "copies", "memsets", "api_calls")}
    assert counts == {"kernels": kernels, "copies": copies, "memsets": memsets, "api_calls": calls}
    assert found["devices"].select("name", "total_memory_bytes").rows() == [(gpu, memory)]
    assert found["kernels"]["pid"].unique().to_list() == [pid]
    assert found["kernels"]["name"].str.contains(r"^\w+$").all()
    assert {found[t].height for t in ("gpu_faults", "cpu_faults", "migrations")} == {0}
    summary = nsan.summary(path)
    for kind in ("gpu_faults", "cpu_faults", "migrations"):
        assert summary["capture"][kind] == "recorded"
        texts = [c["text"] for c in summary["health"] if c["id"] == f"{kind}_recorded"]
        assert "Unified Memory table is empty" in texts[0]


def test_the_times_of_a_real_session_are_those_of_its_database():
    trace = nsan.open_trace(NVPROF / "session_v9_gtx1070.nvvp")
    first = trace.kernels.head(1).collect().row(0, named=True)
    start = trace.info.session_start_utc_ns
    assert (start + first["start_ns"], start + first["end_ns"]) == (
        1502241277942636184,
        1502241277942638552,
    )
    firsts = [
        getattr(trace, t).collect()["start_ns"].min() for t in ("kernels", "copies", "api_calls")
    ]
    assert min(firsts) == 0


def refusal(path, error=NotAnExportError):
    with pytest.raises(error) as caught:
        nsan.open_trace(path)
    assert path.name in str(caught.value)
    return str(caught.value)


def test_a_session_without_data_says_so(tmp_path):
    for body in ("", "<pdm></pdm>", "<pdm>\n</pdm>"):
        assert "without data" in refusal(session(tmp_path / "a.nvvp", body))


def test_a_session_in_the_old_format_is_refused(tmp_path):
    packed = base64.b64encode(gzip.compress(b"\x0a\x10NVPROF" + bytes(1000))).decode()
    path = session(tmp_path / "old.nvvp", f"<pdm>{packed}</pdm>", version=1)
    assert "old binary format" in refusal(path)


def test_an_old_binary_file_is_refused(tmp_path):
    path = tmp_path / "old.nvprof"
    path.write_bytes(b"\x0a\x10\x00\x01" + bytes(1000))
    assert "before 2016" in refusal(path)


def test_a_session_of_several_captures_is_refused(tmp_path, built):
    pdm = f"<pdm>{pieces(built.read_bytes())}</pdm>"
    assert "several captures" in refusal(session(tmp_path / "a.nvvp", pdm * 2))


def test_a_session_with_entities_is_refused(tmp_path):
    path = tmp_path / "bomb.nvvp"
    levels = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10}">' for n in range(1, 9))
    path.write_text(
        f'<?xml version="1.0"?><!DOCTYPE session [<!ENTITY e0 "x">{levels}]>'
        '<session version="2"><timelinepdm><pdm>&e8;</pdm></timelinepdm></session>'
    )
    assert "declarations" in refusal(path)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda text: text.replace("<split>H4sI", "<split>H4!I", 1), "cannot be unpacked"),
        (lambda text: text.replace("<split>H4sI", "<split>AAAA", 1), "cannot be unpacked"),
        (
            lambda text: text.replace("</split>", "</split><!--", 1).replace("<split>", "-->", 2),
            "XML is broken",
        ),
        (lambda text: text[: len(text) // 2], "XML is broken"),
        (lambda text: text.replace("</split>", "QUJD</split>", 1), "data"),
        (
            lambda text: text[: text.index("</split>") - 40] + text[text.index("</split>") :],
            "cut short",
        ),
    ],
)
def test_a_damaged_session_is_one_clear_error(change, what, wrapped):
    wrapped.write_text(change(wrapped.read_text()))
    message = refusal(wrapped, DamagedExportError)
    assert what in message
    assert "nsys export" not in message


def test_a_session_that_lacks_a_piece_is_damaged(tmp_path, built):
    raw = built.read_bytes()
    path = session(tmp_path / "a.nvvp", f"<pdm>{pieces(raw[:-5000])}</pdm>")
    assert "cut short" in refusal(path, DamagedExportError)


def test_a_piece_that_grows_without_end_is_refused(tmp_path):
    bomb = base64.b64encode(gzip.compress(b"SQLite format 3\0" + bytes(64 << 20))).decode()
    path = session(tmp_path / "a.nvvp", f"<pdm><split>{bomb}</split></pdm>")
    assert "far larger" in refusal(path, DamagedExportError)


def test_a_refused_session_leaves_no_scratch_file(tmp_path, monkeypatch, wrapped):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    nsan.open_trace(wrapped)
    wrapped.write_text(wrapped.read_text()[:1500])
    refusal(wrapped, DamagedExportError)
    assert list(scratch.iterdir()) == []


def test_a_database_of_another_program_in_a_session_is_refused(tmp_path):
    other = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE users (a)")
        connection.commit()
    path = session(tmp_path / "a.nvvp", f"<pdm>{pieces(other.read_bytes())}</pdm>")
    assert "no table of nvprof" in refusal(path)


def test_the_filter_and_the_tables_of_a_session_work_together(wrapped):
    part = nsan.open_trace(wrapped).filter(time=(0, 2000))
    assert part.migrations.select(pl.col("bytes").sum()).collect().item() == 65536
