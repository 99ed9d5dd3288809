"""What an analysis gives: a table whose every column says its unit and its kind.

Kinds (design 5): **recorded**, rows as they are and sums of them; **derived**, exact arithmetic on
rows; **reconstructed**, an inference with self-checks; **modelled**, from the driver model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, get_args

import polars as pl

from nsan.schema import Column, Table

Kind = Literal["recorded", "derived", "reconstructed", "modelled"]
KINDS: Final[tuple[str, ...]] = get_args(Kind)

KIND: Final = pl.Enum(KINDS)
"""Type of a column that says the kind row by row."""


@dataclass(frozen=True)
class Figure(Column):
    """One column of a result.

    ``unit`` is one of "ns", "byte", "byte/s", "fraction", "byte address", "id", "label", "text",
    "flag", "number", or the plural of what is counted; it decides how people see the value.
    ``governs``, of a column that says the kind row by row, is a pattern of the names of the columns
    it speaks of; by default all but ids and labels.
    """

    kind: Kind = "derived"
    governs: str = ""


@dataclass(frozen=True)
class Result(Table):
    """The table that an analysis gives; the first columns name the row.

    ``nothing`` is what a table without a row says.
    """

    columns: tuple[Figure, ...]
    nothing: str = "Nothing in this capture answers the question."

    def from_rows(self, build: Callable[[], pl.DataFrame]) -> pl.LazyFrame:
        """Make a lazy frame of this table from a function that computes it when collected.

        Parameters
        ----------
        build : callable
            Computes the rows, with the columns of this table in any order and of any width that
            casts without loss.

        Returns
        -------
        LazyFrame
            Nothing is computed before it is collected.
        """
        return pl.defer(lambda: build().select(self.cast()), schema=self.schema)

    def cast(self) -> list[pl.Expr]:
        """Expressions that put a frame with these columns into order and type."""
        return [pl.col(name).cast(dtype) for name, dtype in self.schema.items()]


recorded: Final = partial(Figure, kind="recorded")
"""Declare a column whose values stand in the rows of the trace."""

derived: Final = partial(Figure, kind="derived")
"""Declare a column of exact arithmetic on rows."""

reconstructed: Final = partial(Figure, kind="reconstructed")
"""Declare a column that is an inference."""

PID: Final = recorded("pid", pl.UInt32, "id", "Process.")
DEVICE: Final = recorded("device_id", pl.Int64, "id", "CUDA ordinal of the GPU in its process.")
"""The columns that keep processes and GPUs apart."""
