"""What a case of a device check is worth: a trace that shows nothing of Unified Memory is none, however well it ended."""

from __future__ import annotations

import csv
from pathlib import Path

import bench_tables
import exports as x
import pytest
from bench_tables import row

from nsan.cli.bench_device_check import _check_text
from nsan.microbench.checking import Check, Checked, _snapshot, judged
from nsan.microbench.evidence import lack_of
from nsan.microbench.results import CaseResult
from nsan.opening import import_trace

MANAGED = x.memory_event(20, x.VA, 4 * x.MIB)
RANGES = (
    x.nvtx(0, 0, "nsan", kind=75, domain=1),
    x.nvtx(100, 200, "run", domain=1),
)
MOVED = x.migration(110, 120, 2 * x.MIB)
FAULT = x.gpu_fault(105, 109)


def case(name="stream", status="ok", reason=""):
    return CaseResult(name, status, 0, 0, 0.5, 1.5, reason, "--pattern stream", "uvm_bench")


def truth(folder, *, least_bytes):
    """Write the tables of a program with one array, of which so many bytes must go to the GPU."""
    bench_tables.write(folder, [row("a", x.VA, 4 * x.MIB, 11)])
    tables = {
        "phases.csv": (
            ("phase", "name", "iteration", "start_ns", "end_ns"),
            (0, "run", "", 0, 100),
        ),
        "expected.csv": (
            ("phase", "allocation", "direction", "least_bytes", "most_bytes"),
            (0, 0, "htod", least_bytes, 4 * x.MIB),
        ),
    }
    for name, rows in tables.items():
        with (folder / name).open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


@pytest.fixture
def check(tmp_path):
    """Judge a case by its trace: kernels and managed memory, and what else is given."""

    def run(*tables, least_bytes=0, status="ok", kernels=True):
        made = x.Export().add(x.MEMORY, MANAGED).add(x.NVTX, *RANGES)
        if kernels:
            made.add(x.KERNEL, x.kernel(100, 190))
        for table, *rows in tables:
            made.add(table, *rows)
        capture = made.write(tmp_path / "stream.sqlite")
        truth(tmp_path / "stream.truth", least_bytes=least_bytes)
        store = import_trace(capture, tmp_path / "store")
        return judged(case(status=status), capture, store)

    return run


def test_a_trace_that_shows_what_the_program_knows_is_well(check):
    found = check((x.MEMCPY, MOVED), least_bytes=2 * x.MIB)
    assert (found.status, found.problem, found.is_well) == ("ok", "", True)
    assert (found.bytes.n_checked, found.bytes.n_right) == (1, 1)
    document = found.to_dict()["bytes"]
    assert (document["n_checked"], document["n_right"], document["wrong"]) == (1, 1, ())


def test_other_bytes_than_the_program_knows_are_told_and_the_trace_is_kept(check, tmp_path):
    found = check((x.MEMCPY, MOVED), least_bytes=3 * x.MIB)
    assert found.status == "ok"
    assert (found.bytes.n_checked, found.bytes.n_right) == (1, 0)
    said = _check_text(Check(tmp_path, {}, (found,)), verbose=False)
    assert "0 of 1" in said
    assert "2.00 MiB (2097152 B) in the trace, 3.00 MiB (3145728 B)" in said


@pytest.mark.parametrize("least_bytes", [0, 4096])
def test_kernels_without_anything_of_unified_memory_are_no_recording(check, least_bytes):
    found = check(least_bytes=least_bytes)
    assert (found.status, found.is_well) == ("not_recorded", False)
    assert found.problem.startswith("it ended well, and ")
    assert "no migration" in found.problem
    assert "the rows were not recorded" in found.problem  # what nsan says of such a capture


def test_faults_alone_are_a_recording_unless_something_must_migrate(check):
    # Memory that the GPU touches first faults, and nothing migrates.
    assert check((x.GPU_FAULTS, FAULT)).status == "ok"


def test_faults_without_the_migration_that_must_be_there_are_no_recording(check):
    found = check((x.GPU_FAULTS, FAULT), least_bytes=4096)
    assert found.status == "not_recorded"
    assert "by what its program knows bytes migrated" in found.problem


@pytest.mark.parametrize(("least_bytes", "status"), [(0, "ok"), (4096, "not_recorded")])
def test_a_fault_of_the_cpu_counts_only_where_nothing_must_migrate(check, least_bytes, status):
    assert check((x.CPU_FAULTS, x.cpu_fault(105)), least_bytes=least_bytes).status == status


@pytest.mark.parametrize("demands_bytes", [False, True])
@pytest.mark.parametrize(
    ("doubtful", "lack"),
    [
        ([], "data"),
        (["busy", "gpus", "managed_calls"], "data"),
        (["span"], ""),
        (["managed_allocations"], ""),
    ],
)
def test_only_rows_that_may_be_what_is_missing_excuse_it(doubtful, lack, demands_bytes):
    counts = dict.fromkeys(("kernels", "migrations", "gpu_faults", "cpu_faults"), 0)
    managed = dict.fromkeys(("n_managed_allocations", "n_managed_calls"), 0)
    totals = {"counts": counts | {"kernels": 5}, "managed": managed}
    assert lack_of({"doubtful": doubtful}, totals, demands_bytes=demands_bytes) == lack


def test_what_did_not_end_well_keeps_its_own_status(check):
    found = check(status="failed")
    assert (found.status, found.problem) == ("failed", "")


@pytest.mark.parametrize("tables", [(), ((x.CPU_FAULTS, x.cpu_fault(105)),)])
def test_a_trace_without_kernels_says_so(check, tables):
    found = check(*tables, kernels=False)
    assert found.status == "not_recorded"
    assert "nothing of the GPU" in found.problem


def test_a_history_that_makes_no_snapshot_is_a_note_beside_the_trace(tmp_path):
    folder = tmp_path / "stream.truth"
    bench_tables.write(folder, [row("a", x.VA, 4 * x.MIB, 11)])
    (folder / "history.csv").write_text("no,history\n1,2\n")
    note = _snapshot(tmp_path, "stream")
    assert note.startswith("its memory snapshot could not be made: ")
    assert not (tmp_path / "stream.pickle").exists()


@pytest.mark.parametrize(
    ("status", "capture", "problem", "shown"),
    [
        ("ok", None, "its stream did not come home", "not_imported"),
        ("ok", Path("a.qdstrm"), "it cannot be read", "not_imported"),
        ("failed", None, "a reason", "failed"),
        ("no_stream", None, "nsys made no stream", "no_stream"),
        ("failed", Path("a.qdstrm"), "it cannot be read", "not_imported"),
    ],
)
def test_a_case_without_a_trace_is_never_well(status, capture, problem, shown):
    found = Checked(case(status=status), capture, None, "no capture", None, problem=problem)
    assert (found.status, found.is_well) == (shown, False)


def test_what_is_to_be_known_stands_once_with_every_case_that_it_is_about(tmp_path):
    reason = "uvm_bench: no NVIDIA driver is installed here"
    cases = [
        Checked(case(name, "no_driver", reason), None, None, "no capture", None, problem=reason)
        for name in ("signature", "stream")
    ]
    said = _check_text(Check(tmp_path, {}, tuple(cases)), verbose=False)
    assert said.count(reason) == 1
    assert f"  every case: {reason}" in said
    cases.append(Checked(case("random"), None, None, "no capture", None, problem="lost"))
    said = _check_text(Check(tmp_path, {}, tuple(cases)), verbose=False)
    assert f"  signature, stream: {reason}" in said
    assert "  random: lost" in said


def test_what_nsan_warns_of_in_a_capture_is_told_of_a_case_that_is_well(check, tmp_path):
    odd = x.migration(130, 140, 100, x.VA + 2 * x.MIB)
    found = check((x.MEMCPY, MOVED, odd))
    assert found.status == "ok"
    said = _check_text(Check(tmp_path, {}, (found,)), verbose=False)
    assert "stream: Of 2 migrations 1 are not whole pages" in said
