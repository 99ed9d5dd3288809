"""`%load_ext nsan`: the commands of a notebook, and how it shows charts."""

from __future__ import annotations

import os
import re
import shutil
import sys

import exports as x
import polars as pl
import pytest
from vendor import need

import nsan

pytest.importorskip("IPython", reason="pip install 'nsan[lab]'")

SAMPLES = x.REPOSITORY / "sample_data"
SWEEP = SAMPLES / "model" / "oversubscribed_sweep" / "oversubscribed_sweep.sqlite"


class Kernel:
    """What a shell of Jupyter knows about whoever asked for the cell."""

    def __init__(self, *, allow_stdin):
        self._allow_stdin = allow_stdin


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """Start an IPython shell, with nsan loaded, in an empty folder."""
    from IPython.core.interactiveshell import InteractiveShell

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    started = InteractiveShell()
    started.history_manager.enabled = False
    started.run_line_magic("load_ext", "nsan")
    yield started
    started.history_manager.end_session()
    InteractiveShell.clear_instance()


@pytest.fixture
def shown(monkeypatch):
    """Collect what is displayed."""
    things = []
    monkeypatch.setattr("nsan.cli.magics._display", things.append)
    return things


@pytest.fixture
def no_nsys(monkeypatch):
    monkeypatch.setattr("nsan.io.nsys_cli.find_nsys", lambda: None)


def run(shell, source):
    """Run a cell; a traceback would be a failure of nsan."""
    result = shell.run_cell(source)
    assert result.success, result.error_in_exec or result.error_before_exec
    return result


def test_a_file_gives_its_summary_and_its_explorer(shell, shown, capsys):
    run(shell, f"%nsan {SWEEP}")
    out = capsys.readouterr().out
    assert out.startswith("oversubscribed_sweep.sqlite\n")
    assert re.search(r"Unified Memory migrations: 8.441,", out)
    assert shown == [shell.user_ns["explorer"]]
    assert shell.user_ns["trace"].migrations.collect().height == 8441


@pytest.mark.usefixtures("shown")
def test_the_filters_of_the_summary_hold_for_the_explorer_too(shell, capsys):
    run(shell, f"%nsan {SWEEP} --filter-time 70ms/")
    assert "filtered: rows that start in the window" in capsys.readouterr().out
    # Plain SQL on the export: copies of kind 11 to 13 that start at 70 ms or later.
    assert shell.user_ns["trace"].migrations.collect().height == 192
    assert shell.user_ns["explorer"].selection.filter(table="migrations").height == 192


def test_a_file_that_is_not_there_is_one_message(shell, shown, capsys):
    run(shell, "%nsan nowhere.sqlite")
    err = capsys.readouterr().err
    assert err == "nsan: nowhere.sqlite: no such file or folder. Check the path.\n"
    assert not shown


@pytest.mark.usefixtures("shown")
def test_an_option_that_is_none_is_one_message(shell, capsys):
    run(shell, f"%nsan {SWEEP} --wrong")
    run(shell, "%nsan 'no end")
    said = capsys.readouterr().err
    assert [line.startswith("nsan: ") for line in said.splitlines()].count(True) == 2
    assert "unrecognized arguments: --wrong" in said
    assert "No closing quotation" in said


@pytest.mark.usefixtures("shown")
def test_a_name_with_spaces_and_a_home_is_found(shell, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copy(SWEEP, tmp_path / "my trace.sqlite")
    run(shell, "%nsan '~/my trace.sqlite'")
    assert capsys.readouterr().out.startswith("my trace.sqlite\n")


@pytest.mark.usefixtures("shown")
def test_a_name_that_attacks_stays_text(shell, tmp_path, capsys):
    name = "a<img src=x onerror=alert(1)>\x1b[31m\u202e.sqlite"
    shutil.copy(SWEEP, tmp_path / name)
    shell.run_line_magic("nsan", f"'{name}'")
    run(shell, "trace")
    shell.run_line_magic("nsan", f"'{name}x'")
    said = capsys.readouterr()
    assert said.out.count("a<img src=x onerror=alert(1)>\\x1b[31m\\x202e.sqlite") == 2
    assert not set(said.out + said.err) & {"\x1b", "\u202e"}


@pytest.mark.nsys
def test_a_python_cell_is_recorded_with_its_arguments_and_its_neighbours(
    shell, tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("NSYS", str(need("2023.4.4") / "nsys"))
    (tmp_path / "beside.py").write_text("WORD = 'neighbour'\n")
    cell = "import sys, beside\nprint(beside.WORD, *sys.argv[1:], sep='|')\n"
    run(shell, f"%%nsan_record --no-baseline -o run -- one 'two words'\n{cell}")
    out, err = capfd.readouterr()
    assert "neighbour|one|two words" in err  # what the program says goes where nsys' words go
    assert out.startswith("run.nsys-rep\n")
    assert err.count("Traceback") == 0
    assert isinstance(shell.user_ns["trace"], nsan.Trace)
    assert {p.name for p in tmp_path.glob("run.*")} == {"run.nsys-rep", "run.nsan.json"}


@pytest.mark.nsys
def test_a_shell_cell_is_recorded_under_the_name_that_was_asked_for(shell, monkeypatch, capfd):
    monkeypatch.setenv("NSYS", str(need("2023.4.4") / "nsys"))
    run(
        shell, "%%nsan_record --no-baseline --shell --name other -o run\necho $((6 * 7)) > result\n"
    )
    assert isinstance(shell.user_ns["other"], nsan.Trace)
    assert "trace" not in shell.user_ns
    assert "other is now this trace" in capfd.readouterr().err


@pytest.mark.nsys
def test_in_a_notebook_the_program_has_no_input_and_one_output(shell, monkeypatch, capfd):
    monkeypatch.setenv("NSYS", str(need("2023.4.4") / "nsys"))
    shell.kernel = Kernel(allow_stdin=True)
    kept, (reading, writing) = os.dup(0), os.pipe()
    os.dup2(reading, 0)  # as a kernel has it: a pipe that nobody writes to
    try:
        run(shell, "%%nsan_record --shell -o run\nwc -c; echo complaint >&2\n")
        assert os.fstat(0) == os.fstat(reading)
    finally:
        os.dup2(kept, 0)
        for number in (kept, reading, writing):
            os.close(number)
    out, err = capfd.readouterr()
    assert out.split()[:4] == ["0", "complaint", "0", "complaint"]  # alone, then under nsys
    assert "without nsys the program takes" in out
    assert err == ""


@pytest.mark.parametrize("options", ["", "--shell", "-o run"])
@pytest.mark.usefixtures("no_nsys")
def test_without_nsys_one_message_says_where_to_get_it(shell, tmp_path, capsys, options):
    run(shell, f"%%nsan_record {options}\nopen('ran', 'w')\n")
    err = capsys.readouterr().err
    assert err.count("nsan: ") == 1
    assert "Install NVIDIA Nsight Systems" in err
    assert "%env NSYS=" in err
    assert "Traceback" not in err
    assert not (tmp_path / "ran").exists()


@pytest.mark.usefixtures("no_nsys")
def test_all_that_is_missing_is_said_at_once(shell, monkeypatch, capsys):
    monkeypatch.setattr("nsan.cli.magics.shutil.which", lambda *_, **__: None)
    run(shell, "%%nsan_record --cuda\nint main() {}\n")
    err = capsys.readouterr().err
    assert "Install NVIDIA Nsight Systems" in err
    assert "Install the CUDA toolkit" in err


def test_what_the_compiler_says_of_a_cell_is_shown(shell, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("nsan.io.nsys_cli.find_nsys", lambda: sys.executable)
    compiler = tmp_path / "nvcc"
    compiler.write_text('#!/bin/sh\nfor last; do :; done; echo "$last(3): error: odd"; exit 2\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    run(shell, "%%nsan_record --cuda\nint main( {}\n")
    err = capsys.readouterr().err
    assert "nvcc cannot compile the cell (status 2):\ncell.cu(3): error: odd" in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("program", "'program' is no option"),
        ("--cuda --shell", "not allowed with argument"),
        ("--name 1x", "cannot be the name of a variable"),
        ("--no-base", "unrecognized arguments: --no-base"),
    ],
)
def test_a_line_that_cannot_be_meant_is_refused(shell, tmp_path, capsys, line, said):
    run(shell, f"%%nsan_record {line}\nopen('ran', 'w')\n")
    assert said in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("name", "kind"), [("nsan", "line"), ("nsan_record", "cell")])
def test_help_is_shown_and_the_notebook_goes_on(shell, capsys, name, kind):
    run(shell, f"%nsan {'--help'}" if kind == "line" else f"%%{name} --help\n1\n")
    assert f"{name} " in capsys.readouterr().out.splitlines()[0]


def chart_of():
    import altair as alt

    return alt.Chart(alt.InlineData([{"a": 1}])).mark_bar().encode(x="a:Q")


def bundle(shell, chart):
    return shell.display_formatter.format(chart)[0]


def test_a_chart_shows_as_a_picture_where_nobody_looks_on(shell):
    shell.kernel = Kernel(allow_stdin=False)
    data = bundle(shell, chart_of())
    assert data["image/svg+xml"].startswith("<svg")
    assert not [kind for kind in data if "vegalite" in kind or kind == "text/html"]


def test_a_chart_is_an_offline_widget_in_jupyterlab(shell):
    shell.kernel = Kernel(allow_stdin=True)
    data = bundle(shell, chart_of())
    assert "application/vnd.jupyter.widget-view+json" in data
    assert not [kind for kind in data if "vegalite" in kind or kind == "text/html"]
    import altair as alt

    assert "esm.sh" not in alt.JupyterChart._esm  # whence it is loaded otherwise


def test_a_renderer_that_the_user_chose_stays(shell):
    import altair as alt

    shell.kernel = Kernel(allow_stdin=True)
    with alt.renderers.enable("json"):
        assert "application/json" in bundle(shell, chart_of())


def test_the_limit_of_rows_and_the_renderer_of_altair_are_left_alone(shell):
    import altair as alt

    shell.kernel = Kernel(allow_stdin=False)
    bundle(shell, chart_of())
    assert alt.renderers.active == "default"
    assert alt.data_transformers.active == "default"
    with pytest.raises(alt.MaxRowsError):
        alt.Chart(pl.DataFrame({"a": range(5001)})).mark_bar().encode(x="a:Q").to_dict()


def test_unloading_puts_things_back(shell):
    shell.kernel = Kernel(allow_stdin=False)
    shell.run_line_magic("unload_ext", "nsan")
    assert shell.find_line_magic("nsan") is None
    assert shell.find_cell_magic("nsan_record") is None
    assert "image/svg+xml" not in bundle(shell, chart_of())
    shell.run_line_magic("load_ext", "nsan")
    assert "image/svg+xml" in bundle(shell, chart_of())


def test_loading_nsan_does_not_load_altair():
    import subprocess

    code = (
        "import sys; from IPython.core.interactiveshell import InteractiveShell as S;"
        "s = S.instance(); s.run_line_magic('load_ext', 'nsan');"
        "print('altair' in sys.modules, 'polars' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False False"
