"""Many reports become one corpus, whatever happens on the way."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import exports as x
import fleets
import psutil
import pytest
from conftest import SOAK

import nsan
from nsan.cli import main
from nsan.corpus_errors import BrokenCorpusError, NotACorpusError, UnseenCorpusError
from nsan.errors import ExtraMissingError, PlaceTakenError, UsageError
from nsan.fleet.finding import reports_in
from nsan.fleet.gathering import How, gather
from nsan.fleet.importing import Options, import_fleet
from nsan.fleet.task import failed, gather_task, perform

NAMES = [f"night{n // 2}/rank{n % 2}.sqlite" for n in range(4)]


@pytest.fixture
def nights(tmp_path):
    """Four reports: two runs of two ranks."""
    fleets.write(tmp_path / "nights", NAMES)
    return tmp_path / "nights"


def reports(place):
    return nsan.open_corpus(place).reports.select("run", "rank").rows()


ALL = [(f"nights/night{n // 2}", n % 2) for n in range(4)]


# What a corpus is made of


def test_several_reports_need_a_place_and_a_list_shows_what_they_are(nights, capsys):
    assert main(["import", str(nights)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "4 reports were found" in err
    assert "-o FOLDER" in err
    fleets.report(9, variables=['SLURM_PROCID="5"']).write(nights / "night1" / "x_8.sqlite")
    assert main(["import", str(nights), "--list"]) == 0
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert ["nights/night0", "1", "word in the name", "nights/night0/rank1.sqlite"] in cells
    says = "recorded (its name says: 8)"
    assert ["nights/night1/x", "5", says, "nights/night1/x_8.sqlite"] in cells
    assert not [*nights.rglob("*.parquet")]


def test_a_folder_with_one_capture_still_becomes_a_store(tmp_path, capsys):
    fleets.write(tmp_path / "one", ["a.sqlite"])
    assert main(["import", str(tmp_path / "one"), "-o", str(tmp_path / "store")]) == 0
    assert nsan.open_trace(tmp_path / "store").info.source == "a.sqlite"
    assert main(["import", str(tmp_path / "one"), "-o", str(tmp_path / "s2"), "--prune"]) == 2
    assert "--prune is for a corpus" in capsys.readouterr().err
    # A corpus of one, where a corpus is asked for.
    one = ["import", str(tmp_path / "one"), "-o", str(tmp_path / "fleet")]
    assert main([*one, "--rank-pattern", "(?P<run>a)"]) == 0
    assert reports(tmp_path / "fleet") == [("a", None)]
    assert main(one) == 0


def test_the_recorded_rank_is_in_the_corpus(tmp_path):
    folder = tmp_path / "n"
    folder.mkdir()
    fleets.report(0, variables=['RANK="3"', 'HOME="/home/alice"']).write(folder / "t_811.sqlite")
    fleets.report(1, variables=['RANK="1"']).write(folder / "t_812.sqlite")
    import_fleet([folder], tmp_path / "fleet")
    assert reports(tmp_path / "fleet") == [("n/t", 1), ("n/t", 3)]


def test_one_process_and_many_make_the_same_files(nights, tmp_path, capsys):
    fleets.poison(nights / "night1" / "rank1.sqlite")
    assert main(["import", str(nights), "-o", str(tmp_path / "one")]) == 1
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'one'}\n"
    assert "nights/night1/rank1.sqlite is not in the corpus: rank1.sqlite is damaged" in err
    assert "3 reports imported" in err
    assert "1 failed" in err
    assert main(["import", str(nights), "-o", str(tmp_path / "two"), "--workers", "2", "-q"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert fleets.contents(tmp_path / "one") == fleets.contents(tmp_path / "two")
    corpus = nsan.open_corpus(tmp_path / "one")
    assert [(f.run, f.rank) for f in corpus.failures] == [("nights/night1", 1)]
    assert "is damaged" in corpus.failures[0].reason
    assert corpus.reports.height == 3


def test_a_report_that_was_mended_is_no_failure_any_more(nights, tmp_path):
    whole = (nights / NAMES[0]).read_bytes()
    fleets.poison(nights / NAMES[0])
    assert len(import_fleet([nights], tmp_path / "fleet").failures) == 1
    (nights / NAMES[0]).write_bytes(whole)
    done = import_fleet([nights], tmp_path / "fleet")
    assert (done.n_made, done.n_kept, done.failures) == (1, 3, [])
    assert nsan.open_corpus(tmp_path / "fleet").failures == ()
    assert reports(tmp_path / "fleet") == ALL


def test_no_input_is_changed_and_nothing_private_is_kept(nights, tmp_path):
    fleets.poison(nights / NAMES[3])
    (nights / NAMES[2]).chmod(0o400)
    (nights / "night0" / "gone.sqlite").symlink_to("/home/alice/secret.sqlite")
    before = fleets.contents(nights)
    import_fleet([nights], tmp_path / "fleet")
    assert fleets.contents(nights) == before
    for name, content in fleets.contents(tmp_path / "fleet").items():
        assert str(tmp_path).encode() not in content, name
        assert b"/home/" not in content, name
        assert b"alice" not in content, name


def test_why_a_report_failed_names_no_folder(nights):
    found = reports_in([nights])[0]
    found.path.unlink()
    result = perform(gather_task(found))
    assert result["reason"].startswith("rank0.sqlite: no such file or folder")


def test_whole_paths_are_kept_only_where_it_is_asked_for(tmp_path):
    made = fleets.report(0)
    name = "/home/alice/bin/app"
    made.add("PROCESSES", {"globalPid": x.global_pid(x.PID), "pid": x.PID, "name": name})
    (tmp_path / "n").mkdir()
    made.write(tmp_path / "n" / "rank0.sqlite")
    for options, expected in ((Options(), "app"), (Options(keep_paths=True), name)):
        import_fleet([tmp_path / "n"], tmp_path / "fleet", options=options)
        corpus = nsan.open_corpus(tmp_path / "fleet")
        assert corpus.processes.collect()["name"].to_list() == [expected]
        assert corpus.migrations.collect().height == 3
    # A store that has them is not taken where they are not wanted.
    nsan.import_trace(tmp_path / "n" / "rank0.sqlite", tmp_path / "m" / "rank0", keep_paths=True)
    done = import_fleet([tmp_path / "m"], tmp_path / "fleet2", how=How(pattern="(?P<run>m)"))
    assert "--keep-paths" in done.failures[0].reason


# Again, and after something went wrong


def test_what_is_current_is_kept_and_what_changed_is_replaced(nights, tmp_path):
    fleet = tmp_path / "fleet"
    import_fleet([nights], fleet)
    before = fleets.contents(fleet)
    done = import_fleet([nights], fleet)
    assert (done.n_made, done.n_kept) == (0, 4)
    assert fleets.contents(fleet) == before
    (nights / NAMES[2]).unlink()
    fleets.report(7).write(nights / NAMES[2])
    done = import_fleet([nights], fleet)
    assert (done.n_made, done.n_kept) == (1, 3)
    moved = nsan.open_corpus(fleet).migrations.collect()
    assert moved.height == 12
    assert sorted(set(moved["bytes"])) == [4096 * (n + 1) for n in (0, 1, 3, 7)]
    # Nothing of the earlier state is left for other readers.
    parts = [name for name in fleets.contents(fleet) if name.startswith("migrations/")]
    assert len(parts) == 4


def test_an_import_that_was_killed_is_taken_up(nights, tmp_path):
    fleet, clean = tmp_path / "fleet", tmp_path / "clean"
    process = started(nights, fleet)
    wait_for(lambda: len([*fleet.glob("reports/*.json")]) >= 2)
    process.kill()
    process.wait()
    done = import_fleet([nights], fleet)
    assert done.n_kept >= 2
    assert (done.n_kept + done.n_made, done.failures) == (4, [])
    import_fleet([nights], clean)
    assert fleets.contents(fleet) == fleets.contents(clean)
    assert not [*fleet.glob(".*")]


def test_parts_without_their_document_are_made_again(nights, tmp_path):
    fleet = tmp_path / "fleet"
    import_fleet([nights], fleet)
    before = fleets.contents(fleet)
    next(iter(sorted(fleet.glob("reports/*.json")))).unlink()
    next((fleet / "kernels" / "run=nights%2Fnight1").rglob("*.parquet")).write_bytes(b"half")
    done = import_fleet([nights], fleet)
    assert 1 <= done.n_made <= 2
    assert fleets.contents(fleet) == before


def test_ctrl_c_keeps_what_is_done_and_leaves_no_worker(nights, tmp_path):
    fleet = tmp_path / "fleet"
    process = started(nights, fleet, "--workers", "2")
    wait_for(lambda: [*fleet.glob("reports/*.json")])
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    psutil.wait_procs(children, timeout=10)
    assert not [child for child in children if child.is_running()]
    assert not [*fleet.glob(".*")]
    n_done = len([*fleet.glob("reports/*.json")])
    done = import_fleet([nights], fleet)
    assert (done.n_kept, done.n_kept + done.n_made) == (n_done, 4)


def test_two_imports_at_once_make_one_corpus(nights, tmp_path):
    both = [started(nights, tmp_path / "fleet"), started(nights, tmp_path / "fleet")]
    assert [process.wait(120) for process in both] == [0, 0]
    import_fleet([nights], tmp_path / "clean")
    assert fleets.contents(tmp_path / "fleet") == fleets.contents(tmp_path / "clean")


def started(inputs, output, *options):
    command = [sys.executable, "-m", "nsan", "import", str(inputs), "-o", str(output), *options]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_for(condition):
    for _ in range(6_000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it did not come to that")


def test_reports_that_are_gone_are_kept_until_they_are_pruned(nights, tmp_path, capsys):
    fleet = tmp_path / "fleet"
    other = fleets.write(tmp_path / "other", ["rank0.sqlite"])[0]
    import_fleet([nights], fleet)
    import_fleet([other.parent], fleet)
    (nights / NAMES[0]).unlink()
    stray = fleet / "migrations" / "run=x" / "rank=1" / "000000000000-00000000-00000.parquet"
    stray.parent.mkdir(parents=True)
    stray.write_bytes(b"of a report that changed twice")
    assert main(["import", str(nights), "-o", str(fleet)]) == 0
    assert "no longer in the folders (--prune removes them): nights/night0/rank0.sqlite" in (
        capsys.readouterr().err
    )
    assert reports(fleet) == [*ALL, ("other", 0)]
    assert main(["import", str(nights), "-o", str(fleet), "--prune"]) == 0
    assert "removed: nights/night0/rank0.sqlite" in capsys.readouterr().err
    # Reports of other folders are not gone.
    assert reports(fleet) == [*ALL[1:], ("other", 0)]
    assert not stray.parent.exists()
    listed = sum(1 for name in fleets.contents(fleet) if name.endswith(".parquet"))
    assert listed == sum(len(record.files) for record in nsan.open_corpus(fleet)._records)


def test_reports_of_another_folder_of_the_same_name_are_never_pruned(tmp_path, capsys):
    fleet = tmp_path / "fleet"
    fleets.write(tmp_path / "one" / "night", ["rank0.sqlite", "rank1.sqlite"])
    fleets.write(tmp_path / "two" / "night", ["rank2.sqlite", "rank3.sqlite"])
    import_fleet([tmp_path / "one" / "night"], fleet)
    assert main(["import", str(tmp_path / "two" / "night"), "-o", str(fleet), "--prune"]) == 0
    said = capsys.readouterr().err
    assert "removed" not in said
    assert "no longer" not in said
    assert reports(fleet) == [("night", n) for n in range(4)]
    # One that is gone from its own folder is, and files that were named alone say nothing of the others.
    (tmp_path / "one" / "night" / "rank1.sqlite").unlink()
    one = str(tmp_path / "one" / "night" / "rank0.sqlite")
    assert main(["import", one, one, "-o", str(fleet), "--prune"]) == 0
    assert len(reports(fleet)) == 4
    done = import_fleet([tmp_path / "one" / "night"], fleet, options=Options(prune=True))
    assert done.removed == ["night/rank1.sqlite"]
    assert reports(fleet) == [("night", n) for n in (0, 2, 3)]


def test_reports_of_a_folder_that_was_moved_are_pruned_where_it_is_now(tmp_path):
    fleet = tmp_path / "fleet"
    fleets.write(tmp_path / "a" / "night", ["rank0.sqlite", "rank1.sqlite"])
    import_fleet([tmp_path / "a" / "night"], fleet)
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "night").rename(tmp_path / "b" / "night")
    assert import_fleet([tmp_path / "b" / "night"], fleet).n_kept == 2
    (tmp_path / "b" / "night" / "rank1.sqlite").unlink()
    done = import_fleet([tmp_path / "b" / "night"], fleet, options=Options(prune=True))
    assert done.removed == ["night/rank1.sqlite"]
    # It is the same folder, so that a report that changes there replaces what it was.
    (tmp_path / "b" / "night" / "rank0.sqlite").unlink()
    fleets.report(7).write(tmp_path / "b" / "night" / "rank0.sqlite")
    assert import_fleet([tmp_path / "b" / "night"], fleet).failures == []


def test_a_report_is_of_the_same_run_whatever_is_imported_with_it(tmp_path):
    for night in ("one", "two"):
        fleets.write(tmp_path / night, ["deep/rank0.sqlite"])
    apart, together = tmp_path / "apart", tmp_path / "together"
    for night in ("one", "two"):
        import_fleet([tmp_path / night], apart)
    import_fleet([tmp_path / "one", tmp_path / "two"], together)
    assert reports(apart) == reports(together) == [("one/deep", 0), ("two/deep", 0)]
    assert import_fleet([tmp_path / "one", tmp_path / "two"], apart).n_kept == 2


@contextlib.contextmanager
def another_user():
    """Be somebody to whom a folder may be closed."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def closed():
    """A folder of two nights that everybody may look at, and the second of them nobody."""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "n"
        fleets.write(base, ["night0/rank0.sqlite", "night1/rank0.sqlite"])
        # Modules that are imported late would be read as the other user, who may not.
        assert main(["import", str(base), "--list"]) == 0
        assert main(["import", str(base), "-o", str(Path(folder) / "warm")]) == 0
        assert main(["summary", str(base)]) == 0
        for each in (base.parent, base, base / "night0"):
            each.chmod(0o755)
        (base / "night0" / "rank0.sqlite").chmod(0o644)
        yield base
        (base / "night1").chmod(0o755)


def test_a_folder_that_may_not_be_read_is_named_and_the_others_are_read(
    closed, capsys, monkeypatch
):
    fleet = closed.parent / "fleet"
    import_fleet([closed], fleet)
    monkeypatch.setenv("NSAN_CACHE_DIR", str(closed.parent / "cache"))
    closed.parent.chmod(0o777)  # another user writes here
    for path in [fleet, *fleet.rglob("*")]:
        path.chmod(0o777)
    (closed / "night1").chmod(0o000)
    with another_user():
        assert main(["import", str(closed), "-o", str(fleet), "--prune"]) == 1
        err = capsys.readouterr().err
        found = gather([closed])
        assert main(["import", str(closed), "--list"]) == 1
        assert "n/night1 is not looked through" in capsys.readouterr().err
    says = "n/night1 is not in the corpus: you may not read this folder"
    assert says in err
    assert "removed" not in err
    assert "no longer" not in err
    # Nobody knows that its report is gone.
    assert reports(fleet) == [("n/night0", 0), ("n/night1", 0)]
    assert [failure.source for failure in nsan.open_corpus(fleet).failures] == ["n/night1"]
    assert [member.source for member in found.members] == ["n/night0/rank0.sqlite"]
    assert [failure.source for failure in found.failures] == ["n/night1"]
    (closed / "night1").chmod(0o755)
    assert import_fleet([closed], fleet).failures == []
    assert nsan.open_corpus(fleet).failures == ()


def test_the_folder_that_was_given_has_to_be_readable(closed, capsys):
    closed.chmod(0o000)
    with another_user():
        assert main(["import", str(closed), "-o", str(closed.parent / "fleet")]) == 1
    closed.chmod(0o755)
    assert "you may not read this folder" in capsys.readouterr().err


def test_another_report_of_the_same_name_does_not_take_a_place(tmp_path):
    fleet = tmp_path / "fleet"
    for seed, home in enumerate(("a", "b")):
        (tmp_path / home / "night").mkdir(parents=True)
        fleets.report(seed).write(tmp_path / home / "night" / "rank0.sqlite")
    import_fleet([tmp_path / "a" / "night"], fleet)
    done = import_fleet([tmp_path / "b" / "night"], fleet)
    assert "from another folder of that name" in done.failures[0].reason
    assert nsan.open_corpus(fleet).migrations.collect()["bytes"].to_list() == [4096] * 3
    done = import_fleet([tmp_path / "b" / "night"], fleet, options=Options(overwrite=True))
    assert done.failures == []
    assert nsan.open_corpus(fleet).migrations.collect()["bytes"].to_list() == [8192] * 3
    # A folder that was moved as it is has the same reports.
    (tmp_path / "c").mkdir()
    (tmp_path / "b" / "night").rename(tmp_path / "c" / "night")
    assert import_fleet([tmp_path / "c" / "night"], fleet).n_kept == 1


def test_a_report_that_is_named_otherwise_is_there_once(nights, tmp_path):
    fleet = tmp_path / "fleet"
    import_fleet([nights], fleet)
    done = import_fleet([nights], fleet, how=How(pattern=r"night(?P<run>\d)/rank(?P<rank>\d)"))
    assert (done.n_made, done.alike) == (4, [])
    assert reports(fleet) == [(str(n // 2), n % 2) for n in range(4)]
    # The folder's own folder is given: other names, the same files.
    import_fleet([nights / "night0"], fleet)
    assert sorted(reports(fleet)) == sorted(
        [("night0", n) for n in range(2)] + [("1", n) for n in range(2)]
    )
    assert nsan.open_corpus(fleet).migrations.collect().height == 12
    assert sum(name.startswith("migrations/") for name in fleets.contents(fleet)) == 4


def test_runs_and_ranks_that_several_reports_have_are_named(tmp_path, capsys):
    fleets.write(tmp_path / "n", ["rank0.sqlite", "node1/rank0.sqlite", "other.sqlite"])
    assert main(["import", str(tmp_path / "n"), "-o", str(tmp_path / "fleet")]) == 0
    says = "several reports of n, rank 0: n/node1/rank0.sqlite, n/rank0.sqlite"
    assert says in capsys.readouterr().err


# Workers


def kill_workers(n, *, parent=None):
    """Kill the first so many worker processes that this process starts; a thread that does it."""
    me, killed = psutil.Process(parent), set()

    def work():
        while len(killed) < n:
            for child in me.children():
                if child.pid not in killed and "nsan.fleet.worker" in " ".join(child.cmdline()):
                    killed.add(child.pid)
                    child.kill()
                    break
            time.sleep(0.01)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_a_worker_that_is_killed_loses_no_report(nights, tmp_path):
    thread = kill_workers(2)
    done = import_fleet([nights], tmp_path / "fleet", how=How(workers=2))
    thread.join(10)
    assert not thread.is_alive()
    assert (done.n_made, done.failures) == (4, [])
    assert reports(tmp_path / "fleet") == ALL


def test_a_report_that_ends_its_worker_each_time_is_named(nights, tmp_path):
    thread = kill_workers(3)
    done = import_fleet([nights], tmp_path / "fleet", how=How(workers=1))
    thread.join(10)
    assert done.n_made == 3
    assert [failure.source for failure in done.failures] == ["nights/night0/rank0.sqlite"]
    assert "ended by SIGKILL" in done.failures[0].reason
    assert "3 times" in done.failures[0].reason
    assert reports(tmp_path / "fleet") == ALL[1:]


def test_workers_that_see_no_corpus_say_so(nights, capsys):
    with pytest.raises(UnseenCorpusError, match="does not see the corpus memory://here/only"):
        import_fleet([nights], "memory://here/only", how=How(workers=2))
    # What ends with the command is no place for what the command makes.
    assert main(["import", str(nights), "-o", "memory://here/only"]) == 2
    assert "memory://here/only is in the memory of this process" in capsys.readouterr().err


def test_workers_here_and_a_cluster_do_not_go_together(nights, capsys):
    options = ["--workers", "2", "--dask", "tcp://127.0.0.1:1"]
    assert main(["import", str(nights), "-o", "fleet", *options]) == 2
    assert "give one of both" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("package", "place", "how"),
    [("fsspec", "s3://bucket/fleet", How()), ("distributed", "fleet", How(dask="tcp://h:1"))],
)
def test_what_is_not_installed_is_named(nights, tmp_path, monkeypatch, package, place, how):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ExtraMissingError, match=rf"{package}.*pip install 'nsan\[scale\]'"):
        import_fleet([nights], place, how=how)


# Places


def test_a_corpus_is_put_over_nothing_else(nights, tmp_path):
    store = nsan.import_trace(nights / NAMES[0], tmp_path / "store")
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("")
    for taken, says in ((store, "store"), (other, "other files"), (nights / NAMES[1], "a file")):
        with pytest.raises(PlaceTakenError, match=says):
            import_fleet([nights], taken)


def test_a_corpus_is_no_report(nights, tmp_path):
    import_fleet([nights], nights / "fleet")
    assert import_fleet([nights], nights / "fleet").n_kept == 4
    with pytest.raises(UsageError, match="a corpus already"):
        import_fleet([nights / "fleet"], tmp_path / "fleet")


def test_stores_are_reports_too(nights, tmp_path):
    for name in NAMES[:2]:
        nsan.import_trace(nights / name, tmp_path / "stores" / name.removesuffix(".sqlite"))
    done = import_fleet([tmp_path / "stores"], tmp_path / "fleet")
    assert done.n_made == 2
    assert import_fleet([tmp_path / "stores"], tmp_path / "fleet").n_kept == 2
    assert reports(tmp_path / "fleet") == [("stores/night0", n) for n in range(2)]
    assert (
        nsan.open_trace(tmp_path / "stores" / "night0" / "rank0").migrations.collect().height == 3
    )


def test_a_store_and_its_capture_are_one_report(nights):
    nsan.import_trace(nights / NAMES[0], nights / "night0" / "made-before")
    nsan.import_trace(nights / NAMES[1], nights / "stores" / "other")
    assert [found.source for found in reports_in([nights])] == [f"nights/{name}" for name in NAMES]
    # Without the capture it is what there is.
    (nights / NAMES[0]).unlink()
    assert "nights/night0/made-before" in [found.source for found in reports_in([nights])]


def test_one_file_that_is_there_twice_is_named(nights, tmp_path, capsys):
    (nights / "copy").mkdir()
    shutil.copy2(nights / NAMES[1], nights / "copy" / "rank1.sqlite")
    assert main(["import", str(nights), "-o", str(tmp_path / "fleet")]) == 0
    says = "the same file: nights/copy/rank1.sqlite, nights/night0/rank1.sqlite"
    assert says in capsys.readouterr().err
    assert gather([nights]).twice == (says.removeprefix("the same file: "),)


def test_what_makes_a_folder_a_corpus_is_written_again(nights, tmp_path):
    fleet = tmp_path / "fleet"
    import_fleet([nights], fleet)
    before = fleets.contents(fleet)
    for spoil in (lambda file: file.write_text("{"), lambda file: file.unlink()):
        spoil(fleet / "corpus.json")
        with pytest.raises((BrokenCorpusError, NotACorpusError)):
            nsan.open_corpus(fleet)
        assert import_fleet([nights], fleet).n_kept == 4
        assert fleets.contents(fleet) == before
    # A damaged file of that name alone makes none.
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "corpus.json").write_text("{")
    with pytest.raises(BrokenCorpusError):
        import_fleet([nights], tmp_path / "thesis")


def test_why_a_report_failed_names_no_folder_with_blanks(tmp_path):
    home = tmp_path / "alice smith" / "my runs"
    fleets.write(home, ["rank0.sqlite", "rank1.sqlite"])
    task = gather_task(reports_in([home])[0])
    for reason in (
        f"{home}/rank0.sqlite: it is gone",
        f"cannot write to {home}: full",
        f"'{home.parent}/my other runs/x' and {home}",
        f"{tempfile.gettempdir()}/a/b/c.sqlite",
    ):
        said = failed(task, reason)["reason"]
        assert "alice" not in said, said
        assert str(tmp_path) not in said, said
    assert failed(task, f"{home}/rank0.sqlite: gone")["reason"] == "rank0.sqlite: gone"
    assert "n/a and 1/2" in failed(task, "n/a and 1/2")["reason"]
    # A name may be any bytes; JSON, tables and pages hold text.
    assert failed(task, "x\udcff is damaged")["reason"] == r"x\xff is damaged"


def test_names_that_are_no_text_stay_apart_and_can_be_kept(tmp_path):
    folder = tmp_path / "n"
    for byte in (b"\xff", b"\xfe"):
        place = os.fsdecode(os.fsencode(folder) + b"/x" + byte)
        fleets.write(Path(place), ["rank0.sqlite"])
    fleets.write(folder, ["y/rank0.sqlite"])
    fleets.poison(Path(place) / "rank0.sqlite")
    assert main(["import", str(folder), "-o", str(tmp_path / "fleet")]) == 1
    corpus = nsan.open_corpus(tmp_path / "fleet")
    assert corpus.reports["run"].to_list() == [r"n/x\xff", "n/y"]
    assert [failure.run for failure in corpus.failures] == [r"n/x\xfe"]
    assert corpus.migrations.filter(run=r"n/x\xff").collect().height == 3
    assert [member.run for member in gather([folder], how=How(workers=1)).members] == [
        r"n/x\xff",
        "n/y",
    ]


# Ways out


def test_a_corpus_says_what_reads_it(nights, tmp_path, capsys):
    fleet = tmp_path / "fleet"
    import_fleet([nights], fleet)
    assert main(["migrations", str(fleet)]) == 1
    assert "is a corpus of many reports" in capsys.readouterr().err
    assert main(["migrations", str(nights)]) == 1
    assert "read together by `nsan summary`" in capsys.readouterr().err
    for option in (["--workers", "2"], ["--dask", "tcp://h:1"], ["--rank-pattern", "(?P<rank>1)"]):
        assert main(["summary", str(fleet), *option]) == 2
        assert f"{option[0]} does nothing for a corpus" in capsys.readouterr().err
    assert main(["summary", str(fleet), str(nights)]) == 2
    assert "nsan import FOLDER FOLDER -o CORPUS" in capsys.readouterr().err


def test_a_url_is_named_as_it_was_given_and_a_local_one_is_read(nights, capsys):
    assert main(["summary", "memory://no/such"]) == 1
    assert "memory://no/such holds no corpus" in capsys.readouterr().err
    assert main(["import", f"file://{nights}", "--list"]) == 0
    assert "nights/night1/rank1.sqlite" in capsys.readouterr().out


def test_a_name_that_is_too_long_is_said_to_name_nothing(tmp_path, nights, capsys):
    long = "L" * 300
    assert main(["summary", str(tmp_path / long)]) == 1
    assert "no such file or folder" in capsys.readouterr().err
    assert main(["import", str(nights), "-o", str(tmp_path / long)]) == 1
    assert "cannot be used for a corpus" in capsys.readouterr().err


# Without a corpus


def test_gathering_knows_of_each_report_what_its_summary_says(nights, tmp_path):
    fleets.poison(nights / NAMES[3])
    names = []
    found = gather([nights], how=How(), tell=names.append)
    assert sorted(names) == [f"nights/{name}" for name in NAMES]
    assert [(member.run, member.rank) for member in found.members] == ALL[:3]
    assert [failure.source for failure in found.failures] == [f"nights/{NAMES[3]}"]
    for seed, member in enumerate(found.members):
        assert member.info["source"] == f"rank{seed % 2}.sqlite"
        groups = member.totals["migrations"]["groups"]
        assert sum(group["bytes"] for group in groups) == 3 * 4096 * (seed + 1)
    assert gather([nights], how=How(workers=2)) == found
    import_fleet([nights], tmp_path / "fleet")
    assert gather([tmp_path / "fleet"], how=How()) == found


def test_gathering_nothing_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no report in"):
        gather([tmp_path], how=How())


# A cluster of dask


def local_cluster():
    from distributed import LocalCluster

    address = "127.0.0.1"
    dashboard = f"{address}:0"
    return LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=dashboard, host=address
    )


@pytest.fixture
def cluster():
    with local_cluster() as made:
        yield made


@pytest.mark.slow
def test_a_cluster_makes_the_same_files_though_a_worker_is_killed(cluster, tmp_path):
    n = 200 if SOAK else 8
    names = [f"night{i // 4}/rank{i % 4}.sqlite" for i in range(n)]
    fleets.write(tmp_path / "nights", names)
    fleets.poison(tmp_path / "nights" / names[1])
    workers = [info.pid for info in cluster.workers.values()]
    victim = workers[0]

    def kill():
        wait_for(lambda: len([*tmp_path.glob("fleet/reports/*.json")]) >= n // 4)
        os.kill(victim, signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    how = How(dask=cluster.scheduler_address)
    done = import_fleet([tmp_path / "nights"], tmp_path / "fleet", how=how)
    thread.join(10)
    assert not psutil.pid_exists(victim)
    assert (done.n_made, [failure.rank for failure in done.failures]) == (n - 1, [1])
    import_fleet([tmp_path / "nights"], tmp_path / "one")
    assert fleets.contents(tmp_path / "fleet") == fleets.contents(tmp_path / "one")


@pytest.mark.slow
@pytest.mark.skipif(not SOAK, reason="starts one more cluster")
def test_a_report_that_ends_the_workers_of_a_cluster_is_named(tmp_path):
    import dask

    fleets.write(tmp_path / "nights", [f"rank{i}.sqlite" for i in range(6)])
    with dask.config.set({"distributed.scheduler.allowed-failures": 0}), local_cluster() as made:
        workers = {info.pid for info in made.workers.values()}

        def kill():
            scratch = tmp_path / "fleet"
            wait_for(lambda: any(scratch.glob(".scratch.importing-*")))
            name = next(scratch.glob(".scratch.importing-*")).name
            os.kill(next(pid for pid in workers if f"-{pid}-" in name), signal.SIGKILL)

        thread = threading.Thread(target=kill, daemon=True)
        thread.start()
        how = How(dask=made.scheduler_address)
        done = import_fleet([tmp_path / "nights"], tmp_path / "fleet", how=how)
        thread.join(10)
    assert done.n_made == 5
    assert "The workers that read it were ended" in done.failures[0].reason


def test_a_cluster_that_is_not_there_is_named(nights, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("nsan.fleet.cluster._PATIENCE", "1s")
    place = str(tmp_path / "fleet")
    assert main(["import", str(nights), "-o", place, "--dask", "tcp://127.0.0.1:9"]) == 1
    assert "no scheduler answers there" in capsys.readouterr().err
