"""Whether a figure falls, rises or cannot be told to do either with PCA: from its ratio and interval."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.papers.markdown import listed

DIGITS = 2
"""Ends of intervals are taken as the table shows them, so that no sentence contradicts it."""


@dataclass(frozen=True)
class Sign:
    """How a figure changes with PCA.

    Attributes
    ----------
    way : str
        "less" or "more"; "tie": the interval of the ratio holds 1; "same": equal, without an interval;
        "none": there is none on either side; "unknown".
    is_bare : bool
        Nothing but the sign of the difference is known: the ratio has no interval.
    """

    way: str
    is_bare: bool = False


def sign(row, figure):
    """Say how a figure of a row changes with PCA."""
    off, on = row[f"{figure}_off"], row[f"{figure}_on"]
    if off is None or on is None:
        return Sign("unknown")
    if off == on == 0:
        return Sign("none")
    low, high = row[f"{figure}_ratio_low"], row[f"{figure}_ratio_high"]
    if low is None:
        way = "less" if on < off else "more" if on > off else "same"
        return Sign(way, is_bare=True)
    if round(low, DIGITS) > 1:
        return Sign("more")
    # An interval without an upper end holds all that is above its lower one.
    if high is not None and round(high, DIGITS) < 1:
        return Sign("less")
    return Sign("tie")


def fault_rows(row):
    """Say whether a step has more or fewer fault rows with PCA."""
    return sign(row, "fault_rows")


def traffic(row):
    """Say whether a step moves more or less with PCA, both ways together."""
    return sign(row, "moved_bytes")


def time(row):
    """Say whether a step is longer or shorter with PCA."""
    return sign(row, "step_ns")


def signs(rows, of):
    """Sort the factors of some rows by the way in which a figure goes with PCA."""
    found = {way: [] for way in ("less", "tie", "more", "same", "none", "unknown")}
    for row in rows:
        found[of(row).way].append(row["factor"])
    return found


def told(rows, of, less, more, same):
    """Say at which factors a figure falls, rises or is a tie, and where that is a bare sign."""
    words = {"less": less, "more": more, "same": same}
    words |= {"tie": "a tie", "none": "none without or with PCA", "unknown": "unknown"}
    found = signs(rows, of)
    said = listed(f"{words[way]} at {factors_text(at)}" for way, at in found.items() if at)
    bare = [row["factor"] for row in rows if of(row).is_bare]
    return f"{said} (without an interval, the bare sign: at {factors_text(bare)})" if bare else said


def factors_text(factors):
    """Write factors as a list."""
    return listed("an unknown factor" if each is None else f"{each:g}" for each in factors)


def up_to(rows):
    """Find the factor up to which every step is faster with PCA; None: not even the lowest."""
    last = None
    for row in sorted(rows, key=lambda row: row["factor"] or 0):
        if time(row).way != "less":
            break
        last = row["factor"]
    return last


def two_sided(row):
    """Say whether all three parts of the claim hold in a row: fewer faults, more traffic, faster.

    Returns "yes"; "no" if one of them does not; "tie" if none fails, but one is a tie; "unknown".
    """
    pairs = ((fault_rows(row).way, "less"), (traffic(row).way, "more"), (time(row).way, "less"))
    open_ways = {way for way, wanted in pairs if way != wanted}
    if not open_ways:
        return "yes"
    if open_ways - {"tie", "unknown"}:
        return "no"
    return "unknown" if "unknown" in open_ways else "tie"
