"""Call stacks of a snapshot, each kept once. Standard library only.

PyTorch gives all entries of one call the same frames, and a pickle stores them once: so a list of
frames, and a frame, are known by their identity first and by their content only then.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Final

from nsan.io.torch_snapshot.columns import (
    NO_TEXT,
    Allowance,
    Column,
    Notes,
    Row,
    Texts,
    cells,
    note_keys,
    signed,
)
from nsan.io.torch_snapshot.paths import without_folders
from nsan.io.torch_snapshot.refusal import RefusedError, kind_of

NO_STACK: Final = -1
_NONE: Final = type(None)
_FRAME_KEYS: Final = frozenset(
    {
        "name",
        "filename",
        "line",
        "fx_node_op",
        "fx_node_name",
        "fx_node_target",
        "fx_original_trace",
    }
)
_PLACE: Final = "frames"


class Stacks:
    """Numbers the distinct call stacks in order of appearance; cuts paths unless they are to be kept."""

    def __init__(
        self, texts: Texts, notes: Notes, allowance: Allowance, *, keep_paths: bool = False
    ) -> None:
        self._texts, self._notes, self._allowance = texts, notes, allowance
        self._keep_paths = keep_paths
        self._files: dict[str, int] = {}
        self._frames: dict[tuple[int, int, int | None], int] = {}
        self._frame_by_id: dict[int, int] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        self._stack_by_ids: dict[tuple[int, ...], int] = {(): NO_STACK}

    def ids(self, rows: Sequence[Row], place: str, key: str = "frames") -> array[int]:
        """Give the number of each row's stack; -1 where there is none."""
        return self.ids_of(cells(rows, key), place)

    def ids_of(self, lists: list[Any], place: str) -> array[int]:
        """Give the number of each list of frames; -1 for an empty one and for None."""
        if not set(map(type, lists)) <= {list}:
            self._notes.odd(place, "frames", sum(type(f) not in {list, _NONE} for f in lists))
            lists = [frames if type(frames) is list else [] for frames in lists]
        n_frames = sum(map(len, lists))
        where = f"the call stacks of {place}"
        if self._allowance.has(n_frames):
            self._allowance.take(n_frames, where)
            return array("q", [self._stack(frames, place) for frames in lists])
        # The same lists stand at many entries: look at each once.
        distinct = dict(zip(map(id, lists), lists, strict=True))
        self._allowance.take(sum(map(len, distinct.values())), where)
        stacks = {identity: self._stack(frames, place) for identity, frames in distinct.items()}
        return array("q", map(stacks.__getitem__, map(id, lists)))

    def _stack(self, frames: list[Any], place: str) -> int:
        identities = tuple(map(id, frames))
        stack = self._stack_by_ids.get(identities)
        if stack is None:
            stack = self._stack_by_ids[identities] = self._new_stack(frames, place)
        return stack

    def _new_stack(self, frames: list[Any], place: str) -> int:
        known = self._frame_by_id
        self._add({id(frame): frame for frame in frames if id(frame) not in known}, place)
        stack = tuple([known[id(frame)] for frame in frames])
        return self._stacks.setdefault(stack, len(self._stacks))

    def _add(self, frames: dict[int, Any], place: str) -> None:
        for frame in frames.values():
            if type(frame) is not dict:
                text = f"a call stack of {place} holds {kind_of(frame)} where a frame must be"
                raise RefusedError("other", text)
        note_keys(list(frames.values()), _PLACE, _FRAME_KEYS, self._notes, self._allowance)
        for identity, frame in frames.items():
            line = frame.get("line")
            content = (
                self._text(frame, "name"),
                self._file(frame),
                None if line is None else self._line(line),
            )
            self._frame_by_id[identity] = self._frames.setdefault(content, len(self._frames))

    def _text(self, frame: Row, key: str) -> int:
        value = frame.get(key)
        if type(value) is str:
            return self._texts.index(value)
        if value is not None:
            self._notes.odd(_PLACE, key)
        return NO_TEXT

    def _file(self, frame: Row) -> int:
        path = frame.get("filename")
        if type(path) is not str or self._keep_paths:
            return self._text(frame, "filename")
        if path not in self._files:
            self._files[path] = self._texts.index(without_folders(path))
        return self._files[path]

    def _line(self, value: object) -> int | None:
        line = signed(value)
        if line is None or type(value) is not int:
            self._notes.odd(_PLACE, "line")
        return line

    def columns(self) -> dict[str, Column | array[int]]:
        """Return the frames, and the stacks as runs of numbers of frames."""
        function, file, line = array("q"), array("q"), Column("q")
        for name, filename, number in self._frames:
            function.append(name)
            file.append(filename)
            line.extend([number or 0], [0] if number is None else [])
        depths, frame = array("q"), array("q")
        for stack in self._stacks:
            depths.append(len(stack))
            frame.extend(stack)
        return {
            "frames.function": function,
            "frames.source_file": file,
            "frames.source_line": line,
            "stacks.depth": depths,
            "stacks.frame": frame,
        }
