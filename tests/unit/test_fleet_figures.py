"""The figures of reports: those of each report's own summary, and unknown where a report has not recorded them."""

from __future__ import annotations

import json

import exports as x
import pytest
from fleet_members import MIB, MS, group, member, moving

import nsan
from nsan.fleet.figures import (
    MIGRATION_FIGURES,
    REPORT_FIGURES,
    migration_figures,
    report_figures,
)
from nsan.fleet.member import Member
from nsan.opening import store_of
from nsan.uvm.constants import CAUSES

SAMPLES = x.REPOSITORY / "sample_data"
REAL = (
    SAMPLES / "um_vector_add_rtx4060l.sqlite",
    SAMPLES / "model" / "two_gpus" / "two_gpus.sqlite",
    SAMPLES / "model" / "pca_off" / "pca_off.sqlite",
)


def row(*members):
    return report_figures(members).to_dicts()[0]


def of(path):
    _, manifest = store_of(path)
    return Member("r", 0, path.name, manifest["info"], manifest["totals"])


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_every_figure_is_that_of_the_summary_of_the_report(path):
    said, found = nsan.summary(path), row(of(path))
    same = {
        "duration_ns": said["duration_ns"],
        "last_ns": said["last_ns"],
        "session_start_utc_ns": said["session_start_utc_ns"],
        "migrations_busy_ns": said["migrations"]["busy_ns"],
        "gpu_faults_busy_ns": said["gpu_faults"]["busy_ns"],
        "kernels_busy_ns": said["kernels"]["busy_ns"],
        "n_migrations": said["migrations"]["n"],
        "bytes": said["migrations"]["bytes"],
        "htod_bytes": said["migrations"]["htod_bytes"],
        "dtoh_bytes": said["migrations"]["dtoh_bytes"],
        "dtod_bytes": said["migrations"]["dtod_bytes"],
        "n_fault_rows": said["gpu_faults"]["n_rows"],
        "n_page_faults": said["gpu_faults"]["n_page_faults"],
        "n_cpu_faults": said["cpu_faults"]["n"],
        "n_kernels": said["kernels"]["n"],
        "managed_bytes": said["managed"]["bytes"],
        "health": said["health"][0]["status"],
    }
    assert {name: found[name] for name in same} == same
    causes = {name: figures["bytes"] for name, figures in said["migrations"]["by_cause"].items()}
    told = {name: found[f"{name}_bytes"] for name in CAUSES.values() if name != "unknown"}
    assert told == {name: causes.get(name, 0) for name in told}


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_migrations_by_report_are_the_rows_of_the_export(path):
    """Plain SQL on the export: number and bytes of copies of managed memory."""
    found = migration_figures([of(path)])
    ((n, size),) = x.ask(
        path, f"select count(*), sum(bytes) from {x.MEMCPY} where copyKind in (11, 12, 13)"
    )
    assert (found["n"].sum(), found["bytes"].sum()) == (n, size)
    ((n, size),) = x.ask(
        path,
        f"select count(*), coalesce(sum(bytes), 0) from {x.MEMCPY} where copyKind = 11 and migrationCause = 2",
    )
    part = found.filter(direction="htod", cause="coherence")
    assert (part["n"].sum(), part["bytes"].sum()) == (n, size)


def test_what_was_not_recorded_is_unknown_and_never_0():
    found = row(member(off=("gpu_faults", "cpu_faults", "migrations", "allocations")))
    unknown = ("migrations_busy_ns", "gpu_faults_busy_ns", "um_ns", "um_at_least_ns", "bytes")
    unknown += ("n_migrations", "eviction_bytes", "other_bytes", "n_fault_rows", "n_cpu_faults")
    assert {found[name] for name in (*unknown, "managed_bytes")} == {None}


def test_what_was_recorded_and_did_not_happen_is_0():
    found = row(member())
    names = ("um_ns", "um_at_least_ns", "bytes", "n_migrations", "eviction_bytes", "n_cpu_faults")
    assert {found[name] for name in names} == {0}


@pytest.mark.parametrize(
    ("migrating", "faulting", "off", "um", "at_least"),
    [
        (5, 9, (), None, 9),  # how much is common is not known
        (0, 9, (), 9, 9),
        (5, 0, (), 5, 5),
        (5, 0, ("gpu_faults",), None, 5),  # faults may have taken any time
        (0, 9, ("migrations",), None, 9),
    ],
)
def test_um_time_is_known_where_both_are_and_one_is_nothing(migrating, faulting, off, um, at_least):
    found = row(member(groups=moving(migrating), faults_ns=faulting * MS, fault_rows=1, off=off))
    assert found["um_ns"] == (None if um is None else um * MS)
    assert found["um_at_least_ns"] == at_least * MS


def test_causes_that_have_no_column_are_other():
    groups = [group("htod", cause, size, 1) for cause, size in (("unknown", 3), (None, 4))]
    found = row(member(groups=[*groups, group("htod", "user", 7, 1), group("dtoh", "other", 9, 1)]))
    assert (found["other_bytes"], found["user_bytes"], found["bytes"]) == (16, 7, 23)
    assert found["coherence_bytes"] == 0


def test_bytes_that_could_not_be_read_make_their_cause_and_the_whole_unknown():
    groups = [group("htod", "user", 7, 1), group("htod", "coherence", 5, 1) | {"bytes": None}]
    found = row(member(groups=groups))
    assert (found["bytes"], found["coherence_bytes"], found["user_bytes"]) == (None, None, 7)


def test_a_gpu_of_the_machine_that_two_processes_name_is_one():
    made = member()
    gpu = made.totals["devices"][0]
    made.totals["devices"][:] = [gpu | {"pid": 1}, gpu | {"pid": 2}, gpu | {"gpu_id": 1}]
    found = row(made)
    assert (found["n_gpus"], found["gpu_memory_bytes"], found["gpus"]) == (2, 2000 * MIB, "GPU X")


def test_a_number_that_no_machine_could_have_recorded_is_left_out():
    found = row(member(groups=[group("htod", "user", 2**63, 1)]))
    assert found["bytes"] is None
    assert migration_figures([member(groups=[group("htod", "user", 2**63, 1)])])["bytes"][0] is None


def test_migrations_are_apart_by_process_gpu_direction_and_cause_in_the_order_of_reports():
    groups = [
        group("htod", "user", 1, 2, pid=30, n=9),
        group("dtoh", "user", 3, 4, pid=4, device=1),
        group("dtoh", "eviction", 5, 6, pid=4, device=1),
    ]
    members = [member("b", 1, groups=groups), member("a", None, source="s", groups=groups[:1])]
    found = migration_figures(members)
    assert found.schema == MIGRATION_FIGURES.schema
    assert found.rows() == [
        ("b", 1, "b/rank1.sqlite", 4, 1, "dtoh", "eviction", 1, 5, 6),
        ("b", 1, "b/rank1.sqlite", 4, 1, "dtoh", "user", 1, 3, 4),
        ("b", 1, "b/rank1.sqlite", 30, 0, "htod", "user", 9, 1, 2),
        ("a", None, "s", 30, 0, "htod", "user", 9, 1, 2),
    ]


def test_a_report_without_recorded_migrations_has_no_row():
    assert migration_figures([member(groups=moving(5), off=("migrations",))]).is_empty()


def test_no_report_gives_no_row_with_all_columns():
    assert report_figures([]).schema == REPORT_FIGURES.schema
    assert migration_figures([]).schema == MIGRATION_FIGURES.schema


def test_members_that_came_through_json_have_the_same_figures():
    made = of(REAL[1])
    read = Member("r", 0, made.source, *json.loads(json.dumps([made.info, made.totals])))
    assert report_figures([read]).equals(report_figures([made]))
