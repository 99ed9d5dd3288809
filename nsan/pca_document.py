"""Runs without and with PyTorch's caching allocator (PCA) compared: the document of `nsan pca`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nsan.errors import UsageError

if TYPE_CHECKING:
    import polars as pl

    from nsan.analysis.result import Result
    from nsan.pca_found import Found
    from nsan.pca_pairs import Pair
    from nsan.pca_runs import Run

_CONDITION: Final = ("network", "factor", "hint", "allocator")
_TREND: Final = 0.1
"""By more than this share a first warm step differs from the later ones."""

_RATIO: Final = ("off", "on", "ratio", "ratio_low", "ratio_high")
_PARTS: Final = ("difference", "reuse", "dead", "packing", "remainder")
COLUMNS: Final = (
    *_CONDITION,
    "figure",
    "unit",
    *_RATIO,
    *(f"{part}{end}" for part in _PARTS for end in ("", "_error")),
)
"""Columns of CSV and Parquet: one row per pair and figure."""


# Finding --------------------------------------------------------------------------------------------


def find_pairs(
    runs: Sequence[Path] = (),
    *,
    off: Sequence[Path] = (),
    on: Sequence[Path] = (),
    snapshot: Path | None = None,
) -> tuple[list[Pair], list[Found]]:
    """Find runs and pair them; no trace is opened.

    Parameters
    ----------
    runs : sequence of Path
        Runs that say how they allocate: folders of ``nsan model run`` or ``nsan model sweep``, or traces
        with a memory snapshot beside them.
    off, on : sequence of Path
        Traces of which the user says that they ran without and with the caching allocator; several are
        repetitions.
    snapshot : Path, optional
        Memory snapshot of the one trace in ``on``, or of the one in ``runs``; by default the one beside it.

    Returns
    -------
    list of Pair
        What :func:`nsan.pca_pairs.pairs_of` makes of them.
    list of Found
        Runs that are in no pair.

    Raises
    ------
    NsanError
        If nothing is named or found, or nothing can be paired.
    """
    from nsan.pca_found import find_runs, named_run
    from nsan.pca_pairs import left_out, pairs_of

    if not (runs or off or on):
        msg = "Name runs to compare: a folder of `nsan model sweep`, or traces with --off and --on."
        raise UsageError(msg)
    of_on = snapshot if len(on) == 1 else None
    of_run = snapshot if not on and len(runs) == 1 else None
    if snapshot is not None and of_on is None and of_run is None:
        msg = "--snapshot FILE is of one run: give one --on TRACE, or put snapshots beside the traces."
        raise UsageError(msg)
    found = [each for path in runs for each in find_runs(path, of_run)]
    sides = [named_run(path, "off") for path in off], [named_run(path, "on", of_on) for path in on]
    pairs = pairs_of(found, *sides)
    return pairs, left_out(found, pairs)


# Comparing ------------------------------------------------------------------------------------------


def pca_document(
    pairs: Sequence[Pair],
    left_out: Sequence[Found] = (),
    *,
    step: str = "step",
    warmup: int = 1,
    tell: Callable[[str], None] | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Open runs and compare them, pair by pair.

    Parameters
    ----------
    pairs : sequence of Pair
        Of :func:`find_pairs`.
    left_out : sequence of Found
        Runs in no pair: a note names them.
    step : str, default "step"
        NVTX range of a step.
    warmup : int, default 1
        Steps to leave out at the start.
    tell : callable, optional
        Called with the name of each run before it is opened.
    progress : bool, default False
        Show a bar on stderr while a trace is imported.

    Returns
    -------
    dict
        What ``nsan pca --json`` prints: plain containers.

    Raises
    ------
    NsanError
        If a run cannot be opened, has no such step, or too few of them.
    """
    from nsan.analysis.pca.decomposition import DECOMPOSITION
    from nsan.analysis.pca.ratios import RATIOS
    from nsan.contract import SCHEMA
    from nsan.pca_runs import open_pairs

    document: dict[str, Any] = {
        "schema": SCHEMA,
        "question": "What does the caching allocator change, and by which mechanism?",
        "step": step,
        "warmup": warmup,
        "kinds": {},
        "columns": {"ratios": _described(RATIOS), "decomposition": _described(DECOMPOSITION)},
        "runs": [],
        "pairs": [],
        "switches": [],
        "notes": [],
    }
    sides: list[tuple[Pair, pl.DataFrame, pl.DataFrame]] = []
    shown: dict[str, Run] = {}
    opening = open_pairs(pairs, step=step, tell=tell, progress=progress)
    for pair, off, on in opening:
        shown |= {str(each.found.trace): each for each in (*off, *on)}
        steps = (_warm(off, warmup), _warm(on, warmup))
        sides.append((pair, *steps))
        document["pairs"].append(_compared(pair, (off, on), steps, warmup))
    document["runs"] = [_of_run(each, warmup) for each in shown.values()]
    document["switches"] = _switched(sides)
    kinds = {each["kind"] for each in document["pairs"]}
    document["kinds"] = {"pairs": "modelled" if kinds == {"modelled"} else "derived"}
    if left_out:
        names = ", ".join(each.name for each in left_out[:8]) + ", ..." * (len(left_out) > 8)
        document["notes"].append(f"In no pair, and left out: {names}.")
    return document


def _compared(
    pair: Pair,
    runs: tuple[Sequence[Run], Sequence[Run]],
    steps: tuple[pl.DataFrame, pl.DataFrame],
    warmup: int,
) -> dict[str, Any]:
    """Compare the warm steps of a pair."""
    from nsan.analysis.pca.decomposition import decomposition
    from nsan.analysis.pca.ratios import ratio_of, ratios
    from nsan.pca_pairs import told_apart

    off, on = runs
    names = told_apart(*pair.off, *pair.on)
    trends = [note for each in (*off, *on) if (note := _trend(each, warmup))]
    return {
        **_condition(pair),
        "off": names[: len(off)],
        "on": names[len(off) :],
        "kind": _kind((*off, *on)),
        "ratios": ratios(*steps).to_dicts(),
        "traffic": ratio_of(*steps, ("in_bytes", "out_bytes")),
        "decomposition": decomposition(*steps).to_dicts(),
        "notes": [*pair.notes, *_doubts(off, on), *trends],
    }


def _trend(run: Run, warmup: int) -> str:
    """Say that a run has not settled: its first warm step differs from the later ones."""
    from nsan.analysis.pca.ratios import FIGURES, warm_steps
    from nsan.units import format_count, format_time

    steps = warm_steps(run.ledger, warmup=warmup)
    said = []
    for figure, write in (("step_ns", format_time), ("fault_rows", format_count)):
        first, *later = steps[FIGURES[figure].column].to_list()
        if not later or None in (first, *later):
            continue
        mean = sum(later) / len(later)
        if abs(first - mean) > _TREND * mean:
            what = {"step_ns": "takes", "fault_rows": "makes"}[figure]
            unit = " fault rows" * (figure == "fault_rows")
            said.append(f"{what} {write(first)} and the later ones {write(round(mean))}{unit}")
    if not said:
        return ""
    least = warmup + 1
    more = "" if run.n_steps > least + 1 else ", of a run of more steps"
    return (
        f"{run.found.name} has not settled: its first warm step {', and it '.join(said)} (mean). Leave it out "
        f"with --warmup {least}{more}."
    )


def _described(result: Result) -> list[dict[str, Any]]:
    return [{"name": c.name, "unit": c.unit, "kind": c.kind, "doc": c.doc} for c in result.columns]


def _condition(pair: Pair) -> dict[str, Any]:
    condition = pair.condition
    return {key: getattr(condition, key) for key in _CONDITION}


def _kind(runs: Sequence[Run]) -> str:
    """Say of which kind figures of these runs are."""
    from nsan.pca_runs import is_modelled

    return "modelled" if all(map(is_modelled, runs)) else "derived"


def _warm(runs: Sequence[Run], warmup: int) -> pl.DataFrame:
    """Put the warm steps of repetitions under each other."""
    import polars as pl

    from nsan.analysis.pca.ratios import warm_steps

    for each in runs:
        if each.n_steps <= warmup:
            msg = (
                f"{each.found.name} has {each.n_steps} step{'s' * (each.n_steps != 1)}, and --warmup "
                f"{warmup} leaves none: give a smaller one, or record more steps."
            )
            raise UsageError(msg)
    return pl.concat([warm_steps(each.ledger, warmup=warmup) for each in runs])


def _of_run(run: Run, warmup: int) -> dict[str, Any]:
    found = run.found
    return {
        "name": found.name,
        "source": run.trace.info.source,
        "source_kind": run.trace.info.kind,
        "snapshot": None if found.snapshot is None else found.snapshot.name,
        **{key: getattr(found.condition, key) for key in (*_CONDITION, "side")},
        "n_steps": run.n_steps,
        "n_warm_steps": max(run.n_steps - warmup, 0),
    }


def _doubts(off: Sequence[Run], on: Sequence[Run]) -> Iterator[str]:
    """Say what of a pair cannot be told, and what makes it doubtful."""
    from nsan.pca_runs import gives_advice, is_modelled

    for each in on:
        if each.found.snapshot is None and each.found.condition.allocator != "raw":
            yield (
                f"{each.found.name} has no memory snapshot: what is reuse, dead traffic or packing is "
                "unknown, and in the remainder."
            )
    if any(map(gives_advice, (*off, *on))):
        yield (
            "The runs give memory advice (cudaMemAdvise): rows that only map memory where it lies look like "
            "first touches, and count as such."
        )
    if len({is_modelled(each) for each in (*off, *on)}) > 1:
        yield "Some of the runs are modelled and others are recorded."
    counts = {each.n_steps for each in (*off, *on)}
    if len(counts) > 1:
        yield f"The runs have different numbers of steps: {', '.join(map(str, sorted(counts)))}."
    for what in ("driver_version", "cpu", "export_schema"):
        found = {getattr(each.trace.info, what) for each in (*off, *on)} - {None}
        if len(found) > 1:
            yield f"The runs differ in {what.replace('_', ' ')}: {' and '.join(sorted(found))}."
    gpus = {tuple(each.trace.devices.collect()["name"].to_list()) for each in (*off, *on)}
    if len(gpus) > 1:
        yield f"The runs differ in their GPUs: {' and '.join(str(list(g)) for g in sorted(gpus, key=str))}."


def _switched(
    sides: Sequence[tuple[Pair, pl.DataFrame, pl.DataFrame]],
) -> list[dict[str, Any]]:
    """Split the differences by the switches of the model, condition by condition."""
    from nsan.analysis.pca.switches import SWITCHES, at_work, causal_parts

    groups: dict[str, list[tuple[Pair, pl.DataFrame, pl.DataFrame]]] = {}
    for side in sides:
        condition = side[0].condition
        known = condition.allocator != "raw" and condition.switches <= SWITCHES.keys()
        if condition.is_modelled and known:
            groups.setdefault(condition.key, []).append(side)
    found = []
    for group in groups.values():
        runs = {at_work(pair.condition.switches): on for pair, _, on in group}
        rows = causal_parts(runs, group[0][1]).to_dicts()
        if rows:
            common = _condition(group[0][0])
            common.pop("allocator")
            managed = {pair.condition.allocator: pair.condition.managed_bytes for pair, *_ in group}
            found.append({**common, "n_runs": len(runs), "managed_bytes": managed, "parts": rows})
    return found


# What is made of it ---------------------------------------------------------------------------------


def all_notes(document: Mapping[str, Any]) -> list[str]:
    """List every note of a document once."""
    notes = [note for pair in document["pairs"] for note in pair["notes"]]
    return list(dict.fromkeys([*notes, *document["notes"]]))


def table_rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Make one row per pair and figure of all that is known of it: what CSV and Parquet hold.

    Parameters
    ----------
    document : mapping
        What JSON holds.

    Returns
    -------
    list of dict
        Rows with ``COLUMNS``.
    """
    rows = []
    for pair in document["pairs"]:
        parts = {(row["figure"], row["part"]): row for row in pair["decomposition"]}
        for ratio in pair["ratios"]:
            row = {key: pair[key] for key in _CONDITION}
            row |= {key: ratio[key] for key in ("figure", "unit", *_RATIO)}
            for part in _PARTS:
                known = parts.get((ratio["figure"], part), {})
                row |= {part: known.get("value"), f"{part}_error": known.get("error")}
            rows.append(row)
    return rows
