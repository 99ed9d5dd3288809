"""Conditions that the driver model ran: what was planted is found, what was not is not, and noise is noise."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
import pytest
from conftest import SOAK

from nsan.analysis.compare.movers import movers
from nsan.comparing.conditions import find_conditions
from nsan.comparing.figures import FIGURES
from nsan.comparing.measuring import Asking, measure
from nsan.model.making import Recipe, make, oversubscribed, peak_bytes
from nsan.model.settings import Settings
from nsan.model.size import Size
from nsan.model.workloads import network, workload
from nsan.model.workloads.training import TrainingRun, trained
from nsan.units import MIB
from nsan.uvm import constants as uvm

SEEDS = {"A": range(1, 5), "B": range(5, 9)}
MOVED = ("more", "less")
LEAST = 0.02


@dataclass(frozen=True)
class Pattern:
    """A small program of the model."""

    name: str
    size: Size
    factor: float | None = None

    def recipe(self, seed):
        program = workload(self.name).build(replace(self.size, seed=seed))
        settings = Settings(seed=seed)
        if self.factor:
            settings = oversubscribed(settings, peak_bytes(program), self.factor)
        return Recipe(program, settings)


@dataclass(frozen=True)
class Training:
    """Training of a small network, in memory that is too small for it."""

    allocator: str

    def recipe(self, seed):
        settings = Settings(seed=seed)
        run = TrainingRun(steps=3, batch=8, allocator=self.allocator)
        made = trained(network("resnet-8"), run, settings.gpu_profile)
        settings = oversubscribed(settings, made.peak_tensor_bytes, 1.3)
        return Recipe(made.program, settings, placed=made)


SWEEP = Pattern("sweep", Size(8 * MIB, iterations=3))
PLANTS = {
    "prefetch": (SWEEP, replace(SWEEP, size=replace(SWEEP.size, prefetch="ahead"))),
    "factor": (SWEEP, replace(SWEEP, factor=1.5)),
    "caching": (Training("raw"), Training("caching")),
}


def made(what, folder, seeds):
    """Run a program under several seeds, one folder each."""
    for seed in seeds:
        make(what.recipe(seed), folder / f"run{seed}")
    return folder


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Folders of runs, and movers, of each plant; plants with the same base share its runs."""
    found, place, folders = {}, tmp_path_factory.mktemp("plants"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NSAN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        for name, sides in PLANTS.items():
            for label, side in zip("AB", sides, strict=True):
                if side not in folders:
                    folders[side] = made(side, place / str(len(folders)), SEEDS[label])
            own = [folders[side] for side in sides]
            samples = measure(
                find_conditions(own), Asking(scopes=("run", "step", "range", "kernel"))
            )
            found[name] = (own, movers(samples, FIGURES))
    return found


# Truth: from what the model wrote beside the trace, and by plain SQL and arithmetic on rows ------------


def rows_of(folder, query):
    with closing(sqlite3.connect(next(folder.glob("*.sqlite")))) as database:
        names = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        # nsys makes a table only when it has rows.
        return (
            database.execute(query).fetchall()
            if query.split(" FROM ")[1].split()[0] in names
            else []
        )


def covered(spans):
    """Length of a union of intervals."""
    total, until = 0, -1
    for start, end in sorted(spans):
        total += max(end - max(start, until), 0)
        until = max(until, end)
    return total


def shared(spans, others):
    """Length of what two unions have in common."""
    return covered(spans) + covered(others) - covered([*spans, *others])


def truth_of(folder):
    """Figures of a run, without nsan: its model.json, its truth, and its rows."""
    costs = json.loads((folder / "model.json").read_text())["figures"]
    truth = {path.stem: pl.read_parquet(path) for path in (folder / "truth").glob("*.parquet")}
    moved = rows_of(
        folder,
        "SELECT start, end, bytes, copyKind, migrationCause, virtualAddress FROM "
        "CUPTI_ACTIVITY_KIND_MEMCPY WHERE copyKind IN (11, 12, 13)",
    )
    kernels = rows_of(folder, "SELECT start, end FROM CUPTI_ACTIVITY_KIND_KERNEL")
    waits = list(truth["batches"].select("raised_ns", "end_ns").iter_rows())
    faulted = {va // uvm.VA_BLOCK_BYTES for va in truth["batches"]["va"]}
    into = sum(costs[f"in_{cause}_bytes"] for cause in ("coherence", "prefetch", "user"))

    def by_cause(number):
        return sum(row[2] for row in moved if row[4] == number)

    return {
        "duration_ns": costs["duration_ns"],
        "gpu_faults.rows": costs["n_batches"],
        "gpu_faults.va_blocks": len(faulted),
        "cpu_faults.n": len(rows_of(folder, "SELECT 1 FROM CUDA_UM_CPU_PAGE_FAULT_EVENTS")),
        "migrations.n": truth["copy_batches"].height,
        "migrations.bytes": into + costs["out_bytes"],
        "migrations.htod_bytes": into,
        "migrations.dtoh_bytes": costs["out_bytes"],
        "migrations.dtod_bytes": 0,
        "migrations.coherence_bytes": by_cause(uvm.CAUSE_COHERENCE),
        "migrations.prefetch_bytes": by_cause(uvm.CAUSE_PREFETCH),
        "migrations.user_bytes": by_cause(uvm.CAUSE_USER),
        "migrations.eviction_bytes": costs["evicted_bytes"],
        "migrations.access_counters_bytes": 0,
        "migrations.busy_ns": covered([row[:2] for row in moved]),
        "refaults.bytes": sum(truth["refaults"]["bytes"]),
        "kernels.n": truth["kernel_counts"].filter(pl.col("kind") == "kernel").height,
        "kernels.busy_ns": costs["kernel_ns"],
        "kernels.waiting_ns": shared(kernels, waits),
        "managed.allocations": truth["allocation_counts"].height,
        **{f"step.{name}": value for name, value in steps_of(folder, moved, truth).items()},
    }


def steps_of(folder, moved, truth):
    """Means of the steps after the first."""
    steps = rows_of(
        folder,
        "SELECT start, end FROM NVTX_EVENTS WHERE text = 'step' AND end IS NOT NULL ORDER BY start",
    )
    found = []
    for start, end in steps[1:]:
        mine = [row for row in moved if start <= row[0] < end]
        into, out = ([row for row in mine if (row[3] == 12) is is_out] for is_out in (False, True))
        evicted = [row for row in out if row[4] == uvm.CAUSE_EVICTION]
        raised = truth["batches"]["raised_ns"]
        found.append(
            {
                "time_ns": end - start,
                "fault_rows": sum(start <= each < end for each in raised),
                "in_bytes": sum(row[2] for row in into),
                "out_bytes": sum(row[2] for row in out),
                "evicted_bytes": sum(row[2] for row in evicted),
                "va_blocks": len({row[5] // uvm.VA_BLOCK_BYTES for row in mine}),
                "unique_bytes": covered([(row[5], row[5] + row[2]) for row in mine]),
            }
        )
    return {name: np.mean([step[name] for step in found]) for name in found[0]}


def kernels_of(folder):
    """Batches, and bytes in, of all kernels of a name."""
    counts = pl.read_parquet(folder / "truth" / "kernel_counts.parquet")
    found = {}
    for each in counts.filter(pl.col("kind") == "kernel").iter_rows(named=True):
        mine = found.setdefault(each["name"], {"kernel.n": 0, "kernel.fault_rows": 0})
        mine["kernel.n"] += 1
        mine["kernel.fault_rows"] += each["n_batches"]
    return found


def expected(figure, base, other):
    """What the truth of all runs of a side says: did it change, and by how much?"""
    apart = max(base) < min(other) or max(other) < min(base)
    first, second = np.mean(base), np.mean(other)
    large = abs(second - first) > LEAST * first
    by_one_event = abs(second - first) <= FIGURES[figure].grain
    if not (apart and large) or by_one_event:
        return "none"
    return "more" if second > first else "less"


# Planted changes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANTS)
def test_movers_are_exactly_the_figures_that_the_truth_says_changed(planted, name):
    folders, found = planted[name]
    truths = [[truth_of(run) for run in sorted(folder.iterdir())] for folder in folders]
    said = found.filter(pl.col("scope").is_in(["run", "step"])).rows_by_key("figure", named=True)
    assert set(said) == {*truths[0][0], "managed.bytes"}
    for figure, values in said.items():
        if figure == "managed.bytes":
            continue
        row = values[0]
        base, other = ([truth[figure] for truth in side] for side in truths)
        wanted = expected(figure, base, other)
        assert (row["verdict"] if row["verdict"] in MOVED else "none") == wanted, (figure, row)
        near = {"rel": 2e-3 if figure.endswith("_ns") else 1e-9}
        assert row["base"] == pytest.approx(np.mean(base), **near), figure
        assert row["other"] == pytest.approx(np.mean(other), **near), figure
        assert row["kind"] == "modelled"


@pytest.mark.parametrize("name", PLANTS)
def test_kernels_that_move_are_those_whose_truth_changed(planted, name):
    folders, found = planted[name]
    truths = [[kernels_of(run) for run in sorted(folder.iterdir())] for folder in folders]
    rows = found.filter(
        pl.col("scope") == "kernel", pl.col("figure").is_in(["kernel.n", "kernel.fault_rows"])
    )
    assert rows.height >= 2
    for row in rows.iter_rows(named=True):
        figure, place = row["figure"], row["place"]
        base, other = ([truth[place][figure] for truth in side] for side in truths)
        wanted = expected(figure, base, other)
        if wanted == "none":
            assert row["verdict"] not in MOVED, row
        elif np.ptp(base) == np.ptp(other) == 0:
            assert row["verdict"] == wanted, row
        assert (row["base"], row["other"]) == (np.mean(base), np.mean(other))


def test_each_plant_shows_its_mark(planted):
    def change(name, figure):
        rows = planted[name][1].filter(pl.col("figure") == figure)
        return rows.select("verdict", "base", "other").row(0)

    size = SWEEP.size.n_bytes
    assert change("prefetch", "migrations.user_bytes") == ("more", 0, size)
    assert change("prefetch", "gpu_faults.rows")[::2] == ("less", 0)
    assert change("prefetch", "migrations.bytes")[0] == "same"
    assert change("factor", "migrations.eviction_bytes")[:2] == ("more", 0)
    assert change("factor", "kernels.n") == ("same", 3, 3)
    assert change("caching", "managed.allocations")[0] == "less"
    assert change("caching", "kernels.n")[0] == "same"


# Noise alone ----------------------------------------------------------------------------------------

NULLS = (
    Pattern("random", Size(4 * MIB, iterations=3)),
    Pattern("zipf", Size(4 * MIB, iterations=3)),
    Pattern("random", Size(8 * MIB, iterations=3), 1.5),
    Pattern("chase", Size(4 * MIB, iterations=2)),
    Pattern("sweep", Size(6 * MIB, iterations=3), 1.5),
)
"""Programs and machines in which another seed makes another run."""

N_PAIRS = 100 if SOAK else 10


def null_samples(folder):
    """Samples of pairs that nothing but seeds tells apart.

    `make soak`: ten new runs for each pair. `make test`: ten runs of one program, put into two sides of five
    in ten ways.
    """
    if SOAK:
        for number in range(N_PAIRS):
            what = NULLS[number % len(NULLS)]
            yield what, ten_runs(what, folder / str(number), 10 * number + 1)
        return
    random = np.random.default_rng(1)
    for what in NULLS[2:3]:
        samples = ten_runs(what, folder / f"{what.name} {what.factor}", 1)
        for _ in range(N_PAIRS):
            order = random.permutation(10)
            place = pl.col("run") + 5 * (pl.col("condition") == "B")
            now = place.replace_strict([*range(10)], [int(at) for at in order])
            side = pl.when(now < 5).then(pl.lit("A")).otherwise(pl.lit("B"))
            yield what, samples.with_columns(condition=side, run=now % 5)


def ten_runs(what, folder, first):
    sides = [
        made(what, folder / label, range(first + shift, first + shift + 5))
        for label, shift in (("A", 0), ("B", 5))
    ]
    samples = measure(find_conditions(sides))
    shutil.rmtree(folder)  # a thousand runs in `make soak`
    return samples


def test_runs_that_differ_only_by_chance_show_no_mover(tmp_path):
    tested, moved = {}, []
    for what, samples in null_samples(tmp_path):
        found = movers(samples, FIGURES)
        assert (found["noise"] == "runs").all()
        assert not found["verdict"].is_in(["unjudged", "unknown"]).any()
        tested[what] = tested.get(what, 0) + found.filter(pl.col("p") < 1).height
        wrong = found.filter(pl.col("verdict").is_in(MOVED))
        if wrong.height:
            moved.append((what, wrong.select("figure", "base", "other", "p_holm").rows()))
    print(f"{len(moved)} of {N_PAIRS} null pairs moved: {moved}")
    assert all(n_varying > 10 for n_varying in tested.values()), tested
    assert len(moved) <= N_PAIRS * 0.05, moved
