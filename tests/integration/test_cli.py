"""The command line as people and programs use it."""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import exports as x
import polars as pl
import pytest

from nsan import cli
from nsan.cli import COMMANDS, main

ANSI = "\x1b"


def sample():
    """Migrations of two causes, faults of both kinds, kernels, a range."""
    return (
        x.Export()
        .add(
            x.MEMCPY,
            x.migration(1_000, 2_000, 4096),
            x.migration(2_000, 5_000, 61_440, x.VA + 4096, cause=x.PREFETCH),
            x.migration(8_000, 9_000, 4096, kind=x.DTOH),
        )
        .add(x.GPU_FAULTS, x.gpu_fault(500, 6_000, n=3), x.gpu_fault(6_100, 6_200, n=2, access=2))
        .add(x.CPU_FAULTS, x.cpu_fault(7_500))
        .add(x.KERNEL, x.kernel(400, 7_000))
        .add(x.NVTX, x.nvtx(0, 3_000, "step"))
        .add(x.MEMORY, x.memory_event(0, x.VA, 65_536))
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(autouse=True)
def _shared_cache(_own_cache, monkeypatch, place):
    """The exports of this file never change, so one import of each is enough."""
    monkeypatch.setenv("NSAN_CACHE_DIR", str(place / "cache"))


@pytest.fixture(scope="module")
def trace(place):
    return sample().write(place / "a trace.sqlite")


@pytest.fixture(scope="module")
def bare(place):
    """A capture without anything of Unified Memory."""
    return x.Export().add(x.KERNEL, x.kernel(0, 10)).write(place / "bare.sqlite")


@pytest.fixture
def nsan(capfd):
    """Run a command line; return its status, stdout and stderr."""

    def run(*arguments):
        status = main([str(argument) for argument in arguments])
        return status, *capfd.readouterr()

    return run


def child(*arguments, **more):
    """Run nsan as a program of its own."""
    return subprocess.run(
        [sys.executable, "-m", "nsan", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **more,
    )


def python(code, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- one way in


def test_a_file_alone_is_its_summary(nsan, trace):
    alone, named = nsan(trace), nsan("summary", trace)
    assert alone == named
    assert alone[0] == 0
    assert "a trace.sqlite" in alone[1]
    assert nsan(trace, "--json") == nsan("summary", trace, "--json")


def test_a_store_is_a_trace_too(nsan, trace, tmp_path):
    status, out, _ = nsan("import", trace, "-o", tmp_path / "store")
    assert (status, out) == (0, f"{tmp_path / 'store'}\n")
    assert nsan("summary", tmp_path / "store", "--json")[1] == nsan(trace, "--json")[1]


def test_help_lists_every_command_and_each_has_help(nsan):
    status, out, err = nsan("--help")
    assert (status, err) == (0, "")
    for command in COMMANDS:
        assert f"  {command} " in out
        status, own, err = nsan(command, "--help")
        assert (status, err) == (0, "")
        assert own.startswith(f"usage: nsan {command} ")


def test_the_version_is_that_of_the_package(nsan):
    from nsan import __version__

    assert nsan("--version") == (0, f"nsan {__version__}\n", "")


# -- formats

TABLES = {
    "migrations": (
        "direction,cause,device_id,pid,n,bytes,bytes_fraction,min_bytes,max_bytes,"
        "busy_ns,bytes_per_s,min_va,max_va"
    ),
    "faults": "processor,access,device_id,pid,n_rows,n_page_faults,n_addresses,n_va_blocks",
}


@pytest.mark.parametrize("command", ["summary", "info", "migrations", "faults"])
def test_json_is_one_document_with_its_version(nsan, trace, command):
    status, out, err = nsan(command, trace, "--json")
    assert (status, err) == (0, "")
    document = json.loads(out)
    assert document["schema"] == 1
    assert document["source"] == "a trace.sqlite"
    assert nsan(command, trace, "--format", "json") == (0, out, "")


@pytest.mark.parametrize("command", ["summary", "info", "migrations", "faults"])
def test_markdown_and_tables_tell_the_same_story(nsan, trace, command):
    status, plain, _ = nsan(command, trace, "--format", "table")
    assert status == 0
    assert nsan(command, trace)[1] == plain
    status, markdown, _ = nsan(command, trace, "--format", "markdown")
    assert status == 0
    lines = markdown.splitlines()
    assert any(set(line) <= set("|:- ") and line.startswith("|") for line in lines) == (
        "---" in plain
    )
    assert ANSI not in plain + markdown


@pytest.mark.parametrize("command", ["summary", "info"])
def test_csv_of_a_document_is_keys_and_values(nsan, trace, command):
    status, out, err = nsan(command, trace, "--format", "csv")
    assert (status, err) == (0, "")
    rows = list(csv.reader(io.StringIO(out)))
    assert rows[0] == ["key", "value"]
    assert dict(rows[1:])["source"] == "a trace.sqlite"


@pytest.mark.parametrize(("command", "header"), TABLES.items())
def test_csv_of_a_table_has_the_documented_columns(nsan, trace, command, header):
    status, out, err = nsan(command, trace, "--format", "csv")
    assert (status, err) == (0, "")
    assert out.splitlines()[0] == header
    assert len(out.splitlines()) == 4


def test_csv_of_migrations_holds_raw_numbers(nsan, trace):
    rows = list(csv.DictReader(io.StringIO(nsan("migrations", trace, "--format", "csv")[1])))
    assert [(r["direction"], r["cause"], r["n"], r["bytes"], r["busy_ns"]) for r in rows] == [
        ("htod", "prefetch", "1", "61440", "3000"),
        ("htod", "coherence", "1", "4096", "1000"),
        ("dtoh", "coherence", "1", "4096", "1000"),
    ]
    assert rows[0]["min_va"] == "0x00007f0000001000"
    assert float(rows[0]["bytes_per_s"]) == 61440 / 3000 * 1e9
    assert sum(float(row["bytes_fraction"]) for row in rows) == pytest.approx(1)


def test_csv_of_faults_leaves_empty_what_a_cpu_fault_does_not_have(nsan, trace):
    rows = list(csv.DictReader(io.StringIO(nsan("faults", trace, "--format", "csv")[1])))
    [cpu] = [row for row in rows if row["processor"] == "CPU"]
    assert (cpu["access"], cpu["device_id"], cpu["n_page_faults"]) == ("", "", "")
    assert (cpu["n_rows"], cpu["pid"]) == ("1", str(x.PID))


@pytest.mark.parametrize(("command", "header"), TABLES.items())
def test_parquet_has_the_documented_columns(nsan, trace, tmp_path, command, header):
    out = tmp_path / "out.parquet"
    status, text, err = nsan(command, trace, "--format", "parquet", "-o", out)
    assert (status, text, err) == (0, "", "")
    frame = pl.read_parquet(out)
    assert frame.columns == header.split(",")
    assert frame.height == 3
    assert all(frame.schema[name].is_integer() for name in ("device_id", "pid"))


def test_parquet_of_no_rows_has_its_columns(nsan, tmp_path):
    trace = x.Export().add(x.GPU_FAULTS, x.gpu_fault(0, 1)).write(tmp_path / "a.sqlite")
    status, _, err = nsan("migrations", trace, "--format", "parquet", "-o", tmp_path / "m.parquet")
    assert status == 0
    assert "there was none" in err
    assert pl.read_parquet(tmp_path / "m.parquet").columns == TABLES["migrations"].split(",")


@pytest.mark.parametrize("command", ["migrations", "faults"])
def test_parquet_needs_a_file(nsan, trace, command):
    status, out, err = nsan(command, trace, "--format", "parquet")
    assert (status, out) == (2, "")
    assert "-o FILE" in err


@pytest.mark.parametrize("command", ["summary", "info"])
def test_a_document_is_no_parquet_table(nsan, trace, tmp_path, command):
    status, out, err = nsan(command, trace, "--format", "parquet", "-o", tmp_path / "a.parquet")
    assert (status, out) == (2, "")
    assert "--json" in err
    assert not (tmp_path / "a.parquet").exists()


@pytest.mark.parametrize("form", ["table", "markdown", "csv"])
def test_rows_limits_a_table(nsan, trace, form):
    out = nsan("migrations", trace, "--format", form, "--rows", "1")[1]
    assert "prefetch" in out
    assert "dtoh" not in out.lower()
    if form != "csv":
        assert "(2 more rows)" in out


def test_rows_limits_the_table_of_a_summary(nsan, trace):
    assert "DtoH" not in nsan(trace, "--rows", "1")[1]
    assert "DtoH" in nsan(trace, "--rows", "3")[1]


@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5"])
def test_rows_is_a_number_above_none(nsan, trace, value):
    status, out, err = nsan("migrations", trace, "--rows", value)
    assert (status, out) == (2, "")
    assert "--rows" in err


# -- files


@pytest.mark.parametrize("command", ["summary", "info", "migrations", "faults"])
@pytest.mark.parametrize("form", ["table", "markdown", "csv", "json"])
def test_a_result_in_a_file_is_the_one_on_stdout(nsan, trace, tmp_path, command, form):
    printed = nsan(command, trace, "--format", form)[1]
    assert nsan(command, trace, "--format", form, "-o", tmp_path / "out.txt") == (0, "", "")
    assert (tmp_path / "out.txt").read_text() == printed


@pytest.mark.parametrize("form", ["json", "parquet"])
def test_a_file_is_not_replaced_without_being_asked(nsan, trace, tmp_path, form):
    out = tmp_path / "out"
    out.write_text("mine")
    status, text, err = nsan("migrations", trace, "--format", form, "-o", out)
    assert (status, text) == (1, "")
    assert "--force-overwrite" in err
    assert out.read_text() == "mine"
    assert nsan("migrations", trace, "--format", form, "-o", out, "--force-overwrite")[0] == 0
    assert out.read_bytes() != b"mine"


@pytest.mark.parametrize("form", ["json", "parquet"])
def test_a_file_that_cannot_be_written_is_an_error_in_words(nsan, trace, tmp_path, form):
    status, out, err = nsan("migrations", trace, "--format", form, "-o", tmp_path / "no" / "out")
    assert (status, out) == (1, "")
    assert "Traceback" not in err
    assert "No such file" in err


def test_an_import_does_not_replace_another_store_without_being_asked(nsan, trace, bare, tmp_path):
    store = tmp_path / "store"
    assert nsan("import", trace, "-o", store)[0] == 0
    status, out, err = nsan("import", bare, "-o", store)
    assert (status, out) == (1, "")
    assert "--force-overwrite" in err
    assert json.loads(nsan("info", store, "--json")[1])["source"] == "a trace.sqlite"
    assert nsan("import", bare, "-o", store, "--force-overwrite")[0] == 0
    assert json.loads(nsan("info", store, "--json")[1])["source"] == "bare.sqlite"


def test_an_import_does_not_replace_what_is_no_store(nsan, trace, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    status, _, _ = nsan("import", trace, "-o", tmp_path / "mine", "--force-overwrite")
    assert status == 1
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_the_export_is_never_changed_and_nothing_appears_beside_it(nsan, tmp_path):
    trace = sample().write(tmp_path / "mine.sqlite")
    before = trace.read_bytes()
    trace.chmod(0o444)
    for command in ("summary", "info", "migrations", "faults", "import"):
        assert nsan(command, trace)[0] == 0
    assert trace.read_bytes() == before
    assert list(tmp_path.iterdir()) == [trace]


# -- exit status, streams


def test_an_error_is_one_message_on_stderr(nsan, tmp_path):
    status, out, err = nsan(tmp_path / "none.sqlite")
    assert (status, out) == (1, "")
    assert err.startswith("nsan: ")
    assert "none.sqlite" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--nonsense"],
        ["summary"],
        ["summary", "TRACE", "--nonsense"],
        ["summary", "TRACE", "--format", "xml"],
        ["summary", "TRACE", "--filter-time", "soon/later"],
        ["summary", "TRACE", "--filter-time", "2s/1s"],
        ["summary", "TRACE", "--filter-time", "1s"],
        ["summary", "TRACE", "--gpu", "7"],
        ["summary", "TRACE", "--gpu", "x"],
        ["summary", "TRACE", "--pid", "1"],
        ["migrations", "TRACE", "--filter-nvtx", "nonsense"],
        ["summary", "TRACE", "-q", "-v"],
        ["info", "TRACE", "TRACE"],
    ],
    ids=" ".join,
)
def test_a_call_that_makes_no_sense_is_status_two(nsan, trace, arguments):
    status, out, err = nsan(*(trace if part == "TRACE" else part for part in arguments))
    assert (status, out) == (2, "")
    assert err
    assert "Traceback" not in err


def test_a_filter_that_matches_nothing_lists_what_there_is(nsan, trace):
    assert f"It has: {x.PID}" in nsan(trace, "--pid", "1")[2]
    assert "'step'" in nsan(trace, "--filter-nvtx", "stop")[2]


@pytest.mark.parametrize("command", ["summary", "migrations", "faults"])
def test_a_trace_without_unified_memory_is_status_three_with_its_result(nsan, bare, command):
    status, out, err = nsan(command, bare, "--json")
    assert status == 3
    assert json.loads(out)["source"] == "bare.sqlite"
    assert "bare.sqlite holds no Unified Memory data" in err
    assert nsan(command, bare, "--json", "-q") == (3, out, "")


def test_a_question_about_the_capture_is_no_question_about_unified_memory(nsan, bare):
    assert nsan("info", bare)[0] == 0


def test_a_part_without_rows_is_not_a_trace_without_data(nsan, trace):
    status, out, _ = nsan(trace, "--filter-time", "1s/2s", "--json")
    assert status == 0
    assert json.loads(out)["migrations"]["n"] == 0


def test_what_was_not_recorded_is_told_beside_every_format(nsan, tmp_path):
    options = {"COLLECT_UVM_GPU_PAGE_FAULTS": "false", "COLLECT_UVM_CPU_PAGE_FAULTS": None}
    export = x.Export(options=options).add(x.MEMCPY, x.migration(0, 10, 4096))
    trace = export.write(tmp_path / "a.sqlite")
    status, out, err = nsan("faults", trace)
    assert (status, err) == (0, "")
    assert "--cuda-um-gpu-page-faults=true" in out
    assert "not recorded" in out
    assert "unknown" in out
    status, out, err = nsan("faults", trace, "--format", "csv")
    assert (status, out) == (0, f"{TABLES['faults']}\n")
    assert "--cuda-um-gpu-page-faults=true" in err
    assert nsan("faults", trace, "--format", "csv", "-q")[2] == ""


@pytest.mark.parametrize("command", ["summary", "info", "migrations", "faults", "import"])
def test_quiet_leaves_the_result_alone_on_stdout(nsan, trace, command):
    status, out, err = nsan(command, trace, "-q")
    assert (status, err) == (0, "")
    assert out


def test_verbose_says_also_what_is_in_order(nsan, trace):
    said, more = nsan(trace)[1], nsan(trace, "-v")[1]
    assert "is known" not in said
    assert "Export schema 3.7.2 is known" in more


def test_filters_are_said_and_combine(nsan, trace):
    status, out, _ = nsan(
        "migrations", trace, "--filter-time", "1500ns/", "--filter-nvtx", "step", "--gpu", "0",
        "--pid", x.PID, "--json",
    )  # fmt: skip
    document = json.loads(out)
    assert status == 0
    assert document["windows_ns"] == [[1500, 3000]]
    assert document["migrations"]["n"] == 1  # the one that starts at 2000
    assert document["migrations"]["busy_ns"] == 1500  # 1500 to 2000, and 2000 to 3000


@pytest.mark.parametrize("window", ["0/99999999999h", "-99999999999h/0", "99999999999h/"])
def test_a_time_beyond_any_trace_is_no_crash(nsan, trace, window):
    status, out, err = nsan(trace, f"--filter-time={window}", "--json")
    assert "Traceback" not in err
    assert status in {0, 2}
    assert bool(out) == (status == 0)


# -- terminals and pipes


def run_in_terminal(arguments, **environment):
    """Run nsan with a pseudo-terminal as stdout; return what a person would see."""
    import pty

    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "nsan", *map(str, arguments)],
        stdout=theirs,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env={key: value for key, value in os.environ.items() if key != "NO_COLOR"}
        | {"TERM": "xterm"}
        | environment,
    ) as process:
        os.close(theirs)
        seen = b""
        while True:
            try:
                chunk = os.read(ours, 65536)
            except OSError:
                break
            if not chunk:
                break
            seen += chunk
        process.wait(60)
        os.close(ours)
        return process.returncode, seen.decode()


@pytest.mark.parametrize(
    ("environment", "colour"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colour_is_for_terminals_that_want_it(nsan, trace, environment, colour):
    nsan(trace)  # warm
    status, seen = run_in_terminal(["summary", trace, "-v"], **environment)
    assert status == 0
    assert (ANSI in seen) == colour


@pytest.mark.parametrize("words", [("summary", "-v"), ("analyse", "batches")], ids=lambda w: w[0])
def test_a_file_is_the_same_whatever_terminal_asked_for_it(nsan, trace, tmp_path, words):
    nsan(*words, trace, "-o", tmp_path / "piped")
    status, seen = run_in_terminal([*words, trace, "-o", tmp_path / "terminal"], COLUMNS="30")
    assert (status, seen) == (0, "")
    text = (tmp_path / "terminal").read_text()
    assert text == (tmp_path / "piped").read_text()
    assert ANSI not in text


def test_a_terminal_that_cannot_show_a_character_gets_a_substitute(tmp_path):
    export = x.Export().add(x.MEMCPY, x.migration(0, 10, 4096))
    export.add("PROCESSES", {"globalPid": x.global_pid(x.PID), "pid": x.PID, "name": "caf\u00e9"})
    trace = export.write(tmp_path / "a.sqlite")
    done = child(trace, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert r"caf\xe9" in done.stdout


def test_a_reader_that_is_gone_is_no_traceback(nsan, trace):
    nsan(trace)  # warm
    reader, writer = os.pipe()
    os.close(reader)
    with subprocess.Popen(
        [sys.executable, "-m", "nsan", "summary", str(trace), "--json"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(writer)
        _, err = process.communicate(timeout=60)
    assert err == ""
    assert process.returncode == 1


def test_the_first_line_of_a_pipe_can_be_taken(nsan, trace):
    nsan(trace)  # warm
    done = subprocess.run(
        f"'{sys.executable}' -m nsan info '{trace}' -v | head -1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("a trace.sqlite\n", "")


EVIL = "\x1b]0;pwned\x07\u202e<img src=x onerror=alert(1)>|![p](http:x)"


@pytest.fixture(scope="module")
def hostile(place):
    export = x.Export("2025.5.1")
    export.add(x.MEMCPY, x.migration(0, 10, 4096)).add(x.NVTX, x.nvtx(0, 5, EVIL))
    export.add(x.GPU, {"id": 0, "cuDevice": 0, "name": f"NVIDIA {EVIL}"})
    export.add("PROCESSES", {"globalPid": x.global_pid(x.PID), "pid": x.PID, "name": EVIL})
    row = {"timestamp": 1, "timestampType": 0, "source": 0, "severity": 3, "text": f"lost {EVIL}"}
    return export.add("DIAGNOSTIC_EVENT", row).write(place / "hostile.sqlite")


@pytest.mark.parametrize("form", ["table", "markdown", "json"])
@pytest.mark.parametrize("command", ["summary", "info", "migrations", "faults"])
def test_no_name_of_a_trace_acts_on_a_terminal(nsan, hostile, command, form):
    status, out, err = nsan(command, hostile, "-v", "--format", form)
    assert status == 0
    assert not {ANSI, "\x07"} & set(out + err)
    if form != "json":
        assert "\u202e" not in out + err


def test_no_name_in_a_message_acts_on_a_terminal(nsan, hostile):
    status, _, err = nsan(hostile, "--filter-nvtx", "none")
    assert status == 2
    assert "pwned" in err
    assert not {ANSI, "\x07", "\u202e"} & set(err)


def test_no_table_name_of_an_alien_database_acts_on_a_terminal(nsan, tmp_path):
    import sqlite3
    from contextlib import closing

    path = tmp_path / "alien.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute('CREATE TABLE "\x1b[31mred" (a)')
        connection.commit()
    status, _, err = nsan(path)
    assert status == 1
    assert "red" in err
    assert ANSI not in err


@pytest.mark.parametrize("command", ["summary", "info"])
def test_no_name_of_a_trace_is_a_tag_or_an_image_in_markdown(nsan, hostile, command):
    out = nsan(command, hostile, "-v", "--format", "markdown")[1]
    assert "pwned" in out
    assert "<img" not in out
    assert "![p](http:x)" not in out


def test_a_file_name_that_is_no_text_is_read_or_refused_in_words(tmp_path):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.sqlite"))
    try:
        path.write_bytes(sample().write(tmp_path / "a.sqlite").read_bytes())
    except OSError:
        pytest.skip("this file system takes no such name")
    for arguments in ([path], [path, "--json", "-o", tmp_path / "out.json"]):
        done = subprocess.run(
            [sys.executable, "-m", "nsan", *map(str, arguments)],
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert b"Traceback" not in done.stderr
        assert done.returncode in {0, 1}


# -- the JSON contract

INT, TEXT, LIST, NULL = int, str, list, type(None)
CAUSE = {"n": {INT}, "bytes": {INT}}
CONTRACT = {
    "schema": {INT},
    "nsan_version": {TEXT},
    "source": {TEXT},
    "nsys_version": {TEXT},
    "export_schema": {TEXT},
    "capture": {
        kind: {TEXT} for kind in ("gpu_faults", "cpu_faults", "migrations", "allocations", "nvtx")
    },
    "devices": {LIST},
    "processes": {LIST},
    "duration_ns": {INT},
    "gpu_faults": {
        "n_rows": {INT},
        "n_page_faults": {INT},
        "n_addresses": {INT},
        "n_va_blocks": {INT},
        "by_access": {
            "read": {"n_rows": {INT}, "n_page_faults": {INT}},
            "write": {"n_rows": {INT}, "n_page_faults": {INT}},
        },
    },
    "cpu_faults": {"n": {INT}},
    "migrations": {
        "n": {INT},
        "bytes": {INT},
        "htod_bytes": {INT},
        "dtoh_bytes": {INT},
        "dtod_bytes": {INT},
        "by_cause": {"coherence": CAUSE, "prefetch": CAUSE},
        "busy_ns": {INT},
        "min_va": {TEXT},
        "max_va": {TEXT},
    },
    "kernels": {"n": {INT}, "busy_ns": {INT}},
    "health": {LIST},
}


def breaches(document, contract, path=""):
    for key, wanted in contract.items():
        if key not in document:
            yield f"{path}{key} is missing"
        elif isinstance(wanted, dict):
            yield from breaches(document[key], wanted, f"{path}{key}.")
        elif type(document[key]) not in wanted:
            yield f"{path}{key} is {document[key]!r}"


def test_json_keeps_its_contract(nsan, trace):
    document = json.loads(nsan(trace, "--json")[1])
    assert list(breaches(document, CONTRACT)) == []
    assert document["schema"] == 1
    assert document["nsys_version"] == "2023.4.4.54"
    assert document["export_schema"] == "3.7.2"
    assert set(document["capture"].values()) == {"recorded"}


def test_the_figures_of_json_are_those_of_the_rows(nsan, trace):
    document = json.loads(nsan(trace, "--json")[1])
    faults, migrations = document["gpu_faults"], document["migrations"]
    assert (faults["n_rows"], faults["n_page_faults"]) == (2, 5)
    assert (faults["n_addresses"], faults["n_va_blocks"]) == (1, 1)
    assert faults["by_access"]["write"] == {"n_rows": 1, "n_page_faults": 2}
    assert document["cpu_faults"]["n"] == 1
    assert (migrations["n"], migrations["bytes"], migrations["busy_ns"]) == (3, 69_632, 5_000)
    assert migrations["htod_bytes"] == 65_536
    assert migrations["by_cause"]["coherence"] == {"n": 2, "bytes": 8192}
    assert migrations["min_va"] == "0x00007f0000000000"
    assert migrations["max_va"] == "0x00007f0000001000"
    assert document["kernels"] == {"n": 1, "n_graph_launches": 0, "busy_ns": 6_600}
    assert document["duration_ns"] == 9_000
    assert document["processes"] == [{"pid": x.PID, "name": None}]
    assert [device["device_id"] for device in document["devices"]] == [0]


def test_each_check_of_health_is_an_id_a_status_and_a_text(nsan, trace):
    health = json.loads(nsan(trace, "--json")[1])["health"]
    assert health
    for check in health:
        assert set(check) == {"id", "status", "text"}
        assert check["status"] in {"ok", "warn", "fail", "unknown"}
        assert check["text"]


def test_what_was_not_recorded_is_null_and_never_zero(nsan, tmp_path):
    options = dict.fromkeys(
        ("COLLECT_CUDA_TRACE", "COLLECT_UVM_GPU_PAGE_FAULTS", "COLLECT_UVM_CPU_PAGE_FAULTS"),
        "false",
    )
    trace = x.Export(options=options).write(tmp_path / "a.sqlite")
    document = json.loads(nsan(trace, "--json")[1])
    for part in ("gpu_faults", "cpu_faults", "migrations", "kernels"):
        assert document["capture"][part] == "not_recorded"
        assert set(document[part].values()) == {None}, part
        assert document["switches"][part].startswith("--")
    assert document["duration_ns"] is None


def test_an_unversioned_export_says_null_for_its_version(nsan, tmp_path):
    export = x.Export("unversioned").add(x.MEMCPY, x.migration(0, 10, 4096))
    document = json.loads(nsan(export.write(tmp_path / "a.sqlite"), "--json")[1])
    assert (document["nsys_version"], document["export_schema"]) == (None, None)


# -- doctor


def test_doctor_names_each_part_and_what_it_is_for(nsan, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    status, out, err = nsan("doctor")
    assert (status, err) == (0, "")
    for part in ("Python", "nsys", "jupyterlab", "chromium", "nvcc", "gpu", "cache folder"):
        assert part.lower() in out.lower()
    assert "To get what is missing" in out


def test_doctor_for_machines_says_where_each_part_stands(nsan, monkeypatch, tmp_path):
    program = tmp_path / "nsys"
    program.write_text("#!/bin/sh\necho NVIDIA Nsight Systems version 2025.9.9.1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}")
    monkeypatch.setenv("NSYS", str(program))
    status, out, _ = nsan("doctor", "--json")
    parts = {part["part"].lower(): part for part in json.loads(out)["parts"]}
    assert status == 0
    assert "2025.9.9.1" in parts["nsys"]["found"]
    assert parts["polars"]["status"] == "ok"
    assert parts["gpu"]["status"] == parts["nvcc"]["status"] == "missing"
    assert all({"part", "status", "found", "purpose", "get"} == set(p) for p in parts.values())


# -- which libraries each way loads

HEAVY = ("polars", "sqlalchemy", "altair", "adbc_driver_sqlite", "pandas", "numpy", "papermill")


def test_importing_nsan_imports_no_third_party_library():
    code = """
import sys
before = set(sys.modules)
import nsan
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(new - set(sys.stdlib_module_names) - {"nsan"}))
"""
    assert python(code).strip() == "[]"


def test_help_imports_nothing_heavy():
    code = f"""
import sys
from nsan.cli import main
assert main(["--help"]) == 0
print("imported:", [name for name in {HEAVY} if name in sys.modules])
"""
    assert python(code).strip().endswith("imported: []")


@pytest.mark.parametrize("form", ["table", "json"])
def test_a_warm_summary_reads_a_manifest_and_nothing_else(nsan, trace, form):
    nsan(trace)  # the first time imports the export
    code = f"""
import sys
from nsan.cli import main
assert main(["summary", sys.argv[1], "--format", "{form}"]) == 0
print("imported:", [name for name in {HEAVY} if name in sys.modules])
"""
    assert python(code, trace).strip().endswith("imported: []")


def test_python_dash_m_is_the_command_line(nsan, trace):
    done = child("summary", trace, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == nsan(trace, "--json")[1]
    assert child("summary", trace.with_name("none")).returncode == 1


def test_what_fails_because_compiled_code_swallowed_a_signal_is_not_shown(monkeypatch):
    def swallows(_args):
        with contextlib.suppress(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        raise TypeError

    assert cli._run(argparse.Namespace(run=swallows)) == 143
    monkeypatch.setattr(os, "kill", lambda *_: None)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with pytest.raises(TypeError):
        cli._run(argparse.Namespace(run=swallows))
