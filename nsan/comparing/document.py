"""Conditions compared from end to end: opened, found comparable, measured, judged; and the document of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from nsan.analysis.compare.movers import Judging, movers, pairs_of
from nsan.analysis.compare.tables import MOVERS
from nsan.asking import Asked
from nsan.comparing.checks import steps_without_work
from nsan.comparing.comparability import NotComparableError, barred, comparability, refuse
from nsan.comparing.conditions import find_conditions
from nsan.comparing.copies import copies
from nsan.comparing.differs import differences
from nsan.comparing.figures import CAUSES, FIGURES
from nsan.comparing.findings import Side
from nsan.comparing.gates import Gated, judge, parse_gate
from nsan.comparing.measuring import Asking, count_places, measure, most_important
from nsan.comparing.profile import memory_of, profile_of, steps_of
from nsan.contract import SCHEMA
from nsan.info import MODEL_KIND
from nsan.tabular.notes import table_word
from nsan.tabular.totals import unanswered
from nsan.text import shortened

if TYPE_CHECKING:
    from nsan.comparing.conditions import Condition, Run
    from nsan.comparing.differs import Difference
    from nsan.comparing.findings import Finding
    from nsan.comparing.gates import Gate
    from nsan.comparing.profile import Profile

_QUESTION: Final = "What differs, and is it more than runs differ anyway?"


@dataclass(frozen=True)
class Comparison:
    """What comes out of a comparison; see :func:`compare`.

    Attributes
    ----------
    sides : tuple of Side
        The conditions with the profiles of their runs, the base first.
    comparable : tuple of Finding
        What stands against the comparison, refusals first.
    differs : tuple of Difference
        What the programs do differently.
    movers : DataFrame
        A row for each figure of each condition against the base; :data:`nsan.analysis.compare.tables.MOVERS`.
    gates : tuple of Gated
        What became of each gate.
    n_steps : dict
        By label: steps of each run, where steps were found.
    asking, judging : Asking, Judging
        What was asked for, and how strictly it was judged.
    n_places : dict
        By scope: ranges and kernels that were found, also those that ``movers`` leaves out.
    """

    sides: tuple[Side, ...]
    comparable: tuple[Finding, ...]
    differs: tuple[Difference, ...]
    movers: pl.DataFrame = field(repr=False)
    gates: tuple[Gated, ...]
    n_steps: Mapping[str, Sequence[int]]
    asking: Asking
    judging: Judging
    n_places: Mapping[str, int] = field(default_factory=dict)

    @property
    def has_failed(self) -> bool:
        """Whether a gate failed."""
        return any(each.outcome == "failed" for each in self.gates)

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers, ready for JSON: what ``nsan compare --json`` prints."""
        options = asdict(self.asking)
        filters = options.pop("filters")
        return {
            "schema": SCHEMA,
            "question": _QUESTION,
            "conditions": [self._condition(side) for side in self.sides],
            "options": options
            | {"min_effect": self.judging.min_effect, "confidence": self.judging.confidence},
            "filters": {key: each for key, each in filters.items() if each not in ("", [], None)},
            "comparable": [asdict(each) for each in self.comparable],
            "differs": [asdict(each) for each in self.differs],
            "places": dict(self.n_places),
            "movers": [_plain(row) for row in self.movers.iter_rows(named=True)],
            "record": to_record(self.sides),
            "gates": [each.to_dict() for each in self.gates],
        }

    def _condition(self, side: Side) -> dict[str, Any]:
        none: list[int | None] = [None] * len(side.runs)
        counts = self.n_steps.get(side.label) or none
        return {
            "label": side.label,
            "name": side.name,
            "runs": [_run(run, n) for run, n in zip(side.runs, counts, strict=True)],
        }

    def __str__(self) -> str:
        from nsan.comparing.text import text_of

        return text_of(self.to_dict())

    def _repr_markdown_(self) -> str:
        from nsan.comparing.text import text_of

        return text_of(self.to_dict(), markdown=True)


def compare(
    *conditions: str | Path | Sequence[str | Path],
    asking: Asking | None = None,
    judging: Judging | None = None,
    fail_on: Iterable[str] = (),
    anyway: bool = False,
    tell: Callable[[str], None] | None = None,
) -> Comparison:
    """Compare conditions with the first: what differs, and whether that is more than noise.

    Parameters
    ----------
    *conditions : str, Path or sequence of them
        Two or more. Each a trace, a folder of traces of one condition, or a list of traces: several are
        repetitions.
    asking : Asking, optional
        Which scopes are compared (run, step, range, kernel), the NVTX range of a step, how many steps are
        left out at the beginning, and filters.
    judging : Judging, optional
        Least effect and confidence.
    fail_on : iterable of str, optional
        Gates, as ``"migrations.bytes>+10%"``; see :mod:`nsan.comparing.gates`.
    anyway : bool, default False
        Compare also what is not comparable; what that forbids gets no verdict.
    tell : callable, optional
        Called with the name of each run before it is measured.

    Returns
    -------
    Comparison
        Prints as text; ``movers`` is a frame, ``to_dict()`` the JSON document.

    Raises
    ------
    NsanError
        If a trace cannot be opened, a gate cannot be read, or the conditions are not comparable.

    Examples
    --------
    >>> import nsan
    >>> folder = "sample_data/model"
    >>> found = nsan.compare(f"{folder}/stream", f"{folder}/user_prefetch")  # doctest: +SKIP
    >>> found.differs[0].text  # doctest: +SKIP
    'cudaMemPrefetchAsync: none in A, 3 calls in B'
    """
    gates = [parse_gate(text, FIGURES) for text in fail_on]
    asking, judging = asking or Asking(), judging or Judging()
    gated = [FIGURES[gate.figure].scope for gate in gates]
    asking = replace(asking, scopes=tuple(dict.fromkeys((*asking.scopes, *gated))))
    found = find_conditions(
        [Path(each) if isinstance(each, str | Path) else [*map(Path, each)] for each in conditions]
    )
    sides = [_side(condition, asking) for condition in found]
    findings = [*comparability(sides), *copies(found)]
    if not anyway:
        try:
            refuse(findings, sides)
        except NotComparableError as error:
            error.comparison = _refused(sides, findings, gates, (asking, judging))
            raise
    else:
        findings = [replace(each, level="warn") for each in findings]
    seen: dict[str, list[dict[str, Any]]] = {side.label: [] for side in sides}

    def look(condition: Condition, _: Run, asked: Asked) -> None:
        steps = steps_of(asked, asking.nvtx) if "step" in asking.scopes else None
        seen[condition.label].append({"memory": memory_of(asked), "steps_ns": steps})

    samples = measure(found, asking, tell, look)
    sides = [_with(side, seen[side.label]) for side in sides]
    findings = [*findings, *steps_without_work(sides)]
    return _judged(sides, findings, samples, gates, (asking, judging))


def _side(condition: Condition, asking: Asking) -> Side:
    """Take the profiles of the runs of a condition."""
    runs = [
        profile_of(Asked(run.trace, filters=asking.filters), run.name) for run in condition.runs
    ]
    return Side(condition.label, runs, condition.name)


def _with(side: Side, seen: Sequence[Mapping[str, Any]]) -> Side:
    """Add to the profile of each run what was seen while it was measured, run by run."""
    runs = [replace(run, **each) for run, each in zip(side.runs, seen, strict=True)]
    return side._replace(runs=runs)


def _refused(
    sides: Sequence[Side],
    findings: Sequence[Finding],
    gates: Sequence[Gate],
    how: tuple[Asking, Judging],
) -> Comparison:
    """Say that nothing was compared: the reasons, and no limit decided."""
    labels = [side.label for side in sides[1:]]
    gated = (
        Gated(gate, label, "undecided", "not comparable.") for gate in gates for label in labels
    )
    nothing = MOVERS.empty().collect()
    return Comparison(tuple(sides), tuple(findings), (), nothing, tuple(gated), {}, *how)


def _judged(
    sides: Sequence[Side],
    findings: Sequence[Finding],
    samples: pl.DataFrame,
    gates: Sequence[Gate],
    how: tuple[Asking, Judging],
) -> Comparison:
    """Judge what was measured."""
    base, *others = sides
    asking, judging = how
    bars = barred(findings, FIGURES, [side.label for side in others])
    n_steps = _step_counts(samples)
    return Comparison(
        tuple(sides),
        tuple(findings),
        tuple(each for other in others for each in differences(base, other, n_steps)),
        movers(_shown(samples, asking, gates), FIGURES, judging, bars),
        tuple(_gated(samples, gates, bars, (sides, judging))),
        n_steps,
        asking,
        judging,
        count_places(samples),
    )


def _shown(samples: pl.DataFrame, asking: Asking, gates: Sequence[Gate]) -> pl.DataFrame:
    """Leave the places with most time, and those that limits name."""
    named = [(FIGURES[gate.figure].scope, gate.place) for gate in gates if gate.place is not None]
    return most_important(samples, asking.most_places, named)


def _gated(
    samples: pl.DataFrame,
    gates: Sequence[Gate],
    bars: Mapping[tuple[str, str], str],
    how: tuple[Sequence[Side], Judging],
) -> list[Gated]:
    """Hold what was measured against limits, of all places."""
    if not gates:
        return []
    sides, judging = how
    mine = samples.filter(pl.col("figure").is_in([gate.figure for gate in gates]))
    others = [side.label for side in sides[1:]]
    pairs = pairs_of(mine, FIGURES, bars)
    return judge(gates, pairs, others, to_record(sides), judging.confidence)


def _step_counts(samples: pl.DataFrame) -> dict[str, list[int]]:
    """Count the steps of each run, by condition; without conditions in which not every run has steps."""
    steps = samples.group_by("condition", "run").agg(n=pl.col("item").max() + 1)
    whole = (
        steps.sort("run").group_by("condition").agg("n").filter(~pl.col("n").list.contains(None))
    )
    return dict(whole.iter_rows())


def to_record(sides: Sequence[Side]) -> dict[str, str]:
    """Say what would record the figures that a run has not.

    Parameters
    ----------
    sides : sequence of Side
        The conditions.

    Returns
    -------
    dict of str to str
        By figure: which runs lack what, and the switch. Without figures that all runs know.
    """
    found: dict[str, str] = {}
    for figure in FIGURES.values():
        for need in figure.needs:
            lacking = [(side, run) for side in sides for run in side.runs if _lacks(run, need)]
            if lacking:
                side, run = lacking[0]
                found.setdefault(
                    figure.name, f"{side.label}, {shortened(run.name, 60)}: {_why(run, need)}"
                )
    return found


def _lacks(run: Profile, need: str) -> bool:
    if need == CAUSES:
        return bool(run.summary["source_kind"] == "nvprof-text")
    return bool(run.summary["capture"][need] != "recorded")


def _why(run: Profile, need: str) -> str:
    if need == CAUSES:
        return "nvprof prints no causes of migrations."
    return f"{table_word(need)}: {unanswered(run.summary, need)}"


# The document ---------------------------------------------------------------------------------------


def _run(run: Profile, n_steps: int | None) -> dict[str, Any]:
    summary = run.summary
    return {
        "name": run.name,
        "source": summary["source"],
        "source_kind": summary["source_kind"],
        "kind": "modelled" if summary["source_kind"] == MODEL_KIND else "recorded",
        "gpus": [device["name"] for device in summary["devices"]],
        "processes": [process["name"] for process in summary["processes"]],
        "capture": dict(summary["capture"]),
        "n_steps": n_steps,
    }


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """Write a row without numbers that JSON does not know: an interval without bound ends at null."""
    return {
        key: None if isinstance(value, float) and not isfinite(value) else value
        for key, value in row.items()
    }
