"""Text and CSV of ``nvprof --print-gpu-trace``: real traces with known values, and broken ones.

The known values stand in ``tests/data/nvprof/README.md``; they were counted there from the text,
not by nsan. Each trace is also counted here by plain patterns over its lines.
"""

from __future__ import annotations

import gzip
import re
import tarfile
from pathlib import Path

import polars as pl
import pytest
from exports import DATA, MIB, REPOSITORY

import nsan
from nsan.cli import main
from nsan.errors import DamagedExportError, NotAnExportError
from nsan.io.nvprof_text import NvprofText
from nsan.schema import TABLES

NVPROF = DATA / "nvprof"

# GPU-fault rows, sum and max of the count, HtoD rows and MiB, DtoH rows and MiB, CPU faults, thrash, throttle
HOTSPOT = {
    "x86_hotspot_11_64": (32, 1549, 71, 12, 0.1953, 11, 0.1445, 8, 16, 2),
    "x86_hotspot_11_128": (3, 21, 12, 8, 0.25, 3, 0.0625, 4, 0, 0),
    "x86_hotspot_11_256": (3, 53, 37, 41, 1.0, 7, 0.25, 8, 0, 0),
    "x86_hotspot_11_512": (23, 1528, 97, 59, 2.1992, 30, 1.125, 28, 16, 1),
    "x86_hotspot_11_1024": (20, 343, 71, 86, 8.1914, 42, 4.1172, 52, 16, 0),
    "x86_hotspot_11_2048": (72, 1368, 59, 792, 32.0625, 98, 16.0625, 145, 0, 0),
    "x86_hotspot_11_4096": (228, 3473, 59, 3655, 128, 384, 64, 576, 0, 0),
    "x86_hotspot_11_8192": (867, 15302, 104, 12156, 512, 1536, 256, 2304, 0, 0),
    "p9_hotspot_11_64": (1, 256, 256, 1, 0.0625, 1, 0.0625, 2, 0, 0),
    "p9_hotspot_11_128": (3, 560, 256, 2, 0.125, 1, 0.0625, 3, 0, 0),
    "p9_hotspot_11_256": (4, 268, 256, 7, 0.5, 4, 0.25, 7, 0, 0),
    "p9_hotspot_11_512": (8, 1218, 256, 15, 2.0, 8, 1.0, 11, 0, 0),
    "p9_hotspot_11_1024": (21, 3241, 256, 40, 8.125, 22, 4.125, 38, 0, 0),
    "p9_hotspot_11_2048": (73, 8570, 256, 143, 32, 80, 16, 144, 0, 0),
    "p9_hotspot_11_4096": (251, 20611, 256, 499, 128, 320, 64, 576, 0, 0),
    "p9_hotspot_11_8192": (871, 33121, 235, 1754, 512, 1280, 256, 2304, 0, 0),
}
# GPU-fault rows, sum and max of the count, HtoD rows, DtoH rows, CPU faults
BFS = {
    "x86_bfs_111100_graph4096": (1, 8, 8, 3, 0, 1),
    "x86_bfs_111100_graph65536": (4, 27, 22, 20, 0, 7),
    "x86_bfs_111100_graph1MW.6": (17, 84, 27, 223, 0, 39),
    "p9_bfs_111100_graph4096": (1, 75, 75, 1, 0, 1),
    "p9_bfs_111100_graph65536": (3, 259, 202, 6, 0, 7),
    "p9_bfs_111100_graph1MW.6": (17, 472, 202, 102, 0, 39),
}
# GPU-fault rows, sum and max of the count, HtoD rows
GAUSSIAN = {"x86": (449, 2989, 213, 3763), "p9": (424, 9726, 256, 1328)}

PRINTED = {
    "gpu_faults": r"\[Unified Memory GPU page faults\]$",
    "cpu_faults": r"\[Unified Memory CPU page faults\]$",
    "migrations": r"\[Unified Memory Memcpy (HtoD|DtoH)\]$",
    "driver_events": r"\[Unified Memory page (thrash|throttle)\]$",
    "copies": r"\[CUDA memcpy \w+\]$",
    "kernels": r"^ *[\d.]+m?s .*\(\d+ \d+ \d+\) +\(\d+ \d+ \d+\) .*\) \[\d+\]$",
    "allocations": r"in api range: 0x",
}


def log(name):
    return NVPROF / f"v100_{name}.log.gz"


def read(path, **options):
    """All tables of a trace, without a store; and what is known about it."""
    parts = {name: [table.empty().collect()] for name, table in TABLES.items()}
    with NvprofText(path, **options) as source:
        source.copy_tables(lambda name, _, frame: parts[name].append(frame), lambda *_: None)
        info = source.info()
    return {name: pl.concat(frames) for name, frames in parts.items()}, info


def printed(text):
    """Rows by table, counted by patterns over the lines."""
    lines = text.splitlines()
    return {name: sum(bool(re.search(p, line)) for line in lines) for name, p in PRINTED.items()}


def known(tables):
    """The figures of the README, out of the tables."""
    faults, copies, events = (tables[n] for n in ("gpu_faults", "migrations", "driver_events"))
    ways = [copies.filter(pl.col("direction") == way)["bytes"] for way in ("htod", "dtoh")]
    return (
        faults.height,
        faults["n_page_faults"].sum(),
        faults["n_page_faults"].max(),
        *(figure for way in ways for figure in (len(way), round(way.sum() / MIB, 4))),
        tables["cpu_faults"].height,
        *((events["kind"] == kind).sum() for kind in ("thrashing", "throttling")),
    )


@pytest.mark.parametrize("name", HOTSPOT)
def test_a_hotspot_log_has_its_known_values(name):
    trace = nsan.open_trace(log(name))
    tables = {table: getattr(trace, table).collect() for table in TABLES}
    assert known(tables) == HOTSPOT[name]
    with gzip.open(log(name), "rt") as file:
        assert {n: tables[n].height for n in PRINTED} == printed(file.read())


@pytest.mark.parametrize("name", BFS)
def test_a_bfs_log_has_its_known_values(name):
    tables, _ = read(log(name))
    rows, total, largest, htod, _, dtoh, _, cpu, *_ = known(tables)
    assert (rows, total, largest, htod, dtoh, cpu) == BFS[name]
    with gzip.open(log(name), "rt") as file:
        assert {n: tables[n].height for n in PRINTED} == printed(file.read())


@pytest.mark.parametrize("host", GAUSSIAN)
def test_75_gaussian_logs_add_up_to_their_known_values(host, tmp_path):
    with tarfile.open(NVPROF / f"v100_{host}_gaussian_all.tar.gz") as archive:
        # Python before 3.11.4 has no filters; the archive is one of ours.
        options = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(tmp_path, **options)
    logs = sorted(tmp_path.rglob("*.log"))
    assert len(logs) == 75
    found = []
    for path in logs:
        tables, _ = read(path)
        assert {n: tables[n].height for n in PRINTED} == printed(path.read_text()), path.name
        found.append(known(tables))
    rows, total, largest, htod, *_ = zip(*found, strict=True)
    largest = max(n for n in largest if n is not None)
    assert (sum(rows), sum(total), largest, sum(htod)) == GAUSSIAN[host]


def test_the_order_of_the_lines_is_kept_where_starts_are_coarse():
    trace = nsan.open_trace(log("x86_hotspot_11_64"))
    with gzip.open(log("x86_hotspot_11_64"), "rt") as file:
        lines = file.read().splitlines()
    faults, copies = trace.gpu_faults.collect(), trace.migrations.collect()
    assert copies["start_ns"].is_duplicated().any()
    assert copies["sequence"].is_sorted()
    for row in copies.iter_rows(named=True):
        assert f" {hex(row['va'])}  [Unified Memory Memcpy " in lines[row["sequence"] - 1]
    for row in faults.iter_rows(named=True):
        assert f" {row['n_page_faults']}   {hex(row['va'])} " in lines[row["sequence"] - 1]


def test_the_first_rows_are_as_printed():
    tables, info = read(log("x86_hotspot_11_64"))
    assert tables["gpu_faults"].row(0, named=True) == {
        "start_ns": 519_730_000,
        "end_ns": 519_730_000 + 643_680,
        "pid": 2009,
        "device_id": 0,
        "va": 0x7FA782000000,
        "n_page_faults": 39,
        "access": "unknown",
        "access_id": None,
        "sequence": 23,
    }
    fault = tables["cpu_faults"].row(0, named=True)
    assert (fault["start_ns"], fault["va"], fault["pc"]) == (
        516_890_000,
        0x7FA782000000,
        0xC00730A8,
    )
    kernel = tables["kernels"].row(0, named=True)
    assert kernel["name"] == "calculate_temp"
    assert kernel["demangled"].startswith("calculate_temp(int, float*, float*")
    assert (kernel["grid"], kernel["block"]) == ([6, 6, 1], [16, 16, 1])
    assert (kernel["correlation_id"], kernel["context_id"], kernel["stream_id"]) == (110, 1, 7)
    thrash = tables["driver_events"].filter(pl.col("kind") == "thrashing")
    assert thrash["by_cpu"].all()
    assert thrash["bytes"].unique().to_list() == [4096]
    assert thrash["device_id"].unique().to_list() == [0]
    throttle = tables["driver_events"].filter(pl.col("kind") == "throttling")
    assert throttle["by_cpu"].to_list() == [False, False]
    assert (throttle["end_ns"] - throttle["start_ns"]).to_list() == [466_630, 198_200]
    assert tables["devices"]["name"].to_list() == ["Tesla V100-SXM2"]
    assert tables["processes"].rows() == [(2009, None)]
    assert (info.kind, info.nsys_version, info.export_schema) == ("nvprof-text", None, None)


@pytest.mark.parametrize("n", [64, 1024, 8192])
def test_the_ranges_that_the_program_printed_are_its_allocations(n):
    tables, _ = read(log(f"x86_hotspot_11_{n}"))
    allocations = tables["allocations"]
    assert allocations["bytes"].to_list() == [4 * n * n] * 3
    assert allocations["kind"].unique().to_list() == ["managed"]
    assert allocations["alloc_ns"].null_count() == 3


def test_every_fault_lies_in_an_allocation():
    tables, _ = read(log("x86_hotspot_11_2048"))
    ranges = tables["allocations"].select("va", "bytes").rows()
    for va in tables["gpu_faults"]["va"]:
        assert any(first <= va < first + size for first, size in ranges)


def test_an_explicit_copy_is_read_with_its_size():
    tables, _ = read(log("p9_bfs_111100_graph4096"))
    copy = tables["copies"].row(0, named=True)
    assert (copy["kind"], copy["bytes"], copy["n_operations"]) == ("htod", 96 * 1024, 1)
    assert (copy["start_ns"], copy["end_ns"]) == (590_170_000, 590_177_712)
    assert tables["migrations"]["bytes"].sum() == 64 * 1024


def test_what_needs_finer_times_is_unknown():
    summary = nsan.summary(log("x86_hotspot_11_64"))
    assert summary["source_kind"] == "nvprof-text"
    assert summary["duration_ns"] is None
    assert summary["gpu_faults"]["busy_ns"] is None
    assert summary["migrations"]["busy_ns"] is None
    assert {group["bytes_per_s"] for group in summary["migrations"]["groups"]} == {None}
    assert summary["driver_events"] == {"thrashing": 16, "throttling": 2}
    assert summary["managed"]["n_allocations"] == 3
    assert summary["managed"]["n_calls"] is None


def test_no_alarm_is_raised_over_what_nvprof_does_not_print():
    for name in HOTSPOT:
        health = nsan.summary(log(name))["health"]
        assert [check for check in health if check["status"] in {"warn", "fail"}] == []
        texts = {check["id"]: check["text"] for check in health}
        assert "does not print why memory moved" in texts["migration_causes"]
        assert "few digits" in texts["times"]
        assert "schema" not in texts


def test_small_chunks_give_the_same_tables():
    whole, _ = read(log("x86_hotspot_11_512"))
    parts, _ = read(log("x86_hotspot_11_512"), rows_per_chunk=7)
    for name in TABLES:
        assert parts[name].equals(whole[name]), name


def test_the_command_line_is_not_kept(tmp_path):
    out = tmp_path / "store"
    assert main(["import", str(log("x86_hotspot_11_64")), "-o", str(out), "-q"]) == 0
    kept = b"".join(path.read_bytes() for path in out.rglob("*") if path.is_file())
    assert b"GPU-executable" not in kept
    assert b"data/hotspot" not in kept


def test_the_samples_are_the_two_logs():
    for n in (1024, 8192):
        sample = REPOSITORY / "sample_data" / f"nvprof_hotspot_v100_{n}.log.gz"
        assert sample.read_bytes() == log(f"x86_hotspot_11_{n}").read_bytes()


HEADS = (
    '"Start","Duration","Grid X","Grid Y","Grid Z","Block X","Block Y","Block Z",'
    '"Registers Per Thread","Static SMem","Dynamic SMem","Size","Throughput","SrcMemType",'
    '"DstMemType","Device","Context","Stream","Unified Memory","Virtual Address","Name",'
    '"Correlation_ID"'
)
CSV = f"""\
==77== NVPROF is profiling process 77, command: ./a
==77== Profiling application: ./a
==77== Warning: 2 records have invalid timestamps due to insufficient device buffer space.
==77== Profiling result:
{HEADS}
s,ms,,,,,,,,B,B,MB,GB/s,,,,,,B,,,
1.000001,0.276608,,,,,,,,,,,,,,"GPU X (0)",,,"18","0x7f0000800000","[Unified Memory GPU page faults]",
1.000001,0.287308,506,1,1,192,1,1,16,0,0,,,,,"GPU X (1)","1","7",,,"void ns::k<int, 3>(int, float*)",121
1.000002,0.001312,,,,,,,,,,0.5,2.8,"Managed",,"GPU X (0)","1","7",,,"[CUDA memset]",139
1.000003,0.015329,,,,,,,,,,1.0,1.1,"Managed","Managed","GPU X (0)","1","7",,,"[CUDA memcpy DtoD]",141
1.000004,0.007360,,,,,,,,,,,,,,"GPU X (0)",,,65536.000000,"0x7f0000000000","[Unified Memory Memcpy HtoD]",
1.000005,,,,,,,,,,,,,,,,,,"PC 0x5e240510","0x7f0000000000","[Unified Memory CPU page faults]",
1.000006,,,,,,,,,,,,,,,"CPU, GPU X (1)",,,4096.000000,"0x7f0000000000","[Unified Memory page thrash]",
"""


@pytest.fixture
def made(tmp_path):
    def write(text, name="trace.csv"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_csv_gives_the_same_tables(made):
    tables, info = read(made(CSV))
    fault = tables["gpu_faults"].row(0, named=True)
    assert (fault["start_ns"], fault["end_ns"]) == (1_000_001_000, 1_000_277_608)
    assert (fault["n_page_faults"], fault["va"], fault["device_id"]) == (18, 0x7F0000800000, 0)
    kernel = tables["kernels"].row(0, named=True)
    assert (kernel["name"], kernel["device_id"], kernel["correlation_id"]) == ("k", 1, 121)
    assert (kernel["grid"], kernel["block"]) == ([506, 1, 1], [192, 1, 1])
    assert tables["memsets"].select("bytes", "kind").rows() == [(MIB // 2, "managed")]
    assert tables["copies"].select("bytes", "kind").rows() == [(MIB, "dtod")]
    assert tables["migrations"].select("bytes", "direction").rows() == [(65536, "htod")]
    assert tables["cpu_faults"]["pc"].to_list() == [0x5E240510]
    assert tables["driver_events"].select("bytes", "by_cpu", "device_id").rows() == [
        (4096, True, 1)
    ]
    assert tables["devices"].select("device_id", "name").rows() == [
        (0, "GPU X (0)"),
        (1, "GPU X (1)"),
    ]
    assert tables["diagnostics"]["severity"].to_list() == ["warning"]
    assert {"busy", "span"} <= set(info.doubtful)


def test_csv_in_milliseconds_is_exact(made):
    text = CSV.replace("s,ms,", "ms,ms,", 1)
    tables, info = read(made(text))
    assert tables["gpu_faults"]["start_ns"].to_list() == [1_000_001]
    assert tables["gpu_faults"]["sequence"].null_count() == 1
    assert not {"busy", "span"} & set(info.doubtful)
    assert nsan.summary(made(text, "b.csv"))["duration_ns"] == 287_308


def test_a_warning_of_nvprof_is_passed_on(made):
    health = {check["id"]: check for check in nsan.summary(made(CSV))["health"]}
    assert "nvprof reported: 2 records" in health["diagnostics"]["text"]


def test_a_warning_is_kept_up_to_where_it_may_name_somebody(made):
    text = CSV.replace("2 records have", "Unified Memory lost, see ~anna/log for what")
    tables, _ = read(made(text))
    assert tables["diagnostics"]["text"].to_list() == ["Unified Memory lost, see ..."]


def test_two_processes_are_told_apart(made):
    text = CSV + "\n" + CSV.replace("==77==", "==78==")
    tables, info = read(made(text))
    assert tables["gpu_faults"]["pid"].to_list() == [77, 78]
    assert tables["processes"]["pid"].to_list() == [77, 78]
    assert {"busy", "span"} <= set(info.doubtful)


def test_a_trace_without_unified_memory_rows_does_not_say_that_there_was_none(made):
    lines = [line for line in CSV.splitlines(keepends=True) if "[Unified" not in line]
    capture = nsan.summary(made("".join(lines)))["capture"]
    assert {capture[kind] for kind in ("gpu_faults", "cpu_faults", "migrations")} == {"unknown"}
    assert capture["kernels"] == "recorded"
    assert capture["allocations"] == "not_recorded"


def test_one_unified_memory_row_shows_that_all_kinds_were_traced(made):
    lines = [line for line in CSV.splitlines(keepends=True) if "GPU page faults" not in line]
    summary = nsan.summary(made("".join(lines)))
    assert summary["capture"]["gpu_faults"] == "recorded"
    assert summary["gpu_faults"]["n_rows"] == 0


def text_of(name):
    with gzip.open(log(name), "rt") as file:
        return file.read()


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("643.68us", "643.6?us", "duration"),
        (
            "                    39   0x7fa782000000",
            "                    39   0x7fa78200zz00",
            "va",
        ),
        ("                    39   0x", "                    3q   0x", "n_page_faults"),
        ("32.000000KB   0x7fa782000000", "32.000000QB   0x7fa782000000", "bytes"),
        ("PC 0xc00730a8", "PC what", "pc"),
        ("516.89ms", "99999999999999999999s", "start"),
        ("643.68us", "99999999999999999999s", "duration"),
        ("32.000000KB   0x", "9999999999GB   0x", "bytes"),
        ("                    39   0x", "  9999999999999999999   0x", "n_page_faults"),
        ("0x7fa782000000  [Unified", "0x7fa782000000 [Unified", "columns"),
        ("643.68us", "", "columns"),
        ("516.89ms", "hello", "columns"),
    ],
)
def test_a_broken_row_is_named_by_its_line(old, new, what, made):
    text = text_of("x86_hotspot_11_64")
    assert old in text
    broken = text.replace(old, new, 1)
    line = 1 + next(
        i
        for i, (a, b) in enumerate(zip(text.split("\n"), broken.split("\n"), strict=True))
        if a != b
    )
    with pytest.raises(DamagedExportError, match=f"line {line} ") as caught:
        nsan.open_trace(made(broken, "a.log"))
    assert what in str(caught.value)
    assert "nsys export" not in str(caught.value)


def test_a_row_of_unified_memory_before_the_head_of_its_columns_is_refused(made):
    """A trace whose lines were put in another order has as many rows as before, and none may be lost."""
    lines = text_of("x86_hotspot_11_64").split("\n")
    head = next(i for i, line in enumerate(lines) if line.lstrip().startswith("Start  Duration"))
    lines[head], lines[head + 4] = lines[head + 4], lines[head]
    with pytest.raises(DamagedExportError, match=f"line {head + 1} is no whole row"):
        nsan.open_trace(made("\n".join(lines), "a.log"))


def test_columns_that_run_into_one_another_are_refused(made):
    """One bit of a space makes one column of the last three: a fault would have a name of its own."""
    text = text_of("x86_hotspot_11_64")
    head = next(i for i, line in enumerate(text.split("\n")) if "Unified Memory  Virtual" in line)
    broken = text.replace("Unified Memory  Virtual", "Unified Memory( Virtual", 1)
    with pytest.raises(DamagedExportError, match=f"line {head + 2} .*its name is missing"):
        nsan.open_trace(made(broken, "a.log"))


def test_a_head_of_csv_with_a_line_end_inside_is_no_head(made):
    text = '==7== Profiling result:\n"Start","Duration",\r"Device","Name"\nms,ms,,\n'
    with pytest.raises(NotAnExportError, match="without a GPU trace"):
        nsan.open_trace(made(text, "a.csv"))


@pytest.mark.parametrize("number", ["7" * 400, str(1 << 33)])
def test_a_number_that_no_process_has_names_none(number, made):
    text = text_of("x86_hotspot_11_64").replace("==2009==", f"=={number}==")
    found = nsan.open_trace(made(text, "a.log"))
    assert found.processes.collect().height == 0
    assert found.gpu_faults.collect()["pid"].null_count() == 32


def test_a_range_larger_than_any_memory_is_no_allocation(made):
    text = text_of("x86_hotspot_11_64").replace("0x7fa782004000\n", "0xffffffffffffffff\n", 1)
    assert nsan.open_trace(made(text, "a.log")).allocations.collect().height == 2


def test_a_grid_of_absurd_size_is_unknown_and_its_kernel_is_there(made):
    text = text_of("x86_hotspot_11_64").replace("(6 6 1)", f"({'9' * 30} 6 1)", 1)
    kernels = nsan.open_trace(made(text, "a.log")).kernels.collect()
    assert kernels["name"].to_list() == ["calculate_temp"]
    assert kernels["grid"].to_list() == [[None, 6, 1]]


def test_a_size_of_a_copy_that_cannot_be_read_is_refused(made):
    text = text_of("x86_bfs_111100_graph4096")
    broken = text.replace("        1B  ", "        1Q  ", 1)
    assert broken != text
    with pytest.raises(DamagedExportError, match="its bytes is missing or unreadable"):
        nsan.open_trace(made(broken, "a.log"))


def test_a_trace_cut_within_a_row_is_refused(made):
    text = text_of("x86_hotspot_11_64")
    with pytest.raises(DamagedExportError, match="no whole row"):
        nsan.open_trace(made(text[: text.index("[Unified Memory Memcpy HtoD]") - 30], "a.log"))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda raw: raw[: len(raw) // 2], "cut short"),
        (lambda raw: raw[:-4], "cut short"),
        (lambda raw: raw[:-8] + bytes(4) + raw[-4:], "corrupt"),
        (lambda raw: raw[:1000] + bytes(200) + raw[1200:], "corrupt"),
    ],
)
def test_damaged_gzip_data_is_one_clear_error(change, what, made):
    raw = log("x86_hotspot_11_1024").read_bytes()
    with pytest.raises(DamagedExportError, match=what):
        nsan.open_trace(made(change(raw), "a.log.gz"))


def test_other_output_of_nvprof_is_refused_with_the_way_out(made):
    summary = (
        "==5== NVPROF is profiling process 5, command: ./a\n==5== Profiling result:\n"
        "            Type  Time(%)      Time     Calls       Avg       Min       Max  Name\n"
        " GPU activities:  100.00%  1.7288ms         1  1.7288ms  1.7288ms  1.7288ms  scale(int)\n"
    )
    with pytest.raises(NotAnExportError, match="without a GPU trace") as caught:
        nsan.open_trace(made(summary, "a.txt"))
    assert "--print-gpu-trace" in str(caught.value)


def test_a_line_without_end_is_refused(made):
    with pytest.raises(DamagedExportError, match="line 2 is longer"):
        nsan.open_trace(made("==5== NVPROF is profiling\n" + "x" * (1 << 21), "a.txt"))


def test_hostile_text_is_only_text(made):
    name = "k<</script>\\u001b[31m>(int)"
    text = CSV.replace("void ns::k<int, 3>(int, float*)", name)
    tables, _ = read(made(text))
    assert tables["kernels"]["demangled"].to_list() == [name]


def test_a_plain_log_and_a_packed_one_are_the_same(made):
    plain, _ = read(made(text_of("x86_hotspot_11_256"), "a.log"))
    packed, _ = read(log("x86_hotspot_11_256"))
    for name in TABLES:
        assert plain[name].equals(packed[name]), name


def test_every_file_is_small_and_has_its_licence():
    for path in NVPROF.rglob("*"):
        assert path.is_dir() or path.stat().st_size < 1_500_000
    assert Path(NVPROF / "licences" / "XPlacer-ML-DataPlacement.LICENSE").is_file()


# What a trace may have lost, or holds that is not known


def lines_of(name):
    return gzip.decompress((DATA / "nvprof" / name).read_bytes()).decode().splitlines()


def warned(summary):
    return " ".join(check["text"] for check in summary["health"] if check["id"] == "source")


def test_a_blank_line_within_a_trace_ends_nothing(tmp_path):
    lines = lines_of("v100_x86_hotspot_11_64.log.gz")
    head = next(i for i, line in enumerate(lines) if line.lstrip().startswith("Start  Duration"))
    path = tmp_path / "blank.log"
    path.write_text("\n".join([*lines[: head + 5], "", *lines[head + 5 :]]) + "\n")
    summary = nsan.summary(path)
    assert (summary["gpu_faults"]["n_rows"], summary["gpu_faults"]["n_page_faults"]) == (32, 1549)
    assert warned(summary) == ""


def test_a_trace_that_is_cut_between_two_rows_is_said_to_be(tmp_path):
    lines = lines_of("v100_x86_hotspot_11_64.log.gz")
    head = next(i for i, line in enumerate(lines) if line.lstrip().startswith("Start  Duration"))
    path = tmp_path / "cut.log"
    path.write_text("\n".join(lines[: head + 8]) + "\n")
    assert "rows may be missing" in warned(nsan.summary(path))


def test_rows_of_an_unknown_kind_are_counted(tmp_path):
    text = "\n".join(lines_of("v100_x86_hotspot_11_64.log.gz")) + "\n"
    path = tmp_path / "unknown.log"
    path.write_text(text.replace("[Unified Memory page thrash]", "[Unified Memory page rash]"))
    summary = nsan.summary(path)
    assert warned(summary).startswith(
        "16 Unified Memory rows are of a kind that nsan does not know"
    )
    assert summary["driver_events"] == {"throttling": 2}


def test_one_name_of_fifteen_characters_on_two_contexts_is_doubted(tmp_path):
    lines = lines_of("v100_x86_hotspot_11_64.log.gz")
    kernel = next(line for line in lines if "calculate_temp" in line)
    at = lines.index(kernel)
    other = kernel.replace("         1         7  ", "         2         7  ")
    assert other != kernel
    path = tmp_path / "two.log"
    path.write_text("\n".join([*lines[:at], kernel, other, *lines[at + 1 :]]) + "\n")
    assert "cuts GPU names to 15 characters" in warned(nsan.summary(path))
