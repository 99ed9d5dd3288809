"""Where the figures of a report come from: versions, command, date, and what each section stands on."""

from __future__ import annotations

import shlex

import exports as x
import pytest
import reports

import nsan
from nsan.errors import UsageError
from nsan.report.report import Report
from nsan.report.sections.provenance import command_of, session_start

STANDING = "What each section stands on"


def test_the_sections_name_the_analyses_that_ran_for_them_and_no_others():
    report = Report(reports.REAL)
    assert STANDING not in reports.tables(report.section("provenance"))
    report.section("traffic")
    (row,) = reports.tables(report.section("provenance"))[STANDING]
    assert row["Section"] == "What moved, when and why"
    assert set(row["Analyses"].split(", ")) == {
        "causes_over_time",
        "prefetch_share",
        "traffic_matrix",
    }


def test_the_kind_of_a_section_is_the_least_certain_of_its_figures():
    report = Report(reports.REAL)
    report.section("verdict")
    rows = reports.tables(report.section("provenance"))[STANDING]
    assert {row["Least certain kind"]: row["Analyses"] for row in rows} == {
        "reconstructed": "faults_by_allocation, faults_by_kernel",
    }
    assert [row["Section"] for row in rows] == ["The verdict"]


def test_everything_of_a_modelled_trace_is_modelled():
    report = Report(reports.path_of("two_gpus"))
    report.section("verdict")
    kinds = set(report.used["verdict"].values())
    assert kinds == {"modelled"}


def test_an_analysis_that_is_asked_twice_keeps_its_least_certain_kind():
    report = Report(reports.REAL)
    report.frame("batches")
    report.lazy("batches")
    report.frame("traffic_matrix")
    assert report.used[""] == {"batches": "reconstructed", "traffic_matrix": "derived"}


def test_an_analysis_that_found_nothing_is_a_ground_as_certain_as_what_it_looks_for():
    report = Report(reports.REAL)
    assert report.frame("ping_pong").height == 0
    assert report.used == {"": {"ping_pong": "reconstructed"}}


@pytest.mark.parametrize(
    ("sample", "section", "name"),
    [("hotspot_8192", "ping_pong", "ping_pong"), ("real", "steps", "iterations")],
)
def test_a_section_that_says_there_is_nothing_names_what_looked_for_it(sample, section, name):
    report = Report(reports.path_of(sample))
    report.section(section)
    assert name in report.used[section]


def test_what_cannot_be_asked_of_a_part_is_no_ground():
    part = Report(reports.path_of("two_gpus"), filters={"device": 1})
    with pytest.raises(UsageError, match="needs the whole capture"):
        part.lazy("prefetch_share")
    assert part.used == {}


def test_what_was_asked_and_not_told_is_no_ground(built):
    # The allocation moved nothing, so the verdict names no place.
    export = x.Export().add(x.MEMORY, x.memory_event(1, x.VA, x.MIB))
    report = Report(built(export.add(x.KERNEL, x.kernel(10, 20))))
    report.section("verdict")
    assert report.frame("faults_by_allocation").height
    assert "faults_by_allocation" not in report.used["verdict"]
    assert "faults_by_kernel" in report.used["verdict"]


def test_the_command_has_names_and_filters_but_no_folder(tmp_path):
    place = tmp_path / "my trace.sqlite"
    place.write_bytes(reports.path_of("pca_on").read_bytes())
    filters = {"time": "-1ms/2s", "nvtx": "step/0", "device": [0], "pid": 4242}
    report = Report(place, filters=filters, rows=3, theme="dark")
    words = shlex.split(command_of(report))
    assert words[:3] == ["nsan", "report", "my trace.sqlite"]
    assert words[3:] == [
        "--filter-time=-1ms/2s",
        *("--filter-nvtx", "step/0", "--gpu", "0", "--pid", "4242"),
        *("--rows", "3", "--theme", "dark"),
    ]
    assert str(tmp_path) not in str(report.section("provenance"))


def test_a_snapshot_that_was_asked_for_is_in_the_command_without_its_folder():
    folder = reports.path_of("pca_on").parent
    report = Report(folder / "pca_on.sqlite", folder / "snapshot.pickle")
    assert command_of(report) == "nsan report pca_on.sqlite --snapshot snapshot.pickle"


def test_a_snapshot_of_another_folder_is_not_taken_for_the_one_beside_the_trace():
    model = reports.path_of("pca_on").parent.parent
    report = Report(model / "pca_on" / "pca_on.sqlite", model / "pca_off" / "snapshot.pickle")
    assert command_of(report) == "nsan report pca_on.sqlite --snapshot FOLDER/snapshot.pickle"
    said = reports.points(report.section("provenance"))["Command:"].text
    assert said.endswith("in the folder of the trace, where `FOLDER` is that of the snapshot")
    assert str(model) not in said


def test_the_date_is_that_of_the_export_in_utc():
    query = "SELECT strftime('%Y-%m-%d %H:%M:%S', utcEpochNs / 1000000000, 'unixepoch') FROM "
    ((date,),) = x.ask(reports.REAL, query + "TARGET_INFO_SESSION_START_TIME")
    found = reports.points(reports.opened("real").section("provenance"))
    assert found["Session:"].text == f"began {date} UTC"


@pytest.mark.parametrize("ns", [None, 0, 1 << 80, -(1 << 80)])
def test_a_date_that_is_none_is_left_out(ns):
    assert session_start({"session_start_utc_ns": ns, "source_kind": "nsys-sqlite"}) == ""


def test_a_modelled_trace_has_no_date():
    assert session_start({"session_start_utc_ns": 10**18, "source_kind": "nsan-model"}) == ""


def test_versions_are_those_that_ran():
    found = reports.points(reports.opened("real").section("provenance"))
    assert found["Made by:"].text.startswith(f"nsan {nsan.__version__}, Python 3.")
    assert "export schema 3.7.2" in found["Trace:"].text


def test_all_four_kinds_are_explained():
    found = reports.points(reports.opened("real").section("provenance"))
    assert {"Recorded:", "Derived:", "Reconstructed:", "Modelled:"} <= set(found)


def test_what_a_notebook_leaves_empty_is_no_filter_but_gpu_0_is():
    report = Report(reports.REAL, filters={"time": "", "nvtx": None, "device": 0, "pid": []})
    assert report.filters == {"device": 0}
    assert command_of(report).endswith("--gpu 0")
