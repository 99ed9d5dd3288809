"""What needs more memory than may be used is not begun, and says what would help; nothing is shown as if it were whole."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from dataclasses import replace

import polars as pl
import pytest
import reports
from recipe_framework import run as run_recipe

import nsan
from benchmarks.generate import write_huge
from nsan import memory_budget
from nsan.advising import advise
from nsan.analysing import run_analysis
from nsan.analysis.apart import lots
from nsan.analysis.catalog import analysis, catalog, find
from nsan.analysis.costs import COSTS, Cost, check_cost, rows_held, rows_read, takes_places_apart
from nsan.analysis.keeping import Keeping, handed, once
from nsan.analysis.result import Result, derived
from nsan.cli import main
from nsan.errors import OverBudgetError, UsageError
from nsan.fleet.workers import _environment
from nsan.report.blocks import Table, Text
from nsan.report.contents import SECTIONS
from nsan.report.report import Report
from nsan.units import MIB

GIB = 1 << 30
SAMPLE = reports.path_of("oversubscribed_sweep")
PCA = reports.path_of("pca_on")


@pytest.fixture
def nothing_is_little(monkeypatch):
    """Few rows are refused as many would be."""
    monkeypatch.setattr(memory_budget, "_LEAST_BYTES", 0)


@pytest.fixture
def tight(monkeypatch):
    """Nothing that holds rows fits, few as they may be."""
    monkeypatch.setattr(memory_budget, "_LEAST_BYTES", 0)
    monkeypatch.setenv("NSAN_MEMORY", "64MiB")


# How much there is ----------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of 16 GiB free memory; files of control groups are a test's own."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 33554432 kB\nMemAvailable: {16 * GIB >> 10} kB\n")
    monkeypatch.setattr(memory_budget, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory_budget, "_GROUP", tmp_path / "group")
    monkeypatch.setattr(memory_budget, "_GROUPS", tmp_path / "groups")
    monkeypatch.delenv("NSAN_MEMORY", raising=False)

    def write(line, files):
        (tmp_path / "group").write_text(line)
        for name, text in files.items():
            file = tmp_path / "groups" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    return write


def test_half_of_what_is_free_may_be_used(machine):
    machine("", {})
    assert memory_budget.budget() == 8 * GIB


def test_a_control_group_above_that_of_the_process_limits_it_too(machine):
    machine(
        "0::/batch/job\n",
        {
            "batch/job/memory.max": "max\n",
            "batch/memory.max": f"{4 * GIB}\n",
            "batch/memory.current": f"{3 * GIB}\n",
            # A GiB of it is pages of files that nobody waits for.
            "batch/memory.stat": f"anon 1\ninactive_file {GIB}\n",
        },
    )
    assert memory_budget.available() == 2 * GIB


def test_control_groups_of_the_first_version_are_read_as_well(machine):
    machine(
        "7:cpu:/job\n4:memory:/job\n",
        {
            "memory/job/memory.limit_in_bytes": f"{2 * GIB}\n",
            "memory/job/memory.usage_in_bytes": f"{GIB}\n",
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert memory_budget.available() == GIB


def test_where_nothing_is_known_nothing_is_refused(machine, tmp_path, monkeypatch):
    machine("", {})
    monkeypatch.setattr(memory_budget, "_MEMINFO", tmp_path / "absent")
    assert memory_budget.available() >= 1 << 62
    memory_budget.check("x", 1 << 40, 1 << 10)


def test_what_is_said_counts_and_what_is_no_size_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("NSAN_MEMORY", "1.5GiB")
    assert memory_budget.budget() == 3 * GIB // 2
    monkeypatch.setenv("NSAN_MEMORY", "much")
    with pytest.raises(UsageError, match=r"NSAN_MEMORY.*'much' is not a size"):
        memory_budget.budget()


def test_one_of_many_that_are_asked_in_turn_may_have_half(monkeypatch):
    monkeypatch.setenv("NSAN_MEMORY", "2448MiB")  # 2 GiB, and 400 MiB of the process itself
    memory_budget.check("x", 1 << 20, 1_100)
    with pytest.raises(OverBudgetError, match=r"1\.00 GiB may be used"):
        memory_budget.check("x", 1 << 20, 1_100, of_many=True)


def test_of_what_is_free_nothing_is_taken_off_for_what_the_process_holds_already(machine):
    machine("0::/job\n", {"job/memory.max": f"{700 * MIB}\n", "job/memory.current": "0\n"})
    memory_budget.check("x", 350, MIB)
    with pytest.raises(
        OverBudgetError, match=r"351\.00 MiB of memory, and 350\.00 MiB may be used"
    ):
        memory_budget.check("x", 351, MIB)


def test_of_what_is_said_the_process_itself_takes_its_part_once(monkeypatch):
    monkeypatch.setenv("NSAN_MEMORY", "700MiB")
    memory_budget.check("x", 300, MIB)
    memory_budget.check("x", 150, MIB, of_many=True)
    with pytest.raises(
        OverBudgetError, match=r"301\.00 MiB of memory, and 300\.00 MiB may be used"
    ):
        memory_budget.check("x", 301, MIB)


@pytest.mark.parametrize("of_many", [False, True])
def test_the_size_that_a_refusal_names_is_enough(monkeypatch, of_many):
    monkeypatch.setenv("NSAN_MEMORY", "500MiB")
    with pytest.raises(OverBudgetError) as caught:
        memory_budget.check("x", 1_000_003, 997, of_many=of_many)
    (size,) = re.findall(r"set NSAN_MEMORY=(\w+)", str(caught.value))
    monkeypatch.setenv("NSAN_MEMORY", size)
    memory_budget.check("x", 1_000_003, 997, of_many=of_many)


@pytest.mark.parametrize("of_many", [False, True])
def test_what_takes_less_than_64_mib_is_never_refused(monkeypatch, of_many):
    monkeypatch.setenv("NSAN_MEMORY", "1MiB")
    memory_budget.check("x", 64, MIB, of_many=of_many)
    with pytest.raises(OverBudgetError, match=r"and 64\.00 MiB may be used"):
        memory_budget.check("x", 65, MIB, of_many=of_many)


def test_a_small_capture_is_read_whole_in_700_mib(monkeypatch):
    monkeypatch.setenv("NSAN_MEMORY", "700MiB")
    keeping, counts = Keeping(), nsan.open_trace(SAMPLE).capture_totals["counts"]
    for each in catalog().values():
        if each.subject != "snapshot":
            check_cost(each, rows_read(each, counts))
    del keeping
    found = advise(SAMPLE)
    assert found.advice, "it evicts: something is to do"
    assert not [each for each in found.silent if "was not run" in each.reason]


def test_workers_share_what_was_said(monkeypatch):
    monkeypatch.setenv("NSAN_MEMORY", "2GB")
    assert _environment(4)["NSAN_MEMORY"] == str(GIB // 2)
    monkeypatch.setenv("POLARS_MAX_THREADS", "3")
    assert _environment(4)["POLARS_MAX_THREADS"] == "3"


def test_workers_share_what_may_be_used_and_have_a_gib_at_least_where_nothing_was_said(machine):
    machine("", {})
    assert _environment(2)["NSAN_MEMORY"] == str(4 * GIB)
    assert _environment(16)["NSAN_MEMORY"] == str(GIB)


def test_an_allowance_ends_with_its_block(monkeypatch):
    monkeypatch.setenv("NSAN_MEMORY", "1GiB")
    with memory_budget.memory_allowed("2GiB"):
        assert memory_budget.budget() == 2 * GIB
    assert memory_budget.budget() == GIB
    with memory_budget.memory_allowed(None):
        assert memory_budget.budget() == GIB


# What it costs --------------------------------------------------------------------------------------


def test_every_analysis_of_a_trace_says_what_it_takes():
    assert set(COSTS) == {name for name, each in catalog().items() if each.subject != "snapshot"}


def test_rows_are_counted_of_what_is_read_and_of_the_largest_place_where_places_are_apart():
    trace = nsan.open_trace(SAMPLE)
    counts = trace.capture_totals["counts"]
    tables = {name: getattr(trace, name) for name in find("batches").reads}
    assert rows_held(find("batches"), tables) == counts["gpu_faults"] + counts["migrations"]
    doubled = {
        name: pl.concat(
            [
                each,
                each.with_columns(device_id=pl.lit(9, pl.Int64)),
            ]
        )
        for name, each in tables.items()
    }
    clusters = find("fault_clusters")
    held = counts["gpu_faults"] + counts["migrations"]
    assert rows_held(clusters, {**doubled, "kernels": trace.kernels}) == held
    assert len(list(lots(doubled["gpu_faults"], doubled["migrations"]))) == 1, (
        "few rows stay together"
    )


# What is refused ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("tight")
def test_an_analysis_that_does_not_fit_says_rows_need_and_ways_out():
    trace = nsan.open_trace(SAMPLE)
    counts = trace.capture_totals["counts"]
    rows = counts["gpu_faults"] + counts["migrations"]
    with pytest.raises(OverBudgetError) as caught:
        run_analysis(trace, find("batches"))
    said = str(caught.value)
    assert f"batches was not run: for {rows:,} rows".replace(",", " ") in said
    assert "0 B may be used" in said
    assert "Allow more: set NSAN_MEMORY=" in said, "first what works everywhere"
    assert all(way in said for way in ("--filter-time", "--filter-nvtx", "--memory"))
    assert caught.value.exit_code == 1


@pytest.mark.usefixtures("tight")
def test_a_part_is_not_offered_where_only_the_whole_capture_tells():
    trace = nsan.open_trace(SAMPLE)
    with pytest.raises(OverBudgetError, match="Allow more: set NSAN_MEMORY=") as caught:
        run_analysis(trace, find("refaults"))
    assert "part" not in str(caught.value)
    assert "--filter" not in str(caught.value)


@pytest.mark.usefixtures("tight")
def test_of_a_part_an_analysis_that_needs_the_whole_says_that_first():
    part = nsan.open_trace(SAMPLE).filter(time="0/1s")
    with pytest.raises(UsageError, match="refaults needs the whole capture"):
        run_analysis(part, find("refaults"))


@pytest.mark.usefixtures("nothing_is_little")
def test_tables_that_are_no_events_do_not_count_against_a_whole_capture(monkeypatch):
    trace = nsan.open_trace(SAMPLE)
    counts = dict(trace.capture_totals["counts"])
    analysis = find("faults_by_nvtx")
    tables = {name: getattr(trace, name) for name in analysis.reads}
    assert "nvtx_ranges" in analysis.reads
    many = {**trace.capture_totals, "counts": {**counts, "nvtx_ranges": 10**12}}
    held = rows_held(analysis, tables)
    size = memory_budget._BASE_BYTES + held * COSTS["faults_by_nvtx"].bytes_per_row
    monkeypatch.setenv("NSAN_MEMORY", str(size))
    run_analysis(replace(trace, capture_totals=many), analysis)
    monkeypatch.setenv("NSAN_MEMORY", str(size - 1))
    with pytest.raises(OverBudgetError):
        run_analysis(replace(trace, capture_totals=many), analysis)


def test_what_is_counted_at_once_is_what_is_counted_row_by_row():
    trace = nsan.open_trace(SAMPLE)
    counts = trace.capture_totals["counts"]
    for name, each in catalog().items():
        if each.subject == "trace" and not takes_places_apart(each):
            tables = {table: getattr(trace, table) for table in each.reads}
            assert rows_read(each, counts) == rows_held(each, tables), name


@pytest.mark.usefixtures("tight")
def test_what_goes_through_any_number_of_rows_is_never_refused():
    trace = nsan.open_trace(SAMPLE)
    assert run_analysis(trace, find("fault_row_checks")).collect().height == 1


@pytest.mark.usefixtures("nothing_is_little")
def test_a_part_that_fits_is_run(monkeypatch):
    trace = nsan.open_trace(SAMPLE)
    # Room for a tenth of the rows.
    held = rows_held(
        find("batches"), {name: getattr(trace, name) for name in find("batches").reads}
    )
    size = memory_budget._BASE_BYTES + held * COSTS["batches"].bytes_per_row // 10
    monkeypatch.setenv("NSAN_MEMORY", str(size))
    with pytest.raises(OverBudgetError):
        run_analysis(trace, find("batches"))
    first = trace.migrations.select(pl.col("start_ns").min()).collect().item()
    span = trace.migrations.select(pl.col("start_ns").max()).collect().item() - first
    part = trace.filter(time=(first, first + span // 40))
    assert run_analysis(part, find("batches")).collect().height


@pytest.mark.usefixtures("tight")
def test_an_analysis_of_the_users_own_is_run():
    only = Result("own", "a row", (derived("n", pl.Int64, "rows", "Rows."),))

    @analysis(question="How many?", result=only, reads={"migrations": ("bytes",)})
    def own(migrations):
        return migrations.select(n=pl.len().cast(pl.Int64))

    found = run_analysis(nsan.open_trace(SAMPLE), own.__nsan_analysis__).collect()
    assert found["n"].item() > 0


@pytest.mark.usefixtures("tight")
def test_an_import_with_too_little_memory_says_that_lost_rows_were_not_looked_for():
    document = nsan.summary(nsan.open_trace(SAMPLE))
    (check,) = (check for check in document["health"] if check["id"] == "lost_rows")
    assert check["status"] == "unknown"
    assert "rows take more memory" in check["text"]
    assert "import again" in check["text"]
    assert document["migrations"]["n"] > 0, "what fits is there"


@pytest.mark.usefixtures("nothing_is_little")
def test_totals_do_not_depend_on_the_memory(monkeypatch, tmp_path):
    plenty = nsan.summary(nsan.open_trace(SAMPLE))
    monkeypatch.setenv("NSAN_MEMORY", "64MiB")
    monkeypatch.setenv("NSAN_CACHE_DIR", str(tmp_path / "another cache"))
    again = nsan.summary(nsan.open_trace(SAMPLE))
    for document in (plenty, again):
        document["health"] = [each for each in document["health"] if each["id"] != "lost_rows"]
    assert again == plenty


@pytest.mark.usefixtures("nothing_is_little")
def test_a_command_that_does_not_fit_ends_with_one_line_and_status_1(capsys):
    assert main(["faults", "-q", str(SAMPLE), "--by", "batch", "--memory", "64MiB"]) == 1
    out, err = capsys.readouterr()
    assert not out
    assert len(err.splitlines()) == 1
    assert "batches was not run" in err
    assert main(["faults", "-q", str(SAMPLE), "--by", "batch", "--json"]) == 0, (
        "it lasts one command"
    )
    assert json.loads(capsys.readouterr().out)["rows"]


@pytest.mark.usefixtures("tight")
def test_an_explorer_and_a_time_map_that_do_not_fit_say_so_and_nothing_is_begun(tmp_path, caplog):
    # 288 + 240 fault rows, 8441 copies, 4 kernels and 4 ranges, as sqlite3 counts them; the map has no CPU faults.
    with pytest.raises(OverBudgetError, match=r"The explorer was not run: for 8.977 rows"):
        nsan.explore(SAMPLE)
    with pytest.raises(SystemExit):
        run_recipe("uvm_time_map", [SAMPLE], tmp_path / "out")
    assert re.search(r"uvm_time_map was not run: for 8.729 rows", caplog.text)
    assert not (tmp_path / "out").exists()


def test_a_size_that_is_none_is_refused_before_anything_is_read(capsys):
    assert main(["summary", "absent.sqlite", "--memory", "much"]) == 2
    assert "'much' is not a size" in capsys.readouterr().err


@pytest.mark.usefixtures("tight")
def test_the_verdict_says_what_the_totals_say_where_no_analysis_fits():
    verdict, left_out = Report(SAMPLE).section("verdict")
    said = {point.label: point.text for point in verdict.points}
    with closing(sqlite3.connect(SAMPLE)) as export:
        (evicted,) = export.execute(
            "SELECT sum(bytes) FROM CUPTI_ACTIVITY_KIND_MEMCPY WHERE copyKind = 12 AND migrationCause = 4"
        ).fetchone()
    assert list(said) == ["What moved:", "What it cost:", "Why:", "How far to trust it:"]
    assert f"GPU memory was full: {evicted / 2**20:.2f} MiB were evicted." in said["Why:"]
    assert "was not run" in left_out.text


@pytest.mark.usefixtures("tight")
def test_a_section_that_does_not_fit_is_one_line_and_the_others_stand():
    report = Report(SAMPLE)
    (left_out,) = report.section("batches")
    assert isinstance(left_out, Text)
    assert left_out.text.startswith("Left out of this report: ")
    assert "was not run: for" in left_out.text
    assert "batches" not in report.used
    assert len(report.section("recorded")) >= 1
    said = " ".join(reports.texts(report.section("verdict")))
    assert "was not run" in said, "a verdict on half of the figures would be wrong"


def test_what_the_cache_saved_is_left_out_for_its_memory_and_for_no_other_reason(monkeypatch):
    monkeypatch.setitem(COSTS, "pca_effect", Cost(1 << 40))
    snapshot = PCA.parent / "snapshot.pickle"
    blocks = Report(PCA, snapshot=snapshot).section("allocator")
    said = reports.texts(blocks)
    (left_out,) = (text for text in said if "was not run" in text)
    assert left_out.startswith("Left out of this report: pca_effect was not run: for")
    assert "--filter" not in left_out
    assert not any("only the whole capture" in text for text in said)
    assert "What the driver moved of it" in [getattr(each, "text", "") for each in blocks]


@pytest.mark.usefixtures("tight")
def test_a_rule_that_does_not_fit_is_silent_and_does_not_know():
    found = advise(SAMPLE)
    reasons = [each for each in found.silent if "was not run" in each.reason]
    assert reasons
    assert not any(each.is_known for each in reasons)


def test_what_is_kept_for_others_takes_a_part_of_the_memory(monkeypatch):
    keeping, table = Keeping(), pl.LazyFrame({"a": [1]})
    given = handed(table, ["a"])
    calls = []

    def build():
        calls.append(1)
        return pl.DataFrame({"a": range(100_000)})

    for _ in range(2):
        once("large", build, given)
    assert len(calls) == 1, "it is kept where there is room"
    monkeypatch.setenv("NSAN_MEMORY", "1MiB")
    once("small", lambda: 1, given)
    once("large", build, given)
    assert len(calls) == 2, "it was let go"
    del keeping


def test_services_that_all_take_the_same_time_leave_no_variance_to_explain(tmp_path):
    path = write_huge(tmp_path / "even.sqlite", 8_000)
    report = Report(path)
    assert report.frame("service_fit")["estimate_ns"].drop_nulls().len() > 0
    assert report.frame("service_fit")["r2"].null_count() == report.frame("service_fit").height
    titles = [each.title for each in report.section("batches") if isinstance(each, Table)]
    assert any("a fit, with its 95 % interval" in title for title in titles)


def test_a_report_of_several_gpus_that_evict_has_every_section(tmp_path):
    report = Report(write_huge(tmp_path / "four.sqlite", 8_000))
    for name in SECTIONS:
        assert report.section(name), name
    rows = reports.tables(report.section("memory"))["Evictions by GPU"]
    assert len(rows) == 4
