"""What a report says of memory: evictions and refaults, ping-pong, transfers."""

from __future__ import annotations

import exports as x
import polars as pl
import pytest
import reports

from nsan.report.blocks import Picture
from nsan.report.report import Report
from nsan.units import format_bytes, format_rate

EVICTED = (
    "SELECT sum(bytes) FROM CUPTI_ACTIVITY_KIND_MEMCPY WHERE copyKind = 12 AND migrationCause = 4"
)


def said(sample, name):
    return " ".join(reports.texts(reports.section(sample, name)))


def truth(sample, table):
    return pl.read_parquet(reports.path_of(sample).parent / "truth" / f"{table}.parquet")


def pictures(blocks):
    return [block.name for block in blocks if isinstance(block, Picture)]


# Evictions and room --------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", ["oversubscribed_sweep", "pca_on", "random"])
def test_what_was_evicted_and_what_came_back_is_as_the_model_knows_it(sample):
    ((evicted,),) = x.ask(reports.path_of(sample), EVICTED)
    back = truth(sample, "refaults")["bytes"].sum()
    text = said(sample, "memory")
    assert text.startswith(f"{format_bytes(evicted)} were evicted")
    assert f"of it, {format_bytes(back)}, came back" in text


def test_evictions_although_all_should_fit_are_explained_by_what_was_resident():
    text = said("oversubscribed_sweep", "memory")
    assert "less than 0.01 times" in text
    assert "less was free than the GPU's size says" in text
    assert "it is 1.50 at most" in text


def test_evictions_are_drawn_and_their_va_blocks_named_by_address():
    blocks = reports.section("oversubscribed_sweep", "memory")
    (rows,) = reports.tables(blocks).values()
    assert pictures(blocks) == ["memory_held", "refault_distance"]
    assert rows[0]["VA block"] == "0x00007f0000000000"
    assert "Elsewhere" not in rows[0]  # 0 throughout


def test_without_evictions_the_section_is_a_paragraph():
    blocks = reports.section("real", "memory")
    assert len(blocks) == 1
    assert blocks[0].text.startswith("Nothing was evicted")
    assert "allocations were not recorded (`--cuda-memory-usage=true`)" in blocks[0].text


def test_a_log_without_causes_does_not_claim_that_nothing_was_evicted():
    text = said("hotspot_8192", "memory")
    assert text.startswith("Whether memory was evicted is not known")
    assert "Nothing was evicted" not in text
    assert "the size of the GPU is not known" in text


def test_a_factor_above_one_is_told_in_the_other_definitions_too(built):
    # 3 GiB of managed memory on a GPU of 2 GiB, of which the reserve of 240 MB is taken.
    export = x.Export()
    export.add(x.GPU, {"id": 0, "name": "g", "totalMemory": 2 << 30, "cuDevice": 0})
    export.add(x.MEMORY, x.memory_event(0, x.VA, 3 << 30))
    export.add(x.MEMCPY, x.migration(10, 20, 4096))
    export.add(x.MEMCPY, x.migration(30, 40, 4096, kind=x.DTOH, cause=x.EVICTION))
    text = " ".join(reports.texts(Report(built(export)).section("memory")))
    factor = (3 << 30) / ((2 << 30) - 240_000_000)
    assert f"{factor:.2f} times" in text
    assert f"150% of the GPU (F2), {1 - 1 / factor:.0%} without room (F3)" in text


def test_a_part_says_once_that_the_rest_needs_the_whole_capture():
    report = Report(reports.path_of("oversubscribed_sweep"), filters={"time": "20ms/40ms"})
    texts = reports.texts(report.section("memory"))
    assert sum("need the whole capture" in text for text in texts) == 1
    assert not [
        block for block in report.section("memory") if getattr(block, "tone", "") == "warning"
    ]
    assert (
        "Over the part that was asked for 48.00 MiB of different memory came to the GPU" in texts[1]
    )


def most_in_a_window(path, ns):
    """Ask the database: most different memory that came, or whose fault is lowest, in a window of a fixed grid."""
    asked = (
        "SELECT start, virtualAddress, bytes FROM CUPTI_ACTIVITY_KIND_MEMCPY WHERE copyKind IN (11, 13) "
        f"UNION ALL SELECT start, address / 4096 * 4096, 4096 FROM {x.GPU_FAULTS}"
    )
    pages = {}
    for start, va, size in x.ask(path, asked):
        pages.setdefault(start // ns, set()).update(range(va // 512, (va + size) // 512))
    return max(512 * len(found) for found in pages.values())


def test_the_busiest_window_is_said_to_be_of_a_fixed_grid():
    most = most_in_a_window(reports.path_of("pca_on"), 100_000_000)
    assert (
        f"In the busiest of the windows of 100 ms (a fixed grid) {format_bytes(most)} of different memory came to "
        "the GPU or faulted there: a lower bound"
    ) in said("pca_on", "memory")


def test_a_capture_that_is_shorter_than_a_window_is_taken_as_a_whole(built):
    # Two windows of the grid hold 64 KiB each, and the capture lasts 20 ms.
    export = x.Export()
    for place, start in enumerate((95_000_000, 115_000_000)):
        va = x.VA + place * x.MIB
        export.add(x.MEMCPY, x.migration(start, start + 5000, 64 * x.KIB, va))
    text = reports.texts(Report(built(export)).section("memory"))[0]
    assert "Over the whole capture 128.00 KiB of different memory came to the GPU" in text


@pytest.fixture
def only_evicted(built):
    """Memory of which nothing is known before it leaves."""
    export = x.Export()
    for place in range(9):
        start, va = 1_000_000 * place, x.VA + place * 2 * x.MIB
        export.add(
            x.MEMCPY,
            x.migration(start, start + 10_000, 2 * x.MIB, va, kind=x.DTOH, cause=x.EVICTION),
        )
    return Report(built(export))


def test_what_was_evicted_without_having_come_is_not_said_to_have_been_0(only_evicted):
    text = " ".join(reports.texts(only_evicted.section("memory")))
    assert "18.00 MiB were evicted" in text
    assert "0 B" not in text
    assert "how much of it on the GPU, is not known: allocations" in text


def test_copies_without_a_cause_beside_others_may_be_evictions(built):
    export = x.Export()
    export.add(x.MEMCPY, x.migration(0, 1000, 4096))
    export.add(x.MEMCPY, x.migration(2000, 3000, 4096, kind=x.DTOH, cause=None))
    text = reports.texts(Report(built(export)).section("memory"))[0]
    assert text.startswith("No copy is known to be an eviction")


def test_evictions_whose_size_cannot_be_read_are_evictions(built):
    export = x.Export()
    export.add(x.MEMCPY, x.migration(0, 1000, 4096))
    export.add(x.MEMCPY, x.migration(2000, 3000, 1 << 62, kind=x.DTOH, cause=x.EVICTION))
    text = " ".join(reports.texts(Report(built(export)).section("memory")))
    assert text.startswith("Memory was evicted: the GPU's memory was full")
    assert "The sizes of some copies cannot be read" in text


# Ping-pong -----------------------------------------------------------------------------------------


def test_memory_that_bounces_is_what_the_model_bounced():
    pages = truth("ping_pong", "ping_pong").height
    held = truth("ping_pong", "batches").filter(pl.col("outcome") == "throttled").height
    text = said("ping_pong", "ping_pong")
    assert f"{format_bytes(4096 * pages)} in 1 VA block bounced between CPU and GPU 0" in text
    assert f"In {held} batches it held a fault back" in text


def test_what_the_driver_reported_in_a_log_is_counted():
    assert "The driver reported (rows of the log) thrashing 16 times." in said(
        "hotspot_1024", "ping_pong"
    )


def test_no_ping_pong_is_said_with_the_window_in_which_it_was_looked_for():
    text = said("real", "ping_pong")
    assert text.startswith("No page bounced")
    assert "500 us" in text
    assert len(reports.section("real", "ping_pong")) == 1


# Transfers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", ["real", "oversubscribed_sweep"])
def test_the_average_rate_is_bytes_over_the_time_of_copying(sample):
    ((size, ns),) = x.ask(
        reports.path_of(sample),
        "SELECT sum(bytes), sum(end - start) FROM CUPTI_ACTIVITY_KIND_MEMCPY WHERE copyKind = 11",
    )
    rate = format_rate(size / ns * 1e9)
    assert f"{format_bytes(size)} moved HtoD at {rate} on average" in said(sample, "transfers")


def test_memory_that_came_several_times_is_told():
    assert "from the CPU 4.00 times on average: 192.00 MiB moved for 48.00 MiB" in said(
        "oversubscribed_sweep", "transfers"
    )
    assert "What came from the CPU came once" in said("real", "transfers")


def test_prefetches_of_the_program_are_counted_by_what_became_of_them():
    text = said("user_prefetch", "transfers")
    assert "asked for 3 prefetches, which moved 48.00 MiB: all in time" in text
    assert "asked for" not in said("real", "transfers")


def test_an_average_has_its_own_kind_beside_a_fit():
    text = said("real", "transfers")
    assert (
        "11.55 GB/s on average (derived). That is 90.6% of the 12.75 GB/s of a long copy (reconstructed)"
        in text
    )


def test_rates_in_a_log_with_coarse_starts_are_said_to_be_of_single_copies():
    assert said("hotspot_1024", "transfers").count("Rates are of single copies") == 1
    assert "Rates are of single copies" not in said("real", "transfers")


def test_what_the_prefetcher_brought_is_told_elsewhere():
    text = said("pca_on", "transfers")
    assert "brought" not in text
    assert "The rule of the driver's prefetcher, run again, gives all of" in text


def test_pushes_of_a_direction_stand_together_the_largest_first():
    tables = reports.tables(reports.section("oversubscribed_sweep", "transfers"))
    (rows,) = (rows for title, rows in tables.items() if title.startswith("Pushes"))
    ways = [row["Direction"] for row in rows]
    assert ways == sorted(ways, key=ways.index)
    assert [row["Min"] for row in rows if row["Direction"] == "HtoD"][:2] == [
        "1.00 MiB",
        "512.00 KiB",
    ]


@pytest.mark.parametrize("name", ["clusters", "batches", "memory", "ping_pong", "transfers"])
def test_a_trace_in_which_nothing_moved_gives_a_line(real, name):
    blocks = Report(real("nokernels_rtx4060_2025.5.1")).section(name)
    assert len(blocks) == 1
    assert blocks[0].text.startswith("No managed memory moved")


def test_migrations_that_were_not_recorded_are_not_said_to_be_none(real):
    (block,) = Report(real("rtx4060ti_2026.1.1")).section("transfers")
    assert block.tone == "empty", "the report leaves the section out"
    assert "could not trace Unified Memory on this platform" in block.text
