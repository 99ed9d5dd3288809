"""Charts on the command line: every format, every subject, filters, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import exports as x
import pytest

import nsan
from nsan.charting import chart
from nsan.charts.catalog import charts
from nsan.cli import main

ROOT = Path(nsan.__file__).parent.parent
ADD = str(ROOT / "sample_data" / "um_vector_add_rtx4060l.sqlite")
PCA = ROOT / "sample_data" / "model" / "pca_on"
PCA_ON, SNAPSHOT = str(PCA / "pca_on.sqlite"), str(PCA / "snapshot.pickle")


def export(*arguments):
    return main(["export", *map(str, arguments)])


def test_the_list_has_every_chart_with_its_question(capsys):
    assert export("--list") == 0
    text = capsys.readouterr().out
    for name, found in charts().items():
        assert name in text
        assert found.question in text
    assert export("--list", "--json") == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)] == list(charts())


def test_a_chart_is_explained_with_what_it_draws_and_its_options(capsys):
    assert export("--list", "--chart", "batch-rate") == 0
    text = capsys.readouterr().out
    assert "batches_over_time" in text
    assert "n_bins = 120" in text


@pytest.mark.parametrize(
    ("suffix", "start"),
    [(".svg", b"<svg"), (".png", b"\x89PNG"), (".pdf", b"%PDF"), (".html", b"<!doctype html>")],
)
def test_a_chart_is_saved_in_the_format_of_its_suffix_and_nothing_else_is_left(
    suffix, start, tmp_path, capsys
):
    place = tmp_path / "out" / f"moved{suffix}"
    place.parent.mkdir()
    assert export(ADD, "--chart", "migrations_over_time", "-o", place) == 0
    assert place.read_bytes().startswith(start)
    assert list(place.parent.iterdir()) == [place]
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_what_is_saved_is_the_chart_that_python_gives(tmp_path):
    place = tmp_path / "moved.json"
    arguments = ("--theme", "dark", "--width", 420, "--set", "n_bins=7", "--filter-time", "/266ms")
    assert export(ADD, "--chart", "migrations_over_time", *arguments, "-o", place) == 0
    part = nsan.open_trace(ADD).filter(time="/266ms")
    same = chart(part, "migrations_over_time", theme="dark", width=420, options={"n_bins": 7})
    assert json.loads(place.read_text()) == same.to_dict()
    assert "a part of the capture" in " ".join(same.to_dict()["title"]["subtitle"])


def test_charts_of_a_snapshot_and_of_both_joined_are_drawn(tmp_path):
    alone, beside, both = (tmp_path / f"{n}.json" for n in ("alone", "beside", "both"))
    assert export(SNAPSHOT, "--chart", "allocator_over_time", "-o", alone) == 0
    joined = (PCA_ON, "--snapshot", SNAPSHOT)
    assert export(*joined, "--chart", "allocator_over_time", "-o", beside) == 0
    assert alone.read_bytes() == beside.read_bytes()
    assert export(*joined, "--chart", "moves_by_state", "-o", both) == 0
    assert "joined with snapshot.pickle" in both.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--chart", "migration", "-o", "a.svg"), "There is no chart 'migration'"),
        (("--chart", "batch_rate"), "-o FILE"),
        (("-o", "a.svg"), "--chart NAME"),
        (("--chart", "batch_rate", "-o", "a.gif"), ".gif is no format of a chart"),
        (("--chart", "batch_rate", "-o", "a"), "No suffix is no format of a chart"),
        (("--chart", "batch_rate", "-o", "a.svg", "--width", "9"), "ask for 200 to 4000"),
        (("--chart", "batch_rate", "-o", "a.png", "--scale", "0"), "above 0, and at most 10"),
        (("--chart", "batch_rate", "-o", "a.svg", "--set", "bins=3"), "n_bins"),
        (("--chart", "batch_rate", "-o", "a.svg", "--set", "n_bins=x"), "a whole number"),
        (("--chart", "batch_rate", "-o", "a.svg", "--json"), "--json goes with --list"),
        (("--chart", "batch_rate", "-o", "a.svg", "--gpu", "7"), "no GPU 7"),
        (("--chart", "moves_by_state", "-o", "a.svg"), "--snapshot FILE"),
        (("--chart", "memory_held", "-o", "a.svg", "--filter-time", "/1s"), "whole capture"),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_the_way_out(
    arguments, said, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert export(ADD, *arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert "Traceback" not in captured.err
    assert not [path for path in tmp_path.iterdir() if path.name != "cache"]


def test_neither_the_trace_nor_another_file_is_written_over(tmp_path, capsys):
    place = tmp_path / "mine.svg"
    place.write_text("mine")
    before = Path(ADD).read_bytes()
    assert export(ADD, "--chart", "batch_rate", "-o", place) == 1
    assert "--force-overwrite" in capsys.readouterr().err
    assert place.read_text() == "mine"
    assert export(ADD, "--chart", "batch_rate", "-o", place, "--force-overwrite") == 0
    assert place.read_text("utf-8").startswith("<svg")
    assert export(ADD, "--chart", "batch_rate", "-o", ADD, "--force-overwrite") == 2
    assert Path(ADD).read_bytes() == before


def test_a_trace_without_unified_memory_gives_a_chart_that_says_so_and_status_3(
    built, tmp_path, capsys
):
    plain = built(x.Export().add(x.KERNEL, x.kernel(0, 10)))
    place = tmp_path / "none.json"
    assert export(plain, "--chart", "migrations_over_time", "-o", place) == 3
    assert "There are no migrations" in place.read_text()
    assert "no Unified Memory data" in capsys.readouterr().err


def test_an_empty_window_gives_a_chart_that_says_so_and_a_note(tmp_path, capsys):
    place = tmp_path / "empty.svg"
    window = ("--filter-time", "500s/600s")
    assert export(ADD, "--chart", "migrations_over_time", *window, "-o", place) == 0
    assert (
        "The chart is empty. Nothing is in the part that was asked for." in capsys.readouterr().err
    )
    assert "Nothing is in the part that was asked for." in place.read_text("utf-8")
    assert main(["analyse", "top_kernels", ADD, *window]) == 0
    quiet = ("-o", place, "--force-overwrite", "--quiet")
    assert export(ADD, "--chart", "migrations_over_time", *window, *quiet) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("suffix", [".svg", ".html"])
def test_a_chart_that_cannot_be_drawn_is_one_message_and_no_file(
    suffix, built, tmp_path, monkeypatch, capsys
):
    # Without this list such names reach Vega as they are.
    monkeypatch.setattr("nsan.charts.theme._TAKEN", frozenset())
    plain = x.Export().add(x.KERNEL, x.kernel(0, 1000, name=77))
    plain.add(x.MEMCPY, x.migration(100, 200, 65_536)).strings[77] = "constructor"
    place = tmp_path / "out" / f"a{suffix}"
    place.parent.mkdir()
    assert export(built(plain), "--chart", "faults_of_kernels", "-o", place) == 1
    said = capsys.readouterr().err
    assert "The chart cannot be drawn (Operator not defined: undefined)" in said
    assert "Traceback" not in said
    assert not list(place.parent.iterdir())


def test_without_altair_one_message_says_what_to_install(tmp_path):
    code = (
        "import sys; sys.modules['altair'] = None\n"
        "from nsan.cli import main\n"
        f"sys.exit(main(['export', {ADD!r}, '--chart', 'batch_rate', '-o', 'a.svg']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 1
    assert "pip install 'nsan[report]'" in done.stderr
    assert "Traceback" not in done.stderr
