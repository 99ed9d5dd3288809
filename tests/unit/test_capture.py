from __future__ import annotations

import exports as x
import pytest

OPTION = "COLLECT_UVM_GPU_PAGE_FAULTS"
SWITCH = "--cuda-um-gpu-page-faults=true"
OLD = "2022.4.2"
"""A version before capture options were exported."""


def answer(trace, kind="gpu_faults"):
    return trace.info.capture[kind].answer


def capture_rows(*pairs):
    return [{"name": name, "value": value} for name, value in pairs]


@pytest.mark.parametrize(
    ("option", "want"),
    [("true", "recorded"), ("false", "not_recorded"), (None, "unknown"), ("1", "recorded")],
)
def test_without_a_table_the_option_decides(summary_of, option, want):
    got = summary_of(x.Export(options={OPTION: option}))
    assert got["capture"]["gpu_faults"] == want
    figures = got["gpu_faults"]
    if want == "recorded":
        assert (figures["n_rows"], figures["n_page_faults"]) == (0, 0)
        assert figures["groups"] == []
    else:
        assert set(figures.values()) == {None}  # never a bare 0
        assert got["switches"]["gpu_faults"] == SWITCH


@pytest.mark.parametrize("option", ["true", "false", None])
def test_rows_win_over_what_the_option_says(summary_of, option):
    got = summary_of(x.Export(options={OPTION: option}).add(x.GPU_FAULTS, x.gpu_fault(0, 1)))
    assert got["capture"]["gpu_faults"] == "recorded"
    assert got["gpu_faults"]["n_rows"] == 1


@pytest.mark.parametrize(
    ("option", "want"), [("true", "recorded"), ("false", "not_recorded"), (None, "unknown")]
)
def test_an_empty_table_does_not_say_that_events_were_recorded(trace_of, option, want):
    # `--lazy=false` makes every table, recorded or not
    export = x.Export(lazy=False, options={OPTION: option}).add(x.GPU_FAULTS)
    assert answer(trace_of(export)) == want


def test_an_old_export_with_all_tables_and_no_options_is_unknown(summary_of):
    export = x.Export("2022.2.1", lazy=False).add(x.GPU_FAULTS).add(x.CPU_FAULTS)
    assert "META_DATA_CAPTURE" not in export.tables
    got = summary_of(export)
    assert got["capture"]["gpu_faults"] == got["capture"]["cpu_faults"] == "unknown"
    assert got["gpu_faults"]["n_rows"] is None
    assert got["cpu_faults"]["n"] is None


def test_an_old_export_with_rows_is_recorded(trace_of):
    got = trace_of(x.Export(OLD).add(x.CPU_FAULTS, x.cpu_fault(0)))
    assert answer(got, "cpu_faults") == "recorded"
    assert answer(got, "gpu_faults") == "unknown"


@pytest.mark.parametrize(
    ("rows", "want"),
    [
        (capture_rows((OPTION, "true")), "recorded"),  # of the whole session
        (capture_rows((OPTION, "false")), "not_recorded"),
        (capture_rows((f"PROCESS_0:{OPTION}", "true")), "recorded"),
        (capture_rows((f"PROCESS_17:{OPTION}", "false")), "not_recorded"),
        (
            capture_rows((f"PROCESS_0:{OPTION}", "false"), (f"PROCESS_1:{OPTION}", "true")),
            "recorded",
        ),
        (capture_rows((OPTION, "false"), (f"PROCESS_0:{OPTION}", "true")), "recorded"),
        (capture_rows((OPTION, "true"), (f"PROCESS_0:{OPTION}", "false")), "recorded"),
        (capture_rows((f"X{OPTION}", "true")), "unknown"),
        (capture_rows((OPTION, "perhaps")), "unknown"),
        (capture_rows((OPTION, None)), "unknown"),
        (capture_rows((OPTION, " TRUE ")), "recorded"),
    ],
)
def test_an_option_counts_in_any_scope(trace_of, rows, want):
    assert answer(trace_of(x.Export().add("META_DATA_CAPTURE", *rows))) == want


@pytest.mark.parametrize(
    ("table", "row"),
    [
        (x.MEMCPY, x.copy(0, 1, 4096)),
        (x.KERNEL, x.kernel(0, 1)),
        (x.RUNTIME, x.api_call(0, 1)),
        (x.MEMSET, x.copy(0, 1, 4096)),
    ],
)
@pytest.mark.parametrize("option", ["false", None])
def test_any_cuda_row_shows_that_migrations_were_traced(trace_of, table, row, option):
    got = trace_of(x.Export(options={"COLLECT_CUDA_TRACE": option}).add(table, row))
    assert answer(got, "migrations") == "recorded"
    assert answer(got, "kernels") == "recorded"


@pytest.mark.parametrize(
    ("option", "want"), [("true", "recorded"), ("false", "not_recorded"), (None, "unknown")]
)
def test_without_a_cuda_row_the_trace_option_decides(summary_of, option, want):
    got = summary_of(x.Export(options={"COLLECT_CUDA_TRACE": option}))
    assert got["capture"]["migrations"] == got["capture"]["kernels"] == want
    assert got["migrations"]["n"] == (0 if want == "recorded" else None)
    assert got["kernels"]["n"] == (0 if want == "recorded" else None)


def test_a_cuda_row_says_nothing_about_page_faults(trace_of):
    options = {OPTION: None, "COLLECT_UVM_CPU_PAGE_FAULTS": "false"}
    got = trace_of(x.Export(options=options).add(x.KERNEL, x.kernel(0, 1)))
    assert answer(got, "gpu_faults") == "unknown"
    assert answer(got, "cpu_faults") == "not_recorded"


@pytest.mark.parametrize(
    ("kind", "option", "switch"),
    [
        ("gpu_faults", OPTION, SWITCH),
        ("cpu_faults", "COLLECT_UVM_CPU_PAGE_FAULTS", "--cuda-um-cpu-page-faults=true"),
        ("migrations", "COLLECT_CUDA_TRACE", "--trace=cuda"),
        ("allocations", "COLLECT_GPU_MEMORY_USAGE", "--cuda-memory-usage=true"),
        ("nvtx", "COLLECT_NVTX_TRACE", "--trace=cuda,nvtx"),
        ("kernels", "COLLECT_CUDA_TRACE", "--trace=cuda"),
    ],
)
def test_each_kind_of_event_has_its_option_and_names_its_switch(trace_of, kind, option, switch):
    capture = trace_of(x.Export(options={option: "false"})).info.capture[kind]
    assert (capture.answer, capture.switch) == ("not_recorded", switch)
    assert capture.reason


def test_an_export_of_chosen_tables_does_not_show_what_it_left_out(trace_of):
    facts = {
        "EXPORT_PRODUCT_VERSION": "2023.4.4.54",
        "EXPORT_PARAM_LAZY": "true",
        "EXPORT_PARAM_TABLES_TO_EXPORT": "CUPTI_ACTIVITY_KIND_MEMCPY",
    }
    export = x.Export().add("META_DATA_EXPORT", *capture_rows(*facts.items()))
    assert answer(trace_of(export)) == "unknown"


def test_migrations_without_the_column_that_tells_them_are_unknown(summary_of):
    export = x.Export().add(x.MEMCPY, x.migration(0, 10, 4096))
    columns = export.tables[x.MEMCPY].split(", ")
    kept = ", ".join(column for column in columns if not column.startswith("copyKind "))
    export.tables = export.tables | {x.MEMCPY: kept}
    got = summary_of(export)
    assert got["capture"]["migrations"] == "unknown"
    assert got["migrations"]["n"] is None
