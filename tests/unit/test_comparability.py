"""Which conditions can be compared: each reason against it, and what is no reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nsan.comparing.checks import steps_without_work
from nsan.comparing.comparability import NotComparableError, barred, comparability, refuse
from nsan.comparing.figures import FIGURES
from nsan.comparing.findings import Side
from nsan.comparing.profile import Profile

KINDS = ("gpu_faults", "cpu_faults", "migrations", "allocations", "nvtx", "kernels")
V100 = {"gpu_id": 0, "device_id": 0, "name": "Tesla V100-SXM2-16GB", "compute_capability": "7.0"}
H100 = {**V100, "name": "NVIDIA H100 80GB HBM3", "compute_capability": "9.0"}


def run(*, capture=(), health=(), kernels=("add", "scale"), process="app", **about):
    """A recorded run of a program with two kernels; whatever is named is otherwise."""
    of_profile = {
        key: about.pop(key)
        for key in ("platform", "has_um_data", "is_empty", "is_timed", "lost_fraction", "place")
        if key in about
    }
    summary = {
        "source_kind": "nsys-sqlite",
        "driver_version": "550.1",
        "cpu": "EPYC",
        "nsys_version": "2025.1",
        "devices": [V100],
        "processes": [{"pid": 1, "name": process}],
        "capture": {**dict.fromkeys(KINDS, "recorded"), **dict(capture)},
        "switches": dict.fromkeys(KINDS, "") | {"gpu_faults": "--cuda-um-gpu-page-faults=true"},
        "health": [{"id": id_, "status": status, "text": text} for id_, status, text in health],
        **about,
    }
    counts = kernels if isinstance(kernels, dict) else dict.fromkeys(kernels, 3)
    return Profile("run.sqlite", summary, kernels=counts, **of_profile)


def found(base, other, *more):
    sides = [
        Side(label, [each] if isinstance(each, Profile) else each)
        for label, each in zip("ABC", (base, other, *more), strict=False)
    ]
    return comparability(sides)


def levels(*runs):
    return {each.id: each.level for each in found(*runs)}


def bars(*runs):
    keys = barred(found(*runs), FIGURES, ["B"])
    return {name for label, name in keys if label == "B"}


def test_the_same_program_on_the_same_machine_is_comparable():
    assert found(run(), run()) == []
    assert found([run(), run()], [run(), run()]) == []


def test_page_faults_traced_on_one_side_only_refuse_and_bar_times():
    plain = run(capture={"gpu_faults": "not_recorded"})
    for pair in ((run(), plain), (plain, run())):
        (finding,) = found(*pair)
        assert (finding.id, finding.level, finding.about) == ("switches", "refuse", ("A", "B"))
        assert "70 %" in finding.text
        assert "--cuda-um-gpu-page-faults=true" in finding.text
    assert bars(run(), plain) == {name for name, each in FIGURES.items() if each.unit == "ns"}


def test_tracing_that_is_not_known_of_one_side_warns_and_bars_times_all_the_same():
    unknown = run(capture={"gpu_faults": "unknown"})
    assert levels(run(), unknown) == {"switches": "warn"}
    assert "duration_ns" in bars(run(), unknown)
    off = run(capture={"gpu_faults": "not_recorded"})
    assert "duration_ns" not in bars(unknown, off)


def test_kinds_that_cost_little_only_warn():
    assert levels(run(), run(capture={"nvtx": "not_recorded"})) == {"switches": "warn"}
    assert bars(run(), run(capture={"nvtx": "not_recorded"})) == set()


def test_kinds_that_differ_alike_are_told_once():
    both = run(capture={"gpu_faults": "not_recorded", "cpu_faults": "not_recorded"})
    (finding,) = found(run(), both)
    assert finding.text.startswith("GPU faults and CPU faults were not recorded alike.")


@pytest.mark.parametrize(
    "devices",
    [
        [H100],
        [V100, {**V100, "gpu_id": 1, "device_id": 1}],
        [{**V100, "compute_capability": "7.5"}],
    ],
    ids=["name", "number", "capability"],
)
def test_another_gpu_refuses_and_leaves_what_the_program_decides(devices):
    other = run(devices=devices)
    assert set(levels(run(), other).values()) == {"refuse"}
    left = set(FIGURES) - bars(run(), other)
    assert left == {"kernels.n", "managed.allocations", "managed.bytes"}


def test_a_gpu_that_two_processes_use_is_one():
    twice = run(devices=[{**V100, "pid": 1}, {**V100, "pid": 2}])
    assert found(run(), twice) == []


def test_a_gpu_that_is_not_known_of_one_side_is_no_other_but_is_told():
    for devices in ([{**V100, "name": None}], []):
        (finding,) = found([run(), run()], [run(), run(devices=devices)])
        assert (finding.id, finding.level, finding.bars) == ("gpu_unknown", "warn", "none")
        assert finding.text.startswith("The GPU of B is not known")
        assert found(run(devices=devices), run(devices=devices)) == []
    assert found(run(), run(devices=[{**V100, "compute_capability": None}])) == []


def test_modelled_against_recorded_is_refused_for_every_figure():
    other = run(source_kind="nsan-model")
    assert levels(run(), other) == {"model": "refuse"}
    assert bars(run(), other) == set(FIGURES)
    assert found(other, other) == []


def test_profilers_and_platforms_that_differ_are_refused():
    assert levels(run(), run(source_kind="nvprof-text")) == {"profiler": "refuse"}
    assert levels(run(), run(source_kind="nsys-parquet")) == {}
    assert levels(run(), run(platform="wsl")) == {"platform": "refuse"}


@pytest.mark.parametrize(
    ("key", "id_"),
    [("driver_version", "driver"), ("cpu", "cpu"), ("nsys_version", "profiler_version")],
)
def test_another_driver_cpu_or_nsys_only_warns(key, id_):
    assert levels(run(), run(**{key: "other"})) == {id_: "warn"}
    assert levels(run(), run(**{key: None})) == {}
    assert bars(run(), run(**{key: "other"})) == set()


def test_an_empty_capture_is_refused_and_so_is_one_without_unified_memory():
    said = "No GPU activity was recorded: ..."
    empty = run(health=[("gpu_activity", "warn", said)], has_um_data=False, kernels=())
    (finding,) = found(run(), empty)
    assert (finding.id, finding.level, finding.about) == ("empty", "refuse", ("B",))
    assert said in finding.text
    assert bars(run(), empty) == set(FIGURES)
    assert levels(run(), run(has_um_data=False)) == {"no_um_data": "refuse"}
    # That there are no migrations any more may be the change itself.
    assert bars(run(), run(has_um_data=False)) == set()
    assert levels(run(), run(is_empty=True)) == {"empty_part": "warn"}


def test_what_is_wrong_with_the_base_is_wrong_with_every_comparison():
    empty = run(health=[("gpu_activity", "warn", "none")], has_um_data=False, kernels=())
    keys = barred(found(empty, run(), run()), FIGURES, ["B", "C"])
    assert {label for label, _ in keys} == {"B", "C"}
    keys = barred(found(run(), run(), run(devices=[H100])), FIGURES, ["B", "C"])
    assert {label for label, _ in keys} == {"C"}


def test_lost_rows_refuse_where_they_are_many_and_leave_times_of_the_program():
    assert levels(run(), run(lost_fraction=0.3)) == {"lost_rows": "refuse"}
    assert levels(run(), run(lost_fraction=0.001)) == {"lost_rows": "warn"}
    barred_now = bars(run(), run(lost_fraction=0.3))
    assert {"migrations.bytes", "gpu_faults.rows", "step.in_bytes"} <= barred_now
    assert not {"duration_ns", "kernels.busy_ns", "step.time_ns"} & barred_now


def test_coarse_times_bar_times_and_no_more():
    coarse = run(source_kind="nvprof-text", health=[("times", "unknown", "few digits")])
    assert levels(coarse, coarse) == {"coarse_times": "warn"}
    assert bars(coarse, coarse) == {name for name, each in FIGURES.items() if each.unit == "ns"}


def test_a_window_of_time_is_no_part_of_a_program():
    assert levels(run(is_timed=True), run(is_timed=True)) == {"window": "warn"}


# Programs -------------------------------------------------------------------------------------------


def test_another_program_is_refused_by_its_kernels():
    other = run(kernels=("bfs_first", "bfs_second"), process="bfs")
    (finding,) = found(run(), other)
    assert (finding.id, finding.level) == ("program", "refuse")
    assert "bfs_first" in finding.text
    assert bars(run(), other) == set(FIGURES)


@pytest.mark.parametrize("process", ["python3", None], ids=["an interpreter", "no name"])
def test_where_the_process_says_nothing_the_kernels_decide(process):
    first, other = run(process=process), run(process=process, kernels=("bfs", "walk"))
    assert levels(first, other) == {"program": "refuse"}


def test_a_renamed_kernel_is_no_other_program():
    assert levels(run(kernels=("calculate_temp",)), run(kernels=("calculate_temp_v2",))) == {
        "program_names": "warn"
    }
    anonymous = [
        run(kernels=(name,), process=None) for name in ("calculate_temp", "calculate_temp2")
    ]
    assert levels(*anonymous) == {"program_names": "warn"}
    renamed = run(kernels=("plus", "times"))
    assert levels(run(), renamed) == {"program_names": "warn"}  # of the same process


def test_other_parameters_of_a_template_are_no_other_kernel():
    first = run(kernels=("void gemm<float, 64>(float*)",))
    assert found(first, run(kernels=("void gemm<double, 128>(double*)",))) == []


def test_a_program_under_another_name_with_the_same_kernels_only_warns():
    assert levels(run(), run(process="app_new")) == {"program_names": "warn"}


def test_more_launches_of_the_same_kernels_are_the_same_program():
    assert found(run(), run(kernels={"add": 900, "scale": 900})) == []


# Repetitions ----------------------------------------------------------------------------------------


def test_one_repetition_that_is_not_like_the_others_refuses_too():
    odd = run(capture={"gpu_faults": "not_recorded"})
    assert levels([run(), odd], [run(), odd]) == {"switches": "refuse"}
    assert levels([run(), run()], [run(), run(devices=[H100])]) == {"gpu": "refuse"}


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_repetition_of_another_program_refuses_though_both_sides_have_most_in_common(odd):
    runs = [run(), run(), run()]
    runs[odd] = run(kernels=("bfs", "walk"), process="bfs")
    for sides in ((runs, [run()] * 3), ([run()] * 3, runs)):
        (finding,) = [each for each in found(*sides) if each.level == "refuse"]
        assert (finding.id, finding.about) == ("program", ("A",) if sides[0] is runs else ("B",))
        assert "bfs" in finding.text
    assert bars([run()] * 3, runs) == set(FIGURES)


def test_repetitions_under_two_names_are_told_once():
    runs = [run(), run(process="app2"), run(process="app3")]
    (finding,) = found(runs, [run()])
    assert (finding.id, finding.level, finding.about) == ("program_names", "warn", ("A",))


# Steps ----------------------------------------------------------------------------------------------


def test_steps_that_enclose_little_of_what_kernels_do_are_told():
    def side(label, steps_ns, busy_ns):
        profile = run()
        summary = {**profile.summary, "kernels": {"busy_ns": busy_ns}}
        return Side(label, [replace(profile, summary=summary, steps_ns=steps_ns)])

    launches = side("A", 350_000.0, 5_300_000)
    (finding,) = steps_without_work([launches, side("B", 60e6, 50_000_000)])
    assert (finding.id, finding.level, finding.about) == ("steps", "warn", ("A",))
    assert "350.000 us" in finding.text
    assert "5.300 ms" in finding.text
    others = [side("B", None, 9), side("C", 1.0, None), side("D", 1.0, 0), side("E", 50.0, 100)]
    assert [*steps_without_work(others)] == []


# Files ----------------------------------------------------------------------------------------------


def test_a_file_that_stands_on_both_sides_is_named():
    same = run(place="/x")
    assert levels(same, same) == {"same_run": "warn"}
    assert levels(same, replace(same, place="/y")) == {}


# Refusing -------------------------------------------------------------------------------------------


def test_a_refusal_names_every_reason_and_the_way_out():
    sides = [Side("A", [run()]), Side("B", [run(devices=[H100], lost_fraction=0.5)])]
    with pytest.raises(NotComparableError) as caught:
        refuse(comparability(sides), sides)
    said = str(caught.value)
    assert caught.value.exit_code == 1
    assert "different GPUs" in said
    assert "lost rows" in said
    assert "--anyway" in said


def test_warnings_alone_refuse_nothing():
    sides = [Side("A", [run()]), Side("B", [run(cpu="other")])]
    assert refuse(comparability(sides), sides) is None


def test_without_unified_memory_anywhere_the_exit_code_says_so():
    none = run(has_um_data=False)
    sides = [Side("A", [none]), Side("B", [none])]
    with pytest.raises(NotComparableError) as caught:
        refuse(comparability(sides), sides)
    assert caught.value.exit_code == 3


def test_names_from_a_trace_are_harmless_and_short():
    evil = run(
        kernels=("\x1b[31mevil" * 500,),
        process="\x1b]0;x\x07",
        devices=[{**V100, "name": "\x1b[2J"}],
    )
    said = "".join(each.text for each in found(run(), evil))
    assert "\x1b" not in said
    assert len(said) < 3_000
