"""The verdict on the samples, against plain SQL and the model's truth."""

from __future__ import annotations

import exports as x
import polars as pl
import pytest
import reports

from nsan.report.evidence import gather
from nsan.report.report import Report
from nsan.units import format_bytes, format_time


def line(sample, label):
    return reports.points(reports.section(sample, "verdict"))[label].text


def truth(sample, table):
    return pl.read_parquet(reports.path_of(sample).parent / "truth" / f"{table}.parquet")


@pytest.mark.parametrize(
    "sample", ["real", "hotspot_8192", "advice", "pca_on", "two_gpus", "random"]
)
def test_every_sample_gets_five_lines(sample):
    (found,) = reports.section(sample, "verdict")
    assert len(found.points) == 5
    assert all(point.text.endswith(".") for point in found.points)


@pytest.mark.parametrize("sample", ["real", "oversubscribed_sweep", "two_gpus"])
def test_what_moved_is_what_the_export_holds(sample):
    query = "SELECT sum(bytes), count(*) FROM CUPTI_ACTIVITY_KIND_MEMCPY WHERE copyKind = ?"
    rows = {kind: x.ask(reports.path_of(sample), query, kind)[0] for kind in (11, 12, 13)}
    said = line(sample, "What moved:")
    for kind, words in (
        (11, "went to the GPU"),
        (12, "went to the CPU"),
        (13, "moved between GPUs"),
    ):
        size, n = rows[kind]
        assert (f"{format_bytes(size)} {words}" in said) == bool(n)
    assert f"in {sum(n for _, n in rows.values()):,} copies".replace(",", " ") in said


def test_the_real_vector_add_is_the_prefetchers_work():
    path = reports.REAL
    causes = "SELECT sum(bytes) FROM CUPTI_ACTIVITY_KIND_MEMCPY WHERE copyKind = 11 AND migrationCause = ?"
    faulted, ahead = (x.ask(path, causes, cause)[0][0] for cause in (2, 3))
    assert f"prefetcher brought {ahead / (faulted + ahead):.1%} of that" in line("real", "Why:")
    ((time,),) = x.ask(path, 'SELECT "end" - start FROM CUPTI_ACTIVITY_KIND_KERNEL')
    cost = line("real", "What it cost:")
    assert f"`add` ran for {format_time(time)}" in cost
    assert "(reconstructed)" in cost
    assert "put together from copies" in line("real", "How far to trust it:")


def test_oversubscription_is_told_with_what_the_model_evicted_and_fetched_again():
    evicted = truth("oversubscribed_sweep", "evictions")["copied_bytes"].sum()
    back = truth("oversubscribed_sweep", "refaults")["bytes"].sum()
    said = line("oversubscribed_sweep", "Why:")
    assert said.startswith(f"GPU memory was full: {format_bytes(evicted)} were evicted, ")
    assert f"and {format_bytes(back)} of that ({back / evicted:.1%}) were fetched again" in said
    assert "at most 1.50 times the room" in said  # as the sample was made
    assert "Less memory in use at a time may help most" in said
    assert "cudaMemPrefetchAsync" not in said


def test_the_wait_of_a_kernel_is_the_union_of_the_models_batches():
    batches = truth("oversubscribed_sweep", "batches").sort("raised_ns")
    waited, until = 0, 0
    for start, end in batches.select("raised_ns", "end_ns").iter_rows():
        waited += max(0, end - max(start, until))
        until = max(until, end)
    assert f"waiting for {format_time(waited)} " in line("oversubscribed_sweep", "What it cost:")


def test_ping_pong_is_told_by_the_pages_that_the_model_moved_to_and_fro():
    pages = truth("ping_pong", "ping_pong")
    said = line("ping_pong", "Why:")
    assert (
        f"{format_bytes(pages.height * 4096)} in 1 VA block went to and fro between CPU and GPU 0"
        in said
    )
    assert "`cudaMemAdvise`" in said


def test_the_driver_that_reported_ping_pong_itself_is_quoted():
    assert "The driver itself reported thrashing 16 times" in line("hotspot_1024", "Why:")


def test_prefetched_data_needs_no_change():
    assert line("user_prefetch", "Why:").endswith("Nothing here asks for a change.")
    assert line("user_prefetch", "What it cost:").startswith("No kernel waited for a page fault.")


def test_first_touches_are_not_called_migrations():
    said = line("first_touch", "Why:")
    n = truth("first_touch", "batches").height
    assert said.startswith(f"Of {n} batches of GPU page faults {n} had nothing to copy")
    assert "cudaMemPrefetchAsync" not in said


def test_a_log_without_causes_gives_no_cause():
    said = line("hotspot_8192", "Why:")
    assert "Of 867 batches of GPU page faults 521 brought data and 344 had nothing to copy" in said
    assert "prefetcher" not in said
    assert "nvprof does not print why memory moved" in line("hotspot_8192", "How far to trust it:")
    assert "rough" in line("hotspot_8192", "What it cost:")


def test_the_allocation_that_moved_most_is_the_models():
    counts = truth("pca_on", "allocation_counts").with_columns(
        moved=pl.sum_horizontal("bytes_in", "bytes_out", "bytes_between")
    )
    place = gather(reports.opened("pca_on")).allocation
    assert (place.bytes, place.all_bytes) == (counts["moved"].max(), counts["moved"].sum())


def test_a_capture_without_unified_memory_gets_no_verdict(real):
    blocks = Report(real("reduced_6tables_2026.1.1")).section("verdict")
    assert reports.texts(blocks) == [
        "No verdict: this capture holds nothing of Unified Memory, so there is nothing to judge. "
        "The sections that such events fill are left out."
    ]


def test_managed_memory_that_never_moved_gets_one(built):
    export = x.Export().add(x.MEMORY, x.memory_event(1, x.VA, x.MIB))
    export.add(x.KERNEL, x.kernel(10, 20))
    found = reports.points(Report(built(export)).section("verdict"))
    assert found["What moved:"].text == "No managed memory moved."
    assert found["What it cost:"].text == "No kernel waited for a page fault."


def test_a_part_says_that_it_is_one_and_asks_nothing_of_the_whole():
    part = Report(reports.path_of("oversubscribed_sweep"), filters={"time": "0/30ms"})
    found = reports.points(part.section("verdict"))
    assert "fetched again" not in found["Why:"].text
    assert "This is a part of the capture" in found["How far to trust it:"].text


def test_memory_that_moved_only_there_and_back_is_no_ping_pong(built):
    copies = [x.migration(0, 90, 4096), x.migration(100_000, 100_090, 4096, kind=x.DTOH)]
    report = Report(built(x.Export().add(x.MEMCPY, *copies)))
    assert report.frame("ping_pong")["n_moves"].to_list() == [2]
    assert "to and fro" not in reports.points(report.section("verdict"))["Why:"].text
