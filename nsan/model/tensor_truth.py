"""Whose the bytes were that a run moved: what the driver did, joined with the allocator's history.

The model knows which operation of the program caused each copy and each batch, and which entries of
the history were done by then. So nothing is decided by time, and it is right however far the GPU runs behind.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import polars as pl

from nsan.model.engine import holders
from nsan.model.engine import state as st
from nsan.model.happened import Happened
from nsan.model.placing import History
from nsan.model.recording import BASE_VA
from nsan.model.settings import Settings
from nsan.uvm import constants as uvm

TENSOR_TABLES: Final[dict[str, str]] = {
    "tensor_moves": "one part of a migration, in order of start and address (`migration` is its row "
    "there): position in the allocator's history of the work that caused it, state of the memory and "
    "tensor then (of cached memory the last one), and whether its bytes are stale or dead",
    "tensor_faults": "one driver batch, in the order of `batches`: position in the allocator's history of "
    "the work that faulted, and state and tensor of its lowest page",
}
"""Tables of the truth of a tensor program only, and what one row of each is."""

_STATES: Final = {
    int(holders.OUTSIDE): "outside",
    int(holders.UNUSED): "unused",
    int(holders.LIVE): "live",
    int(holders.PENDING): "pending",
    int(holders.CACHED): "cached",
}
_STALE: Final = {
    int(holders.NOT_STALE): False,
    int(holders.IS_STALE): True,
    int(holders.UNKNOWN): None,
}
_KINDS: Final = {
    "segment_alloc": int(holders.MAKE),
    "alloc": int(holders.GIVE),
    "free_requested": int(holders.ASK_BACK),
    "free_completed": int(holders.TAKE_BACK),
    "segment_free": int(holders.UNMAKE),
}

_Ints = Any  # numpy arrays of Int64


def tensor_truth(
    happened: Happened, settings: Settings, history: History
) -> dict[str, pl.DataFrame]:
    """Say of every migration and every batch whose memory it was.

    Parameters
    ----------
    happened : Happened
        What a machine left of the program that ``history`` is of.
    settings : Settings
        The machine.
    history : History
        What the allocator did.

    Returns
    -------
    dict of str to DataFrame
        ``TENSOR_TABLES`` by name. A position counts entries of the history; ``tensor_id`` counts the
        entries "alloc" before the tensor's own. A part came in stale if it is of a live tensor and
        its bytes last left a GPU before that was allocated; null if they have not left since the segment
        was made. It is dead if it is stale, cached or unused. Sizes byte, times ns.
    """
    copies = (
        happened.log["copies"].with_row_index("row").sort("start_ns", "page", maintain_order=True)
    )
    batches = happened.log["batches"]
    page_bytes = settings.host_profile.page_bytes
    first = copies["page"].cast(pl.Int64).to_numpy() * page_bytes
    last = first + copies["n_pages"].cast(pl.Int64).to_numpy() * page_bytes
    lives = _Lives(history)
    bounds = np.unique(np.concatenate([[0], lives.first, lives.last, first, last]))
    low, high = np.searchsorted(bounds, first), np.searchsorted(bounds, last)
    met = batches["page"].cast(pl.Int64).to_numpy() * page_bytes
    faulted = np.searchsorted(bounds, met, side="right")
    after = np.array([entry.after for entry in history.entries], np.int64)
    of_copies, of_batches = _operations(happened, copies)
    positions = np.searchsorted(after, np.concatenate([of_copies, of_batches]), side="right")
    seen = _Seen(
        np.concatenate([low, faulted - 1]),
        np.concatenate([high, faulted]),
        positions,
        lives,
        bounds,
    )
    rows = copies["row"].to_numpy().astype(np.int64)
    stale = seen.stale(_ways(copies), np.argsort(rows))
    return {
        "tensor_moves": _moves(copies, seen, stale, bounds),
        "tensor_faults": _faults(batches, seen, met),
    }


def dead_bytes(moves: pl.DataFrame) -> dict[str, int]:
    """Sum the bytes of ``tensor_moves`` that nobody needed, into GPUs and out of them."""
    into = pl.col("direction") != "dtoh"
    dead = pl.col("bytes").filter(pl.col("is_dead"), into).sum().alias("dead_in_bytes")
    out = pl.col("bytes").filter(pl.col("is_dead"), ~into).sum().alias("dead_out_bytes")
    return moves.select(dead, out).row(0, named=True)


class _Lives:
    """The entries of a history with the bytes that each is about, and the tensors."""

    def __init__(self, history: History) -> None:
        sizes = iter(history.block_bytes)
        held: dict[int, tuple[int, int]] = {}
        self.names: list[str] = []
        self.sequences: list[int] = []
        rows: list[tuple[int, int, int, int]] = []
        for sequence, entry in enumerate(history.entries):
            n_bytes, tensor = entry.n_bytes, -1
            if entry.action == "alloc":
                held[entry.va] = next(sizes), len(self.names)
                self.names.append(entry.stack)
                self.sequences.append(sequence)
            if not entry.action.startswith("segment"):
                n_bytes, tensor = held[entry.va]
            start = entry.va - BASE_VA
            rows.append((_KINDS[entry.action], start, start + n_bytes, tensor))
        self.rows = np.array(rows, np.int64).reshape(-1, 4)
        self.first, self.last = self.rows[:, 1], self.rows[:, 2]

    def pieces(self, bounds: _Ints) -> _Ints:
        """Give kind, first piece, end and tensor of each entry."""
        rows = self.rows.copy()
        rows[:, 1:3] = np.searchsorted(bounds, rows[:, 1:3])
        return rows


class _Seen:
    """What each piece of memory was when something happened to it: migrations first, then batches."""

    def __init__(
        self, low: _Ints, high: _Ints, positions: _Ints, lives: _Lives, bounds: _Ints
    ) -> None:
        starts = np.cumsum(high - low) - (high - low)
        self.rows = np.stack([low, high, positions, starts], axis=1).astype(np.int64)
        self.names, self._sequences = lives.names, np.array(lives.sequences, np.int64)
        self._n_bounds = len(bounds)
        self._what = _new_pieces(int((high - low).sum()))
        order = np.argsort(positions, kind="stable")
        now = _new_pieces(self._n_bounds)
        holders.follow(lives.pieces(bounds), self.rows, order, now, self._what)
        self.state, self.tensor, _ = self._what

    def stale(self, ways: _Ints, order: _Ints) -> _Ints:
        """Say of each piece whether it came in stale; ``order`` is that in which copies were made."""
        found = np.zeros(len(self.state), np.uint8)
        left = np.full(self._n_bounds, -1, np.int64)
        holders.find_stale(self.rows, ways, order, self._sequences, self._what, left, found)
        return found


def _new_pieces(n: int) -> tuple[Any, Any, Any]:
    """Make state, tensor and maker of pieces: outside of all segments."""
    return np.zeros(n, np.uint8), np.full(n, -1, np.int32), np.full(n, -1, np.int32)


def _ways(copies: pl.DataFrame) -> _Ints:
    """Tell copies from the CPU into a GPU, and back, from others."""
    into = (pl.col("src") == st.CPU) & (pl.col("dst") != st.CPU)
    out = pl.col("dst") == st.CPU
    way = pl.when(into).then(int(holders.IN)).when(out).then(int(holders.OUT)).otherwise(0)
    return copies.select(way.cast(pl.Int64)).to_series().to_numpy()


def _operations(happened: Happened, copies: pl.DataFrame) -> tuple[_Ints, _Ints]:
    """Give the operation of the program that caused each copy, and each batch.

    A copy of a batch is of the kernel, copy or fill that faulted; another one of the user's prefetch that
    ran when it was written down, or else of what the host itself did then.
    """
    of_work = np.array([work.operation for _, work in happened.work] or [-1], np.int64)
    batches = happened.log["batches"]
    of_batch = of_work[batches["kernel"].to_numpy()]
    rows = copies["row"].to_numpy().astype(np.int64)
    found = np.searchsorted(np.array(happened.operation_copies, np.int64), rows, side="right")
    for operation, first, last in happened.prefetch_copies:
        found[(rows >= first) & (rows < last)] = operation
    batch = copies["batch"].to_numpy()
    by_number = np.argsort(batches["batch"].to_numpy(), kind="stable")
    found[batch >= 0] = of_batch[by_number[batch[batch >= 0]]]
    return found, of_batch


def _moves(copies: pl.DataFrame, seen: _Seen, stale: _Ints, bounds: _Ints) -> pl.DataFrame:
    """Join pieces of a copy that are alike, and say what they are."""
    n = copies.height
    counts = seen.rows[:n, 1] - seen.rows[:n, 0]
    total = int(counts.sum())
    copy = np.repeat(np.arange(n), counts)
    piece = np.repeat(seen.rows[:n, 0] - seen.rows[:n, 3], counts) + np.arange(total)
    begins = np.ones(total, bool)
    begins[1:] = False
    for values in (copy, seen.state[:total], seen.tensor[:total], stale[:total]):
        begins[1:] |= values[1:] != values[:-1]
    at = np.flatnonzero(begins)
    sizes = np.add.reduceat(np.diff(bounds)[piece], at) if total else np.zeros(0, np.int64)
    into, copied = copies["dst"] > 0, copy[at]
    both = into & (copies["src"] > 0)
    directions = pl.select(
        pl.when(both).then(pl.lit("dtod")).when(into).then(pl.lit("htod")).otherwise(pl.lit("dtoh"))
    ).to_series()
    return (
        pl.DataFrame(
            {
                "migration": copied,
                "start_ns": copies["start_ns"].to_numpy()[copied],
                "va": (bounds[piece[at]] + BASE_VA).astype(np.uint64),
                "bytes": sizes,
                "direction": directions.gather(copied),
                "cause": copies["cause"].gather(copied),
                "position": seen.rows[copied, 2],
                **_what(seen, at),
                "stale": stale[at],
            }
        )
        .with_columns(
            cause=pl.col("cause").cast(pl.Int64).replace_strict(dict(uvm.CAUSES)),
            is_stale=pl.col("stale").cast(pl.Int64).replace_strict(_STALE, return_dtype=pl.Boolean),
        )
        .with_columns(is_dead=pl.col("state").is_in(["cached", "unused"]) | pl.col("is_stale"))
        .drop("stale")
    )


def _faults(batches: pl.DataFrame, seen: _Seen, first: _Ints) -> pl.DataFrame:
    own = seen.rows[len(seen.rows) - batches.height :]
    return pl.DataFrame(
        {
            "batch": batches["batch"],
            "va": (first + BASE_VA).astype(np.uint64),
            "position": own[:, 2],
            **_what(seen, own[:, 3]),
        }
    )


def _what(seen: _Seen, at: _Ints) -> dict[str, pl.Series]:
    """Name state and tensor at places of what was seen."""
    ids = pl.Series(seen.tensor[at], dtype=pl.Int64)
    ids = ids.set(ids < 0, None)
    names = pl.Series(seen.names, dtype=pl.String)
    states = pl.Series(seen.state[at], dtype=pl.Int64)
    return {
        "state": states.replace_strict(_STATES, return_dtype=pl.String),
        "tensor": names.gather(ids),
        "tensor_id": ids,
    }
