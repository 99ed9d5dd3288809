"""Which runs a path stands for, and what is measured of each: against plain SQL and counting by hand."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import exports as x
import polars as pl
import pytest

from nsan.analysis.compare.tables import SAMPLES, SCOPES
from nsan.asking import Asked
from nsan.comparing.conditions import captures_in, find_conditions
from nsan.comparing.copies import copies
from nsan.comparing.document import compare
from nsan.comparing.figures import FIGURES, is_known
from nsan.comparing.measuring import (
    Asking,
    count_places,
    measure,
    measure_run,
    most_important,
)
from nsan.errors import InputMissingError, NsanError, UsageError
from nsan.opening import import_trace

SAMPLE = Path(__file__).parents[2] / "sample_data"
ADD = SAMPLE / "um_vector_add_rtx4060l.sqlite"
V100 = SAMPLE / "nvprof_hotspot_v100_1024.log.gz"
SWEEP = SAMPLE / "model" / "oversubscribed_sweep"
ALL = Asking(scopes=SCOPES)
MS = 1_000_000


def values(samples, **where):
    """Values by figure, or by place and figure."""
    keys = [pl.col(name) == value for name, value in where.items()]
    found = samples.filter(*keys).select("place", "figure", "value").rows()
    return {(place, figure) if place else figure: value for place, figure, value in found}


def asked_sql(path, query):
    with closing(sqlite3.connect(path)) as database:
        return database.execute(query).fetchone()[0]


# Conditions -----------------------------------------------------------------------------------------


def touched(folder, *names):
    """Files that look like captures by their names."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"x")
    return folder


def names_in(path):
    return [capture.name for capture in captures_in(path)]


def test_a_folder_of_captures_is_repetitions_in_the_order_of_their_numbers(tmp_path):
    folder = touched(tmp_path / "a", "run10.sqlite", "run2.sqlite", "run1.nsys-rep", "notes.txt")
    (folder / ".run3.sqlite").write_bytes(b"x")
    assert names_in(folder) == ["run1.nsys-rep", "run2.sqlite", "run10.sqlite"]


def test_a_report_and_its_export_are_one_run(tmp_path):
    folder = touched(tmp_path / "a", "run.nsys-rep", "run.sqlite", "other.sqlite")
    os.utime(folder / "run.sqlite", ns=(5, 5))
    os.utime(folder / "run.nsys-rep", ns=(9, 9))
    assert names_in(folder) == ["other.sqlite", "run.nsys-rep"]
    os.utime(folder / "run.sqlite", ns=(10, 10))
    assert names_in(folder) == ["other.sqlite", "run.sqlite"]


def test_modelled_runs_stores_and_single_captures_are_found(tmp_path):
    assert captures_in(SWEEP) == [SWEEP / "oversubscribed_sweep.sqlite"]
    assert captures_in(ADD) == [ADD]
    store = import_trace(ADD, tmp_path / "runs" / "store 1")
    shutil.copytree(store, tmp_path / "runs" / "store 2")
    shutil.copytree(SWEEP, tmp_path / "runs" / "sweep")
    assert captures_in(store) == [store]
    assert names_in(tmp_path / "runs") == ["store 1", "store 2", "oversubscribed_sweep.sqlite"]


def test_logs_of_nvprof_are_found_and_other_files_are_not(tmp_path):
    shutil.copy(V100, tmp_path / "one.log.gz")
    touched(tmp_path, "readme.md", "snapshot.pickle")
    assert names_in(tmp_path) == ["one.log.gz"]


def test_a_damaged_capture_is_not_passed_over(tmp_path):
    shutil.copy(ADD, tmp_path / "run1.sqlite")
    (tmp_path / "run2.sqlite").write_bytes(ADD.read_bytes()[:3000])
    conditions = find_conditions([tmp_path, ADD])
    assert len(conditions[0].runs) == 2
    with pytest.raises(NsanError, match="cut short"):
        measure(conditions, Asking(scopes=("run",)))


def test_conditions_have_letters_names_and_runs_that_can_be_told_apart(tmp_path):
    for number in (1, 2):
        touched(tmp_path / "off" / f"run{number}", "trace.sqlite")
    on = touched(tmp_path / "on", "a.sqlite", "b.sqlite")
    off, both, third = find_conditions([tmp_path / "off", on, [on / "a.sqlite", ADD]])
    assert (off.label, off.name) == ("A", "off")
    assert [run.name for run in off.runs] == ["run1/trace.sqlite", "run2/trace.sqlite"]
    assert [run.name for run in both.runs] == ["a.sqlite", "b.sqlite"]
    assert (third.label, third.name) == ("C", "a.sqlite and 1 more")


def test_different_captures_of_one_stem_are_different_runs(tmp_path):
    folder = touched(tmp_path / "a", "run.sqlite")
    shutil.copy(V100, folder / "run.log.gz")
    assert sorted(names_in(folder)) == ["run.log.gz", "run.sqlite"]


def test_a_folder_with_captures_and_folders_of_them_is_asked_about(tmp_path):
    folder = touched(tmp_path / "a", "run.sqlite")
    touched(folder / "notes", "plan.txt")
    assert names_in(folder) == ["run.sqlite"]
    touched(folder / "old", "first.sqlite")
    with pytest.raises(UsageError, match=r"a has captures, and folders of captures: old\."):
        captures_in(folder)


def test_the_tables_that_nsys_exports_beside_a_report_are_the_same_run(tmp_path):
    folder = touched(tmp_path / "a", "run.nsys-rep")
    touched(folder / "run_pqtdir", "StringIds.parquet", "META_DATA_EXPORT.parquet")
    assert names_in(folder) == ["run.nsys-rep"]
    (folder / "run_pqtdir").rename(folder / "run2_pqtdir")
    with pytest.raises(UsageError, match="run2_pqtdir"):
        captures_in(folder)


def test_runs_of_folders_of_one_name_have_names_of_their_own(tmp_path):
    places = [touched(tmp_path / each / "1", "run.sqlite") / "run.sqlite" for each in ("p", "q")]
    condition, _ = find_conditions([places, ADD])
    assert [run.name for run in condition.runs] == ["1/run.sqlite", "1/run.sqlite (2)"]


def test_what_is_no_condition_is_refused_with_the_reason(tmp_path):
    empty = touched(tmp_path / "empty", "notes.txt")
    with pytest.raises(UsageError, match="empty is a folder without a capture"):
        find_conditions([ADD, empty])
    with pytest.raises(UsageError, match="named twice for B"):
        find_conditions([ADD, [ADD, SAMPLE / "licences" / ".." / ADD.name]])
    with pytest.raises(UsageError, match="1 to compare: give 2"):
        find_conditions([ADD])
    with pytest.raises(UsageError, match="B has no run"):
        find_conditions([ADD, []])
    with pytest.raises(InputMissingError):
        find_conditions([ADD, tmp_path / "nowhere"])


# Figures of a run -----------------------------------------------------------------------------------


def test_names_of_figures_say_their_scope():
    assert [*dict.fromkeys(figure.scope for figure in FIGURES.values())] == [*SCOPES]
    for name, figure in FIGURES.items():
        assert name == figure.name
        assert figure.scope == "run" or name.startswith(f"{figure.scope}.")
        assert figure.unit
        assert figure.doc.endswith(".")
        assert (figure.grain > 0) is (figure.grain in {1, 65536})


def test_a_real_capture_is_measured_as_plain_sql_counts_it():
    found = values(measure_run(Asked(ADD), Asking(scopes=("run",))))
    copies = "FROM CUPTI_ACTIVITY_KIND_MEMCPY WHERE copyKind"
    assert found["migrations.n"] == asked_sql(ADD, f"SELECT COUNT(*) {copies} IN (11, 12, 13)")
    into = asked_sql(ADD, f"SELECT SUM(bytes) {copies} = 11")
    assert found["migrations.htod_bytes"] == into
    cause = asked_sql(ADD, f"SELECT SUM(bytes) {copies} IN (11, 12) AND migrationCause = 2")
    assert found["migrations.coherence_bytes"] == cause
    kernels = "FROM CUPTI_ACTIVITY_KIND_KERNEL"
    assert found["kernels.n"] == asked_sql(ADD, f"SELECT COUNT(*) {kernels}")
    assert found["kernels.busy_ns"] == asked_sql(ADD, f"SELECT SUM(end - start) {kernels}")
    assert (found["migrations.eviction_bytes"], found["refaults.bytes"]) == (0, 0)


def test_what_was_not_recorded_is_unknown_and_never_0():
    asked = Asked(ADD)
    found = values(measure_run(asked, ALL))
    for name in ("gpu_faults.rows", "gpu_faults.va_blocks", "cpu_faults.n", "managed.bytes"):
        assert found[name] is None, name
    assert not is_known(asked, ("gpu_faults", "migrations"))
    assert is_known(asked, ("migrations", "causes"))
    log = values(measure_run(Asked(V100), Asking(scopes=("run",))))
    assert log["migrations.bytes"] > 0
    assert log["gpu_faults.rows"] == 20
    # The text of nvprof says no cause: what stands on causes is not known.
    assert {log["migrations.user_bytes"], log["migrations.eviction_bytes"]} == {None}
    assert log["refaults.bytes"] is None


def test_of_a_part_of_a_capture_refaults_are_not_known():
    part = Asked(SWEEP, filters={"time": "1ms/10ms"})
    found = values(measure_run(part, Asking(scopes=("run",))))
    assert found["refaults.bytes"] is None
    assert 0 < found["migrations.bytes"] < 200 << 20


def test_kinds_say_what_numbers_are_worth():
    def kinds(path):
        found = measure_run(Asked(path), Asking(scopes=("run", "kernel")))
        return dict(found.select("figure", "kind").rows())

    real = kinds(ADD)
    assert (real["migrations.bytes"], real["duration_ns"]) == ("recorded", "derived")
    # Without fault rows, how long kernels waited is told from the copies.
    assert (real["kernels.waiting_ns"], real["kernel.waiting_ns"]) == ("reconstructed",) * 2
    assert set(kinds(SWEEP).values()) == {"modelled"}


# Steps, ranges and kernels --------------------------------------------------------------------------


def export(*, n_steps=4, kernels=("scale",), inner=None):
    """Steps of 10 ms: 4 KiB times the number of the step move into the GPU, in each."""
    made = x.Export(options={"COLLECT_UVM_GPU_PAGE_FAULTS": "false"})
    made.strings = dict(enumerate(kernels, start=1))
    for step in range(n_steps):
        start = 10 * MS * step
        made.add("NVTX_EVENTS", x.nvtx(start, start + 9 * MS, "step"))
        if inner is not None:
            made.add("NVTX_EVENTS", x.nvtx(start + MS, start + 2 * MS, inner))
        moved = x.migration(start + MS, start + MS + 1000, 4096 * (step + 1), x.VA + step * 4096)
        made.add("CUPTI_ACTIVITY_KIND_MEMCPY", moved)
        for at in range(len(kernels)):
            ran = start + (3 + at) * MS
            made.add("CUPTI_ACTIVITY_KIND_KERNEL", x.kernel(ran, ran + 100_000, name=at + 1))
    return made


def measured(paths, **asking):
    return measure(find_conditions(paths), Asking(**asking))


def test_steps_are_those_after_the_warm_up(built):
    path = built(export())
    found = measure_run(Asked(path), Asking(scopes=("step",), nvtx="step"))
    moved = found.filter(pl.col("figure") == "step.in_bytes").sort("item")
    assert moved.select("item", "value").rows() == [(1, 8192), (2, 12288), (3, 16384)]
    times = found.filter(pl.col("figure") == "step.time_ns")["value"]
    assert times.to_list() == [9 * MS] * 3
    rows = found.filter(pl.col("figure") == "step.fault_rows")["value"]
    assert rows.is_null().all()
    all_steps = measure_run(Asked(path), Asking(scopes=("step",), nvtx="step", warmup=0))
    assert all_steps["item"].unique().sort().to_list() == [0, 1, 2, 3]


def test_a_run_without_a_warm_step_does_not_know_steps(built):
    found = measure_run(Asked(built(export())), Asking(scopes=("step",), warmup=4))
    assert found["figure"].to_list() == [n for n, each in FIGURES.items() if each.scope == "step"]
    assert found["value"].is_null().all()
    assert found["item"].is_null().all()


def test_a_range_or_kernel_that_only_one_run_has_is_0_in_the_other(built):
    paths = [built(export()), built(export(kernels=("scale", "extra"), inner="copy in"))]
    found = measured(paths, scopes=("range", "kernel"))
    a, b = (values(found, condition=label) for label in "AB")
    assert (a["extra", "kernel.n"], b["extra", "kernel.n"]) == (0, 4)
    assert (a["extra", "kernel.time_ns"], b["extra", "kernel.time_ns"]) == (0, 400_000)
    assert (a["copy in", "range.n"], b["copy in", "range.n"]) == (0, 4)
    assert b["copy in", "range.time_ns"] == 4 * MS
    assert a["scale", "kernel.n"] == b["scale", "kernel.n"] == 4
    # Fault rows were not recorded: of a kernel that is not there they are unknown all the same.
    assert a["extra", "kernel.fault_rows"] is b["extra", "kernel.fault_rows"] is None
    assert found.schema == SAMPLES.schema


def test_ranges_are_unknown_where_nvtx_was_not_recorded(built):
    found = measured([ADD, built(export())], scopes=("range",))
    a, b = (values(found, condition=label) for label in "AB")
    assert (a["step", "range.n"], b["step", "range.n"]) == (None, 4)


def test_the_places_that_take_most_time_are_chosen_and_those_that_are_named(built):
    names = tuple(f"k{at}" for at in range(5))
    paths = [built(export(kernels=names)), built(export(kernels=(*names, *["thrice"] * 3)))]
    found = measured(paths, scopes=("kernel",))
    assert count_places(found) == {"kernel": 6}
    n_figures = sum(figure.scope == "kernel" for figure in FIGURES.values())
    assert found.height == 2 * 6 * n_figures
    chosen = most_important(found, 2)
    # Four launches of 0.1 ms in each of two runs, against twelve in one; of equals the first by name.
    assert chosen["place"].unique().sort().to_list() == ["k0", "thrice"]
    assert chosen.height == 2 * 2 * n_figures
    named = most_important(found, 2, [("kernel", "k4"), ("range", "k3"), ("kernel", "k0")])
    assert named["place"].unique().sort().to_list() == ["k0", "k4", "thrice"]
    assert named.height == 2 * 3 * n_figures


def test_a_limit_sees_each_kernel_and_it_is_said_which_have_a_row(built):
    names = ("a", "b", "c", "d")
    slow = export(kernels=names)
    for row in slow.rows["CUPTI_ACTIVITY_KIND_KERNEL"]:
        row["end"] += 50_000 * (row["shortName"] == 4)
    gates = ["kernel.time_ns>+5%", "kernel.time_ns@d>+5%", "kernel.time_ns@b>+5%", "kernel.n@e>+0"]
    found = compare(
        built(export(kernels=names)),
        built(slow),
        asking=Asking(scopes=("kernel",), most_places=1),
        fail_on=gates,
    )
    outcomes = [each.outcome for each in found.gates]
    assert outcomes == ["failed", "failed", "passed", "undecided"]
    assert found.gates[0].text == "d: 400.000 us -> 600.000 us, +50.0%"
    assert found.gates[3].text == "there is no kernel e in any run."
    assert set(found.movers["place"]) == {"b", "d"}
    assert found.to_dict()["places"] == {"kernel": 4}
    assert "Of 4 kernels the 1 with most time are compared" in str(found)


def test_a_limit_on_ranges_of_runs_without_one_is_undecided(built):
    paths = [built(export(n_steps=0)), built(export(n_steps=0))]
    found = compare(
        *paths, asking=Asking(scopes=("range",)), fail_on=["range.time_ns>+1%"], anyway=True
    )
    assert [each.outcome for each in found.gates] == ["undecided"]


def test_steps_that_were_asked_for_and_that_no_run_has_are_refused(built):
    paths = [built(export()), built(export())]
    with pytest.raises(UsageError, match="No run has steps by the NVTX range 'nope'"):
        measured(paths, scopes=("step",), nvtx="nope")
    with pytest.raises(
        UsageError, match=r"leave out 4 steps at the start leaves none.*more than 4"
    ):
        measured(paths, scopes=("step",), nvtx="step", warmup=4)
    found = measured([paths[0], built(export(n_steps=2))], scopes=("step",), warmup=3)
    known = found.filter(pl.col("figure") == "step.time_ns")["value"].is_null()
    assert known.to_list() == [False, True]


def test_a_name_of_steps_that_is_not_there_gives_no_steps_of_kernels(built):
    made = export(n_steps=0)
    for at in range(40):
        ran = at * MS
        made.add("CUPTI_ACTIVITY_KIND_KERNEL", x.kernel(ran, ran + 100_000, name=at % 2 + 1))
    path = built(made)
    assert measured([path, path], scopes=("step",))["item"].max() > 3
    with pytest.raises(UsageError, match="'nope'"):
        measured([path, path], scopes=("step",), nvtx="nope")


def test_copies_of_one_capture_are_no_repetitions(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    for number in range(3):
        shutil.copy(ADD, tmp_path / "a" / f"run{number}.sqlite")
        export(n_steps=number + 1).write(tmp_path / "b" / f"run{number}.sqlite")
    found = list(copies(find_conditions([tmp_path / "a", tmp_path / "b"])))
    assert [(each.level, each.about) for each in found] == [("warn", ("A",))]
    assert "A: run0.sqlite, run1.sqlite, run2.sqlite are copies of one capture" in found[0].text
    # One side each is another question: a run against itself.
    assert list(copies(find_conditions([ADD, ADD]))) == []
    same_size = [tmp_path / "a" / "run0.sqlite", tmp_path / "b" / "odd.sqlite"]
    same_size[1].write_bytes(ADD.read_bytes()[:-1] + b"x")
    assert list(copies(find_conditions([same_size, ADD]))) == []
    import_trace(V100, tmp_path / "c" / "store0")
    for number in (1, 2):
        shutil.copytree(tmp_path / "c" / "store0", tmp_path / "c" / f"store{number}")
    (third,) = copies(find_conditions([ADD, tmp_path / "c"]))
    assert third.about == ("B",)


def test_only_what_is_asked_is_computed(built, monkeypatch):
    asked = []
    frame = Asked.frame
    monkeypatch.setattr(
        Asked, "frame", lambda self, name, *rest: asked.append(name) or frame(self, name, *rest)
    )
    found = measured([built(export()), built(export())], scopes=("step",))
    assert set(asked) == {"iterations"}
    assert found["scope"].unique().to_list() == ["step"]
    with pytest.raises(UsageError, match="no scope 'kernels'"):
        measured([ADD, ADD], scopes=("kernels",))


def test_runs_are_opened_one_after_the_other_and_told_before(built):
    paths = [built(export()), built(export())]
    conditions = find_conditions([paths, ADD])
    seen = []
    measure(
        conditions,
        Asking(scopes=("run",)),
        seen.append,
        lambda condition, run, asked: seen.append((condition.label, run.name, type(asked))),
    )
    first, second = (path.name for path in paths)
    assert seen == [
        *(first, ("A", first, Asked), second, ("A", second, Asked)),
        *(ADD.name, ("B", ADD.name, Asked)),
    ]
