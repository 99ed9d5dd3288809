"""Counts of any window of time without reading its rows: running sums at every few hundredth row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from nsan.analysis.views.events import Part
from nsan.analysis.views.sums import ROWS_AT_ONCE

if TYPE_CHECKING:
    from numpy.typing import NDArray

_EVERY: Final = 256
"""Rows between two running sums: so many are read at each end of a column."""


@dataclass(frozen=True, eq=False)
class RunningCounts:
    """Rows and amounts of a part by layer, up to every 256th row.

    Attributes
    ----------
    part : Part
        The rows.
    layers : array of int
        Layers that it has.
    n, amount : array of Int64 and Float64, steps by layers
        Sums over the rows before row ``256 * step``.
    """

    part: Part
    layers: NDArray[np.int64]
    n: NDArray[np.int64]
    amount: NDArray[np.float64]

    @property
    def n_bytes(self) -> int:
        """Memory, byte."""
        return self.n.nbytes + self.amount.nbytes

    @classmethod
    def of(cls, part: Part) -> RunningCounts:
        """Add up a part once."""
        layers = np.flatnonzero(np.bincount(part.layer, minlength=1))
        n_steps = part.n_rows // _EVERY + 1
        n = np.zeros((n_steps + 1, len(layers)), np.int64)
        amount = np.zeros((n_steps + 1, len(layers)))
        ranks = _ranks(layers)
        steps = np.arange(min(ROWS_AT_ONCE, part.n_rows)) // _EVERY
        for low in range(0, part.n_rows, ROWS_AT_ONCE):
            rows = slice(low, min(low + ROWS_AT_ONCE, part.n_rows))
            step = steps[: rows.stop - low]
            key = step if len(layers) == 1 else step * len(layers) + ranks.take(part.layer[rows])
            length = (int(step[-1]) + 1) * len(layers)
            into = slice(low // _EVERY + 1, low // _EVERY + 2 + int(step[-1]))
            shape = (-1, len(layers))
            n[into] = np.bincount(key, minlength=length).reshape(shape)
            amount[into] = np.bincount(key, part.amount.counted(rows), length).reshape(shape)
        return cls(part, layers, n.cumsum(axis=0), amount.cumsum(axis=0))

    def between(self, edges: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Count the rows between neighbouring row numbers.

        Parameters
        ----------
        edges : array of int
            Row numbers, ascending.

        Returns
        -------
        (n, amount) : arrays, ``len(edges) - 1`` by layers
            Rows, and their bytes or recorded faults.
        """
        step = edges // _EVERY
        rest = edges - step * _EVERY
        owner = np.repeat(np.arange(len(edges)), rest)
        first = np.repeat(step * _EVERY - np.concatenate([[0], np.cumsum(rest)[:-1]]), rest)
        rows = first + np.arange(len(first))
        key = owner * len(self.layers) + _ranks(self.layers).take(self.part.layer[rows])
        shape, length = (len(edges), len(self.layers)), len(edges) * len(self.layers)
        n = self.n[step] + np.bincount(key, minlength=length).reshape(shape)
        more = np.bincount(key, self.part.amount.counted(rows), length).reshape(shape)
        return np.diff(n, axis=0), np.diff(self.amount[step] + more, axis=0)


def _ranks(layers: NDArray[np.int64]) -> NDArray[np.int64]:
    ranks = np.zeros(256, np.int64)
    ranks[layers] = np.arange(len(layers))
    return ranks
