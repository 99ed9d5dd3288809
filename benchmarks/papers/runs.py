"""Runs for the tables: made on the driver model, or given; each as the ledger of its steps."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from urllib.parse import quote

from nsan.analysis.pca.ratios import warm_steps
from nsan.model.making import ABOUT
from nsan.model.settings import Settings
from nsan.model.sweep import sweep
from nsan.model.workloads import network
from nsan.model.workloads.training import TrainingRun
from nsan.pca_found import find_runs
from nsan.pca_runs import open_run

WARMUP = 2
"""Steps left out at the start: in the first one the driver meets every page, and the second still feels it."""

STEPS = 6
"""Steps of a modelled run: four of them warm."""

QUICK_STEPS = 4
TREND = 0.1
"""Warm steps still trend if the first is further than this share from the mean of the later ones."""


@dataclass
class Job:
    """What is asked of a table.

    Attributes
    ----------
    folder : Path
        Gets the modelled runs; those that are there are kept.
    quick : bool
        One network, small sizes, a factor or two.
    runs : tuple of Path
        Runs that were recorded; none: the driver model makes them.
    is_scratch : bool
        The folder goes away: a run is deleted when its figures are known.
    tell : callable
        Called with a line on what is done.
    """

    folder: Path
    quick: bool = False
    runs: tuple[Path, ...] = ()
    is_scratch: bool = False
    tell: object = field(default=lambda _: None)

    def training(self, name):
        """Say at which sizes a network is trained: its own, or small ones."""
        if not self.quick:
            return TrainingRun(steps=STEPS)
        extent = {"sequence": 32} if network(name).has_sequence else {"image": 64}
        return TrainingRun(steps=QUICK_STEPS, batch=2, **extent)

    def modelled(self, name, cases, where=None, settings=None):
        """Run a network under conditions; give each condition and the folder of its run.

        ``where`` is the folder that these runs share, by default that of the network; settings are the
        model's own by default.
        """
        place = self.folder / (where or name)
        sweep(
            network(name),
            self.training(name),
            settings or Settings(),
            cases,
            place,
            tell=lambda run, there: self.tell(f"{place.name} {run}{': there already' * there}"),
        )
        return [(case, place / case.folder) for case in cases]

    def drop(self):
        """Delete the runs and what was read from them, if nobody wants to keep them."""
        if self.is_scratch:
            for each in self.folder.iterdir():
                shutil.rmtree(each)


def ledger_of(folder):
    """Give the warm steps of a run in a folder, with what the join knows of each."""
    (found,) = find_runs(folder)
    return warm_steps(open_run(found).ledger, warmup=WARMUP)


def step_times(folder):
    """Give the times of all steps of a modelled run, ns, the cold ones first."""
    return [end - start for start, end in _steps(folder)]


def warm_from(folder):
    """Give the moment, ns, at which the first warm step of a modelled run begins."""
    return _steps(folder)[WARMUP][0]


def _steps(folder):
    """Read start and end, ns, of each step from the export itself: to open it would take far longer."""
    (export,) = folder.glob("*.sqlite")
    with closing(
        sqlite3.connect(f"file:{quote(str(export))}?mode=ro&immutable=1", uri=True)
    ) as rows:
        return rows.execute(
            "SELECT start, end FROM NVTX_EVENTS WHERE text = 'step' ORDER BY start"
        ).fetchall()


def bytes_in(folder):
    """Give the bytes that came into the GPU in a modelled run, by faults, prefetchers and the user."""
    figures = json.loads((folder / ABOUT).read_text(encoding="utf-8"))["figures"]
    return sum(figures[f"in_{cause}_bytes"] for cause in ("coherence", "prefetch", "user"))


def managed_peak(folder):
    """Give the most managed bytes that a modelled run had allocated at one time."""
    return json.loads((folder / ABOUT).read_text(encoding="utf-8"))["peak_managed_bytes"]


def trend_of(values):
    """Say how far the first warm step lies from the mean of the later ones, as a share of it.

    None if the steps do not trend, or there are no later ones; infinite if only the first has any.
    """
    first, *later = values
    if not later or None in values:
        return None
    mean = sum(later) / len(later)
    if mean == 0:
        return inf if first else None
    change = first / mean - 1
    return change if abs(change) > TREND else None


def change_text(change):
    """Write how far a first step lies from the later ones."""
    return "only in the first" if change == inf else f"{100 * change:+.0f} %"
