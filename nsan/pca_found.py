"""Runs without and with PyTorch's caching allocator: found, told apart and paired; nothing is opened."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import floor
from pathlib import Path
from typing import Any, Final, Literal

from nsan.errors import InputMissingError, UsageError
from nsan.opening import capture_at

Side = Literal["off", "on"]

_ABOUT: Final = "model.json"
_SNAPSHOT: Final = "snapshot.pickle"
_SUFFIXES: Final = (".pickle", ".pickle.gz", ".pkl")


@dataclass(frozen=True)
class Condition:
    """Under what a run was made.

    Attributes
    ----------
    side : str
        "off": no caching allocator; "on": with it.
    allocator : str
        "raw", or "caching" with the switches of the model that are set.
    switches : frozenset of str
        Of :data:`nsan.analysis.pca.switches.SWITCHES`.
    network : str or None
        What was trained, by the model.
    factor : float or None
        Peak of the live tensors over GPU memory, as it was asked for.
    hint : str or None
        What the driver was told; "none": nothing; None: not known.
    same : mapping
        What must be equal in both runs of a pair, by name.
    alike : mapping
        What should be equal: a difference is said.
    is_modelled : bool
        Made by the driver model.
    """

    side: Side
    allocator: str
    switches: frozenset[str] = frozenset()
    network: str | None = None
    factor: float | None = None
    hint: str | None = None
    same: Mapping[str, Any] = field(default_factory=dict)
    alike: Mapping[str, Any] = field(default_factory=dict)
    is_modelled: bool = False

    @cached_property
    def key(self) -> str:
        """What the runs of a pair have in common, as text."""
        common = {"network": self.network, "hint": self.hint, **self.same}
        return json.dumps(common, sort_keys=True, default=str)


@dataclass(frozen=True)
class Found:
    """A run that was found, not yet opened.

    Attributes
    ----------
    name : str
        For people.
    trace : Path
        Its trace.
    snapshot : Path or None
        Its memory snapshot, which its ledger needs if it has a cache.
    condition : Condition
        Under what it was made.
    """

    name: str
    trace: Path
    snapshot: Path | None
    condition: Condition


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


# Finding --------------------------------------------------------------------------------------------


def find_runs(path: Path, snapshot: Path | None = None) -> list[Found]:
    """Find the runs that a path stands for.

    Parameters
    ----------
    path : Path
        A folder of ``nsan model run``, one of ``nsan model sweep``, or a trace with its snapshot.
    snapshot : Path, optional
        Snapshot of a trace; by default ``snapshot.pickle`` or the trace's own name beside it.

    Returns
    -------
    list of Found
        A modelled run says its condition; any other trace is one with the caching allocator.

    Raises
    ------
    NsanError
        If there is nothing, or a trace has no snapshot: whether it had a cache is not known then.
    """
    if not path.exists():
        raise InputMissingError(path)
    runs = _modelled(path)
    if runs:
        return runs
    path = capture_at(path)
    beside = snapshot or snapshot_beside(path)
    if beside is None:
        msg = (
            f"{path.name} has no memory snapshot beside it ({_SNAPSHOT} or {path.stem}.pickle), so that "
            "nothing says which allocator it ran with. Name it with --off or --on, and the snapshot with "
            "--snapshot FILE."
        )
        raise UsageError(msg)
    return [Found(path.name, path, beside, Condition("on", "caching"))]


def named_run(path: Path, side: Side, snapshot: Path | None = None) -> Found:
    """Take a trace as a run of the side that the user names.

    Parameters
    ----------
    path : Path
        A trace, or the folder of one modelled run.
    side : str
        "off" or "on".
    snapshot : Path, optional
        Of a run with the caching allocator; by default the one beside it.

    Returns
    -------
    Found
        Without a snapshot if there is none: what needs it stays unknown.
    """
    if not path.exists():
        raise InputMissingError(path)
    runs = _modelled(path)
    if len(runs) > 1:
        msg = f"{path.name} holds {len(runs)} runs: give it without --{side}, as they say it themselves."
        raise UsageError(msg)
    if runs:
        found, made = runs[0], runs[0].condition
        own = Condition(
            side, made.allocator, made.switches, made.network, made.factor, made.hint, made.same,
            made.alike, is_modelled=True,
        )  # fmt: skip
        return Found(found.name, found.trace, snapshot or found.snapshot, own)
    path = capture_at(path)
    beside = (snapshot or snapshot_beside(path)) if side == "on" else None
    return Found(path.name, path, beside, Condition(side, "caching" if side == "on" else "raw"))


def snapshot_beside(trace: Path) -> Path | None:
    """Find the memory snapshot that lies beside a trace; its own name wins."""
    names = [f"{trace.stem}{suffix}" for suffix in _SUFFIXES]
    names += [f"snapshot{suffix}" for suffix in _SUFFIXES]
    places = (trace.with_name(name) for name in names)
    return next((place for place in places if place.is_file()), None)


def _modelled(path: Path) -> list[Found]:
    """List the modelled runs of a folder, or of the folders in it; a trace of one stands for it."""
    if path.is_file():
        own = _about(path.parent)
        return [] if own is None or path.suffix != ".sqlite" else [_run_of(path.parent, own)]
    own = _about(path)
    if own is not None:
        return [_run_of(path, own)]
    folders = sorted(each for each in path.iterdir() if each.is_dir())
    return [_run_of(each, about) for each in folders if (about := _about(each)) is not None]


def _about(folder: Path) -> dict[str, Any] | None:
    """Read what the model says of a run; None if this is none."""
    try:
        about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return about if isinstance(about, dict) and about.get("kind") == "modelled" else None


def _run_of(folder: Path, about: Mapping[str, Any]) -> Found:
    """Tell a modelled run's condition."""
    name = folder.resolve().name
    made = about.get("allocator")
    if not isinstance(made, dict):
        msg = (
            f"{name} is a modelled run of {about.get('program')!r}, which has no allocator: compare "
            "runs of a network (`nsan model list`)."
        )
        raise UsageError(msg)
    traces = sorted(folder.glob("*.sqlite"))
    if len(traces) != 1:
        msg = f"{name} holds {len(traces)} traces, and a modelled run has one: make it again."
        raise UsageError(msg)
    try:
        condition = _condition(about, made)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        msg = f"{_ABOUT} of {name} does not say how the run was made: make it again."
        raise UsageError(msg) from error
    snapshot = folder / _SNAPSHOT if condition.side == "on" else None
    if snapshot is not None and not snapshot.is_file():
        msg = f"{name} has lost its {_SNAPSHOT}, which says what the allocator did: make it again."
        raise UsageError(msg)
    return Found(name, traces[0], snapshot, condition)


def _condition(about: Mapping[str, Any], made: Mapping[str, Any]) -> Condition:
    """Read under what a modelled run was made."""
    kind, _, switches = str(made["kind"]).partition(":")
    return Condition(
        side="off" if kind == "raw" else "on",
        allocator=str(made["kind"]),
        switches=frozenset(filter(None, switches.split("+"))),
        network=str(about["program"]),
        factor=_factor(made["peak_tensor_bytes"], about["capacity_bytes"]),
        hint=_hint(made),
        same=_same(about, made),
        alike=_alike(about),
        is_modelled=True,
    )


def _same(about: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, Any]:
    """Collect what must be equal in both runs of a pair."""
    given = {key: made[key] for key in ("peak_tensor_bytes", "training") if key in made}
    return {**dict(about.get("settings", {})), **given}


def _alike(about: Mapping[str, Any]) -> dict[str, Any]:
    """Collect what should be equal: how the traces were written, and by which version."""
    found = {"nsan": about.get("nsan")}
    for group in ("style", "export"):
        found |= {f"{group} {key}": value for key, value in dict(about.get(group, {})).items()}
    return found


def _hint(made: Mapping[str, Any]) -> str | None:
    """Find what the driver was told; None: a run of an older nsan, which did not write it down."""
    return "+".join(map(str, made["hints"])) or "none" if "hints" in made else None


def _factor(footprint: int, capacity: int) -> float:
    """Find the factor that was asked for: the shortest number that gives this many chunks."""
    from nsan.uvm.constants import VA_BLOCK_BYTES

    highest, lowest = footprint / capacity, footprint / (capacity + VA_BLOCK_BYTES)
    for digits in range(12):
        scale = 10.0**digits
        short = floor(highest * scale) / scale
        if lowest < short <= highest:
            return short
    return highest


# Pairing --------------------------------------------------------------------------------------------


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
        Of equal network, factor, hint and settings, by factor; first what the user has named. One run
        of each kind alone is a pair whatever else differs, which its notes say.

    Raises
    ------
    UsageError
        If there is none; the message says what each run is.
    """
    runs = list({run.trace.resolve(): run for run in runs}.values())
    raw = [run for run in runs if run.condition.side == "off"]
    cached = [run for run in runs if run.condition.side == "on"]
    if off or on:
        # What the user does not name is among the runs that say it themselves.
        sides = (tuple(off) or tuple(raw), tuple(on) or tuple(cached))
        if not all(sides):
            raise _no_pair([*runs, *off, *on])
        named = Pair(*sides, _differences(sides[0][0], sides[1][0]))
        return [named, *(_matched(raw, cached) if off and on else ())]
    found = _matched(raw, cached)
    if not found and len(raw) == 1 and len(cached) == 1:
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
    """Pair each run with a cache with the one without that has all else in common."""
    bases: dict[str, Found] = {}
    for run in raw:
        bases.setdefault(run.condition.key, run)
    seen: dict[tuple[str, str], Pair] = {}
    for run in cached:
        condition = run.condition
        base = bases.get(condition.key)
        if base is not None:
            pair = Pair((base,), (run,), _differences(base, run))
            seen.setdefault((condition.key, condition.allocator), pair)
    return sorted(seen.values(), key=_order)


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
    if first.is_modelled != second.is_modelled:
        return ()  # one of them says nothing of itself
    found = [f"{what} ({a} and {b})" for what, (a, b) in whats.items() if a != b]
    notes = []
    if found:
        both = f"{off.name} and {on.name}"
        notes.append(f"{both} differ in more than the allocator: {', '.join(found)}.")
    if first.is_modelled and first.hint is second.hint is None:
        notes.append(f"{off.name} and {on.name} do not say their hints, taken to be equal.")
    return tuple(notes)


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
