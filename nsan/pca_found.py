"""Runs without and with PyTorch's caching allocator: found and told apart; no trace is opened."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import floor
from pathlib import Path
from typing import Any, Final, Literal

from nsan.errors import InputMissingError, NotAStoreError, NsanError, UsageError
from nsan.io.bench_truth import BENCH, BENCH_FORMAT
from nsan.io.probe import CAPTURE_SUFFIXES, newest_capture
from nsan.opening import capture_at, open_snapshot
from nsan.units import GIB

Side = Literal["off", "on"]

_ABOUT: Final = "model.json"
_SNAPSHOT: Final = "snapshot.pickle"
_SUFFIXES: Final = (".pickle", ".pickle.gz", ".pkl")
_RAW: Final = "raw"
_VARIED: Final = ("allocator", "oversubscription_factor", "prefetch", "advice")
"""Axes of the benchmark that a condition says itself."""


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
        What was trained, by the model or on a GPU by `nsan bench`; there it may be an access pattern.
    factor : float or None
        Peak of the live tensors over GPU memory, as it was asked for.
    hint : str or None
        What the driver was told; "none": nothing; None: not known.
    same : mapping
        What must be equal in both runs of a pair, by name.
    alike : mapping
        What should be equal: a difference is said.
    is_modelled : bool
        Made by the driver model, whose file says all of this.
    said : str or None
        The side that the run itself says, by the model's file or in its snapshot; None: neither does.
    capacity_bytes, managed_bytes : int or None
        GPU memory, and the peak of managed memory, as the model's file says.
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
    said: Side | None = None
    capacity_bytes: int | None = None
    managed_bytes: int | None = None

    @cached_property
    def key(self) -> str:
        """What the runs of a pair have in common, as text."""
        common = {"network": self.network, "hint": self.hint, "capacity": self.capacity_bytes}
        common |= self.same
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


# Finding --------------------------------------------------------------------------------------------


def find_runs(path: Path, snapshot: Path | None = None) -> list[Found]:
    """Find the runs that a path stands for.

    Parameters
    ----------
    path : Path
        A folder of ``nsan model run`` or ``nsan bench run``, one of their sweeps, or a trace with its snapshot.
    snapshot : Path, optional
        Snapshot of a trace; by default ``snapshot.pickle`` or the trace's own name beside it.

    Returns
    -------
    list of Found
        A modelled run and one of the benchmark say their condition, and a snapshot that the model wrote its
        allocator; any other trace is one with the caching allocator. Runs of a sweep of the benchmark that did
        not end well have no trace, and are left out.

    Raises
    ------
    NsanError
        If there is nothing, or a trace has no snapshot: whether it had a cache is not known then.
    """
    if not path.exists():
        raise InputMissingError(path)
    runs = _told(path)
    if runs:
        return runs
    path = _capture(path)
    beside = snapshot or snapshot_beside(path)
    if beside is None:
        msg = (
            f"{path.name} has no memory snapshot beside it ({_SNAPSHOT} or {path.stem}.pickle), so that "
            "nothing says which allocator it ran with. Name it with --off or --on, and the snapshot with "
            "--snapshot FILE."
        )
        raise UsageError(msg)
    condition = _said_by(beside)
    return [Found(path.name, path, beside if condition.side == "on" else None, condition)]


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
        Without a snapshot if there is none: what needs it stays unknown. Of the side that the user
        names; what the run says itself is in its condition.

    Raises
    ------
    NsanError
        If there is no such run, or several; or if its snapshot cannot be read.
    """
    if not path.exists():
        raise InputMissingError(path)
    runs = _told(path)
    if len(runs) > 1:
        msg = f"{path.name} holds {len(runs)} runs: give it without --{side}, as they say it themselves."
        raise UsageError(msg)
    if runs:
        found = runs[0]
        own = None if found.condition.said == "off" else snapshot or found.snapshot
        return replace(found, snapshot=own, condition=replace(found.condition, side=side))
    path = _capture(path)
    if side == "off":
        said = _said_of(path)
        return Found(path.name, path, None, Condition(side, said.allocator, said=said.said))
    beside = snapshot or snapshot_beside(path)
    if beside is None:
        return Found(path.name, path, None, Condition(side, "caching"))
    condition = replace(_said_by(beside), side=side)
    return Found(path.name, path, None if condition.said == "off" else beside, condition)


def snapshot_beside(trace: Path) -> Path | None:
    """Find the memory snapshot that lies beside a trace; its own name wins."""
    names = [f"{trace.stem}{suffix}" for suffix in _SUFFIXES]
    names += [f"snapshot{suffix}" for suffix in _SUFFIXES]
    places = (trace.with_name(name) for name in names)
    return next((place for place in places if place.is_file()), None)


def _capture(path: Path) -> Path:
    """Find the capture that a path stands for."""
    try:
        return capture_at(path)
    except NotAStoreError as error:
        msg = (
            f"{path.name or path} is a folder without a run: neither a {_ABOUT} of `nsan model run` nor a "
            "trace is in it. Give the folder of a run or of a sweep, or a trace."
        )
        raise UsageError(msg) from error


def _said_by(snapshot: Path) -> Condition:
    """Tell the condition of a run by its snapshot: one that the model wrote says its allocator."""
    said = open_snapshot(snapshot).info.model
    allocator = said.get("allocator")
    if allocator is None:
        return Condition("on", "caching")
    side: Side = "off" if allocator == _RAW else "on"
    return Condition(side, allocator, _switches(allocator), said.get("network"), said=side)


def _said_of(trace: Path) -> Condition:
    """Tell what a run that was named as one without the caching allocator says itself, if it does."""
    beside = snapshot_beside(trace)
    others = [each for each in trace.parent.glob(f"*{trace.suffix}") if each != trace]
    if beside is None or (others and not beside.name.startswith(f"{trace.stem}.")):
        return Condition("off", _RAW)  # the snapshot may be of another one of these traces
    try:
        said = _said_by(beside)
    except NsanError:
        return Condition("off", _RAW)
    return said if said.said else Condition("off", _RAW)


def _told(path: Path) -> list[Found]:
    """List the runs of a folder, or of the folders in it, that say themselves how they were made.

    A trace of one stands for it.
    """
    if path.is_file():
        own = _run_in(path.parent) if path.suffix in CAPTURE_SUFFIXES else None
        return [] if own is None else [replace(own, trace=path)]
    own = _run_in(path)
    if own is not None:
        return [own]
    folders = sorted(each for each in path.iterdir() if each.is_dir())
    failed: list[str] = []
    runs = [run for each in folders if (run := _run_in(each, failed)) is not None]
    if failed and not runs:
        raise UsageError(f"No run of {path.name or path} left a trace: {'; '.join(failed[:3])}.")
    return runs


def _run_in(folder: Path, failed: list[str] | None = None) -> Found | None:
    """Take a folder as a run that says how it was made; None if it is none.

    Parameters
    ----------
    folder : Path
        Any.
    failed : list of str, optional
        Gets a run that left no trace; without it that is an error.
    """
    about = _about(folder)
    if about is not None:
        return _run_of(folder, about)
    about = _read(folder, BENCH)
    if about is None or about.get("nsan_bench") != BENCH_FORMAT:
        return None
    if about.get("status") == "ok" and about.get("profiled"):
        return _bench_run(folder, about)
    name = folder.resolve().name
    why = about.get("reason") or "it ran without nsys"
    if failed is None:
        raise UsageError(f"{name} left no trace to look at: {why}.")
    failed.append(f"{name}: {why}")
    return None


def _bench_run(folder: Path, about: Mapping[str, Any]) -> Found:
    """Tell the condition of a run of the benchmark."""
    name = folder.resolve().name
    trace = newest_capture(folder)
    try:
        condition = _bench_condition(about)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        msg = f"{BENCH} of {name} does not say how the run was made: make it again."
        raise UsageError(msg) from error
    if trace is None:
        raise UsageError(f"{name} has lost its report: make it again.")
    return Found(name, trace, snapshot_beside(trace) if condition.side == "on" else None, condition)


def _bench_condition(about: Mapping[str, Any]) -> Condition:
    made, versions = about["condition"], dict(about.get("versions", {}))
    allocator, factor = str(made["allocator"]), made["factor"]
    side: Side = "off" if allocator == _RAW else "on"
    own = {key: value for key, value in made["axes"].items() if key not in _VARIED}
    return Condition(
        side=side,
        allocator=allocator,
        network=made["network"] or made["pattern"],
        factor=None if factor is None else float(factor),
        hint=made["hint"],
        same={
            **own,
            "program": about["program"],
            "factor": factor,
            "GPU": versions.pop("gpu", None),
        },
        alike={"nsan": about.get("nsan_version"), **versions, **_memory(about.get("footprint"))},
        said=side,
    )


def _memory(footprint: object) -> dict[str, str]:
    """Say how much GPU memory a run had, to two digits: what is free changes a little from run to run."""
    available = footprint.get("available_bytes") if isinstance(footprint, Mapping) else None
    return {"GPU memory": f"{available / GIB:.2g} GiB"} if isinstance(available, int) else {}


def _about(folder: Path) -> dict[str, Any] | None:
    """Read what the model says of a run; None if this is none."""
    about = _read(folder, _ABOUT)
    return about if about is not None and about.get("kind") == "modelled" else None


def _read(folder: Path, file: str) -> dict[str, Any] | None:
    """Read what a run says of itself; None if there is nothing."""
    try:
        about = json.loads((folder / file).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        name = folder.resolve().name
        msg = (
            f"{file} of {name} cannot be read ({type(error).__name__}), and it says how the run was made: "
            f"make the run again; or, if {file} is no file of nsan's, give the trace from another folder."
        )
        raise UsageError(msg) from error
    return about if isinstance(about, dict) else None


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
    kind = str(made["kind"])
    side: Side = "off" if kind == _RAW else "on"
    return Condition(
        side=side,
        allocator=kind,
        switches=_switches(kind),
        network=str(about["program"]),
        factor=_factor(made["peak_tensor_bytes"], about["capacity_bytes"]),
        hint=_hint(made),
        same=_same(about, made),
        alike=_alike(about),
        is_modelled=True,
        said=side,
        capacity_bytes=int(about["capacity_bytes"]),
        managed_bytes=int(about["peak_managed_bytes"]) if "peak_managed_bytes" in about else None,
    )


def _switches(allocator: str) -> frozenset[str]:
    """List the switches in the name of an allocator."""
    return frozenset(filter(None, allocator.partition(":")[2].split("+")))


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
