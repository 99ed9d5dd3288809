"""The modelled traces of sample_data: what each shows, and how to make them again row for row."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import polars as pl

from nsan.io.sqlite_file import CellType, SqliteFile
from nsan.model.making import ABOUT, SNAPSHOT, TRUTH, Recipe, make, oversubscribed, peak_bytes
from nsan.model.origin import Built
from nsan.model.settings import Settings
from nsan.model.size import Size
from nsan.model.sweep import Case, cases
from nsan.model.sweep import recipe as training_recipe
from nsan.model.workloads import network, workload
from nsan.model.workloads.training import TrainingRun
from nsan.units import MIB

HASHES: Final = "hashes.json"
_VERSIONED: Final = ("META_DATA_EXPORT", "TARGET_INFO_SYSTEM_ENV")
"""They name the version of nsan."""

_ALL_ROWS: Final = (0, 1 << 62)


@dataclass(frozen=True)
class Sample:
    """One trace of sample_data: what it shows, its workload, and how far GPU memory is exceeded."""

    shows: str
    workload: str
    size: Size
    factor: float | None = None

    def recipe(self) -> Recipe:
        """Say how it is made."""
        program = workload(self.workload).build(self.size)
        settings = Settings(n_gpus=self.size.n_gpus, seed=self.size.seed)
        if self.factor is not None:
            settings = oversubscribed(settings, peak_bytes(program), self.factor)
        return Recipe(program, settings, origin=Built(self.workload, self.size))

    def command(self, name: str) -> str:
        """Give the command line that makes the same trace."""
        parts = [f"nsan model run {self.workload} --size {self.size.n_bytes // MIB}MiB"]
        if self.size.iterations > 1:
            parts.append(f"--iterations {self.size.iterations}")
        if self.size.prefetch != "none":
            parts.append(f"--prefetch {self.size.prefetch}")
        if self.size.n_gpus > 1:
            parts.append(f"--gpus {self.size.n_gpus}")
        if self.factor is not None:
            parts.append(f"--oversubscription-factor {self.factor}")
        return " ".join([*parts, "-o", name])


@dataclass(frozen=True)
class TrainingSample:
    """A trace of training steps: what it shows, the network, and under which conditions."""

    shows: str
    network: str
    training: TrainingRun
    case: Case

    def recipe(self) -> Recipe:
        """Say how it is made."""
        return training_recipe(network(self.network), self.training, Settings(), self.case)

    def command(self, name: str) -> str:
        """Give the command line that makes the same trace."""
        sizes = f"--batch {self.training.batch} --image {self.training.image}"
        return (
            f"nsan model run {self.network} {sizes} --allocator {self.case.allocator} "
            f"--oversubscription-factor {self.case.factor} -o {name}"
        )


@dataclass(frozen=True)
class SweepSample:
    """Traces of one training under several conditions: what they show, the network, factors and allocators."""

    shows: str
    network: str
    training: TrainingRun
    factors: tuple[float, ...]
    allocators: tuple[str, ...] = ("raw", "caching")

    def cases(self) -> list[Case]:
        """List its runs."""
        return cases(self.factors, self.allocators, ("none",))

    def recipe(self, case: Case) -> Recipe:
        """Say how one of its runs is made."""
        return training_recipe(network(self.network), self.training, Settings(), case)

    def command(self, name: str) -> str:
        """Give the command line that makes the same traces, with more beside them."""
        factors = ",".join(f"{factor:g}" for factor in self.factors)
        return (
            f"nsan model sweep {self.network} --batch {self.training.batch} --steps {self.training.steps} "
            f"--factors {factors} -o {name}"
        )


_STEPS: Final = TrainingRun(batch=1, image=64)

SAMPLES: Final[dict[str, Sample | TrainingSample]] = {
    "stream": Sample(
        "many thread blocks stream through two arrays that the CPU filled: batches of many faults, the "
        "density prefetcher at work",
        "stream",
        Size(32 * MIB),
    ),
    "random": Sample(
        "gathers of random elements, GPU memory exceeded: most of what comes is evicted unused",
        "random",
        Size(8 * MIB),
        1.25,
    ),
    "first_touch": Sample(
        "an array that the GPU touches first: fault rows without a copy, then the CPU reads a quarter",
        "first-touch",
        Size(32 * MIB),
    ),
    "ping_pong": Sample(
        "the host polls a flag that a kernel writes: pages to and fro, throttled spins, a pin",
        "ping-pong",
        Size(8 * MIB, iterations=2),
    ),
    "oversubscribed_sweep": Sample(
        "four steps over one array in two thirds of the memory that it needs: each step finds it "
        "evicted by the one before",
        "sweep",
        Size(48 * MIB, iterations=4),
        1.5,
    ),
    "user_prefetch": Sample(
        "the same program as stream with cudaMemPrefetchAsync: rows of 2 MiB, no fault",
        "stream",
        Size(32 * MIB, prefetch="back"),
    ),
    "advice": Sample(
        "arrays under read-mostly, preferred location and accessed-by, and one without: duplicates, "
        "remote mappings, no fault at all",
        "advice",
        Size(32 * MIB, iterations=2),
    ),
    "two_gpus": Sample(
        "two GPUs take turns on one array: copies from GPU to GPU",
        "two-gpus",
        Size(24 * MIB, iterations=2, n_gpus=2),
    ),
    "pca_off": TrainingSample(
        "two training steps of AlexNet without caching, each tensor a managed allocation of its own: first "
        "touches in every step, nothing dead moves",
        "alexnet",
        _STEPS,
        Case(1.25, "raw", "none"),
    ),
    "pca_on": TrainingSample(
        "the same with PyTorch's caching allocator, in the same memory: no first touch in the second step, "
        "but cached memory is evicted and brought back",
        "alexnet",
        _STEPS,
        Case(1.25, "caching", "none"),
    ),
}
"""Samples by name."""

SWEEPS: Final[dict[str, SweepSample]] = {
    "pca_sweep": SweepSample(
        "three training steps of a small ResNet without and with PyTorch's caching allocator, from GPU memory "
        "that is enough to half of what is needed: with the cache fewer fault rows and shorter steps, but more traffic",
        "resnet-8",
        TrainingRun(batch=64, steps=3),
        (0.8, 1.1, 1.3, 1.5, 2.0),
    ),
}
"""Samples of several runs each, by name: a folder for each run."""

KEPT_TRUTH: Final = ("batches", "evictions", "refaults")
"""Tables of the truth that runs of a sweep keep: all of them together would be too large to ship."""


def make_samples(
    folder: Path, *, overwrite: bool = False, tell: Callable[[str], None] | None = None
) -> dict[str, dict[str, str]]:
    """Make all samples and note a hash of the rows of each of their tables.

    Parameters
    ----------
    folder : Path
        Gets a folder per sample, and ``hashes.json``.
    overwrite : bool, default False
        Replace samples that are there.
    tell : callable, optional
        Called with the name of each sample before it is made.

    Returns
    -------
    dict
        By sample (of a sweep: by ``SWEEP/RUN``), then by table: SHA-256 of its rows. Every machine gets the
        same.
    """
    folder.mkdir(parents=True, exist_ok=True)
    hashes = {}
    for name, sample in SAMPLES.items():
        if tell:
            tell(name)
        make(sample.recipe(), folder / name, overwrite=overwrite)
        hashes[name] = table_hashes(folder / name)
    for name, sweep in SWEEPS.items():
        if tell:
            tell(name)
        hashes |= make_sweep(sweep, sweep.cases(), folder / name, overwrite=overwrite)
    text = json.dumps(hashes, indent=2, sort_keys=True) + "\n"
    (folder / HASHES).write_text(text, encoding="utf-8")
    return hashes


def make_sweep(
    sweep: SweepSample, wanted: Iterable[Case], folder: Path, *, overwrite: bool = False
) -> dict[str, dict[str, str]]:
    """Make runs of a sweep, and keep of each what a reader needs.

    Parameters
    ----------
    sweep : SweepSample
        The sweep.
    wanted : iterable of Case
        Which of its runs.
    folder : Path
        Gets a folder per run.
    overwrite : bool, default False
        Replace runs that are there.

    Returns
    -------
    dict
        By ``SWEEP/RUN``, then by table: SHA-256 of its rows.
    """
    hashes = {}
    for case in wanted:
        place = folder / case.folder
        make(sweep.recipe(case), place, overwrite=overwrite)
        _thin(place, has_cache=case.allocator != "raw")
        hashes[f"{folder.name}/{case.folder}"] = table_hashes(place)
    return hashes


def _thin(folder: Path, *, has_cache: bool) -> None:
    """Leave out what no reader of a sweep asks for, and say so in what the run says of itself."""
    for file in (folder / TRUTH).glob("*.parquet"):
        if file.stem not in KEPT_TRUTH:
            file.unlink()
    if not has_cache:  # each tensor is an allocation of its own: the trace says all
        (folder / SNAPSHOT).unlink()
    place = folder / ABOUT
    about = json.loads(place.read_text(encoding="utf-8"))
    about["truth"] = {name: about["truth"][name] for name in KEPT_TRUTH}
    place.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def table_hashes(folder: Path) -> dict[str, str]:
    """Hash the rows of each event table of a made trace, and of its truth.

    Parameters
    ----------
    folder : Path
        What :func:`nsan.model.making.make` wrote.

    Returns
    -------
    dict of str to str
        By table, truth tables as ``truth/NAME``: SHA-256 over the rows as text, in order.
    """
    hashes = {}
    with SqliteFile(folder / f"{folder.name}.sqlite") as database:
        for table in database.table_names:
            if table not in _VERSIONED:
                columns: dict[str, CellType] = dict.fromkeys(database.columns(table), "text")
                rows, _ = database.read(table, columns, _ALL_ROWS)
                hashes[table] = _hash(rows)
    for file in sorted((folder / "truth").glob("*.parquet")):
        hashes[f"truth/{file.stem}"] = _hash(pl.read_parquet(file))
    return hashes


def _hash(rows: pl.DataFrame) -> str:
    return hashlib.sha256(rows.write_csv().encode()).hexdigest()
