"""What a run of the benchmark does: a program, its flags, and the tape that it plays."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from nsan.errors import ProgramNotFoundError, UsageError
from nsan.io.recording import SWITCHES
from nsan.microbench import building

OWN_FLAGS: Final = {
    "--out": "the tables go into the run's folder",
    "--tape": "choose a --network",
    "--snapshot": "the snapshot goes into the run's folder",
}
"""Flags that nsan gives a program itself, and what to do instead."""

QUESTIONS: Final = ("--help", "--dry-run")
"""Flags with which a program only answers, and runs nothing."""

PLAYS_TAPES: Final = "dl_bench"
USES_TORCH: Final = "torch_uvm"


@dataclass(frozen=True)
class TapeRequest:
    """Which training steps to write down.

    Attributes
    ----------
    network : str
        A name that ``nsan bench list`` shows.
    steps : int, default 2
        Training steps; the first also brings the weights and makes the optimizer's state.
    batch, sequence, image : int, optional
        Samples per step, tokens in each or pixels a side; by default the network's.
    varying : bool, default False
        Batch or sequence length changes from step to step.
    """

    network: str
    steps: int = 2
    batch: int | None = None
    sequence: int | None = None
    image: int | None = None
    varying: bool = False

    def text(self) -> str:
        """Write the tape.

        Raises
        ------
        NsanError
            If there is no such network, or it does not take these sizes.
        """
        from nsan.microbench.tapes import tape_text
        from nsan.model.workloads import network

        sizes = (self.steps, self.batch, self.sequence, self.image)
        steps, batch, sequence, image = sizes
        return tape_text(
            network(self.network).build(
                steps=steps, batch=batch, sequence=sequence, image=image, varying=self.varying
            )
        )


@dataclass(frozen=True)
class Work:
    """A program with all that decides what it does.

    Attributes
    ----------
    program : str
        ``uvm_bench``, ``dl_bench`` or ``torch_uvm``.
    path : Path
        The program itself.
    arguments : tuple of str
        Flags for it, without those that nsan gives itself.
    tape : str
        What it plays; empty: nothing.
    version : str
        Digest of the program.
    asked : dict
        What a sweep asks for, beside the flags: kept as the run's condition.
    launcher : tuple of str
        What runs the program, if it does not run by itself: a Python.
    given : tuple of str
        Flags that nsan adds, the same for each run.
    """

    program: str
    path: Path
    arguments: tuple[str, ...] = ()
    tape: str = field(default="", repr=False)
    version: str = ""
    asked: dict[str, Any] = field(default_factory=dict)
    launcher: tuple[str, ...] = ()
    given: tuple[str, ...] = ()

    def question(self, tape: Path | None) -> list[str]:
        """Write the command line of a run that leaves nothing."""
        played = ["--tape", str(tape)] if tape is not None else []
        return [*self.launcher, str(self.path), *self.arguments, *self.given, *played]

    def command(self, out: Path, tape: Path | None, snapshot: Path | None = None) -> list[str]:
        """Write the command line of a run.

        Parameters
        ----------
        out : Path
            Where its tables go.
        tape : Path, optional
            Where its tape is.
        snapshot : Path, optional
            Where its memory snapshot goes.

        Returns
        -------
        list of str
            The program and its arguments.
        """
        kept = ["--snapshot", str(snapshot)] if snapshot is not None else []
        return [*self.question(tape), *kept, "--out", str(out)]

    @property
    def has_snapshot(self) -> bool:
        """Whether the program itself can write what its caching allocator does, as PyTorch can."""
        return self.program == USES_TORCH and _value(self.arguments, "--allocator") == "caching"

    @property
    def shown_arguments(self) -> list[str]:
        """The flags without folders, which may name people."""
        return [_shown(each) for each in self.arguments]

    def digest(self, *, profiled: bool) -> str:
        """Return the SHA-256 of all that decides what the run leaves."""
        what = {
            "program": self.program,
            "version": self.version,
            "arguments": self.arguments,
            "tape": hashlib.sha256(self.tape.encode()).hexdigest() if self.tape else None,
            "asked": self.asked,
            "nsys": SWITCHES if profiled else None,
        }
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _value(arguments: Sequence[str], flag: str) -> str | None:
    """Find the value of a flag; the last one counts."""
    found = None
    for argument, following in zip(arguments, [*arguments[1:], None], strict=True):
        name, equals, value = argument.partition("=")
        if name == flag:
            found = value if equals else following
    return found


def _shown(argument: str) -> str:
    flag, equals, value = argument.partition("=")
    if equals and "/" in value:
        return f"{flag}={Path(value).name}"
    return Path(argument).name if "/" in argument else argument


def check_flags(arguments: Sequence[str]) -> None:
    """Refuse flags that nsan gives a program itself.

    Raises
    ------
    UsageError
        If there is one.
    """
    for argument in arguments:
        flag = argument.partition("=")[0]
        if flag in OWN_FLAGS:
            msg = f"{flag} is given by nsan itself: {OWN_FLAGS[flag]}. Leave it out."
            raise UsageError(msg)


def is_question(arguments: Sequence[str]) -> bool:
    """Say whether a program would only answer."""
    return any(each in QUESTIONS for each in arguments)


def located(
    program: str,
    *,
    path: Path | str | None,
    arch: str | None,
    nvcc: str | None,
    tell: building.Tell | None,
) -> tuple[Path, str]:
    """Find a program, building it if it must be; return it and the digest of its version.

    Parameters
    ----------
    program : str
        Its name.
    path : Path or str, optional
        Where it is, if the user has built it; a name that is no file here is looked for on PATH.
    arch, nvcc, tell
        As for :func:`nsan.microbench.building.built`.

    Returns
    -------
    (Path, str)
        The program, and what tells it from another version of it.

    Raises
    ------
    NsanError
        If it is not there or cannot be built.
    """
    if path is not None:
        # A path without its ./ would only be looked for on PATH.
        found = shutil.which(Path(path).absolute() if Path(path).is_file() else path)
        if found is None or not Path(found).is_file():
            raise ProgramNotFoundError(str(path))
        try:
            with Path(found).open("rb") as file:
                return Path(found).absolute(), hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ProgramNotFoundError(str(path), error.strerror) from error
    plan = building.planned(arch=arch, nvcc=nvcc)
    made = building.built([program], arch=plan.arch, nvcc=nvcc, tell=tell)
    return made[program], plan.digest
