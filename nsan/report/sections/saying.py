"""What several sections say in one way: of which kind figures are, of which GPU, what was not recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from nsan.analysis.catalog import find
from nsan.analysis.result import KINDS
from nsan.health import NVPROF_KINDS
from nsan.info import MODEL_KIND
from nsan.report.blocks import Table, Text
from nsan.tabular.columns import zero_columns
from nsan.tabular.notes import table_word
from nsan.tabular.totals import share
from nsan.text import safe, shortened
from nsan.units import format_time

if TYPE_CHECKING:
    from nsan.report.report import Report
    from nsan.tabular.text import Field, Row

Said = tuple[str, str]
"""A sentence, and the kind of its figures; "" if it has none."""

_GPU: Final = ("pid", "device_id")

FOR_P90, FOR_P99 = 20, 100
"""From so many values on a tenth or a hundredth of them is worth a figure: a choice of ours."""

SILENT: Final = "copied nothing (first touch, or mapped remotely)"
"""What batches of the outcome ``first_touch`` did: their page had not come by a copy, and none was made."""


def worst(kinds: Mapping[str, str], columns: Iterable[str]) -> str:
    """Give the least certain kind among some columns.

    Examples
    --------
    >>> worst({"n": "recorded", "share": "derived"}, ["n", "share"])
    'derived'
    """
    return max((kinds[name] for name in columns), key=KINDS.index)


def kind_of(report: Report, kind: str) -> str:
    """Give the kind of a figure that a section made itself: modelled where the model made the trace."""
    return "modelled" if report.trace.info.kind == MODEL_KIND else kind


def paragraph(sentences: Iterable[Said]) -> Text:
    """Put sentences together; kinds other than recorded are told, once if all are of one.

    Parameters
    ----------
    sentences : iterable of (str, str)
        Each with its kind.

    Returns
    -------
    Text
        A paragraph.

    Examples
    --------
    >>> paragraph([("2 rows.", "recorded"), ("1 GB/s.", "derived")]).text
    '2 rows. 1 GB/s (derived).'
    >>> paragraph([("2 rows.", "modelled"), ("1 GB/s.", "modelled"), ("See there.", "")]).text
    '2 rows. 1 GB/s (all modelled). See there.'
    """
    found = list(sentences)
    told = [place for place, (_, kind) in enumerate(found) if kind]
    one = len({found[place][1] for place in told}) == 1
    parts = []
    for place, (text, kind) in enumerate(found):
        last = bool(told) and place == told[-1]
        word = f"all {kind}" if one and len(told) > 1 else kind
        marked = kind and kind != "recorded" and (last or not one)
        parts.append(f"{text.removesuffix('.')} ({word})." if marked else text)
    return Text(" ".join(parts))


def part_of(part: float, whole: float) -> str:
    """Write a part as a share of the whole: "all", or percent.

    Examples
    --------
    >>> part_of(2, 2), part_of(1, 8)
    ('all', '12.5%')
    """
    return "all" if part == whole else share(part / whole if whole else None)


def middle(values: pl.Series) -> float:
    """Give the median of numbers; 0 of none."""
    known = values.drop_nulls().to_list()
    return float(median(known)) if known else 0.0


def total(found: pl.DataFrame, *columns: str) -> int:
    """Add up columns; what is unknown adds nothing."""
    return sum(int(found[name].sum() or 0) for name in columns)


def round_time(ns: int) -> str:
    """Write a time that somebody chose, without digits that are 0.

    Examples
    --------
    >>> round_time(500_000), round_time(2_400)
    ('500 us', '2.400 us')
    """
    return format_time(ns).replace(".000 ", " ")


def of_gpus(found: pl.DataFrame, columns: Sequence[str]) -> list[str]:
    """Put the columns that name a row's GPU and process first, where there are several.

    Parameters
    ----------
    found : DataFrame
        A result.
    columns : sequence of str
        The other columns to show.

    Returns
    -------
    list of str
        Columns.
    """
    keys = [name for name in _GPU if name in found.columns and found[name].n_unique() > 1]
    return [*keys, *columns]


def shown(name: str, found: pl.DataFrame, columns: Iterable[str]) -> list[str]:
    """Choose columns of a result: first GPU and process, where there are several; no column of zeros.

    Parameters
    ----------
    name : str
        Name of the analysis.
    found : DataFrame
        Its rows.
    columns : iterable of str
        The columns that are worth to be shown.

    Returns
    -------
    list of str
        Columns.
    """
    zero = {column.name for column in zero_columns(find(name).result.columns, found)}
    return of_gpus(found, [column for column in columns if column not in zero])


def table_of(rows: Iterable[Row], fields: Sequence[Field], title: str, *notes: str) -> Table:
    """Write rows that a section put together as a table.

    Parameters
    ----------
    rows : iterable of mapping
        The rows.
    fields : sequence of Field
        The columns; those that are 0 or empty throughout are left out.
    title : str
        What stands above it.
    *notes : str
        Small print.

    Returns
    -------
    Table
        The table.
    """
    found = list(rows)
    told = [field for field in fields if any(row[field.key] for row in found)]
    return Table(
        tuple(field.header for field in told),
        tuple(tuple(shortened(field.write(row[field.key]), 60) for field in told) for row in found),
        tuple(field.right for field in told),
        title,
        notes,
    )


def gpu_word(row: Mapping[str, Any], found: pl.DataFrame) -> str:
    """Name the GPU of a row, and its process, where there are several; "" if there is one of each.

    Parameters
    ----------
    row : mapping
        A row with ``pid`` and ``device_id``.
    found : DataFrame
        All rows.

    Returns
    -------
    str
        As "GPU 1 of process 42", or "the GPU for process 42".
    """
    keys = of_gpus(found, ())
    process = f"process {'unknown' if row['pid'] is None else row['pid']}"
    if "device_id" not in keys:
        return f"the GPU for {process}" if "pid" in keys else ""
    gpu = "no known GPU" if row["device_id"] is None else f"GPU {row['device_id']}"
    return f"{gpu} of {process}" if "pid" in keys else gpu


def added_up(found: pl.DataFrame) -> str:
    """Say over how many GPUs or processes a sum of times goes, as these overlap; "" for one.

    Parameters
    ----------
    found : DataFrame
        Rows with ``pid`` and ``device_id``.

    Returns
    -------
    str
        As " (added up over 2 GPUs)".
    """
    n = found.select(_GPU).n_unique()
    if n < 2:
        return ""
    what = {1: "processes", n: "GPUs"}.get(
        found["device_id"].n_unique(), "pairs of GPU and process"
    )
    return f" (added up over {n} {what})"


def with_enough(found: pl.DataFrame, count: str) -> pl.DataFrame:
    """Take away percentiles of too few values: the 99th of two is the larger of them.

    Parameters
    ----------
    found : DataFrame
        Rows with columns as ``latency_p90_ns``.
    count : str
        Column with the number of values.

    Returns
    -------
    DataFrame
        The rows; such a percentile is null.
    """
    least = {name: FOR_P99 if "_p99_" in name else FOR_P90 for name in found.columns}
    few = [name for name in found.columns if any(f"_p{p}_" in name for p in (10, 90, 99))]
    return found.with_columns(pl.when(pl.col(count) >= least[name]).then(name) for name in few)


def has_causes(report: Report) -> bool:
    """Say whether the recording tells why memory moved: the logs of nvprof do not."""
    groups = report.summary["migrations"]["groups"] or ()
    return any(group["cause"] != "unknown" for group in groups)


def did_not_fault(report: Report) -> bool:
    """Say whether GPU faults were traced and there is none, and no copy names a cause that says otherwise."""
    traced = report.is_recorded("gpu_faults") and not has_rows(report, "gpu_faults")
    return traced and not has_causes(report)


def has_rows(report: Report, kind: str) -> bool:
    """Say whether there are GPU faults or migrations."""
    return bool(report.summary[kind]["n_rows" if kind == "gpu_faults" else "n"])


def not_recorded(report: Report, kind: str) -> str:
    """Say in a clause that a kind of events was not recorded, and by which switch it is, or why.

    Parameters
    ----------
    report : Report
        The report.
    kind : str
        Of those that :meth:`Report.missing` knows.

    Returns
    -------
    str
        A clause without an end.
    """
    answer, switch = report.summary["capture"][kind], report.summary["switches"][kind]
    if answer == "recorded":
        return f"{table_word(kind)} were traced, and there was none"
    word = "were not recorded" if answer == "not_recorded" else "may not have been recorded"
    is_nsys = report.summary["source_kind"] not in NVPROF_KINDS
    why = f"`{switch}`" if switch and is_nsys else safe(report.summary["reasons"][kind])
    return f"{table_word(kind)} {word} ({why})"


def inside(text: str) -> str:
    """Write what begins a sentence as it stands inside of one.

    Examples
    --------
    >>> inside("Migrations"), inside("GPU faults")
    ('migrations', 'GPU faults')
    """
    return text if text[:2].isupper() else text[0].lower() + text[1:]


def nothing_moved(report: Report, what: str, *, of_faults: bool = True) -> Text:
    """Say why a section has nothing, where no migration is known.

    Parameters
    ----------
    report : Report
        The report.
    what : str
        What there would be, in the plural.
    of_faults : bool, default True
        Faults without a copy can make some, too: without fault rows it is not known whether there are.

    Returns
    -------
    Text
        A line.
    """
    if not report.is_recorded("migrations"):
        why = inside(not_recorded(report, "migrations"))
        return Text(f"Nothing is known of {what}: {why}.", "missing")
    part = " in the part that was asked for" * report.is_part
    if of_faults and not report.is_recorded("gpu_faults"):
        why = inside(not_recorded(report, "gpu_faults"))
        return Text(
            f"No managed memory moved{part}. Whether the GPU faulted is not known: {why}, and a first touch "
            "moves nothing.",
            "missing",
        )
    return Text(f"No managed memory moved{part}, so there are no {what}.", "note")


def without_moves(report: Report, what: str, *, of_faults: bool = False) -> Text | None:
    """Say why a section that stands on copies has nothing; None where there are copies of known size.

    Parameters
    ----------
    report : Report
        The report.
    what : str
        What there would be, in the plural.
    of_faults : bool, default False
        As in :func:`nothing_moved`.

    Returns
    -------
    Text or None
        A line.
    """
    if not has_rows(report, "migrations"):
        return nothing_moved(report, what, of_faults=of_faults)
    if (
        not unsized(report)
        or report.trace.migrations.select(pl.col("bytes").count()).collect().item()
    ):
        return None
    return Text(f"Nothing is known of {what}: the sizes of copies cannot be read.", "missing")


def unsized(report: Report) -> list[Said]:
    """Say that copies lack their size, where some do: sums are of the others."""
    moved = report.summary["migrations"]
    if not moved["n"] or moved["bytes"] is not None:
        return []
    return [("The sizes of some copies cannot be read: figures of bytes are without them.", "")]
