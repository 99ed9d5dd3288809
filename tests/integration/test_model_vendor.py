"""The vendor's own scripts read modelled captures, and find in them what was put there."""

from __future__ import annotations

import csv
import sys

import polars as pl
import pytest
import vendor
from exports import MIB, VA

import nsan
from nsan.model.nsys_export import ExportOptions, Machine, write_export
from nsan.schema import TABLES

pytestmark = pytest.mark.nsys

PAGE = 4096
PID = 4242
MACHINE = Machine("nsan-model stream", "UVM driver model of nsan")
EVERYTHING = ("3.7.2", "3.25.0")
"""Schemas that have all that the scripts of both versions ask for."""

every_version = pytest.mark.parametrize("version", vendor.VERSIONS)

SCRIPTS = {
    "cpu_faults": {"2023.4.4": "um_cpu_page_faults_sum", "2022.4.2": "umcpupagefaults"},
    "gpu": {"2023.4.4": "cuda_gpu_trace", "2022.4.2": "gputrace"},
    "calls": {"2023.4.4": "cuda_api_trace", "2022.4.2": "cudaapitrace"},
    "ranges": {"2022.4.2": "nvtxpptrace"},
}
"""Of those that need no function of the SQLite that comes with nsys."""


def frame(table, *rows):
    """Rows of a table of ours; what a row does not say is null."""
    columns = TABLES[table].schema
    filled = [{**dict.fromkeys(columns), **row} for row in rows]
    return pl.DataFrame(filled, schema=columns, orient="row")


def event(start, end, **more):
    return {"start_ns": start, "end_ns": end, "pid": PID, "device_id": 0} | more


def migration(start, size, direction, va=VA):
    return event(start, start + 10, va=va, bytes=size, direction=direction, cause="coherence")


def gpu_fault(start, n, va=VA):
    return event(start, start + 10, va=va, n_page_faults=n, access="read")


def cpu_fault(start, function, va=VA):
    return {"start_ns": start, "pid": PID, "va": va, "pc": 1, "function": function}


TOP = VA + 4 * MIB
CAPTURE = {
    "gpu_faults": frame("gpu_faults", gpu_fault(10, 256), gpu_fault(50, 3, VA + PAGE)),
    "cpu_faults": frame(
        "cpu_faults",
        cpu_fault(100, "main"),
        cpu_fault(110, "sum(float*, int)", TOP),
        cpu_fault(120, "main"),
    ),
    "migrations": frame(
        "migrations",
        migration(20, PAGE, "htod"),
        migration(30, 16 * PAGE, "htod", VA + PAGE),
        migration(105, 2 * PAGE, "dtoh"),
        migration(115, 5 * PAGE, "dtod"),
    ),
    "copies": frame("copies", event(60, 70, bytes=999, kind="htod")),
    "kernels": frame(
        "kernels",
        *(
            event(start, start + 40, name="add", demangled="add(int, float*)", grid=[2, 1, 1])
            | {"block": [256, 1, 1], "is_graph_launch": False, "correlation_id": start}
            for start in (0, 200)
        ),
    ),
    "api_calls": frame(
        "api_calls",
        *(
            {"start_ns": start, "end_ns": start + 5, "pid": PID, "tid": PID}
            | {"correlation_id": start, "name": "cudaLaunchKernel_v7000", "return_value": 0}
            for start in (0, 200)
        ),
    ),
    "nvtx_ranges": frame(
        "nvtx_ranges",
        {"start_ns": 0, "end_ns": 90, "pid": PID, "tid": PID, "name": "step", "depth": 0}
        | {"kind": "push_pop", "closed": True, "range_id": 0, "domain": "phases"},
    ),
    "processes": frame("processes", {"pid": PID, "name": "app"}),
    "devices": frame("devices", {"device_id": 0, "gpu_id": 0, "name": "NVIDIA A100"}),
}
"""By hand: 17 pages to the device, 2 back, 259 counted GPU faults, 3 CPU faults."""


@pytest.fixture
def export(tmp_path):
    """Write the capture; return the file."""

    def write(**options):
        path = tmp_path / "model.sqlite"
        return write_export(path, CAPTURE, MACHINE, ExportOptions(**options), overwrite=True)

    return write


def printed(version, kind, path):
    """Run a script; return its rows by column."""
    folder = vendor.need(version)
    script = folder / "reports" / f"{SCRIPTS[kind][version]}.py"
    done = vendor._run(
        [sys.executable, "-B", str(script), str(path)],
        PYTHONPATH=str(folder / "python" / "lib"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return list(csv.DictReader(done.stdout.splitlines()))


@every_version
@pytest.mark.parametrize("schema", ["2.9.1", "3.0.0", "3.7.2", "3.17.2", "3.25.0"])
@pytest.mark.parametrize("lazy", [True, False])
def test_the_vendors_totals_are_those_that_were_written(version, schema, lazy, export):
    path = export(schema=schema, lazy=lazy)
    theirs = vendor.totals(version, path).only
    assert theirs == {
        "htod_bytes": 17 * PAGE,
        "dtoh_bytes": 2 * PAGE,
        "n_cpu_faults": 3,
        "n_page_faults": 259,
        "min_va": VA,
        "max_va": TOP,
    }
    ours = nsan.summary(path)
    assert ours["migrations"]["htod_bytes"] == theirs["htod_bytes"]
    assert ours["gpu_faults"]["n_page_faults"] == theirs["n_page_faults"]


@every_version
@pytest.mark.parametrize("seed", [None, 7])
def test_the_vendor_gives_each_address_what_was_written_there(version, seed, export):
    rows = vendor.by_address(version, export(shuffle_seed=seed)).rows
    found = {row["va"]: tuple(row[name] for name in vendor.BY_ADDRESS[1:5]) for row in rows}
    assert found == {
        VA: (PAGE, 2 * PAGE, 2, 256),
        VA + PAGE: (16 * PAGE, None, None, 3),
        TOP: (None, None, 1, None),
    }


@every_version
@pytest.mark.parametrize("schema", EVERYTHING)
def test_the_vendor_counts_cpu_faults_by_function(version, schema, export):
    rows = printed(version, "cpu_faults", export(schema=schema))
    assert {row["CPU Instruction Address"]: row["CPU Page Faults"] for row in rows} == {
        "main": "2",
        "sum(float*, int)": "1",
    }


@every_version
@pytest.mark.parametrize("schema", EVERYTHING)
def test_the_vendor_lists_gpu_work_of_a_modelled_capture(version, schema, export):
    rows = printed(version, "gpu", export(schema=schema))
    columns = ("Start:ts_ns", "Duration:dur_ns", "Bytes:mem_B", "GrdX", "BlkX", "Ctx", "Strm")
    assert [tuple(row[column] for column in columns) for row in rows] == [
        ("0", "40", "", "2", "256", "1", "7"),
        ("20", "10", str(PAGE), "", "", "0", "0"),
        ("30", "10", str(16 * PAGE), "", "", "0", "0"),
        ("60", "10", "999", "", "", "1", "7"),
        ("105", "10", str(2 * PAGE), "", "", "0", "0"),
        ("115", "10", str(5 * PAGE), "", "", "0", "0"),
        ("200", "40", "", "2", "256", "1", "7"),
    ]
    assert {row["Device"] for row in rows} == {"NVIDIA A100 (0)"}
    assert rows[0]["Name"] == "add(int, float*)"


@every_version
@pytest.mark.parametrize("schema", EVERYTHING)
def test_the_vendor_lists_api_calls_of_a_modelled_capture(version, schema, export):
    rows = printed(version, "calls", export(schema=schema))
    columns = ("Start:ts_ns", "Duration:dur_ns", "Name", "Pid", "Tid", "Thread Name")
    called = ("cudaLaunchKernel", str(PID), str(PID), "app")
    assert [tuple(row[column] for column in columns) for row in rows] == [
        ("0", "5", *called),
        ("200", "5", *called),
    ]


def test_the_vendor_finds_ranges_in_their_domain(export):
    (row,) = printed("2022.4.2", "ranges", export())
    assert (row["Start:ts_ns"], row["End:ts_ns"], row["Name"]) == ("0", "90", "phases:step")


@every_version
def test_the_vendor_refuses_what_was_not_recorded(version, export):
    refused = vendor.totals(version, export(gpu_faults=False))
    assert refused.rows == []
    assert "GPU page faults" in refused.messages
