"""Who stands out of a fleet, in lines: one by one while they are few, groups together; how many were judged if none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from nsan.fleet.outliers import named
from nsan.text import shortened
from nsan.units import counted, format_count

_MOST_NAMES: Final = 8

Outlier = Mapping[str, Any]


def standing_lines(document: Mapping[str, Any]) -> list[str]:
    """Say what stands out; where nothing does, what was judged, or why nothing could be.

    Parameters
    ----------
    document : mapping
        Of :func:`nsan.fleet.document.fleet_document`.

    Returns
    -------
    list of str
        Sentences; none of a single report.
    """
    lines: list[str] = []
    done: set[tuple[Any, ...]] = set()
    for each in document["outliers"]:
        if not each["is_group"]:
            lines.append(each["text"])
        elif (key := _group_of(each)) not in done:
            done.add(key)
            lines.append(
                _group_words([row for row in document["outliers"] if _group_of(row) == key])
            )
    if not lines and document["n_reports"] > 1:
        lines = [*_judged_lines(document)]
    return lines


def _group_of(row: Outlier) -> tuple[Any, ...]:
    """Tell groups apart: ranks of a run that were judged together, or runs."""
    run = row["run"] if row["scope"] == "rank" else None
    return (row["is_group"], row["scope"], run, row["n_peers"], row["side"])


def _group_words(rows: Sequence[Outlier]) -> str:
    """Name a group that is too large for outliers; its first is its farthest."""
    first = rows[0]
    scope = first["scope"]
    of = f" of {shortened(first['run'], 40)}" if scope == "rank" and first["run"] else ""
    # Where a report has no rank, it is one all the same.
    one = "report" if scope == "rank" and any(row["rank"] is None for row in rows) else scope
    many = f"{format_count(len(rows))} of {counted(first['n_peers'], one)}{of}"
    return (
        f"{many} are a group apart, with {first['side']} UM time than the others ({_names(rows)}): two groups rather "
        f"than outliers. The farthest is {first['text']}"
    )


def _names(rows: Sequence[Outlier]) -> str:
    known = all(row["scope"] == "rank" and row["rank"] is not None for row in rows)
    if known:
        names = [format_count(rank) for rank in sorted(row["rank"] for row in rows)]
    else:
        names = [
            named(row) if row["scope"] == "rank" else shortened(row["run"], 40) or "(no name)"
            for row in rows
        ]
    rest = len(names) - _MOST_NAMES
    shown = ", ".join(names[:_MOST_NAMES]) + f" and {format_count(rest)} more" * (rest > 0)
    return ("ranks " if known else "") + shown


def _judged_lines(document: Mapping[str, Any]) -> Iterator[str]:
    ranks, runs = ([*_largest(document, scope)] for scope in ("rank", "run"))
    if not ranks and not runs:
        yield f"Nothing could be judged: {_why_not(document)}."
        return
    if ranks:
        n = counted(sum(ranks), "rank")
        yield f"{n} of {counted(_n_runs(document), 'run')} judged by UM time: none stands out from its run."
    if runs:
        n = counted(sum(runs), "run")
        yield f"{n} judged against each other by UM time: none stands out."


def _judged(document: Mapping[str, Any], scope: str) -> Iterable[Mapping[str, Any]]:
    return (each for each in document["judged"] if each["scope"] == scope)


def _largest(document: Mapping[str, Any], scope: str) -> Iterator[int]:
    """Count of each group those judged, by the figure that most of them have: no rank is counted twice."""
    groups: dict[Any, int] = {}
    for each in _judged(document, scope):
        key = (each["run"], each["group"], each["size"])
        groups[key] = max(groups.get(key, 0), each["n_peers"])
    yield from groups.values()


def _n_runs(document: Mapping[str, Any]) -> int:
    return len({each["run"] for each in _judged(document, "rank")})


def _why_not(document: Mapping[str, Any]) -> str:
    rows = document["reports"]
    known = [row for row in rows if row["um_at_least_ns"] is not None]
    if not known:
        return "no report has recorded migrations or GPU page faults"
    why = "it takes three reports of a run with the same program and known UM time, or three runs of one program and size"
    largest = max(run["n_reports"] for run in document["runs"])
    return f"{why}; here a run has {counted(largest, 'report')} at most" if largest < 3 else why
