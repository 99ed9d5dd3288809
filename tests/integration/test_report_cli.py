"""`nsan report` from the command line: formats, own notebooks, and what is refused before anything runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from hashlib import sha256
from pathlib import Path

import exports as x
import nbformat
import pytest

import nsan
from nsan.cli import main

pytest.importorskip("papermill", reason="pip install 'nsan[report]'")

ROOT = Path(nsan.__file__).parent.parent
ADD = ROOT / "sample_data" / "um_vector_add_rtx4060l.sqlite"
OWN = """\
TRACE: str = ""  # the trace
LEAST: int = 1
"""
SHOWS = """\
from nsan.report.report import Report

Report(TRACE).table("migrations_by_cause")
"""


def report(*arguments):
    return main(["report", *map(str, arguments)])


def write(path, *sources, tags=("parameters",), language="python"):
    """Write a notebook whose first code cell has the tags."""
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    cells[0].metadata["tags"] = list(tags)
    cells.insert(0, nbformat.v4.new_markdown_cell("# Mine\n\n## Of my own"))
    made = nbformat.v4.new_notebook(cells=cells)
    made.metadata["kernelspec"] = {"name": "elsewhere", "display_name": "E", "language": language}
    nbformat.write(made, path)
    return path


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder of its own to work in, and to look at afterwards."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def own(here):
    """A notebook that shows one table."""
    return write(here / "my.ipynb", OWN, SHOWS)


def test_an_own_notebook_becomes_a_page_and_its_path_is_all_that_stdout_says(here, own, capsys):
    before = sha256(ADD.read_bytes()).digest(), own.read_bytes()
    assert report(ADD, "--notebook", own, "-q", "-o", "out.html") == 0
    captured = capsys.readouterr()
    assert captured.out == "out.html\n"
    assert captured.err == ""
    page = (here / "out.html").read_text()
    assert page.lower().startswith("<!doctype html>")
    assert "Of my own" in page
    # 24 copies for page faults each way of the 36 + 36: counted by hand in the export.
    assert "speculative prefetch" in page
    assert "from nsan.report" not in page, "code is shown only with --code"
    assert sorted(path.name for path in here.iterdir()) == ["my.ipynb", "out.html"]
    assert before == (sha256(ADD.read_bytes()).digest(), own.read_bytes())


def test_code_is_shown_when_it_is_asked_for(here, own):
    assert report(ADD, "--notebook", own, "-q", "--code", "-o", "out.html") == 0
    assert "migrations_by_cause" in (here / "out.html").read_text()


def test_a_notebook_keeps_tables_and_pictures_for_any_reader_and_no_path(here, own):
    assert report(ADD, "--notebook", own, "-q", "-o", "out.ipynb") == 0
    ran = nbformat.read(here / "out.ipynb", as_version=4)
    nbformat.validate(ran)
    shown = ran.cells[-1].outputs[0].data
    assert set(shown) == {"text/plain", "text/markdown", "text/html"}
    text = (here / "out.ipynb").read_text()
    assert str(ROOT) not in text
    assert str(here) not in text
    assert "um_vector_add_rtx4060l.sqlite" in text


def test_the_default_name_is_that_of_the_trace_and_an_existing_file_is_refused_before_it_runs(
    here, own, capsys
):
    place = here / "report-um_vector_add_rtx4060l.md"
    place.write_text("mine")
    assert report(ADD, "--notebook", own, "--format", "markdown") == 1
    assert "--force-overwrite" in capsys.readouterr().err
    assert place.read_text() == "mine"
    assert report(ADD, "--notebook", own, "-q", "--format", "markdown", "--force-overwrite") == 0
    assert "| " in place.read_text()


def test_a_value_reaches_the_notebook_as_the_type_that_it_says(here):
    notebook = write(here / "my.ipynb", OWN, "print(LEAST + 1, type(LEAST).__name__)")
    assert report(ADD, "--notebook", notebook, "-q", "-p", "LEAST=41", "-o", "out.md") == 0
    assert "42 int" in (here / "out.md").read_text()


MARK = "open('it-ran', 'w').close()"


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (["-p", "MOST=1"], 2, "has no parameter 'MOST'"),
        (["-p", "LEAST=some"], 2, "LEAST is a whole number"),
        (["-p", "TRACE=x"], 2, "set by the argument TRACE already"),
        (["--filter-time", "0/1s"], 2, "has no parameter 'TIME'"),
        (["--rows", "3"], 2, "has no parameter 'ROWS'"),
        (["-o", "out.docx"], 2, ".docx is no format of a report"),
        (["-o", "out.html", "--format", "pdf"], 2, "contradict each other"),
        (["-o", "my.ipynb", "--force-overwrite"], 2, "never written to"),
        (["-o", "nowhere/out.html"], 1, "its folder does not exist"),
        (["--snapshot", "none.pickle"], 1, "none.pickle: no such file"),
        (["-o", "x"], 2, "'x' names no format of a report"),
    ],
)
def test_what_cannot_be_is_one_message_before_anything_runs(here, capsys, options, status, said):
    notebook = write(here / "my.ipynb", OWN, MARK)
    before = notebook.read_bytes()
    assert report(ADD, "--notebook", notebook, *options) == status
    error = capsys.readouterr().err
    assert error.startswith("nsan: ")
    assert said in error
    assert [path.name for path in here.iterdir()] == ["my.ipynb"]
    assert notebook.read_bytes() == before


def test_a_notebook_without_the_tag_or_for_another_language_never_runs(here, capsys):
    for given, said in (({"tags": ()}, "no cell tagged"), ({"language": "R"}, "its language is R")):
        notebook = write(here / "my.ipynb", OWN, MARK, **given)
        assert report(ADD, "--notebook", notebook) == 1
        assert said in capsys.readouterr().err
    for content in ("{}", "[1, 2]", "not JSON", '{"cells": 3, "nbformat": 4, "nbformat_minor": 5}'):
        (here / "my.ipynb").write_text(content)
        assert report(ADD, "--notebook", "my.ipynb") == 1
        assert "my.ipynb is no Jupyter notebook" in capsys.readouterr().err
    assert report(ADD, "--notebook", "none.ipynb") == 1
    assert "none.ipynb: no such file" in capsys.readouterr().err
    assert [path.name for path in here.iterdir()] == ["my.ipynb"]


def test_a_trace_that_cannot_be_read_is_told_before_a_kernel_is_started(here, own, capsys):
    bad = here / "bad.sqlite"
    bad.write_bytes(b"not a database")
    assert report(bad, "--notebook", own, "-o", "out.html") == 1
    assert "bad.sqlite" in capsys.readouterr().err
    assert not (here / "out.html").exists()


def test_a_filter_that_names_nothing_is_told_before_a_kernel_is_started(here, capsys):
    assert report(ADD, "--gpu", "7", "-o", "out.html") == 2
    assert "7" in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_a_notebook_that_fails_says_where_and_keeps_what_ran(here, capsys):
    notebook = write(here / "my.ipynb", OWN, "print('so far')", "1 / 0", MARK)
    assert report(ADD, "--notebook", notebook, "-q", "-o", "out.html") == 1
    error = capsys.readouterr().err
    assert "my.ipynb, code cell 3: ZeroDivisionError: division by zero" in error
    assert "out-failed.ipynb" in error
    assert "Traceback" not in error
    kept = (here / "out-failed.ipynb").read_text()
    assert "so far" in kept
    assert str(ROOT) not in json.dumps(json.loads(kept)["metadata"])
    assert sorted(path.name for path in here.iterdir()) == ["my.ipynb", "out-failed.ipynb"]


def test_a_hostile_name_of_a_file_is_only_a_name(here):
    name = "a {TRACE} '$(x)' `y` <b>.sqlite"
    (here / name).write_bytes(ADD.read_bytes())
    notebook = write(here / "my {x}.ipynb", OWN, SHOWS)
    assert report(name, "--notebook", notebook, "-q", "-o", "out {0}.html") == 0
    page = (here / "out {0}.html").read_text()
    assert "<b>.sqlite" not in page
    assert "&lt;b&gt;.sqlite" in page


def test_a_trace_with_nothing_recorded_gives_a_short_report_that_says_what_to_record(
    here, built, capsys
):
    empty = built(x.Export().add(x.KERNEL, x.kernel(0, 1000)))
    assert report(empty, "-o", "out.md") == 3
    captured = capsys.readouterr()
    assert captured.out == "out.md\n"
    assert "no Unified Memory data" in captured.err
    text = (here / "out.md").read_text()
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings == [
        "## What was recorded",
        "## The verdict",
        "## PyTorch's caching allocator",
        "## Where these figures come from",
    ]
    assert "Either the program uses no managed memory, or it was not seen." in text
    assert not (here / "out_files").exists(), "there is no chart"


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_kernel_and_leaves_nothing(here, number):
    wait = "import os, time, pathlib\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(600)"
    notebook = write(here / "my.ipynb", OWN, wait)
    command = [
        sys.executable,
        "-m",
        "nsan",
        "report",
        ADD,
        "--notebook",
        notebook,
        "-o",
        "out.html",
    ]
    with subprocess.Popen(
        list(map(str, command)),
        cwd=here,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as running:
        place = here / "pid"
        for _ in range(600):
            if place.exists() and place.read_text():
                break
            threading.Event().wait(0.1)
        kernel = int(place.read_text())
        running.send_signal(number)
        _, said = running.communicate(timeout=60)
    assert running.returncode == {signal.SIGINT: 130, signal.SIGTERM: 128 + signal.SIGTERM}[number]
    assert "Traceback" not in said
    assert sorted(path.name for path in here.iterdir()) == ["my.ipynb", "pid"]
    with pytest.raises(ProcessLookupError):
        os.kill(kernel, 0)


def test_what_is_not_installed_is_told_with_the_command_that_installs_it(here):
    code = (
        "import sys, importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'papermill' else find(name, *rest)\n"
        "from nsan.cli import main\n"
        f"sys.exit(main(['report', {str(ADD)!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=here, check=False
    )
    assert done.returncode == 1
    assert "papermill" in done.stderr
    assert "pip install 'nsan[report]'" in done.stderr
    assert list(here.iterdir()) == []


def test_a_notebook_of_nsan_is_named_in_short_and_one_without_a_trace_needs_none(here, capsys):
    notebook = write(here / "my.ipynb", "LEAST: int = 1", "print('least', LEAST)")
    assert report("--notebook", notebook, "-q", "-p", "LEAST=3", "--format", "markdown") == 0
    assert capsys.readouterr().out == "report-my.md\n"
    assert "least 3" in (here / "report-my.md").read_text()
    assert report(ADD, "--notebook", notebook, "-q", "-o", "out.md") == 2
    assert "has no parameter 'TRACE'" in capsys.readouterr().err
    assert report(ADD, "--notebook", "compare", "-q", "-p", "LEAST=1", "-o", "out.md") == 2
    assert "03-compare.ipynb has no parameter 'LEAST'" in capsys.readouterr().err
    assert report("-o", "out.md") == 2
    assert "Give a trace" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--rows", "0"], ["-p", "ROWS=-5"], ["-p", "THEME=pink"]])
def test_a_table_without_rows_and_a_theme_that_is_none_are_refused_before_anything_runs(
    here, capsys, options
):
    assert report(ADD, *options) == 2
    assert options[-1].partition("=")[2] in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_a_notebook_of_an_older_format_runs(here):
    cell = {
        "cell_type": "code",
        "collapsed": False,
        "input": 'TRACE = ""\nprint("of old")',
        "language": "python",
        "metadata": {"tags": ["parameters"]},
        "outputs": [],
        "prompt_number": 1,
    }
    old = {
        "metadata": {"name": ""},
        "nbformat": 3,
        "nbformat_minor": 0,
        "worksheets": [{"cells": [cell], "metadata": {}}],
    }
    (here / "old.ipynb").write_text(json.dumps(old))
    assert report(ADD, "--notebook", "old.ipynb", "-q", "-o", "out.md") == 0
    assert "of old" in (here / "out.md").read_text()


CHART = """\
from nsan.report.report import Report

Report(TRACE).chart("migrations_over_time")
"""


def test_markdown_has_its_pictures_beside_it_and_a_disk_that_is_full_leaves_nothing(
    here, capsys, monkeypatch
):
    notebook = write(here / "my.ipynb", OWN, CHART)
    command = (ADD, "--notebook", notebook, "-q", "-o", "out.md")

    def full(self, data, write_bytes=Path.write_bytes):
        if self.suffix == ".svg":
            write_bytes(self, data[:100])
            raise OSError(28, "No space left on device")
        return write_bytes(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        assert report(*command) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert [path.name for path in here.iterdir()] == ["my.ipynb"]

    assert report(*command) == 0
    text = (here / "out.md").read_text()
    (picture,) = (here / "out_files").iterdir()
    assert f"](out_files/{picture.name})" in text
    assert picture.read_text().startswith("<svg")
    assert sorted(path.name for path in here.iterdir()) == ["my.ipynb", "out.md", "out_files"]


def test_a_link_that_leads_nowhere_is_a_file_that_is_there(here, own, capsys):
    (here / "out.html").symlink_to("nowhere.html")
    assert report(ADD, "--notebook", own, "-o", "out.html") == 1
    assert "--force-overwrite" in capsys.readouterr().err
    assert (here / "out.html").is_symlink()


def test_without_standard_output_the_report_is_written_all_the_same(here, own):
    command = (
        f'exec "{sys.executable}" -m nsan report "{ADD}" --notebook {own.name} -q -o out.html >&-'
    )
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert "speculative prefetch" in (here / "out.html").read_text()
    assert "standard output" in done.stderr
    assert "Traceback" not in done.stderr
