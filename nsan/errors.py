"""What can go wrong, in words that carry the way out.

Each class builds its own message and keeps the facts as attributes. ``exit_code`` is what the
command line returns (design 7): 1 error, 2 usage, 3 no Unified Memory data.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Final


def listed(names: Iterable[object], *, limit: int = 10) -> str:
    """List names for a message, and say how many others there are."""
    shown = [str(name) for name in names]
    rest = f", and {len(shown) - limit} more" if len(shown) > limit else ""
    return ", ".join(shown[:limit]) + rest if shown else "none"


class NsanError(Exception):
    """Any error that nsan foresees; its text is meant for the user."""

    exit_code = 1


class UsageError(NsanError):
    """The call cannot be understood."""

    exit_code = 2


class BadTimeError(UsageError):
    """A text is not a time or a window."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(
            f"{text!r} is not a time. Write 250ms, 1s250ms or 1200 (nanoseconds), and a window as "
            "START/END, for example 1s/1s500ms or 2s/ ."
        )


class BadSizeError(UsageError):
    """A text is not a size."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(f"{text!r} is not a size. Write 64MiB, 1.5GiB or 4096 (byte).")


class InputMissingError(NsanError):
    """There is nothing at a path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(f"{path}: no such file or folder. Check the path.")


class NoPermissionError(NsanError):
    """A path may not be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        what = "folder" if os.path.isdir(path) else "file"  # noqa: PTH112 - that of Path may raise again
        super().__init__(f"{path}: you may not read this {what}. Ask its owner, or copy it.")


class NotAnExportError(NsanError):
    """A file is not an nsys SQLite export; ``what`` says what it is."""

    def __init__(self, path: Path, what: str, advice: str = "") -> None:
        self.path, self.what = path, what
        advice = advice or (
            "nsan reads SQLite exports of Nsight Systems: "
            "`nsys export --type sqlite REPORT.nsys-rep`."
        )
        super().__init__(f"{path.name} is {what}.\n{advice}")


class DamagedExportError(NsanError):
    """A database is cut short or corrupt."""

    def __init__(self, path: Path, detail: str, advice: str = "") -> None:
        self.path, self.detail = path, detail
        advice = advice or (
            "Copy it again, or export it again from the report: "
            "`nsys export --type sqlite --force-overwrite true REPORT.nsys-rep`."
        )
        super().__init__(f"{path.name} is damaged: {detail}.\n{advice}")


class ProgramNotFoundError(UsageError):
    """The program to record cannot be run."""

    def __init__(self, program: str, reason: str | None = None) -> None:
        self.program = program
        super().__init__(
            f"{program!r} cannot be run: {reason or 'no such program, or not executable'}. "
            "Give a path, as ./program, or a program on PATH."
        )


class UnknownFilterValueError(NsanError):
    """A filter names something that the trace does not have."""

    exit_code = 2

    def __init__(self, what: str, asked: object, present: Iterable[object]) -> None:
        self.what, self.asked, self.present = what, asked, list(present)
        super().__init__(f"The trace has no {what} {asked}. It has: {listed(self.present)}.")


class NoFilterTableError(NsanError):
    """A filter needs events that were not recorded."""

    exit_code = 2

    def __init__(self, what: str, switch: str) -> None:
        self.what, self.switch = what, switch
        super().__init__(
            f"The trace has no {what} to filter by. Profile again with `nsys profile {switch} ...`."
        )


class NotAStoreError(NsanError):
    """A folder is not an nsan store, nor anything else that nsan reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(
            f"{path} is a folder without a manifest.json: not an nsan store, and not the folder of "
            "an nsys export or of reports either.\n"
            "Give an nsys report or export, or a store made by `nsan import FILE -o FOLDER`. Reports in folders "
            "below it are read together by `nsan summary` and `nsan report`, and one by its name."
        )


class BrokenStoreError(NsanError):
    """A store is not whole, or was written by another nsan."""

    def __init__(self, path: Path, detail: str) -> None:
        self.path, self.detail = path, detail
        super().__init__(
            f"{path} is not a usable nsan store: {detail}.\n"
            f"Import its source again: `nsan import FILE -o {path} --force-overwrite`."
        )


class StoreWriteError(NsanError):
    """A store could not be written; nothing half-written is left."""

    def __init__(self, folder: Path, reason: str) -> None:
        self.folder, self.reason = folder, reason
        super().__init__(
            f"Cannot write to {folder}: {reason}. Nothing half-written is left there.\n"
            "Free some space, choose a folder with `nsan import FILE -o FOLDER`, or set "
            "NSAN_CACHE_DIR to one that has room."
        )


class OutputExistsError(NsanError):
    """An output is already there and may not be replaced."""

    def __init__(self, path: Path, what: str = "exists already") -> None:
        self.path = path
        super().__init__(f"{path} {what}. Choose another name, or add --force-overwrite.")


class PlaceTakenError(NsanError):
    """A store cannot be put where something else is, whatever flag is given."""

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        super().__init__(f"{path} {what}. Choose another place.")


class OutputIsInputError(NsanError):
    """An output would overwrite what is being read."""

    exit_code = 2

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(
            f"{path} is what is being read, and is never written to. Choose another name."
        )


class OutputWriteError(NsanError):
    """A result could not be written; what was at its place is still there."""

    def __init__(self, path: Path | str, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(
            f"Cannot write the result to {path}: {reason}. Nothing there was changed. "
            "Choose another place with -o FILE."
        )


class SchemaMismatchError(NsanError):
    """A frame does not have the columns of its table."""

    def __init__(self, table: str, problems: Iterable[str]) -> None:
        self.table, self.problems = table, list(problems)
        super().__init__(f"{table}: " + "; ".join(self.problems))


class UnknownNameError(UsageError):
    """A name is not among those that exist."""

    def __init__(self, what: str, name: str, names: Iterable[str]) -> None:
        self.what, self.name, self.names = what, name, list(names)
        super().__init__(f"There is no {what} {name!r}. There are: {listed(self.names, limit=40)}.")


class AnalysisError(NsanError):
    """An analysis is not what it declares to be."""

    def __init__(self, name: str, problem: str) -> None:
        self.name, self.problem = name, problem
        super().__init__(
            f"The analysis {name!r} cannot be used: {problem}. "
            "See the docstring of nsan.analysis.catalog for what an analysis is."
        )


class PluginError(NsanError):
    """A user's own analyses cannot be loaded."""

    def __init__(self, origin: str, problem: str) -> None:
        self.origin, self.problem = origin, problem
        super().__init__(
            f"The plug-in {origin} cannot be used: {problem}. "
            "docs/analyses.md shows what an analysis of your own looks like."
        )


class ProgramError(UsageError):
    """A program for the driver model cannot be run."""

    def __init__(self, problem: str, advice: str) -> None:
        self.problem = problem
        super().__init__(f"{problem}. {advice}")


class ExtraMissingError(NsanError):
    """A command needs a package that the base install does not bring."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        self.package, self.extra = package, extra
        super().__init__(
            f"{what} needs the package {package}, which is not installed. "
            f"Run: pip install 'nsan[{extra}]'"
        )


class OverBudgetError(NsanError):
    """An analysis needs more memory than may be used; it was not begun."""

    def __init__(
        self, what: str, rows: str, sizes: tuple[str, str], ways_out: tuple[str, bool]
    ) -> None:
        self.what, self.rows, (self.need, self.budget) = what, rows, sizes
        enough, has_parts = ways_out
        # Python and notebooks have no --memory, and not every command has.
        part = ", or take a part: --filter-time, --filter-nvtx, --pid, --gpu" if has_parts else ""
        super().__init__(
            f"{what} was not run: for {rows} it needs about {self.need} of memory, and {self.budget} may be "
            f"used. Allow more: set {enough} (or --memory SIZE){part}."
        )


class AllocatorFullError(NsanError):
    """The caching allocator cannot serve a request, even after it has released what it can."""

    def __init__(self, requested: int, reserved: int, limit: int | None) -> None:
        self.requested, self.reserved, self.limit = requested, reserved, limit
        of = "" if limit is None else f" of {limit} byte that it may reserve"
        super().__init__(
            f"The caching allocator is out of memory: {requested} byte were asked for, and "
            f"{reserved} byte{of} are reserved. "
            "Give the model a larger GPU or memory fraction, or a smaller workload."
        )


class SnapshotError(NsanError):
    """A memory snapshot of PyTorch cannot be read, or is damaged; ``detail`` says why."""

    says = "could not be read:", "Copy it again from where it was written, or record it again."

    def __init__(self, path: Path, detail: str, advice: str = "") -> None:
        self.path, self.detail = path, detail
        super().__init__(f"{path.name} {self.says[0]} {detail}.\n{advice or self.says[1]}")


class NotASnapshotError(SnapshotError):
    """A file is no memory snapshot; ``detail`` says what it is."""

    says = "is", "A snapshot is what `torch.cuda.memory._dump_snapshot(FILE)` writes, also gzipped."


class UnsafeSnapshotError(SnapshotError):
    """A pickle is more than plain data, or would grow beyond its size: nothing of it was run."""

    says = "is refused:", "Nothing in this file was run. Open it nowhere if you do not trust it."


class NotAlignedError(NsanError):
    """A memory snapshot and a trace cannot be aligned; ``reason`` says why.

    They are not of the same run, or the snapshot lacks what times are compared by
    (:attr:`NO_HISTORY`, :attr:`NO_TIMES`), which says nothing about the run.
    """

    NO_HISTORY: Final = "it has no history, only the state at its end"
    NO_TIMES: Final = "the snapshot has no times (PyTorch before 2.2 writes none)"
    _ADVICE: ClassVar[dict[str, str]] = {
        NO_HISTORY: (
            "Call torch.cuda.memory._record_memory_history() before the first allocation, "
            "and take the snapshot after that."
        ),
        NO_TIMES: "Record it with PyTorch 2.2 or later.",
    }

    def __init__(
        self, reason: str, snapshot: str = "the snapshot", trace: str = "this trace"
    ) -> None:
        self.reason = reason
        advice = self._ADVICE.get(reason)
        if advice is not None:
            super().__init__(
                f"Not aligned: {snapshot} cannot be put on the clock of {trace}: {reason}. {advice}"
            )
            return
        super().__init__(
            f"Not aligned: {snapshot} is not of the run of {trace}: {reason}. Take the one that it wrote."
        )
