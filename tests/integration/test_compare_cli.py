"""`nsan compare` from end to end: on samples, on repetitions built by hand, on what is not comparable."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import sqlite3
from contextlib import closing

import exports as x
import polars as pl
import pytest

import nsan
from nsan.analysis.compare.tables import MOVERS
from nsan.cli import main
from nsan.cli.compare_report import _title
from nsan.comparing.comparability import NotComparableError
from nsan.comparing.figures import FIGURES
from nsan.comparing.measuring import Asking, measure_run
from nsan.comparing.profile import memory_of, profile_of, steps_of
from nsan.comparing.text import text_of
from nsan.contract_compare import COMPARE_KEYS
from nsan.contract_keys import keys_in
from nsan.errors import UsageError

SAMPLES = x.REPOSITORY / "sample_data"
ADD = SAMPLES / "um_vector_add_rtx4060l.sqlite"
SMALL, LARGE = (SAMPLES / f"nvprof_hotspot_v100_{n}.log.gz" for n in (1024, 8192))
PLAIN, AHEAD = (SAMPLES / "model" / name for name in ("stream", "user_prefetch"))
PCA_OFF, PCA_ON = (SAMPLES / "model" / name for name in ("pca_off", "pca_on"))
LIMITS = {
    3: {
        "migrations.bytes>+15MiB": "failed",
        "migrations.bytes>=32MiB": "failed",
        "migrations.bytes>32MiB": "passed",
        "migrations.bytes<-10%": "passed",
        "kernels.busy_ns>+0.01%": "passed",
    },
    1: {"kernel.fault_rows@add>+50%": "failed", "range.time_ns>+5%": "undecided"},
}
"""By runs of a side: limits, and what becomes of them between `before` and `after`."""

EVIL = "\x1b[31m<img src=x onerror=alert(1)>`|*"


def one_run(*, copies=8, kernel_ns=1_000_000, name="add", n_steps=0, **about):
    """A run whose migrations and times are known: ``copies`` of 2 MiB each, one kernel, a fault row for each copy."""
    made = x.Export(**about)
    made.strings |= {1: name}
    gpu = {"id": 0, "name": "NVIDIA A100", "totalMemory": 40 << 30, "smMajor": 8, "smMinor": 0}
    made.add(x.GPU, gpu)
    for i in range(copies):
        va = x.VA + i * 2 * x.MIB
        made.add(x.MEMCPY, x.migration(1_000 * i, 1_000 * i + 500, 2 * x.MIB, va))
        made.add(x.GPU_FAULTS, x.gpu_fault(1_000 * i, 1_000 * i + 600, va))
    made.add(x.KERNEL, x.kernel(0, kernel_ns))
    for i in range(n_steps):
        made.add(x.NVTX, x.nvtx(20_000 * i, 20_000 * i + 10_000, "step"))
    return made


@pytest.fixture
def folder_of(tmp_path):
    """Write repetitions into a folder of their name."""

    def write(name, runs):
        folder = tmp_path / name
        folder.mkdir()
        for number, run in enumerate(runs):
            run.write(folder / f"run{number}.sqlite")
        return folder

    return write


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("compare")


@pytest.fixture(scope="module")
def pair(shared):
    """Three runs a side: twice the migrations, times that vary by a thousandth."""
    for name, copies, at in (("before", 8, 1_000_000), ("after", 16, 1_000_500)):
        (shared / name).mkdir()
        for i in range(3):
            run = one_run(copies=copies, kernel_ns=at + 1_000 * i)
            run.write(shared / name / f"run{i}.sqlite")
    return shared / "before", shared / "after"


@pytest.fixture(scope="module")
def ones(pair):
    """One run a side: for what does not need noise."""
    return tuple(folder / "run0.sqlite" for folder in pair)


@pytest.fixture(scope="module", autouse=True)
def _measured_once(shared):
    """A trace is imported once, and measured once by all tests that ask the same of it."""
    known = {}

    def once(look):
        def looked(asked, *how):
            key = (look, asked.path.resolve(), repr(asked.filters), repr(how))
            if key not in known:
                known[key] = look(asked, *how)
            return known[key]

        return looked

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NSAN_CACHE_DIR", str(shared / "cache"))
        patch.setattr("nsan.comparing.measuring.measure_run", once(measure_run))
        for look in (profile_of, memory_of, steps_of):
            patch.setattr(f"nsan.comparing.document.{look.__name__}", once(look))
        yield


@pytest.fixture(scope="module")
def compared(pair):
    return nsan.compare(*pair, fail_on=LIMITS[3])


@pytest.fixture(scope="module")
def compared_once(ones):
    return nsan.compare(*ones)


@pytest.fixture(scope="module")
def compared_pca():
    return nsan.compare(PCA_OFF, PCA_ON, asking=Asking(scopes=("run", "kernel", "range"))).to_dict()


def said(capsys, *arguments, status=0):
    assert main(["compare", *map(str, arguments)]) == status
    return capsys.readouterr()


def document(capsys, *arguments, status=0):
    return json.loads(said(capsys, *arguments, "--json", status=status).out)


def mover(found, figure, condition="B", place=""):
    (row,) = (
        row
        for row in found["movers"]
        if (row["figure"], row["condition"], row["place"]) == (figure, condition, place)
    )
    return row


# Repetitions ----------------------------------------------------------------------------------------


def test_what_all_repetitions_do_is_a_mover_and_what_they_vary_in_is_not(compared):
    found = compared.to_dict()
    moved = {row["figure"] for row in found["movers"] if row["verdict"] in {"more", "less"}}
    expected = {"n", "bytes", "htod_bytes", "coherence_bytes", "busy_ns"}
    assert {name.partition(".")[2] for name in moved if name.startswith("migrations.")} == expected
    assert {"gpu_faults.rows", "gpu_faults.va_blocks"} <= moved
    assert not {"duration_ns", "kernels.busy_ns", "kernels.n"} & moved
    row = mover(found, "migrations.bytes")
    assert (row["base"], row["other"]) == (16 * x.MIB, 32 * x.MIB)
    assert (row["change"], row["noise"], row["n_base"], row["n_other"]) == (1.0, "runs", 3, 3)
    assert mover(found, "kernels.busy_ns")["verdict"] == "same"


def test_the_text_has_movers_first_and_the_rest_in_a_line(compared):
    text = str(compared)
    assert text.startswith("A: before, 3 runs, NVIDIA A100")
    assert re.search(
        r"migrations\.bytes +16\.00 MiB +32\.00 MiB +\+16\.00 MiB +\+100\.0 % .*more", text
    )
    assert re.search(r"^Unchanged: duration_ns,.*kernels\.n", text, re.MULTILINE)
    assert "cpu_faults.n" in re.search(r"^0 in both: (.*)$", text, re.MULTILINE)[1]
    assert text.index("migrations.bytes") < text.index("Unchanged")
    assert "Noise: from 3 and 3 runs." in text
    assert "No steps are compared." in text


def test_files_can_be_named_one_by_one(pair, compared, capsys):
    before, after = (sorted(folder.iterdir()) for folder in pair)
    options = [word for file in before for word in ("--base", file)]
    options += [word for file in after for word in ("--other", file)]
    one_by_one, folders = document(capsys, *options), compared.to_dict()
    assert one_by_one["movers"] == folders["movers"]
    assert [len(each["runs"]) for each in one_by_one["conditions"]] == [3, 3]


def test_a_third_condition_is_compared_with_the_base_too(ones):
    three = nsan.compare(*ones, ones[0])
    found, text = three.to_dict(), str(three)
    assert "B against A" in text
    assert "C against A" in text
    assert mover(found, "migrations.bytes", "B")["difference"] == 16 * x.MIB
    assert mover(found, "migrations.bytes", "C")["difference"] == 0
    assert {row["condition"] for row in found["movers"]} == {"B", "C"}


def test_python_gives_the_same_as_the_command_line(ones, compared_once, capsys):
    assert json.loads(json.dumps(compared_once.to_dict())) == document(capsys, *ones)
    assert str(compared_once) == said(capsys, *ones).out
    assert compared_once.movers.schema == MOVERS.schema
    with pytest.raises(UsageError, match="There is no scope"):
        nsan.compare(*ones, asking=Asking(scopes=("moon",)))


# Gates ----------------------------------------------------------------------------------------------


def test_a_limit_decides_how_it_ends(ones, capsys):
    for gate, status, word in (
        ("migrations.bytes>+10%", 4, "FAILED"),
        ("migrations.bytes>+100%", 0, "PASSED"),
        ("step.time_ns>+5%", 1, "UNDECIDED"),
    ):
        text = said(capsys, *ones, "--fail-on", gate, status=status).out
        assert f"\n{word} {gate}: " in text.partition("\nGates\n")[2]


def test_limits_of_every_form_are_held_against_what_was_measured(compared, ones):
    once = nsan.compare(*ones, fail_on=LIMITS[1])
    for found, limits in ((compared, LIMITS[3]), (once, LIMITS[1])):
        assert {each.gate.text: each.outcome for each in found.gates} == limits
    (noise,) = (each.text for each in compared.gates if each.gate.figure == "kernels.busy_ns")
    assert "within noise" in noise


def test_one_of_several_limits_is_enough_and_each_is_told(ones, capsys):
    gates = ("migrations.bytes>+900%", "gpu_faults.rows>+5%", "step.time_ns>+5%")
    options = [word for gate in gates for word in ("--fail-on", gate)]
    err = said(capsys, *ones, *options, "--format", "csv", status=4).err
    assert [line.split()[1] for line in err.splitlines()] == ["PASSED", "FAILED", "UNDECIDED"]


def test_a_limit_on_what_was_not_recorded_cannot_pass(capsys):
    text = said(capsys, ADD, ADD, "--fail-on", "gpu_faults.rows>+5%", status=1).out
    assert "UNDECIDED gpu_faults.rows>+5%" in text
    assert "--cuda-um-gpu-page-faults=true" in text.partition("\nGates\n")[2]


@pytest.mark.parametrize("gate", ["migrations.byte>+10%", "migrations.bytes", "duration_ns>+1GiB"])
def test_what_is_no_limit_is_said_before_anything_is_opened(gate, capsys, tmp_path):
    err = said(capsys, tmp_path / "none", tmp_path / "none", "--fail-on", gate, status=2).err
    assert "--fail-on" in err
    assert "none: no such" not in err


# One run each ---------------------------------------------------------------------------------------


def test_a_trace_compared_with_itself_has_no_mover(capsys):
    for trace in (ADD, PLAIN):
        found = document(capsys, trace, trace)
        assert {row["verdict"] for row in found["movers"]} <= {"same", "unjudged", "unknown"}
        assert {row["difference"] for row in found["movers"]} <= {0, None}
        assert found["differs"] == []
        assert [each["id"] for each in found["comparable"]] == ["same_run"]
    text = text_of(document(capsys, ADD, ADD))
    assert "Not known: gpu_faults.rows, gpu_faults.va_blocks. A" in text
    assert "--cuda-um-gpu-page-faults=true" in text


def test_an_added_prefetch_is_named_and_its_traffic_is_the_programs(capsys):
    text = said(capsys, PLAIN, AHEAD).out
    n_calls = x.ask(
        AHEAD / "user_prefetch.sqlite",
        "SELECT count(*) FROM CUPTI_ACTIVITY_KIND_RUNTIME JOIN StringIds ON id = nameId "
        "WHERE value LIKE 'cudaMemPrefetchAsync%'",
    )[0][0]
    assert f"- cudaMemPrefetchAsync: none in A, {n_calls} calls in B" in text
    assert "No figure has a verdict." in text
    assert "give several runs of each condition" in text


def test_steps_of_one_run_each_are_noise_and_it_is_said_what_they_are_worth(built, capsys):
    traces = [built(one_run(n_steps=14)) for _ in range(2)]
    found = document(capsys, *traces)
    assert {r["noise"] for r in found["movers"] if r["scope"] == "step"} == {"steps"}
    assert {run["n_steps"] for each in found["conditions"] for run in each["runs"]} == {14}
    assert "Steps of one run say how much steps differ" in text_of(found)
    # 14 steps of 10 us, and a kernel of 1 ms: their range only encloses its launch.
    assert [each["id"] for each in found["comparable"]] == ["steps"] * 2
    assert mover(document(capsys, *traces, "--warmup", "2"), "step.time_ns")["n_base"] == 12


def test_only_what_is_asked_for_is_compared(capsys, ones, compared_pca):
    assert {row["scope"] for row in compared_pca["movers"]} == {"run", "range", "kernel"}
    found = document(capsys, *ones, "--by", "kernel")
    assert {row["scope"] for row in found["movers"]} == {"kernel"}
    kernels = {row["place"] for row in compared_pca["movers"] if row["scope"] == "kernel"}
    assert "features.0 convolution forward" in kernels
    text = text_of(compared_pca, rows=3)
    assert re.search(r"\(\d+ more rows: --rows N\)", text)


def test_a_filter_compares_a_part(capsys, compared_pca, ones):
    whole = mover(compared_pca, "migrations.bytes")
    part = mover(document(capsys, PCA_OFF, PCA_ON, "--filter-nvtx", "step/1"), "migrations.bytes")
    assert 0 < part["base"] < whole["base"]
    windowed = document(capsys, *ones, "--filter-time", "0ms/100ms")
    assert [each["id"] for each in windowed["comparable"]] == ["window"]


# What is not comparable -----------------------------------------------------------------------------


def test_model_and_machine_are_refused_with_every_reason(capsys):
    refused = said(capsys, ADD, PLAIN, status=1)
    assert refused.out == ""
    reasons = document(capsys, ADD, PLAIN, "--fail-on", "duration_ns>+5%", status=1)
    assert {"model", "gpu"} <= {
        each["id"] for each in reasons["comparable"] if each["level"] == "refuse"
    }
    assert reasons["movers"] == []
    assert [each["outcome"] for each in reasons["gates"]] == ["undecided"]
    for reason in ("come from the model", "different GPUs", "70 %", "--anyway"):
        assert reason in refused.err
    found = document(capsys, ADD, PLAIN, "--anyway")
    assert {each["level"] for each in found["comparable"]} == {"warn"}
    assert {row["verdict"] for row in found["movers"]} == {"unjudged", "unknown"}
    assert mover(found, "migrations.bytes")["difference"] > 0


def test_runs_with_other_switches_are_refused_and_anyway_their_times_have_no_verdict(
    folder_of, capsys
):
    """Tracing page faults slows a program: its times are of another program, its bytes are not."""
    off = {"options": {"COLLECT_UVM_GPU_PAGE_FAULTS": "false"}}
    version = {"version": "2024.6"}
    traced = [one_run(kernel_ns=1_700_000 + 100 * i, **version) for i in range(2)]
    plain = [one_run(copies=16, kernel_ns=1_000_000 + 100 * i, **off, **version) for i in range(2)]
    for run in plain:
        del run.rows[x.GPU_FAULTS]
    pair = folder_of("traced", traced), folder_of("plain", plain)
    refused = said(capsys, *pair, status=1).err
    assert "GPU faults were not recorded alike. A: recorded; B: not recorded." in refused
    assert "--cuda-um-gpu-page-faults=true" in refused
    gate = ("--anyway", "--fail-on", "kernels.busy_ns<-10%")
    found = document(capsys, *pair, *gate, status=1)
    assert found["gates"][0]["outcome"] == "undecided"
    assert mover(found, "kernels.busy_ns")["verdict"] == "unjudged"
    assert mover(found, "kernels.busy_ns")["reason"] == "not comparable: other switches"
    assert mover(found, "migrations.bytes")["verdict"] not in {"unjudged", "unknown"}


def test_an_empty_capture_is_refused_and_two_of_them_have_no_data(built, capsys):
    full = built(one_run())
    empty = built(x.Export())
    refused = said(capsys, full, empty, status=1).err
    assert "No GPU activity was recorded" in refused
    both = said(capsys, empty, empty, status=3)
    assert both.out == ""
    anyway = said(capsys, empty, empty, "--anyway", status=3)
    assert "Unified Memory data" in anyway.err
    assert "B against A" in anyway.out


def test_a_program_that_no_longer_uses_managed_memory_can_be_compared_anyway(built, capsys):
    other = one_run()
    for table in (x.MEMCPY, x.GPU_FAULTS):
        del other.rows[table]
    pair = built(one_run()), built(other)
    assert "holds no Unified Memory data" in said(capsys, *pair, status=1).err
    row = mover(document(capsys, *pair, "--anyway"), "migrations.bytes")
    assert (row["base"], row["other"], row["change"]) == (16 * x.MIB, 0, -1)


def test_another_program_is_refused_and_a_renamed_kernel_is_not(built, capsys):
    other = built(one_run(name="breadth_first"))
    assert "run different programs" in said(capsys, built(one_run()), other, status=1).err
    pair = built(one_run(name="stencil_step")), built(one_run(name="stencil_step_tiled"))
    assert "may be different programs" in said(capsys, *pair).out


def test_lost_rows_are_refused(tmp_path, capsys):
    whole = SAMPLES / "model" / "oversubscribed_sweep" / "oversubscribed_sweep.sqlite"
    holed = tmp_path / "holed.sqlite"
    shutil.copy(whole, holed)
    with closing(sqlite3.connect(holed)) as export:
        low, high = export.execute(f"SELECT min(start), max(end) FROM {x.MEMCPY}").fetchone()
        for table in (x.MEMCPY, x.GPU_FAULTS):
            export.execute(
                f"DELETE FROM {table} WHERE start BETWEEN ? AND ?",
                (low + 0.4 * (high - low), low + 0.6 * (high - low)),
            )
        export.commit()
    assert "B (holed.sqlite) has lost rows" in said(capsys, whole, holed, status=1).err
    found = document(capsys, whole, holed, "--anyway")
    assert mover(found, "migrations.bytes")["reason"] == "not comparable: lost rows"
    assert mover(found, "step.time_ns")["reason"] != "not comparable: lost rows"


def test_times_that_nvprof_printed_with_few_digits_get_no_verdict(capsys):
    found = document(capsys, SMALL, LARGE)
    assert [each["id"] for each in found["comparable"]] == ["coarse_times"] * 2
    assert mover(found, "duration_ns")["verdict"] == "unknown"
    assert mover(found, "migrations.coherence_bytes")["verdict"] == "unknown"
    assert "nvprof prints no causes" in found["record"]["migrations.coherence_bytes"]


def test_one_odd_repetition_is_found(folder_of, capsys):
    base = folder_of("a", [one_run()])
    odd = one_run()
    odd.rows[x.GPU][0]["name"] = "NVIDIA H100"
    other = folder_of("b", [one_run(), odd])
    err = said(capsys, base, other, status=1).err
    assert "A: NVIDIA A100; B: NVIDIA A100 or NVIDIA H100" in err


# Formats --------------------------------------------------------------------------------------------


def test_the_json_document_has_the_keys_of_its_contract(capsys):
    found = document(capsys, PLAIN, AHEAD, "--fail-on", "migrations.bytes>+10%")
    assert found["schema"] == 1
    known = {key.path: key for key in COMPARE_KEYS}
    absent = {"comparable[]", "record.<figure>", "filters.<filter>", "places.<scope>"}
    written = set()
    for path, kind in keys_in(found):
        written.add(path)
        declared = known[path]
        same = {declared.type} | ({"integer"} if declared.type == "number" else set())
        assert declared.type == "any" or kind in same or (kind is None and declared.null), path
    lacking = {path for path in known if path not in written}
    assert {path for path in lacking if not path.startswith(tuple(absent))} == set()
    assert set(found["movers"][0]) == set(MOVERS.schema)
    assert {row["figure"] for row in found["movers"]} <= set(FIGURES)
    run = found["conditions"][0]["runs"][0]
    assert (run["source"], run["kind"], run["gpus"]) == (
        "stream.sqlite",
        "modelled",
        ["NVIDIA A100-SXM4-40GB"],
    )
    assert {row["kind"] for row in found["movers"]} == {"modelled"}
    call = found["differs"][0]
    assert (call["what"], call["name"], call["base"], call["other"]) == (
        "call",
        "cudaMemPrefetchAsync",
        [0],
        [3],
    )
    assert str(x.REPOSITORY) not in json.dumps(found)


def test_an_interval_without_bound_is_null_in_json_and_not_in_text(folder_of, capsys):
    evicting = x.migration(20_000, 20_500, 64 * x.KIB, kind=x.DTOH, cause=x.EVICTION)
    base = folder_of("a", [one_run().add(x.MEMCPY, *[evicting] * n) for n in (0, 1)])
    other = folder_of("b", [one_run().add(x.MEMCPY, *[evicting] * n) for n in (1, 2)])
    found = document(capsys, base, other)
    row = mover(found, "migrations.dtoh_bytes")
    assert row["change_low"] is not None
    assert row["change_high"] is None
    assert re.search(r"migrations\.dtoh_bytes .* from [+-]\d+(\.\d)? % +unclear", text_of(found))


def test_tables_for_machines_have_a_row_for_each_figure(ones, compared_once, capsys, tmp_path):
    text = said(capsys, *ones, "--format", "csv").out
    rows = list(csv.DictReader(io.StringIO(text)))
    found = compared_once.to_dict()["movers"]
    assert [row["figure"] for row in rows] == [row["figure"] for row in found]
    place = tmp_path / "movers.parquet"
    said(capsys, *ones, "--format", "parquet", "-o", place)
    assert pl.read_parquet(place)["change"].to_list() == [row["change"] for row in found]
    markdown = compared_once._repr_markdown_()
    assert re.search(r"^\| migrations\.bytes +\| +16\.00 MiB", markdown, re.MULTILINE)
    assert "## B against A" in markdown


def test_names_of_a_trace_are_harmless_in_every_format(built, capsys):
    pair = [built(one_run(name=EVIL)), built(one_run(name=f"{EVIL}2"))]
    for form in ("table", "markdown", "csv"):
        out = said(capsys, *pair, "--by", "run,kernel", "--format", form)
        assert "\x1b" not in out.out.replace(EVIL, "") if form == "csv" else "\x1b" not in out.out
        assert "\x1b" not in out.err
    assert "<img" not in said(capsys, *pair, "--by", "kernel", "--format", "markdown").out
    places = {row["place"] for row in document(capsys, *pair, "--by", "kernel")["movers"]}
    assert EVIL in places


# Output ---------------------------------------------------------------------------------------------


def test_nothing_that_is_read_or_there_is_written_over(pair, capsys, tmp_path):
    before = {file: file.read_bytes() for folder in pair for file in folder.iterdir()}
    run = next(iter(before))
    for option in ("-o", "--report"):
        place = run if option == "-o" else run.with_suffix(".html")
        assert "is what is being read" in said(capsys, *pair, option, place, status=2).err
    links = tmp_path / "links"
    links.mkdir()
    (links / "run.sqlite").symlink_to(run)
    forced = ("-o", run, "--force-overwrite")
    assert "is what is being read" in said(capsys, links, pair[1], *forced, status=2).err
    taken = tmp_path / "there.html"
    taken.write_text("mine")
    assert "exists already" in said(capsys, *pair, "--report", taken, status=1).err
    assert "exists already" in said(capsys, *pair, "-o", taken, status=1).err
    assert taken.read_text() == "mine"
    assert "ends with .html" in said(capsys, *pair, "--report", tmp_path / "x.pdf", status=2).err
    assert {file: file.read_bytes() for file in before} == before


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        [ADD],
        [ADD, "--base", ADD, "--other", ADD],
        ["--base", ADD],
        [ADD, ADD, "--by", "moon"],
        [ADD, ADD, "--by", ""],
        [ADD, ADD, "--min-effect", "-1"],
        [ADD, ADD, "--min-effect", "200%"],
        [ADD, ADD, "--warmup", "-1"],
    ],
)
def test_what_cannot_be_understood_is_usage(arguments, capsys):
    assert main(["compare", *map(str, arguments)]) == 2
    assert capsys.readouterr().out == ""


def test_the_least_effect_is_a_share(ones, capsys):
    for text, value in (("5 %", 0.05), ("0.05", 0.05)):
        found = document(capsys, *ones, "--by", "step", "--min-effect", text)
        assert found["options"]["min_effect"] == value


def test_the_page_says_what_the_text_says_and_names_no_folder(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "page.html"
    arguments = ("--report", place, "--filter-nvtx", "step", "--fail-on", "migrations.bytes>+10%")
    stepped = [tmp_path / name for name in ("one", "two")]
    for folder, copies in zip(stepped, (4, 8), strict=True):
        folder.mkdir()
        one_run(copies=copies, n_steps=1, kernel_ns=9_000).write(folder / "0.sqlite")
    said(capsys, *stepped, *arguments, status=4)
    page = place.read_text()
    for text in (
        "one and two compared",
        "migrations.bytes",
        "FAILED",
        "16.00 MiB",
        "What moved when",
    ):
        assert text in page
    assert str(tmp_path) not in page
    assert "By default this shows" not in page
    assert not (tmp_path / "compare-output").exists()
    assert sorted(each.name for each in tmp_path.glob("*.html")) == ["page.html"]


def test_the_title_of_a_page_names_all_conditions_or_counts_them(tmp_path):
    names = [[tmp_path / name] for name in ("a", "b", "c", "d", "e", "f")]
    assert _title(names[:2]) == "a and b compared"
    assert _title(names[:3]) == "a, b and c compared"
    assert _title(names) == "a, b, c and 3 more compared"


def test_what_is_refused_leaves_no_page(capsys, tmp_path):
    place = tmp_path / "page.html"
    with pytest.raises(NotComparableError):
        nsan.compare(ADD, PLAIN)
    said(capsys, ADD, PLAIN, "--report", place, status=1)
    assert not place.exists()


def test_a_folder_that_is_not_there_is_named(capsys, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "without a capture" in said(capsys, ADD, empty, status=2).err
    shutil.rmtree(empty)
    assert "no such file" in said(capsys, ADD, empty, status=1).err
