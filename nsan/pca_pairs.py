"""Runs without and with PyTorch's caching allocator as pairs: what can be compared with what."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nsan.errors import UsageError
from nsan.pca_found import Condition, Found
from nsan.units import format_bytes


@dataclass(frozen=True)
class Pair:
    """Runs that differ in the allocator; several on a side are repetitions.

    Attributes
    ----------
    off, on : tuple of Found
        Without and with the caching allocator.
    notes : tuple of str
        In what else they differ.
    """

    off: tuple[Found, ...]
    on: tuple[Found, ...]
    notes: tuple[str, ...] = ()

    @property
    def condition(self) -> Condition:
        """Of the run with the caching allocator."""
        return self.on[0].condition


def pairs_of(runs: Sequence[Found], off: Sequence[Found], on: Sequence[Found]) -> list[Pair]:
    """Pair runs that differ in the allocator.

    Parameters
    ----------
    runs : sequence of Found
        Runs that say their own condition.
    off, on : sequence of Found
        Runs that the user has named; several are repetitions.

    Returns
    -------
    list of Pair
        Of equal network, factor, hint and settings, by factor; first what the user has named. What the
        user has named, and one run of each kind alone, is a pair if factor and GPU memory are equal, as far
        as they are known; in what else it differs, its notes say.

    Raises
    ------
    UsageError
        If there is none, a run says itself that it is of the other side, or a pair has two factors or sizes
        of GPU memory; the message says what each run is.
    """
    runs = list({run.trace.resolve(): run for run in runs}.values())
    raw = [run for run in runs if run.condition.side == "off"]
    cached = [run for run in runs if run.condition.side == "on"]
    if off or on:
        # What the user does not name is among the runs that say it themselves.
        sides = (tuple(off) or tuple(raw), tuple(on) or tuple(cached))
        if not all(sides):
            raise _no_pair([*runs, *off, *on])
        _check_sides(*sides)
        _check_equal([*sides[0], *sides[1]])
        named = Pair(*sides, _differences(sides[0][0], sides[1][0]))
        return [named, *(_matched(raw, cached) if off and on else ())]
    found = _matched(raw, cached)
    if not found and len(raw) == 1 and len(cached) == 1:
        _check_equal([raw[0], cached[0]])
        found = [Pair((raw[0],), (cached[0],), _differences(raw[0], cached[0]))]
    if not found:
        raise _no_pair(runs)
    return found


def left_out(runs: Iterable[Found], pairs: Iterable[Pair]) -> list[Found]:
    """List the runs that are in no pair.

    Parameters
    ----------
    runs : iterable of Found
        Runs that were found.
    pairs : iterable of Pair
        What :func:`pairs_of` made of them.

    Returns
    -------
    list of Found
        In their order.
    """
    used = {run.trace.resolve() for pair in pairs for run in (*pair.off, *pair.on)}
    return [run for run in runs if run.trace.resolve() not in used]


def _matched(raw: Iterable[Found], cached: Iterable[Found]) -> list[Pair]:
    """Pair runs with a cache with those without that have all else in common; several are repetitions."""
    bases: dict[str, list[Found]] = {}
    for run in raw:
        bases.setdefault(run.condition.key, []).append(run)
    found: dict[tuple[str, str], list[Found]] = {}
    for run in cached:
        if run.condition.key in bases:
            found.setdefault((run.condition.key, run.condition.allocator), []).append(run)
    pairs = [
        Pair(tuple(bases[key]), tuple(runs), _differences(bases[key][0], runs[0]))
        for (key, _), runs in found.items()
    ]
    return sorted(pairs, key=_order)


def _order(pair: Pair) -> tuple[str, float, str, int, str]:
    condition = pair.condition
    factor = condition.factor or 0.0
    return (
        condition.network or "",
        factor,
        condition.hint or "",
        len(condition.switches),
        condition.allocator,
    )


def _differences(off: Found, on: Found) -> tuple[str, ...]:
    """Say in what two runs differ beside the allocator."""
    first, second = off.condition, on.condition
    whats = {"network": (first.network, second.network), "hint": (first.hint, second.hint)}
    for mine, other in ((first.same, second.same), (first.alike, second.alike)):
        whats |= {key: (mine.get(key), other.get(key)) for key in {**mine, **other}}
    if first.is_modelled != second.is_modelled or bool(first.same) != bool(second.same):
        return ()  # one of them says nothing of itself
    found = [f"{what} ({a} and {b})" for what, (a, b) in whats.items() if a != b]
    notes = []
    both = " and ".join(told_apart(off, on))
    if found:
        notes.append(f"{both} differ in more than the allocator: {', '.join(found)}.")
    if first.is_modelled and first.hint is second.hint is None:
        notes.append(f"{both} do not say their hints, taken to be equal.")
    return tuple(notes)


def told_apart(*runs: Found) -> list[str]:
    """Name runs so that no two different ones have the same name.

    Parameters
    ----------
    *runs : Found
        Any number of them.

    Returns
    -------
    list of str
        Their names; where two traces have the same, the end of their paths by which they differ.
    """
    places = [(run.name, run.trace.resolve()) for run in runs]
    named = []
    for name, place in places:
        others = {each for other, each in places if other == name} - {place}
        n_parts = 1
        while any(each.parts[-n_parts:] == place.parts[-n_parts:] for each in others):
            n_parts += 1
        named.append("/".join(place.parts[-n_parts:]) if others else name)
    return named


def _check_sides(off: Sequence[Found], on: Sequence[Found]) -> None:
    """Refuse runs that say themselves that they are of the other side; raw runs may be compared."""
    wrong = [("off", run) for run in off if run.condition.said == "on"]
    if not all(run.condition.said == "off" for run in off):
        wrong += [("on", run) for run in on if run.condition.said == "off"]
    for side, run in wrong[:1]:
        without = "without" if side == "off" else "with"
        msg = (
            f"{run.name} is named as a run {without} the caching allocator (--{side}), and says itself that "
            f"its allocator is {run.condition.allocator!r}: swap the sides, or leave --off and --on out."
        )
        raise UsageError(msg)


def _check_equal(runs: Sequence[Found]) -> None:
    """Refuse runs of different factors or GPU memory, as far as they are known."""
    factors = {run.condition.factor for run in runs} - {None}
    capacities = {run.condition.capacity_bytes for run in runs} - {None}
    if len(factors) < 2 and len(capacities) < 2:
        return
    said = []
    for run, label in zip(runs, told_apart(*runs), strict=True):
        factor, capacity = run.condition.factor, run.condition.capacity_bytes
        known = [f"factor {factor:g}"] if factor is not None else []
        known += [f"{format_bytes(capacity)} of GPU memory"] if capacity is not None else []
        said.append(f"{label}: {', '.join(known) or 'not known'}")
    msg = (
        "Runs of one pair must have the same factor and GPU memory, as these change all that is compared: "
        f"{'; '.join(said)}. Give runs of one factor, which `nsan model sweep` makes."
    )
    raise UsageError(msg)


def _no_pair(runs: Sequence[Found]) -> UsageError:
    """Say what each run is, and what a pair would be."""
    most = 8
    lines = [f"{run.name}: {described(run.condition)}" for run in runs[:most]]
    if len(runs) > most:
        lines.append(f"and {len(runs) - most} more")
    listed = "; ".join(lines) or "no run"
    msg = (
        f"No pair: {listed}. A pair is one run without and one with the caching allocator, of equal "
        "network, factor, hint and settings. Add the one that is missing, or name the sides with --off "
        "and --on."
    )
    return UsageError(msg)


def described(condition: Condition) -> str:
    """Say under what a run was made, for people."""
    parts = [condition.network, condition.allocator]
    if condition.factor is not None:
        parts.append(f"factor {condition.factor:g}")
    if condition.hint not in {None, "none"}:
        parts.append(f"hint {condition.hint}")
    return ", ".join(part for part in parts if part)
