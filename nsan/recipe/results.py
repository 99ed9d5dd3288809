"""What a recipe wrote, for its notebook: tables and charts of the files beside it. No report is read again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from nsan.analysis.result import Figure, Result
from nsan.errors import ExtraMissingError, NsanError, listed
from nsan.recipe.plan import ABOUT
from nsan.report.blocks import Block, Picture, Table, Text
from nsan.report.shown import Blocks
from nsan.tabular.columns import fields_of, header_of, telling
from nsan.tabular.notes import few, kinds_in_words
from nsan.text import shortened
from nsan.units import counted

if TYPE_CHECKING:
    from nsan.charts.palette import Theme
    from nsan.tabular.text import Field

_MOST_COLUMNS: Final = 9
_LONGEST_CELL: Final = 60
_UNIT: Final = "unit"
_VALUE: Final = "number"
"""The unit of a column whose values have that of their row."""
_SCALED: Final = ("ns", "byte", "fraction")
_NAMES: Final = ("id", "label", "text")


class NoResultsError(NsanError):
    """A folder has no results of a recipe of nsan, or those of another nsan."""

    def __init__(self, folder: Path, what: str) -> None:
        self.folder, self.what = folder, what
        super().__init__(
            f"{folder}: {what}. Open the notebook in the folder that `nsys recipe uvm_...` wrote, or run the recipe again."
        )


class Results:
    """The folder that a recipe wrote.

    Parameters
    ----------
    folder : str or Path
        Where it is; the notebook's own folder by default.

    Attributes
    ----------
    about : dict
        What ``about.json`` says: recipe, version of nsan, reports, notes, failures.

    Examples
    --------
    >>> from nsan.recipe.results import Results
    >>> results = Results("uvm_sum-1")  # doctest: +SKIP
    >>> results.table("all_migrations")  # doctest: +SKIP
    """

    def __init__(self, folder: str | Path = ".") -> None:
        self.folder = Path(folder)
        try:
            about = json.loads((self.folder / ABOUT).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise NoResultsError(self.folder, f"no {ABOUT} that can be read ({error})") from error
        if not isinstance(about, dict) or about.get("schema") != 1:
            raise NoResultsError(self.folder, f"{ABOUT} is not of this version of nsan")
        self.about: dict[str, Any] = about

    @cached_property
    def tables(self) -> dict[str, Result]:
        """What each table is: columns with units and kinds."""
        name = str(self.about["recipe"])
        found: dict[str, Result] = import_module(
            f"nsan.recipe.{name.replace('uvm_', 'um_')}"
        ).PLAN.tables
        return found

    def frame(self, name: str) -> pl.DataFrame:
        """Read a table.

        Parameters
        ----------
        name : str
            Name of its file without ``.parquet``.

        Returns
        -------
        DataFrame
            All its rows.

        Raises
        ------
        NoResultsError
            If the folder has no such table.
        """
        path = self.folder / f"{name}.parquet"
        if name not in self.tables or not path.is_file():
            raise NoResultsError(
                self.folder, f"no table {name!r}; there are: {listed(self.tables)}"
            )
        return pl.read_parquet(path)

    def head(self) -> Blocks:
        """Say what was read, what could not be, and what to beware of."""
        n, failures = self.about["n_reports"], self.about["failures"]
        said: list[Block] = [
            Text(
                f"{counted(n, 'report')}, read by nsan {self.about['nsan']} for `nsys recipe {self.about['recipe']}`."
            )
        ]
        if self.about["part"]:
            said.append(Text(f"Of each report only {self.about['part']}.", "note"))
        said += [Text(note, "warning") for note in self.about["notes"]]
        said += [
            Text(f"{each['source']} could not be read: {each['reason']}", "missing")
            for each in failures
        ]
        return Blocks(said)

    def table(
        self,
        name: str,
        *,
        columns: Sequence[str] = (),
        rows: int = 20,
        frame: pl.DataFrame | None = None,
    ) -> Blocks:
        """Show the first rows of a table.

        Parameters
        ----------
        name : str
            Name of its file without ``.parquet``.
        columns : sequence of str, optional
            Columns to show, in this order; by default the first that tell something.
        rows : int, default 20
            Rows at most.
        frame : DataFrame, optional
            Rows to show instead of all: sorted, filtered.

        Returns
        -------
        Blocks
            The table with small print; a text where there is no row.
        """
        found = self.frame(name) if frame is None else frame
        about = self.tables[name]
        if not found.height:
            return Blocks([Text(about.nothing, "note")])
        chosen, left_out = _chosen(about, found, columns)
        notes = []
        if found.height > rows:
            notes.append(f"{counted(found.height - rows, 'more row')} in {name}.parquet.")
        if left_out:
            notes.append(f"More columns: {few(map(header_of, left_out))}.")
        is_modelled = self.about["is_modelled"]
        kinds = {c.name: "modelled" if is_modelled else str(c.kind) for c in about.columns}
        figures = [c for c in chosen if c.unit not in {"id", "label", "text"}]
        notes.append(kinds_in_words(figures or chosen, kinds))
        fields = fields_of(chosen)
        pairs = list(zip(chosen, fields, strict=True))
        cells = [
            tuple(shortened(_written(row, figure, field), _LONGEST_CELL) for figure, field in pairs)
            for row in found.head(rows).to_dicts()
        ]
        return Blocks(
            [
                Table(
                    tuple(field.header for field in fields),
                    tuple(cells),
                    tuple(field.right for field in fields),
                    f"One row is {about.row}." if about.row else "",
                    tuple(notes),
                )
            ]
        )

    def chart(self, name: str, *, width: int = 640, theme: Theme = "light") -> Blocks:
        """Show a chart.

        Parameters
        ----------
        name : str
            Name of the chart.
        width : int, default 640
            Pixels of the drawn area.
        theme : {"light", "dark"}
            The ground.

        Returns
        -------
        Blocks
            The chart; a text where the packages that draw are not installed.
        """
        try:
            from nsan.charts.saving import rendered, specification
            from nsan.recipe.pictures import drawn

            chart = drawn(self, name, width=width, theme=theme)
            picture = rendered(chart, ".svg").decode()
        except ModuleNotFoundError as error:
            return Blocks(
                [Text(f"No chart without {error.name}: `pip install 'nsan[report]'`.", "note")]
            )
        except ExtraMissingError as error:
            return Blocks([Text(str(error), "note")])
        return Blocks([Picture(name, name.replace("_", " "), specification(chart), picture)])


def _chosen(
    about: Result, found: pl.DataFrame, columns: Sequence[str]
) -> tuple[list[Figure], list[Figure]]:
    by_name = {c.name: c for c in about.columns}
    tell = [c for c in telling(about.columns, found) if c.name != _UNIT]
    if columns:
        # A rank that no report has, or one GPU throughout, says nothing.
        says = {c.name for c in tell}
        return [by_name[n] for n in columns if n in says or by_name[n].unit not in _NAMES], []
    return tell[:_MOST_COLUMNS], tell[_MOST_COLUMNS:]


def _written(row: dict[str, Any], figure: Figure, field: Field) -> str:
    """Write a value; where each row has a unit of its own, values of the figure are in that, counts are not."""
    value = row[field.key]
    if figure.unit == _VALUE and row.get(_UNIT) in _SCALED and isinstance(value, int | float):
        scaled = Figure(field.key, pl.Float64(), row[_UNIT], "")
        return fields_of([scaled])[0].write(value)
    return field.write(value)
