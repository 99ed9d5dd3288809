"""The recipes through the real `nsys recipe`, on real reports with a newer modelled export beside each."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import exports as x
import polars as pl
import pytest
from polars.testing import assert_frame_equal
from vendor import need

import nsan
from nsan.cli.recipe_shells import RECIPE_FOLDER

NEW = "2023.4.4"
SAMPLES = x.REPOSITORY / "sample_data" / "model"
RANKS = ("two_gpus", "user_prefetch")
TIMEOUT_S = 300

pytestmark = [
    pytest.mark.nsys,
    # 2023.4.4 imports asyncore, which Python 3.12 no longer has.
    pytest.mark.skipif(
        sys.version_info >= (3, 12), reason="nsys 2023.4.4 runs recipes on Python 3.11"
    ),
]


def environment(base):
    """The environment of a user: the Python that has nsan first on PATH, and the recipe folder."""
    path = [str(Path(sys.executable).parent), str(need(NEW)), os.environ["PATH"]]
    return os.environ | {
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": str(x.REPOSITORY),
        "PYTHONDONTWRITEBYTECODE": "1",
        "NSYS_RECIPE_PATH": str(RECIPE_FOLDER),
        "NSAN_CACHE_DIR": str(base / "cache"),
        "NSYS_DASK_N_WORKERS": "1",
        "TMPDIR": str(base),
    }


def nsys(base, *words):
    return subprocess.run(
        ["nsys", *words],
        env=environment(base),
        cwd=base,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def lay_beside(report, sample):
    """Put an export of the model beside a report, as the newer export of the same session."""
    started = nsan.open_trace(report).info.session_start_utc_ns
    export = report.with_suffix(".sqlite")
    shutil.copy(sample, export)
    with closing(sqlite3.connect(export)) as database:
        database.execute("UPDATE TARGET_INFO_SESSION_START_TIME SET utcEpochNs = ?", (started,))
        database.commit()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with two real reports of ranks 0 and 1, a modelled export beside each, and one that is none."""
    need(NEW)
    folder = tmp_path_factory.mktemp("nsys")
    (folder / "night").mkdir()
    recorded = nsys(
        folder, "profile", "-o", "night/rank0", "--sample=none", "--cpuctxsw=none", "true"
    )
    assert recorded.returncode == 0, recorded.stderr
    shutil.copy2(folder / "night" / "rank0.nsys-rep", folder / "night" / "rank1.nsys-rep")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NSAN_CACHE_DIR", str(folder / "cache"))
        for rank, name in enumerate(RANKS):
            lay_beside(folder / "night" / f"rank{rank}.nsys-rep", SAMPLES / name / f"{name}.sqlite")
    (folder / "night" / "rank2.nsys-rep").write_bytes(b"no report at all")
    return folder


@pytest.fixture(scope="module")
def wrote(base):
    """The folders that `uvm_sum` wrote, by mode."""
    return {
        mode: recipe(base, "uvm_sum", mode, "--csv")
        for mode in ("none", "concurrent", "dask-futures")
    }


def recipe(base, name, mode, *words):
    output = f"{name}-{mode}"
    done = nsys(
        base, "recipe", name, "--input", "night", "--mode", mode, "--output", output, *words
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Generated:\n    {output}" in done.stdout
    assert "rank2.nsys-rep could not be read" in done.stdout + done.stderr
    return base / output


def table(folder, name):
    return pl.read_parquet(folder / f"{name}.parquet")


def by_sql(path):
    """Bytes and rows by direction and cause of an export, by plain SQL."""
    query = f"SELECT copyKind, migrationCause, count(*), sum(bytes) FROM {x.MEMCPY} WHERE copyKind > 10 GROUP BY 1, 2"
    direction = {11: "htod", 12: "dtoh", 13: "dtod"}
    cause = {
        0: "unknown",
        1: "user",
        2: "coherence",
        3: "prefetch",
        4: "eviction",
        5: "access_counters",
    }
    return {(direction[a], cause[b]): (n, size) for a, b, n, size in x.ask(path, query)}


@pytest.mark.parametrize("mode", ["none", "concurrent", "dask-futures"])
def test_every_mode_has_the_figures_that_plain_sql_and_nsan_s_summary_have(wrote, mode):
    stats, groups = table(wrote[mode], "rank_stats"), table(wrote[mode], "rank_migrations")
    assert stats.select("run", "rank").rows() == [("night", 0), ("night", 1)]
    for rank, name in enumerate(RANKS):
        path = SAMPLES / name / f"{name}.sqlite"
        mine = groups.filter(pl.col("rank") == rank)
        added = mine.group_by("direction", "cause").agg(pl.col("n", "bytes").sum())
        assert {row[:2]: row[2:] for row in added.rows()} == by_sql(path)
        row, summary = stats.row(rank, named=True), nsan.summary(nsan.open_trace(path))
        assert row["migrations_busy_ns"] == summary["migrations"]["busy_ns"]
        assert row["gpu_faults_busy_ns"] == summary["gpu_faults"]["busy_ns"]
        assert row["n_fault_rows"] == summary["gpu_faults"]["n_rows"]
        assert row["duration_ns"] == summary["duration_ns"]


def test_modes_differ_in_nothing(wrote):
    for name in ("rank_stats", "rank_migrations", "all_stats", "all_migrations"):
        one, *others = (table(folder, name) for folder in wrote.values())
        for other in others:
            assert_frame_equal(one, other)


def test_the_folder_is_as_the_framework_s_own(wrote):
    folder = wrote["none"]
    assert (folder / f"{folder.name}.nsys-analysis").is_file()
    assert (folder / "all_migrations.csv").is_file()
    assert (folder / "uvm_sum.ipynb").is_file()


@pytest.mark.parametrize("name", ["uvm_clusters", "uvm_allocator", "uvm_time_map"])
def test_the_other_recipes_run_too(base, name):
    folder = recipe(base, name, "none")
    assert table(folder, "rank_stats")["rank"].unique().sort().to_list() == [0, 1]


def test_a_notebook_runs_in_its_folder_with_nbconvert(base, wrote):
    words = ["--to", "notebook", "--execute", "--stdout", "uvm_sum.ipynb"]
    done = subprocess.run(
        [sys.executable, "-m", "jupyter", "nbconvert", *words],
        cwd=wrote["none"],
        env=environment(base),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "2 reports, read by nsan" in done.stdout
    assert "image/svg" in done.stdout or "<svg" in done.stdout


def test_reports_without_unified_memory_end_as_the_framework_does_and_say_why(base):
    empty = base / "empty"
    empty.mkdir()
    shutil.copy2(base / "night" / "rank0.nsys-rep", empty / "rank0.nsys-rep")
    done = nsys(
        base, "recipe", "uvm_sum", "--input", "empty", "--mode", "none", "--output", "nothing"
    )
    assert done.returncode == 0
    assert "no Unified Memory data" in done.stdout + done.stderr
    assert "--cuda-um-gpu-page-faults=true" in done.stdout + done.stderr
    assert not (base / "nothing").exists()


def test_an_export_beside_that_is_not_read_is_named_with_the_reason(base):
    place = base / "outdated"
    place.mkdir()
    shutil.copy2(base / "night" / "rank0.nsys-rep", place / "rank0.nsys-rep")
    shutil.copy2(base / "night" / "rank0.sqlite", place / "rank0.sqlite")
    os.utime(place / "rank0.sqlite", (0, 0))
    words = ["--input", "outdated", "--mode", "none", "--output", "none of it"]
    done = nsys(base, "recipe", "uvm_sum", *words)
    said = done.stdout + done.stderr
    assert "rank0.sqlite beside the report was not read: it is older than the report" in said
    assert "no Unified Memory data" in said


def test_a_python_without_nsan_is_named_in_one_line(base, tmp_path):
    """The recipes are copied where nsan is not, as `nsan recipe install --into` does."""
    own = tmp_path / "recipes"
    shutil.copytree(RECIPE_FOLDER, own)
    hidden = tmp_path / "hidden" / "nsan"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("")
    changed = environment(base) | {"NSYS_RECIPE_PATH": str(own), "PYTHONPATH": str(hidden.parent)}
    done = subprocess.run(
        ["nsys", "recipe", "uvm_sum", "--input", "night"],
        env=changed,
        cwd=base,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 1
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    assert len(lines) == 1
    assert "put the Python that has nsan first on PATH" in lines[0]
