"""Pairs of runs that somebody recorded: one without and one with the caching allocator, at one factor."""

from __future__ import annotations

from benchmarks.papers.runs import WARMUP
from nsan.analysis.pca.ratios import warm_steps
from nsan.errors import UsageError
from nsan.pca_found import find_runs, named_run
from nsan.pca_pairs import pairs_of
from nsan.pca_runs import is_modelled, open_pairs

SIDES = ("off", "on")
_CAPTURES = ("*.sqlite", "*.nsys-rep")


def given_rows(folders):
    """Open pairs of runs.

    Parameters
    ----------
    folders : iterable of Path
        Each holds a folder ``off`` and one ``on`` with captures of the same program (several are
        repetitions; a memory snapshot lies beside those in ``on``), or runs of ``nsan model``.

    Returns
    -------
    list of (str, float or None, list of DataFrame, list of DataFrame), list of str, bool
        Program, factor, warm steps of each run without and with PCA; in what else the runs of a pair
        differ; whether the driver model made them. Only a modelled run says its factor: what else took
        room on a GPU, a ballast or another process, no trace shows.

    Raises
    ------
    UsageError
        If a folder holds no pair, or some runs are modelled and others not.
    """
    rows, notes, made = [], [], set()
    for folder in folders:
        for pair, off, on in open_pairs(_pairs(folder)):
            made |= {is_modelled(run) for run in (*off, *on)}
            condition = pair.condition
            factor = condition.factor if condition.is_modelled else None
            name = condition.network if condition.is_modelled else folder.name
            rows.append((name, factor, _steps(off), _steps(on)))
            notes += pair.notes
    if len(made) > 1:
        msg = "Some of these runs are modelled and some recorded: make a table of each."
        raise UsageError(msg)
    return rows, notes, made == {True}


def _pairs(folder):
    if not all((folder / side).is_dir() for side in SIDES):
        return pairs_of(find_runs(folder), [], [])
    named = [[named_run(each, side) for each in _captures(folder / side)] for side in SIDES]
    return pairs_of([], *named)


def _captures(folder):
    for pattern in _CAPTURES:
        if found := sorted(folder.glob(pattern)):
            return found
    msg = f"{folder} holds no capture ({' or '.join(_CAPTURES)}): put the runs of this side there."
    raise UsageError(msg)


def _steps(runs):
    return [warm_steps(run.ledger, warmup=WARMUP) for run in runs]
