"""Eight real exports, whole: nsan's figures against plain SQL and Python that share no code with it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import PurePosixPath

import exports
import pytest
from exports import (
    CPU_FAULTS,
    GPU_FAULTS,
    GRAPH,
    KERNEL,
    MEMCPY,
    MEMSET,
    MIB,
    NVTX,
    RUNTIME,
    ask,
)

import nsan
import nsan.cli

H100 = "h100_2proc_2gpu_nvtx_2026.2.1"
NO_CUDA = "nocuda_easycuda_2023.4.4"
NO_KERNELS = "nokernels_rtx4060_2025.5.1"
SAXPY = "nonlazy_saxpy_mpi_a100_2022.2.1"
REDUCED = "reduced_6tables_2026.1.1"
WSL = "rtx4060ti_2026.1.1"
LAZY = "um_easycuda_rtx4060l_2023.4.4_lazy"
NONLAZY = "um_easycuda_rtx4060l_2023.4.4_nonlazy"

UM = (LAZY, NONLAZY)
WITHOUT_UM = (H100, NO_CUDA, NO_KERNELS, SAXPY, REDUCED, WSL)

RANGES, MARKS = (59, 60, 70, 71), (34, 65)
DIRECTIONS = {11: "htod", 12: "dtoh", 13: "dtod"}
CAUSES = {0: "unknown", 1: "user", 2: "coherence", 3: "prefetch", 4: "eviction"}

every_export = pytest.mark.parametrize("name", exports.real_traces())
every_um_export = pytest.mark.parametrize("name", UM)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("real")


@pytest.fixture(scope="module")
def opened(folder):
    """Open a real export, once for all tests: path, summary, trace."""

    @cache
    def open_once(name):
        path = exports.unpack(name, folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NSAN_CACHE_DIR", str(folder / "cache"))
            return path, nsan.summary(path), nsan.open_trace(path)

    return open_once


@pytest.fixture
def nsan_command(folder, monkeypatch, capsys):
    """Run a command on what `opened` has opened: status, stdout, stderr."""
    monkeypatch.setenv("NSAN_CACHE_DIR", str(folder / "cache"))

    def run(*arguments):
        status = nsan.cli.main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run


def select(path, table, *wanted, where="1"):
    """Ask for columns; one that is absent is null, an absent table has no rows."""
    present = {name for (name,) in ask(path, f"SELECT name FROM pragma_table_info('{table}')")}
    if not present:
        return []
    columns = ", ".join(f'"{name}"' if name in present else "NULL" for name in wanted)
    return ask(path, f'SELECT {columns} FROM "{table}" WHERE {where}')


def union(intervals):
    """Time covered by intervals, the simplest way."""
    covered, reached = 0, None
    for start, end in sorted(intervals):
        begin = start if reached is None else max(start, reached)
        covered += max(0, end - begin)
        reached = end if reached is None else max(reached, end)
    return covered


def busy(rows):
    """Union per GPU of (device, start, end), added up over GPUs."""
    return sum(
        union((start, end) for other, start, end in rows if other == device)
        for device in {device for device, _, _ in rows}
    )


def pid_of(global_id):
    return (global_id // (1 << 24)) % (1 << 24)


def is_um(kinds=DIRECTIONS):
    return f"copyKind IN ({', '.join(map(str, kinds))})"


def of_types(types):
    return f"eventType IN ({', '.join(map(str, types))})"


def events(path, *columns):
    """Columns of every event that nsan reads."""
    rows = []
    for table in (GPU_FAULTS, CPU_FAULTS, MEMCPY, MEMSET, KERNEL, GRAPH, RUNTIME):
        rows += select(path, table, *columns)
    return rows + select(path, NVTX, *columns, where=of_types(RANGES + MARKS))


def test_all_eight_exports_are_here():
    assert set(exports.real_traces()) == {*UM, *WITHOUT_UM}


@every_export
def test_migrations_equal_sql(name, opened):
    path, summary, _ = opened(name)
    ours = summary["migrations"]
    if name == WSL:  # nsys says that it could not trace them: not 0, but unknown
        assert set(ours.values()) == {None}
        return
    rows = select(
        path, MEMCPY, "bytes", "copyKind", "migrationCause", "virtualAddress", where=is_um()
    )
    assert ours["n"] == len(rows)
    assert ours["bytes"] == sum(size for size, *_ in rows)
    for kind, way in DIRECTIONS.items():
        assert ours[f"{way}_bytes"] == sum(row[0] for row in rows if row[1] == kind)
    by_cause = {}
    for size, _, cause, _ in rows:
        figures = by_cause.setdefault(CAUSES[cause], {"n": 0, "bytes": 0})
        figures["n"] += 1
        figures["bytes"] += size
    assert ours["by_cause"] == by_cause
    places = [va for *_, va in rows]
    assert ours["min_va"] == (f"0x{min(places):016x}" if places else None)
    assert ours["max_va"] == (f"0x{max(places):016x}" if places else None)
    spans = select(path, MEMCPY, "deviceId", "start", "end", where=is_um())
    assert ours["busy_ns"] == busy(spans)


@every_export
def test_groups_of_migrations_equal_sql(name, opened):
    path, summary, _ = opened(name)
    if name == WSL:
        assert summary["migrations"]["groups"] is None
        return
    rows = (
        ask(
            path,
            f"""
            SELECT copyKind, migrationCause, deviceId, globalPid / 16777216 % 16777216, count(*),
                   sum(bytes), min(bytes), max(bytes), min(virtualAddress), max(virtualAddress)
            FROM {MEMCPY} WHERE {is_um()} GROUP BY 1, 2, 3, 4
            """,
        )
        if select(path, MEMCPY, "globalPid")
        else []
    )
    expected = {
        (DIRECTIONS[kind], CAUSES[cause], device, pid): (
            *figures,
            f"0x{low:016x}",
            f"0x{high:016x}",
        )
        for kind, cause, device, pid, *figures, low, high in rows
    }
    keys = ("direction", "cause", "device_id", "pid")
    figures = ("n", "bytes", "min_bytes", "max_bytes", "min_va", "max_va")
    ours = {
        tuple(group[key] for key in keys): tuple(group[figure] for figure in figures)
        for group in summary["migrations"]["groups"]
    }
    assert ours == expected
    assert len(expected) == (4 if name in UM else 0)


@every_export
def test_kernels_and_their_busy_time_equal_sql(name, opened):
    path, summary, _ = opened(name)
    kernels = select(path, KERNEL, "deviceId", "start", "end")
    graphs = select(path, GRAPH, "deviceId", "start", "end")
    assert summary["kernels"] == {
        "n": len(kernels),
        "n_graph_launches": len(graphs),
        "busy_ns": busy(kernels + graphs),
    }


@every_export
def test_duration_is_last_end_minus_first_start(name, opened):
    path, summary, _ = opened(name)
    times = [ns for row in events(path, "start", "end") for ns in row if ns is not None]
    found = (summary["first_ns"], summary["last_ns"], summary["duration_ns"])
    if name == NO_CUDA:
        assert times == []
        assert found == (None, None, None)
    else:
        assert found == (min(times), max(times), max(times) - min(times))


@every_export
def test_rows_per_table_equal_sql(name, opened, nsan_command):
    path, _, trace = opened(name)
    status, text, _ = nsan_command("info", path, "--json")
    assert status == 0
    rows = json.loads(text)["tables"]
    expected = {
        "gpu_faults": len(select(path, GPU_FAULTS, "start")),
        "cpu_faults": len(select(path, CPU_FAULTS, "start")),
        "migrations": len(select(path, MEMCPY, "start", where=is_um())),
        "copies": len(select(path, MEMCPY, "start", where=f"NOT {is_um()}")),
        "memsets": len(select(path, MEMSET, "start")),
        "kernels": len(select(path, KERNEL, "start") + select(path, GRAPH, "start")),
        "api_calls": len(select(path, RUNTIME, "start")),
        "nvtx_ranges": len(select(path, NVTX, "start", where=of_types(RANGES))),
        "nvtx_marks": len(select(path, NVTX, "start", where=of_types(MARKS))),
    }
    assert {table: rows[table] for table in expected} == expected
    assert {table: getattr(trace, table).collect().height for table in expected} == expected


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        (H100, {"kernels": 3442, "copies": 904, "memsets": 22, "nvtx_ranges": 16782}),
        (NO_CUDA, {"kernels": 0, "api_calls": 0, "copies": 0}),
        (NO_KERNELS, {"kernels": 0, "copies": 0, "memsets": 1, "api_calls": 23}),
        (SAXPY, {"kernels": 5, "copies": 15, "api_calls": 95, "nvtx_ranges": 22, "nvtx_marks": 0}),
        (REDUCED, {"kernels": 400, "api_calls": 400, "copies": 0, "nvtx_ranges": 0}),
        (WSL, {"kernels": 4, "copies": 12, "api_calls": 44}),
        (LAZY, {"kernels": 1, "migrations": 72, "copies": 0, "api_calls": 7}),
        (NONLAZY, {"kernels": 1, "migrations": 72, "copies": 0, "api_calls": 7}),
    ],
)
def test_rows_per_table_are_those_that_the_readme_lists(name, counts, opened):
    _, _, trace = opened(name)
    assert {table: getattr(trace, table).collect().height for table in counts} == counts


@every_export
def test_copies_and_memsets_keep_their_bytes(name, opened):
    path, _, trace = opened(name)
    copies = select(path, MEMCPY, "copyKind", "bytes", where=f"NOT {is_um()}")
    assert Counter(trace.copies.select("kind_id", "bytes").collect().rows()) == Counter(copies)
    memsets = select(path, MEMSET, "memKind", "bytes")
    assert Counter(trace.memsets.select("kind_id", "bytes").collect().rows()) == Counter(memsets)


@every_export
def test_names_are_those_of_the_string_table(name, opened):
    path, _, trace = opened(name)
    texts = dict(select(path, "StringIds", "id", "value"))

    kernels = Counter(texts[i] for (i,) in select(path, KERNEL, "demangledName"))
    assert Counter(trace.kernels.collect()["demangled"]) == kernels
    calls = Counter(texts[i] for (i,) in select(path, RUNTIME, "nameId"))
    assert Counter(trace.api_calls.collect()["name"]) == calls
    ranges = Counter(
        own if own is not None else texts[registered]
        for own, registered in select(path, NVTX, "text", "textId", where=of_types(RANGES))
    )
    assert Counter(trace.nvtx_ranges.collect()["name"]) == ranges


@every_export
def test_gpus_are_those_that_events_name(name, opened):
    path, summary, _ = opened(name)
    used = set()
    for table in (GPU_FAULTS, MEMCPY, MEMSET, KERNEL, GRAPH):
        used |= {device for (device,) in select(path, table, "deviceId")}
    assert {device["device_id"] for device in summary["devices"]} == used
    described = select(path, exports.GPU, "name", "totalMemory")
    found = [(device["name"], device["total_memory_bytes"]) for device in summary["devices"]]
    assert found == (described or [(None, None)] * len(used))


@every_export
def test_processes_are_those_that_have_events(name, opened):
    path, summary, _ = opened(name)
    ids = {i for row in events(path, "globalPid", "globalTid") for i in row if i is not None}
    processes = {process["pid"]: process["name"] for process in summary["processes"]}
    assert set(processes) == {pid_of(i) for i in ids}
    programs = {
        pid_of(i): PurePosixPath(program).name
        for i, program in select(path, "PROCESSES", "globalPid", "name")
        if i is not None
    }
    assert processes == {pid: programs.get(pid) for pid in processes}


@pytest.mark.parametrize(
    ("name", "pids"),
    [
        (H100, {111, 112}),
        (NO_CUDA, set()),
        (NO_KERNELS, {2568473}),
        (SAXPY, {1230493}),
        (WSL, {17068}),
        (LAZY, {12082}),
        (NONLAZY, {12082}),
    ],
)
def test_a_process_has_the_number_that_the_system_gave_it(name, pids, opened):
    assert {process["pid"] for process in opened(name)[1]["processes"]} == pids


# --- What the README of the Unified Memory capture lists -----------------------------------------

KERNEL_SPAN = (265_249_430, 267_587_151)
PREFETCHED = [61_440, 126_976, 258_048, 520_192, 1_044_480]


@every_um_export
def test_the_kernel_of_the_um_capture(name, opened):
    _, summary, trace = opened(name)
    kernel = trace.kernels.collect().row(0, named=True)
    assert (kernel["start_ns"], kernel["end_ns"]) == KERNEL_SPAN
    assert (kernel["device_id"], kernel["context_id"], kernel["stream_id"]) == (0, 1, 7)
    assert kernel["pid"] == 12082
    assert summary["kernels"] == {"n": 1, "n_graph_launches": 0, "busy_ns": 2_337_721}


@every_um_export
def test_the_totals_of_the_um_capture(name, opened):
    _, summary, _ = opened(name)
    ours = summary["migrations"]
    assert (ours["n"], ours["bytes"]) == (72, 12 * MIB)
    assert (ours["htod_bytes"], ours["dtoh_bytes"], ours["dtod_bytes"]) == (8_388_608, 4_194_304, 0)
    assert (ours["min_va"], ours["max_va"]) == ("0x0000748a9c000000", "0x0000748a9c701000")
    found = {(g["direction"], g["cause"]): (g["n"], g["bytes"]) for g in ours["groups"]}
    assert found == {
        ("htod", "coherence"): (24, 24 * 4096),
        ("htod", "prefetch"): (24, 8_388_608 - 24 * 4096),
        ("dtoh", "coherence"): (12, 12 * 4096),
        ("dtoh", "prefetch"): (12, 4_194_304 - 12 * 4096),
    }
    assert {(g["device_id"], g["pid"]) for g in ours["groups"]} == {(0, 12082)}


@every_um_export
def test_sizes_per_cause_of_the_um_capture(name, opened):
    _, _, trace = opened(name)
    rows = trace.migrations.select("cause", "bytes").collect().rows()
    assert {size for cause, size in rows if cause == "coherence"} == {4096}
    assert sorted({size for cause, size in rows if cause == "prefetch"}) == PREFETCHED


@every_um_export
@pytest.mark.parametrize(("way", "n_blocks"), [("htod", 4), ("dtoh", 2)])
def test_the_driver_doubles_what_it_brings_within_a_block(name, way, n_blocks, opened):
    """64, 64, 128, 256, 512, 1024 KiB: a faulted page and the prefetch beside it, six times."""
    _, _, trace = opened(name)
    blocks = {}
    for va, size, direction in trace.migrations.select("va", "bytes", "direction").collect().rows():
        if direction == way:
            blocks.setdefault(va // (2 * MIB), []).append(size)
    assert len(blocks) == n_blocks
    for sizes in blocks.values():
        assert sizes[0::2] == [4096] * 6
        pushes = [
            (fault + prefetch) // 1024 for fault, prefetch in zip(*[iter(sizes)] * 2, strict=True)
        ]
        assert pushes == [64, 64, 128, 256, 512, 1024]


@every_um_export
def test_migrations_to_the_gpu_lie_in_the_kernel_and_those_back_after_it(name, opened):
    _, _, trace = opened(name)
    rows = trace.migrations.select("start_ns", "end_ns", "direction").collect().rows()
    start, end = KERNEL_SPAN
    to_gpu = [(a, b) for a, b, way in rows if way == "htod"]
    back = [(a, b) for a, b, way in rows if way == "dtoh"]
    assert (len(to_gpu), len(back)) == (48, 24)
    assert all(start < a < b < end for a, b in to_gpu)
    assert all(end < a < b for a, b in back)
    during = nsan.summary(trace.filter(time=KERNEL_SPAN))["migrations"]
    assert (during["htod_bytes"], during["dtoh_bytes"]) == (8 * MIB, 0)


@every_um_export
def test_managed_allocations_are_known_by_their_calls(name, opened):
    """Memory usage was not recorded; the two API calls were."""
    assert opened(name)[1]["managed"] == {"n_allocations": None, "bytes": None, "n_calls": 2}


@every_um_export
def test_faults_of_the_um_capture_are_not_recorded_never_zero(name, opened):
    path, summary, _ = opened(name)
    options = "COLLECT_UVM_%_PAGE_FAULTS"
    stored = select(path, "META_DATA_CAPTURE", "value", where=f"name LIKE '%{options}'")
    assert stored == [("false",), ("false",)]
    assert summary["capture"]["gpu_faults"] == "not_recorded"
    assert summary["capture"]["cpu_faults"] == "not_recorded"
    assert set(summary["gpu_faults"].values()) == {None}
    assert set(summary["cpu_faults"].values()) == {None}


def test_lazy_and_full_export_of_one_report_give_one_summary(opened):
    lazy, full = opened(LAZY)[1], opened(NONLAZY)[1]
    assert lazy["source"] == f"{LAZY}.sqlite"
    assert full["source"] == f"{NONLAZY}.sqlite"
    assert lazy | {"source": None} == full | {"source": None}


def test_lazy_and_full_export_of_one_report_have_the_same_rows(opened):
    lazy, full = opened(LAZY)[2], opened(NONLAZY)[2]
    for table in ("migrations", "copies", "kernels", "api_calls", "nvtx_ranges", "allocations"):
        assert getattr(lazy, table).collect().rows() == getattr(full, table).collect().rows()


# --- What an export lacks is said ----------------------------------------------------------------

YES, NO, UNKNOWN = "recorded", "not_recorded", "unknown"


KINDS = ("gpu_faults", "cpu_faults", "migrations", "allocations", "nvtx", "kernels")


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        (H100, (NO, NO, YES, NO, YES, YES)),
        # CUDA was traced and the lazy export has no event of it: a true zero.
        (NO_CUDA, (NO, NO, YES, NO, NO, YES)),
        (NO_KERNELS, (NO, NO, YES, NO, YES, YES)),
        # No stored options. Empty fault tables prove nothing; CUDA events prove CUDA trace.
        (SAXPY, (UNKNOWN, UNKNOWN, YES, UNKNOWN, YES, YES)),
        (REDUCED, (UNKNOWN, UNKNOWN, YES, UNKNOWN, UNKNOWN, YES)),
        # The option of CUDA trace says false; its events are there all the same.
        # ... and nsys says in a message that it cannot trace Unified Memory there.
        (WSL, (NO, NO, NO, NO, YES, YES)),
        (LAZY, (NO, NO, YES, NO, NO, YES)),
        (NONLAZY, (NO, NO, YES, NO, NO, YES)),
    ],
)
def test_what_was_recorded_has_three_answers(name, answers, opened):
    assert opened(name)[1]["capture"] == dict(zip(KINDS, answers, strict=True))


@every_export
def test_a_figure_is_null_exactly_where_it_was_not_recorded(name, opened):
    _, summary, _ = opened(name)
    first = {
        "gpu_faults": summary["gpu_faults"]["n_rows"],
        "cpu_faults": summary["cpu_faults"]["n"],
        "migrations": summary["migrations"]["n"],
        "allocations": summary["managed"]["n_allocations"],
        "kernels": summary["kernels"]["n"],
    }
    for kind, figure in first.items():
        assert (figure is None) == (summary["capture"][kind] != "recorded"), kind


@every_export
def test_the_status_tells_whether_there_was_unified_memory(name, opened, nsan_command):
    path, _, _ = opened(name)
    for command in ("summary", "migrations", "faults"):
        status, _, said = nsan_command(command, path)
        assert status == (0 if name in UM else 3), command
        assert ("no Unified Memory data" in said) == (name not in UM), command
    status, _, said = nsan_command("info", path)
    assert (status, said) == (0, "")


@every_export
def test_faults_that_are_not_there_come_with_the_switch_that_records_them(
    name, opened, nsan_command
):
    _, text, _ = nsan_command("faults", "-q", opened(name)[0])
    if name == WSL:  # no switch helps there
        assert text.count("could not trace Unified Memory on this platform") == 2
        return
    assert "--cuda-um-gpu-page-faults=true" in text
    assert "--cuda-um-cpu-page-faults=true" in text
    assert ("not recorded" in text) == (name not in (SAXPY, REDUCED))


def test_a_message_of_the_profiler_about_unified_memory_is_passed_on(opened):
    _, summary, _ = opened(WSL)
    said = " ".join(check["text"] for check in summary["health"] if check["status"] == "warn")
    assert "Unified Memory cannot be traced" in said


AFTERWARDS = """
import importlib, pkgutil, sys, types
import nsan, nsan.cli
path = sys.argv[1]
nsan.cli.main(["summary", "-q", path, "-o", sys.argv[2]])
for module in pkgutil.walk_packages(nsan.__path__, "nsan."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
hidden = [name for name in nsan.__all__ if isinstance(getattr(nsan, name), types.ModuleType)]
print(hidden, nsan.summary(path)["migrations"]["n"])
"""


def test_no_module_hides_a_public_function(opened, folder, monkeypatch, tmp_path):
    """Whatever was run and imported before, `nsan.summary` is the function."""
    monkeypatch.setenv("NSAN_CACHE_DIR", str(folder / "cache"))
    done = subprocess.run(
        [sys.executable, "-c", AFTERWARDS, str(opened(LAZY)[0]), str(tmp_path / "out.txt")],
        capture_output=True,
        text=True,
        cwd=exports.REPOSITORY,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("[] 72\n", "")


# --- Inputs are read, never written --------------------------------------------------------------


def state_of(folder):
    """Names, bytes and times of all files in a folder."""
    return {
        path.name: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in folder.iterdir()
    }


@every_export
def test_no_command_changes_an_export_or_leaves_a_file_beside_it(
    name, tmp_path, monkeypatch, capsys
):
    folder, elsewhere = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    path = str(exports.unpack(name, folder))
    before = state_of(folder)
    status = 0 if name in UM else 3
    commands = [
        (["summary", path], status),
        (["summary", path, "--filter-time", "0/300ms", "--json"], status),
        (["info", path, "--format", "csv"], 0),
        (["migrations", path, "--format", "parquet", "-o", "migrations.parquet"], status),
        (["faults", path, "--format", "markdown"], status),
        (["import", path, "-o", "store"], 0),
        (["migrations", "store"], status),
    ]
    for command, expected in commands:
        assert nsan.cli.main(command) == expected, command
        assert state_of(folder) == before, command
    assert {found.name for found in elsewhere.iterdir()} == {"migrations.parquet", "store"}
    capsys.readouterr()
