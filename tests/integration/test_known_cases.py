"""What went wrong for people who do this job, case by case, each with the right value.

The numbers are those of the project's list of known cases, parts A (opening the export) and B (times,
identities, joins). Cases 10 to 12 are about running nsys: ``test_nsys_reports.py``.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing

import exports as x
import pytest

import nsan
from nsan.cli import main

SOAK = os.environ.get("NSAN_SOAK") == "1"
UM = "um_easycuda_rtx4060l_2023.4.4_lazy"
UM_NONLAZY = "um_easycuda_rtx4060l_2023.4.4_nonlazy"


def um_export(**options):
    """One kernel with one migration: the smallest capture with Unified Memory in it."""
    export = x.Export(**options)
    return export.add(x.KERNEL, x.kernel(0, 100)).add(x.MEMCPY, x.migration(10, 20, 4096))


# A. Opening the export


def test_case_1_one_missing_table_does_not_end_the_analysis(real):
    whole = real(UM)
    with closing(sqlite3.connect(whole)) as connection:
        names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master")]
        tables = [name for name in names if not name.startswith("META_DATA")]
        full = [t for t in tables if connection.execute(f'SELECT 1 FROM "{t}" LIMIT 1').fetchone()]
    for table in tables if SOAK else [*full[::2], x.MEMCPY, x.KERNEL]:
        path = whole.with_name(f"without-{table}.sqlite")
        path.write_bytes(whole.read_bytes())
        with closing(sqlite3.connect(path)) as connection:
            connection.execute(f'DROP TABLE "{table}"')
            connection.commit()
        moved = nsan.summary(path)["migrations"]["htod_bytes"]
        assert moved == (0 if table == x.MEMCPY else 8 * x.MIB), table


@pytest.mark.parametrize("name", [UM, UM_NONLAZY])
def test_case_2_migrations_are_reported_from_memcpy_alone(real, name):
    summary = nsan.summary(real(name))
    assert summary["migrations"]["htod_bytes"] == 8_388_608
    assert summary["migrations"]["dtoh_bytes"] == 4_194_304
    assert summary["capture"]["gpu_faults"] == "not_recorded"
    assert summary["gpu_faults"]["n_rows"] is None


def test_case_3_zero_faults_and_no_recording_are_two_answers(summary_of):
    off = {"COLLECT_UVM_GPU_PAGE_FAULTS": "false"}
    silent = {"COLLECT_UVM_GPU_PAGE_FAULTS": None}
    on = {"COLLECT_UVM_GPU_PAGE_FAULTS": "true"}
    found = {
        name: (summary["capture"]["gpu_faults"], summary["gpu_faults"]["n_rows"])
        for name, summary in {
            "no table, off": summary_of(um_export(options=off)),
            "no table, silent": summary_of(um_export(options=silent)),
            "empty table, silent": summary_of(um_export(lazy=False, options=silent)),
            "no table, on": summary_of(um_export(options=on)),
            "rows, off": summary_of(um_export(options=off).add(x.GPU_FAULTS, x.gpu_fault(1, 2))),
        }.items()
    }
    assert found == {
        "no table, off": ("not_recorded", None),
        "no table, silent": ("unknown", None),
        "empty table, silent": ("unknown", None),
        "no table, on": ("recorded", 0),
        "rows, off": ("recorded", 1),
    }


@pytest.mark.parametrize(
    ("version", "nsys", "schema"),
    [
        ("2022.2.1", "2022.2.1.31", "2.9.1"),  # EXPORT_META_DATA
        ("2026.1", "2026.1.1.204", "3.24.14"),  # META_DATA_EXPORT
        ("unversioned", None, None),
    ],
)
def test_case_4_the_version_comes_from_either_table_or_is_unknown(
    summary_of, version, nsys, schema
):
    summary = summary_of(um_export(version=version))
    assert (summary["nsys_version"], summary["export_schema"]) == (nsys, schema)
    assert summary["migrations"]["bytes"] == 4096


def test_case_5_columns_are_taken_as_they_are_there(tmp_path):
    path = um_export().write(tmp_path / "a.sqlite")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"ALTER TABLE {x.MEMCPY} ADD COLUMN quantumFlux INTEGER DEFAULT 7")
        connection.execute(f"ALTER TABLE {x.MEMCPY} DROP COLUMN virtualAddress")
        connection.execute(
            "UPDATE META_DATA_EXPORT SET value = '3.99.0' WHERE name = 'EXPORT_SCHEMA_VERSION'"
        )
        connection.commit()
    summary = nsan.summary(path)
    assert summary["migrations"]["bytes"] == 4096
    assert summary["migrations"]["min_va"] is None
    schema = next(check for check in summary["health"] if check["id"] == "schema")
    assert schema["status"] == "warn"
    assert "3.99.0 is newer" in schema["text"]


def test_case_6_a_copy_count_counts_operations_and_bytes_once(trace_of):
    export = x.Export("2025.5.2").add(x.MEMCPY, x.copy(0, 9, 8192, count=3), x.copy(10, 19, 100))
    copies = trace_of(export).copies.select("bytes", "n_operations").collect()
    assert copies.rows() == [(8192, 3), (100, 1)]


def test_case_6_a_column_that_a_version_lacks_is_null(trace_of):
    old = trace_of(x.Export("2022.2.1").add(x.CPU_FAULTS, x.cpu_fault(5, pc=0x40)))
    row = old.cpu_faults.select("pc", "source_file", "source_line").collect().row(0)
    assert row == (0x40, None, None)


def test_case_8_text_that_is_not_utf_8_is_kept_with_replacements(real, trace_of):
    saxpy = nsan.open_trace(real("nonlazy_saxpy_mpi_a100_2022.2.1"))
    assert saxpy.kernels.collect().height == 5
    export = x.Export().add(x.KERNEL, *(x.kernel(i, i + 1, name=i) for i in (10, 11, 12)))
    long_name = "void f<" + "int, " * 4000 + "int>()"
    export.strings |= {10: "caf\ufffd", 11: "\N{ROCKET}", 12: long_name}
    assert trace_of(export).kernels.collect()["name"].to_list() == [
        "caf\ufffd",
        "\N{ROCKET}",
        long_name,
    ]


def test_case_8_raw_bytes_in_a_text_cell_are_replaced(tmp_path):
    path = x.Export().add(x.KERNEL, x.kernel(0, 1, name=10)).write(tmp_path / "a.sqlite")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("INSERT INTO StringIds VALUES (10, CAST(X'0ADF01' AS TEXT))")
        connection.commit()
    assert nsan.open_trace(path).kernels.collect()["name"].item() == "\n\ufffd\x01"


@pytest.mark.parametrize("name", ["nokernels_rtx4060_2025.5.1", "nocuda_easycuda_2023.4.4"])
def test_case_13_a_capture_without_gpu_work_loads_and_ends_with_3(real, name, capsys):
    assert main(["summary", str(real(name))]) == 3
    assert "no migration, no page fault, no managed allocation" in capsys.readouterr().err


def test_case_13_calls_without_kernels_are_said_to_be_no_gpu_activity(summary_of):
    summary = summary_of(x.Export().add(x.RUNTIME, x.api_call(0, 10)))
    check = next(check for check in summary["health"] if check["id"] == "gpu_activity")
    assert check["status"] == "warn"
    assert "No GPU activity was recorded" in check["text"]


# B. Times, identities, joins


def test_case_15_only_ranges_become_ranges_and_an_open_one_ends_with_the_trace(trace_of):
    export = x.Export().add(x.KERNEL, x.kernel(0, 500))
    others = [x.nvtx(i, None, "other", kind=kind) for i, kind in enumerate((33, 39, 75))]
    export.add(x.NVTX, *others, x.nvtx(7, None, "mark", kind=34), x.nvtx(100, None, "open"))
    trace = trace_of(export)
    ranges = trace.nvtx_ranges.select("name", "start_ns", "end_ns", "closed").collect()
    assert ranges.rows() == [("open", 100, 500, False)]
    assert trace.nvtx_marks.select("name", "start_ns").collect().rows() == [("mark", 7)]


def test_case_16_a_name_is_its_text_then_its_string_then_a_placeholder(trace_of):
    export = x.Export()
    export.strings |= {40: "registered"}
    export.add(
        x.NVTX,
        x.nvtx(0, 1, "text"),
        x.nvtx(1, 2, text_id=40),
        x.nvtx(2, 3, "text", text_id=40),
        x.nvtx(3, 4),
        x.nvtx(4, 5, text_id=999),
    )
    names = trace_of(export).nvtx_ranges.collect()["name"].to_list()
    assert names == ["text", "registered", "text", "(unnamed)", "(unnamed)"]


def test_case_18_migrations_need_no_correlation_id(trace_of):
    rows = [x.migration(i, i + 1, 4096) | {"correlationId": c} for i, c in enumerate((0, 0, None))]
    export = x.Export().add(x.MEMCPY, *rows).add(x.KERNEL, x.kernel(0, 9, correlation=0))
    trace = trace_of(export)
    assert trace.migrations.collect().height == 3
    assert "correlation_id" not in trace.migrations.collect_schema()


def test_case_19_two_processes_with_equal_ids_stay_apart(trace_of, real):
    rows = [x.kernel(0, 10, pid=1, correlation=120), x.kernel(5, 15, pid=2, correlation=120)]
    kernels = trace_of(x.Export().add(x.KERNEL, *rows)).kernels.collect()
    assert kernels.select("pid", "device_id", "correlation_id").rows() == [(1, 0, 120), (2, 0, 120)]
    training = nsan.summary(real("h100_2proc_2gpu_nvtx_2026.2.1"))
    assert [process["pid"] for process in training["processes"]] == [111, 112]


def test_case_20_a_device_is_its_cuda_ordinal_not_the_row_of_the_gpu_table(summary_of):
    gpus = [{"id": i, "cuDevice": 3 - i, "name": f"NVIDIA {i}", "vmId": 0} for i in range(4)]
    export = x.Export().add(x.GPU, *gpus).add(x.KERNEL, x.kernel(0, 10, device=3))
    names = {d["device_id"]: d["name"] for d in summary_of(export)["devices"]}
    assert names == {0: "NVIDIA 3", 1: "NVIDIA 2", 2: "NVIDIA 1", 3: "NVIDIA 0"}


def test_case_20_an_adapter_of_another_maker_is_not_device_0(summary_of):
    gpus = [
        {"id": 0, "cuDevice": 0, "name": "Intel UHD", "vmId": 0},
        {"id": 1, "cuDevice": 0, "name": "NVIDIA RTX", "vmId": 0},
    ]
    export = x.Export().add(x.GPU, *gpus).add(x.KERNEL, x.kernel(0, 10))
    assert [d["name"] for d in summary_of(export)["devices"]] == ["NVIDIA RTX"]


def test_case_20_an_absent_device_is_answered_with_those_present(tmp_path, capsys):
    path = um_export().write(tmp_path / "a.sqlite")
    assert main(["summary", str(path), "--gpu", "7"]) == 2
    assert "no GPU 7. It has: 0." in capsys.readouterr().err


def test_case_21_event_times_are_taken_as_they_are(summary_of):
    export = um_export()
    details = {
        "startTime": 6_324_391_262_083,
        "stopTime": 6_325_000_000_000,
        "duration": 608_737_917,
    }
    export.add("ANALYSIS_DETAILS", details)
    export.rows[x.KERNEL] = [x.kernel(575_249_585, 575_249_685)]
    export.rows[x.MEMCPY] = [x.migration(575_249_595, 575_249_605, 4096)]
    summary = summary_of(export)
    assert (summary["first_ns"], summary["duration_ns"]) == (575_249_585, 100)


def test_case_22_rows_of_no_or_negative_length_are_kept(summary_of):
    rows = [x.migration(50, 50, 4096), x.migration(61, 60, 8192), x.migration(-20, -10, 4096)]
    summary = summary_of(x.Export().add(x.MEMCPY, *rows))
    assert (summary["migrations"]["n"], summary["migrations"]["bytes"]) == (3, 16384)
    assert summary["migrations"]["busy_ns"] == 10
    assert (summary["first_ns"], summary["duration_ns"]) == (-20, 81)
    durations = next(check for check in summary["health"] if check["id"] == "durations")
    assert durations["text"].startswith("1 rows end before they start")


def test_case_22_a_copy_of_no_length_has_no_rate(summary_of):
    summary = summary_of(x.Export().add(x.MEMCPY, x.migration(50, 50, 4096)))
    group = summary["migrations"]["groups"][0]
    assert (group["bytes"], group["busy_ns"], group["bytes_per_s"]) == (4096, 0, None)


def test_case_23_wall_time_is_a_union(summary_of):
    export = x.Export().add(x.GPU_FAULTS, x.gpu_fault(0, 100), x.gpu_fault(50, 150))
    summary = summary_of(export.add(x.MEMCPY, x.migration(20, 120, 4096)))
    assert summary["gpu_faults"]["busy_ns"] == 150
    assert summary["migrations"]["busy_ns"] == 100


def test_case_24_a_slow_rate_is_not_cut_to_zero(summary_of):
    slow = summary_of(x.Export().add(x.MEMCPY, x.migration(0, 405_544, 4096)))
    rate = slow["migrations"]["groups"][0]["bytes_per_s"]
    assert rate == pytest.approx(4096 / 0.000405544)


def test_case_25_fifty_thousand_ranges_and_rows_leave_no_index_in_the_input(tmp_path):
    export = x.Export().add(x.MEMCPY, *(x.migration(2 * i, 2 * i + 1, 4096) for i in range(50_000)))
    export.add(x.NVTX, *(x.nvtx(2 * i, 2 * i + 1, f"step {i % 100}") for i in range(50_000)))
    path = export.write(tmp_path / "a.sqlite")
    before = path.read_bytes()
    step = nsan.summary(nsan.open_trace(path).filter(nvtx="step 7"))
    assert (step["migrations"]["n"], step["migrations"]["bytes"]) == (500, 500 * 4096)
    assert path.read_bytes() == before
