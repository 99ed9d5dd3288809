"""A loaded snapshot to columns: the formats of torch 2.0 to 2.14. Standard library only.

Nothing here recurses, and nothing is done more often than the file has bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain, compress
from typing import Any, Final, TypeAlias

from nsan.io.torch_snapshot.columns import (
    NO_TEXT,
    Allowance,
    Column,
    Notes,
    Row,
    Texts,
    address,
    asked,
    cells,
    has,
    labels,
    note_keys,
    numbers,
    rows_of,
    signed,
    size,
    texts,
)
from nsan.io.torch_snapshot.possible import (
    MOST_GPUS,
    check_gpus,
    check_sum,
    impossible_items,
    impossible_sizes,
    of_possible_gpus,
)
from nsan.io.torch_snapshot.refusal import RefusedError, kind_of, shown
from nsan.io.torch_snapshot.stacks import Stacks

Columns: TypeAlias = "dict[str, Column | array[int]]"

SIZE_CLASSES: Final = ("small", "large")
STATES: Final = ("active_allocated", "active_pending_free", "inactive", "other")
ACTIONS: Final = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
    "snapshot",
    "annotate",
    "other",
)
STAGES: Final = ("START", "END", "other")
"""The labels of :mod:`nsan.torch_alloc.tables`, which cannot be imported here; a test compares them."""

_TOP_KEYS: Final = frozenset(
    {
        "segments",
        "device_traces",
        "allocator_settings",
        "external_annotations",
        "host_segments",
        "host_traces",
        "nsan_model",
    }
)
_SEGMENT_KEYS: Final = frozenset(
    {
        "device",
        "address",
        "total_size",
        "allocated_size",
        "active_size",
        "requested_size",
        "stream",
        "segment_type",
        "segment_pool_id",
        "is_expandable",
        "frames",
        "blocks",
    }
)
_BLOCK_KEYS: Final = frozenset({"address", "size", "requested_size", "state", "frames", "history"})
_ENTRY_KEYS: Final = frozenset(
    {
        "action",
        "addr",
        "device_free",
        "size",
        "stream",
        "time_us",
        "compile_context",
        "frames",
        "user_metadata",
        "pool_id",
    }
)
_ANNOTATION_KEYS: Final = frozenset({"name", "stage", "device", "time_us"})
_DOCUMENTED_STATE: Final = "active_awaiting_free"
_NO_CONTEXT: Final = "N/A"
_DEPTH: Final = 4
_LONGEST_NAME: Final = 100


class Flattener:
    """Takes a snapshot apart into columns."""

    def __init__(self, n_bytes: int, *, keep_paths: bool = False) -> None:
        self.notes = Notes()
        self.texts = Texts()
        self.columns: Columns = {}
        self.facts: dict[str, Any] = {}
        self._allowance = Allowance(n_bytes)
        self._stacks = Stacks(self.texts, self.notes, self._allowance, keep_paths=keep_paths)

    def run(self, snapshot: object) -> None:
        """Fill ``columns``, ``texts`` and ``facts``.

        Raises
        ------
        RefusedError
            If this is no snapshot; the text names the place.
        """
        top = self._top(snapshot)
        self._segments(rows_of(top["segments"], "segments"))
        self._traces(top.get("device_traces"))
        self._annotations(top.get("external_annotations"))
        self.columns |= self._stacks.columns()
        self.facts["settings"] = self._flat(top.get("allocator_settings"), "allocator_settings")
        self.facts["model"] = self._flat(top.get("nsan_model"), "nsan_model")
        for key in ("host_segments", "host_traces"):
            self.facts[key] = self._host_items(top.get(key))
        self.notes.odd("texts", "cut", self.texts.n_cut())
        self.facts |= {
            "keys_seen": {place: sorted(keys) for place, keys in self.notes.keys_seen.items()},
            "unknown_keys": dict(self.notes.unknown_keys),
            "unknown_actions": dict(self.notes.unknown_actions),
            "odd_cells": dict(self.notes.odd_cells),
        }

    def _top(self, snapshot: object) -> Row:
        if type(snapshot) is list:
            self.facts["shape"] = "list"
            return {"segments": snapshot}
        if type(snapshot) is not dict:
            raise RefusedError("other", f"it holds {kind_of(snapshot)}")
        self.facts["shape"] = "dict"
        note_keys([snapshot], "snapshot", _TOP_KEYS, self.notes, self._allowance)
        if "segments" not in snapshot:
            names = [shown(key, 30) for key in snapshot if type(key) is str][:5]
            raise RefusedError("other", f"it holds a dict without 'segments' (but {names})")
        return snapshot

    def _numbers(self, name: str, rows: Sequence[Row], key: str, code: str = "q") -> Column:
        """Read one key of the rows into the column ``place.name``."""
        column = self.columns.setdefault(name, Column(code))
        assert isinstance(column, Column)  # noqa: S101 - for the type checker
        place = name.partition(".")[0]
        if key not in self.notes.keys_seen[place]:
            column.extend([0] * len(rows), range(len(rows)))
            return column
        # A failed request, which only the history names, may be larger than any memory.
        in_bytes = asked if name == "trace.bytes" else size
        read = address if code == "Q" else in_bytes if name.endswith("bytes") else signed
        numbers(column, rows, key, read, lambda n: self.notes.odd(place, key, n))
        return column

    def _required(self, name: str, rows: Sequence[Row], key: str, code: str = "q") -> Column:
        column = self._numbers(name, rows, key, code)
        if column.nulls:
            place, at = name.partition(".")[0], column.nulls[0]
            what = "has no" if rows[at].get(key) is None else "has no readable"
            raise RefusedError("other", f"{place}[{at}] {what} {key!r}")
        return column

    def _segments(self, rows: list[Row]) -> None:
        self._allowance.take(len(rows), "segments")
        self.facts["has_segments"] = bool(rows)
        note_keys(rows, "segments", _SEGMENT_KEYS, self.notes, self._allowance)
        rows = of_possible_gpus(rows, self.notes)
        bad = impossible_items(rows, "segments", "total_size", self.notes)
        rows = [row for row in rows if id(row) not in bad]
        self._required("segments.va", rows, "address", "Q")
        total = self._required("segments.bytes", rows, "total_size")
        check_sum(total.values, "segments")
        self._numbers("segments.device_id", rows, "device")
        for name, key in (
            ("allocated_bytes", "allocated_size"),
            ("active_bytes", "active_size"),
            ("requested_bytes", "requested_size"),
        ):
            part = self._numbers(f"segments.{name}", rows, key)
            pairs = zip(part.values, total.values, strict=True)
            self._clear(part, [at for at, (n, most) in enumerate(pairs) if n > most], key)
        self._numbers("segments.stream", rows, "stream", "Q")
        codes = {label: code for code, label in enumerate(SIZE_CLASSES)}
        found, unknown = labels(rows, "segment_type", codes, len(SIZE_CLASSES))
        self.notes.odd("segments", "segment_type", unknown.total())
        self.columns["segments.size_class"] = found
        self.columns["segments.pool"] = self._pools(rows, "segments", "segment_pool_id")
        self.columns["segments.is_expandable"] = self._flags(rows)
        self.columns["segments.stack_id"] = self._stacks.ids(rows, "segments")
        self._blocks(rows)

    def _clear(self, column: Column, places: list[int], key: str, place: str = "segments") -> None:
        """Take values away that cannot be, and count them."""
        if places:
            column.clear(places)
            self.notes.odd(place, key, len(places))

    def _flags(self, rows: list[Row]) -> array[int]:
        values = cells(rows, "is_expandable")
        self.notes.odd(
            "segments",
            "is_expandable",
            sum(type(value) is not bool and value is not None for value in values),
        )
        return array("B", [value is True or value == 1 for value in values])

    def _pools(self, rows: Sequence[Row], place: str, key: str) -> array[int]:
        """Give the text of each row's pool id, a pair of numbers."""
        if key not in self.notes.keys_seen[place]:
            return array("q", [NO_TEXT]) * len(rows)
        values = cells(rows, key)
        plain = set(map(type, values)) <= {tuple} and set(map(len, values)) <= {2}
        if plain and set(map(type, chain.from_iterable(values))) <= {int}:
            index = {value: self._pool(value) for value in dict.fromkeys(values)}
            found = array("q", map(index.__getitem__, values))
        else:
            found = array("q", map(self._pool, values))
        self.notes.odd(
            place,
            key,
            sum(pool == NO_TEXT and v is not None for pool, v in zip(found, values, strict=True)),
        )
        return found

    def _pool(self, value: object) -> int:
        if type(value) in {tuple, list}:
            pair = [signed(part) for part in value[:3]]  # type: ignore[index]
            if len(pair) == 2 and None not in pair:
                return self.texts.index(f"{pair[0]},{pair[1]}")
        return NO_TEXT

    def _blocks(self, segments: list[Row]) -> None:
        lists = [
            rows_of(segment.get("blocks", []), f"segments[{at}]['blocks']")
            for at, segment in self._within_allowance(segments, "blocks")
        ]
        rows = list(chain.from_iterable(lists))
        note_keys(rows, "blocks", _BLOCK_KEYS, self.notes, self._allowance)
        if bad := impossible_items(rows, "blocks", "size", self.notes):
            lists = [[row for row in blocks if id(row) not in bad] for blocks in lists]
            rows = list(chain.from_iterable(lists))
        self.columns["blocks.per_segment"] = array("q", map(len, lists))
        n_bytes = self._required("blocks.bytes", rows, "size")
        check_sum(n_bytes.values, "blocks")
        self._numbers("blocks.va", rows, "address", "Q")
        requested = self._numbers("blocks.requested_bytes", rows, "requested_size")
        codes = {label: code for code, label in enumerate(STATES)}
        codes[_DOCUMENTED_STATE] = STATES.index("active_pending_free")
        found, unknown = labels(rows, "state", codes, len(STATES) - 1)
        self.notes.odd("blocks", "state", unknown.total())
        self.columns["blocks.state"] = found
        if has(rows, "history"):
            self._from_histories(rows, requested)
        else:
            self.columns["blocks.stack_id"] = self._stacks.ids(rows, "blocks")
        # What an inactive block was asked for last can be more: it was split since.
        inactive = STATES.index("inactive")
        asked_of = zip(requested.values, n_bytes.values, found, strict=True)
        over = [
            at for at, (n, most, state) in enumerate(asked_of) if n > most and state != inactive
        ]
        self._clear(requested, over, "requested_size", "blocks")
        check_sum(requested.values, "blocks")

    def _from_histories(self, rows: list[Row], requested: Column) -> None:
        """Read what torch 2.0 has in the history of a block: its stack, and what was asked for."""
        old = self._histories(rows)
        frames = [
            row.get("frames", entry.get("frames")) for row, entry in zip(rows, old, strict=True)
        ]
        self.columns["blocks.stack_id"] = self._stacks.ids_of(frames, "blocks")
        for at in requested.nulls:
            requested.values[at] = size(old[at].get("real_size")) or 0
        requested.nulls = array(
            "q", [at for at in requested.nulls if size(old[at].get("real_size")) is None]
        )

    def _within_allowance(self, segments: list[Row], key: str) -> Sequence[tuple[int, Row]]:
        lists = [value for value in cells(segments, key) if type(value) is list]
        self._allowance.take(sum(map(len, lists)), key)
        return list(enumerate(segments))

    def _histories(self, rows: list[Row]) -> list[Row]:
        """Return the newest entry of each block's history (torch 2.0); empty where there is none."""
        newest: list[Row] = []
        for at, history in enumerate(cells(rows, "history")):
            if not history:
                newest.append({})
            elif type(history) is list and type(history[0]) is dict:
                newest.append(history[0])
            else:
                raise RefusedError("other", f"the 'history' of block {at} is not a list of dicts")
        return newest

    def _traces(self, traces: object) -> None:
        if traces is None:
            traces = []
        if type(traces) is not list:
            text = f"device_traces is {kind_of(traces)} where a list must be"
            raise RefusedError("other", text)
        self._allowance.take(len(traces), "device_traces")
        self._allowance.take(
            sum(len(trace) for trace in traces if type(trace) is list), "device_traces"
        )
        lists = [rows_of(trace, f"device_traces[{at}]") for at, trace in enumerate(traces)]
        lists = self._of_possible_gpus(lists)
        self.columns["trace.per_device"] = array("q", map(len, lists))
        rows = list(chain.from_iterable(lists))
        note_keys(rows, "trace", _ENTRY_KEYS, self.notes, self._allowance)
        codes = {label: code for code, label in enumerate(ACTIONS[:-1])}
        found, unknown = labels(rows, "action", codes, len(ACTIONS) - 1)
        for name, n in unknown.items():
            self.notes.add(self.notes.unknown_actions, name, n)
        self.columns["trace.action"] = found
        va = self._numbers("trace.va", rows, "addr", "Q")
        n_bytes = self._numbers("trace.bytes", rows, "size")
        oom = ACTIONS.index("oom")
        done = [code != oom for code in found]
        self._clear(n_bytes, impossible_sizes(va, n_bytes, done), "size", "trace")
        check_sum(compress(n_bytes.values, done), "entries")
        self._numbers("trace.stream", rows, "stream", "Q")
        self._numbers("trace.time_us", rows, "time_us")
        self._numbers("trace.device_free_bytes", rows, "device_free")
        self.columns["trace.pool"] = self._pools(rows, "trace", "pool_id")
        contexts, n_odd = texts(rows, "compile_context", self.texts)
        self.notes.odd("trace", "compile_context", n_odd)
        self.columns["trace.compile_context"] = contexts
        self.facts["no_context"] = self.texts.index(_NO_CONTEXT)
        self.columns["trace.stack_id"] = self._stacks.ids(rows, "trace")

    def _of_possible_gpus(self, lists: list[list[Row]]) -> list[list[Row]]:
        """Leave out the histories of GPUs whose number PyTorch does not give, and count their entries."""
        check_gpus(sum(map(bool, lists)), "histories")
        self.notes.odd("trace", "device", sum(map(len, lists[MOST_GPUS:])))
        return lists[:MOST_GPUS]

    def _annotations(self, value: object) -> None:
        rows = [] if value is None else rows_of(value, "external_annotations")
        self._allowance.take(len(rows), "external_annotations")
        note_keys(rows, "annotations", _ANNOTATION_KEYS, self.notes, self._allowance)
        gpu = self._numbers("annotations.device_id", rows, "device")
        outside = [at for at, n in enumerate(gpu.values) if not 0 <= n < MOST_GPUS]
        self._clear(gpu, outside, "device", "annotations")
        self._numbers("annotations.time_us", rows, "time_us")
        names, n_odd = texts(rows, "name", self.texts)
        self.notes.odd("annotations", "name", n_odd)
        self.columns["annotations.name"] = names
        codes = {label: code for code, label in enumerate(STAGES[:-1])}
        found, unknown = labels(rows, "stage", codes, len(STAGES) - 1)
        self.notes.odd("annotations", "stage", unknown.total())
        self.columns["annotations.stage"] = found

    def _host_items(self, value: object) -> int:
        """Count what the file has of the host: segments, or the entries of histories."""
        if type(value) is not list:
            return 0
        inner = [item for item in value if type(item) is list]
        return sum(map(len, inner)) if inner else len(value)

    def _flat(self, value: object, place: str) -> list[tuple[str, int]]:
        """Return nested dicts as names, joined by dots, and the numbers of the texts of their values."""
        found: list[tuple[str, int]] = []
        waiting: list[tuple[str, Any, int]] = [("", value, 0)] if type(value) is dict else []
        self.notes.odd("snapshot", place, value is not None and type(value) is not dict)
        while waiting:
            name, item, depth = waiting.pop()
            if type(item) is dict and depth < _DEPTH:
                self._allowance.take(len(item), place)
                inner = [
                    (f"{name}.{shown(str(key), _LONGEST_NAME)}".lstrip("."), each, depth + 1)
                    for key, each in item.items()
                    if type(key) is str or signed(key) is not None
                ]
                self.notes.odd("snapshot", place, len(item) - len(inner))
                waiting.extend(reversed(inner))
                continue
            text = _text(item)
            self.notes.odd("snapshot", place, text is None and item is not None)
            found.append((name, NO_TEXT if text is None else self.texts.index(text)))
        return found


def _text(value: object) -> str | None:
    """Write a setting as text: what is no text, number or flag has none."""
    if type(value) is str:
        return value
    if type(value) in {bool, float} or (type(value) is int and signed(value) is not None):
        return str(value)
    if type(value) in {list, tuple} and len(value) <= _LONGEST_NAME:  # type: ignore[arg-type]
        parts = [_text(part) if type(part) not in {list, tuple, dict} else None for part in value]  # type: ignore[attr-defined]
        return ", ".join(part for part in parts if part is not None) if None not in parts else None
    return None
