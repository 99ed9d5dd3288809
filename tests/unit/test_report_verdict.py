"""The verdict on the samples, against plain SQL and the model's truth."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import exports as x
import polars as pl
import pytest
import reports

from nsan.report.evidence import gather
from nsan.report.report import Report
from nsan.units import format_bytes, format_time

MS = 1_000_000
IN_PART = "By kernel and other work of the GPU, times inside this part, the longest wait first"


def line(sample, label):
    return reports.points(reports.section(sample, "verdict"))[label].text


def truth(sample, table):
    return pl.read_parquet(reports.path_of(sample).parent / "truth" / f"{table}.parquet")


@pytest.mark.parametrize(
    "sample", ["real", "hotspot_8192", "advice", "pca_on", "two_gpus", "random"]
)
def test_every_sample_gets_six_lines(sample):
    (found,) = reports.section(sample, "verdict")
    assert len(found.points) == 6
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
    helps = line("oversubscribed_sweep", "What may help:")
    assert helps.startswith("Make allocation 0 (48.00 MiB at 0x7f0000000000) fit into GPU memory")
    assert "before `scale`" not in helps  # a prefetch makes no room


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
    # The flag is the second allocation of the program.
    helps = line("ping_pong", "What may help:")
    assert helps.startswith("Pin allocation 1 (64.00 KiB at 0x7f0000800000) that `producer` uses")


def test_the_driver_that_reported_ping_pong_itself_is_quoted():
    assert "The driver itself reported thrashing 16 times" in line("hotspot_1024", "Why:")


def test_prefetched_data_needs_no_change():
    helps = line("user_prefetch", "What may help:")
    assert helps.startswith("Nothing that was recorded asks for a change")
    assert line("user_prefetch", "What it cost:").startswith("No kernel waited for a page fault.")


def test_first_touches_are_not_called_migrations():
    said = line("first_touch", "Why:")
    n = truth("first_touch", "batches").height
    assert said.startswith(f"All {n} batches of GPU page faults copied nothing (first touch, or ")
    assert "cudaMemPrefetchAsync" not in said


def test_a_log_without_causes_gives_no_cause():
    said = line("hotspot_8192", "Why:")
    assert "Of 867 batches of GPU page faults 521 brought data and 344 copied nothing" in said
    assert "prefetcher" not in said
    assert "nvprof does not print why memory moved" in line("hotspot_8192", "How far to trust it:")
    assert "rough" in line("hotspot_8192", "What it cost:")


def test_batches_that_mapped_memory_remotely_are_not_told_as_first_touches():
    kinds = truth("advice", "batches")["outcome"]
    n = kinds.is_in(["remote_map", "first_touch"]).sum()
    assert (kinds == "remote_map").sum() == n
    assert (
        f"Of {kinds.len()} batches of GPU page faults {n} copied nothing (first touch, or mapped "
        "remotely)" in line("advice", "Why:")
    )


def test_batches_are_of_the_kind_that_the_analysis_gives_them():
    report = reports.opened("hotspot_1024")
    kinds = report.kinds("batch_latency", report.frame("batch_latency"))
    assert kinds["n_batches"] == kinds["outcome"] == gather(report).outcomes_kind == "derived"
    assert "(first touch, or mapped remotely) (derived)" in line("hotspot_1024", "Why:")


def test_durations_of_copies_are_not_called_unknown_where_only_starts_are_coarse():
    said = line("hotspot_1024", "How far to trust it:")
    assert "rates" not in said
    assert "it is not known when copies overlapped" in said


def test_the_range_is_the_one_that_launched_the_work():
    assert "Launched in NVTX range `backward`:" in line("pca_on", "Where:")


def test_waits_of_kernels_side_by_side_are_a_union(built):
    # Both run for 10 ms, and a fault waits for 9 of them.
    export = x.Export().add(x.KERNEL, x.kernel(0, 10 * MS), x.kernel(0, 10 * MS, name=9))
    export.strings[9] = "mul"
    for at in range(9):
        va = x.VA + at * 2 * x.MIB
        export.add(x.GPU_FAULTS, x.gpu_fault(at * MS, (at + 1) * MS, va, n=8))
        export.add(x.MEMCPY, x.migration(at * MS + MS // 2, (at + 1) * MS - 1000, 65536, va))
    said = reports.points(Report(built(export)).section("verdict"))["What it cost:"].text
    assert "Kernels ran for 10.000 ms, and a page fault was waiting for 9.000 ms (90.0%)" in said


@pytest.mark.parametrize("gpu_ids", [(), (7, 7)])
def test_two_processes_on_one_gpu_do_not_run_twice(built, gpu_ids):
    # Kernels of 10 ms each, 5 ms of them at once; a fault of each process waits in the last 5 ms.
    export = x.Export()
    for place, pid in enumerate((x.PID, x.PID + 1)):
        start = place * 5 * MS
        export.strings[20 + place] = f"k{place}"
        export.add(x.KERNEL, x.kernel(start, start + 10 * MS, pid=pid, name=20 + place))
        export.add(x.GPU_FAULTS, x.gpu_fault(start + 5 * MS, start + 10 * MS, x.VA, pid=pid))
        export.add(x.MEMCPY, x.migration(start + 6 * MS, start + 7 * MS, 4096, x.VA, pid=pid))
        for gpu_id in gpu_ids[place:][:1]:
            row = {"gpuId": gpu_id, "cudaId": 0, "pid": pid, "numSms": 1}
            export.add(x.CUDA_DEVICE, row)
    for gpu_id in gpu_ids[:1]:
        export.add(x.GPU, {"id": gpu_id, "name": "A"})
    said = reports.points(Report(built(export)).section("verdict"))["What it cost:"].text
    assert "Kernels ran for 15.000 ms, and a page fault was waiting for 10.000 ms (66.7%)" in said


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ((0, 0), "1 kernel was recorded, none with a duration, so "),
        ((0, (1 << 63) - 1), "1 kernel was recorded, with times that could not be read, so "),
    ],
)
def test_a_kernel_without_a_time_is_not_said_to_be_none(built, times, words):
    export = x.Export().add(x.KERNEL, x.kernel(*times)).add(x.MEMCPY, x.migration(1, 2, 4096))
    said = reports.points(Report(built(export)).section("verdict"))["What it cost:"].text
    assert said.startswith(words)


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


RAN = """
SELECT sum(min("end", :until) - max(start, :from)) FROM CUPTI_ACTIVITY_KIND_KERNEL
WHERE start < :until AND "end" > :from
"""


@pytest.mark.parametrize(
    ("sample", "first", "last"), [("oversubscribed_sweep", 20, 40), ("real", 266, 268)]
)
def test_in_a_part_kernels_run_as_long_as_they_do_inside_it(sample, first, last):
    edges = {"from": first * MS, "until": last * MS}
    with closing(sqlite3.connect(reports.path_of(sample))) as connection:
        ((ran,),) = connection.execute(RAN, edges)
    part = Report(reports.path_of(sample), filters={"time": f"{first}ms/{last}ms"})
    said = reports.points(part.section("verdict"))["What it cost:"].text
    assert f"ran for {format_time(ran)} in this part" in said
    found = gather(part).held
    assert 0 < found.exposed_ns <= found.time_ns == ran
    assert f"kernels ran for {format_time(ran)}" in reports.points(part.head())["Time:"].text
    rows = reports.tables(part.section("places"))
    assert [row["Time"] for row in rows[IN_PART]] == [format_time(ran)]


def test_in_a_part_a_fault_waits_that_was_raised_before_it(built):
    # The kernel runs from 0 to 100 us; faults wait from 10 to 30 and from 90 to 100.
    far = x.VA + x.MIB
    export = x.Export().add(x.KERNEL, x.kernel(0, 100_000))
    export.add(x.GPU_FAULTS, x.gpu_fault(10_000, 30_000), x.gpu_fault(90_000, 100_000, far))
    export.add(x.MEMCPY, x.migration(15_000, 25_000, 4096), x.migration(91_000, 99_000, 4096, far))
    part = gather(Report(built(export), filters={"time": "20us/110us"})).held
    assert (part.time_ns, part.exposed_ns) == (80_000, 20_000)


def test_the_waits_of_two_parts_add_up_to_those_of_the_whole():
    path = reports.path_of("oversubscribed_sweep")
    windows = ("/25ms", "25ms/")
    parts = [gather(Report(path, filters={"time": window})).held for window in windows]
    whole = gather(reports.opened("oversubscribed_sweep")).held
    assert sum(part.time_ns for part in parts) == whole.time_ns
    assert sum(part.exposed_ns for part in parts) == whole.exposed_ns


def test_a_range_of_several_kernels_waits_no_longer_than_they_run_in_it():
    part = Report(reports.path_of("pca_on"), filters={"nvtx": "forward"})
    found = gather(part)
    assert found.n_kernel_names > 1
    assert found.held.exposed_ns <= found.waiting_ns <= found.kernels_ns
    assert found.kernels_ns == part.summary["kernels"]["busy_ns"]


def test_memory_that_moved_only_there_and_back_is_no_ping_pong(built):
    copies = [x.migration(0, 90, 4096), x.migration(100_000, 100_090, 4096, kind=x.DTOH)]
    report = Report(built(x.Export().add(x.MEMCPY, *copies)))
    assert report.frame("ping_pong")["n_moves"].to_list() == [2]
    assert "to and fro" not in reports.points(report.section("verdict"))["Why:"].text
