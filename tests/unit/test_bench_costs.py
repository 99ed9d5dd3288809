"""What a run of the benchmark cost and under what it was made: numbers by hand."""

from __future__ import annotations

import json
from pathlib import Path

import exports as x
import pytest

from nsan.microbench.conditions import condition_of, hint_of
from nsan.microbench.costs import costs, phase_medians, traffic
from nsan.microbench.running import Outcome, exit_status
from nsan.microbench.work import Work
from nsan.opening import store_of

NOWHERE = Path("/nowhere/bench")
WORK = Work("uvm_bench", NOWHERE)
KIB = x.KIB


def phases(**times):
    """Phases of a run: name to times of its iterations."""
    listed = [
        {"name": name, "iteration": number, "ns": ns}
        for name, each in times.items()
        for number, ns in enumerate(each)
    ]
    return {"phases": listed}


def test_the_time_of_a_phase_is_the_median_over_its_iterations():
    about = phases(run=[900, 100, 200], init=[7], check=[4, 6])
    assert phase_medians(about) == {"run": 200, "init": 7, "check": 5}


def test_a_phase_that_did_not_end_has_no_time():
    assert phase_medians(phases(run=[10, None], check=[None])) == {"run": 10}
    assert phase_medians({}) == {}


@pytest.fixture
def manifest_of(built):
    return lambda export: store_of(built(export))[1]


def test_traffic_is_summed_by_direction_and_cause(manifest_of):
    export = x.Export().add(
        x.MEMCPY,
        x.migration(0, 10, 4 * KIB),
        x.migration(20, 30, 60 * KIB, cause=x.PREFETCH),
        x.migration(40, 50, 8 * KIB, cause=x.USER),
        x.migration(60, 70, 16 * KIB, kind=x.DTOH, cause=x.EVICTION),
        x.migration(65, 80, 4 * KIB, kind=x.DTOH),
    )
    export.add(x.GPU_FAULTS, x.gpu_fault(0, 11), x.gpu_fault(12, 31, n=7))
    export.add(x.CPU_FAULTS, x.cpu_fault(64)).add(x.KERNEL, x.kernel(0, 100))
    assert traffic(manifest_of(export)) == {
        "in_coherence_bytes": 4 * KIB,
        "in_prefetch_bytes": 60 * KIB,
        "in_user_bytes": 8 * KIB,
        "out_bytes": 20 * KIB,
        "evicted_bytes": 16 * KIB,
        "migration_ns": 50,  # three times 10, and 60 to 80
        "n_batches": 2,
        "n_cpu_faults": 1,
        "kernel_ns": 100,
    }


def test_what_was_not_recorded_is_unknown_and_not_zero(manifest_of):
    off = {"COLLECT_UVM_GPU_PAGE_FAULTS": "false", "COLLECT_UVM_CPU_PAGE_FAULTS": "false"}
    export = x.Export(options=off).add(x.MEMCPY, x.migration(0, 10, 4 * KIB))
    found = traffic(manifest_of(export))
    assert (found["n_batches"], found["n_cpu_faults"]) == (None, None)
    assert found["in_coherence_bytes"] == 4 * KIB
    assert set(traffic(None)) == set(found)
    assert set(traffic(None).values()) == {None}


def test_the_costs_of_a_run_come_from_its_tables(tmp_path):
    place = tmp_path / "run"
    for kind, managed in (("alone", 11), ("truth", 12)):
        (place / f"run.{kind}").mkdir(parents=True)
        footprint = {"managed_bytes": managed, "available_bytes": 20}
        about = {"nsan_microbench": 1, "pid": 7, "footprint": footprint, "verified": True}
        about |= phases(run=[30 if kind == "alone" else 99])
        (place / f"run.{kind}" / "run.json").write_text(json.dumps(about))
    found = costs(Outcome(place, {"status": "ok", "seconds_alone": 1.5}))
    assert found["run_ns"] == 30  # without nsys
    assert (found["managed_bytes"], found["available_bytes"]) == (12, 20)
    assert (found["seconds_alone"], found["verified"]) == (1.5, True)


def test_the_costs_of_a_run_without_tables_are_unknown(tmp_path):
    found = costs(Outcome(tmp_path / "run", {"status": "ok", "seconds_alone": 0.5}))
    assert found.pop("seconds_alone") == 0.5
    assert set(found.values()) == {None}


# Conditions


@pytest.mark.parametrize(
    ("prefetch", "advice", "hint"),
    [
        ("none", "none", "none"),
        ("whole", "none", "prefetch:whole"),
        ("none", "read-mostly", "advice:read-mostly"),
        ("ahead", "accessed-by", "prefetch:ahead+advice:accessed-by"),
        (None, "none", None),
    ],
)
def test_a_hint_is_prefetch_and_advice_in_one_word(prefetch, advice, hint):
    assert hint_of(prefetch, advice) == hint


def test_a_condition_is_what_the_program_says_of_its_axes():
    axes = {"allocator": "caching", "oversubscription_factor": 1.5, "prefetch": "ahead"}
    axes |= {"advice": "none", "seed": 7}
    found = condition_of(WORK, {"axes": axes, "network": "resnet-8"})
    assert (found["network"], found["allocator"], found["factor"]) == ("resnet-8", "caching", 1.5)
    assert (found["hint"], found["axes"]) == ("prefetch:ahead", axes)


def test_a_run_that_said_nothing_has_the_condition_that_was_asked_for():
    asked = {
        "allocator": "raw",
        "factor": 1.5,
        "prefetch": "none",
        "advice": "none",
        "repeat": None,
    }
    work = Work("uvm_bench", NOWHERE, asked=asked)
    found = condition_of(work, {})
    assert (found["allocator"], found["factor"], found["hint"]) == ("raw", 1.5, "none")
    assert condition_of(WORK, {})["hint"] is None


def test_no_factor_is_no_factor():
    about = {"axes": {"oversubscription_factor": None, "prefetch": "none", "advice": "none"}}
    assert condition_of(WORK, about)["factor"] is None


# What decides a run


def test_flags_tape_program_and_profiler_decide_a_run_and_its_place_does_not():
    first = Work("uvm_bench", NOWHERE, ("--bytes", "1MiB"), version="a")
    digest = first.digest(profiled=True)
    assert (
        Work("uvm_bench", Path("/elsewhere"), ("--bytes", "1MiB"), version="a").digest(
            profiled=True
        )
        == digest
    )
    others = [
        first.digest(profiled=False),
        Work("dl_bench", NOWHERE, ("--bytes", "1MiB"), version="a").digest(profiled=True),
        Work("uvm_bench", NOWHERE, ("--bytes", "2MiB"), version="a").digest(profiled=True),
        Work("uvm_bench", NOWHERE, ("--bytes", "1MiB"), tape="t", version="a").digest(
            profiled=True
        ),
        Work("uvm_bench", NOWHERE, ("--bytes", "1MiB"), version="b").digest(profiled=True),
    ]
    assert len({digest, *others}) == 6


def test_flags_are_shown_without_folders():
    work = Work(
        "uvm_bench", NOWHERE, ("--x", "/home/alice/a b.txt", "--y=/home/alice/c", "--bytes", "1MiB")
    )
    assert work.shown_arguments == ["--x", "a b.txt", "--y=c", "--bytes", "1MiB"]


@pytest.mark.parametrize(
    ("status", "number"),
    [("ok", 0), ("failed", 1), ("not_recorded", 3), ("skipped", 6), ("refused", 7)],
)
def test_the_exit_status_says_how_a_run_ended(status, number):
    assert exit_status(Outcome(NOWHERE, {"status": status})) == number
