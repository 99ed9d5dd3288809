"""Traces with a planted problem, made by the driver model, and what the remedy gains there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import nsan
from nsan.model.machine import run
from nsan.model.making import Recipe, make
from nsan.model.program import Allocate


@dataclass(frozen=True)
class Plant:
    """A program with a problem.

    ``rule`` has to be the first advice, about the managed allocation ``allocation`` (name in the program;
    "": about none). ``remedied`` is the same program with the remedy, written by hand; None where the
    remedy saves no time (lost rows, missing switches, memory only).
    """

    name: str
    rule: str
    recipe: Recipe
    allocation: str = ""
    remedied: Recipe | None = None


@dataclass(frozen=True)
class Clean:
    """A program without a problem: nothing above "info" may be advised."""

    name: str
    recipe: Recipe


def written(planted: Plant | Clean, folder: Path) -> Path:
    """Write the trace of a program, with its snapshot if it has one."""
    make(planted.recipe, folder / planted.name)
    return folder / planted.name / f"{planted.name}.sqlite"


def duration_ns(recipe: Recipe) -> int:
    return run(recipe.program, recipe.settings).end_ns


def gained_ns(plant: Plant) -> int:
    """What the remedy saves of the time of the run, by the model itself."""
    return duration_ns(plant.recipe) - duration_ns(plant.remedied)


def address_of(plant: Plant, trace: Path) -> int:
    """Find an allocation of the program in the trace: they are in the same order."""
    names = [each.name for each in plant.recipe.program.operations if isinstance(each, Allocate)]
    found = nsan.open_trace(trace).allocations.sort("alloc_ns").collect()
    managed = found.filter(found["kind"].cast(str).str.starts_with("managed"))
    return managed["va"][names.index(plant.allocation)]
