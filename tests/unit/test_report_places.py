"""Where faults are and what moves: kernels, NVTX ranges, allocations and VA blocks of a report."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import exports as x
import polars as pl
import pytest
import reports

from nsan.report.report import Report
from nsan.units import format_bytes

KERNELS = "By kernel and other work of the GPU, the longest wait first"
RANGES = "By NVTX range (GPU work launched in it), the one that brought most to GPUs first"
ALLOCATIONS = "By allocation, what moved most first"
MS = 1_000_000
BLOCKS = "The VA blocks (2 MiB) that fault most"


def places(sample):
    return reports.section(sample, "places")


def truth(sample, table):
    return pl.read_parquet(reports.path_of(sample).parent / "truth" / f"{table}.parquet")


def test_kernels_have_the_bytes_of_the_models_truth():
    counts = truth("two_gpus", "kernel_counts").group_by("name").agg(pl.col("bytes_in").sum())
    rows = {row["Name"]: row["In"] for row in reports.tables(places("two_gpus"))[KERNELS]}
    expected = {name: format_bytes(size) for name, size in counts.iter_rows()}
    assert {name: rows[name] for name in expected} == expected


def test_allocations_come_in_the_order_of_what_moved():
    counts = truth("pca_on", "allocation_counts")
    moved = (counts["bytes_in"] + counts["bytes_out"]).sort(descending=True).head(3)
    rows = reports.tables(places("pca_on"))[ALLOCATIONS]
    sizes = {
        row["va"]: row["bytes_in"] + row["bytes_out"]
        for row in counts.select("va", "bytes_in", "bytes_out").to_dicts()
    }
    shown = [sizes[int(row["Name"].split(",")[0], 16)] for row in rows[:3]]
    assert shown == moved.to_list()


def test_remainders_are_shown_although_the_table_is_short(built):
    # Three kernels fault, the first one longest, and most comes while none runs.
    export = x.Export()
    for place in range(3):
        start, va = 10 * MS * place, x.VA + place * 4 * x.MIB
        export.strings[10 + place] = f"k{place}"
        export.add(x.KERNEL, x.kernel(start, start + 5 * MS, name=10 + place))
        export.add(x.GPU_FAULTS, x.gpu_fault(start + MS, start + (4 - place) * MS, va))
        export.add(x.MEMCPY, x.migration(start + MS + 10, start + MS + 90, 4096, va))
    export.add(x.GPU_FAULTS, x.gpu_fault(90 * MS, 94 * MS, x.VA + 64 * x.MIB))
    export.add(x.MEMCPY, x.migration(91 * MS, 93 * MS, x.MIB, x.VA + 64 * x.MIB))
    rows = reports.tables(Report(built(export), rows=3).section("places"))[KERNELS]
    assert [row["Name"] for row in rows] == ["k0", "k1", "(unattributed)"]
    assert rows[2]["In"] == "1.00 MiB"


def test_what_lies_in_no_allocation_is_named_as_a_remainder(built):
    export = x.Export().add(x.MEMORY, x.memory_event(0, x.VA, x.MIB))
    export.add(x.MEMCPY, x.migration(10, 20, 4096), x.migration(30, 40, 8192, x.VA + 64 * x.MIB))
    rows = reports.tables(Report(built(export)).section("places"))[ALLOCATIONS]
    assert [(row["In"], row["Name"][:13]) for row in rows] == [
        ("4.00 KiB", "0x7f000000000"),
        ("8.00 KiB", "(unattributed"),
    ]


def test_remainders_with_nothing_in_them_are_left_out():
    names = [row["Name"] for row in reports.tables(places("oversubscribed_sweep"))[KERNELS]]
    assert names == ["scale"]


def test_what_came_by_prefetch_calls_is_laid_to_no_kernel():
    rows = {row["Name"]: row for row in reports.tables(places("user_prefetch"))[KERNELS]}
    assert rows["(user prefetch)"]["In"] == "32.00 MiB"
    assert rows["add(int, float *, float *)"]["In"] == "0 B"


LAUNCHED = """
SELECT range.text, sum(copy.bytes) FROM CUPTI_ACTIVITY_KIND_MEMCPY AS copy
JOIN CUPTI_ACTIVITY_KIND_KERNEL AS kernel ON copy.start >= kernel.start AND copy.start < kernel.end
JOIN CUPTI_ACTIVITY_KIND_RUNTIME AS call ON call.correlationId = kernel.correlationId
JOIN NVTX_EVENTS AS range ON call.start >= range.start AND call.start < range.end
WHERE copy.copyKind = 11 GROUP BY range.text
"""


def test_what_the_gpu_does_belongs_to_the_range_that_launched_it_not_to_the_one_that_waits():
    found = reports.tables(places("pca_on"))[RANGES]
    rows = {row["Name"]: row["Inclusive in"] for row in found}
    with closing(sqlite3.connect(reports.path_of("pca_on"))) as connection:
        oracle = dict(connection.execute(LAUNCHED))
    # The host waits in "update", where time alone would lay it all.
    assert set(oracle) == {"step", "forward", "backward", "update"}
    assert oracle["update"] < oracle["forward"] + oracle["backward"]
    del rows["(unattributed)"]
    assert rows == {name: format_bytes(size) for name, size in oracle.items()}


def test_guessed_allocations_are_called_so_and_are_reconstructed():
    blocks = places("real")
    title = "By allocation, guessed from addresses, what moved most first"
    assert len(reports.tables(blocks)[title]) == 1
    (table,) = (
        block
        for block in blocks
        if getattr(block, "title", "") == title and hasattr(block, "heads")
    )
    assert table.notes[-1] == "Figures are reconstructed."


def test_what_was_not_recorded_is_told_once_with_its_switch():
    text = str(places("real"))
    assert text.count("NVTX ranges were not recorded (`--trace=cuda,nvtx`).") == 1
    assert text.count("Allocations were not recorded (`--cuda-memory-usage=true`).") == 1
    assert "were not recorded" not in str(places("pca_on"))


def test_a_log_of_nvprof_is_not_told_a_switch_of_nsys():
    said = reports.texts(places("hotspot_1024"))
    assert said == ["NVTX ranges were not recorded (a GPU trace of nvprof has no NVTX)."]


def test_in_windows_of_time_ranges_have_no_times():
    part = Report(reports.path_of("pca_on"), filters={"nvtx": "forward"})
    whole = reports.tables(places("pca_on"))[RANGES]
    cut = reports.tables(part.section("places"))[RANGES]
    assert "Time" in whole[0]
    assert not {"Time", "Exposed"} & set(cut[0])


def test_only_tables_that_are_shown_are_grounds():
    report = Report(reports.path_of("user_prefetch"))
    blocks = report.section("places")
    assert BLOCKS not in reports.tables(blocks)
    assert set(report.used["places"]) == {
        *("faults_by_kernel", "top_kernels", "faults_by_allocation", "top_allocations")
    }


def test_figures_that_need_causes_are_not_zero_without_them():
    (first, *_) = reports.tables(places("hotspot_1024"))[BLOCKS]
    assert set(first) == {"Address", "Fault rows", "CPU faults"}
    block = reports.opened("hotspot_1024").frame("faults_by_va_block")
    assert block["n_distinct_pages"].null_count() == block.height


def test_blocks_in_which_nothing_faulted_on_a_gpu_are_no_hot_spots():
    assert BLOCKS not in reports.tables(places("user_prefetch"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "reduced_6tables_2026.1.1",
            "No managed memory moved. Whether the GPU faulted is not known: GPU faults",
        ),
        ("rtx4060ti_2026.1.1", "Nothing is known of such places: migrations were not recorded"),
    ],
)
def test_without_anything_to_place_one_line_is_left(real, name, words):
    (block,) = Report(real(name)).section("places")
    assert block.text.startswith(words)


def test_hostile_names_are_harmless_and_short(built):
    export = x.Export()
    export.strings[1] = "evil\x1b[31m\u202e|`" + "x" * 5000
    export.add(x.KERNEL, x.kernel(0, 500)).add(x.MEMCPY, x.migration(20, 80, 4096))
    (row,) = reports.tables(Report(built(export)).section("places"))[KERNELS]
    assert len(row["Name"]) <= 60
    assert "\x1b" not in row["Name"]
    assert "\u202e" not in row["Name"]
