"""Analyses on the command line: every choice, every format, options, plug-ins."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import exports as x
import polars as pl
import pytest

import nsan
from nsan.analysis.catalog import catalog
from nsan.cli import attribute, clusters, faults, main, migrations

ROOT = Path(nsan.__file__).parent.parent
MODEL = ROOT / "sample_data" / "model"
SWEEP = str(MODEL / "oversubscribed_sweep" / "oversubscribed_sweep.sqlite")
ADD = str(ROOT / "sample_data" / "um_vector_add_rtx4060l.sqlite")
KIVI = str(ROOT / "sample_data" / "snapshots" / "kivi_llama_state_only.pickle.gz")
PCA_ON = str(MODEL / "pca_on" / "pca_on.sqlite")
PCA_SNAPSHOT = str(MODEL / "pca_on" / "snapshot.pickle")

CHOICES = [
    (command, choice, name)
    for command, module in (
        ("faults", faults),
        ("migrations", migrations),
        ("clusters", clusters),
        ("attribute", attribute),
    )
    for choice, name in module.BY.items()
]

OWN = '''
"""How many bytes came to each GPU."""
import polars as pl
from nsan.analysis.catalog import analysis
from nsan.analysis.result import DEVICE, PID, Result, derived

RESULT = Result("bytes_in", "one GPU", (PID, DEVICE, derived("in_bytes", pl.Int64, "byte", "Came in."),))

@analysis(
    question="How many bytes came to each GPU?",
    result=RESULT,
    reads={"migrations": ("pid", "device_id", "direction", "bytes")},
    source="mine",
)
def bytes_in(migrations, *, least_bytes=0, only_big=False, factor=1.0, label="all"):
    """Add up."""
    rows = migrations.filter((pl.col("direction") == "htod") & (pl.col("bytes") >= least_bytes))
    return rows.group_by("pid", "device_id").agg(in_bytes=pl.col("bytes").sum())
'''


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    return str(path)


def run(capsys, *arguments):
    code = main(list(arguments))
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize(("command", "choice", "name"), CHOICES)
def test_every_choice_names_an_analysis_and_prints_its_question_and_kinds(
    capsys, command, choice, name
):
    code, out, err = run(capsys, command, SWEEP, "--by", choice, "--rows", "3")
    assert (code, err) == (0, "")
    assert out.startswith(catalog()[name].question)
    assert "Figures are " in out or "No row" in out
    assert "every figure is the model's" in out
    assert all(len(line) <= 160 for line in out.splitlines() if line.startswith("---"))


def test_every_analysis_runs_by_name(capsys):
    sources = {"trace": (ADD, "nsys-sqlite"), "snapshot": (KIVI, "torch-snapshot")}
    sources["joined"] = (PCA_ON, "nsan-model")
    for name, analysis in catalog().items():
        source, kind = sources[analysis.subject]
        beside = ["--snapshot", PCA_SNAPSHOT] if analysis.subject == "joined" else []
        code, out, _ = run(capsys, "analyse", name, source, *beside, "--json")
        found = json.loads(out)
        assert code == 0
        assert found["analysis"] == name
        assert found["source_kind"] == kind
        assert [c["name"] for c in found["columns"]] == list(catalog()[name].result.schema)


@pytest.mark.parametrize("at_once", [1, 3, 10_000])
def test_rows_written_some_at_a_time_are_all_there_and_read_back(
    capsys, built, monkeypatch, at_once
):
    monkeypatch.setattr("nsan.cli.results._ROWS_AT_ONCE", at_once)
    known = {1: "a", 2: "b\rc", 3: "d,e", 4: "f\n"}
    export = x.Export()
    export.strings |= known
    export.add(x.KERNEL, *(x.kernel(100 * i, 100 * i + 50, name=i) for i in known))
    export.add(x.MEMCPY, *(x.migration(100 * i, 100 * i + 50, 4096) for i in known))
    path = str(built(export))
    _, text, _ = run(capsys, "attribute", path, "--by", "kernel", "--format", "csv", "-q")
    _, document, _ = run(capsys, "attribute", path, "--by", "kernel", "--json")
    rows = json.loads(document)["rows"]
    names = [row["name"] for row in csv.DictReader(io.StringIO(text, newline=""))]
    assert names == [row["name"] or "" for row in rows]
    assert set(names) >= set(known.values())


ODD = '''
"""Names that are categories, and a value that JSON cannot write."""
import polars as pl
from nsan.analysis.catalog import analysis
from nsan.analysis.result import Result, derived

RESULT = Result(
    "odd", "one name", (derived("name", pl.Categorical(), "text", "Name."), derived("v", pl.Float64, "number", "Value."))
)

@analysis(question="Names?", result=RESULT, reads={"kernels": ("name",)}, source="mine")
def odd(kernels, *, last=1.0):
    """Say three."""
    return pl.LazyFrame({"name": ["a", "b\\rc", "d"], "v": [1.0, 2.0, last]}).cast({"name": pl.Categorical()})
'''


def test_a_document_that_cannot_be_finished_is_not_begun(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("nsan.cli.results._ROWS_AT_ONCE", 1)
    (tmp_path / "odd.py").write_text(ODD)
    words = ("analyse", "odd", ADD, "-q", "--plugin", str(tmp_path / "odd.py"))
    code, out, _ = run(capsys, *words, "--format", "csv")
    assert code == 0
    assert [*csv.reader(io.StringIO(out, newline=""))][1:] == [
        ["a", "1.0"],
        ["b\rc", "2.0"],
        ["d", "1.0"],
    ]
    code, out, _ = run(capsys, *words, "--json")
    assert [row["name"] for row in json.loads(out)["rows"]] == ["a", "b\rc", "d"]
    code, out, err = run(capsys, *words, "--json", "--set", "last=inf")
    assert (code, out) == (1, "")
    assert "odd" in err
    assert "JSON cannot hold" in err


def test_csv_json_and_parquet_hold_the_same_rows_and_the_kinds(capsys, tmp_path):
    _, text, _ = run(capsys, "migrations", SWEEP, "--by", "push", "--format", "csv")
    _, document, _ = run(capsys, "migrations", SWEEP, "--by", "push", "--json")
    place = tmp_path / "push.parquet"
    code, out, _ = run(
        capsys, "migrations", SWEEP, "--by", "push", "--format", "parquet", "-o", str(place)
    )
    assert (code, out) == (0, "")
    frame = pl.read_parquet(place)
    rows = json.loads(document)["rows"]
    table = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == len(table) == frame.height
    assert (
        frame["bytes"].sum()
        == sum(row["bytes"] for row in rows)
        == sum(int(r["bytes"]) for r in table)
    )
    assert rows[0]["va"] == table[0]["va"] == f"0x{frame['va'][0]:016x}"
    facts = pl.read_parquet_metadata(place)
    assert facts["nsan.kind.bytes"] == "modelled"
    assert facts["nsan.source_kind"] == "nsan-model"
    assert {c["kind"] for c in json.loads(document)["columns"]} == {"modelled"}


def test_windows_of_the_filter_add_up_to_the_whole(capsys):
    def copied(*filters):
        _, out, _ = run(capsys, "migrations", SWEEP, "--by", "cause", "--json", *filters)
        return sum(row["bytes"] for row in json.loads(out)["rows"])

    parts = [copied("--filter-time", window) for window in ("/20ms", "20ms/40ms", "40ms/")]
    assert sum(parts) == copied()
    assert all(parts)


def test_an_analysis_of_ones_own_is_found_in_a_file_and_treated_the_same(capsys, own):
    code, out, _ = run(capsys, "analyse", "bytes-in", ADD, "--plugin", own)
    assert code == 0
    assert "How many bytes came to each GPU?" in out
    assert "8.00 MiB" in out
    _, out, _ = run(capsys, "analyse", "--list", "--plugin", own)
    assert "bytes_in" in out
    assert "batches" in out
    _, out, _ = run(
        capsys,
        "analyse",
        "bytes_in",
        ADD,
        "--plugin",
        own,
        "--set",
        "least_bytes=1_000_000",
        "--json",
    )
    # Rows of a megabyte and more: the last push of each of four blocks, less its faulted page.
    assert json.loads(out)["rows"][0]["in_bytes"] == 4 * (1_048_576 - 4096)


def test_an_option_is_read_by_the_type_of_its_default(capsys, own):
    for text, wrong in (
        ("only_big=maybe", "true or false"),
        ("least_bytes=x", "whole number"),
        ("factor=x", "a number"),
    ):
        code, out, err = run(capsys, "analyse", "bytes_in", ADD, "--plugin", own, "--set", text)
        assert (code, out) == (2, "")
        assert wrong in err
    code, _, _ = run(
        capsys,
        "analyse",
        "bytes_in",
        ADD,
        "--plugin",
        own,
        "--set",
        "only-big=yes",
        "--set",
        "factor=2",
        "--set",
        "label=x",
    )
    assert code == 0


def test_an_option_that_does_not_exist_lists_those_that_do(capsys):
    code, _, err = run(capsys, "migrations", ADD, "--by", "ping-pong", "--set", "lapse=3")
    assert code == 2
    assert "window_ns=500000" in err


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x = 1\n", "defines no function"),
        ("import no_such_module\n", "ModuleNotFoundError"),
        (OWN.replace("def bytes_in", "def batches"), "already"),
        (
            OWN.replace('"migrations":', '"moves":').replace("(migrations,", "(moves,"),
            "no table 'moves'",
        ),
    ],
)
def test_a_plugin_that_cannot_be_used_is_refused_in_one_message(capsys, tmp_path, text, why):
    path = tmp_path / "bad.py"
    path.write_text(text)
    code, out, err = run(capsys, "analyse", "--list", "--plugin", str(path))
    assert (code, out) == (1, "")
    assert "bad.py cannot be used" in err
    assert why in err
    assert "Traceback" not in err


def test_a_plugin_that_is_not_there_is_refused(capsys, tmp_path):
    code, _, err = run(capsys, "analyse", "--list", "--plugin", str(tmp_path / "none.py"))
    assert code == 1
    assert "no such file" in err


def test_a_plugin_that_breaks_its_promise_is_refused(capsys, tmp_path):
    path = tmp_path / "odd.py"
    path.write_text(OWN.replace("in_bytes=pl", "other=pl"))
    code, _, err = run(capsys, "analyse", "bytes_in", ADD, "--plugin", str(path))
    assert code == 1
    assert "no column 'in_bytes'" in err


def test_the_table_of_contents_explains_an_analysis(capsys):
    code, out, _ = run(capsys, "analyse", "--list", "batches")
    assert code == 0
    assert "One row is one driver batch." in out
    assert re.search(r"service_ns +ns +derived", out)
    _, out, _ = run(capsys, "analyse", "--list", "--json")
    assert {row["name"] for row in json.loads(out)} == set(catalog())


def test_what_was_not_recorded_is_said_beside_the_answer(capsys):
    _, out, _ = run(capsys, "faults", ADD, "--by", "access")
    assert "No row" in out
    assert "GPU faults: not recorded" in out
    assert "--cuda-um-gpu-page-faults=true" in out


def test_a_name_or_a_trace_that_is_missing_is_a_usage_error(capsys):
    assert run(capsys, "analyse")[0] == 2
    assert run(capsys, "analyse", "batches")[0] == 2
    code, _, err = run(capsys, "analyse", "bathces", ADD)
    assert code == 2
    assert "batches" in err


def test_options_of_an_analysis_are_refused_where_none_is_run(capsys):
    code, _, err = run(capsys, "faults", ADD, "--set", "x=1")
    assert code == 2
    assert "--by" in err


def test_python_gives_the_same_frame_as_the_command_line(capsys):
    trace = nsan.open_trace(ADD)
    found = nsan.analyse(trace, "batches").collect()
    _, out, _ = run(capsys, "faults", ADD, "--by", "batch", "--json")
    assert found["bytes"].to_list() == [row["bytes"] for row in json.loads(out)["rows"]]
    # Six pairs of services per 2 MiB: 64, 64, 128, 256, 512, 1024 KiB for each of two arrays.
    assert found["bytes"].to_list() == [2 * k * 1024 for k in (64, 64, 128, 256, 512, 1024)] * 2


def test_the_kind_of_a_figure_follows_its_rows(capsys):
    _, out, _ = run(capsys, "faults", ADD, "--by", "batch", "--json")
    kinds = {column["name"]: column["kind"] for column in json.loads(out)["columns"]}
    # No fault rows: the batches are put together from copies.
    assert kinds["bytes"] == kinds["n_va_blocks"] == "reconstructed"
    assert kinds["pid"] == "recorded"


def test_what_was_not_recorded_is_null_and_never_zero(capsys):
    _, out, _ = run(capsys, "attribute", ADD, "--json")
    rows = json.loads(out)["rows"]
    assert {row["n_fault_rows"] for row in rows} == {None}
    assert sum(row["in_bytes"] for row in rows) == 8 << 20
    _, out, _ = run(capsys, "attribute", ADD)
    assert "Fault rows" not in out
    hotspot = str(ROOT / "sample_data" / "nvprof_hotspot_v100_1024.log.gz")
    _, out, _ = run(capsys, "attribute", hotspot, "--json")
    rows = json.loads(out)["rows"]
    assert {row["coherence_bytes"] for row in rows} == {None}
    assert sum(row["n_fault_rows"] for row in rows) == 20


def test_a_kernel_that_began_before_the_window_still_owns_what_is_in_it(capsys):
    _, out, _ = run(capsys, "attribute", SWEEP, "--json", "--filter-time", "45ms/60ms")
    rows = {row["work"]: row for row in json.loads(out)["rows"]}
    assert rows["kernel"]["n_instances"] == 2
    assert rows["unattributed"]["in_bytes"] == 0


@pytest.mark.parametrize("choice", ["residency", "refault", "oversubscription", "prefetch"])
def test_what_depends_on_all_that_came_before_refuses_a_part(capsys, choice):
    code, out, err = run(capsys, "migrations", SWEEP, "--by", choice, "--filter-time", "/20ms")
    assert (code, out) == (2, "")
    assert "needs the whole capture" in err


def test_an_error_in_an_analysis_of_ones_own_is_one_message(capsys, tmp_path):
    path = tmp_path / "odd.py"
    path.write_text(OWN.replace('pl.col("bytes") >= least_bytes', 'pl.col("sizes") >= least_bytes'))
    code, out, err = run(capsys, "analyse", "bytes_in", ADD, "--plugin", str(path))
    assert (code, out) == (1, "")
    assert "ColumnNotFoundError" in err
    assert "Traceback" not in err


def test_inferred_batches_make_what_stands_on_them_reconstructed_and_nothing_else(capsys):
    """The real capture has no fault rows: how long a kernel waited is inferred, how long it ran is not."""
    code, out, _ = run(capsys, "attribute", ADD, "--json")
    kinds = {column["name"]: column["kind"] for column in json.loads(out)["columns"]}
    assert code == 0
    assert kinds["exposed_ns"] == kinds["driver_ns"] == "reconstructed"
    assert kinds["time_ns"] != "reconstructed"
    assert kinds["in_bytes"] != "reconstructed"
