"""Names of kernels and ranges: each looked at once, numbered by how long it runs, with a label of its own.

A name may be 20 kB long and stand in a million rows, so nothing here or later touches it once per row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import polars as pl

from nsan.text import shortened

if TYPE_CHECKING:
    from collections.abc import Mapping

LABEL_LENGTH: Final = 80
"""Characters of a label."""

_PLAIN: Final = r"^[ !-~]*$"
"""What needs no cleaning."""


def numbered(rows: pl.DataFrame) -> tuple[pl.DataFrame, pl.Series]:
    """Give the names of rows numbers.

    Parameters
    ----------
    rows : DataFrame
        ``id`` (from 0, in order), ``start_ns``, ``end_ns``, ``name``.

    Returns
    -------
    DataFrame, Series of String
        The rows with ``number`` (UInt32, null where there is no name), which is the place of the name
        in the series: the longest in total first, of equal ones in their order.
    """
    groups = (
        rows.group_by("name")
        .agg("id", total=(pl.col("end_ns") - pl.col("start_ns")).sum())
        .filter(pl.col("name").is_not_null())
        .sort(["total", "name"], descending=[True, False])
        .with_row_index("number")
    )
    pairs = groups.select("number", "id").explode("id")
    none = groups.height
    number = np.full(rows.height, none, np.uint32)
    number[pairs["id"].to_numpy()] = pairs["number"].to_numpy()
    column = pl.Series("number", number)
    return rows.with_columns(column.set(column == none, None)), groups["name"]


def labels_of(names: pl.Series) -> list[str]:
    """Write names for people: harmless, short, and no two alike.

    Parameters
    ----------
    names : Series of String
        Distinct names.

    Returns
    -------
    list of str
        At most ``LABEL_LENGTH`` characters each.
    """
    as_it_is = (names.str.len_bytes() <= LABEL_LENGTH) & names.str.contains(_PLAIN)
    found = names.to_list()
    for place in (~as_it_is).arg_true().to_list():
        found[place] = shortened(found[place], LABEL_LENGTH)
    return distinct(found)


def distinct(labels: Sequence[str], most: int = LABEL_LENGTH) -> list[str]:
    """Give each label that was there before a number in brackets.

    Parameters
    ----------
    labels : sequence of str
        Harmless labels.
    most : int, default 80
        Characters at most.

    Returns
    -------
    list of str
        No two alike; the first of equal ones stays as it is.
    """
    taken = set(labels)
    if len(taken) == len(labels):
        return list(labels)
    seen: dict[str, int] = {}
    found = []
    for label in labels:
        count = seen.get(label, 0) + 1
        text = label
        while count > 1 and text in taken:
            suffix = f" ({count})"
            text = shortened(label, most - len(suffix)) + suffix
            count += text in taken
        seen[label] = count
        taken.add(text)
        found.append(text)
    return found


def n_sent(text: str) -> int:
    """Count the bytes of a text as JSON in a page: every letter beyond ASCII is escaped, and so is ``<``."""
    return len(json.dumps(text)) + 5 * text.count("<")


def fitting(labels: Iterable[str], room: int, each: int) -> tuple[int, int]:
    """Count the first labels that fit.

    Parameters
    ----------
    labels : iterable of str
        Labels, the most important first.
    room : int
        Bytes as sent.
    each : int
        Bytes that an entry takes beside its label.

    Returns
    -------
    (int, int)
        How many fit, and their bytes.
    """
    used = 0
    count = 0
    for label in labels:
        size = n_sent(label) + each
        if used + size > room:
            break
        used, count = used + size, count + 1
    return count, used


def shares(sizes: Mapping[str, int], room: int) -> dict[str, int]:
    """Share room out: what is small gets all that it needs, the rest an equal part.

    Parameters
    ----------
    sizes : mapping of str to int
        Bytes that each would need.
    room : int
        Bytes that there are.

    Returns
    -------
    dict of str to int
        Bytes for each; no more than there are in total.
    """
    found = {}
    for left, key in enumerate(sorted(sizes, key=lambda each: sizes[each])):
        found[key] = min(sizes[key], room // (len(sizes) - left))
        room -= found[key]
    return found
