"""What could not be judged in a fleet and why, and what was judged but is not what it may seem: sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import polars as pl

from nsan.analysis.fleet.bounds import FEW_PEERS, LEAST_PEERS
from nsan.analysis.fleet.peers import JUDGED
from nsan.text import shortened
from nsan.units import counted, format_time

Groups = Sequence[Mapping[str, Any]]

_MOST_NAMES: Final = 3


def notes(reports: pl.DataFrame, groups: Groups) -> Iterator[str]:
    """Say what could not be judged, and what has to be known about what was.

    Parameters
    ----------
    reports : DataFrame
        Of :func:`nsan.fleet.figures.report_figures`.
    groups : sequence of mapping
        Of :func:`nsan.analysis.fleet.peers.judged_groups`.

    Yields
    ------
    str
        A sentence.
    """
    yield from _spreads(groups)
    yield from _few(groups)
    yield from _sizes(reports)
    yield from _twice(reports)
    yield from _lacking(reports)


def _spreads(groups: Groups) -> Iterator[str]:
    """Say of which ranks the times spread so widely that values beyond the bound are no outliers."""
    wide = [each for each in groups if each["n_beyond"] > each["n_together"]]
    for each in sorted(wide, key=lambda each: -each["n_beyond"])[:_MOST_NAMES]:
        one = each["scope"]
        of = f" of {shortened(each['run'], 40)}" if each["run"] else ""
        range_ = f"{format_time(each['min_ns'])} to {format_time(each['max_ns'])}"
        more = each["n_beyond"] - each["n_together"]
        are = "is" if more == 1 else "are"
        yield (
            f"UM time of the {counted(each['n_peers'], one)}{of} spreads widely: {range_}, median "
            f"{format_time(each['median_ns'])}. {counted(more, one)} far from that {are} not apart from the others, and not "
            f"named."
        )
    if len(wide) > _MOST_NAMES:
        yield f"{counted(len(wide) - _MOST_NAMES, 'more group')} whose UM time spreads as widely."


def _few(groups: Groups) -> Iterator[str]:
    """Say how far a rank of a few would have to be from the others to be named."""
    quiet = [
        each
        for each in groups
        if each["n_peers"] <= FEW_PEERS
        and not each["n_together"]
        and each["max_ns"]
        # Where no time would be long enough the spread is plain to see.
        and each["needed_ns"] is not None
    ]
    for scope, what in (("rank", "Runs of three to five ranks"), ("run", "Three to five runs")):
        few = [each for each in quiet if each["scope"] == scope]
        times = sorted(each["needed_ns"] / each["median_ns"] for each in few if each["median_ns"])
        if len(few) == 1:
            each = few[0]
            whole = counted(each["n_peers"], scope)
            yield (
                f"Of {whole} only one far beyond doubt is named: here from {format_time(each['needed_ns'])} on, where "
                f"the median is {format_time(each['median_ns'])}."
            )
        elif times:
            yield (
                f"{what}: of so few only one far beyond doubt is named, here from {_range(times)} times the median on."
            )


def _range(values: Sequence[float]) -> str:
    """Write the least and the largest of sorted values; once, where they look alike."""
    ends = [f"{value:.3g}" for value in (values[0], values[-1])]
    return " to ".join(dict.fromkeys(ends))


def _sizes(reports: pl.DataFrame) -> Iterator[str]:
    runs = reports.group_by("run").agg(n=pl.len(), n_programs=pl.col("program").n_unique())
    if few := runs.filter(pl.col("n") == 2).height:
        yield f"{counted(few, 'run')} of two reports: of two nobody can say which one stands out."
    if not (mixed := runs.filter(pl.col("n_programs") > 1).height):
        return
    sizes = reports.group_by("run", "program").agg(n=pl.len())
    of_mixed = sizes.join(runs.filter(pl.col("n_programs") > 1), on="run", how="semi")
    alone = int(of_mixed.filter(pl.col("n") < LEAST_PEERS)["n"].sum())
    rest = (
        f"; {counted(alone, 'report')} without two others of the same: not judged" if alone else ""
    )
    yield (
        f"{counted(mixed, 'run')} with several programs: ranks are judged against those of the same program{rest}."
    )


def _twice(reports: pl.DataFrame) -> Iterator[str]:
    """Say of which ranks there are several reports: of two processes, or of two runs that are taken for one."""
    twice = (
        reports.drop_nulls("rank")
        .group_by("run", "rank", maintain_order=True)
        .agg(n=pl.len(), sources=pl.col("source"))
        .filter(pl.col("n") > 1)
    )
    if twice.is_empty():
        return
    first = twice.row(0, named=True)
    of = f" of {shortened(first['run'], 40)}" if first["run"] else ""
    names = " and ".join(shortened(source, 60) for source in first["sources"][:2])
    yield (
        f"{counted(twice.height, 'rank')} with several reports, as rank {first['rank']}{of} ({names}): each report is judged "
        f"for itself. If they are of different runs, `--rank-pattern` tells them apart."
    )


def _lacking(reports: pl.DataFrame) -> Iterator[str]:
    for figure, what in zip(JUDGED[1:], ("migrations", "GPU page faults"), strict=True):
        lacking = reports[figure].null_count()
        if 0 < lacking < reports.height:
            yield (
                f"{counted(lacking, 'report')} of {reports.height} without the time of {what}: not judged by it."
            )
    if unknown := reports.filter(pl.col("duration_ns").is_null()).height:
        yield f"{counted(unknown, 'report')} whose duration is not known."
