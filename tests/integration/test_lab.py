"""`nsan lab`, and the notebooks that come with nsan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

import exports as x
import polars as pl
import pytest
from browser import jupyter
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from nsan import notebooks
from nsan.cli import lab, main

SWEEP = "sample_data/model/oversubscribed_sweep/oversubscribed_sweep.sqlite"


def parameters(path):
    """Run the cell of parameters of a notebook; return what it sets."""
    document = json.loads(Path(path).read_text())
    cells = [c for c in document["cells"] if "parameters" in c["metadata"].get("tags", [])]
    assert len(cells) == 1
    found = {}
    exec("".join(cells[0]["source"]), found)  # the notebook's own cell
    return {name: value for name, value in found.items() if not name.startswith("__")}


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Stand in for the moment in which JupyterLab takes over this process."""
    calls = []
    monkeypatch.setattr("nsan.cli.lab.os.execv", lambda _, command: calls.append(command))
    monkeypatch.chdir(tmp_path)
    return calls


def run(*words):
    import argparse

    parser = argparse.ArgumentParser()
    lab.add_arguments(parser)
    lab.run(parser.parse_args(words))


def test_the_copy_is_the_shipped_notebook_but_for_its_trace(tmp_path):
    trace = tmp_path / "my run.nsys-rep"
    trace.touch()
    copy = lab.copy_notebook(trace, tmp_path)
    assert copy == tmp_path / "explore-my_run.ipynb"
    assert parameters(copy)["TRACE"] == "my run.nsys-rep"
    made, shipped = (json.loads(p.read_text()) for p in (copy, notebooks.notebook("explore")))
    differ = [a for a, b in zip(made["cells"], shipped["cells"], strict=True) if a != b]
    assert [cell["metadata"]["tags"] for cell in differ] == [["parameters"]]


def test_a_trace_elsewhere_is_named_in_full(tmp_path):
    (tmp_path / "here").mkdir()
    trace = tmp_path / "run.log.gz"
    trace.touch()
    copy = lab.copy_notebook(trace, tmp_path / "here")
    assert copy.name == "explore-run.ipynb"
    assert parameters(copy)["TRACE"] == str(trace)


@pytest.mark.parametrize("name", ['it\'s \\1 "odd" \\n.sqlite', "a\nb'''.sqlite", "{}#  x.sqlite"])
def test_an_odd_name_stays_text_in_the_notebook(tmp_path, name):
    trace = tmp_path / name
    trace.touch()
    copy = lab.copy_notebook(trace, tmp_path)
    assert parameters(copy)["TRACE"] == name
    assert copy.parent == tmp_path


def test_a_copy_never_replaces_a_file(tmp_path):
    trace = tmp_path / "run.sqlite"
    trace.touch()
    (tmp_path / "explore-run.ipynb").write_text("mine")
    names = [lab.copy_notebook(trace, tmp_path).name for _ in range(2)]
    assert names == ["explore-run-2.ipynb", "explore-run-3.ipynb"]
    assert (tmp_path / "explore-run.ipynb").read_text() == "mine"


def test_lab_says_what_it_makes_and_passes_the_rest_on(started, tmp_path, capsys):
    (tmp_path / "run.sqlite").touch()
    run("--no-browser", "run.sqlite", "--port", "9000")
    assert started == [
        [sys.executable, "-m", "jupyterlab", "explore-run.ipynb", "--no-browser", "--port", "9000"]
    ]
    said = capsys.readouterr().err
    assert "explore-run.ipynb is the explore notebook, set to run.sqlite" in said


def test_jupyterlab_starts_with_the_copy_in_its_folder(tmp_path):
    trace = str(x.REPOSITORY / SWEEP)
    start = ("-m", "nsan", "lab", "--no-browser", trace)
    with jupyter.server(tmp_path / "home", start=start) as running:
        name = "explore-oversubscribed_sweep.ipynb"
        with urllib.request.urlopen(f"{running.url}api/contents/{name}", timeout=10) as answer:
            served = json.loads(answer.read())
        assert served["content"]["cells"]
        assert parameters(running.folder / name)["TRACE"] == trace


def test_without_a_trace_the_notebook_keeps_its_sample(started, tmp_path):
    run()
    assert started[0][3:] == ["explore.ipynb"]
    assert parameters(tmp_path / "explore.ipynb")["TRACE"] == SWEEP


def test_a_trace_that_is_not_there_makes_no_notebook(started, tmp_path, capsys):
    assert main(["lab", "nowhere.sqlite"]) == 1
    assert "nowhere.sqlite: no such file" in capsys.readouterr().err
    assert not started
    assert not list(tmp_path.iterdir())


def test_without_jupyterlab_one_message_says_how_to_get_it(started, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("nsan.cli.lab.importlib.util.find_spec", lambda _: None)
    assert main(["lab"]) == 1
    assert capsys.readouterr().err == (
        "nsan: JupyterLab is not installed. Install it with: pip install 'nsan[lab]'\n"
    )
    assert not started
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    from nsan.errors import OutputWriteError

    with pytest.raises(OutputWriteError, match="change to one where you may write") as failed:
        lab.copy_notebook(None, tmp_path / "absent")
    assert " -o" not in str(failed.value)  # nsan lab has no such option


def test_a_capture_is_found_from_the_folder_first_and_then_among_the_samples(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert notebooks.capture_path(SWEEP) == x.REPOSITORY / SWEEP
    own = tmp_path / SWEEP
    own.parent.mkdir(parents=True)
    own.touch()
    assert notebooks.capture_path(SWEEP).resolve() == own.resolve()


def test_a_name_that_begins_with_a_tilde_is_a_file_or_a_home(started, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for path in (tmp_path / "~tilde.sqlite", tmp_path / "home" / "mine.sqlite"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    run("~tilde.sqlite")
    assert parameters(tmp_path / started[0][3])["TRACE"] == "~tilde.sqlite"
    assert notebooks.capture_path("~tilde.sqlite").samefile(tmp_path / "~tilde.sqlite")
    assert notebooks.capture_path("~/mine.sqlite").samefile(tmp_path / "home" / "mine.sqlite")


@pytest.mark.parametrize("name", ["", "no/such.sqlite", "~nobody-of-this-name/x.sqlite"])
def test_a_capture_that_is_nowhere_says_what_to_set(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(notebooks.CaptureNotFoundError, match="Set the parameter that names it"):
        notebooks.capture_path(name)


def test_an_unknown_notebook_is_answered_with_those_that_exist():
    assert notebooks.notebook_names()[0] == "explore"
    with pytest.raises(notebooks.UnknownNotebookError, match="There are: explore"):
        notebooks.notebook("explor")


def test_an_installed_wheel_finds_its_notebooks(tmp_path):
    wheel = next(iter(WheelBuilder(str(x.REPOSITORY)).build(directory=str(tmp_path))))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = "from nsan.notebooks import notebook; print(notebook('explore'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    found = Path(done.stdout.strip())
    assert found.is_relative_to(tmp_path / "site" / "nsan")
    assert found.read_bytes() == notebooks.notebook("explore").read_bytes()


def test_wheel_and_source_archive_hold_what_the_explorer_needs(tmp_path):
    import tarfile

    wheel = next(iter(WheelBuilder(str(x.REPOSITORY)).build(directory=str(tmp_path))))
    source = next(iter(SdistBuilder(str(x.REPOSITORY)).build(directory=str(tmp_path))))
    with zipfile.ZipFile(wheel) as archive, tarfile.open(source) as sources:
        held, given = archive.namelist(), sources.getnames()
    needed = {f"widgets/explorer.{kind}" for kind in ("py", "js", "css")}
    assert {name for name in needed if f"nsan/{name}" not in held} == set()
    assert {name for name in needed if not any(g.endswith(f"/nsan/{name}") for g in given)} == set()
    assert any(name.endswith("/notebooks/01-explore.ipynb") for name in given)


def test_the_explore_notebook_runs_where_nobody_looks_on(tmp_path, monkeypatch):
    """As papermill and nbconvert run it: every view has its static form, and nothing is left out."""
    import nbclient
    import nbformat

    for name in ("HOME", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    copy = lab.copy_notebook(x.REPOSITORY / SWEEP, tmp_path)
    document = nbformat.read(copy, as_version=4)
    nbclient.NotebookClient(document, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = {c.source: c.outputs for c in document.cells if c.cell_type == "code" and c.outputs}
    kinds = {source: set(shown[-1].get("data", ())) for source, shown in outputs.items()}
    drawn = [of for source, of in kinds.items() if source.startswith("nsan.chart(")]
    assert len(drawn) > 2
    assert all("image/svg+xml" in of for of in drawn)
    assert {"text/html", "text/plain"} <= kinds["explorer = nsan.explore(trace)\nexplorer"]
    assert not [of for of in kinds.values() if any("widget" in kind for kind in of)]
    page = (tmp_path / "explore-output" / "explorer.html").read_text()
    assert "Content-Security-Policy" in page
    svg = (tmp_path / "explore-output" / "migrations.svg").read_text()
    assert svg.startswith("<svg")
    chosen = pl.read_parquet(tmp_path / "explore-output" / "selection.parquet")
    # Plain SQL on the sample: 8441 migrations, 288 fault rows of the GPU, 240 page faults of the CPU.
    assert chosen.height == 8441 + 288 + 240


@pytest.mark.parametrize("path", sorted(notebooks.notebook_folder().glob("*.ipynb")), ids=str)
def test_a_notebook_is_thin_and_holds_no_output(path):
    import ast

    document = json.loads(path.read_text())
    code = [c for c in document["cells"] if c["cell_type"] == "code"]
    assert [c["outputs"] for c in code] == [[]] * len(code)
    assert {c["execution_count"] for c in code} == {None}
    plain = [
        "\n".join(line for line in "".join(c["source"]).splitlines() if not line.startswith("%"))
        for c in code
    ]
    kinds = {type(node) for source in plain for node in ast.walk(ast.parse(source))}
    assert not kinds & {ast.FunctionDef, ast.Lambda, ast.ClassDef, ast.AsyncFunctionDef}
    assert max(len(source.splitlines()) for source in plain) <= 12
