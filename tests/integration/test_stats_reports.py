"""nsan's reports for `nsys stats`: none of the defects of the vendor's, whatever a capture has or lacks.

The numbers after "defect" are those of ``docs/peers.md`` 3.1.
"""

from __future__ import annotations

import csv
import json
import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import exports as x
import pytest
import stats_reports
import vendor
from stats_reports import REPORTS, main, one, run, stats

pytestmark = pytest.mark.nsys

BLOCK = 2 * x.MIB
PAGE = 4 * x.KIB
SECOND = 1_000_000_000
GB = 1_000_000_000
NAMES = tuple(name.removeprefix("nsan_um_") for name in REPORTS)
every_version = pytest.mark.parametrize("version", vendor.VERSIONS)


def small(**options):
    """A kernel that faults a page in, an eviction of it, and the way back; a CPU fault."""
    export = x.Export(**options)
    export.add(x.KERNEL, x.kernel(0, 900), x.kernel(2000, 2900))
    export.add(x.GPU_FAULTS, x.gpu_fault(100, 300, n=7), x.gpu_fault(2100, 2300, n=2))
    export.add(
        x.MEMCPY,
        x.migration(150, 250, PAGE),
        x.migration(1000, 1100, PAGE, kind=x.DTOH, cause=x.EVICTION),
        x.migration(2150, 2250, PAGE),
    )
    export.add(x.CPU_FAULTS, x.cpu_fault(5000))
    export.add(x.MEMORY, x.memory_event(0, x.VA, BLOCK, name="weights"))
    return export


def without(path, *tables):
    with closing(sqlite3.connect(path)) as connection:
        for table in tables:
            connection.execute(f'DROP TABLE IF EXISTS "{table}"')
        connection.commit()
    return path


# --- The vendor's defects ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "time", "rate"),
    [
        (100 * GB, 2.5 * SECOND, 40 * GB),
        (6 * GB, 0.6 * SECOND, 10 * GB),
        (10 * GB, SECOND + 1, 10 * GB / (1 + 1e-9)),
        (5 * GB, 499_999_999, 5 * GB / 0.499999999),
    ],
)
def test_throughput_is_bytes_over_time(built, size, time, rate):
    # Defect 1.
    path = built(x.Export().add(x.MEMCPY, x.migration(0, int(time), size)))
    found = run([("sum", path), ("total_sum", path), ("cause_sum", path)])
    assert [r.only["Migration Throughput"] for r in found] == [pytest.approx(rate, rel=1e-12)] * 3


def test_time_of_copies_that_overlap_counts_once(built):
    copies = (x.migration(0, 100, PAGE), x.migration(50, 150, PAGE), x.migration(400, 410, PAGE))
    path = built(x.Export().add(x.MEMCPY, *copies))
    found = one("total_sum", path).only
    assert found["Migration Time"] == 160
    assert found["Migration Throughput"] == pytest.approx(3 * PAGE / 160e-9)


def test_what_moved_most_comes_first_and_the_rest_is_added_up(built):
    # Defect 2: nothing that is cut off disappears from the sums.
    rows = [
        x.migration(1000 * i, 1000 * i + 10, PAGE * i, x.VA + 2 * i * BLOCK) for i in range(1, 31)
    ]
    path = built(x.Export().add(x.MEMCPY, *rows))
    found = one("sum", path, "rows=3")
    assert [row["HtoD Migration Size"] for row in found.rows[:3]] == [
        PAGE * i for i in (30, 29, 28)
    ]
    assert found.rows[3]["Virtual Address"] == "(27 more)"
    assert found.rows[3]["HtoD Migration Size"] == PAGE * 27 * 28 // 2
    assert found.total("Migrations") == 30


@pytest.mark.parametrize("kind", [x.HTOD, x.DTOH, x.DTOD])
def test_one_direction_alone_has_its_bytes_and_its_addresses(built, kind):
    # Defects 4 and 5.
    path = built(x.Export().add(x.MEMCPY, x.migration(0, 10, 3 * PAGE, x.VA, kind=kind)))
    row = one("total_sum", path).only
    moved = [row[f"{way} Migration Size"] for way in ("HtoD", "DtoH", "DtoD")]
    assert moved == [3 * PAGE * (kind == each) for each in (x.HTOD, x.DTOH, x.DTOD)]
    assert row["Minimum Virtual Address"] == row["Maximum Virtual Address"] == x.VA


def test_processes_and_gpus_stay_apart(built):
    # Defect 6: two processes that use one address, on two GPUs.
    export = x.Export()
    export.add(x.GPU_FAULTS, x.gpu_fault(0, 9, pid=7), x.gpu_fault(20, 29, pid=7, device=1, n=3))
    export.add(x.GPU_FAULTS, *(x.gpu_fault(i, i + 5, pid=8, n=9) for i in range(0, 40, 10)))
    path = built(export)
    for name in ("sum", "total_sum"):
        rows = one(name, path).by("Pid", "Device")
        assert {key: row["GPU Fault Batches"] for key, row in rows.items()} == {
            (7, 0): 1,
            (7, 1): 1,
            (8, 0): 4,
        }
        assert rows[8, 0]["Lowest-Page Faults"] == 36


def test_cpu_faults_stand_alone_only_where_several_gpus_are(built):
    export = x.Export().add(x.CPU_FAULTS, *(x.cpu_fault(i, x.VA + i * BLOCK) for i in range(2)))
    export.add(x.MEMCPY, *(x.migration(9, 19, PAGE, x.VA, device=gpu) for gpu in (0, 1)))
    export.add(x.MEMCPY, x.migration(29, 39, PAGE, x.VA + BLOCK))
    path = built(export)
    rows = one("sum", path, "by=block").by("Virtual Address", "Device")
    counts = {(va - x.VA, gpu): row["CPU Page Faults"] for (va, gpu), row in rows.items()}
    assert counts == {(0, 0): 0, (0, 1): 0, (0, None): 1, (BLOCK, 0): 1}
    rows = one("total_sum", path).by("Device")
    counts = {gpu: row["CPU Page Faults"] for (gpu,), row in rows.items()}
    assert counts == {0: 0, 1: 0, None: 2}


def test_faults_and_copies_of_a_va_block_meet(built):
    # Defect 7: five faults inside of one copy of 2 MiB, and one in the next block.
    export = x.Export().add(x.MEMCPY, x.migration(0, 100, BLOCK))
    places = [*(x.VA + i * 64 * x.KIB for i in range(1, 6)), x.VA + BLOCK]
    export.add(x.GPU_FAULTS, *(x.gpu_fault(9 * i, 9 * i + 5, va) for i, va in enumerate(places)))
    rows = one("sum", built(export)).by("Virtual Address")
    assert rows[x.VA,]["GPU Fault Batches"] == 5
    assert rows[x.VA,]["HtoD Migration Size"] == BLOCK
    assert rows[x.VA + BLOCK,]["GPU Fault Batches"] == 1


def test_filters_of_time_and_nvtx_hold_for_cpu_faults(built):
    # Defect 8: 39 of 200.
    export = x.Export().add(x.CPU_FAULTS, *(x.cpu_fault(10 * i) for i in range(200)))
    export.add(x.NVTX, x.nvtx(500, 890, "step"))
    path = built(export)
    found = run(
        [
            ("total_sum", path),
            ("total_sum", path, "start=500", "end=890"),
            ("total_sum", path, "nvtx=step"),
            ("sum", path, "start=500", "end=890"),
            ("alloc_sum", path, "nvtx=step"),
        ]
    )
    assert [result.total("CPU Page Faults") for result in found] == [200, 39, 39, 39, 39]


def test_the_program_fails_where_there_is_nothing(built):
    # Defect 9, as far as it is the report's.
    path = built(x.Export().add(x.KERNEL, x.kernel(0, 1)))
    assert [main(name, path).returncode for name in NAMES] == [27] * len(NAMES)


@every_version
def test_headers_have_no_stray_blanks_and_units_that_nsys_knows(built, version):
    # Defect 10.
    path = built(small())
    for result in run([(name, path) for name in NAMES], version):
        for header in result.headers:
            name, _, unit = header.partition(":")
            assert name == " ".join(name.split())
            assert unit in {"", "mem_B", "dur_ns", "thru_B", "addr_uint"}
            assert (
                bool(unit)
                == any(word in name.split() for word in ("Size", "Time", "Throughput", "Address"))
                or name == "Size (%)"
            )
        assert len(set(result.headers)) == len(result.headers)


# --- What was not recorded -----------------------------------------------------------------------

OPTIONAL = (x.MEMCPY, x.GPU_FAULTS, x.CPU_FAULTS, x.MEMORY, x.KERNEL, "StringIds")


@pytest.mark.parametrize("table", OPTIONAL)
def test_every_report_works_without_a_table(built, table):
    # Defect 3.
    path = without(built(small(options={"COLLECT_UVM_GPU_PAGE_FAULTS": None})), table)
    found = dict(zip(NAMES, run([(name, path) for name in NAMES]), strict=True))
    nothing = {"cause_sum", "refault_sum"} if table == x.MEMCPY else set()
    assert {name for name, result in found.items() if result.status} == nothing
    assert {result.status for result in found.values()} <= {0, 27}


def test_the_smallest_capture_has_its_figures(built):
    path = built(small())
    found = dict(zip(NAMES, run([(name, path, "rows=-1") for name in NAMES]), strict=True))
    totals = found["total_sum"].only
    assert totals["HtoD Migration Size"] == 2 * PAGE
    assert totals["DtoH Migration Size"] == totals["Evicted Size"] == PAGE
    assert (totals["GPU Fault Batches"], totals["Lowest-Page Faults"]) == (2, 9)
    assert (totals["CPU Page Faults"], totals["Not Recorded"]) == (1, None)
    kernel = found["kern_sum"].by("Work")["kernel",]
    assert (kernel["Name"], kernel["Instances"], kernel["Time"]) == ("add", 2, 1800)
    # From the raising of each fault to its replay: 200 ns twice.
    assert kernel["Exposed Time"] == 400
    assert (kernel["Faulted Size"], kernel["Evicted Size"]) == (2 * PAGE, 0)
    assert found["kern_sum"].by("Work")["unattributed",]["Evicted Size"] == PAGE
    weights = found["alloc_sum"].by("Allocation")["weights",]
    assert (weights["Virtual Address"], weights["Size"]) == (x.VA, BLOCK)
    assert (weights["HtoD Migration Size"], weights["CPU Page Faults"]) == (2 * PAGE, 1)
    evicted = found["refault_sum"].only
    assert (evicted["Evictions"], evicted["Refaulted Size"]) == (1, PAGE)
    assert (evicted["Refaulted (%)"], evicted["Unreturned Size"]) == (100.0, 0)


def test_what_was_not_recorded_is_empty_and_named(built):
    off = {"COLLECT_UVM_GPU_PAGE_FAULTS": "false", "COLLECT_UVM_CPU_PAGE_FAULTS": "false"}
    path = built(x.Export(options=off).add(x.MEMCPY, x.migration(0, 10, PAGE)))
    row = one("total_sum", path).only
    columns = ("GPU Fault Batches", "Lowest-Page Faults", "CPU Page Faults")
    assert [row[column] for column in columns] == [None] * 3
    assert "--cuda-um-gpu-page-faults=true" in row["Not Recorded"]
    assert "--cuda-um-cpu-page-faults=true" in row["Not Recorded"]
    assert "--cuda-um-gpu-page-faults=true" in main("kern_sum", path).stderr


def test_what_was_recorded_and_did_not_happen_is_zero(built):
    path = built(x.Export().add(x.MEMCPY, x.migration(0, 10, PAGE)))
    row = one("total_sum", path).only
    assert (row["GPU Fault Batches"], row["CPU Page Faults"]) == (0, 0)
    assert row["Not Recorded"] is None
    assert main("total_sum", path).stderr == ""


def test_a_capture_without_unified_memory_names_the_switches(built):
    off = {"COLLECT_UVM_GPU_PAGE_FAULTS": "false"}
    path = built(x.Export(options=off).add(x.KERNEL, x.kernel(0, 1)))
    done = main("sum", path)
    assert (done.returncode, done.stdout) == (27, "")
    assert "nsys profile --cuda-um-gpu-page-faults=true" in done.stderr
    assert "--cuda-um-cpu-page-faults" not in done.stderr


def test_a_capture_that_evicted_nothing_says_so(built):
    done = main("refault_sum", built(x.Export().add(x.MEMCPY, x.migration(0, 10, PAGE))))
    assert done.returncode == 27
    assert "GPU memory was never full" in done.stderr


# --- Filters -------------------------------------------------------------------------------------


def test_parts_of_a_split_add_up_to_the_whole(built):
    path = built(small())
    cuts = [(), ("end=1000",), ("start=1000",)]
    whole, *parts = (one("total_sum", path, *cut).only for cut in cuts)
    added = [c for c in whole if c.endswith(("Size", "Faults", "Batches", "Time", "Migrations"))]
    assert len(added) == 9
    assert {c: sum(part[c] for part in parts) for c in added} == {c: whole[c] for c in added}


def test_busy_time_is_cut_at_the_edges_of_the_window(built):
    path = built(x.Export().add(x.MEMCPY, x.migration(0, 100, PAGE), x.migration(150, 250, PAGE)))
    row = one("total_sum", path, "start=60", "end=200").only
    # The first copy starts before, so its bytes are not of this part; 40 ns of its time are.
    assert (row["Migrations"], row["Migration Time"]) == (1, 90)


@pytest.mark.parametrize(
    ("window", "time", "rate"),
    [
        # A copy of 1 GiB runs from 0 to 1000, one of a page from 400 to 500.
        (("start=300", "end=600"), 300, None),
        (("end=600",), 600, None),
        (("end=1000",), 1000, (2**30 + PAGE) / 1e-6),
        ((), 1000, (2**30 + PAGE) / 1e-6),
    ],
)
def test_throughput_is_empty_where_a_window_cuts_a_copy(built, window, time, rate):
    copies = (x.migration(0, 1000, 2**30), x.migration(400, 500, PAGE))
    path = built(x.Export().add(x.MEMCPY, *copies))
    found = run([(name, path, *window) for name in ("total_sum", "cause_sum")])
    for row in (each.only for each in found):
        assert row["Migration Time"] == time
        assert row["Migration Throughput"] == (rate and pytest.approx(rate))
    by_block = one("sum", path, "by=block", *window).by("Virtual Address")[x.VA,]
    assert by_block["Migration Throughput"] == (rate and pytest.approx(rate))


def test_a_sum_with_an_unknown_row_is_empty(built):
    # Of a copy to the GPU the bytes, and of a fault the count cannot be read.
    export = x.Export().add(x.KERNEL, x.kernel(0, 900))
    export.add(x.MEMORY, x.memory_event(0, x.VA, BLOCK, name="weights"))
    export.add(x.GPU_FAULTS, x.gpu_fault(100, 300, n=7), x.gpu_fault(400, 500, n=2))
    export.add(
        x.MEMCPY,
        x.migration(150, 250, PAGE),
        x.migration(300, 350, 2 * PAGE),
        x.migration(1000, 1100, PAGE, kind=x.DTOH),
    )
    path = built(export)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"UPDATE {x.MEMCPY} SET bytes = 'many' WHERE start = 300")
        connection.execute(f"UPDATE {x.GPU_FAULTS} SET numberOfPageFaults = -1 WHERE start = 400")
        connection.commit()
    kernel = one("kern_sum", path).by("Work")["kernel",]
    moved = ("To GPU Size", "Faulted Size", "Prefetched Size", "Evicted Size")
    assert [kernel[name] for name in moved] == [None, None, 0, 0]
    assert (kernel["GPU Fault Batches"], kernel["Lowest-Page Faults"]) == (2, None)
    places = one("alloc_sum", path).by("Allocation")
    # Where a copy of unknown size went cannot be told: it is of no allocation.
    weights, rest = places["weights",], places["unattributed",]
    moved = ("HtoD Migration Size", "Faulted Size", "DtoH Migration Size", "Migrations")
    assert [weights[name] for name in moved] == [PAGE, PAGE, PAGE, 2]
    assert [rest[name] for name in moved] == [None, None, 0, 1]
    assert (weights["Lowest-Page Faults"], rest["Lowest-Page Faults"]) == (None, 0)


def test_kernels_have_no_row_of_what_is_ambiguous_where_nothing_is(built):
    assert set(one("kern_sum", built(small())).by("Work")) == {("kernel",), ("unattributed",)}


@pytest.mark.parametrize(
    ("name", "argument"), [("refault_sum", "premature=-1"), ("sum", "process=-5")]
)
def test_a_number_that_makes_no_sense_is_refused(built, name, argument):
    found = one(name, built(small()), argument)
    assert found.status == 29
    assert argument.partition("=")[0] in found.message


def test_a_process_is_filtered_in_every_table(built):
    export = x.Export()
    for pid in (7, 8):
        export.add(x.MEMCPY, x.migration(0, 10, PAGE, pid=pid))
        export.add(x.GPU_FAULTS, x.gpu_fault(0, 20, pid=pid))
        export.add(x.CPU_FAULTS, x.cpu_fault(30, pid=pid))
        export.add(x.MEMORY, x.memory_event(0, x.VA, BLOCK, pid=pid))
    path = built(export)
    for result in run([(name, path, "process=8") for name in NAMES if name != "refault_sum"]):
        assert {row["Pid"] for row in result.rows} == {8}
    assert one("sum", path, "process=9").status == 27
    assert one("sum", path, "process=8").only["CPU Page Faults"] == 1


def test_an_nvtx_range_is_its_first_instance_or_the_one_of_an_index(built):
    export = x.Export().add(x.CPU_FAULTS, *(x.cpu_fault(10 * i) for i in range(10)))
    export.add(x.NVTX, x.nvtx(0, 30, "step"), x.nvtx(50, 60, "step"), x.nvtx(70, 100, "a/b"))
    export.add(x.NVTX, x.nvtx(0, None, "io", kind=75, domain=3), x.nvtx(40, 60, "step", domain=3))
    path = built(export)
    counts = {"step": 3, "step/0": 3, "step/2": 1, "step@io": 2, "a/b": 3}
    found = run([("total_sum", path, f"nvtx={name}") for name in counts])
    assert [result.total("CPU Page Faults") for result in found] == list(counts.values())


def test_an_nvtx_range_keeps_its_process_only(built):
    export = x.Export().add(x.CPU_FAULTS, x.cpu_fault(5, pid=7), x.cpu_fault(6, pid=8))
    export.add(x.NVTX, x.nvtx(0, 30, "step", pid=8))
    assert one("total_sum", built(export), "nvtx=step").only["Pid"] == 8


@pytest.mark.parametrize("name", ["nothing", "{0}", "x' OR '1'='1", "a/9", "\x1b[31m"])
def test_an_nvtx_range_that_is_not_there_is_named(built, name):
    result = one("sum", built(small()), f"nvtx={name}")
    assert result.status == 27
    assert "no NVTX range" in result.message
    assert "\x1b" not in result.message


@pytest.mark.parametrize("argument", ["rows=many", "by=page", "nonsense=1", "start=1.5"])
def test_a_bad_option_is_refused(built, argument):
    assert one("sum", built(small()), argument).status == 29


def test_evictions_of_a_part_are_followed_beyond_it(built):
    path = built(small())
    found = one("refault_sum", path, "start=1000", "end=1500").only
    assert (found["Evictions"], found["Refaulted Size"]) == (1, PAGE)
    assert one("refault_sum", path, "start=1500").status == 27


def test_what_is_back_later_than_asked_is_not_premature(built):
    # From 1100 to 2250.
    path = built(small())
    soon = [one("refault_sum", path, f"premature={n}").only["Premature Size"] for n in (1150, 1151)]
    assert soon == [0, PAGE]


# --- Hostile and odd input -----------------------------------------------------------------------


def test_hostile_names_are_harmless(built):
    export = small()
    export.strings[1] = "<script>\x1b[31m\n\u202e" + "x" * 5000
    export.add(x.MEMORY, x.memory_event(0, x.VA + BLOCK, BLOCK, name="a\r\nb\x00"))
    for name, column in (("kern_sum", "Name"), ("alloc_sum", "Allocation")):
        shown = [row[column] for row in one(name, built(export)).rows]
        assert all(text.isprintable() and len(text) < 300 for text in shown)


def test_cells_of_another_type_are_no_figures(built):
    path = built(small())
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"UPDATE {x.MEMCPY} SET bytes = 'many' WHERE start = 150")
        connection.execute(f"UPDATE {x.MEMCPY} SET start = 1e300 WHERE start = 1000")
        connection.execute(f"UPDATE {x.CPU_FAULTS} SET address = x'00'")
        connection.execute("UPDATE StringIds SET value = CAST(x'fffe41' AS TEXT)")
        connection.commit()
    found = dict(zip(NAMES, run([(name, path) for name in NAMES]), strict=True))
    row = found["total_sum"].only
    # A sum that lacks a part is not known; the others are.
    assert (row["HtoD Migration Size"], row["DtoH Migration Size"]) == (None, PAGE)
    assert (row["Migration Time"], row["Migration Throughput"]) == (None, None)
    assert row["CPU Page Faults"] == 1
    assert {result.status for result in found.values()} == {0}


def test_addresses_of_the_upper_half_keep_their_place(built):
    top = -(1 << 21)
    path = built(x.Export().add(x.MEMCPY, x.migration(0, 9, PAGE, top), x.migration(20, 29, PAGE)))
    row = one("total_sum", path).only
    assert row["Minimum Virtual Address"] == x.VA
    assert row["Maximum Virtual Address"] == "0xFFFFFFFFFFE00000"
    assert {each["Virtual Address"] for each in one("sum", path).rows} == {
        x.VA,
        "0xFFFFFFFFFFE00000",
    }


def test_sums_beyond_64_bits_are_no_crash(built):
    path = built(x.Export().add(x.MEMCPY, *(x.migration(i, i + 1, 1 << 45) for i in range(3))))
    result = one("total_sum", path)
    assert result.only["HtoD Migration Size"] == 3 << 45


def test_a_damaged_file_is_named(built):
    path = built(small())
    raw = bytearray(path.read_bytes())
    raw[4096 : len(raw) // 2] = bytes(len(raw) // 2 - 4096)
    path.write_bytes(raw)
    for result in run([(name, path) for name in NAMES]):
        assert result.status in {26, 27, 28}
        assert result.message


def test_neighbours_that_moved_the_same_are_one_range(built):
    export = x.Export()
    sizes = [BLOCK, BLOCK, BLOCK, PAGE, BLOCK]
    copies = (x.migration(i * 10, i * 10 + 10, n, x.VA + i * BLOCK) for i, n in enumerate(sizes))
    path = built(export.add(x.MEMCPY, *copies))
    rows = one("sum", path).by("Virtual Address")
    assert {va: row["Range Size"] // BLOCK for (va,), row in rows.items()} == {
        x.VA: 3,
        x.VA + 3 * BLOCK: 1,
        x.VA + 4 * BLOCK: 1,
    }
    assert rows[x.VA,]["Migration Time"] == 30
    assert len(one("sum", path, "by=block").rows) == 5


def test_an_allocation_holds_its_addresses_while_it_lives_only(built):
    export = x.Export().add(x.CPU_FAULTS, *(x.cpu_fault(t, x.VA + PAGE) for t in (5, 15, 25, 35)))
    export.add(
        x.MEMORY,
        x.memory_event(10, x.VA, BLOCK, name="first"),
        x.memory_event(20, x.VA, BLOCK, free=True),
        x.memory_event(30, x.VA, BLOCK, name="second"),
        x.memory_event(0, x.VA, BLOCK, name="pinned", kind=1, pid=1),
    )
    rows = one("alloc_sum", built(export)).by("Allocation")
    assert {name: row["CPU Page Faults"] for (name,), row in rows.items()} == {
        "first": 1,
        "second": 1,
        "unattributed": 2,
    }


def test_kernels_that_overlap_leave_the_fault_ambiguous(built):
    export = x.Export().add(x.KERNEL, x.kernel(0, 100), x.kernel(50, 150, name=3))
    export.add(
        x.GPU_FAULTS,
        *(x.gpu_fault(t, t + 5) for t in (10, 60, 70, 120)),
        x.gpu_fault(900_000, 900_001),
    )
    found = one("kern_sum", built(export))
    counts = {row["Name"]: row["GPU Fault Batches"] for row in found.rows}
    assert counts == {"add": 1, "main": 1, "ambiguous": 2, "unattributed": 1}


# --- The programs of nsys ------------------------------------------------------------------------

FORMATS = ("column", "table", "csv", "tsv", "json", "hdoc", "htable")


@every_version
def test_nsys_stats_prints_each_report_in_each_format(built, version):
    path = built(small())
    asked = ",".join(REPORTS)
    for form in FORMATS:
        done = stats(version, path, "-q", "-r", asked, "-f", form)
        text = done.stdout + done.stderr
        assert "ERROR" not in text
        assert "SKIPPED" not in text
        # The names of the kernel, the allocation and the cause, each from another report.
        assert all(word in text for word in ("add", "weights", "Eviction")), form


@every_version
def test_nsys_stats_gives_the_figures_in_its_own_units(built, version):
    path = built(small())
    rows = list(
        csv.reader(stats(version, path, "-q", "-r", "nsan_um_sum", "-f", "csv").stdout.split("\n"))
    )
    lines = [row for row in rows if row]
    found = dict(zip(*lines, strict=True))
    assert found["Virtual Address"] == hex(x.VA).upper().replace("X", "x")
    assert float(found["HtoD Migration Size (MB)"]) == 0.008
    assert found["Migration Time (ns)"] == "300"
    parsed = json.loads(stats(version, path, "-q", "-r", "nsan_um_kern_sum", "-f", "json").stdout)
    assert [row["Name"] for row in parsed] == ["add", "unattributed"]


@every_version
def test_nsys_lists_all_reports(version, built):
    done = stats(version, built(small()), "--help-reports")
    assert all(f"  {name}[" in done.stdout for name in REPORTS)


@pytest.mark.parametrize("version", ["2023.4.4"])  # 2022.4.2 had no such filter
def test_nsys_filters_by_time(built, version):
    done = stats(
        version,
        built(small()),
        "-q",
        "-r",
        "nsan_um_total_sum",
        "-f",
        "csv",
        "--filter-time",
        "/1000ns",
    )
    (header, row) = (line for line in csv.reader(done.stdout.split("\n")) if line)
    found = dict(zip(header, row, strict=True))
    assert (found["Migrations"], found["CPU Page Faults"]) == ("1", "0")


@every_version
def test_both_interfaces_give_the_same(built, version):
    path = built(small())
    asked = [(name, path, "start=100", "rows=2") for name in NAMES]
    assert run(asked, version) == run(asked, vendor.VERSIONS[0])


def test_a_report_finds_its_helpers_through_a_link(tmp_path, built):
    link = tmp_path / "reports"
    link.symlink_to(stats_reports.FOLDER)
    done = stats(vendor.VERSIONS[0], built(small()), "-q", "-r", "nsan_um_sum", folder=link)
    assert "Virtual Address" in done.stdout


def _python38():
    found = [
        shutil.which("python3.8"),
        *(Path.home() / ".pyenv" / "versions").glob("3.8*/bin/python3.8"),
    ]
    for python in filter(None, found):
        done = subprocess.run([python, "-c", "import sqlite3"], check=False, capture_output=True)
        if done.returncode == 0:
            return str(python)
    return None


def test_the_python_of_nsys_gives_the_same(built):
    python = _python38()
    if python is None:
        pytest.skip("no Python 3.8 here; nsys has its own")
    path = built(small())
    asked = [(name, path) for name in NAMES]
    assert run(asked, python=python) == run(asked)
