"""Section "steps" of a report: what each step of the program's loop faults and moves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import polars as pl

from nsan.report.blocks import Text, quoted
from nsan.report.sections.saying import Said, gpu_word, middle, paragraph, shown, total, worst
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
    "unique_bytes",
    "similarity_fraction",
)
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

_HOW: Final = (
    "No steps were found: neither an NVTX range nor a sequence of kernels repeats. Mark them, in Python by "
    "`torch.cuda.nvtx.range_push('step')` and `range_pop()`, in C++ by `nvtxRangePushA(\"step\")` and "
    "`nvtxRangePop()` of nvtx3/nvToolsExt.h, and record with `--trace=cuda,nvtx`."
)


def write(report: Report) -> Blocks:
    """Write this section of a report."""
    found = report.frame("iterations")
    steps = found.filter(pl.col("part") == "step")
    if steps.is_empty():
        return Blocks([Text(_HOW, "missing")]) + _ranges(report, set())
    said = [each for loop in _loops(steps) for each in _alike(report, found, loop)]
    names = {str(name) for name in steps["name"].drop_nulls().unique()}
    return (
        Blocks([paragraph([*said, *_outside(report, found), *_cut(report)])])
        + report.chart("step_by_step")
        + report.table(
            "iterations",
            frame=steps,
            columns=shown("iterations", steps, _STEPS),
            title="What each step faults and moves; similarity: of the VA blocks with those of the step before",
        )
        + _ranges(report, names)
    )


def _loops(steps: pl.DataFrame) -> list[pl.DataFrame]:
    """Split into the loops of processes and GPUs, the one that moves most first."""
    loops = steps.partition_by("pid", "device_id", maintain_order=True)
    return sorted(loops, key=lambda loop: -total(loop, "in_bytes"))[:2]


def _alike(report: Report, found: pl.DataFrame, loop: pl.DataFrame) -> Iterator[Said]:
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
    later = loop.slice(1)
    first, rest = (middle(part["in_bytes"]) for part in (loop.head(1), later))
    kind = worst(kinds, ["in_bytes", "out_bytes", "similarity_fraction"])
    if loop.height == 1:
        yield f"It brought {format_bytes(first)} to the GPU.", kind
        return
    out = format_bytes(middle(later["out_bytes"])) if later["out_bytes"].sum() else "nothing"
    likeness = later["similarity_fraction"].drop_nulls()
    same = ""
    if len(likeness) and rest:
        same = f"; {share(middle(likeness))} of the VA blocks are those of the step before"
    if abs(first - rest) <= _ALIKE * max(first, rest):
        again = "every step brings its memory again" if rest else "no step brings anything"
        yield (
            f"In the median {format_bytes(rest)} came to the GPU in a step and {out} left it{same}: {again}.",
            kind,
        )
        return
    yield (
        f"The first brought {format_bytes(first)} to the GPU, a later one {format_bytes(rest)} in the median, "
        f"while {out} left it{same}.",
        kind,
    )


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
    """Show the NVTX ranges that work on most memory, where they are not just the steps."""
    if not report.is_recorded("nvtx"):
        return Blocks()
    found = (
        report.frame("working_set_by_nvtx")
        .sort("unique_bytes", "pid", "device_id", "range_id", descending=[True, *[False] * 3])
        .unique(["pid", "device_id", "domain", "name"], keep="first", maintain_order=True)
    )
    if found.is_empty() or {str(name) for name in found["name"].unique()} <= known:
        return Blocks()
    return report.table(
        "working_set_by_nvtx",
        frame=found,
        columns=shown("working_set_by_nvtx", found, _RANGES),
        rows=_FEW_RANGES,
        title="NVTX ranges that moved or faulted most different memory, the largest instance of each",
    )
