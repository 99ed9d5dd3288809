"""What held the memory of each event: in the history of its own GPU, then in those of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import polars as pl

from nsan.analysis.pca.history import History
from nsan.analysis.pca.holders import NO_PIECES, holders
from nsan.analysis.pca.ranges import is_range
from nsan.analysis.pca.stream_order import BETWEEN
from nsan.analysis.pca.tables import ORDER, STATE

_NO_PARTS: Final = NO_PIECES.with_columns(
    pl.lit(None, pl.Int64).alias(name) for name in ("earliest", "latest")
)
_NO_REUSE: Final = pl.DataFrame(schema={"tensor_id": pl.Int64, "reused_bytes": pl.Int64})
_NO_ROWS: Final = pl.Series("_row", [], dtype=pl.Int64)
_NOT_FOUND: Final = ("outside", "unknown")
_MOMENTS: Final = ("moment_ns", *BETWEEN)
_HELD: Final = ("va", "bytes", "state", "tensor_id", "life")


def placed(histories: Sequence[History], events: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Cut events into parts by what held them, and say what each tensor reused.

    Parameters
    ----------
    histories : sequence of History
        Of all GPUs.
    events : DataFrame
        Reads ``pid``, ``device_id``, ``va``, ``bytes`` and the columns that
        :meth:`nsan.analysis.pca.stream_order.Launches.with_moments` adds; other columns stay.

    Returns
    -------
    events : DataFrame
        In any order, with ``_row`` (their place before), the columns of ``NO_PIECES``, and ``earliest`` and
        ``latest`` (positions between which theirs is; null: not known); parts add up to the events. A row
        without a place, process or time, and one that no history covers, is one part of unknown state.
        ``order`` is ``overlap`` where the work that ran side by side was launched when the memory was held
        otherwise.
    reused : DataFrame
        ``tensor_id``, ``reused_bytes``.

    Notes
    -----
    A GPU may touch what was allocated for another: what is in no segment of its own history, or not
    covered by it, is looked up in the others of the process.
    """
    numbered = events.with_columns(_row=pl.int_range(pl.len(), dtype=pl.Int64))
    owned = _with_own(numbered, histories)
    # A row without a process can only be of a history without one.
    of_process = pl.col("pid").is_not_null() | pl.col("_own").is_not_null()
    known = is_range() & pl.col("moment_ns").is_not_null() & of_process
    asked = owned.filter(known)
    found, reused, mixed = [_NO_PARTS], [_NO_REUSE], [_NO_ROWS]
    for number, history in enumerate(histories):
        mine = _held(history, asked.filter(_own=number))
        found.append(mine[0])
        mixed.append(mine[1])
        reused.append(history.tensors.select("tensor_id", mine[2]))
    pieces = pl.concat(found, how="diagonal")
    if len(histories) > 1:
        pieces, more = _of_others(pieces, asked, histories)
        mixed.append(more)
    parts = numbered.drop("va", "bytes").join(pieces, on="_row")
    nowhere = pl.when(known).then(pl.lit("outside")).otherwise(pl.lit("unknown")).cast(STATE)
    others = owned.join(parts, on="_row", how="anti").with_columns(state=nowhere).drop("_own")
    rows = pl.concat([parts, others], how="diagonal")
    several = (pl.col("order") == "stream") & pl.col("_row").is_in(pl.concat(mixed).implode())
    order = pl.when(several).then(pl.lit("overlap", ORDER)).otherwise("order")
    return rows.with_columns(order=order), pl.concat(reused)


def _with_own(events: pl.DataFrame, histories: Sequence[History]) -> pl.DataFrame:
    """Add ``_own``, the history to look in first: that of the GPU, else the first of the process."""
    rows = [(each.pid, each.device_id, number) for number, each in enumerate(histories)]
    schema = {"pid": pl.UInt32, "device_id": pl.Int64, "_own": pl.Int64}
    known = pl.DataFrame(rows, schema=schema, orient="row")
    first = known.group_by("pid").agg(_first=pl.col("_own").min())
    return (
        events.join(known, on=["pid", "device_id"], how="left", nulls_equal=True)
        .join(first, on="pid", how="left", nulls_equal=True)
        .with_columns(_own=pl.coalesce("_own", "_first"))
        .drop("_first")
    )


def _held(history: History, events: pl.DataFrame) -> tuple[pl.DataFrame, pl.Series, pl.Series]:
    """Give the pieces of events in a history, the rows of which more is possible, and what was reused.

    Events are asked for three times: at their moment, and at the first and last launch of the work that ran;
    rows are numbered ``3 * _row`` and so on for it.
    """
    covered = [history.covers(pl.col(name).fill_null(pl.col("moment_ns"))) for name in _MOMENTS]
    events = events.with_columns(
        pl.col(BETWEEN).fill_null(pl.col("moment_ns")),
        _covered=covered[0],
        _mixed=pl.any_horizontal(each != covered[0] for each in covered[1:]),
    )
    inside = events.filter("_covered")
    at = [history.positions(inside[name]).alias(f"_{name}") for name in _MOMENTS]
    inside = inside.with_columns(at)
    moment, first, last = (pl.col(f"_{name}") for name in _MOMENTS)
    several = inside.filter(first != last, ~pl.col("_mixed"))
    asked = [
        rows.select("va", "bytes", _row=3 * pl.col("_row") + turn, position=position)
        for turn, (rows, position) in enumerate(
            [(inside, moment), (several, first), (several, last)]
        )
    ]
    held = holders(history, pl.concat(asked))
    ends = inside.select("_row", earliest=first, latest=last)
    turned = held.pieces.with_columns(pl.col("_row") // 3, _turn=pl.col("_row") % 3)
    # Between two positions at which a tensor held the same part, it held it too.
    differ = (
        turned.join(several.select("_row"), on="_row", how="semi")
        .group_by("_row", *_HELD)
        .len()
        .filter(pl.col("len") != 3)
    )
    beyond = events.filter(~pl.col("_covered")).select(
        "_row", "va", "bytes", state=pl.lit("unknown", STATE)
    )
    pieces = turned.filter(_turn=0).drop("_turn").join(ends, on="_row", how="left")
    mixed = pl.concat([differ["_row"], events.filter("_mixed")["_row"]])
    return pl.concat([pieces, beyond], how="diagonal"), mixed, held.reused


def _of_others(
    pieces: pl.DataFrame, events: pl.DataFrame, histories: Sequence[History]
) -> tuple[pl.DataFrame, pl.Series]:
    """Look up what was not found in its own history in those of the other GPUs of the process."""
    own = pieces.group_by("_row").agg(_position=pl.col("position").first())
    mixed = [_NO_ROWS]
    lost = pl.col("state").cast(pl.String).is_in(_NOT_FOUND)
    unknown = pl.lit("unknown", STATE)
    for number, history in enumerate(histories):
        same = pl.col("pid").eq_missing(pl.lit(history.pid, pl.UInt32))
        its = events.filter(same & (pl.col("_own") != number)).select("_row", *_MOMENTS)
        # A piece is a row of its own here.
        asked = pieces.filter(lost).join(its, on="_row").rename({"_row": "_of", "state": "_was"})
        asked = asked.select("_of", "_was", "va", "bytes", *_MOMENTS)
        asked = asked.with_columns(_row=pl.int_range(pl.len(), dtype=pl.Int64))
        there, several, _ = _held(history, asked)
        back = asked.select("_row", "_of", "_was")
        there = there.join(back, on="_row").join(own, left_on="_of", right_on="_row")
        still = pl.when(pl.col("_was") == "unknown").then(unknown).otherwise("state")
        there = there.with_columns(
            _row="_of",
            state=pl.when(lost).then(still).otherwise("state"),
        ).with_columns(
            position=pl.when(pl.col("state") == "unknown")
            .then(None)
            .when(pl.col("state") == "outside")
            .then("_position")
            .otherwise("position")
        )
        mixed.append(back.filter(pl.col("_row").is_in(several.implode()))["_of"].alias("_row"))
        rest = pieces.join(asked.select(_row="_of", va="va"), on=["_row", "va"], how="anti")
        pieces = pl.concat([rest, there.select(pieces.columns)])
    return pieces, pl.concat(mixed)
