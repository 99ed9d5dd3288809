"""`nsan advise`, as people and machines call it."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import sqlite3

import exports as x
import polars as pl
import pytest
from conftest import hide_package

import nsan
from nsan import advising
from nsan.analysis.advisor.rules import RULES
from nsan.cli import main
from nsan.model.making import Recipe, make, oversubscribed
from nsan.model.settings import Settings
from nsan.model.size import Size
from nsan.model.workloads import workload
from nsan.units import MIB

pytest.importorskip("numba")

SAMPLES = x.REPOSITORY / "sample_data"
REAL = SAMPLES / "um_vector_add_rtx4060l.sqlite"


@pytest.fixture(autouse=True, scope="module")
def _asked_once():
    """Ask the rules once about each trace: most tests here are of what is made of their answer."""
    known, ask = {}, advising.advised

    def advised(asked):
        stamp = asked.path.stat().st_mtime_ns if asked.path.is_file() else 0
        key = (str(asked.path), stamp, repr(asked.filters), str(asked.snapshot_path))
        if key not in known:
            known[key] = ask(asked)
        return known[key]

    advising.advised = advised
    yield
    advising.advised = ask


def advise(capsys, *words, status=0):
    """Run the command; give what it says."""
    assert main(["advise", *map(str, words)]) == status
    return capsys.readouterr()


@pytest.fixture(scope="module")
def thrash(tmp_path_factory):
    """Three steps over half as much again as the GPU holds."""
    program = workload("sweep").build(Size(12 * MIB, 3))
    folder = tmp_path_factory.mktemp("made") / "thrash"
    make(Recipe(program, oversubscribed(Settings(), 12 * MIB, 1.5)), folder)
    return folder / "thrash.sqlite"


@pytest.fixture(scope="module")
def ahead(tmp_path_factory):
    """A program that prefetches what it uses."""
    folder = tmp_path_factory.mktemp("made") / "ahead"
    make(Recipe(workload("stream").build(Size(8 * MIB, prefetch="back"))), folder)
    return folder / "ahead.sqlite"


def test_a_problem_is_named_with_its_allocation_the_call_and_the_check(capsys, thrash):
    said = advise(capsys, thrash)
    assert said.err == ""
    lines = said.out.splitlines()
    assert re.match(r"thrash\.sqlite: \d things? to change$", lines[0])
    first = next(line for line in lines if line.startswith("1. "))
    assert first.startswith("1. high: ")
    assert "0x7f0000000000" in said.out
    for label in ("Gain", "Found", "Do", "Check"):
        assert any(line.startswith(f"   {label} ") for line in lines)
    assert "nsan compare BEFORE AFTER --fail-on '" in said.out
    assert "\x1b" not in said.out


def test_what_it_says_is_what_python_gets(capsys, thrash):
    document = json.loads(advise(capsys, thrash, "--json").out)
    found = nsan.advise(thrash)
    assert [each["title"] for each in document["advice"]] == [each.title for each in found.advice]
    assert [each["reason"] for each in document["silent"]] == [e.reason for e in found.silent]
    said = {each["rule"] for part in ("advice", "silent") for each in document[part]}
    assert said == {rule.name for rule in RULES}
    assert document["is_clean"] is False
    assert document["what_if"] is None


def test_a_clean_trace_has_nothing_to_do_and_every_rule_says_why(capsys, ahead):
    said = advise(capsys, ahead).out
    assert said.startswith("ahead.sqlite: nothing to do")
    assert "Why there is nothing to do:\n  - " in said
    document = json.loads(advise(capsys, ahead, "--json").out)
    assert document["is_clean"] is True
    assert {each["rule"] for each in document["silent"]} <= {rule.name for rule in RULES}


def test_what_was_not_recorded_stands_apart(capsys):
    said = advise(capsys, REAL).out
    assert "Not known:\n  - " in said


def test_the_model_tries_each_remedy_of_a_trace_that_it_made(capsys, thrash):
    document = json.loads(advise(capsys, thrash, "--what-if", "--runs", "2", "--json").out)
    bound, modelled = document["advice"][0]["gains"]
    assert (bound["is_bound"], modelled["is_bound"]) == (True, False)
    assert modelled["kind"] == "modelled"
    assert modelled["ns"] <= bound["ns"]
    assert document["what_if"]["seeds"] == [1, 2]
    said = advise(capsys, thrash, "--what-if", "--runs", "2").out
    assert "modelled: mean of 2 runs of the driver model" in " ".join(said.split())


def test_of_a_recorded_trace_it_says_that_the_program_is_not_known(capsys):
    said = advise(capsys, REAL, "--what-if")
    assert "Not tried in the driver model: This trace was recorded:" in said.out
    said = advise(capsys, REAL, "--what-if", "--json")
    assert json.loads(said.out)["what_if"]["reason"].startswith("This trace was recorded:")
    assert said.err.startswith("nsan: not tried in the driver model: This trace was recorded:")
    assert advise(capsys, REAL, "--what-if", "--json", "-q").err == ""


def test_without_numba_the_model_says_what_to_install(capsys, monkeypatch, thrash):
    hide_package(monkeypatch, "numba")
    assert "pip install 'nsan[model]'" in advise(capsys, thrash, "--what-if", status=1).err
    assert advise(capsys, thrash).err == ""


def test_csv_and_parquet_have_one_row_per_advice(capsys, thrash, tmp_path):
    document = json.loads(advise(capsys, thrash, "--json").out)
    rows = list(csv.DictReader(io.StringIO(advise(capsys, thrash, "--format", "csv").out)))
    assert [row["title"] for row in rows] == [each["title"] for each in document["advice"]]
    assert int(rows[0]["gain_ns"]) == document["advice"][0]["gains"][0]["ns"]
    advise(capsys, thrash, "--format", "parquet", "-o", tmp_path / "advice.parquet")
    assert pl.read_parquet(tmp_path / "advice.parquet")["rule"].to_list() == [
        row["rule"] for row in rows
    ]


def test_columns_of_parquet_have_types_whether_or_not_they_have_values(
    capsys, ahead, thrash, tmp_path
):
    types = []
    for name, trace in (("ahead", ahead), ("thrash", thrash)):
        place = tmp_path / f"{name}.parquet"
        advise(capsys, trace, "--format", "parquet", "-o", place)
        types.append(pl.read_parquet_schema(place))
    assert types[0] == types[1]
    assert types[0]["modelled_ns"] == types[0]["gain_ns"] == pl.Int64
    assert types[0]["not_modelled"] == types[0]["title"] == pl.String


def test_a_part_without_an_event_has_nothing_to_say(capsys, thrash):
    said = advise(capsys, thrash, "--filter-time", "500s/501s")
    assert said.out.startswith("thrash.sqlite: no event is in the part that was asked for\n")
    assert "Why" not in said.out


def test_markdown_goes_to_a_file(capsys, thrash, tmp_path):
    place = tmp_path / "advice.md"
    assert advise(capsys, thrash, "--format", "markdown", "-o", place).out == ""
    assert re.match(r"# thrash\.sqlite: \d things? to change\n", place.read_text())
    assert "exists" in advise(capsys, thrash, "--format", "markdown", "-o", place, status=1).err


def test_verbose_shows_numbers_and_rows(capsys, thrash):
    said = advise(capsys, thrash, "-v").out
    assert "\n   Numbers  " in said
    assert "\n   Rows of " in said
    assert "What needs nothing to be done:" in said


def test_a_part_can_be_asked(capsys, thrash):
    said = advise(capsys, thrash, "--filter-nvtx", "step/1", "--what-if").out
    assert "The part that was asked for takes" in said
    assert "runs whole programs: leave the filters out." in said


def test_a_snapshot_beside_the_trace_is_taken_and_never_written_over(capsys, tmp_path):
    for name in ("pca_on.sqlite", "snapshot.pickle"):
        shutil.copy(SAMPLES / "model" / "pca_on" / name, tmp_path / name)
    before = (tmp_path / "snapshot.pickle").read_bytes()
    words = (tmp_path / "pca_on.sqlite", "-o", tmp_path / "snapshot.pickle", "--force-overwrite")
    assert "is what is being read" in advise(capsys, *words, status=2).err
    assert (tmp_path / "snapshot.pickle").read_bytes() == before


def test_a_snapshot_that_is_not_there_is_an_error(capsys, tmp_path):
    assert "nowhere" in advise(capsys, REAL, "--snapshot", tmp_path / "nowhere", status=1).err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--runs", "3"], "add --what-if"),
        (["--what-if", "--runs", "1"], "no number of runs, 2 or more"),
        (["--format", "parquet"], "needs a file"),
    ],
)
def test_what_makes_no_sense_is_refused(capsys, words, said):
    assert said in advise(capsys, REAL, *words, status=2).err


def test_a_trace_without_unified_memory_ends_with_3(capsys, built):
    empty = built(x.Export().add(x.KERNEL, x.kernel(0, 1000)))
    said = advise(capsys, empty, status=3)
    assert "holds no Unified Memory data" in said.err
    assert "nothing to do" in said.out or "to change" in said.out


def test_a_hostile_kernel_name_moves_no_cursor(capsys, thrash, tmp_path):
    evil = shutil.copy(thrash, tmp_path / "evil.sqlite")
    with sqlite3.connect(evil) as database:
        name = "\x1b[2J`|<img src=x>\n# title"
        database.execute("UPDATE StringIds SET value = ? WHERE value = 'scale'", (name,))
    for words in ([], ["-v"], ["--format", "markdown", "-v"]):
        said = advise(capsys, evil, *words).out
        assert "\x1b" not in said
        assert "\n# title" not in said
    assert "\x1b" not in advise(capsys, evil, "--format", "csv").out
    assert "<img" not in advise(capsys, evil, "--format", "markdown", "-v").out.split("```")[0]


def test_colours_are_for_terminals_that_want_them(capsys, monkeypatch, thrash):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "1. \x1b[31mhigh\x1b[0m: " in advise(capsys, thrash).out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "1. high: " in advise(capsys, thrash).out


def test_a_narrow_terminal_breaks_sentences(capsys, monkeypatch, thrash):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    lines = advise(capsys, thrash).out.splitlines()
    code = " " * 14
    assert max(len(line) for line in lines if not line.startswith(code)) <= 60
