"""What a report says of the program: its steps, its allocator, and what the model knows of a run."""

from __future__ import annotations

import json
import shutil

import polars as pl
import pytest
import reports

from nsan.report.blocks import Picture, Points
from nsan.report.report import Report
from nsan.report.sections.truth import compared
from nsan.tabular.totals import share
from nsan.units import format_bytes

SWEEP = reports.SAMPLE_DATA / "model" / "pca_sweep" / "caching-1.5-none" / "caching-1.5-none.sqlite"


def said(sample, name):
    return " ".join(reports.texts(reports.section(sample, name)))


# Steps ---------------------------------------------------------------------------------------------


def test_steps_that_do_the_same_are_said_to_bring_their_memory_again():
    text = said("oversubscribed_sweep", "steps")
    assert "4 steps (NVTX range `step`)" in text
    assert "every step brings its memory again" in text
    assert "100.0% of the VA blocks are those of the step before" in text


def test_a_first_step_that_differs_is_told_apart():
    text = said("ping_pong", "steps")
    assert "In the first 8.56 MiB came to the GPU and 576.00 KiB left it" in text
    assert "in the second nothing came to the GPU or left it" in text


def test_migrations_that_were_not_recorded_move_no_0_bytes_in_a_step(real):
    blocks = Report(real("rtx4060ti_2026.1.1")).section("steps")
    text = " ".join(reports.texts(blocks))
    assert "What they move is not known: migrations were not recorded" in text
    assert "came to the GPU" not in text
    assert not [block for block in blocks if isinstance(block, Picture)]


def test_steps_by_nvtx_are_said_to_be_by_time_and_those_by_kernels_not(real):
    (by_time,) = reports.tables(reports.section("oversubscribed_sweep", "steps"))
    (by_kernel,) = reports.tables(Report(real("rtx4060ti_2026.1.1")).section("steps"))
    assert "by time: the GPU runs behind the host" in by_time
    assert "by time" not in by_kernel


def test_what_lies_outside_of_steps_is_told():
    counts = pl.read_parquet(reports.path_of("pca_on").parent / "truth" / "batches.parquet")
    tables = reports.tables(reports.section("pca_on", "steps"))
    (rows,) = (rows for title, rows in tables.items() if title.startswith("What each step"))
    inside = sum(int(row["Fault rows"].replace(" ", "")) for row in rows)
    assert f"Outside of all steps: {counts.height - inside} fault rows" in said("pca_on", "steps")


def test_without_steps_a_line_says_how_to_mark_them():
    text = said("real", "steps")
    assert text.startswith("No loop was recognised: no sequence of kernels")
    assert "range_push('step')" in text
    assert "nvtxRangePushA" in text
    assert len(reports.section("real", "steps")) == 1
    assert "record with `--trace=cuda,nvtx`" in text


def test_where_nvtx_was_recorded_or_nsys_was_not_used_nobody_is_told_to_record_it():
    text = reports.texts(reports.section("first_touch", "steps"))[0]
    assert text.startswith("No loop was recognised: no NVTX range")
    assert "--trace" not in text
    assert "--trace" not in said("hotspot_1024", "steps")


def test_ranges_are_shown_only_where_there_are_others_than_the_steps():
    titles = [*reports.tables(reports.section("oversubscribed_sweep", "steps"))]
    others = [*reports.tables(reports.section("pca_on", "steps"))]
    assert not [title for title in titles if title.startswith("Different memory")]
    (title,) = (title for title in others if title.startswith("Different memory"))
    assert "by time: the GPU runs behind the host" in title
    names = [row["Name"] for row in reports.tables(reports.section("pca_on", "steps"))[title]]
    assert names == ["update", "forward", "backward"]


# Allocator -----------------------------------------------------------------------------------------


def test_without_a_snapshot_two_calls_and_an_option_are_named():
    (block,) = reports.section("real", "allocator")
    assert block.tone == "missing"
    for word in ("_record_memory_history()", "_dump_snapshot(", "--snapshot"):
        assert word in block.text


def test_dead_traffic_is_the_models_own():
    figures = json.loads((reports.path_of("pca_on").parent / "model.json").read_text())["figures"]
    dead = figures["dead_in_bytes"] + figures["dead_out_bytes"]
    moved = figures["in_coherence_bytes"] + figures["in_prefetch_bytes"] + figures["out_bytes"]
    text = said("pca_on", "allocator")
    assert f"{share(dead / moved)} of what moved was data that no tensor needed" in text
    (states,) = (
        {row["Bytes of"]: row["Of all"] for row in rows}
        for title, rows in reports.tables(reports.section("pca_on", "allocator")).items()
        if title.startswith("Of what memory")
    )
    stale = states["stale: older than the tensor"]
    assert f"and {stale} was older than the tensor that held its place" in text


def test_first_touches_saved_are_told_with_their_error_and_their_kind_once():
    points = reports.points(reports.section("pca_on", "allocator"))
    assert "The cache saved about 103 first touches (+- 21)." in said("pca_on", "allocator")
    assert points["Reuse:"].text.endswith("reuse saved about 103 first touches (+- 21).")


def test_an_error_as_large_as_the_figure_leaves_it_untold():
    report = Report(SWEEP)
    text = " ".join(reports.texts(report.section("allocator")))
    assert "How many first touches the cache saved cannot be told: 189 (+- 1 751)" in text


def test_both_sides_of_the_cache_are_told_with_their_kind():
    blocks = reports.section("pca_on", "allocator")
    text = said("pca_on", "allocator")
    (points,) = (block for block in blocks if isinstance(block, Points))
    assert "The cache saved about" in text
    assert "Clocks aligned by 13 segments" in text
    assert [point.label for point in points.points] == ["Dead traffic:", "Reuse:", "Packing:"]
    assert {point.kind for point in points.points} == {"modelled"}


def test_a_run_without_a_cache_is_said_to_have_none():
    text = said("pca_off", "allocator")
    assert "The program ran without a cache" in text
    assert "The cache saved" not in text
    assert "None of 10 other settings" in text


def test_the_allocator_is_drawn_in_time_at_its_peak_and_joined():
    names = [b.name for b in reports.section("pca_on", "allocator") if isinstance(b, Picture)]
    assert names == ["allocator_over_time", "segments_at_peak", "moves_by_state"]


def test_only_settings_that_help_are_listed():
    tables = reports.tables(reports.section("pca_on", "allocator"))
    (rows,) = (rows for title, rows in tables.items() if title.startswith("Settings"))
    assert rows[0]["Setting"] == "as recorded"
    assert all(row["Difference"].startswith("-") for row in rows)


def test_a_snapshot_of_another_run_is_a_warning_and_the_rest_stays():
    other = reports.path_of("pca_off").parent / "snapshot.pickle"
    blocks = Report(reports.path_of("pca_on"), snapshot=other).section("allocator")
    (warning,) = (block for block in blocks if getattr(block, "tone", "") == "warning")
    assert "is not of the run of pca_on.sqlite" in warning.text
    assert [block.name for block in blocks if isinstance(block, Picture)]


@pytest.mark.parametrize("content", [b"no pickle at all", None])
def test_a_snapshot_that_cannot_be_read_is_a_warning_that_names_no_folder(tmp_path, content):
    place = tmp_path / "mine.pickle"
    if content is not None:
        place.write_bytes(content)
    (block,) = Report(reports.REAL, snapshot=place).section("allocator")
    assert block.tone == "warning"
    assert "mine.pickle" in block.text
    assert str(tmp_path) not in block.text


def test_of_a_part_only_what_the_cache_did_in_all_is_missing():
    blocks = Report(reports.path_of("pca_on"), filters={"nvtx": "step/1"}).section("allocator")
    texts = reports.texts(blocks)
    assert sum("only the whole capture tells" in text for text in texts) == 1
    assert "Of what memory the bytes were that moved" in reports.tables(blocks)


# What the model knows ------------------------------------------------------------------------------


def pairs(report):
    rows = next(iter(reports.tables(compared(report)).values()), [])
    return {row["What"]: (row["The model did"], row["nsan infers"]) for row in rows}


def test_the_models_figures_stand_beside_what_nsan_infers():
    found = pairs(reports.opened("oversubscribed_sweep"))
    folder = reports.path_of("oversubscribed_sweep").parent / "truth"
    evictions = pl.read_parquet(folder / "evictions.parquet").height
    assert found["Evictions"] == (str(evictions), "80")
    assert found["Came back (refaults)"] == ("144.00 MiB", "144.00 MiB")
    assert found["Oversubscription factor"] == ("1.50", "1.50 at most")


def test_batches_are_also_put_together_as_if_there_were_no_fault_rows():
    found = pairs(reports.opened("pca_on"))
    batches = pl.read_parquet(reports.path_of("pca_on").parent / "truth" / "batches.parquet")
    copied = batches.filter(pl.col("outcome") == "data").height
    model, seen = found["Batches that copied"]
    assert model == str(copied)
    assert seen != model  # an inference, and not exact here


def test_bounced_memory_is_compared_where_there_is_some():
    assert pairs(reports.opened("ping_pong"))["Memory that bounced"] == ("64.00 KiB", "64.00 KiB")
    assert "Memory that bounced" not in pairs(reports.opened("stream"))


def test_a_recorded_trace_and_a_part_have_nothing_to_compare():
    part = Report(reports.path_of("stream"), filters={"time": "1ms/8ms"})
    assert not compared(reports.opened("real"))
    assert not compared(part)


def test_tables_that_a_truth_lacks_are_left_out_and_the_rest_is_compared():
    folder = SWEEP.parent / "truth"
    assert not (folder / "ping_pong.parquet").exists()
    found = pairs(Report(SWEEP))
    evicted = pl.read_parquet(folder / "evictions.parquet")["copied_bytes"].sum()
    assert found["Evicted"] == (format_bytes(evicted), format_bytes(evicted))
    assert found["Oversubscription factor"][0] == "1.84"


def test_first_touches_and_remote_mappings_are_compared_together():
    made = pl.read_parquet(reports.path_of("advice").parent / "truth" / "batches.parquet")
    n = str(made.filter(pl.col("outcome") == "remote_map").height)
    found = pairs(reports.opened("advice"))
    assert found["Batches that copied nothing, not throttled"] == (n, n)


def test_a_truth_that_cannot_be_read_is_a_warning(tmp_path):
    folder = reports.path_of("stream").parent
    shutil.copytree(folder, tmp_path / "stream")
    for name in ("batches", "evictions"):
        (tmp_path / "stream" / "truth" / f"{name}.parquet").write_bytes(b"no parquet")
    (block,) = compared(Report(tmp_path / "stream" / "stream.sqlite"))
    assert block.tone == "warning"
    assert str(tmp_path) not in block.text
