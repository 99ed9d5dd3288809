"""What can go wrong, in words that carry the way out.

Each class builds its own message and keeps the facts as attributes. ``exit_code`` is what the
command line returns (design 7): 1 error, 2 usage, 3 no Unified Memory data.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def _listed(names: Iterable[object], *, limit: int = 10) -> str:
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


class InputMissingError(NsanError):
    """There is nothing at a path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(f"{path}: no such file or folder. Check the path.")


class NoPermissionError(NsanError):
    """A path may not be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(f"{path}: you may not read this file. Ask its owner, or copy it.")


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

    def __init__(self, path: Path, detail: str) -> None:
        self.path, self.detail = path, detail
        super().__init__(
            f"{path.name} is damaged: {detail}.\n"
            "Copy it again, or export it again from the report: "
            "`nsys export --type sqlite --force-overwrite true REPORT.nsys-rep`."
        )


class UnknownFilterValueError(NsanError):
    """A filter names something that the trace does not have."""

    exit_code = 2

    def __init__(self, what: str, asked: object, present: Iterable[object]) -> None:
        self.what, self.asked, self.present = what, asked, list(present)
        super().__init__(f"The trace has no {what} {asked}. It has: {_listed(self.present)}.")


class NoFilterTableError(NsanError):
    """A filter needs events that were not recorded."""

    exit_code = 2

    def __init__(self, what: str, switch: str) -> None:
        self.what, self.switch = what, switch
        super().__init__(
            f"The trace has no {what} to filter by. Profile again with `nsys profile {switch} ...`."
        )


class NotAStoreError(NsanError):
    """A folder is not an nsan store."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(
            f"{path} is a folder without a manifest.json: not an nsan store. "
            "Give an nsys SQLite export, or a store made by `nsan import FILE -o FOLDER`."
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


class MissingTableError(NsanError):
    """A command needs one table, and the export has none."""

    def __init__(self, name: str, table: str, switch: str) -> None:
        self.table, self.switch = table, switch
        super().__init__(
            f"{name} has no {table}: nsys leaves out tables with no rows, and records this one "
            f"only when asked.\nProfile again with `nsys profile {switch} ...`."
        )


class SchemaMismatchError(NsanError):
    """A frame does not have the columns of its table."""

    def __init__(self, table: str, problems: Iterable[str]) -> None:
        self.table, self.problems = table, list(problems)
        super().__init__(f"{table}: " + "; ".join(self.problems))
