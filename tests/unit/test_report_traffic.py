"""The traffic of a report: by direction and cause, over time, and what the driver's prefetcher did."""

from __future__ import annotations

import exports as x
import reports

from nsan.report.blocks import Picture
from nsan.report.report import Report
from nsan.units import format_bytes

KIB = 1024
CAUSES = {2: "page fault", 3: "speculative prefetch", 4: "eviction"}
WAYS = {11: "HtoD", 12: "DtoH", 13: "DtoD"}


def test_the_table_holds_the_sums_of_the_export_largest_first():
    query = (
        f"SELECT copyKind, migrationCause, count(*), sum(bytes) FROM {x.MEMCPY} "
        "WHERE copyKind IN (11, 12, 13) GROUP BY 1, 2 ORDER BY 4 DESC"
    )
    expected = [
        (WAYS[way], CAUSES[cause], str(n), format_bytes(size))
        for way, cause, n, size in x.ask(reports.REAL, query)
    ]
    rows = reports.tables(reports.section("real", "traffic"))["By direction and cause"]
    got = [(row["Direction"], row["Cause"], row["Migrations"], row["Bytes"]) for row in rows]
    assert got == expected


def test_the_chart_is_there_and_comes_first():
    first = reports.section("real", "traffic")[0]
    assert isinstance(first, Picture)
    assert first.name == "migrations_over_time"


def test_the_prefetchers_share_is_told_for_each_gpu():
    said = reports.texts(reports.section("two_gpus", "traffic"))
    assert [text[:24] for text in said] == ["Page faults of GPU 0 bro", "Page faults of GPU 1 bro"]


def test_a_prefetcher_that_added_nothing_has_no_figures(built):
    export = x.Export().add(x.MEMCPY, x.migration(10, 20, 4 * KIB))
    (said,) = reports.texts(Report(built(export)).section("traffic"))
    assert said == "Page faults brought 4.00 KiB; the driver's prefetcher added nothing (derived)."


def test_of_a_part_the_prefetcher_is_not_told():
    part = Report(reports.path_of("two_gpus"), filters={"device": 1})
    assert reports.texts(part.section("traffic")) == []


def test_waste_of_the_prefetcher_is_an_upper_bound(built):
    # The fault brings 4 KiB, the prefetcher 60 KiB beside it; then the block is evicted.
    export = x.Export().add(
        x.MEMCPY,
        x.migration(10, 20, 4 * KIB),
        x.migration(20, 30, 60 * KIB, x.VA + 4 * KIB, cause=x.PREFETCH),
        x.migration(50, 60, 64 * KIB, kind=x.DTOH, cause=x.EVICTION),
    )
    (said,) = reports.texts(Report(built(export)).section("traffic"))
    assert "brought 64.00 KiB; 93.8% of that the driver's prefetcher added" in said
    assert "spared at most 15 faults" in said
    assert "At most 60.00 KiB of it (100.0%) came for nothing" in said


def test_times_that_are_too_coarse_are_left_out_and_said_so():
    blocks = reports.section("hotspot_1024", "traffic")
    rows = reports.tables(blocks)["By direction and cause"]
    assert not {"Busy", "Rate"} & set(rows[0])
    said = reports.texts(blocks)[0]
    assert said.startswith("When copies overlapped, and so how long the GPU was busy with them, ")
    assert "how fast" not in said


def test_what_the_driver_reported_against_ping_pong_is_told_where_a_profiler_records_it():
    said = reports.texts(reports.section("hotspot_1024", "traffic"))
    assert said[-1] == "Against ping-pong the driver reported: thrashing 16 times."
    assert not any("reported" in text for text in reports.texts(reports.section("real", "traffic")))


def test_without_migrations_one_line_is_left(real):
    (block,) = Report(real("reduced_6tables_2026.1.1")).section("traffic")
    assert block.text == "No managed memory moved, so there are no migrations."


def test_migrations_that_were_not_recorded_are_not_said_to_be_none(real):
    (block,) = Report(real("rtx4060ti_2026.1.1")).section("traffic")
    assert block.text.startswith("Nothing is known of migrations")
