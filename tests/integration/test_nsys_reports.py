"""Reports and raw streams: through the real nsys, and through fakes for what that one does not do."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from sqlite3 import connect

import exports as x
import pytest
from fake_nsys import fake
from polars.testing import assert_frame_equal
from vendor import VERSIONS, need

import nsan
from nsan.cli import main
from nsan.errors import NotAStoreError, OutputExistsError, StoreWriteError, UsageError
from nsan.io import nsys_cli
from nsan.nsys_errors import (
    ImporterNotFoundError,
    NotAReportError,
    NsysFailedError,
    NsysNoOutputError,
    NsysNotExecutableError,
    NsysNotFoundError,
    NsysTimeoutError,
    ReportCutShortError,
    ReportTooNewError,
    StreamVersionError,
)
from nsan.schema import TABLES

NEW, OLD = "2023.4.4", "2022.4.2"
HEAD = b"NVIDIA Tegra Profiler Report "
N_STEPS = 5

PROGRAM = r"""
#include <nvtx3/nvToolsExt.h>
int main(void) {
  nvtxDomainHandle_t domain = nvtxDomainCreateA("library");
  nvtxEventAttributes_t named = {0};
  named.version = NVTX_VERSION;
  named.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  named.messageType = NVTX_MESSAGE_TYPE_REGISTERED;
  named.message.registered = nvtxDomainRegisterStringA(domain, "registered");
  nvtxRangeStartA("never ended");
  nvtxRangePushA("outer \xc3\xa9");
  for (int i = 0; i < 5; ++i) {
    nvtxDomainRangePushEx(domain, &named);
    nvtxMarkA("mark");
    nvtxDomainRangePop(domain);
  }
  nvtxRangePushA("not \xff UTF-8");
  nvtxRangePop();
  nvtxRangePop();
  return 0;
}
"""
NAMES = sorted(["outer é", "not � UTF-8", "never ended", *["registered"] * N_STEPS])


def frames(path):
    trace = nsan.open_trace(path)
    return {name: getattr(trace, name).collect() for name in TABLES}


def assert_equal_tables(one, other):
    for name in TABLES:
        assert_frame_equal(one[name], other[name])


def contents(folder):
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None,
        )
        for path in sorted(folder.rglob("*"))
    }


def left_in_cache(tmp_path):
    """Stores, and whatever stands in the scratch folder."""
    cache = tmp_path / "cache"
    return [path.name for place in ("stores", "scratch") for path in (cache / place).glob("*")]


@pytest.fixture
def inputs(tmp_path):
    folder = tmp_path / "inputs"
    folder.mkdir()
    return folder


@pytest.fixture
def no_nsys(monkeypatch, tmp_path):
    """A machine without nsys."""
    monkeypatch.delenv("NSYS", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    monkeypatch.setattr(nsys_cli, "_FOLDERS", ())


@pytest.fixture
def use(monkeypatch, tmp_path):
    """Use a fake nsys, made as :func:`fake_nsys.fake` says."""

    def make(**how):
        made = fake(tmp_path / "fake" / "target-linux-x64" / "nsys", **how)
        monkeypatch.setenv("NSYS", str(made.program))
        return made

    return make


def a_report(path, raw=b"1.\n" + bytes(99)):
    path.write_bytes(HEAD + raw)
    return path


def export_of(path, *, n=3, start=1_000, report="r.nsys-rep", facts=()):
    """An export by hand, as nsys would make it of a report."""
    export = x.Export().add(x.MEMCPY, *(x.migration(i * 10, i * 10 + 5, 4096) for i in range(n)))
    export.add("TARGET_INFO_SESSION_START_TIME", {"utcEpochNs": start})
    export.write(path)
    with closing(connect(path)) as connection:
        rows = {
            "EXPORT_PARAM_INPUT_FILE": report,
            "EXPORT_PARAM_TABLES_TO_EXPORT": "",
            **dict(facts),
        }
        connection.executemany("INSERT INTO META_DATA_EXPORT VALUES (?, ?)", rows.items())
        connection.commit()
    return path


def n_migrations(path):
    return nsan.summary(path)["migrations"]["n"]


def older(path, than):
    """Make a file older than another."""
    at = than.stat().st_mtime_ns - 1_000_000_000
    os.utime(path, ns=(at, at))


# The real nsys


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """A small CPU program with NVTX ranges."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here: no program to record")
    folder = tmp_path_factory.mktemp("program")
    (folder / "program.c").write_text(PROGRAM)
    headers = need(NEW) / "nvtx" / "include"
    command = [compiler, f"-I{headers}", "program.c", "-o", "program", "-ldl"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)
    return folder / "program"


def record(nsys, program, output, suffix=".nsys-rep"):
    """Record a program; nsys sometimes finds no port for itself and has to be asked again."""
    command = [nsys, "profile", "--trace=nvtx,osrt", "--sample=none", "--cpuctxsw=none"]
    for _ in range(3):
        done = subprocess.run(
            [*command, "-o", output, program], capture_output=True, timeout=120, check=False
        )
        made = output.with_name(output.name + suffix)
        if made.is_file():
            return made
    pytest.fail(done.stdout.decode() + done.stderr.decode())


@pytest.fixture(scope="module")
def recordings(program, tmp_path_factory):
    """Reports by version of nsys, made when asked for."""
    folder, made = tmp_path_factory.mktemp("recordings"), {}

    def report(version):
        if version not in made:
            made[version] = record(need(version) / "nsys", program, folder / version)
        return made[version]

    return report


@pytest.fixture
def real_report(recordings, inputs):
    """A copy of a report, in a folder of its own."""

    def copy(version, name="r.nsys-rep"):
        return Path(shutil.copy(recordings(version), inputs / name))

    return copy


def real_export(version, kind, report, output):
    command = [need(version) / "nsys", "export", "--type", kind, "--output", output, report]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return output


@pytest.mark.nsys
@pytest.mark.parametrize("version", VERSIONS)
def test_a_report_its_exports_and_its_folders_give_equal_tables(
    version, real_report, tmp_path, monkeypatch
):
    report = real_report(version)
    monkeypatch.setenv("NSYS", str(need(version) / "nsys"))
    found = frames(report)
    assert sorted(found["nvtx_ranges"]["name"]) == NAMES
    assert found["nvtx_ranges"].filter(name="registered")["domain"].to_list() == ["library"] * 5
    assert found["nvtx_marks"]["name"].to_list() == ["mark"] * N_STEPS
    assert found["processes"]["name"].to_list() == ["program"]
    assert_equal_tables(
        found, frames(real_export(version, "sqlite", report, tmp_path / "r.sqlite"))
    )
    # Only newer versions export to folders.
    for kind in ("parquetdir", "arrowdir"):
        assert_equal_tables(found, frames(real_export(NEW, kind, report, tmp_path / kind)))


@pytest.mark.nsys
def test_each_way_in_says_what_it_was(real_report, tmp_path, monkeypatch):
    report = real_report(NEW)
    monkeypatch.setenv("NSYS", str(need(NEW) / "nsys"))
    opened = {
        "nsys-report": report,
        "nsys-sqlite": real_export(NEW, "sqlite", report, tmp_path / "r.sqlite"),
        "nsys-parquet": real_export(NEW, "parquetdir", report, tmp_path / "parquet"),
        "nsys-arrow": real_export(NEW, "arrowdir", report, tmp_path / "arrow"),
    }
    infos = {kind: nsan.open_trace(path).info for kind, path in opened.items()}
    assert [info.kind for info in infos.values()] == list(opened)
    assert [info.source for info in infos.values()] == [path.name for path in opened.values()]
    assert len({info.session_start_utc_ns for info in infos.values()}) == 1
    assert {info.nsys_version.rpartition(".")[0] for info in infos.values()} == {NEW}
    # The folders lack META_DATA_CAPTURE: what the switches were is unknown.
    assert infos["nsys-sqlite"].capture["gpu_faults"].answer == "not_recorded"
    assert infos["nsys-report"].capture == infos["nsys-sqlite"].capture
    assert infos["nsys-parquet"].capture["gpu_faults"].answer == "unknown"
    assert infos["nsys-arrow"].capture == infos["nsys-parquet"].capture
    assert infos["nsys-arrow"].capture["nvtx"].answer == "recorded"


@pytest.mark.nsys
def test_a_report_is_left_as_it_was_in_a_folder_with_an_odd_name(
    recordings, inputs, tmp_path, monkeypatch
):
    monkeypatch.setenv("NSYS", str(need(NEW) / "nsys"))
    folder = inputs / "ü b #%?"
    folder.mkdir()
    report = Path(shutil.copy(recordings(NEW), folder / "-ré port.x.nsys-rep"))
    folder.chmod(0o555)
    before = contents(inputs)
    try:
        assert sorted(frames(report)["nvtx_ranges"]["name"]) == NAMES
    finally:
        folder.chmod(0o755)
    assert contents(inputs) == before
    assert len(left_in_cache(tmp_path)) == 1


@pytest.mark.nsys
@pytest.mark.parametrize("version", VERSIONS)
def test_a_report_that_is_cut_short_or_none_is_named_so(
    version, real_report, monkeypatch, tmp_path
):
    monkeypatch.setenv("NSYS", str(need(version) / "nsys"))
    report = real_report(version)
    raw = report.read_bytes()
    report.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(ReportCutShortError, match="cut short"):
        nsan.open_trace(report)
    report.write_bytes(raw[:40])
    with pytest.raises(ReportCutShortError, match="Copy it again"):
        nsan.open_trace(report)
    report.write_bytes(b"\x00\x01report" * 99)
    with pytest.raises(NotAReportError, match="is not an nsys report"):
        nsan.open_trace(report)
    assert left_in_cache(tmp_path) == []


@pytest.mark.nsys
@pytest.mark.parametrize(
    ("made_by", "installed"), [(NEW, OLD), ("2026.1.1", OLD), ("2026.1.1", NEW)]
)
def test_a_report_newer_than_nsys_names_both_versions(
    made_by, installed, real_report, monkeypatch, capsys
):
    monkeypatch.setenv("NSYS", str(need(installed) / "nsys"))
    report = real_report(NEW)
    stamp = made_by.replace(".", "@").encode()
    report.write_bytes(report.read_bytes().replace(HEAD + b"2023@4@4", HEAD + stamp, 1))
    with pytest.raises(ReportTooNewError) as raised:
        nsan.open_trace(report)
    assert (raised.value.report_version, raised.value.nsys_version) == (made_by, installed)
    assert main([str(report)]) == 1
    err = capsys.readouterr().err
    assert f"Install at least {made_by}" in err
    assert "export it elsewhere" in err


@pytest.mark.nsys
def test_a_newer_nsys_in_the_usual_folders_helps_out_an_old_one_on_path(real_report, monkeypatch):
    old, new = need(OLD), need(NEW)
    monkeypatch.delenv("NSYS", raising=False)
    monkeypatch.setenv("PATH", str(old))
    monkeypatch.setattr(nsys_cli, "_FOLDERS", (str(new.parent.parent),))
    assert nsys_cli.find_nsys() == old / "nsys"
    assert frames(real_report(NEW))["nvtx_ranges"].height == len(NAMES)


@pytest.mark.nsys
def test_a_real_export_beside_is_used_only_for_its_own_recording(
    real_report, program, tmp_path, monkeypatch
):
    monkeypatch.setenv("NSYS", str(need(NEW) / "nsys"))
    report = real_report(NEW)
    beside = real_export(NEW, "sqlite", report, report.with_suffix(".sqlite"))
    with closing(connect(beside)) as connection:
        connection.execute("UPDATE NVTX_EVENTS SET text = 'from beside' WHERE text = 'mark'")
        connection.commit()
    assert set(frames(report)["nvtx_marks"]["name"]) == {"from beside"}
    # Profiled again under the same name: the export is of the run before.
    again = record(need(NEW) / "nsys", program, tmp_path / "again")
    again.replace(report)
    older(report, beside)
    assert set(frames(report)["nvtx_marks"]["name"]) == {"mark"}


@pytest.fixture(scope="module")
def stream(program, tmp_path_factory):
    """A raw stream, as an nsys without its importer leaves it."""
    folder = tmp_path_factory.mktemp("stream")
    target = folder / "nsys" / "target-linux-x64"
    target.mkdir(parents=True)
    for file in need(NEW).iterdir():
        (target / file.name).symlink_to(file)
    # nsys looks for its importer from where its own file is.
    (target / "nsys").unlink()
    shutil.copy(need(NEW) / "nsys", target / "nsys")
    return record(target / "nsys", program, folder / "run", suffix=".qdstrm")


@pytest.mark.nsys
def test_a_raw_stream_is_read_through_the_importer(stream, inputs, tmp_path, monkeypatch):
    monkeypatch.setenv("NSYS", str(need(NEW) / "nsys"))
    path = Path(shutil.copy(stream, inputs / "run é.qdstrm"))
    before = contents(inputs)
    trace = nsan.open_trace(path)
    assert (trace.info.kind, trace.info.source) == ("nsys-report", "run é.qdstrm")
    assert sorted(trace.nvtx_ranges.collect()["name"]) == NAMES
    assert contents(inputs) == before
    assert len(left_in_cache(tmp_path)) == 1  # the store


@pytest.mark.nsys
def test_a_raw_stream_needs_the_importer_of_its_version(stream, inputs, monkeypatch):
    path = Path(shutil.copy(stream, inputs / "run.qdstrm"))
    monkeypatch.setenv("NSYS", str(need(OLD) / "nsys"))
    with pytest.raises(StreamVersionError, match=f"Install Nsight Systems {NEW}"):
        nsan.open_trace(path)
    path.write_bytes(os.urandom(5000))
    with pytest.raises(NotAReportError, match="not a whole nsys stream"):
        nsan.open_trace(path)


# Ways to fail, by a fake

TOO_NEW = (
    "Exportation error: Report was created in Nsight Systems version (2026.1.1.54-2344v0), newer "
    "than your current version (2023.4.4.54-2344v0).\n"
    "Please update your Nsight Systems to the latest version to view this report."
)
WAYS = {
    "an unknown error": ({"status": 1, "says": "a\nb\nIt broke."}, NsysFailedError, "It broke."),
    "killed": ({"dies": True}, NsysFailedError, "was killed by signal 9"),
    "newer": ({"status": 1, "says": TOO_NEW}, ReportTooNewError, "Install at least 2026.1.1 "),
    "bad version": (
        {"status": 1, "says": "Exportation error: Version number is invalid: 2099@1@1@5-2v0"},
        ReportTooNewError,
        "made by nsys 2099.1.1; the nsys found here is 2023.4.4",
    ),
    "no version": (
        {"status": 1, "says": "Exportation error: Version number is invalid: xyz"},
        NotAReportError,
        "Version number is invalid",
    ),
    "cut short": (
        {"status": 1, "says": "Exportation error: Section Table Reference magic number mismatch."},
        ReportCutShortError,
        "Copy it again",
    ),
    "no report": (
        {"status": 1, "says": "Exportation error: Version tag is not found in the stream."},
        NotAReportError,
        "a file that `nsys profile` wrote",
    ),
    "existing output": (
        {"status": 1, "says": "Exportation error: File already exists: 'r.sqlite'."},
        OutputExistsError,
        "exists already",
    ),
    "no output": ({}, NsysNoOutputError, "left no output"),
    "empty output": ({"makes": "/dev/null"}, NsysNoOutputError, "an output of 0 bytes"),
    "full disk": (
        {"makes": "/dev/null", "says": "[tag_message*] = database or disk is full"},
        StoreWriteError,
        "No space left on device",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_way_that_nsys_fails_has_its_own_words(way, use, inputs, tmp_path, capsys):
    how, error, words = WAYS[way]
    report = a_report(inputs / "r.nsys-rep")
    made = use(**how)
    before = contents(inputs)
    with pytest.raises(error):
        nsan.open_trace(report)
    assert main([str(report)]) == 1
    out, err = capsys.readouterr()
    assert words in err
    assert out == ""
    assert "Traceback" not in err
    assert len(made.calls) == 2
    assert contents(inputs) == before
    assert left_in_cache(tmp_path) == []


def test_the_last_words_of_nsys_are_shown_without_its_progress(use, inputs):
    use(
        status=3,
        says="\r".join(f"Processing 9 events: [==={i}%    ]" for i in range(100)) + "\nWhy",
    )
    with pytest.raises(NsysFailedError) as raised:
        nsan.open_trace(a_report(inputs / "r.nsys-rep"))
    assert raised.value.lines == ["Why"]
    assert raised.value.status == 3


def test_an_nsys_that_hangs_is_stopped_with_its_children(use, inputs, tmp_path, monkeypatch):
    made = use(hangs=True)
    monkeypatch.setenv("NSAN_NSYS_TIMEOUT", "0.5")
    with pytest.raises(NsysTimeoutError, match=r"within 0.5 s.*\n.*NSAN_NSYS_TIMEOUT"):
        nsan.open_trace(a_report(inputs / "r.nsys-rep"))
    child = int(Path(f"{made.log}.child").read_text())
    assert is_gone(child)
    assert left_in_cache(tmp_path) == []


def test_an_interrupted_export_is_stopped_and_leaves_nothing(use, inputs, tmp_path):
    made = use(hangs=True)
    report = a_report(inputs / "r.nsys-rep")
    process = subprocess.Popen(
        [sys.executable, "-m", "nsan", report], stderr=subprocess.PIPE, text=True
    )
    child = Path(f"{made.log}.child")
    while process.poll() is None and not (child.exists() and child.read_text()):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert is_gone(int(child.read_text()))
    assert left_in_cache(tmp_path) == []


def is_gone(pid):
    """Wait until a process has ended; one that nobody has asked after yet is a zombie."""
    for _ in range(1000):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z":
                time.sleep(0.01)
                continue
        return True
    return False


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_a_time_limit_that_is_none_is_a_usage_error(text, use, inputs, monkeypatch):
    use()
    monkeypatch.setenv("NSAN_NSYS_TIMEOUT", text)
    with pytest.raises(UsageError, match="not a number of seconds above 0"):
        nsan.open_trace(a_report(inputs / "r.nsys-rep"))


@pytest.mark.parametrize("what", ["absent", "not executable", "a folder", "no program"])
def test_an_nsys_variable_that_names_no_program_says_so(
    what, inputs, tmp_path, monkeypatch, capsys
):
    named = tmp_path / "named"
    if what == "a folder":
        named.mkdir()
    elif what != "absent":
        named.write_bytes(b"\x7fgarbage")
        named.chmod(0o755 if what == "no program" else 0o644)
    monkeypatch.setenv("NSYS", str(named))
    with pytest.raises(NsysNotExecutableError, match="Set NSYS to the nsys program"):
        nsan.open_trace(a_report(inputs / "r.nsys-rep"))
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert "nsys" in out
    assert err == ""


def test_a_leftover_of_a_killed_run_is_swept(use, inputs, tmp_path):
    scratch = tmp_path / "cache" / "scratch"
    (scratch / "999999999-abc").mkdir(parents=True)
    (scratch / f"{os.getpid()}-abc").mkdir()
    use(makes=export_of(tmp_path / "made.sqlite"))
    assert n_migrations(a_report(inputs / "r.nsys-rep")) == 3
    assert [path.name for path in scratch.iterdir()] == [f"{os.getpid()}-abc"]


# One export, and never again


def test_a_second_open_does_not_run_nsys(use, inputs, tmp_path):
    made = use(makes=export_of(tmp_path / "made.sqlite"))
    report = a_report(inputs / "r.nsys-rep")
    assert n_migrations(report) == 3
    assert n_migrations(report) == 3
    assert nsan.open_trace(report).migrations.collect().height == 3
    assert len(made.calls) == 1
    report.write_bytes(report.read_bytes() + b"more")
    assert n_migrations(report) == 3
    assert len(made.calls) == 2


def test_a_report_is_imported_into_a_store_of_choice(use, inputs, tmp_path):
    made = use(makes=export_of(tmp_path / "made.sqlite"))
    store = nsan.import_trace(a_report(inputs / "old.qdrep"), tmp_path / "store")
    assert nsan.open_trace(store).info.source == "old.qdrep"
    assert n_migrations(store) == 3
    assert len(made.calls) == 1


def test_a_report_is_known_by_its_head_whatever_its_name(use, inputs, tmp_path):
    use(makes=export_of(tmp_path / "made.sqlite"))
    assert n_migrations(a_report(inputs / "report.bin")) == 3


# The .sqlite beside a report


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


UNFIT = {
    "older": (older, "older than the report"),
    "empty": (lambda path, _: path.write_bytes(b""), "an empty file"),
    "cut short": (lambda path, _: cut(path), "cut short"),
    "text": (lambda path, _: path.write_text("no database at all"), "not a SQLite database"),
    "of another report": (
        lambda path, _: export_of(path, n=9, report="x.nsys-rep"),
        "it was made from x.nsys-rep",
    ),
    "of some tables": (
        lambda path, _: export_of(path, n=9, facts={"EXPORT_PARAM_TABLES_TO_EXPORT": "CUPTI.*"}),
        "only a part of the recording",
    ),
    "of some times": (
        lambda path, _: export_of(path, n=9, facts={"EXPORT_PARAM_TIMES_TO_EXPORT": "0/9"}),
        "only a part of the recording",
    ),
    "of something else": (lambda path, _: other_database(path), "no whole nsys export"),
}


def other_database(path):
    with closing(connect(path)) as connection:
        connection.execute("CREATE TABLE users (a)")
        connection.commit()


@pytest.fixture
def pair(inputs):
    """A report and an export of 7 migrations beside it, both in order."""
    report = a_report(inputs / "r.nsys-rep")
    older(report, report)
    return report, export_of(inputs / "r.sqlite", n=7)


def unfit(case, pair):
    report, beside = pair
    spoil, words = UNFIT[case]
    if case != "older":
        beside.unlink()
        if case == "cut short":
            export_of(beside)
    spoil(beside, report)
    return words


def test_an_export_beside_its_report_saves_another(pair, use, tmp_path):
    made = use(makes=export_of(tmp_path / "made.sqlite"), starts=export_of(tmp_path / "s.sqlite"))
    assert n_migrations(pair[0]) == 7
    assert len(made.calls) == 1
    assert "--tables=TARGET_INFO_SESSION_START_TIME" in made.calls[0]


@pytest.mark.parametrize("case", UNFIT)
def test_an_unfit_export_beside_is_not_used(case, pair, use, tmp_path):
    unfit(case, pair)
    use(makes=export_of(tmp_path / "made.sqlite"), starts=export_of(tmp_path / "s.sqlite"))
    assert n_migrations(pair[0]) == 3


def test_an_export_of_another_session_is_not_used(pair, use, tmp_path):
    use(makes=export_of(tmp_path / "made.sqlite"), starts=export_of(tmp_path / "s.sqlite", start=2))
    assert n_migrations(pair[0]) == 3


def test_an_nsys_that_cannot_tell_the_session_start_exports_anew(pair, use, tmp_path):
    use(makes=export_of(tmp_path / "made.sqlite"))
    assert n_migrations(pair[0]) == 3


def test_an_export_beside_that_comes_changes_or_goes_is_seen_by_the_next_open(
    use, inputs, tmp_path
):
    use(makes=export_of(tmp_path / "made.sqlite"), starts=export_of(tmp_path / "s.sqlite"))
    report = a_report(inputs / "r.nsys-rep")
    older(report, report)
    assert n_migrations(report) == 3
    beside = export_of(inputs / "r.sqlite", n=7)
    assert n_migrations(report) == 7
    beside.unlink()
    export_of(beside, n=9)
    assert n_migrations(report) == 9
    beside.unlink()
    assert n_migrations(report) == 3


def test_an_export_beside_that_did_not_change_is_not_read_again(pair, use, tmp_path):
    made = use(makes=export_of(tmp_path / "made.sqlite"), starts=export_of(tmp_path / "s.sqlite"))
    assert n_migrations(pair[0]) == n_migrations(pair[0]) == 7
    assert len(made.calls) == 1
    # Written to in place, of the same length: its time is another.
    times = pair[1].stat()
    os.utime(pair[1], ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    assert n_migrations(pair[0]) == 7
    assert len(made.calls) == 2


def test_stores_of_earlier_exports_beside_leave_the_cache_after_a_day(use, inputs, tmp_path):
    use(makes=export_of(tmp_path / "made.sqlite"), starts=export_of(tmp_path / "s.sqlite"))
    report = a_report(inputs / "r.nsys-rep")
    older(report, report)
    assert n_migrations(report) == 3
    [first] = (tmp_path / "cache" / "stores").iterdir()
    old = first.stat().st_mtime - 100_000
    os.utime(first / "manifest.json", (old, old))
    export_of(inputs / "r.sqlite", n=7)
    assert n_migrations(report) == 7
    [second] = (tmp_path / "cache" / "stores").iterdir()
    assert second != first


def source_check(path):
    return [check["text"] for check in nsan.summary(path)["health"] if check["id"] == "source"]


@pytest.mark.parametrize("case", UNFIT)
def test_why_an_export_beside_was_not_read_is_told(case, pair, use, tmp_path):
    words = unfit(case, pair)
    use(makes=export_of(tmp_path / "made.sqlite"), starts=export_of(tmp_path / "s.sqlite"))
    [text] = source_check(pair[0])
    assert text.startswith("r.sqlite beside the report was not read: ")
    assert words in text


def test_an_export_of_another_session_is_named_so(pair, use, tmp_path):
    use(makes=export_of(tmp_path / "made.sqlite"), starts=export_of(tmp_path / "s.sqlite", start=2))
    assert "it is of another recording" in source_check(pair[0])[0]


def test_an_export_beside_that_is_read_is_nothing_to_tell(pair, use, tmp_path):
    use(makes=export_of(tmp_path / "made.sqlite"), starts=export_of(tmp_path / "s.sqlite"))
    assert source_check(pair[0]) == []


@pytest.mark.usefixtures("no_nsys")
def test_an_export_beside_needs_no_nsys_and_is_said_not_to_be_checked(pair):
    assert n_migrations(pair[0]) == 7
    source = [check for check in nsan.summary(pair[0])["health"] if check["id"] == "source"]
    assert "without nsys it could not be checked" in source[0]["text"]


@pytest.mark.parametrize("case", UNFIT)
@pytest.mark.usefixtures("no_nsys")
def test_without_nsys_an_unfit_export_beside_is_named_with_the_way_out(
    case, pair, tmp_path, capsys
):
    words = unfit(case, pair)
    assert main([str(pair[0])]) == 1
    err = capsys.readouterr().err
    assert "r.sqlite beside it is not used" in err
    assert words in err
    assert "Install NVIDIA Nsight Systems" in err
    assert left_in_cache(tmp_path) == []


@pytest.mark.usefixtures("no_nsys")
def test_without_nsys_a_report_alone_says_what_to_do(inputs):
    with pytest.raises(NsysNotFoundError) as raised:
        nsan.open_trace(a_report(inputs / "r.nsys-rep"))
    assert "beside" not in str(raised.value)
    assert "nsys export --type sqlite r.nsys-rep" in str(raised.value)


# Raw streams


def a_stream(path, version="2023.4.4.54-2344v0"):
    path.write_bytes(b"U3w[END]NVIDIA Nsight Systems Stream " + version.encode() + b"!" + bytes(99))
    return path


@pytest.mark.usefixtures("no_nsys")
def test_a_stream_goes_through_the_importer_of_its_version(inputs, tmp_path, monkeypatch):
    prefix = tmp_path / "prefix"
    report = a_report(tmp_path / "made.nsys-rep")
    importers = {}
    for version in ("2023.4.4", "2025.1.1"):
        importers[version] = fake(
            prefix / version / "host-linux-x64" / "QdstrmImporter", version=version, makes=report
        )
        nsys = prefix / version / "target-linux-x64" / "nsys"
        fake(nsys, version=version, makes=export_of(tmp_path / f"{version}.sqlite"))
    monkeypatch.setattr(nsys_cli, "_FOLDERS", (str(prefix),))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    path = a_stream(inputs / "run.qdstrm")
    before = contents(inputs)
    assert n_migrations(path) == 3
    assert len(importers["2023.4.4"].calls) == 1
    assert importers["2025.1.1"].calls == []
    assert contents(inputs) == before
    assert len(left_in_cache(tmp_path)) == 1  # the store


def test_a_stream_without_an_importer_says_what_to_do(use, inputs, tmp_path):
    use()
    with pytest.raises(ImporterNotFoundError) as raised:
        nsan.open_trace(a_stream(inputs / "run.qdstrm"))
    assert "the whole of Nsight Systems 2023.4.4" in str(raised.value)
    assert "QdstrmImporter -i run.qdstrm" in str(raised.value)
    assert left_in_cache(tmp_path) == []


# Which nsys


@pytest.mark.usefixtures("no_nsys")
def test_the_newest_installed_version_is_taken_by_number(tmp_path, monkeypatch):
    places = ["2023.9.1/target-linux-x64", "2023.10.1/bin", "2022.4.2/target-linux-x64"]
    for place in places:
        fake(tmp_path / "prefix" / place / "nsys")
    monkeypatch.setattr(nsys_cli, "_FOLDERS", (str(tmp_path / "prefix"),))
    found = [str(path.parent.relative_to(tmp_path / "prefix")) for path in nsys_cli.programs()]
    assert found == [places[1], places[0], places[2]]


@pytest.mark.usefixtures("no_nsys")
def test_path_comes_before_the_folders_and_the_variable_before_both(tmp_path, monkeypatch):
    on_path = fake(tmp_path / "path" / "nsys").program
    installed = fake(tmp_path / "prefix" / "2025.1.1" / "bin" / "nsys").program
    named = fake(tmp_path / "named" / "my nsys").program
    monkeypatch.setattr(nsys_cli, "_FOLDERS", (str(tmp_path / "prefix"),))
    monkeypatch.setenv("PATH", str(on_path.parent))
    assert nsys_cli.programs() == [on_path, installed]
    monkeypatch.setenv("NSYS", str(named))
    assert nsys_cli.programs() == [named]


# A folder of reports


def test_the_newest_of_a_folder_is_opened_and_named(use, inputs, tmp_path, capsys):
    use(makes=export_of(tmp_path / "made.sqlite"))
    report = a_report(inputs / "b.nsys-rep")
    older(export_of(inputs / "a.sqlite", n=7), report)
    (inputs / "newer.txt").write_text("not a capture")
    assert main(["info", str(inputs), "--json"]) == 0
    out, err = capsys.readouterr()
    assert '"source": "b.nsys-rep"' in out
    assert "b.nsys-rep is the newest capture of this folder" in err
    assert nsan.open_trace(inputs).info.source == "b.nsys-rep"
    older(report, inputs / "a.sqlite")
    assert n_migrations(inputs) == 7
    assert main([str(inputs), "-q"]) == 0
    assert capsys.readouterr().err == ""


def test_a_store_is_not_imported_again(inputs, tmp_path, capsys):
    store = nsan.import_trace(export_of(inputs / "a.sqlite"), tmp_path / "store")
    assert main(["import", str(store)]) == 1
    assert "an nsan store already" in capsys.readouterr().err


def test_importing_a_folder_of_reports_takes_its_newest(inputs, tmp_path):
    older(export_of(inputs / "a.sqlite", n=7), export_of(inputs / "b.sqlite"))
    assert n_migrations(nsan.import_trace(inputs, tmp_path / "store")) == 3


def test_a_folder_without_reports_is_refused(inputs):
    (inputs / "r.nsys-rep").mkdir()
    (inputs / "notes.txt").write_text("nothing here")
    with pytest.raises(NotAStoreError):
        nsan.open_trace(inputs)
