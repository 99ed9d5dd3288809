"""Section "steps" of a report: what each step of the program's loop faults and moves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import polars as pl

from nsan.health import NVPROF_KINDS
from nsan.report.blocks import Text, quoted
from nsan.report.sections.saying import (
    Said,
    gpu_word,
    has_rows,
    inside,
    middle,
    not_recorded,
    paragraph,
    shown,
    total,
    unsized,
    worst,
)
from nsan.report.shown import Blocks
from nsan.tabular.totals import share
from nsan.units import counted, format_bytes, format_time

if TYPE_CHECKING:
    from nsan.report.report import Report

_STEPS: Final = (
    "step_id",
    "start_ns",
    "time_ns",
    "n_fault_rows",
    "in_bytes",
    "out_bytes",
    "evicted_bytes",
    "similarity_fraction",
)
_MOVED: Final = ("in_bytes", "out_bytes", "evicted_bytes", "similarity_fraction")
"""Columns that stand on copies."""

_RANGES: Final = (
    "domain",
    "name",
    "start_ns",
    "end_ns",
    "unique_bytes",
    "faulted_bytes",
    "moved_bytes",
)
_FEW_RANGES: Final = 5
_ALIKE: Final = 0.1
"""Steps whose traffic differs by less than this part are called alike: a choice of ours."""

_TELLING: Final = 0.001
"""From this share on traffic is told: less rounds to nothing."""

_BY_TIME: Final = "by time: the GPU runs behind the host"
_NO_LOOP: Final = {
    "nvtx": "no NVTX range that lies in no other comes twice under one name",
    "kernels": "no sequence of kernels fills most of the work of a GPU again and again",
}
"""Why no loop was recognised, by what was recorded."""

_HOW: Final = (
    "To mark steps call, in Python, `torch.cuda.nvtx.range_push('step')` and `range_pop()`, in C++ "
    '`nvtxRangePushA("step")` and `nvtxRangePop()` of nvtx3/nvToolsExt.h'
)


def write(report: Report) -> Blocks:
    """Write this section of a report."""
    found = report.frame("iterations")
    steps = found.filter(pl.col("part") == "step")
    if steps.is_empty():
        return Blocks([_no_loop(report)]) + _ranges(report, set())
    moves = report.is_recorded("migrations")
    said = [each for loop in _loops(steps) for each in _loop(report, found, loop)]
    if not moves:
        said.append(
            (f"What they move is not known: {inside(not_recorded(report, 'migrations'))}.", "")
        )
    names = {str(name) for name in steps["name"].drop_nulls().unique()}
    return (
        Blocks([paragraph([*said, *_outside(report, found), *_cut(report), *unsized(report)])])
        + (report.chart("step_by_step") if moves or has_rows(report, "gpu_faults") else ())
        + report.table(
            "iterations",
            frame=steps,
            columns=shown("iterations", steps, [c for c in _STEPS if moves or c not in _MOVED]),
            title=_title(steps),
        )
        + _ranges(report, names)
    )


def _no_loop(report: Report) -> Text:
    """Say that no loop was recognised, and how the program can mark its steps."""
    why = [reason for kind, reason in _NO_LOOP.items() if report.is_recorded(kind)]
    said = ", and ".join(why or ["neither kernels nor NVTX ranges are known"])
    by_nsys = report.summary["source_kind"] not in NVPROF_KINDS
    again = ""
    if by_nsys and not report.is_recorded("nvtx"):
        again = ", and record with `--trace=cuda,nvtx`"
    return Text(f"No loop was recognised: {said}. {_HOW}{again}.", "missing")


def _title(steps: pl.DataFrame) -> str:
    """Say what a row is, and how events are laid to it."""
    by = f" ({_BY_TIME})" if (steps["basis"] == "nvtx").any() else ""
    return f"What each step faults and moves{by}; similarity: of the VA blocks with those of the step before"


def _loops(steps: pl.DataFrame) -> list[pl.DataFrame]:
    """Split into the loops of processes and GPUs, the one that moves most first."""
    loops = steps.partition_by("pid", "device_id", maintain_order=True)
    return sorted(loops, key=lambda loop: -total(loop, "in_bytes"))[:2]


def _loop(report: Report, found: pl.DataFrame, loop: pl.DataFrame) -> Iterator[Said]:
    """Say how long steps take, what they move, and whether they do the same."""
    kinds = report.kinds("iterations", found)
    row = loop.row(0, named=True)
    gpu = gpu_word(row, found.filter(pl.col("part") == "step"))
    by = "NVTX range" if row["basis"] == "nvtx" else "sequence of kernels that begins with"
    yield (
        f"{counted(loop.height, 'step')}{f' on {gpu}' if gpu else ''} ({by} {quoted(row['name'])}) of "
        f"{format_time(middle(loop['time_ns']))} in the median.",
        worst(kinds, ["basis", "time_ns"]),
    )
    if report.is_recorded("migrations"):
        kind = worst(kinds, ["in_bytes", "out_bytes", "similarity_fraction"])
        yield _moved(loop), kind


def _moved(loop: pl.DataFrame) -> str:
    """Say what the steps move, the first apart where it brings more or less than the others."""
    first, later = loop.head(1), loop.slice(1)
    if later.is_empty():
        return f"{_flow(first)}."
    likeness = later["similarity_fraction"].drop_nulls()
    once, again = (middle(part["in_bytes"]) for part in (first, later))
    same = ""
    if len(likeness) and again:
        same = f"; {share(middle(likeness))} of the VA blocks are those of the step before"
    if abs(once - again) > _ALIKE * max(once, again):
        others = "the second" if later.height == 1 else "a later one, in the median,"
        return f"In the first {_flow(first)}; in {others} {_flow(later)}{same}."
    if not again:
        return f"In a step, in the median, {_flow(loop)}{same}."
    return f"In a step, in the median, {_flow(loop)}{same}: every step brings its memory again."


def _flow(steps: pl.DataFrame) -> str:
    """Say what came to the GPU and left it in steps, in the median."""
    came, left = (middle(steps[name]) for name in ("in_bytes", "out_bytes"))
    if not came and not left:
        return "nothing came to the GPU or left it"
    into, out = (format_bytes(size) if size else "nothing" for size in (came, left))
    return f"{into} came to the GPU and {out} left it"


def _cut(report: Report) -> Iterator[Said]:
    if report.is_part:
        yield (
            "Of steps that reach out of the part that was asked for, only what is in it counts.",
            "",
        )


def _outside(report: Report, found: pl.DataFrame) -> Iterator[Said]:
    """Say what lies in no step."""
    rest = found.filter(pl.col("part") != "step")
    moved = total(rest, "in_bytes", "out_bytes")
    whole = total(found, "in_bytes", "out_bytes")
    rows = rest["n_fault_rows"]
    n = None if rows.null_count() else int(rows.sum())
    parts = (
        [f"{share(moved / whole)} of the traffic"] if whole and moved / whole >= _TELLING else []
    )
    parts += [counted(n, "fault row")] if n else []
    if not parts:
        return
    yield (
        f"Outside of all steps: {' and '.join(parts)}.",
        worst(report.kinds("iterations", found), ["in_bytes", "out_bytes"]),
    )


def _ranges(report: Report, known: set[str]) -> Blocks:
    """Show the NVTX ranges other than the steps that work on most memory."""
    if not report.is_recorded("nvtx"):
        return Blocks()
    found = (
        report.frame("working_set_by_nvtx")
        .filter(pl.col("name").is_in(list(known)).fill_null(value=False).not_())
        .sort("unique_bytes", "pid", "device_id", "range_id", descending=[True, *[False] * 3])
        .unique(["pid", "device_id", "domain", "name"], keep="first", maintain_order=True)
    )
    if found.is_empty():
        return Blocks()
    return report.table(
        "working_set_by_nvtx",
        frame=found,
        columns=shown("working_set_by_nvtx", found, _RANGES),
        rows=_FEW_RANGES,
        title=(
            f"Different memory that came to a GPU or faulted while an NVTX range was open ({_BY_TIME}), the "
            "largest instance of each"
        ),
    )
