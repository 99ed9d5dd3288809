"""The recipe `uvm_time_map`: shares of bins, worked out by hand and nanosecond by nanosecond."""

from __future__ import annotations

import json

import exports as x
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recipe_framework import run

from nsan.charts.saving import specification
from nsan.fleet.member import Member
from nsan.recipe.pictures import drawn
from nsan.recipe.results import Results
from nsan.recipe.time_bins import Grid, Placed, grid_of, in_bins
from nsan.recipe.um_time_map import offsets_of

SESSION = "TARGET_INFO_SESSION_START_TIME"


def write(path, *migrations, faults=(), utc=None, options=()):
    export = x.Export(options=options).add(x.MEMCPY, *migrations)
    if faults:
        export.add(x.GPU_FAULTS, *faults)
    if utc is not None:
        export.add(SESSION, {"utcEpochNs": utc, "utcTime": "", "localTime": ""})
    return export.write(path)


def bins(out, name="analysis"):
    return pl.read_parquet(out / f"{name}.parquet")


def test_a_bin_holds_the_union_of_what_runs_in_it_clipped_at_its_edges(tmp_path):
    # Bins of 10: a copy over [0, 15) and one over [5, 12) that overlap; a batch over [14, 18); an end at 40.
    path = write(
        tmp_path / "a.sqlite",
        x.migration(0, 15, 4096),
        x.migration(5, 12, 4096, x.VA + 4096),
        x.migration(39, 40, 4096),
        faults=[x.gpu_fault(14, 18)],
    )
    found = bins(run("uvm_time_map", [path], tmp_path / "out", "--bins", "4"))
    assert found["start_ns"].to_list() == [0, 10, 20, 30]
    assert found["um_covered_ns"].to_list() == [10, 8, 0, 1]
    assert found["migrations_covered_ns"].to_list() == [10, 5, 0, 1]
    assert found["gpu_faults_covered_ns"].to_list() == [0, 4, 0, 0]
    assert found["um_fraction"].to_list() == [1.0, 0.8, 0.0, 0.1]


@given(
    st.lists(st.tuples(st.integers(-30, 60), st.integers(1, 25)), max_size=12),
    st.integers(-20, 20),
    st.integers(1, 9),
    st.integers(1, 8),
)
def test_covered_time_agrees_with_counting_nanoseconds(spans, first, width, n):
    from nsan.analysis.intervals import union

    schema = {"start_ns": pl.Int64, "end_ns": pl.Int64}
    rows = pl.DataFrame([(a, a + d) for a, d in spans], schema=schema, orient="row")
    found = dict(in_bins(union(rows.lazy()).collect(), Grid(first, width, n)).rows())
    busy = {t for a, d in spans for t in range(a, a + d)}
    for number in range(n):
        inside = range(first + number * width, first + (number + 1) * width)
        assert found.get(number, 0) == len(busy & set(inside))


@given(st.integers(-1000, 1000), st.integers(0, 5000), st.integers(1, 100))
def test_bins_cover_all_of_the_time_and_end_with_it(first, length, n):
    grid = grid_of([Placed(0, first, first + length), Placed(0, None, None)], n)
    assert grid.first_ns == first
    assert grid.n <= n
    last = grid.first_ns + grid.n * grid.width_ns
    assert last - grid.width_ns < first + max(1, length) <= last


def test_sessions_of_a_run_lie_on_one_clock_and_runs_each_begin_at_0(tmp_path):
    night, day = tmp_path / "night", tmp_path / "day"
    night.mkdir()
    day.mkdir()
    paths = [
        write(night / "rank0.sqlite", x.migration(0, 10, 4096), utc=1_000_000),
        write(night / "rank1.sqlite", x.migration(0, 10, 4096), utc=1_000_030),
        write(day / "rank0.sqlite", x.migration(20, 40, 4096), utc=77_000_000),
    ]
    out = run("uvm_time_map", paths, tmp_path / "out", "--bins", "4")
    found = bins(out)
    by_rank = {
        key: part["um_covered_ns"].to_list()
        for key, part in found.partition_by("run", "rank", as_dict=True).items()
    }
    assert by_rank == {
        ("day", 0): [None, None, 10, 10],
        ("night", 0): [10, None, None, None],
        ("night", 1): [None, None, None, 10],
    }
    assert bins(out, "rank_stats")["offset_ns"].to_list() == [0, 0, 30]
    plain = run("uvm_time_map", paths, tmp_path / "plain", "--bins", "4", "--disable-alignment")
    assert bins(plain, "rank_stats")["offset_ns"].to_list() == [0, 0, 0]


def _member(run_, rank, start):
    return Member(run_, rank, f"{run_}{rank}", {"session_start_utc_ns": start}, {})


def test_a_run_that_cannot_be_aligned_says_so_and_the_others_are():
    members = [_member("a", 0, 50), _member("a", 1, None), _member("b", 0, 7), _member("b", 1, 9)]
    offsets, notes = offsets_of(members, align=True)
    assert offsets == [0, 0, 0, 2]
    assert len(notes) == 1
    assert notes[0].endswith(": a.")
    assert offsets_of(members, align=False) == ([0, 0, 0, 0], [])


def test_sessions_that_are_hardly_of_one_run_are_pointed_out(tmp_path, caplog):
    for rank, utc in enumerate((0, 3_600_000_000_000)):
        write(tmp_path / f"rank{rank}.sqlite", x.migration(0, 10, 4096), utc=utc)
    run("uvm_time_map", sorted(tmp_path.glob("*.sqlite")), tmp_path / "out")
    assert "apart" in caplog.text
    assert "--disable-alignment" in caplog.text


def test_time_in_the_charts_is_that_of_the_run(tmp_path, caplog):
    for rank, utc in enumerate((0, 400)):
        write(tmp_path / f"rank{rank}.sqlite", x.migration(0, 1000, 4096), utc=utc)
    paths = sorted(tmp_path.glob("*.sqlite"))
    results = Results(run("uvm_time_map", paths, tmp_path / "out"))
    for name in ("time_map", "time_mean"):
        text = json.dumps(specification(drawn(results, name)))
        assert "Time since the first session of the run began, ns" in text
    assert "Not aligned" not in caplog.text
    run("uvm_time_map", paths, tmp_path / "each", "--disable-alignment")
    assert "Not aligned, as asked" in caplog.text


def test_what_was_not_recorded_is_unknown_and_the_share_of_the_rest_is_shown(tmp_path):
    path = write(
        tmp_path / "a.sqlite",
        x.migration(0, 5, 4096),
        x.migration(9, 10, 4096),
        options={"COLLECT_UVM_GPU_PAGE_FAULTS": "false"},
    )
    out = run("uvm_time_map", [path], tmp_path / "out", "--bins", "1")
    row = bins(out).row(0, named=True)
    assert (row["um_covered_ns"], row["gpu_faults_covered_ns"]) == (None, None)
    assert (row["migrations_covered_ns"], row["um_fraction"], row["shown_fraction"]) == (
        6,
        None,
        0.6,
    )
    assert bins(out, "rank_stats")["shown"].to_list() == ["migrations"]


def test_bins_outside_the_windows_that_were_asked_for_are_unknown(tmp_path):
    export = x.Export().add(x.MEMCPY, *(x.migration(t, t + 4, 4096) for t in range(0, 100, 10)))
    export.add(x.NVTX, x.nvtx(0, 20, "step"), x.nvtx(80, 100, "step"))
    path = export.write(tmp_path / "a.sqlite")
    found = bins(run("uvm_time_map", [path], tmp_path / "out", "--nvtx", "step", "--bins", "10"))
    shares = found["migrations_covered_ns"].to_list()
    assert shares[2:8] == [None] * 6
    assert shares[0] == 4
    assert shares[9] == 4


def test_gpus_are_apart_in_their_own_table_and_together_in_the_other(tmp_path):
    path = write(
        tmp_path / "a.sqlite",
        x.migration(0, 6, 4096, device=0),
        x.migration(4, 10, 4096, x.VA + 4096, device=1),
    )
    out = run("uvm_time_map", [path], tmp_path / "out", "--bins", "1")
    assert bins(out)["um_covered_ns"].to_list() == [10]
    by_gpu = bins(out, "analysis_by_gpu").select("device_id", "um_covered_ns")
    assert by_gpu.rows() == [(0, 6), (1, 6)]


def test_a_bin_over_reports_has_their_mean_and_names_the_busiest(tmp_path):
    a = write(tmp_path / "rank0.sqlite", x.migration(0, 2, 4096), x.migration(9, 10, 4096), utc=0)
    b = write(tmp_path / "rank1.sqlite", x.migration(0, 10, 4096), utc=0)
    row = bins(run("uvm_time_map", [a, b], tmp_path / "out", "--bins", "1"), "all_stats").row(
        0, named=True
    )
    assert row["n_reports"] == 2
    assert row["mean_fraction"] == pytest.approx(0.65)
    assert (row["min_fraction"], row["max_fraction"]) == (0.3, 1.0)
    assert row["max_source"].endswith("rank1.sqlite")


@pytest.mark.parametrize("number", ["0", "-3", "100001"])
def test_a_number_of_bins_that_makes_no_sense_is_refused(tmp_path, number, caplog):
    path = write(tmp_path / "a.sqlite", x.migration(0, 5, 4096))
    with pytest.raises(SystemExit):
        run("uvm_time_map", [path], tmp_path / "out", "--bins", number)
    assert "give a number from 1 to 100,000" in caplog.text
