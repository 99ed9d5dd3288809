"""Advice about the recording itself: rows that were lost, and switches that were off."""

from __future__ import annotations

import polars as pl
import pytest
from exports import (
    GPU_FAULTS,
    HTOD,
    KERNEL,
    MEMCPY,
    MEMORY,
    MIB,
    REPOSITORY,
    RUNTIME,
    VA,
    Export,
    api_call,
    gpu_fault,
    kernel,
    memory_event,
    migration,
)

from nsan.analysis.advisor.advice import Silent
from nsan.analysis.advisor.rules.recording import lost_rows, switches_missing
from nsan.asking import Asked
from nsan.schema import TABLES

GPU_OFF = {"COLLECT_UVM_GPU_PAGE_FAULTS": "false"}
ALL_OFF = {
    **GPU_OFF,
    "COLLECT_UVM_CPU_PAGE_FAULTS": "false",
    "COLLECT_GPU_MEMORY_USAGE": "false",
    "COLLECT_NVTX_TRACE": "false",
}


class Lossy:
    """Facts of a recording of 100 MiB and 100 ms in which rows are missing."""

    def __init__(self, *holes, recorded=("gpu_faults", "cpu_faults"), health=(), program="solve"):
        self.program = program
        schema = {
            "lost_bytes": pl.Int64,
            "duration_ns": pl.Int64,
            "level": pl.String,
            "is_silent": pl.Boolean,
        }
        self.holes = pl.DataFrame(holes, schema=schema, orient="row").with_columns(
            device_id=0,
            least_bytes=pl.col("lost_bytes") // 2,
            start_ns=10_000_000,
            end_ns=10_000_000 + pl.col("duration_ns"),
            earliest_ns=9_000_000,
            latest_ns=30_000_000,
        )
        self.recorded = recorded
        self.summary = {
            "migrations": {"bytes": 100 * MIB},
            "duration_ns": 100_000_000,
            "source_kind": "nsys-sqlite",
            "health": list(health)
            or [{"id": "lost_rows", "status": "warn", "text": ""}] * bool(holes),
            "switches": {
                "gpu_faults": "--cuda-um-gpu-page-faults=true",
                "cpu_faults": "--cuda-um-cpu-page-faults=true",
            },
        }

    def rows_of(self, name):
        return self.holes if name == "lost_rows" and self.holes.height else None

    def is_recorded(self, kind):
        return kind in self.recorded

    has_snapshot = False

    def events(self, name):
        found = TABLES[name].empty()
        return (
            found.collect().clear(1).with_columns(name=pl.lit(self.program)).lazy()
            if name == "processes"
            else found
        )


@pytest.mark.parametrize(
    ("lost", "duration", "certainty", "level"),
    [
        (25 * MIB, 1_000_000, "certain", "high"),  # 25 of 125 MiB
        (MIB, 10_000_000, "certain", "high"),  # 10 of 100 ms
        (2 * MIB, 500_000, "certain", "medium"),  # 2 of 102 MiB
        (MIB // 2, 500_000, "certain", "low"),
        (25 * MIB, 1_000_000, "likely", "low"),
    ],
)
def test_a_loss_weighs_by_its_share_of_bytes_or_time_and_less_where_it_is_not_certain(
    lost, duration, certainty, level
):
    (found,) = lost_rows(Lossy((lost, duration, certainty, True)))
    assert found.level == level
    assert ("probably" in found.finding) == (certainty == "likely")


def test_the_numbers_of_a_loss_are_those_of_what_is_certain():
    (found,) = lost_rows(
        Lossy((8 * MIB, 2_000_000, "certain", True), (90 * MIB, 9_000_000, "likely", True))
    )
    assert {number.label: number.value for number in found.numbers} == {
        "stretches with lost rows": 1,
        "lost, about": 8 * MIB,
        "lost, at least": 4 * MIB,
        "time without rows": 2_000_000,
    }
    assert {number.kind for number in found.numbers} == {"reconstructed"}


def test_a_loss_without_a_silence_has_no_time_and_says_between_what_it_lies():
    (found,) = lost_rows(Lossy((MIB, 20_000_000, "certain", False)))
    assert found.level == "low"
    assert "somewhere between 9.000 ms and 30.000 ms" in found.finding


@pytest.mark.parametrize("recorded", [(), ("cpu_faults",), ("gpu_faults", "cpu_faults")])
def test_the_line_that_records_less_turns_off_the_faults_that_were_recorded(recorded):
    (found,) = lost_rows(Lossy((MIB, 1_000_000, "certain", True), recorded=recorded))
    off = {word for word in found.calls[0].split() if word.endswith("=false")}
    assert off == {f"--cuda-um-{kind[:3]}-page-faults=false" for kind in recorded}
    assert "--capture-range=cudaProfilerApi --capture-range-end=stop" in found.calls[0]


@pytest.mark.parametrize(("program", "is_told"), [("python3", True), ("solve", False)])
def test_the_profiler_of_pytorch_is_named_where_something_hints_at_pytorch(program, is_told):
    (found,) = lost_rows(Lossy((MIB, 1_000_000, "certain", True), program=program))
    assert any("torch.cuda.profiler" in line for line in found.calls) == is_told


@pytest.mark.parametrize(("status", "is_known"), [("ok", True), ("unknown", False), (None, False)])
def test_that_nothing_was_lost_is_known_as_far_as_it_was_checked(status, is_known):
    health = [{"id": "lost_rows", "status": status, "text": "As found."}] if status else []
    (found,) = lost_rows(Lossy(health=health))
    assert isinstance(found, Silent)
    assert found.is_known == is_known
    assert (found.reason == "As found.") == (status is not None)


# Switches -------------------------------------------------------------------------------------------


@pytest.fixture
def missing(built):
    """Ask what was not recorded of an export; it says one thing."""

    def ask(export):
        (found,) = switches_missing(Asked(built(export)))
        return found

    return ask


def moving(**changed):
    """One copy that a page fault caused, and the call that allocated the memory."""
    export = Export(**changed).add(KERNEL, kernel(0, 1000)).add(RUNTIME, api_call(0, 10))
    return export.add(MEMCPY, migration(100, 200, MIB, kind=HTOD))


def lines(advice):
    return advice.calls[0].split()


def test_with_all_switches_on_there_is_nothing_to_add(missing):
    export = moving().add(GPU_FAULTS, gpu_fault(50, 210))
    found = missing(export.add(MEMORY, memory_event(5, VA, MIB)))
    assert isinstance(found, Silent)
    assert found.is_known


def test_the_line_to_record_has_what_is_missing_and_what_was_recorded(missing):
    found = missing(moving(options=GPU_OFF))
    assert found.title == "Record GPU page faults as well"
    assert lines(found)[:2] == ["nsys", "profile"]
    assert {word for word in lines(found) if word.startswith("--")} == {
        "--trace=cuda,nvtx",
        "--cuda-um-gpu-page-faults=true",
        "--cuda-um-cpu-page-faults=true",
        "--cuda-memory-usage=true",
    }


@pytest.mark.parametrize(
    ("options", "level"),
    [
        (GPU_OFF, "low"),
        ({"COLLECT_GPU_MEMORY_USAGE": "false"}, "low"),
        ({"COLLECT_UVM_CPU_PAGE_FAULTS": "false"}, "info"),
        ({"COLLECT_NVTX_TRACE": "false"}, "info"),
    ],
)
def test_where_migrations_tell_switches_matter_little(missing, options, level):
    assert missing(moving(options=options)).level == level


def test_where_nothing_moved_and_faults_were_not_recorded_it_matters_more(missing):
    export = Export(options=ALL_OFF).add(KERNEL, kernel(0, 1000)).add(RUNTIME, api_call(0, 10))
    found = missing(export)
    assert found.level == "medium"
    assert found.finding.startswith("Nothing was seen to move")
    assert found.rows[0].frame["events"].to_list() == [
        "GPU page faults",
        "managed allocations",
        "CPU page faults",
        "NVTX ranges",
    ]


def test_a_kind_of_which_it_is_unknown_is_not_said_to_be_missing(missing):
    found = missing(moving(options={"COLLECT_UVM_GPU_PAGE_FAULTS": None}))
    assert found.finding.startswith("Whether GPU page faults were recorded is unknown")


def test_a_capture_without_unified_memory_needs_no_switch(missing):
    found = missing(Export(options=ALL_OFF).add(KERNEL, kernel(0, 1000)))
    assert isinstance(found, Silent)
    assert not found.is_known
    assert found.reason.startswith("Nothing of Unified Memory is in this capture")


def test_a_part_without_unified_memory_says_no_more_than_that(built):
    path = built(moving(options=ALL_OFF).add(KERNEL, kernel(5000, 6000)))
    (found,) = switches_missing(Asked(path, filters={"time": (5000, 6000)}))
    assert found.reason == (
        "Nothing of Unified Memory is in this part of the capture: no migration, no page fault and no managed "
        "allocation."
    )


def test_nvprof_does_not_tell_why_memory_moved_and_nsys_would():
    (found,) = switches_missing(Asked(REPOSITORY / "sample_data/nvprof_hotspot_v100_1024.log.gz"))
    assert found.level == "info"
    assert found.title.startswith("Record with nsys")
