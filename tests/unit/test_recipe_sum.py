"""The recipe `uvm_sum`, run by a stand-in of the framework: figures are those of plain SQL on the same exports."""

from __future__ import annotations

import json
from functools import partial

import exports as x
import polars as pl
import pytest
from recipe_framework import NEW, NoDataError, Plain, run

import nsan
from nsan.fleet.member import Member
from nsan.recipe.jobs import attempt, member
from nsan.recipe.plan import notes_on
from nsan.recipe.um_sum import ALL_STATS, all_migrations, all_stats, cut_ways

MIB = x.MIB


def export(path, *migrations, **more):
    return x.Export(**more).add(x.MEMCPY, *migrations).write(path)


@pytest.fixture
def ranks(tmp_path):
    """Two ranks: 6 MiB in and 1 MiB out of rank 0, 2 MiB in of rank 1."""
    folder = tmp_path / "night"
    folder.mkdir()
    export(
        folder / "train_rank0.sqlite",
        x.migration(0, 1000, 4 * MIB, cause=x.PREFETCH),
        x.migration(500, 2000, 2 * MIB, x.VA + 4 * MIB),
        x.migration(3000, 3400, MIB, kind=x.DTOH, cause=x.EVICTION),
    )
    export(folder / "train_rank1.sqlite", x.migration(100, 300, 2 * MIB, cause=x.PREFETCH))
    return folder


def inputs(folder):
    return sorted(folder.glob("*.sqlite"), reverse=True)


def table(folder, name):
    return pl.read_parquet(folder / f"{name}.parquet")


def test_all_migrations_agree_with_plain_sql_on_every_report(ranks, tmp_path):
    found = table(run("uvm_sum", inputs(ranks), tmp_path / "out"), "all_migrations")
    query = (
        f"""SELECT copyKind, migrationCause, count(*), sum(bytes) FROM {x.MEMCPY} GROUP BY 1, 2"""
    )
    want = {}
    for path in inputs(ranks):
        for kind, cause, n, size in x.ask(path, query):
            key = (
                {11: "htod", 12: "dtoh"}[kind],
                {2: "coherence", 3: "prefetch", 4: "eviction"}[cause],
            )
            before = want.get(key, (0, 0))
            want[key] = before[0] + n, before[1] + size
    got = {row[:2]: row[2:] for row in found.select("direction", "cause", "n", "bytes").rows()}
    assert got == want
    assert len(got) == 3


def test_reports_stand_in_order_of_their_ranks_whatever_order_they_came_in(ranks, tmp_path):
    found = table(run("uvm_sum", inputs(ranks), tmp_path / "out"), "rank_stats")
    assert found.select("run", "rank", "htod_bytes", "dtoh_bytes").rows() == [
        ("night/train", 0, 6 * MIB, MIB),
        ("night/train", 1, 2 * MIB, 0),
    ]


def test_each_report_has_the_figures_of_its_own_summary(ranks, tmp_path):
    found = table(run("uvm_sum", inputs(ranks), tmp_path / "out"), "rank_stats")
    for path, row in zip(sorted(inputs(ranks)), found.to_dicts(), strict=True):
        summary = nsan.summary(nsan.open_trace(path))["migrations"]
        assert row["n_migrations"] == summary["n"]
        assert row["migrations_busy_ns"] == summary["busy_ns"]


def test_sums_and_extremes_over_reports_are_those_worked_out_by_hand(ranks, tmp_path):
    found = table(run("uvm_sum", inputs(ranks), tmp_path / "out"), "all_stats")
    row = found.filter(pl.col("figure") == "htod_bytes").row(0, named=True)
    assert (row["total"], row["mean"], row["median"]) == (8 * MIB, 4 * MIB, 4 * MIB)
    assert row["max_source"].endswith("train_rank0.sqlite")
    assert (row["min"], row["max"], row["n_reports"], row["n_unknown"]) == (2 * MIB, 6 * MIB, 2, 0)
    # [0, 2000) and [3000, 3400) of rank 0, [100, 300) of rank 1
    busy = found.filter(pl.col("figure") == "migrations_busy_ns").row(0, named=True)
    assert busy["total"] == 2400 + 200


def test_a_figure_that_a_report_does_not_know_is_counted_as_unknown_and_never_as_0(ranks, tmp_path):
    options = {"COLLECT_UVM_GPU_PAGE_FAULTS": "false"}
    export(ranks / "train_rank2.sqlite", x.migration(0, 10, MIB), options=options)
    found = table(run("uvm_sum", inputs(ranks), tmp_path / "out"), "all_stats")
    row = found.filter(pl.col("figure") == "n_fault_rows").row(0, named=True)
    assert (row["n_reports"], row["n_unknown"], row["total"]) == (2, 1, 0)


def test_a_sum_with_an_unknown_part_is_unknown():
    groups = pl.DataFrame(
        {
            "run": ["a", "a"],
            "rank": [0, 1],
            "source": ["0", "1"],
            "pid": [1, 1],
            "device_id": [0, 0],
            "direction": ["htod", "htod"],
            "cause": ["prefetch", "prefetch"],
            "n": [3, 4],
            "bytes": [100, None],
            "busy_ns": [10, 20],
        }
    )
    found = all_migrations(groups, cut_ways([]))
    assert found.select("n_reports", "n", "bytes", "bytes_fraction", "busy_ns").rows() == [
        (2, 7, None, None, 30)
    ]


def test_sums_beyond_64_bits_are_unknown_not_wrapped():
    from nsan.fleet.figures import REPORT_FIGURES

    huge = pl.DataFrame({"source": ["a", "b"], "bytes": [(1 << 63) - 1] * 2})
    rows = pl.concat([pl.DataFrame(schema=REPORT_FIGURES.schema), huge], how="diagonal")
    found = all_stats(rows).filter(pl.col("figure") == "bytes")
    assert found.select("n_reports", "total", "max").row(0) == (2, None, (1 << 63) - 1)
    assert found.schema == ALL_STATS.schema


def test_a_report_that_cannot_be_read_is_named_and_the_others_are_there(ranks, tmp_path, caplog):
    (ranks / "train_rank7.sqlite").write_bytes(b"SQLite format 3\0 and then nothing of the kind")
    out = run("uvm_sum", inputs(ranks), tmp_path / "out")
    assert table(out, "rank_stats")["rank"].to_list() == [0, 1]
    about = json.loads((out / "about.json").read_text())
    assert [(each["run"], each["rank"]) for each in about["failures"]] == [("night/train", 7)]
    assert "train_rank7.sqlite" in caplog.text


def test_reports_of_which_none_can_be_read_are_an_error_and_nothing_is_written(tmp_path, caplog):
    bad = tmp_path / "bad.sqlite"
    bad.write_bytes(b"SQLite format 3\0 and then nothing of the kind")
    with pytest.raises(SystemExit) as stop:
        run("uvm_sum", [bad], tmp_path / "out")
    assert stop.value.code == 1
    assert not (tmp_path / "out").exists()
    assert "the report could not be read: nothing is written" in caplog.text


def test_without_unified_memory_the_framework_is_told_and_the_switches_are_named(tmp_path, caplog):
    options = {"COLLECT_UVM_GPU_PAGE_FAULTS": "false", "COLLECT_UVM_CPU_PAGE_FAULTS": "false"}
    path = x.Export(options=options).add(x.KERNEL, x.kernel(0, 5)).write(tmp_path / "k.sqlite")
    with pytest.raises(NoDataError):
        run("uvm_sum", [path], tmp_path / "out")
    said = caplog.text
    assert "no Unified Memory data" in said
    assert "--cuda-um-gpu-page-faults=true --cuda-um-cpu-page-faults=true" in said
    assert not (tmp_path / "out").exists()


def test_a_window_keeps_what_starts_in_it(ranks, tmp_path):
    out = run("uvm_sum", inputs(ranks), tmp_path / "out", "--start", "500", "--end", "3000")
    assert table(out, "rank_stats")["bytes"].to_list() == [2 * MIB, 0]
    assert "500 ns to 3000 ns" in json.loads((out / "about.json").read_text())["part"]


@pytest.mark.parametrize(
    ("start", "end", "rate"), [(500, 1500, None), (0, 1500, None), (0, 2000, 2 * MIB / 2e-6)]
)
def test_a_rate_is_null_where_a_window_cuts_a_migration(tmp_path, start, end, rate):
    # One of 2000 ns and one within it: what starts in a window has not the bytes of what only reaches in.
    path = tmp_path / "a.sqlite"
    export(path, x.migration(0, 2000, MIB), x.migration(800, 900, MIB))
    out = run("uvm_sum", [path], tmp_path / "out", "--start", str(start), "--end", str(end))
    found = table(out, "all_migrations").row(0, named=True)
    assert found["busy_ns"] == end - start
    assert found["bytes_per_s"] == (rate and pytest.approx(rate))


def test_modelled_reports_among_recorded_ones_are_counted(tmp_path, caplog):
    sample = x.REPOSITORY / "sample_data" / "model" / "two_gpus" / "two_gpus.sqlite"
    export(tmp_path / "a.sqlite", x.migration(0, 2000, MIB))
    out = run("uvm_sum", [tmp_path / "a.sqlite", sample], tmp_path / "out")
    assert "Modelled, not recorded: 1 of 2 reports" in caplog.text
    assert any(
        "1 of 2 reports" in note for note in json.loads((out / "about.json").read_text())["notes"]
    )


def test_what_the_reading_of_a_report_warned_of_is_a_note():
    info = {
        "kind": "nsys-report",
        "warnings": ["r.sqlite beside the report was not read: it is older."],
    }
    about = {"capture": {}, "doubtful": []}
    members = [Member("a", rank, f"{rank}.nsys-rep", info | about, {}) for rank in range(12)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nsan.recipe.plan.has_um_data", lambda *_: True)
        notes = notes_on(members)
    assert notes[0] == "0.nsys-rep: r.sqlite beside the report was not read: it is older."
    assert len(notes) == 11
    assert notes[-1].startswith("2 more warnings")


def test_an_empty_window_is_refused(ranks, tmp_path, caplog):
    with pytest.raises(SystemExit) as stop:
        run("uvm_sum", inputs(ranks), tmp_path / "out", "--start", "5", "--end", "5")
    assert stop.value.code == 1
    assert "no time is between them" in caplog.text


def test_an_nvtx_range_that_one_report_has_not_costs_only_that_report(ranks, tmp_path):
    x.Export().add(x.MEMCPY, x.migration(20, 30, MIB), x.migration(70, 80, MIB)).add(
        x.NVTX, x.nvtx(10, 50, "step")
    ).write(ranks / "train_rank2.sqlite")
    out = run("uvm_sum", inputs(ranks), tmp_path / "out", "--nvtx", "step")
    assert table(out, "rank_stats").select("rank", "bytes").rows() == [(2, MIB)]
    assert len(json.loads((out / "about.json").read_text())["failures"]) == 2


def test_csv_has_the_same_rows_and_no_text_that_a_spreadsheet_would_run(ranks, tmp_path):
    out = run("uvm_sum", inputs(ranks), tmp_path / "out", "--csv")
    for name in ("rank_stats", "rank_migrations", "all_stats", "all_migrations"):
        lines = (out / f"{name}.csv").read_text().splitlines()
        assert lines[0].split(",") == table(out, name).columns
        assert len(lines) - 1 == table(out, name).height


def test_another_release_of_the_framework_changes_nothing(ranks, tmp_path):
    old = run("uvm_sum", inputs(ranks), tmp_path / "old")
    words = ("--nvtx", "step", "--csv")
    with pytest.raises(SystemExit):  # no report has that range: the option was understood
        run("uvm_sum", inputs(ranks), tmp_path / "filtered", *words, options=NEW)
    new = run("uvm_sum", inputs(ranks), tmp_path / "new", options=NEW)
    for name in ("rank_stats", "all_migrations"):
        assert table(old, name).equals(table(new, name))


def test_the_folder_has_a_notebook_and_the_analysis_file_names_it(ranks, tmp_path):
    out = run("uvm_sum", inputs(ranks), tmp_path / "out")
    said = json.loads((out / "out.nsys-analysis").read_text())
    assert said["Outputs"] == {"uvm_sum.ipynb": "Notebook"}
    assert len(said["InputFiles"]) == 2
    assert (out / "uvm_sum.ipynb").is_file()


def test_a_report_that_is_given_twice_counts_once(ranks, tmp_path):
    twice = [*inputs(ranks), *inputs(ranks)]
    assert table(run("uvm_sum", twice, tmp_path / "out"), "rank_stats").height == 2


def broken(_job):
    msg = "the\nunexpected"
    raise ZeroDivisionError(msg)


def test_a_defect_in_one_report_is_told_as_one_and_stops_nothing():
    result, reason = attempt(broken, None)
    assert result is None
    assert "ZeroDivisionError: the unexpected" in reason


def test_what_is_mapped_finds_its_way_to_another_process(ranks, tmp_path):
    import pickle

    context = Plain()
    run("uvm_sum", inputs(ranks), tmp_path / "out", context=context)
    (function,) = context.mapped
    again = pickle.loads(pickle.dumps(function))
    assert isinstance(again, partial)
    assert again.args == (member,)
