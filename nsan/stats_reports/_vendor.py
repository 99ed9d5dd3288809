"""The interface of nsys for reports, found where the script runs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

NOT_FOUND = 28
"""Exit status of a report whose script fails, as nsys numbers it."""

_LACKING = (
    "nsan: Python cannot find nsysstats, the interface of nsys for reports. Run this report by "
    "`nsys stats --report-dir {folder} -r {name} FILE`, or set PYTHONPATH to target-linux-x64/python/lib of "
    "the installation of nsys."
)


class NoInterface:
    """Stands for a report where nsys is not installed: it says so, and what to do."""

    @classmethod
    def Main(cls) -> None:  # noqa: N802 - the name that nsys calls
        """Say that the interface is missing and leave."""
        script = Path(sys.modules[cls.__module__].__file__ or "").resolve()
        sys.stderr.write(_LACKING.format(folder=script.parent, name=script.stem) + "\n")
        raise SystemExit(NOT_FOUND)


def _interface() -> Any:
    """Import ``nsysstats``; an nsys that was unpacked, not installed, has it beside where it looks."""
    try:
        return importlib.import_module("nsysstats")
    except ImportError:
        pass
    for entry in list(sys.path):
        beside = Path(entry).resolve().parents
        # Beside host-linux-x64/python/lib.
        folder = beside[2] / "target-linux-x64" / "python" / "lib" if len(beside) > 2 else None
        if folder and (folder / "nsysstats.py").is_file():
            sys.path.append(str(folder))
            return importlib.import_module("nsysstats")
    return None


_found = _interface()
StatsReport: Any = _found.StatsReport if _found else NoInterface
"""What a report is made of."""


OPTIONS = {
    option[0][0] for kind in StatsReport.__mro__ for option in vars(kind).get("_arg_opts", ())
}
"""Options that the interface gives to every report: versions differ."""
