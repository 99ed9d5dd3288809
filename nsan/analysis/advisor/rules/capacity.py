"""Capacity thrash: what a step works on does not fit, so that each step brings back what the one before evicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from nsan.analysis.advisor.advice import Advice, Change, Gain, Rows, Said, Silent, Target
from nsan.analysis.advisor.calls import ADVISE_NOTE, advise_calls
from nsan.analysis.advisor.facts import Facts, gate_of, moved_bytes, number, target_of
from nsan.analysis.advisor.shuttles import NO_CAUSES, REFAULTED_FRACTION, has_causes, thinly_evicted
from nsan.analysis.advisor.waits import refault_waits, waited
from nsan.text import shortened
from nsan.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

THRASH: Final = "capacity_thrash"

_MOSTLY: Final = 0.5
"""Share of evictions that free a VA block with little in it: what takes room is not what is used."""

_TARGET_SHARE: Final = 0.1
_MOST_TARGETS: Final = 4


@dataclass(frozen=True)
class _Need:
    """What one step works on, at least, and the room that there is, at least: as far as copies tell.

    Attributes
    ----------
    step_bytes : int
        Different bytes that came to the GPU or faulted in the step that needs most.
    room_bytes : int
        Most managed data known to be on the GPU at a time, while it had to evict.
    managed_bytes : int, optional
        Most managed memory alive at a time.
    name : str
        What the steps are: text of an NVTX range, or first kernel of each; "" if there are none.
    rows : Rows, optional
        The steps.
    """

    step_bytes: int
    room_bytes: int
    managed_bytes: int | None
    name: str
    rows: Rows | None

    @property
    def over_bytes(self) -> int:
        """By how much a step, or else all memory, is larger than the room."""
        return max(self.step_bytes, 0 if self.name else self.managed_bytes or 0) - self.room_bytes


def capacity_thrash(facts: Facts) -> Iterator[Said]:
    """Advise to make what is in use at a time fit, and say by how much it is too large."""
    reason, is_known = _why_not(facts)
    if reason:
        yield Silent(THRASH, reason, is_known=is_known)
        return
    evicts = moved_bytes(facts, "dtoh", "eviction")
    totals = facts.rows_of("refault_totals") if evicts else None
    if totals is None:
        full = "Nothing was evicted: GPU memory was never full."
        none = "No managed memory moved, so none was evicted."
        yield Silent(THRASH, full if facts.summary["migrations"]["n"] else none)
        return
    worst = totals.sort("refaulted_bytes", descending=True).row(0, named=True)
    amounts = f"{format_bytes(worst['evicted_bytes'])} were evicted, and {worst['refaulted_fraction']:.0%} came back"
    sparse = sum(row["evictions_fraction"] for row in thinly_evicted(facts))
    if worst["refaulted_fraction"] < REFAULTED_FRACTION:
        yield Silent(THRASH, f"{amounts}: little that is evicted is needed again.")
    elif sparse >= _MOSTLY:
        reason = f"{amounts}, but most evictions took little of a VA block: see place_and_map."
        yield Silent(THRASH, reason)
    else:
        yield _fit(facts, worst, int(totals["refaulted_bytes"].sum()))


def _why_not(facts: Facts) -> tuple[str, bool]:
    """Say why evictions cannot be told, and whether that is an answer; "" if they can."""
    if not facts.is_recorded("migrations"):
        return "Migrations were not recorded.", False
    if facts.is_part:
        return "A part of a capture does not tell what was evicted before it.", False
    if not has_causes(facts):
        return NO_CAUSES, False
    return "", True


def _fit(facts: Facts, worst: Mapping[str, Any], all_back: int) -> Advice:
    wait = waited(facts, refault_waits(facts))
    need = _need(facts, worst)
    targets = _targets(facts, worst, wait.kernel)
    kernel = f" for `{shortened(wait.kernel, 60)}`" if wait.kernel else ""
    return Advice(
        rule=THRASH,
        title=f"{_what(targets, need)}{kernel}",
        finding=_finding(worst, need),
        numbers=(
            number(facts, "evicted", worst["evicted_bytes"], "byte"),
            number(facts, "of that came back", worst["refaulted_bytes"], "byte"),
            number(facts, "one step works on at least", need.step_bytes, "byte"),
            number(facts, "room that was there at least", need.room_bytes, "byte", "reconstructed"),
            number(facts, "page faults waited", wait.ns, "ns", wait.kind),
        ),
        rows=(_told(worst), *([need.rows] if need.rows else [])),
        remedy=_remedy(need),
        calls=_calls(facts, need, targets, worst["device_id"] or 0),
        targets=targets,
        check="Nothing that was evicted comes back (refault_totals), and steps take less time.",
        gate=gate_of("refaults.bytes", worst["refaulted_bytes"], all_back),
        gain=Gain(
            wait.ns,
            wait.kind,
            "time of page faults and prefetches that evicted, or brought back what had been evicted",
        ),
        changes=(Change("fit", targets[0] if targets else Target()),),
    )


def _what(targets: tuple[Target, ...], need: _Need) -> str:
    """Say what has to fit: an array in parts only if it does not fit as a whole."""
    if not targets:
        return "Make what each step uses fit into GPU memory"
    first, *others = targets
    if (first.bytes or 0) > need.room_bytes:
        return f"Make {first.label} fit into GPU memory in parts"
    also = f"{others[0].label}{' and more' * (len(others) > 1)}" if others else "all else"
    return f"Make {first.label} fit into GPU memory together with {also}"


def _finding(worst: Mapping[str, Any], need: _Need) -> str:
    gone = (
        f"{format_bytes(worst['evicted_bytes'])} were evicted from GPU {worst['device_id']} for want of room, and "
        f"{format_bytes(worst['refaulted_bytes'])} ({worst['refaulted_fraction']:.0%}) came back. "
    )
    room = f"about {format_bytes(need.room_bytes)}"
    if need.name and need.over_bytes > 0:
        step = f"A step (`{shortened(need.name, 60)}`) works on at least {format_bytes(need.step_bytes)}"
        return f"{gone}{step}, and there was room for {room}: {format_bytes(need.over_bytes)} too much."
    if need.name:
        step = f"Each step (`{shortened(need.name, 60)}`) works on {format_bytes(need.step_bytes)} or more and fits"
        return f"{gone}{step} into the {room} that were there, but not together with what the next one uses."
    if need.managed_bytes is None:
        return f"{gone}There was room for {room}."
    return f"{gone}{format_bytes(need.managed_bytes)} of managed memory share room for {room}."


def _remedy(need: _Need) -> str:
    shrink = ""
    if need.over_bytes > 0:
        share = need.room_bytes / (need.room_bytes + need.over_bytes)
        shrink = f": by at least {format_bytes(need.over_bytes)}, to {share:.0%} of what it is"
    return (
        f"What is in use at a time has to shrink{shrink}. If kernels go over the data in order, work through it in chunks that fit, "
        "all passes over a chunk before the next; or go through it backwards in every other step, for the last part is "
        "still there. If they pick places at random, chunks do not help before what is picked is put in order: keep that "
        "array at the CPU and map it. Else take a smaller batch. Prefetching makes no room: what it brings evicts something else."
    )


def _calls(facts: Facts, need: _Need, targets: tuple[Target, ...], device: int) -> tuple[str, ...]:
    room = max(need.room_bytes, 1)
    least = -(-(room + max(need.over_bytes, 0)) // room)
    calls = [
        f"for (int chunk = 0; chunk < {max(least, 2)}; ++chunk) {{ /* all steps over one chunk of at most {room} byte */ }}"
    ]
    if facts.has_snapshot and need.over_bytes > 0:
        share = room / (room + need.over_bytes)
        calls.append(
            f"batch_size = int({share:.2f} * batch_size)  # PyTorch; or torch.utils.checkpoint"
        )
    spare = [each for each in targets[1:] if (each.bytes or 0) >= need.over_bytes > 0]
    if spare:
        last = spare[-1]
        calls += [
            f"// or keep one at the CPU: {last.label}",
            *advise_calls(last, [("preferred_location", -1), ("accessed_by", device)]),
            ADVISE_NOTE,
        ]
    return tuple(calls)


def _need(facts: Facts, worst: Mapping[str, Any]) -> _Need:
    memory = facts.rows_of("oversubscription_factor")
    here = None if memory is None else _of_gpu(memory, worst)
    held = here.row(0, named=True) if here is not None and here.height else {}
    room, managed = held.get("resident_peak_bytes") or 0, held.get("managed_peak_bytes")
    steps = _by_range(facts, worst)
    if steps is None:
        steps = _by_kernels(facts, worst)
    if steps is None:
        return _Need(managed or 0, room, managed, "", None)
    rows, name = steps
    most = max(rows.frame["unique_bytes"].to_list(), default=0)
    return _Need(most, room, managed, name, Rows(rows.analysis, rows.frame.head(4), rows.options))


def _by_range(facts: Facts, worst: Mapping[str, Any]) -> tuple[Rows, str] | None:
    """Take the repeated NVTX range whose instances moved most as the step."""
    found = facts.rows_of("working_set_by_nvtx")
    if found is None:
        return None
    often = (
        _of_gpu(found, worst)
        .with_columns(
            n=pl.len().over("domain", "name"),
            moved=pl.col("moved_bytes").sum().over("domain", "name"),
        )
        .filter(pl.col("n") >= 2)
        .sort("moved", "n", "start_ns", descending=[True, True, False])
    )
    if often.is_empty():
        return None
    one = pl.col("name").eq_missing(pl.lit(often["name"][0])) & (
        pl.col("moved") == often["moved"][0]
    )
    columns = ("name", "start_ns", "end_ns", "unique_bytes", "faulted_bytes", "moved_bytes")
    rows = Rows("working_set_by_nvtx", often.filter(one).sort("start_ns").select(columns))
    return rows, str(often["name"][0] or "")


def _by_kernels(facts: Facts, worst: Mapping[str, Any]) -> tuple[Rows, str] | None:
    """Take the steps that repeated kernels show."""
    found = facts.rows_of("iterations")
    if found is None:
        return None
    same = pl.col("device_id").is_null() | (pl.col("device_id") == worst["device_id"])
    mine = found.filter(
        pl.col("pid").eq_missing(pl.lit(worst["pid"], pl.UInt32)), same, pl.col("part") == "step"
    )
    if mine.height < 2:
        return None
    columns = (
        "step_id",
        "name",
        "start_ns",
        "time_ns",
        "in_bytes",
        "evicted_bytes",
        "unique_bytes",
    )
    return Rows("iterations", mine.select(columns)), str(mine["name"][0] or "")


def _of_gpu(frame: pl.DataFrame, worst: Mapping[str, Any]) -> pl.DataFrame:
    return frame.filter(
        pl.col("pid").eq_missing(pl.lit(worst["pid"], pl.UInt32)),
        pl.col("device_id").eq_missing(pl.lit(worst["device_id"], pl.Int64)),
    )


def _targets(facts: Facts, worst: Mapping[str, Any], kernel: str) -> tuple[Target, ...]:
    """Point at the allocations of the process that most of what was evicted is of."""
    found = facts.rows_of("faults_by_allocation")
    if found is None:
        return ()
    found = found.filter(pl.col("pid").eq_missing(pl.lit(worst["pid"], pl.UInt32)))
    gone = pl.col("evicted_bytes")
    most = found.filter(
        pl.col("part") != "unattributed", gone >= _TARGET_SHARE * gone.sum(), gone > 0
    )
    rows = most.sort(gone, "allocation_id", descending=[True, False]).head(_MOST_TARGETS)
    return tuple(target_of(row, kernel) for row in rows.to_dicts())


def _told(worst: Mapping[str, Any]) -> Rows:
    columns = (
        "device_id",
        "n_evictions",
        "n_va_blocks",
        "evicted_bytes",
        "refaulted_bytes",
        "refaulted_fraction",
    )
    return Rows("refault_totals", pl.DataFrame([{name: worst[name] for name in columns}]))
