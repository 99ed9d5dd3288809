from __future__ import annotations

import exports as x
import polars as pl
import pytest

from nsan.analysis.faults import cpu_faults_by_group, gpu_faults_by_group, places
from nsan.schema import CPU_FAULTS, GPU_FAULTS

BLOCK = 2 * x.MIB


def test_rows_counts_and_cpu_faults_stay_three_numbers(summary_of):
    # cases.md 28
    got = summary_of(
        x.Export()
        .add(x.GPU_FAULTS, x.gpu_fault(0, 10, n=1), x.gpu_fault(20, 30, x.VA + 4096, n=27))
        .add(x.CPU_FAULTS, x.cpu_fault(40), x.cpu_fault(50))
        .add(x.MEMCPY, x.migration(5, 8, 65536))
    )
    assert got["gpu_faults"]["n_rows"] == 2
    assert got["gpu_faults"]["n_page_faults"] == 28
    assert got["cpu_faults"]["n"] == 2
    assert got["migrations"]["bytes"] == 65536  # bytes come from copies only


def test_places_of_faults_are_distinct_pages_and_va_blocks(summary_of):
    got = summary_of(
        x.Export()
        .add(
            x.GPU_FAULTS,
            x.gpu_fault(0, 1, x.VA),
            x.gpu_fault(10, 11, x.VA),  # again
            x.gpu_fault(20, 21, x.VA + BLOCK - 4096),  # the last page of the block
            x.gpu_fault(30, 31, x.VA + BLOCK),  # the first of the next
        )
        .add(x.CPU_FAULTS, x.cpu_fault(0, x.VA), x.cpu_fault(1, x.VA + 4096))
    )
    gpu, cpu = got["gpu_faults"], got["cpu_faults"]
    assert (gpu["n_rows"], gpu["n_addresses"], gpu["n_va_blocks"]) == (4, 3, 2)
    assert (cpu["n"], cpu["n_addresses"], cpu["n_va_blocks"]) == (2, 2, 1)


def test_gpu_faults_are_split_by_access_gpu_and_process(summary_of):
    got = summary_of(
        x.Export().add(
            x.GPU_FAULTS,
            x.gpu_fault(0, 1, n=5),
            x.gpu_fault(10, 11, x.VA + BLOCK, n=7),
            x.gpu_fault(20, 21, n=3, access=x.WRITE),
            x.gpu_fault(30, 31, n=2, device=1),
            x.gpu_fault(40, 41, n=1, pid=7),
        )
    )["gpu_faults"]
    keys = ("access", "device_id", "pid", "n_rows", "n_page_faults", "n_addresses", "n_va_blocks")
    assert [tuple(row[key] for key in keys) for row in got["groups"]] == [
        ("read", 0, x.PID, 2, 12, 2, 2),
        ("read", 0, 7, 1, 1, 1, 1),
        ("read", 1, x.PID, 1, 2, 1, 1),
        ("write", 0, x.PID, 1, 3, 1, 1),
    ]
    assert got["by_access"] == {
        "read": {"n_rows": 4, "n_page_faults": 15},
        "write": {"n_rows": 1, "n_page_faults": 3},
    }
    # distinct places do not add up over groups: four of the rows share an address
    assert (got["n_addresses"], got["n_va_blocks"]) == (2, 2)


@pytest.mark.parametrize(
    ("number", "label"),
    [(0, "unknown"), (1, "read"), (2, "write"), (3, "atomic"), (4, "prefetch"), (7, "other")],
)
def test_an_access_type_is_decided_by_its_number_and_keeps_it(trace_of, number, label):
    export = x.Export().add(x.GPU_FAULTS, x.gpu_fault(0, 1, access=number))
    got = trace_of(export).gpu_faults.collect()
    assert got.select("access", "access_id").row(0) == (label, number)


def test_cpu_faults_are_counted_by_process():
    schema = CPU_FAULTS.schema
    rows = [{"pid": pid, "va": va} for pid, va in ((1, 0), (2, 0), (2, 0), (2, BLOCK), (None, 5))]
    frame = pl.DataFrame([{**dict.fromkeys(schema), **row} for row in rows], schema=schema)
    assert cpu_faults_by_group(frame.lazy()).collect().rows() == [
        (2, 3, 2, 2),
        (1, 1, 1, 1),
        (None, 1, 1, 1),
    ]


def test_a_cpu_fault_keeps_where_it_was_raised(trace_of):
    row = x.cpu_fault(5, -(1 << 47), pc=-4096, function=3, module=4)
    got = trace_of(x.Export().add(x.CPU_FAULTS, row)).cpu_faults.collect()
    assert got.select("start_ns", "pid", "va", "pc", "function", "module").row(0) == (
        5,
        x.PID,
        0xFFFF_8000_0000_0000,
        0xFFFF_FFFF_FFFF_F000,
        "main",
        "app",
    )


def test_a_missing_address_makes_the_places_unknown_and_the_rows_not():
    frame = pl.LazyFrame({"va": [0, None]}, schema={"va": pl.UInt64})
    assert places(frame).collect().row(0) == (None, None)
    schema = GPU_FAULTS.schema
    rows = [{**dict.fromkeys(schema), "n_page_faults": n} for n in (3, None)]
    got = gpu_faults_by_group(pl.DataFrame(rows, schema=schema).lazy()).collect()
    assert got.select("n_rows", "n_page_faults", "n_addresses").row(0) == (2, None, None)


def test_no_faults_are_no_groups_and_no_places():
    assert gpu_faults_by_group(GPU_FAULTS.empty()).collect().height == 0
    assert cpu_faults_by_group(CPU_FAULTS.empty()).collect().height == 0
    assert places(GPU_FAULTS.empty()).collect().row(0) == (0, 0)


def test_fault_time_is_a_union_of_overlapping_batches(summary_of):
    got = summary_of(x.Export().add(x.GPU_FAULTS, x.gpu_fault(0, 100), x.gpu_fault(50, 150)))
    assert got["gpu_faults"]["busy_ns"] == 150


def test_faults_without_migrations_are_a_whole_answer(summary_of):
    # cases.md 31
    got = summary_of(x.Export().add(x.GPU_FAULTS, x.gpu_fault(0, 100, n=3)))
    assert got["gpu_faults"]["n_page_faults"] == 3
    assert (got["migrations"]["n"], got["migrations"]["bytes"]) == (0, 0)
    assert got["migrations"]["min_va"] is None
