from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import exports as x
import pytest

import nsan
from nsan.errors import UsageError
from nsan.health import checks
from nsan.totals import totals

ROOT = Path(nsan.__file__).parent.parent
BLOCK = 2 * x.MIB
DIAGNOSTIC = "DIAGNOSTIC_EVENT"
ENVIRONMENT = "TARGET_INFO_SYSTEM_ENV"


@pytest.fixture
def health_of(summary_of):
    """Checks of an export by id: (status, text)."""

    def judge(export):
        checks = summary_of(export)["health"]
        found = {check["id"]: (check["status"], check["text"]) for check in checks}
        assert len(found) == len(checks), "an id stands twice"
        return found

    return judge


def status(found, name):
    return found[name][0] if name in found else None


def moved(*rows, **more):
    return x.Export(**more).add(x.MEMCPY, *rows)


def with_columns(export, table, *, without):
    columns = export.tables[table].split(", ")
    kept = ", ".join(c for c in columns if c.split(" ")[0] != without)
    export.tables = export.tables | {table: kept}
    return export


def schema_facts(version):
    names = ("EXPORT_PRODUCT_VERSION", "EXPORT_SCHEMA_VERSION", "EXPORT_PARAM_LAZY")
    values = ("2027.1.1", version, "true")
    return [{"name": n, "value": v} for n, v in zip(names, values, strict=True) if v]


# -- the export itself


@pytest.mark.parametrize(
    ("version", "want"),
    [
        ("3.7.2", "ok"),
        ("3.28.1", "ok"),
        ("3.28.2", "warn"),
        ("3.99.0", "warn"),
        ("4.0", "warn"),
        (None, "unknown"),
        ("new", "unknown"),
    ],
)
def test_a_schema_newer_than_those_checked_is_told(health_of, version, want):
    found = health_of(x.Export().add("META_DATA_EXPORT", *schema_facts(version)))
    assert status(found, "schema") == want


def test_a_column_that_is_missing_is_named(health_of):
    export = with_columns(moved(x.migration(0, 10, 4096)), x.MEMCPY, without="bytes")
    found = health_of(export)
    assert status(found, "columns") == "fail"
    assert "CUPTI_ACTIVITY_KIND_MEMCPY.bytes" in found["columns"][1]


def test_an_optional_column_that_is_missing_is_no_failure(health_of):
    export = with_columns(moved(x.copy(0, 10, 4096)), x.MEMCPY, without="migrationCause")
    found = health_of(export)
    assert "columns" not in found
    assert status(found, "cells") == "ok"


@pytest.mark.parametrize("value", ["many", 1 << 60, 0.5])
def test_a_cell_that_cannot_be_read_is_counted(health_of, value):
    found = health_of(moved(x.migration(0, 10, value), x.migration(20, 30, 4096)))
    assert status(found, "cells") == "fail"
    assert "CUPTI_ACTIVITY_KIND_MEMCPY.bytes (1)" in found["cells"][1]


def test_rows_that_end_before_they_start_are_told_once(health_of):
    found = health_of(moved(x.migration(10, 9, 4096), x.migration(30, 20, 4096)))
    assert status(found, "durations") == "warn"
    assert found["durations"][1].startswith("2 rows")
    assert status(found, "cells") == "ok"


def test_rows_of_no_length_are_not_reversed(health_of):
    assert "durations" not in health_of(moved(x.migration(10, 10, 4096)))


# -- what was recorded


@pytest.mark.parametrize(("option", "want"), [("true", "ok"), ("false", "warn"), (None, "unknown")])
def test_what_was_not_recorded_is_told_with_its_switch(health_of, option, want):
    found = health_of(x.Export(options={"COLLECT_UVM_GPU_PAGE_FAULTS": option}))
    assert status(found, "gpu_faults_recorded") == want
    assert ("--cuda-um-gpu-page-faults=true" in found["gpu_faults_recorded"][1]) == (want != "ok")


def test_a_capture_without_gpu_work_says_why(health_of):
    found = health_of(x.Export())
    assert status(found, "gpu_activity") == "warn"
    assert "did not use CUDA" in found["gpu_activity"][1]


def test_a_capture_with_calls_and_without_gpu_work_says_why(health_of):
    found = health_of(x.Export().add(x.RUNTIME, x.api_call(0, 1)))
    assert "CUDA was called" in found["gpu_activity"][1]


@pytest.mark.parametrize(
    ("table", "row"),
    [
        (x.KERNEL, x.kernel(0, 1)),
        (x.MEMCPY, x.copy(0, 1, 9)),
        (x.MEMSET, x.copy(0, 1, 9)),
        (x.MEMCPY, x.migration(0, 1, 4096)),
        (x.GPU_FAULTS, x.gpu_fault(0, 1)),
    ],
)
def test_any_gpu_event_is_gpu_activity(health_of, table, row):
    assert "gpu_activity" not in health_of(x.Export().add(table, row))


# -- platforms


def on(name, chip="GA100", **more):
    gpu = {"id": 0, "cuDevice": 0, "name": name, "chipName": chip}
    return x.Export(**more).add(x.GPU, gpu).add(x.KERNEL, x.kernel(0, 1))


@pytest.mark.parametrize(
    "name", ["NVIDIA GH200 480GB", "NVIDIA GB10", "NVIDIA GB200", "GH200 120GB"]
)
def test_silence_of_a_coherent_platform_is_explained_and_no_fault(health_of, name):
    found = health_of(on(name).add(x.RUNTIME, x.api_call(0, 1)))
    assert status(found, "platform") == "ok"
    assert name in found["platform"][1]
    assert "access counters" in found["platform"][1]
    assert "managed_without_traffic" not in found


@pytest.mark.parametrize(
    ("name", "chip"),
    [
        ("NVIDIA GeForce RTX 5090", "GB202"),
        ("NVIDIA B200", "GB100"),
        ("NVIDIA H200", "GH100"),
        ("NVIDIA H100 80GB HBM3", "GH100"),
        ("NVIDIA GB1000 of tomorrow", "X"),
        (None, None),
    ],
)
def test_a_chip_name_makes_no_coherent_platform(health_of, name, chip):
    found = health_of(on(name, chip).add(x.RUNTIME, x.api_call(0, 1)))
    assert "platform" not in found
    assert status(found, "managed_without_traffic") == "warn"


def test_managed_memory_that_moves_needs_no_explanation(health_of):
    export = on("NVIDIA A100").add(x.RUNTIME, x.api_call(0, 1))
    found = health_of(export.add(x.MEMCPY, x.migration(0, 1, 4096)))
    assert "managed_without_traffic" not in found


def test_a_managed_allocation_without_traffic_is_told_without_calls(health_of):
    found = health_of(on("NVIDIA A100").add(x.MEMORY, x.memory_event(0, x.VA, 4096)))
    assert status(found, "managed_without_traffic") == "warn"


def test_a_program_without_managed_memory_needs_no_explanation(health_of):
    export = on("NVIDIA A100").add(x.MEMORY, x.memory_event(0, x.VA, 4096, kind=2))
    export.strings |= {9: "cudaMalloc_v3020"}
    found = health_of(export.add(x.RUNTIME, x.api_call(0, 1, name=9)))
    assert not {"managed_without_traffic", "platform"} & set(found)


def environment(release):
    return {
        "devStateName": "SystemInfo",
        "name": "SoftwareReleaseVersion",
        "nameEnum": 1,
        "value": release,
    }


@pytest.mark.parametrize(
    ("release", "wsl"),
    [("5.15.90.1-microsoft-standard-WSL2", True), ("6.8.0-45-generic", False)],
)
def test_wsl_is_explained(health_of, release, wsl):
    export = on("NVIDIA GeForce RTX 4060").add(ENVIRONMENT, environment(release))
    found = health_of(export.add(x.RUNTIME, x.api_call(0, 1)))
    assert ("WSL, where" in found.get("platform", ("", ""))[1]) == wsl
    assert ("managed_without_traffic" in found) != wsl


# -- migrations


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (x.migration(0, 10, 4096), None),
        (x.migration(0, 10, BLOCK), None),  # a whole VA block
        (x.migration(0, 10, 4096, x.VA + BLOCK - 4096), None),  # its last page
        (x.migration(0, 10, 100), "1 are not whole pages"),
        (x.migration(0, 10, 0), "1 are not whole pages"),
        (x.migration(0, 10, BLOCK + 4096), "1 cross a 2 MiB VA block"),
        (x.migration(0, 10, 8192, x.VA + BLOCK - 4096), "1 cross a 2 MiB VA block"),
        (x.migration(10, 10, 4096), "1 take no time"),
    ],
)
def test_a_migration_is_whole_pages_inside_one_va_block(health_of, row, words):
    found = health_of(moved(row))
    assert status(found, "migration_sizes") == ("warn" if words else "ok")
    assert (words or "") in found["migration_sizes"][1]


def test_without_migrations_there_is_nothing_to_check(health_of):
    found = health_of(x.Export().add(x.KERNEL, x.kernel(0, 1)))
    assert not {"migration_sizes", "migration_labels", "lost_rows"} & set(found)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (x.migration(0, 10, 4096, cause=9), "1 have a cause that nsan does not know"),
        (x.migration(0, 10, 4096, cause=None), "1 have no cause"),
        (x.migration(0, 10, 4096, None), "1 have no address"),
        (x.migration(0, 10, 4096) | {"globalPid": None}, "1 have no process"),
    ],
)
def test_migrations_without_a_label_are_counted(health_of, row, words):
    found = health_of(moved(row, x.migration(20, 30, 4096)))
    assert found["migration_labels"] == ("warn", f"Of 2 migrations {words}.")


def test_migrations_with_all_labels_need_no_word(health_of):
    assert "migration_labels" not in health_of(moved(x.migration(0, 10, 4096)))


PAGE = 4096


@pytest.fixture
def cut_sample(tmp_path):
    """The real vector add with some of its copies deleted, as a full queue of the profiler does it."""
    place = tmp_path / "cut.sqlite"
    shutil.copy(ROOT / "sample_data" / "um_vector_add_rtx4060l.sqlite", place)

    def cut(first, last):
        with closing(sqlite3.connect(place)) as connection:
            found = connection.execute(
                "SELECT rowid, start, end, bytes FROM CUPTI_ACTIVITY_KIND_MEMCPY WHERE copyKind = 11 "
                "ORDER BY start"
            ).fetchall()
            lost = found[first:last]
            connection.executemany(
                "DELETE FROM CUPTI_ACTIVITY_KIND_MEMCPY WHERE rowid = ?", [row[:1] for row in lost]
            )
            connection.commit()
        return place, found[first - 1][2], found[last][1], sum(row[3] for row in lost)

    return cut


def test_a_whole_capture_follows_the_prefetcher_push_by_push():
    found = nsan.summary(ROOT / "sample_data" / "um_vector_add_rtx4060l.sqlite")["health"]
    (check,) = [check for check in found if check["id"] == "lost_rows"]
    assert check["status"] == "ok"
    assert "24 of 24 pushes" in check["text"]


def lost(path):
    (check,) = [each for each in nsan.summary(path)["health"] if each["id"] == "lost_rows"]
    return check["status"], check["text"]


def test_a_short_hole_without_fault_rows_cannot_be_told_from_first_touch_and_says_so(cut_sample):
    # Rows 4 to 11 are the second and third service of both arrays: the hole is no longer than other gaps.
    place, *_ = cut_sample(4, 12)
    status, text = lost(place)
    assert status == "unknown"
    assert "cannot be told" in text


def test_a_filter_does_not_look_like_a_loss():
    whole = ROOT / "sample_data" / "um_vector_add_rtx4060l.sqlite"
    part = nsan.open_trace(whole).filter(time="/266ms")
    checks = {check["id"]: check["status"] for check in nsan.summary(part)["health"]}
    assert checks["lost_rows"] == "ok"
    with pytest.raises(UsageError, match="whole capture"):
        nsan.analyse(part, "lost_rows")


HOLE = {
    "pid": 1, "device_id": 0, "level": "certain", "is_silent": True, "start_ns": 1_000_000,
    "end_ns": 15_760_000, "duration_ns": 14_760_000, "earliest_ns": 1_000_000,
    "latest_ns": 16_000_000, "least_bytes": 36 << 20, "lost_bytes": 70 << 20,
}  # fmt: skip


@pytest.mark.parametrize(
    ("holes", "words"),
    [
        (
            [HOLE],
            "are missing: from 1.000 ms to 15.760 ms (14.760 ms without any row), about 70.00 MiB",
        ),
        ([HOLE | {"level": "likely"}], "are probably missing: from 1.000 ms"),
        (
            [HOLE | {"is_silent": False}],
            "somewhere between 1.000 ms and 16.000 ms, at least 36.00 MiB",
        ),
        ([HOLE] * 5, "and 2 more (`nsan faults --by lost`)"),
    ],
)
def test_holes_are_said_with_their_time_and_bytes(holes, words):
    trace = nsan.open_trace(ROOT / "sample_data" / "um_vector_add_rtx4060l.sqlite")
    found = totals(trace) | {"lost_rows": {"holes": holes, "replay": []}}
    (check,) = [each for each in checks(trace.info.to_dict(), found) if each.id == "lost_rows"]
    assert check.status == "warn"
    assert words in check.text
    assert "totals are lower bounds" in check.text


def test_prefetched_pages_without_a_faulted_one_are_no_proof_of_loss(health_of):
    # A first touch, which copies nothing, may bring neighbours along.
    assert status(health_of(moved(x.migration(0, 10, PAGE, cause=x.PREFETCH))), "lost_rows") == "ok"


def test_without_addresses_loss_cannot_be_judged(health_of):
    found = health_of(moved(x.migration(0, 10, PAGE, None, cause=x.PREFETCH)))
    assert status(found, "lost_rows") == "unknown"


# -- fault rows as driver batches (domain.md D.5)


def batches(*faults, copies=(), kernels=()):
    export = x.Export().add(x.GPU_FAULTS, *faults)
    if copies:
        export.add(x.MEMCPY, *copies)
    return export.add(x.KERNEL, *kernels) if kernels else export


def test_rows_that_are_driver_batches_are_in_order(health_of):
    found = health_of(
        batches(
            x.gpu_fault(0, 100, x.VA, n=1),
            x.gpu_fault(50, 200, x.VA + BLOCK, n=256),  # raised during the batch before
            copies=[
                x.migration(20, 30, PAGE, x.VA),
                x.migration(40, 100, PAGE, x.VA + BLOCK),  # ends with its batch
                x.migration(110, 120, PAGE, x.VA + BLOCK + PAGE),
            ],
        )
    )
    assert found["fault_rows"] == (
        "ok",
        "All 2 GPU fault rows fit one driver batch each, with 3 copies. "
        "Full for certain (256 entries, nearly or quite): 1.",
    )


def test_an_end_identifies_a_batch(health_of):
    rows = [x.gpu_fault(0, 100, x.VA), x.gpu_fault(0, 100, x.VA + PAGE)]
    copies = [x.migration(20, 30, 2 * PAGE, x.VA)]
    found = health_of(batches(*rows, copies=copies))
    assert status(found, "fault_rows") == "ok"
    assert "one per page here: 2 rows" in found["fault_rows"][1]
    assert "make 1 driver batches" in found["fault_rows"][1]


def test_two_gpus_may_end_at_once(health_of):
    found = health_of(batches(x.gpu_fault(0, 100), x.gpu_fault(0, 100, device=1)))
    assert status(found, "fault_rows") == "ok"


def test_batches_end_in_the_order_in_which_they_were_raised(health_of):
    found = health_of(batches(x.gpu_fault(0, 100), x.gpu_fault(10, 50), x.gpu_fault(20, 120)))
    assert "1 end out of order" in found["fault_rows"][1]


def test_order_is_of_one_gpu(health_of):
    found = health_of(batches(x.gpu_fault(0, 100), x.gpu_fault(10, 50, device=1)))
    assert status(found, "fault_rows") == "ok"


@pytest.mark.parametrize(("n", "want"), [(0, "warn"), (1, "ok"), (256, "ok"), (257, "warn")])
def test_a_count_is_at_most_a_batch(health_of, n, want):
    found = health_of(batches(x.gpu_fault(0, 100, n=n)))
    assert status(found, "fault_rows") == want
    assert ("1 have a count outside 1 to 256" in found["fault_rows"][1]) == (want == "warn")


@pytest.mark.parametrize(
    ("copy", "outside"),
    [
        (x.migration(10, 100, PAGE), False),
        (x.migration(10, 101, PAGE), True),  # runs past the end of its batch
        (x.migration(101, 110, PAGE), True),  # after the last batch
        (x.migration(101, 110, PAGE, cause=x.PREFETCH), False),  # only faults need a row
        (x.migration(101, 110, PAGE, kind=x.DTOH), False),
        (x.migration(101, 110, PAGE, cause=x.USER), False),
        (x.migration(10, 20, PAGE, device=1), True),  # another GPU has no row
    ],
)
def test_a_faulted_copy_lies_in_the_batch_it_answers(health_of, copy, outside):
    found = health_of(batches(x.gpu_fault(0, 100), copies=[copy]))
    assert ("fall into no fault row" in found["fault_rows"][1]) == outside


def test_a_batch_is_named_by_its_lowest_faulted_page(health_of):
    found = health_of(
        batches(
            x.gpu_fault(0, 100, x.VA + PAGE),
            x.gpu_fault(110, 200, x.VA),  # below its first copy is right
            copies=[x.migration(10, 20, PAGE, x.VA), x.migration(120, 130, PAGE, x.VA + PAGE)],
        )
    )
    assert "1 lie above their lowest faulted page" in found["fault_rows"][1]


def test_copies_of_a_batch_ascend(health_of):
    rows = [
        x.migration(10, 20, PAGE, x.VA + 2 * PAGE),
        x.migration(30, 40, PAGE, x.VA + PAGE),  # down
        x.migration(110, 120, PAGE, x.VA),  # down too, but in the next batch
    ]
    found = health_of(batches(x.gpu_fault(0, 100), x.gpu_fault(101, 200), copies=rows))
    assert "of 3 fault-caused copies 1 descend within one" in found["fault_rows"][1]


def test_prefetched_copies_below_the_row_are_no_breach(health_of):
    rows = [
        x.migration(10, 20, PAGE, x.VA, cause=x.PREFETCH),
        x.migration(20, 30, PAGE, x.VA + PAGE),
    ]
    found = health_of(batches(x.gpu_fault(0, 100, x.VA + PAGE), copies=rows))
    assert status(found, "fault_rows") == "ok"


def test_gpus_that_two_processes_call_zero_are_judged_apart(health_of):
    export = (
        x.Export("2025.5.1")
        .add(
            x.GPU,
            {"id": 0, "cuDevice": 0, "name": "NVIDIA A100"},
            {"id": 1, "cuDevice": 1, "name": "NVIDIA A100"},
        )
        .add(
            x.CUDA_DEVICE,
            {"gpuId": 0, "cudaId": 0, "pid": 1},
            {"gpuId": 1, "cudaId": 0, "pid": 2},
        )
        .add(x.GPU_FAULTS, x.gpu_fault(0, 100, pid=1), x.gpu_fault(10, 50, pid=2))
    )
    assert status(health_of(export), "fault_rows") == "ok"


def test_without_fault_rows_there_are_no_batches_to_check(health_of):
    assert "fault_rows" not in health_of(moved(x.migration(0, 10, PAGE)))


# -- clocks


@pytest.mark.parametrize(
    ("fault_start", "lag"),
    [
        (200_000, None),  # inside the kernel
        (299_999, None),
        (135_000, "65.000 us"),  # measured on a TITAN Xp
        (100_000, "100.000 us"),
        (99_999, None),  # too early to belong to it
        (300_000, None),  # after the last kernel
    ],
)
def test_a_fault_shortly_before_its_kernel_shows_two_clocks(health_of, fault_start, lag):
    found = health_of(
        batches(x.gpu_fault(fault_start, 400_000), kernels=[x.kernel(200_000, 300_000)])
    )
    assert ("clocks" in found) == (lag is not None)
    if lag:
        assert found["clocks"][0] == "ok"
        assert f"1 fault rows start outside kernels, up to {lag}" in found["clocks"][1]


def test_a_fault_inside_a_long_kernel_is_inside_although_a_short_one_ended(health_of):
    kernels = [x.kernel(0, 1000), x.kernel(10, 20), x.kernel(600, 700)]
    assert "clocks" not in health_of(batches(x.gpu_fault(500, 550), kernels=kernels))


def test_kernels_of_another_gpu_say_nothing_about_the_clock(health_of):
    found = health_of(batches(x.gpu_fault(100, 200), kernels=[x.kernel(150, 300, device=1)]))
    assert "clocks" not in found


# -- what nsys itself said


def said(severity, text):
    return {"timestamp": 5, "timestampType": 0, "source": 0, "severity": severity, "text": text}


@pytest.mark.parametrize(
    ("severity", "text", "told"),
    [
        (3, "CUDA tracing went wrong.", True),
        (2, "Some CUDA events were lost.", True),
        (2, "Unified Memory cannot be traced here.", True),
        (2, "The weather is fine.", False),
        (1, "Buffers were flushed, none was lost.", False),
    ],
)
def test_errors_and_telling_warnings_of_nsys_are_repeated(health_of, severity, text, told):
    found = health_of(x.Export("2025.5.1").add(DIAGNOSTIC, said(severity, text)))
    assert ("diagnostics" in found) == told
    if told:
        assert found["diagnostics"] == ("warn", f"nsys reported: {text}")


def test_a_telling_warning_is_not_lost_behind_others(health_of):
    rows = [said(2, f"The weather of day {day} is fine.") for day in range(8)]
    rows.append(said(2, "CUPTI buffer overflow: events were dropped."))
    found = health_of(x.Export("2025.5.1").add(DIAGNOSTIC, *rows))
    assert "dropped" in found.get("diagnostics", ("", ""))[1]


# -- the list


def test_the_worst_stands_first(summary_of):
    export = with_columns(moved(x.migration(0, 10, 100)), x.MEMCPY, without="bytes")
    export.options["COLLECT_UVM_GPU_PAGE_FAULTS"] = None
    order = [check["status"] for check in summary_of(export)["health"]]
    rank = {"fail": 0, "warn": 1, "unknown": 2, "ok": 3}
    assert order == sorted(order, key=rank.__getitem__)
    assert order[0] == "fail"
    assert {"unknown", "ok"} <= set(order)


def test_health_is_that_of_the_whole_capture_under_any_filter(trace_of):
    import nsan

    whole = trace_of(moved(x.migration(0, 10, 4096), x.migration(100, 110, 100, pid=7)))
    want = nsan.summary(whole)["health"]
    assert {"migration_sizes": "warn"}.items() <= {c["id"]: c["status"] for c in want}.items()
    for part in (
        whole.filter(time=(0, 50)),
        whole.filter(pid=x.PID),
        whole.filter(pid=7, time="/9"),
    ):
        assert nsan.summary(part)["health"] == want
