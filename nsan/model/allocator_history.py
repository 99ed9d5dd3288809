"""The history of a modelled allocator as the tables of a memory snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import polars as pl

from nsan.model.placing import Entry, History
from nsan.schema import Table
from nsan.torch_alloc import tables as tab
from nsan.torch_alloc.blocks import Block

_STATES: Final = {
    "allocated": "active_allocated",
    "pending": "active_pending_free",
    "free": "inactive",
}


def snapshot_frames(history: History, operation_ns: Sequence[int]) -> dict[str, pl.DataFrame]:
    """Give the tables of a snapshot that was taken when the program ended.

    Parameters
    ----------
    history : History
        What the allocator did and left.
    operation_ns : sequence of int
        When the host was done with each operation of the program, ns from the session start.

    Returns
    -------
    dict of str to DataFrame
        segments, blocks, allocator_events and stacks, columns as in
        :mod:`nsan.torch_alloc.tables`. Times are microseconds from the session start, which in a
        modelled trace is 1970. A stack has one frame: the tensor, without the step it is of, in the
        network.
    """
    stacks = dict.fromkeys(
        map(_tensor, [*(e.stack for e in history.entries), *history.owners.values()])
    )
    stack_ids = {name: i for i, name in enumerate(stacks)}
    return {
        "segments": _segments(history),
        "blocks": _blocks(history, stack_ids),
        "allocator_events": _events(history.entries, operation_ns, stack_ids),
        "stacks": _frame(
            tab.STACKS,
            (
                {
                    "stack_id": i,
                    "depth": 0,
                    "function": name,
                    "source_file": f"<modelled {history.network}>",
                    "source_line": 0,
                }
                for name, i in stack_ids.items()
            ),
        ),
    }


def _tensor(name: str) -> str:
    return name.partition("#")[0]


def _events(
    entries: Sequence[Entry], operation_ns: Sequence[int], stack_ids: dict[str, int]
) -> pl.DataFrame:
    done = [0, *operation_ns]
    return _frame(
        tab.ALLOCATOR_EVENTS,
        (
            {
                "device_id": 0,
                "sequence": i,
                "time_us": done[entry.after] // 1000,
                "action": entry.action,
                "va": entry.va,
                "bytes": entry.n_bytes,
                "stream": entry.stream,
                "pool": entry.pool,
                "stack_id": stack_ids[_tensor(entry.stack)],
            }
            for i, entry in enumerate(entries)
        ),
    )


def _segments(history: History) -> pl.DataFrame:
    held = _held(history.blocks)
    return _frame(
        tab.SEGMENTS,
        (
            {
                "segment_id": i,
                "device_id": 0,
                "va": segment.va,
                "bytes": segment.n_bytes,
                **held.get(segment.va, dict.fromkeys(_SUMS, 0)),
                "stream": segment.stream,
                "size_class": "small" if segment.is_small else "large",
                "pool": segment.pool,
                "is_expandable": segment.is_expandable,
            }
            for i, segment in enumerate(history.segments)
        ),
    )


_SUMS: Final = ("allocated_bytes", "active_bytes", "requested_bytes")


def _held(blocks: Iterable[Block]) -> dict[int, dict[str, int]]:
    """Sum what blocks hold of each segment, by its address."""
    sums: dict[int, dict[str, int]] = {}
    for block in blocks:
        own = sums.setdefault(block.segment.va, dict.fromkeys(_SUMS, 0))
        if block.state != "free":
            own["allocated_bytes"] += block.n_bytes * (block.state == "allocated")
            own["active_bytes"] += block.n_bytes
            own["requested_bytes"] += block.requested_bytes
    return sums


def _blocks(history: History, stack_ids: dict[str, int]) -> pl.DataFrame:
    numbers = {segment.va: i for i, segment in enumerate(history.segments)}
    return _frame(
        tab.BLOCKS,
        (
            {
                "segment_id": numbers[block.segment.va],
                "device_id": 0,
                "va": block.va,
                "bytes": block.n_bytes,
                "requested_bytes": block.requested_bytes,
                "state": _STATES[block.state],
                "stream": block.segment.stream,
                "pool": block.segment.pool,
                "stack_id": stack_ids.get(_tensor(history.owners.get(block.va, ""))),
            }
            for block in history.blocks
        ),
    )


def _frame(table: Table, rows: Iterable[dict[str, Any]]) -> pl.DataFrame:
    """Make a frame of a table; columns that no row names are null."""
    return pl.DataFrame(list(rows), schema=table.schema, orient="row")
