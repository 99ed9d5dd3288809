"""Section "transfers" of a report: how large copies were, how fast, and how often the same memory moved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from nsan.report.sections.saying import (
    Said,
    kind_of,
    paragraph,
    part_of,
    shown,
    total,
    unsized,
    without_moves,
    worst,
)
from nsan.report.shown import Blocks
from nsan.tabular.totals import share
from nsan.text import direction_word
from nsan.units import NS_PER_S, counted, format_bytes, format_count, format_rate

if TYPE_CHECKING:
    from nsan.report.report import Report

_SIZES: Final = (
    "direction",
    "min_bytes",
    "n_pushes",
    "n_migrations",
    "bytes",
    "bytes_fraction",
    "bytes_per_s",
)
_COST: Final = ("direction", "n_migrations", "latency_ns", "bytes_per_s", "r2")
_KEYS: Final = ("pid", "device_id", "direction")
_MOST_PREFETCHES: Final = (
    "call_name",
    "to_host",
    "call_start_ns",
    "bytes",
    "late_bytes",
    "evicted_bytes",
    "wasted_bytes",
    "outcome",
)
_AGAIN: Final = 1.05
"""From so many times on memory came again and again: a choice of ours."""

_TELLING: Final = 0.001
"""From this share on small pushes are told: less rounds to nothing."""

_OUTCOMES: Final = {
    "in_time": "in time",
    "late": "late (some of that memory came by faults)",
    "early": "too early (evicted before work started)",
    "moved_nothing": "without a copy",
}


def write(report: Report) -> Blocks:
    """Write this section of a report."""
    if (nothing := without_moves(report, "transfers")) is not None:
        return Blocks([nothing])
    size = pl.col("bytes")
    sizes = (
        report.frame("transfer_efficiency")
        .filter(size > 0)
        .sort(
            size.sum().over("direction"),
            size.sum().over(_KEYS),
            *_KEYS,
            "min_bytes",
            descending=[True, True, *[False] * 3, True],
        )
    )
    cost = report.frame("copy_cost").filter(pl.col("bytes_per_s").is_not_null())
    said = (
        [*_speed(report, sizes, cost), *_singly(report)],
        [*_again(report), *_rule(report), *unsized(report)],
    )
    return (
        Blocks(paragraph(part) for part in said if part)
        + report.chart("transfer_sizes")
        + report.table(
            "transfer_efficiency",
            frame=sizes,
            columns=shown("transfer_efficiency", sizes, _SIZES),
            title="Pushes (what the driver copied at once in a VA block) by size",
        )
        + _cost(report, cost)
        + _prefetches(report)
    )


def _cost(report: Report, cost: pl.DataFrame) -> Blocks:
    """Show what a copy costs, where copies of several sizes tell."""
    if cost.is_empty():
        return Blocks()
    return report.table(
        "copy_cost",
        frame=cost,
        columns=shown("copy_cost", cost, _COST),
        title="What one copy costs: a fixed time, and then so fast (a fit)",
    )


def _speed(report: Report, sizes: pl.DataFrame, cost: pl.DataFrame) -> Iterator[Said]:
    """Say how fast copies were on average, each way, and against what the link gave at best."""
    if sizes.is_empty():
        return
    kinds = report.kinds("transfer_efficiency", sizes)
    best = report.kinds("copy_cost", cost)
    ways = (
        sizes.group_by("direction")
        .agg(
            pl.col("bytes").sum(),
            # A rate of rows of which one has no known time would be too high.
            ns=pl.when(pl.col("copy_ns").null_count() == 0).then(pl.col("copy_ns").sum()),
            small=(pl.col("small_fraction") * pl.col("bytes")).sum() / pl.col("bytes").sum(),
        )
        .join(
            cost.group_by("direction").agg(pl.col("bytes_per_s").max()), on="direction", how="left"
        )
        .sort("bytes", "direction", descending=[True, False])
    )
    for row in ways.to_dicts():
        moved = f"{format_bytes(row['bytes'])} moved {direction_word(row['direction'])}"
        some_unknown = report.summary["migrations"][f"{row['direction']}_bytes"] is None
        if some_unknown or not row["ns"]:
            least = " at least" * some_unknown
            yield f"{moved}{least}, at a rate that is not known.", worst(kinds, ["bytes"])
            continue
        rate, long = row["bytes"] / row["ns"] * NS_PER_S, row["bytes_per_s"]
        small = ""
        if row["small"] >= _TELLING:
            small = f", {share(row['small'])} of it in pushes below 64 KiB"
        yield from _rated(
            f"{moved} at {format_rate(rate)} on average{small}",
            worst(kinds, ["bytes", "copy_ns"]),
            f"{share(rate / long)} of the {format_rate(long)} of a long copy" if long else "",
            best["bytes_per_s"],
        )


def _rated(average: str, kind: str, against: str, against_kind: str) -> Iterator[Said]:
    """Write an average beside the best; apart where the best is less certain, so that each has its kind."""
    if against and kind == against_kind:
        yield f"{average}, {against}.", kind
        return
    yield f"{average}.", kind
    if against:
        yield f"That is {against}.", against_kind


def _singly(report: Report) -> Iterator[Said]:
    """Say what rates are of, where start times are too coarse to tell when anything was under way."""
    moved = report.summary["migrations"]
    if moved["busy_ns"] is None and moved["bytes"]:
        yield (
            "Rates are of single copies: the log tells how long each took, only when it began is coarse.",
            "",
        )


def _again(report: Report) -> Iterator[Said]:
    """Say how often the same memory came."""
    found = report.frame("amplification")
    came, distinct = (total(found, name) for name in ("htod_bytes", "unique_htod_bytes"))
    if not distinct:
        return
    kind = worst(report.kinds("amplification", found), ["htod_bytes", "unique_htod_bytes"])
    times = came / distinct
    if times < _AGAIN:
        yield (
            "What came from the CPU came once."
            if came == distinct
            else (f"What came from the CPU came {times:.2f} times on average."),
            kind,
        )
        return
    yield (
        f"The same memory came from the CPU {times:.2f} times on average: {format_bytes(came)} moved for "
        f"{format_bytes(distinct)} of different memory.",
        kind,
    )


def _rule(report: Report) -> Iterator[Said]:
    """Say how far the rule of the driver's prefetcher explains what came."""
    if report.is_part:  # it needs the whole capture
        return
    n, exact = _replayed(report)
    if n:
        yield (
            "The rule of the driver's prefetcher, run again, gives "
            f"{part_of(exact, n)} of {counted(n, 'push', 'pushes')} to the page.",
            kind_of(report, "derived"),
        )


def _replayed(report: Report) -> tuple[int, int]:
    """Count the pushes in which the prefetcher's rule was run again, and those that it gives exactly."""
    totals = report.whole.capture_totals
    if totals is None:
        found = report.frame("prefetch_replay").to_dicts()
    else:  # it takes long, and the import did it
        found = totals["lost_rows"]["replay"]
    return sum(row["n_pushes"] for row in found), sum(row["n_exact_pushes"] for row in found)


def _prefetches(report: Report) -> Blocks:
    """Show what became of the prefetches that the program asked for."""
    found = report.frame("user_prefetches")
    if found.is_empty():
        return Blocks()
    outcomes = (
        found.group_by("outcome").agg(n=pl.len(), bytes=pl.col("bytes").sum()).sort("outcome")
    )
    n, size = counted(found.height, "prefetch", "prefetches"), format_bytes(total(found, "bytes"))
    parts = [_outcome(row, found.height) for row in outcomes.to_dicts()]
    kind = worst(report.kinds("user_prefetches", found), ["bytes", "outcome"])
    said = f"The program asked for {n}, which moved {size}: {', '.join(parts)}."
    largest = found.sort("bytes", "pid", "prefetch_id", descending=[True, False, False])
    return Blocks([paragraph([(said, kind)])]) + report.table(
        "user_prefetches",
        frame=largest,
        columns=shown("user_prefetches", found, _MOST_PREFETCHES),
        rows=5,
        title="The largest of the program's prefetches",
    )


def _outcome(row: Mapping[str, Any], n: int) -> str:
    """Say how many prefetches became what, and what these moved; "all" where all did."""
    word = _OUTCOMES.get(row["outcome"], str(row["outcome"]).replace("_", " "))
    if row["n"] == n:
        return f"{'all ' * (n > 1)}{word}"
    return f"{format_count(row['n'])} {word} ({format_bytes(row['bytes'])})"
