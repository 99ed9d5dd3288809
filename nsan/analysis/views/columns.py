"""Compact columns of a table: numbers for kinds and owners, places for addresses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import polars as pl

from nsan.analysis.views.addresses import (
    AT_ONCE,
    NO_PLACE,
    Addresses,
    by_process,
    is_one_value,
)
from nsan.analysis.views.compact import filled
from nsan.analysis.views.tables import EVENT_TABLE, EVENT_TABLES, LAYERS, OWNERS
from nsan.schema import ACCESS, CAUSE, DIRECTION
from nsan.uvm.constants import PAGE_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

_KINDS: Final = {"direction": (DIRECTION, 6), "cause": (CAUSE, 3), "access": (ACCESS, 0)}
"""By column that makes a layer: its type, and the bit at which its number begins in a code. What is
null has all bits set, so that a code is one byte."""

_BITS: Final = {"direction": 3, "cause": 7, "access": 7}
_UNKNOWN_ACCESS: Final = _BITS["access"]
_PAGE_SHIFT: Final = PAGE_BYTES.bit_length() - 1
_MOST_PAIRS: Final = 8


def kind_codes(frame: pl.DataFrame) -> NDArray[np.uint8]:
    """Pack direction, cause and access of each row into one byte.

    Parameters
    ----------
    frame : DataFrame
        Rows with any of ``direction``, ``cause``, ``access``.

    Returns
    -------
    array of UInt8
        One code per row; :func:`number_layers` lists what they mean.
    """
    codes = np.zeros(frame.height, np.uint8)
    for name, (_, bit) in _KINDS.items():
        if name in frame.columns:
            number = filled(frame[name].to_physical(), np.uint8, _BITS[name])
            codes |= number << np.uint8(bit)
        else:
            codes |= np.uint8(_BITS[name] << bit)
    return codes


def with_access(
    codes: NDArray[np.uint8], rows: NDArray[Any], access: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """Set the access of some rows: its number in the enumeration, null where that has none."""
    found = codes.copy()
    found[rows] = (codes[rows] & np.uint8(0xFF ^ _UNKNOWN_ACCESS)) | np.minimum(
        access, np.uint8(_UNKNOWN_ACCESS)
    )
    return found


def number_layers(
    codes: Mapping[str, NDArray[np.uint8]],
) -> tuple[pl.DataFrame, dict[str, NDArray[np.uint8]]]:
    """Give numbers to the kinds of event that tables hold.

    Parameters
    ----------
    codes : mapping of str to array of UInt8
        By table, the codes of its rows.

    Returns
    -------
    (layers, numbers)
        ``LAYERS``, and by table the layer of each row.
    """
    tables: list[str] = []
    kinds: list[int] = []
    numbers: dict[str, NDArray[np.uint8]] = {}
    for name in EVENT_TABLES:
        if name in codes:
            present = np.flatnonzero(np.bincount(codes[name], minlength=256))
            ranks = np.zeros(256, np.uint8)
            ranks[present] = np.arange(len(kinds), len(kinds) + len(present))
            numbers[name] = _repeated(ranks, codes[name], len(present))
            tables += [name] * len(present)
            kinds += present.tolist()
    values = {
        name: pl.Series([_label(dtype, code >> bit & _BITS[name]) for code in kinds], dtype=dtype)
        for name, (dtype, bit) in _KINDS.items()
    }
    layers = pl.DataFrame(
        {
            "layer": pl.int_range(len(kinds), eager=True),
            "table": pl.Series(tables, dtype=EVENT_TABLE),
            **values,
        }
    )
    return layers.select(pl.col(name).cast(dtype) for name, dtype in LAYERS.schema.items()), numbers


def _label(dtype: pl.Enum, number: int) -> str | None:
    return dtype.categories[number] if number < len(dtype.categories) else None


def _repeated(ranks: NDArray[Any], codes: NDArray[Any], n_present: int) -> NDArray[Any]:
    """Look numbers up; a column of one value takes the memory of one."""
    if n_present == 1:
        return np.broadcast_to(ranks[codes[0]], len(codes))
    return np.asarray(ranks.take(codes))


def number_owners(
    frames: Mapping[str, pl.DataFrame],
) -> tuple[pl.DataFrame, dict[str, NDArray[Any]]]:
    """Give numbers to the pairs of process and GPU that tables hold.

    Parameters
    ----------
    frames : mapping of str to DataFrame
        By table, rows with ``pid`` and, if there, ``device_id``.

    Returns
    -------
    (owners, numbers)
        ``OWNERS``, and by table the owner of each row (UInt8, or UInt16 where there are many).
    """
    mine = {name: _whose(frame) for name, frame in frames.items()}
    pairs = {name: _pairs(frame) for name, frame in mine.items()}
    nothing = pl.DataFrame(schema=OWNERS.schema).drop("owner")
    owners = (
        pl.concat([nothing, *pairs.values()])
        .unique()
        .sort(nothing.columns, nulls_last=True)
        .with_row_index("owner")
        .select(pl.col(name).cast(dtype) for name, dtype in OWNERS.schema.items())
    )
    small: Any = np.uint8 if owners.height <= 256 else np.uint16
    numbers = {
        name: _owner_numbers(mine[name], pairs[name], owners).astype(small, copy=False)
        if pairs[name].height > 1
        else np.broadcast_to(small(_at(pairs[name], owners)[0]), mine[name].height)
        for name in frames
    }
    return owners, numbers


def _whose(frame: pl.DataFrame) -> pl.DataFrame:
    device = "device_id" if "device_id" in frame.columns else pl.lit(None, pl.Int64)
    return frame.select("pid", device_id=device)


def _pairs(frame: pl.DataFrame) -> pl.DataFrame:
    """List the distinct pairs; most tables have one, which their extremes tell."""
    if all(is_one_value(column) for column in frame.get_columns()):
        return frame.head(1)
    return frame.unique()


def _at(pairs: pl.DataFrame, owners: pl.DataFrame) -> list[int]:
    names = pairs.columns
    found = pairs.join(owners, on=names, how="left", nulls_equal=True, maintain_order="left")
    return found["owner"].to_list()


def _owner_numbers(
    frame: pl.DataFrame, pairs: pl.DataFrame, owners: pl.DataFrame
) -> NDArray[np.uint16]:
    if pairs.height > _MOST_PAIRS:
        return np.array(_at(frame, owners), np.uint16)
    numbers = np.zeros(frame.height, np.uint16)
    for (pid, device), owner in zip(pairs.rows(), _at(pairs, owners), strict=True):
        mine = frame["pid"].eq_missing(pl.Series([pid], dtype=pl.UInt32))
        mine &= frame["device_id"].eq_missing(pl.Series([device], dtype=pl.Int64))
        numbers[mine.to_numpy()] = owner
    return numbers


def placed(frame: pl.DataFrame, addresses: Addresses) -> tuple[NDArray[Any], int]:
    """Place rows in the folded space, in pages where every address begins one.

    Parameters
    ----------
    frame : DataFrame
        Rows with ``pid`` and ``va``.
    addresses : Addresses
        The folded space.

    Returns
    -------
    (places, shift)
        UInt32 or Int64, in steps of ``1 << shift`` byte; the highest number of the type where a row has
        no place.
    """
    few = addresses.total_bytes >> _PAGE_SHIFT < np.iinfo(np.uint32).max
    shift, dtype = (_PAGE_SHIFT, np.uint32) if few and _on_pages(frame["va"]) else (0, np.int64)
    none = np.iinfo(dtype).max
    found = np.full(frame.height, none, dtype)
    at = 0
    only = is_one_value(frame["pid"])
    for piece in frame.select("pid", "va").iter_slices(AT_ONCE):
        va = filled(piece["va"], np.uint64, 0)
        into = found[at : at + piece.height]
        for rows, pid in [(slice(None), piece["pid"][0])] if only else by_process(piece["pid"]):
            place = addresses.places(pid, va[rows])
            into[rows] = np.where(place == NO_PLACE, none, place >> shift)
        if piece["va"].null_count():
            into[piece["va"].is_null().to_numpy()] = none
        at += piece.height
    return found, shift


def _on_pages(va: pl.Series) -> bool:
    """Say whether every address begins a page."""
    bits = (
        np.bitwise_or.reduce(filled(chunk, np.uint64, 0), initial=0) for chunk in va.get_chunks()
    )
    return all(int(bit) % PAGE_BYTES == 0 for bit in bits)
