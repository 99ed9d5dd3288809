"""Which charts a recipe's notebook has: what of its tables is drawn, and how much of that fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import polars as pl

from nsan.charts.lanes import NAMES
from nsan.charts.palette import CAUSES
from nsan.charts.recipes import Bars, bars_of_reports, shares_over_time, spread_over_time
from nsan.charts.theme import Drawing, cause_label, direction_label, name_text
from nsan.errors import UnknownNameError
from nsan.recipe.jobs import WHO
from nsan.text import CAUSE_WORDS
from nsan.units import counted

if TYPE_CHECKING:
    from nsan.charts.palette import Theme
    from nsan.recipe.results import Results

_MOST_REPORTS: Final = 60
_MOST_CELLS: Final = 4500
_MOST_BINS: Final = 240

_CAUSE_SHADES: Final = {CAUSE_WORDS.get(name, name): shade for name, shade in CAUSES.items()}
_TIMES: Final = {
    "migrations_busy_ns": ("migrations in flight", NAMES[0]),
    "gpu_faults_busy_ns": ("batches of GPU faults in service", NAMES[1]),
    "kernels_busy_ns": ("kernels running", NAMES[2]),
}


def drawn(results: Results, name: str, *, width: int = 640, theme: Theme = "light") -> Drawing:
    """Draw a chart of what a recipe wrote.

    Parameters
    ----------
    results : Results
        The folder.
    name : str
        Name of the chart.
    width : int, default 640
        Pixels of the drawn area.
    theme : {"light", "dark"}
        The ground.

    Returns
    -------
    altair chart
        Of the first reports where there are too many to be seen; a note says so.

    Raises
    ------
    UnknownNameError
        If there is no such chart.
    """
    if name not in _CHARTS:
        raise UnknownNameError("chart of a recipe", name, _CHARTS)
    return _CHARTS[name](results, width, theme)


def labelled(frame: pl.DataFrame) -> pl.DataFrame:
    """Give each row the label of its report: short, and each report another.

    Parameters
    ----------
    frame : DataFrame
        With ``run``, ``rank``, ``source``.

    Returns
    -------
    DataFrame
        With ``report`` (String) as well.
    """
    reports = frame.select(WHO).unique(maintain_order=True)
    several = reports["run"].n_unique() > 1
    names = [_label(*row, several=several) for row in reports.rows()]
    taken = [
        name if names.count(name) == 1 else name_text(source, 40)
        for name, source in zip(names, reports["source"], strict=True)
    ]
    numbered = [
        name if taken.count(name) == 1 else f"{name} ({at})" for at, name in enumerate(taken)
    ]
    with_label = reports.with_columns(pl.Series("report", numbered, pl.String))
    return frame.join(with_label, on=WHO, how="left", nulls_equal=True, maintain_order="left")


def _label(run: str, rank: int | None, source: str, *, several: bool) -> str:
    if rank is None:
        return name_text(source.rsplit("/", 1)[-1], 40)
    return name_text(f"{run} rank {rank}" if several else f"rank {rank}", 40)


def _first(frame: pl.DataFrame, most: int = _MOST_REPORTS) -> tuple[pl.DataFrame, list[str]]:
    """Keep the first reports; say how many are left out."""
    reports = frame["report"].unique(maintain_order=True)
    if reports.len() <= most:
        return frame, []
    kept = frame.filter(pl.col("report").is_in(reports.head(most).implode()))
    return kept, [f"The first {most} of {counted(reports.len(), 'report')}, by run and rank."]


def _bytes_by_report(results: Results, width: int, theme: Theme) -> Drawing:
    frame, notes = _first(labelled(results.frame("rank_migrations")))
    rows = frame.select(
        pl.format("{} {}", "report", direction_label()).alias("report"),
        cause_label().fill_null("unknown").alias("series"),
        pl.col("bytes").alias("value"),
    )
    rows = rows.group_by("report", "series", maintain_order=True).agg(
        pl.when(pl.col("value").null_count() == 0).then(pl.col("value").sum())
    )
    about = Bars(
        "What moved, which way and why", "Migrated", "byte", shades=_CAUSE_SHADES, notes=notes
    )
    return bars_of_reports(rows, about, width=width, theme=theme)


def _time_by_report(results: Results, width: int, theme: Theme) -> Drawing:
    frame, notes = _first(labelled(results.frame("rank_stats")), _MOST_REPORTS // 2)
    rows = pl.concat(
        frame.select("report", pl.lit(words).alias("series"), pl.col(name).alias("value"))
        for name, (words, _) in _TIMES.items()
    )
    notes.append("Per GPU, summed over the GPUs of a report.")
    shades = dict(_TIMES.values())
    about = Bars("Time of each report", "Busy", "ns", is_stacked=False, shades=shades, notes=notes)
    return bars_of_reports(rows, about, width=width, theme=theme)


def _patterns(results: Results, width: int, theme: Theme) -> Drawing:
    words = pl.col("pattern").fill_null("not known").str.replace_all("_", " ")
    rows = results.frame("all_patterns").select(
        words.alias("report"),
        pl.lit("faulted pages").alias("series"),
        pl.col("n_pages").alias("value"),
    )
    about = Bars("Faulted pages by the way clusters walk through memory", "Faulted pages")
    return bars_of_reports(rows, about, width=width, theme=theme)


def _oversubscription(results: Results, width: int, theme: Theme) -> Drawing:
    frame, notes = _first(labelled(results.frame("rank_stats")))
    gpu = pl.format("{} GPU {}", "report", pl.col("device_id").fill_null(-1))
    rows = frame.select(
        pl.when(pl.len().over("report") > 1).then(gpu).otherwise("report").alias("report"),
        pl.lit("managed memory over what is available").alias("series"),
        pl.col("oversubscription_factor").alias("value"),
    )
    notes.append("1, the line, is exactly full.")
    about = Bars(
        "Oversubscription factor of each process and GPU", "Factor", notes=notes, mark_at=1.0
    )
    return bars_of_reports(rows, about, width=width, theme=theme)


def _time_map(results: Results, width: int, theme: Theme) -> Drawing:
    cells, notes = _coarser(labelled(results.frame("analysis")))
    n_bins = cells["start_ns"].n_unique() or 1
    cells, more = _first(cells, max(1, min(_MOST_REPORTS, _MOST_CELLS // n_bins)))
    stats = results.frame("rank_stats").filter(pl.col("shown_fraction").is_not_null())
    shown = stats["shown"].unique().to_list()
    parts = sorted(each for each in shown if each and " and " not in each)
    notes += more + [f"Of reports that recorded only {each}, the share of these." for each in parts]
    return shares_over_time(cells, notes=notes, width=width, theme=theme)


def _coarser(cells: pl.DataFrame) -> tuple[pl.DataFrame, list[str]]:
    """Put neighbouring bins together where there are more than can be seen."""
    n = cells["bin"].n_unique()
    cells = cells.with_columns(share=pl.col("shown_fraction"))
    if n <= _MOST_BINS:
        return cells, []
    together = -(-n // _MOST_BINS)
    coarse = cells.group_by("report", pl.col("bin") // together, maintain_order=True).agg(
        pl.col("start_ns").min(), pl.col("end_ns").max(), pl.col("share").mean()
    )
    return coarse, [f"{together} bins of {n} together."]


def _time_mean(results: Results, width: int, theme: Theme) -> Drawing:
    bins = results.frame("all_stats")
    if bins.height <= 1000:
        return spread_over_time(bins, width=width, theme=theme)
    together = -(-bins.height // 1000)
    coarse = bins.group_by(pl.col("bin") // together, maintain_order=True).agg(
        pl.col("start_ns").min(),
        pl.col("end_ns").max(),
        pl.col("mean_fraction").mean(),
        pl.col("min_fraction").min(),
        pl.col("max_fraction").max(),
    )
    notes = [f"{together} bins of {bins.height} together."]
    return spread_over_time(coarse, notes=notes, width=width, theme=theme)


_CHARTS: Final[dict[str, Callable[[Results, int, Theme], Drawing]]] = {
    "bytes_by_report": _bytes_by_report,
    "time_by_report": _time_by_report,
    "patterns_by_report": _patterns,
    "oversubscription_by_report": _oversubscription,
    "time_map": _time_map,
    "time_mean": _time_mean,
}
