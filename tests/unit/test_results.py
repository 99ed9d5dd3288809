"""`python -m benchmarks.results`: the document is whole, private things stay out of it, and agreement means what it says."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import exports as x
import pytest
import vendor as installed
from conftest import SOAK

from benchmarks import results
from benchmarks.peers import (
    contests,
    defects,
    files,
    machine,
    measuring,
    numpy_way,
    pandas_way,
    sql,
    tables,
    vendor,
)
from benchmarks.peers.agreement import Difference, compare
from benchmarks.peers.contests import QUESTIONS, Contest, Contestant, Setting
from benchmarks.peers.document import document

GAP = tables.GAP_NS
SMALL = ["--no-samples", "--sizes", "2", "--rounds", "1", "--reports", "2", "--megabytes", "0"]
ASKED = tuple(QUESTIONS) if SOAK else ("totals", "kernels", "snapshot")


def by_hand(tmp_path, **tables_of):
    """Write an export with all tables and these rows."""
    export = x.Export("2023.4.4", lazy=False)
    for table, rows in tables_of.items():
        export.add(getattr(x, table), *rows)
    return export.write(tmp_path / "by_hand.sqlite")


def answer(ask, path):
    return tables.answer(ask, [str(path)])


# --- The document ---------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """What the commands import is compiled once for all tests here, as on a user's machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path_factory.mktemp("pycache")))
        yield


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The command on tiny files: exit status and document."""
    written = tmp_path_factory.mktemp("results") / "RESULTS.md"
    only = [word for question in ASKED for word in ("--only", question)]
    status = results.main([*SMALL, *([] if SOAK else only), "-o", str(written)])
    return status, written.read_text()


def section(text, name):
    """The lines below a heading, up to the next."""
    (found,) = (part for part in text.split("\n## ")[1:] if part.startswith(name))
    return found.splitlines()[1:]


def rows_of(lines):
    """The cells of all rows of tables."""
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| ---")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in rows]


def test_the_document_has_a_table_for_each_question_that_was_asked(ran):
    _, text = ran
    for question in ASKED:
        lines = section(text, f"{list(QUESTIONS).index(question) + 1}. {QUESTIONS[question]}")
        names = [cells[0] for cells in rows_of(lines)]
        assert any("nsan" in name for name in names), question
    for other in ("In short", "How it is measured", "Who answers what", "Left out"):
        assert section(text, other)


def test_every_table_of_the_document_is_rectangular_and_full(ran):
    _, text = ran
    widths = set()
    for line in text.splitlines():
        if line.startswith("|"):
            widths.add(line.count("|"))
        else:
            assert len(widths) <= 1, line
            widths = set()
    assert "None" not in text
    assert "{" not in text


def test_nsan_sql_numpy_and_pandas_agree_and_the_exit_status_says_so(ran):
    status, text = ran
    assert status == 0
    lines = section(text, f"1. {QUESTIONS['totals']}")
    verdict = {cells[0]: cells[-1] for cells in rows_of(lines)}
    # 9 totals, and count and bytes of two causes.
    for name in (
        "`nsan summary`, first time",
        "`nsan summary`, again",
        "sqlite3 + NumPy",
        "pandas",
    ):
        assert verdict[name] == "agrees: 13 of 13 figures"


def test_each_row_has_time_memory_and_a_ratio_to_the_first_of_its_table(ran):
    _, text = ran
    rows = rows_of(section(text, f"1. {QUESTIONS['totals']}"))
    assert [cells[3] for cells in rows][:2] == ["ratio", "1"]
    for cells in rows[1:]:
        assert cells[1].endswith(" s")
        assert cells[5].endswith(" MB")
        assert float(cells[3]) > 0


def test_nothing_that_names_a_machine_or_a_person_is_in_the_document(ran):
    _, text = ran
    private = {
        socket.gethostname(),
        str(Path.home()),
        str(x.REPOSITORY),
        sys.prefix,
        "/tmp",
        "/opt",
    }
    private |= {os.environ.get("USER"), os.environ.get("LOGNAME"), os.environ.get("TMPDIR")}
    private |= {getpass.getuser()} - {"root"}
    for word in private - {None, "", "root", "/"}:
        assert word not in text


@pytest.mark.nsys
def test_the_vendor_is_in_the_document_where_it_is_installed(ran):
    _, text = ran
    for version in installed.VERSIONS:
        installed.need(version)
        assert f"nsys {version} |" in text


def test_who_is_not_installed_is_left_out_and_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NSAN_NSYS_PREFIX", str(tmp_path))
    monkeypatch.setattr(contests, "has", lambda package: package == "numpy")
    assert results.main([*SMALL, "--only", "functions"]) == 0
    text = capsys.readouterr().out
    left_out = section(text, "Left out")
    assert "- the vendor's reports and recipes: no nsys is installed." in left_out
    assert "- pandas: it is not installed here." in left_out
    names = {cells[0] for cells in rows_of(section(text, f"3. {QUESTIONS['functions']}"))}
    assert "sqlite3 + NumPy" in names
    assert not any("pandas" in name or "nsys" in name for name in names)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--sizes", "x"], "powers of ten"),
        (["--sizes", "0"], "from 1 to 8"),
        (["--rounds", "0"], "--rounds is at least 1"),
        (["--only", "nothing"], "invalid choice"),
    ],
)
def test_bad_arguments_end_with_one_message_before_anything_runs(words, told, capsys):
    with pytest.raises(SystemExit) as raised:
        results.main(words)
    assert raised.value.code == 2
    assert told in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_told_before_anything_runs(tmp_path, capsys):
    assert results.main(["-o", str(tmp_path / "none" / "RESULTS.md")]) == 2
    assert capsys.readouterr().err == f"{tmp_path / 'none'} is not a folder\n"


# --- Agreement ------------------------------------------------------------------------------------


def test_a_row_that_is_missing_or_too_many_is_a_difference():
    truth = {"t": {"a": {"n": 1}, "b": {"n": 2}}}
    found = compare({"t": {"a": {"n": 1}, "c": {"n": 3}}}, truth)
    assert found.n_equal == 1
    assert found.differences == (
        Difference("t", "b", "n", None, 2),
        Difference("t", "c", "n", 3, None),
    )


def test_what_is_not_said_is_no_difference_and_is_listed():
    truth = {"t": {"a": {"n": 1, "m": 5}}, "u": {"a": {"k": 1}}}
    found = compare({"t": {"a": {"n": 1}}}, truth)
    assert (found.n_compared, found.differences, found.silent) == (1, (), ("m", "u"))


def test_not_recorded_agrees_with_not_recorded_and_never_with_zero():
    truth = {"t": {"a": {"n": None, "m": 0}}}
    found = compare({"t": {"a": {"n": 0, "m": None}}}, truth)
    assert found.n_equal == 0
    assert compare(truth, truth).n_equal == 2


def held(*contestants, truth):
    env = dict(os.environ)
    said = json.dumps(truth)
    plain = Contestant("SQL", "sql", printing(said), env, read_json)
    made = [
        Contestant(name, kind, printing(text), env, read_json) for name, kind, text in contestants
    ]
    return results.hold(Contest("totals", "a file", [plain, *made]), 1)


def printing(text):
    return [sys.executable, "-I", "-c", f"print({text!r})"]


def read_json(taken):
    return json.loads(taken.output)


def test_a_wrong_figure_stands_in_the_document_beside_the_right_one():
    wrong = json.dumps({"totals": {"all": {"n": 7, "m": 2}}})
    outcome = held(("theirs", "vendor", wrong), truth={"totals": {"all": {"n": 9, "m": 2}}})
    text = document([("a", "b")], METHOD, [outcome], [], [])
    assert "| differs: 1 of 2 figures |" in text
    assert "- theirs: totals, all, `n`: 7 where SQL says 9." in text


def test_an_answer_that_cannot_be_read_is_no_answer():
    outcome = held(("theirs", "vendor", "not a table"), truth={"totals": {"all": {"n": 9}}})
    assert outcome.standings[1].agreement is None
    assert "- theirs: gave no answer (exit status 0)." in document([], METHOD, [outcome], [], [])


METHOD = {"rounds": 1, "slow": 4.0, "bare": "0 s", "made": "rows"}


def test_a_wrong_answer_of_nsan_is_told_and_ends_with_status_1(tmp_path, monkeypatch, capsys):
    truth = {"totals": {"all": {"n": 9}}}
    wrong = json.dumps({"totals": {"all": {"n": 8}}})
    outcome = held(("`nsan summary`", "nsan", wrong), truth=truth)
    monkeypatch.setattr(results, "results", lambda *_: ("text", [outcome]))
    assert results.main(["-o", str(tmp_path / "R.md")]) == 1
    assert "nsan does not agree with plain SQL: totals of a file" in capsys.readouterr().err
    assert (tmp_path / "R.md").read_text() == "text"


# --- What is true ---------------------------------------------------------------------------------


def test_totals_of_sql_are_those_worked_out_by_hand(tmp_path):
    path = by_hand(
        tmp_path,
        GPU_FAULTS=[x.gpu_fault(0, 5, n=3), x.gpu_fault(9, 12, n=4)],
        CPU_FAULTS=[x.cpu_fault(1)],
        MEMCPY=[
            x.migration(0, 1, 4096, x.VA),
            x.migration(1, 2, 8192, x.VA + 4096, kind=x.DTOH, cause=x.EVICTION),
            x.migration(2, 3, 100, x.VA + x.MIB, kind=x.DTOD),
            x.copy(0, 9, 77),  # a plain copy, not Unified Memory
        ],
    )
    found = answer(sql.totals, path)
    assert found["totals"]["all"] == {
        "n_migrations": 3, "htod_bytes": 4096, "dtoh_bytes": 8192, "dtod_bytes": 100,
        "min_va": x.VA, "max_va": x.VA + x.MIB, "n_fault_rows": 2, "n_page_faults": 7,
        "n_cpu_faults": 1,
    }  # fmt: skip
    assert found["by cause"] == {
        "htod 2": {"n": 1, "bytes": 4096},
        "dtoh 4": {"n": 1, "bytes": 8192},
        "dtod 2": {"n": 1, "bytes": 100},
    }


def test_a_table_that_is_absent_is_not_recorded(tmp_path):
    export = x.Export("2023.4.4").add(x.MEMCPY, x.migration(0, 1, 10))
    path = export.write(tmp_path / "lazy.sqlite")
    for way in (sql, numpy_way):
        figures = answer(way.totals, path)["totals"]["all"]
        assert (figures["n_page_faults"], figures["n_cpu_faults"]) == (None, None)
        assert figures["htod_bytes"] == 10


def test_a_fault_is_of_the_one_kernel_that_runs_when_it_is_raised(tmp_path):
    path = by_hand(
        tmp_path,
        KERNEL=[x.kernel(10, 20, name=1), x.kernel(20, 30, name=3), x.kernel(25, 40, name=3)],
        GPU_FAULTS=[
            x.gpu_fault(9, 99, n=1),  # before all
            x.gpu_fault(10, 11, n=2),  # at the very start
            x.gpu_fault(20, 21, n=4),  # the end is exclusive
            x.gpu_fault(25, 26, n=8),  # two run
            x.gpu_fault(39, 41, n=16),
            x.gpu_fault(12, 13, n=32, device=1),  # nothing runs on that GPU
        ],
    )
    assert answer(sql.kernels, path)["by kernel"] == {
        "unattributed": {"n_fault_rows": 2, "n_page_faults": 33},
        "add": {"n_fault_rows": 1, "n_page_faults": 2},
        "main": {"n_fault_rows": 2, "n_page_faults": 20},
        "ambiguous": {"n_fault_rows": 1, "n_page_faults": 8},
    }


def test_a_pause_as_long_as_the_gap_does_not_part_two_episodes(tmp_path):
    path = by_hand(
        tmp_path,
        GPU_FAULTS=[
            x.gpu_fault(0, 100),
            x.gpu_fault(10, 20),  # inside the first
            x.gpu_fault(100 + GAP, 100 + GAP + 5),
            x.gpu_fault(100 + 2 * GAP + 6, 100 + 2 * GAP + 9),
        ],
    )
    wanted = {
        "0": {"start_ns": 0, "n_fault_rows": 3, "end_ns": 105 + GAP},
        "1": {"start_ns": 106 + 2 * GAP, "n_fault_rows": 1, "end_ns": 109 + 2 * GAP},
    }
    for way in (sql, numpy_way, pandas_way):
        assert answer(way.episodes, path)["episodes"] == wanted


def test_busy_time_is_a_union_and_total_time_a_sum(tmp_path):
    moved = [
        x.migration(0, 10, 1),
        x.migration(5, 15, 1),
        x.migration(6, 7, 1),
        x.migration(20, 25, 1),
    ]
    path = by_hand(tmp_path, MEMCPY=moved)
    for way in (sql, pandas_way):
        found = answer(way.transfers, path)
        assert found["busy by cause"] == {"htod 2": {"busy_ns": 20}}
        assert found["by direction"]["htod"] == {
            "n": 4, "bytes": 4, "total_ns": 26, "min_ns": 1, "max_ns": 10
        }  # fmt: skip


def test_rows_of_several_files_carry_the_name_of_their_file(tmp_path):
    for name in ("a", "b"):
        x.Export("2023.4.4").add(x.MEMCPY, x.migration(0, 1, 10)).write(tmp_path / f"{name}.sqlite")
    found = tables.answer(sql.transfers, [str(tmp_path / "a.sqlite"), str(tmp_path / "b.sqlite")])
    assert list(found["by direction"]) == ["a htod", "b htod"]


@pytest.fixture(scope="module")
def asked_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    return [*(file.path for file in files.samples()), files.made(folder, 3_000).path]


@pytest.mark.parametrize("way", [numpy_way, pandas_way], ids=["numpy", "pandas"])
def test_the_plain_ways_give_the_answers_of_sql_on_the_files_they_are_asked_about(way, asked_files):
    for path in asked_files:
        for question, ask in way.QUESTIONS.items():
            if question in results._NOT_ASKED.get(path.stem, ()):
                continue
            found = compare(answer(ask, path), answer(sql.QUESTIONS[question], path))
            assert not found.differences, (path.name, question)


def test_made_files_have_the_rows_they_promise(tmp_path):
    path = files.made(tmp_path, 3_000).path
    figures = answer(sql.totals, path)["totals"]["all"]
    assert (figures["n_fault_rows"], figures["n_migrations"], figures["n_cpu_faults"]) == (
        3000,
        3000,
        60,
    )
    kernels = answer(sql.kernels, path)["by kernel"]
    # Three kernels' worth of faults, of which the last kernel was left out.
    assert kernels["unattributed"]["n_fault_rows"] == 1_000
    assert "ambiguous" not in kernels
    assert len(answer(sql.episodes, path)["episodes"]) == 3


# --- The vendor -----------------------------------------------------------------------------------


@pytest.mark.nsys
def test_known_defects_show_the_wrong_figure_beside_the_right_one(tmp_path):
    found = [one for one in vendor.installations() if one.version in installed.VERSIONS]
    for version in installed.VERSIONS:
        installed.need(version)
    env = results._environment(tmp_path)
    shown = {one.case.what: one for one in defects.ask(tmp_path, found, env)}
    # Of nsan what SQL says; of the vendor what `peers` found in the same small files by hand.
    assert shown["throughput"].truth == shown["throughput"].ours == "40,000 MB/s"
    assert set(shown["throughput"].by_version.values()) == {"0 MB/s"}
    absent = shown["a table is absent"]
    assert absent.truth == absent.ours == "5 page faults, 2,097,152 bytes; CPU faults not known"
    assert all(said.startswith("prints no table") for said in absent.by_version.values())
    assert shown["lowest address"].truth == shown["lowest address"].ours == "0x7f0000000000"
    assert set(shown["lowest address"].by_version.values()) == {"empty"}
    assert shown["device to device"].truth == shown["device to device"].ours == "9,000,000 bytes"
    assert set(shown["device to device"].by_version.values()) == {"2,000,000 bytes"}
    both = shown["two processes on two GPUs"]
    assert (both.truth, both.ours) == ("3 and 4", "3 and 4")
    assert set(both.by_version.values()) == {"7 in one row"}
    late = shown["a filter by time"]
    assert (late.truth, late.ours) == ("39 CPU page faults", "39 CPU page faults")
    lines = document([], METHOD, [], list(shown.values()), []).splitlines()
    assert len({line.count("|") for line in lines if line.startswith("| throughput")}) == 1
    assert late.by_version == {"2023.4.4": "200 CPU page faults", "2022.4.2": "has no such filter"}


def test_an_empty_cell_of_addresses_stays_empty_and_one_of_sizes_is_zero():
    text = "a,b,c,d,e,f\n1000,,2,3,,\n"
    assert vendor.totals(text) == {
        "totals": {
            "all": {
                "htod_bytes": 1000, "dtoh_bytes": 0, "n_cpu_faults": 2, "n_page_faults": 3,
                "min_va": None, "max_va": None,
            }
        }
    }  # fmt: skip


@pytest.mark.parametrize("text", ["", "SKIPPED: no such table\n"])
def test_a_report_that_prints_no_table_gives_no_answer(text):
    assert vendor.totals(text) is None
    assert vendor.places(text) is None
    assert vendor.functions(text) is None


def test_rows_by_address_are_added_up_to_va_blocks():
    block = x.VA // tables.BLOCK
    text = f"a,b,c,d,e,f\n{x.VA},10,,1,2,99\n{x.VA + 4096},5,7,,,1\n{x.VA + tables.BLOCK},1,,,,\n"
    assert vendor.places(text) == {
        "by VA block": {
            str(block): {"htod_bytes": 15, "dtoh_bytes": 7, "n_cpu_faults": 1, "n_page_faults": 2},
            str(block + 1): {
                "htod_bytes": 1,
                "dtoh_bytes": 0,
                "n_cpu_faults": 0,
                "n_page_faults": 0,
            },
        }
    }


# --- Measuring ------------------------------------------------------------------------------------

FORTY_MB = "b = bytearray(40_000_000)"


def test_peak_memory_is_that_of_the_whole_tree():
    child = f"{FORTY_MB}; import time; time.sleep(0.6)"
    parent = (
        f"import subprocess, sys; {FORTY_MB}\n"
        f"some = [subprocess.Popen([sys.executable, '-I', '-c', {child!r}]) for _ in range(2)]\n"
        "[one.wait() for one in some]"
    )
    taken = measuring.run([sys.executable, "-I", "-c", parent], os.environ)
    assert taken.status == 0
    assert taken.peak_bytes > 120_000_000


def test_a_command_over_its_limit_is_ended_with_all_it_started(tmp_path):
    mark = tmp_path / "pid"
    child = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-I', '-c', {child!r}])"
    taken = measuring.run([sys.executable, "-I", "-c", parent], os.environ, limit_s=3)
    assert taken.status is None
    assert ended(int(mark.read_text()))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_command_that_is_ended_from_outside_leaves_nothing_behind(tmp_path, number, status):
    scratch, written = tmp_path / "scratch", tmp_path / "R.md"
    scratch.mkdir()
    words = ["-m", "benchmarks.results", "--no-samples", "--sizes", "3", "--only", "kernels"]
    places = os.pathsep.join([str(x.REPOSITORY), str(x.REPOSITORY / "tests")])
    with subprocess.Popen(
        [sys.executable, *words, "-o", str(written)],
        env=os.environ | {"TMPDIR": str(scratch), "PYTHONPATH": places},
        stderr=subprocess.PIPE, text=True,
    ) as one:  # fmt: skip
        while "Page faults of each kernel" not in one.stderr.readline():
            assert one.poll() is None
        one.send_signal(number)
        one.communicate()
    assert one.returncode == status
    assert list(scratch.iterdir()) == []
    assert not written.exists()
    left = [place for place in Path("/proc").glob("[0-9]*/cmdline") if str(scratch) in said(place)]
    assert all(ended(int(place.parent.name)) for place in left)


def said(place):
    with contextlib.suppress(OSError):
        return place.read_text(errors="replace")
    return ""


def ended(pid):
    """Wait until a process is gone, or only waits to be reaped."""
    for _ in range(400):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_what_a_command_leaves_running_is_ended(tmp_path):
    mark = tmp_path / "pid"
    child = [sys.executable, "-I", "-c", "import time; time.sleep(600)"]
    parent = f"import subprocess; p = subprocess.Popen({child!r}); open({str(mark)!r}, 'w').write(str(p.pid))"
    assert measuring.run([sys.executable, "-I", "-c", parent], os.environ).status == 0
    assert ended(int(mark.read_text()))


def test_output_messages_and_exit_status_are_kept():
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    taken = measuring.run([sys.executable, "-I", "-c", code], os.environ)
    assert (taken.output, taken.messages, taken.status) == ("out\n", "err\n", 3)


def test_what_a_run_leaves_lies_in_the_scratch_folder_of_its_environment(tmp_path):
    # Where it is ended at an unlucky moment, it goes with that folder.
    look = [sys.executable, "-c", "import os; print(os.listdir(os.environ['TMPDIR']))"]
    taken = measuring.run(look, os.environ | {"TMPDIR": str(tmp_path)})
    assert "nsan-results-" in taken.output
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_is_not_there_gives_no_answer_and_stops_nobody():
    taken = measuring.run(["no-such-program-of-ours"], os.environ)
    assert taken.status == 127


def test_a_slow_command_runs_once_and_its_spread_is_not_known(monkeypatch):
    monkeypatch.setattr(results, "SLOW_S", 0)
    one = Contestant("SQL", "sql", printing("{}"), dict(os.environ), read_json)
    (standing,) = results.hold(Contest("totals", "a file", [one]), 3).standings
    assert len(standing.timed.runs) == 1
    assert standing.timed.spread is None


def test_the_first_time_of_nsan_is_without_a_store_and_the_second_with_one(tmp_path):
    setting = Setting(tmp_path, results._environment(tmp_path), [])
    file = files.samples()[0]
    cold, warm = (
        one for one in contests.about(setting, "totals", file).contestants if one.kind == "nsan"
    )
    assert (cold.first, warm.first) == (False, True)
    store = Path(cold.env["NSAN_CACHE_DIR"])
    (store / "stores").mkdir(parents=True)
    cold.before()
    assert not store.exists()
    assert store != Path(warm.env["NSAN_CACHE_DIR"])


def test_a_first_time_is_one_after_the_import_was_timed_too(tmp_path):
    setting = Setting(tmp_path, results._environment(tmp_path), [])
    file = files.made(tmp_path, 100)
    for one in contests.parquet(setting, file).contestants:
        if one.kind == "nsan":
            assert measuring.run(one.command, one.env).status == 0
    cold = next(
        one for one in contests.about(setting, "episodes", file).contestants if one.kind == "nsan"
    )
    cold.before()
    assert measuring.run(cold.command, cold.env).status == 0
    assert list(Path(cold.env["NSAN_CACHE_DIR"]).rglob("manifest.json"))


# --- The machine ----------------------------------------------------------------------------------


def test_the_document_itself_is_no_uncommitted_change(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-C", str(tmp_path)]
    (tmp_path / "RESULTS.md").write_text("old")
    (tmp_path / "code.py").write_text("1")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    (tmp_path / "RESULTS.md").write_text("new")
    assert "uncommitted" not in machine.commit(tmp_path / "RESULTS.md")
    (tmp_path / "code.py").write_text("2")
    assert machine.commit(tmp_path / "RESULTS.md").endswith(", with uncommitted changes")


def test_a_processor_is_named_in_words():
    assert not {"(", "@"} & set(machine.processor())
