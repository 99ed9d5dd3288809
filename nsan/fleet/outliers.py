"""Why a rank stands out, and who takes longest: what the totals of its run say, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from nsan.text import cause_word, shortened
from nsan.units import NS_PER_S, counted, format_bytes, format_count, format_rate, format_time

Row = Mapping[str, Any]

WORDS: Final = {
    "um_ns": "UM at work for",
    "um_at_least_ns": "UM at work for at least",
    "migrations_busy_ns": "migrations in flight for",
    "gpu_faults_busy_ns": "GPU faults in service for",
}
"""How each figure of UM time is said, before its value."""

EXPLAINING: Final = (
    *("bytes", "coherence_bytes", "prefetch_bytes", "user_bytes", "eviction_bytes"),
    *("access_counters_bytes", "other_bytes", "htod_bytes", "dtoh_bytes", "dtod_bytes"),
    *("migrations_busy_ns", "n_fault_rows", "n_cpu_faults", "managed_bytes", "gpu_memory_bytes"),
    "duration_ns",
)
"""Figures in which a rank may differ from the typical one of its run."""

_CAUSES: Final = ("coherence", "prefetch", "user", "eviction", "access_counters")
_DIRECTIONS: Final = {"htod": "to the GPU", "dtoh": "to the CPU", "dtod": "between GPUs"}
_TELLING: Final = 0.2
"""A difference below this part of the median explains nothing: that of a rank to be named."""

_MOST_REASONS: Final = 3
_CLOSE: Final = 0.05
"""Durations of a run that are alike: longest less shortest, as a part of the median."""

_HARDLY: Final = 0.1
"""Below this part of what a rank takes longer, its UM time does not tell why."""

ALIKE: Final = "as where ranks wait for each other; then UM time, not duration, shows who may hold the others up"
"""What follows from durations that are alike, where there is UM time."""


def named(row: Row, *, with_source: bool = False) -> str:
    """Name a report: its rank if there is one, its run if that says something.

    Parameters
    ----------
    row : mapping
        ``run``, ``rank``, ``source``.
    with_source : bool, default False
        Whether other reports of the run have its rank, too, so that its own name has to tell it from them.

    Returns
    -------
    str
        A name for a sentence.

    Examples
    --------
    >>> named({"run": "night", "rank": 3, "source": "night/r3.sqlite"})
    'rank 3 of night'
    """
    of = f" of {shortened(row['run'], 40)}" if row["run"] else ""
    if row["rank"] is None:
        return shortened(row["source"], 60)
    source = f" ({shortened(row['source'], 60)})" if with_source else ""
    return f"rank {row['rank']}{of}{source}"


def far(row: Row, who: str) -> str:
    """Say by which figure something stands out, and how far.

    Parameters
    ----------
    row : mapping
        Of :func:`nsan.analysis.fleet.peers.rank_outliers` or ``run_outliers``.
    who : str
        What it is compared with, as "8 ranks".

    Returns
    -------
    str
        A clause.
    """
    median = format_time(row["median_ns"])
    if row["times_median"] is None:
        how = f"the median of {who} is {median}"
    elif row["times_median"] == 0:
        how = f"none, where the median of {who} is {median}"
    else:
        how = f"{_times(row['times_median'])} the median of {who} ({median})"
    mads = row["mads"]
    away = "" if mads is None else f", {_number(abs(mads))} MADs {'above' if mads > 0 else 'below'}"
    return f"{WORDS[row['figure']]} {format_time(row['value_ns'])}, {how}{away}"


def _times(value: float) -> str:
    return f"{value:.3g} times" if value >= 0.01 else "less than a hundredth of"


def _number(value: float) -> str:
    return format_count(round(value)) if value >= 10 else f"{value:.1f}"


def differs(row: Row, typical: Row) -> list[str]:
    """Say in what a report differs from the typical one of its run.

    Parameters
    ----------
    row : mapping
        Of :func:`nsan.fleet.figures.report_figures`.
    typical : mapping
        Medians of :data:`EXPLAINING`, and ``gpus`` of most of them.

    Returns
    -------
    list of str
        Clauses, the most telling first; few of them.
    """
    found = [*_moved(row, typical), *_oversubscribed(row, typical), *_faulted(row, typical)]
    found += [*_machine(row, typical)]
    return found[:_MOST_REASONS]


def _moved(row: Row, typical: Row) -> Iterator[str]:
    mine, usual = row["bytes"], typical["bytes"]
    if mine is None or usual is None:
        return
    if _is_other(mine, usual):
        yield f"it moved {format_bytes(mine)} where {format_bytes(usual)} are usual{_most(row, typical, mine - usual)}"
        return
    mine_s, usual_s = row["migrations_busy_ns"], typical["migrations_busy_ns"]
    if mine_s and usual_s and mine and usual:
        rates = mine / mine_s * NS_PER_S, usual / usual_s * NS_PER_S
        if _is_other(*rates):
            word = "slower" if rates[0] < rates[1] else "faster"
            yield (
                f"it moved about as much as others ({format_bytes(mine)}), but {word}: {format_rate(rates[0])} where "
                f"{format_rate(rates[1])} are usual"
            )


def _most(row: Row, typical: Row, difference: float) -> str:
    """Name the cause, or the direction, of most of a difference in bytes."""
    for words, names in ((_of_cause, _CAUSES), (_of_direction, tuple(_DIRECTIONS))):
        parts = {
            name: row[f"{name}_bytes"] - typical[f"{name}_bytes"]
            for name in names
            if row[f"{name}_bytes"] is not None and typical[f"{name}_bytes"] is not None
        }
        if not parts:
            continue
        name = max(parts, key=lambda each: parts[each] * (1 if difference > 0 else -1))
        if parts[name] / difference > 0.5:
            word = "more" if difference > 0 else "less"
            return f", {format_bytes(abs(parts[name]))} {word} {words(name)}"
    return ""


def _of_cause(cause: str) -> str:
    return "by eviction" if cause == "eviction" else f"by {cause_word(cause)}"


def _of_direction(direction: str) -> str:
    return _DIRECTIONS[direction]


def _oversubscribed(row: Row, typical: Row) -> Iterator[str]:
    mine, usual = row["eviction_bytes"], typical["eviction_bytes"]
    if mine and usual == 0:
        yield "it alone was short of GPU memory" + _factor(row, typical)
    elif mine is not None and usual and (said := _factor(row, typical)):
        yield f"GPU memory is shorter{said}" if mine > usual else f"GPU memory is less short{said}"


def _factor(row: Row, typical: Row) -> str:
    """Say how much managed memory there is for what the GPUs have, where that differs."""
    factors = []
    for each in (row, typical):
        managed, memory = each["managed_bytes"], each["gpu_memory_bytes"]
        if not managed or not memory:
            return ""
        factors.append(managed / memory)
    if not _is_other(*factors):
        return ""
    return f" (managed memory is {factors[0]:.2f} of that of its GPUs, {factors[1]:.2f} is usual)"


def _faulted(row: Row, typical: Row) -> Iterator[str]:
    for key, what in (("n_fault_rows", "row of GPU faults"), ("n_cpu_faults", "CPU page fault")):
        mine, usual = row[key], typical[key]
        if mine is not None and usual is not None and _is_other(mine, usual):
            many = what.replace("row", "rows") if "row" in what else None
            yield f"{counted(mine, what, many)} where {format_count(round(usual))} are usual"


def _machine(row: Row, typical: Row) -> Iterator[str]:
    if row["gpus"] and typical["gpus"] and row["gpus"] != typical["gpus"]:
        yield f"its GPU is {shortened(row['gpus'], 40)}, {shortened(typical['gpus'], 40)} is usual"
    mine, usual = row["duration_ns"], typical["duration_ns"]
    if mine and usual and mine < (1 - _TELLING) * usual:
        yield f"it was recorded for {format_time(mine)} only, {format_time(usual)} are usual"
    if row["health"] == "fail":
        yield "one of its checks fails: see `nsan info`"


def _is_other(mine: float, usual: float) -> bool:
    return abs(mine - usual) >= _TELLING * usual and mine != usual


def straggler_words(row: Row, one: str = "rank") -> str:
    """Say who takes longest in a run, and how much more UM time it has.

    Parameters
    ----------
    row : mapping
        Of :func:`nsan.analysis.fleet.peers.stragglers`.
    one : str, default "rank"
        What the run is made of: reports, where several are of one rank or one has none.

    Returns
    -------
    str
        A sentence. It compares durations: clocks of different machines are not aligned.
    """
    who, n = named(row, with_source=one != "rank"), counted(row["n_peers"], one)
    if is_alike(row):
        all_of = f"Both {one}s" if row["n_peers"] == 2 else f"All {n}"
        apart = "" if row["spread"] is None else f" ({row['spread']:.1%} apart)"
        return f"{all_of} took about as long as each other{apart}{_alike_words(row['um_max_ns'])}."
    longest = f"{who} took longest: {format_time(row['duration_ns'])}, {format_time(row['excess_ns'])} beyond the median of {n}"
    return f"{longest}{_explained(row)}."


def is_alike(row: Row) -> bool:
    """Say whether the ranks of a run took about as long."""
    return row["spread"] is None or bool(row["spread"] <= _CLOSE)


def _alike_words(um_max_ns: int | None) -> str:
    """Say what follows from durations that are alike: without UM time, nothing about UM."""
    if um_max_ns is None:
        return "; UM time is not known of all of them"
    return f", {ALIKE}" if um_max_ns else "; none of them has UM time"


def _explained(row: Row) -> str:
    """Compare what a rank takes longer with what it has more of UM time, which is but a part of it, or beside it."""
    extra = row["um_excess_ns"]
    if extra is None:
        return "; UM time is not known of all of them"
    if extra <= 0:
        return "; it has no more UM time than the median"
    what = {
        "um_ns": "UM is at work",
        "migrations_busy_ns": "migrations are in flight",
        "gpu_faults_busy_ns": "GPU faults are in service",
    }[row["um_figure"]]
    if extra < _HARDLY * row["excess_ns"]:
        return f"; UM time hardly tells why: in it {what} only {format_time(extra)} longer than in the median one"
    part = f" ({extra / row['excess_ns']:.0%} of that)" if extra <= row["excess_ns"] else ""
    return f"; in it {what} {format_time(extra)} longer than in the median one{part}"
