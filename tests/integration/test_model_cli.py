"""`nsan model` as its user meets it."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing

import exports as x
import polars as pl
import pytest
from conftest import hide_package
from readme import blocks

import nsan
from nsan.cli import main
from nsan.errors import PlaceTakenError
from nsan.model.making import make
from nsan.model.samples import SAMPLES


def _run(folder, *options):
    return main(["model", "run", *options, "-o", str(folder)])


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "sweep"
    assert _run(folder, "sweep", "--size", "8MiB", "--oversubscription-factor", "2", "-q") == 0
    return folder


def test_a_run_leaves_the_export_its_truth_and_how_it_was_made(sweep):
    assert sorted(path.name for path in sweep.iterdir()) == ["model.json", "sweep.sqlite", "truth"]
    about = json.loads((sweep / "model.json").read_text())
    assert about["kind"] == "modelled"
    assert about["capacity_bytes"] == 4 * x.MIB
    assert about["peak_managed_bytes"] == 8 * x.MIB
    for table, facts in about["truth"].items():
        assert pl.read_parquet(sweep / "truth" / f"{table}.parquet").height == facts["rows"]


def test_the_trace_is_called_modelled_by_every_command_that_shows_it(sweep, capsys):
    for command in ("summary", "info"):
        assert main([command, str(sweep / "sweep.sqlite")]) == 0
        assert "modelled" in capsys.readouterr().out


def test_what_it_says_agrees_with_the_files(sweep, tmp_path, capsys):
    options = ("sweep", "--size", "8MiB", "--oversubscription-factor", "2", "--json")
    assert _run(tmp_path / "again", *options) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["rows"] == json.loads((sweep / "model.json").read_text())["rows"]
    trace = nsan.open_trace(tmp_path / "again" / "again.sqlite")
    assert trace.gpu_faults.collect().height == about["rows"]["gpu_faults"]
    assert trace.migrations.collect().height == about["rows"]["migrations"]


def test_the_list_names_what_run_takes(capsys):
    assert main(["model", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    made_of = {getattr(sample, "workload", "") for sample in SAMPLES.values()} - {""}
    assert made_of <= set(listed["workloads"])
    assert "a100-sxm4-40gb" in listed["GPUs"]
    assert "power9" in listed["hosts"]
    assert main(["model", "list"]) == 0
    assert "sweep" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["swep"], "There is no workload 'swep'. There are: advice, alexnet, bert-base"),
        (["sweep", "--gpu", "h100"], "There is no GPU profile 'h100'. There are: a100-pcie"),
        (["sweep", "--host", "x"], "There is no host profile 'x'"),
        (["sweep", "--size", "much"], "'much' is not a size. Write 64MiB"),
        (["sweep", "--oversubscription-factor", "0"], "Take one above 0"),
        (["sweep", "--schema", "9.9"], "9.9"),
        (["sweep", "--prefetch-threshold", "0"], "Take 1 to 100"),
        (["sweep", "--size", "300GiB"], "256 GiB"),
        (["two-gpus", "--gpus", "9"], "1 to 7"),
        (["stream", "--iterations", "3"], "has no steps"),
        (["stream", "--gpus", "2"], "has no further GPUs"),
        (["hotspot", "--prefetch", "ahead"], "has no prefetches"),
        (["sweep", "--size", "1"], "Take 4096 or more"),
        (["sweep", "--capacity", "2MiB", "--oversubscription-factor", "2"], "one of them"),
        (["sweep", "--capacity", "80GiB"], "take no more"),
        (["sweep", "--drift", "nan"], "drift"),
        (["sweep", "--jitter=-1ms"], "Take 0 or more"),
        (["sweep", "--seed=-1"], "seed of -1"),
        (["sweep", "--lost", "soon"], "'soon' is not a time"),
    ],
)
def test_a_wrong_option_is_one_message_and_leaves_nothing(tmp_path, capsys, options, said):
    assert _run(tmp_path / "out", *options) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") <= 3
    assert not [path for path in tmp_path.iterdir() if path.name != "cache"]


def test_an_earlier_run_is_replaced_only_when_asked(tmp_path, capsys):
    folder = tmp_path / "out"
    assert _run(folder, "sweep", "--size", "2MiB", "-q") == 0
    before = (folder / "model.json").read_text()
    assert _run(folder, "sweep", "--size", "4MiB", "-q") == 1
    assert "--force-overwrite" in capsys.readouterr().err
    assert (folder / "model.json").read_text() == before
    assert _run(folder, "sweep", "--size", "4MiB", "-q", "--force-overwrite") == 0
    assert json.loads((folder / "model.json").read_text())["peak_managed_bytes"] == 4 * x.MIB
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_of_something_else_is_never_replaced(tmp_path, capsys):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    assert _run(tmp_path / "thesis", "sweep", "--size", "2MiB", "--force-overwrite") == 1
    assert "did not make. Choose another place" in capsys.readouterr().err
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "years of work"


@pytest.mark.parametrize("about", ["{}", '{"kind": "modelled", "nsan": "0"}', "not json"])
def test_a_model_json_of_its_own_does_not_give_a_folder_away(tmp_path, about):
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "model.json").write_text(about)
    (tmp_path / "project" / "precious.txt").write_text("years of work")
    assert _run(tmp_path / "project", "sweep", "--size", "2MiB", "--force-overwrite") == 1
    assert (tmp_path / "project" / "precious.txt").read_text() == "years of work"


def test_a_folder_that_appears_meanwhile_is_not_replaced(tmp_path):
    folder = tmp_path / "late"

    def appear(_operations, _batches):
        folder.mkdir(exist_ok=True)
        (folder / "notes.txt").write_text("mine")

    recipe = SAMPLES["first_touch"].recipe()
    with pytest.raises(PlaceTakenError):
        make(recipe, folder, progress=appear)
    assert (folder / "notes.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["late"]


def test_a_link_to_an_earlier_run_stays_a_link(tmp_path):
    assert _run(tmp_path / "real", "sweep", "--size", "2MiB", "-q") == 0
    (tmp_path / "link").symlink_to("real")
    assert _run(tmp_path / "link", "sweep", "--size", "4MiB", "-q", "--force-overwrite") == 0
    assert (tmp_path / "link").is_symlink()
    about = json.loads((tmp_path / "real" / "model.json").read_text())
    assert about["peak_managed_bytes"] == 4 * x.MIB


def test_old_machine_code_is_tidied_away_and_nothing_else(tmp_path, monkeypatch):
    import os

    from nsan.model.engine import jit

    monkeypatch.setenv("NSAN_CACHE_DIR", str(tmp_path))
    old = tmp_path / "nsan-engine" / "0123456789abcdef"
    foreign = tmp_path / "nsan-engine" / "mycar"
    for folder in (old, foreign):
        folder.mkdir(parents=True)
        os.utime(folder, (0, 0))
    jit._cache_folder.cache_clear()
    assert jit._cache_folder().parent == tmp_path / "nsan-engine"
    assert not old.exists()
    assert foreign.exists()
    jit._cache_folder.cache_clear()


def test_the_program_in_the_guide_runs(tmp_path, monkeypatch):
    (code,) = blocks("docs/model.md", "python")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs/model.md", "exec"), {})
    assert nsan.summary(tmp_path / "mine" / "mine.sqlite")["migrations"]["htod_bytes"] == 8 * x.MIB


def _rows(folder, table):
    with closing(sqlite3.connect(folder / f"{folder.name}.sqlite")) as export:
        return export.execute(f"SELECT * FROM {table}").fetchall()


def test_the_same_seed_gives_the_same_trace_and_shuffling_only_its_order(tmp_path):
    options = ("random", "--size", "4MiB", "--seed", "5", "-q")
    for name, more in (("a", ()), ("b", ()), ("c", ("--shuffle-rows",))):
        assert _run(tmp_path / name, *options, *more) == 0
    a, b, c = (_rows(tmp_path / name, x.MEMCPY) for name in "abc")
    assert a == b
    assert a != c
    assert sorted(a, key=str) == sorted(c, key=str)


def test_switches_leave_rows_out_and_say_so(tmp_path):
    options = ("--no-gpu-faults", "--no-cpu-faults", "--no-memory-usage", "-q")
    assert _run(tmp_path / "off", "stream", "--size", "4MiB", *options) == 0
    summary = nsan.summary(tmp_path / "off" / "off.sqlite")
    assert summary["capture"]["gpu_faults"] == "not_recorded"
    assert summary["capture"]["cpu_faults"] == "not_recorded"
    assert summary["migrations"]["htod_bytes"] == 4 * x.MIB


@pytest.mark.parametrize("rows", ["page", "block"])
def test_other_fault_rows_have_more_rows_with_a_shared_end_and_health_notices(tmp_path, rows):
    assert _run(tmp_path / "plain", "stream", "--size", "16MiB", "-q") == 0
    assert _run(tmp_path / rows, "stream", "--size", "16MiB", "--fault-rows", rows, "-q") == 0
    plain = nsan.open_trace(tmp_path / "plain" / "plain.sqlite").gpu_faults.collect()
    other = nsan.open_trace(tmp_path / rows / f"{rows}.sqlite").gpu_faults.collect()
    truth = pl.read_parquet(tmp_path / rows / "truth" / "batch_pages.parquet")
    expected = truth.height
    if rows == "block":
        expected = truth.select("batch", pl.col("va") // (2 << 20)).unique().height
    assert other.height == expected > plain.height
    assert set(other["end_ns"]) == set(plain["end_ns"])
    assert other["n_page_faults"].sum() == truth["n_entries"].sum()
    summary = nsan.summary(tmp_path / rows / f"{rows}.sqlite")
    (check,) = [check for check in summary["health"] if check["id"] == "fault_rows"]
    assert "share their end" in check["text"]


def test_lost_rows_leave_a_hole_behind_the_first_8192(tmp_path):
    options = ("tutorial", "--size", "64MiB", "--no-prefetcher", "-q")
    assert _run(tmp_path / "whole", *options) == 0
    assert _run(tmp_path / "holed", *options, "--lost", "2ms") == 0

    def starts(name):
        trace = nsan.open_trace(tmp_path / name / f"{name}.sqlite")
        tables = (trace.gpu_faults, trace.cpu_faults, trace.migrations)
        return (
            pl.concat([table.select("start_ns") for table in tables]).collect()["start_ns"].sort()
        )

    whole, holed = starts("whole"), starts("holed")
    hole = whole[8192]
    assert holed[:8192].to_list() == whole[:8192].to_list()
    assert holed.to_list() == [t for t in whole if not hole <= t < hole + 2_000_000]
    assert len(holed) < len(whole)


def test_a_skewed_clock_moves_kernels_and_cpu_faults_and_nothing_else(tmp_path):
    options = ("stream", "--size", "8MiB", "-q")
    assert _run(tmp_path / "a", *options) == 0
    assert _run(tmp_path / "b", *options, "--skew", "40us") == 0
    a, b = (nsan.open_trace(tmp_path / n / f"{n}.sqlite") for n in "ab")
    for table in ("kernels", "cpu_faults"):
        before = getattr(a, table).collect()["start_ns"]
        assert (getattr(b, table).collect()["start_ns"] - before).unique().to_list() == [40_000]
    assert a.migrations.collect().equals(b.migrations.collect())
    assert a.gpu_faults.collect().equals(b.gpu_faults.collect())


def test_without_numba_it_says_what_to_install(monkeypatch, tmp_path, capsys):
    hide_package(monkeypatch, "numba")
    assert _run(tmp_path / "out", "sweep") == 1
    assert "pip install 'nsan[model]'" in capsys.readouterr().err
