"""What can go wrong with a device check, in words that carry the way out; see :mod:`nsan.errors`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from nsan.errors import NsanError

_ANOTHER_NSYS: Final = "Name another version with --nsys-folder, as /opt/nvidia/nsight-systems/2023.4.4: that one is known to work."


class NotPackableError(NsanError):
    """An nsys, or a program, cannot be packed for another machine; ``problem`` says why."""

    def __init__(self, path: Path, problem: str, advice: str = _ANOTHER_NSYS) -> None:
        self.path, self.problem = path, problem
        super().__init__(f"{path} cannot be packed for another machine: {problem}.\n{advice}")


class ResultsError(NsanError):
    """What came home from a device check cannot be used; ``problem`` says why."""

    def __init__(self, path: Path, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(
            f"{path.name} cannot be used: {problem}.\n"
            "Bring home again what run.sh named at its end, results.tar.xz or all parts of it, and give them all to --import."
        )


class NoSampleError(NsanError):
    """No sample can be made of a folder; ``problem`` says why."""

    def __init__(self, folder: Path, problem: str) -> None:
        self.folder, self.problem = folder, problem
        super().__init__(
            f"{folder.name} gives no sample: {problem}.\n"
            "Name the folder that `nsan bench device-check --import RESULTS -o FOLDER` made, of a check on a machine "
            "with a GPU."
        )
