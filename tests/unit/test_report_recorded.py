"""What a report says first: of what it is, what was recorded and how to record the rest."""

from __future__ import annotations

import exports as x
import pytest
import reports

from nsan.report.report import Report

EVERYTHING = (
    "`nsys profile --trace=cuda,nvtx --cuda-um-gpu-page-faults=true --cuda-um-cpu-page-faults=true "
    "--cuda-memory-usage=true -o report ./program`"
)


def rows(blocks):
    (table,) = reports.tables(blocks).values()
    return {row["Events"]: row for row in table}


def test_the_head_names_the_trace_and_what_recorded_it():
    found = reports.points(reports.opened("real").head())
    assert found["Trace:"].text == (
        "`um_vector_add_rtx4060l.sqlite`, recorded by nsys 2023.4.4.54, driver 550.163.01"
    )
    assert found["GPU:"].text == "`NVIDIA GeForce RTX 4060 Laptop GPU`, 7.75 GiB"
    assert found["Process:"].text == "12082 (`add_with_n_Threads`)"
    assert found["Time:"].kind == "derived"


def test_a_modelled_trace_says_so_loudly_and_a_recorded_one_does_not():
    (modelled,) = reports.texts(reports.opened("two_gpus").head())
    assert "not recorded: every figure is the model's" in modelled
    assert reports.texts(reports.opened("real").head()) == []


def test_gpus_that_are_alike_are_named_once():
    found = reports.points(reports.opened("two_gpus").head())
    assert found["GPU:"].text == "2 x `NVIDIA A100-SXM4-40GB`, 40.00 GiB each"


def test_gpus_that_the_capture_does_not_describe_are_counted(built):
    one, two = x.Export(), x.Export()
    for export, n in ((one, 1), (two, 2)):
        export.add(x.MEMCPY, *(x.migration(1, 2, 4096, device=gpu) for gpu in range(n)))
    said = [reports.points(Report(built(each)).head())["GPU:"].text for each in (one, two)]
    assert said == ["not described in the capture", "2 GPUs, not described in the capture"]


def test_a_part_without_a_row_is_not_said_to_have_rows():
    part = Report(reports.REAL, filters={"time": "266ms/268ms"})
    found = rows(part.section("recorded"))["Kernels"]
    assert (found["Recorded"], found["Rows"]) == ("yes: none in this part", "0")
    assert "0 kernels started in this part, and " in reports.points(part.head())["Time:"].text


def test_filters_are_told_in_the_head():
    part = Report(reports.path_of("two_gpus"), filters={"time": "1ms/2ms", "device": [1]})
    assert reports.texts(part.head())[-1] == (
        "Only a part of the capture: rows that start in `1ms/2ms`, of GPU 1."
    )


def test_rows_are_those_of_the_export_and_a_switch_that_was_off_is_no_zero():
    found = rows(reports.section("real", "recorded"))
    ((n,),) = x.ask(reports.REAL, f"SELECT count(*) FROM {x.MEMCPY} WHERE copyKind IN (11, 12, 13)")
    assert (found["Migrations"]["Recorded"], found["Migrations"]["Rows"]) == ("yes", str(n))
    faults = found["GPU page faults"]
    assert (faults["Recorded"], faults["Rows"]) == ("no: the switch was off", "-")
    assert faults["To record them"] == "--cuda-um-gpu-page-faults=true"


def test_what_was_traced_and_had_no_row_is_a_zero_with_its_reason():
    found = rows(reports.section("user_prefetch", "recorded"))
    faults = found["GPU page faults"]
    assert (faults["Recorded"], faults["Rows"]) == ("yes: traced, and there was none", "0")


def test_nothing_is_asked_for_where_all_was_recorded():
    blocks = reports.section("pca_on", "recorded")
    assert reports.texts(blocks) == []
    assert "To record them" not in rows(blocks)["Migrations"]


def test_the_commands_that_record_everything_are_given_once():
    (how,) = reports.texts(reports.section("real", "recorded"))
    assert how.count(EVERYTHING) == 1
    assert how.count("`nsan record -o run -- ./program`") == 1


def test_switches_of_nsys_are_not_asked_of_nvprof():
    blocks = reports.section("hotspot_1024", "recorded")
    assert "To record them" not in rows(blocks)["NVTX ranges"]
    assert "on a GPU that Nsight Systems supports" in reports.texts(blocks)[0]


def test_a_platform_that_cannot_trace_is_not_told_to_try_again(real):
    blocks = Report(real("rtx4060ti_2026.1.1")).section("recorded")
    assert rows(blocks)["Migrations"]["To record them"] == ""
    assert "To record everything, on a platform where nsys can:" in reports.texts(blocks)[1]


@pytest.mark.parametrize("name", ["nocuda_easycuda_2023.4.4", "reduced_6tables_2026.1.1"])
def test_a_capture_without_unified_memory_says_so_and_how_to_record_it(real, name):
    said = reports.texts(Report(real(name)).section("recorded"))
    assert said[0].startswith("Nothing of Unified Memory is in this capture")
    assert EVERYTHING in said[1]


def test_checks_that_are_not_in_order_are_shown_and_the_others_counted(real):
    found = Report(real("nocuda_easycuda_2023.4.4")).section("recorded")
    said = reports.points(found)
    assert said["Beware:"].text.startswith("No GPU activity was recorded")
    assert said["In order:"].text == "2 of 3 checks"


def test_missing_rows_are_told(built):
    # A copy without an address is told among the checks.
    export = x.Export().add(x.MEMCPY, x.migration(1, 2, 4096, None))
    said = reports.points(Report(built(export)).section("recorded"))
    assert "have no address" in said["Beware:"].text


def test_names_of_processes_and_gpus_are_harmless(built):
    export = x.Export().add(x.MEMCPY, x.migration(1, 2, 4096))
    name = "a`b<script>\x1b[31m"
    export.add("PROCESSES", {"globalPid": x.global_pid(x.PID), "pid": x.PID, "name": name})
    text = str(Report(built(export)).head())
    assert "\x1b" not in text
    assert "a'b<script>" in text
