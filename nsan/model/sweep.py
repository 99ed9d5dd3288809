"""A network under many conditions: oversubscription factor x allocator x hint, with resume."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final

import polars as pl

from nsan.errors import OutputWriteError, PlaceTakenError, UsageError
from nsan.model.allocator_names import parse_allocator
from nsan.model.hints import parse_hint
from nsan.model.making import ABOUT, Recipe, check_factor, is_whole, make, oversubscribed
from nsan.model.networks import Trainable
from nsan.model.origin import Trained
from nsan.model.settings import Settings
from nsan.model.workloads.training import TrainingRun, trained

TABLE: Final = "sweep.csv"
_CONDITIONS: Final = ("allocator", "factor", "hint")

Tell = Callable[[str, bool], None]


@dataclass(frozen=True)
class Case:
    """One run of a sweep.

    Attributes
    ----------
    factor : float
        Peak of the live tensors over GPU memory.
    allocator : str
        As :func:`nsan.model.allocator_names.parse_allocator` reads it.
    hint : str
        As people write it, or "none".
    """

    factor: float
    allocator: str
    hint: str

    @property
    def folder(self) -> str:
        """Name of the folder of this run."""
        hint, allocator = _plain(self.hint), _plain(self.allocator)
        return f"{allocator}-{self.factor:g}-{hint}"


def _plain(text: str) -> str:
    """Write a condition so that it can be a part of a name of a folder: long lists get a digest."""
    kind, at, names = text.partition("@")
    if at:
        digest = hashlib.sha256(names.encode()).hexdigest()[:12]
        return f"{_plain(kind)}-{names.count('+') + 1}-tensors-{digest}"
    return text.replace(":", "-").replace("+", "-")


def cases(factors: Sequence[float], allocators: Sequence[str], hints: Sequence[str]) -> list[Case]:
    """List the runs of a sweep.

    Parameters
    ----------
    factors : sequence of float
        Oversubscription factors.
    allocators, hints : sequence of str
        Ways to allocate, and what the driver is told.

    Returns
    -------
    list of Case
        Every combination, each once, whatever the order in which switches of an allocator are written.

    Raises
    ------
    UsageError
        If there is no such allocator.
    """
    named = [str(parse_allocator(each)) for each in allocators]
    return list(dict.fromkeys(Case(*each) for each in product(factors, named, hints)))


def recipe(network: Trainable, training: TrainingRun, settings: Settings, case: Case) -> Recipe:
    """Say how one run is made.

    Parameters
    ----------
    network : Trainable
        The network.
    training : TrainingRun
        Its sizes; the case decides allocator and hint.
    settings : Settings
        The machine; the case decides its memory.
    case : Case
        The conditions.

    Returns
    -------
    Recipe
        All that decides the trace.
    """
    hint = parse_hint(case.hint)
    own = replace(training, allocator=case.allocator, hints=(hint,) if hint else ())
    placed = trained(network, own, settings.gpu_profile)
    machine = oversubscribed(settings, placed.peak_tensor_bytes, case.factor)
    check_factor(machine, placed.peak_tensor_bytes, case.factor)
    return Recipe(placed.program, machine, placed=placed, origin=Trained(network.name, own))


def sweep(
    network: Trainable,
    training: TrainingRun,
    settings: Settings,
    wanted: Sequence[Case],
    folder: Path,
    *,
    tell: Tell | None = None,
) -> pl.DataFrame:
    """Run every case that is not there yet.

    Parameters
    ----------
    network : Trainable
        The network.
    training : TrainingRun
        Its sizes.
    settings : Settings
        The machine.
    wanted : sequence of Case
        The runs.
    folder : Path
        Gets a folder per run, and ``sweep.csv``. A run that is there already, made in the same way,
        is kept: an interrupted sweep goes on where it was.
    tell : callable, optional
        Called with the name of each run before it is made, and whether it was there.

    Returns
    -------
    DataFrame
        One row per case, in their order: the conditions and what the run cost. Modelled.

    Raises
    ------
    OutputWriteError, PlaceTakenError
        If a run of that name is there, but was made in another way or by something else.
    """
    if not wanted:
        msg = "A sweep without a factor, allocator or hint has no run: name at least one of each."
        raise UsageError(msg)
    if folder.exists() and not folder.is_dir():
        raise PlaceTakenError(folder, "is a file")
    _check_table(folder / TABLE)
    recipes = [recipe(network, training, settings, case) for case in wanted]
    rows = []
    for case, made in zip(wanted, recipes, strict=True):
        place = folder / case.folder
        about = _earlier(place, made)
        if tell:
            tell(case.folder, about is not None)
        rows.append(_row(case, about or make(made, place, overwrite=place.exists())))
    table = pl.DataFrame(rows, infer_schema_length=None)
    _write_table(folder / TABLE, table)
    return table


def _check_table(place: Path) -> None:
    """Refuse to write over a table of something else."""
    if not place.exists():
        return
    try:
        with place.open(encoding="utf-8") as file:
            first = file.readline()
    except (OSError, UnicodeDecodeError):
        first = ""
    if not first.startswith(",".join(_CONDITIONS)):
        raise PlaceTakenError(place, "is there, and no table of a sweep")


def _write_table(place: Path, table: pl.DataFrame) -> None:
    """Write the table beside its place and then into it."""
    beside = place.with_name(f".{place.name}.{os.getpid()}.part")
    try:
        beside.write_text(table.write_csv(), encoding="utf-8")
        beside.replace(place)
    except OSError as error:
        raise OutputWriteError(place, error.strerror or str(error)) from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def _earlier(place: Path, made: Recipe) -> dict[str, Any] | None:
    """Read what an earlier run of the same recipe left; None if there is none, or not all of it."""
    if not place.exists():
        return None
    try:
        about = json.loads((place / ABOUT).read_text(encoding="utf-8"))
        digest = about["recipe_sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlaceTakenError(place, "is there, and no run of `nsan model`") from error
    if digest != made.digest():
        raise PlaceTakenError(place, "is there, and was made in another way")
    return dict(about) if is_whole(place) else None


def _row(case: Case, about: dict[str, Any]) -> dict[str, Any]:
    return {
        "allocator": case.allocator,
        "factor": case.factor,
        "hint": case.hint,
        "capacity_bytes": about["capacity_bytes"],
        "peak_tensor_bytes": about["allocator"]["peak_tensor_bytes"],
        "peak_managed_bytes": about["peak_managed_bytes"],
        **about["figures"],
        "n_evictions": about["truth"]["evictions"]["rows"],
        "n_refaults": about["truth"]["refaults"]["rows"],
    }
