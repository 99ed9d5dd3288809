"""Options that several commands share, typed once, and what they mean."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nsan.cli.terminal import complain, emit
from nsan.errors import (
    BrokenStoreError,
    OutputExistsError,
    OutputIsInputError,
    OutputWriteError,
    UsageError,
)
from nsan.text import safe
from nsan.units import parse_size

if TYPE_CHECKING:
    from nsan.trace import Trace

_NO_UM_DATA: Final = 3
_SHOWN_AT_ONCE: Final = 1 << 20
"""Characters of a long text that are read back at a time."""
FORMATS: Final = ("table", "csv", "json", "markdown", "parquet")


def add_input(parser: argparse.ArgumentParser) -> None:
    """Add the trace to read and how much to say."""
    parser.add_argument(
        "trace", metavar="TRACE", type=Path, help="nsys report or export, or nsan store"
    )
    add_verbosity(parser)
    add_memory(parser)


def add_verbosity(parser: argparse.ArgumentParser) -> None:
    """Add -q and -v."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("-q", "--quiet", action="store_true", help="no progress, no messages")
    group.add_argument("-v", "--verbose", action="store_true", help="also what is in order")


def add_memory(parser: argparse.ArgumentParser) -> None:
    """Add how much memory may be used; see :mod:`nsan.memory_budget`."""
    parser.add_argument(
        "--memory",
        type=memory,
        metavar="SIZE",
        help="leave out what needs more, as 4GB (default: NSAN_MEMORY, or half of what is free)",
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add where the result goes and in which format."""
    group = parser.add_argument_group("output")
    group.add_argument("--format", choices=FORMATS, default="table", help="default: table")
    group.add_argument(
        "--json", dest="format", action="store_const", const="json", help="short for --format json"
    )
    group.add_argument(
        "--rows", type=positive, metavar="N", help="at most N rows per table; JSON always has all"
    )
    group.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write here instead of stdout"
    )
    group.add_argument("--force-overwrite", action="store_true", help="replace an existing FILE")


def add_filters(parser: argparse.ArgumentParser) -> None:
    """Add the filters of :meth:`nsan.trace.Trace.filter`."""
    group = parser.add_argument_group("filters")
    group.add_argument(
        "--filter-time",
        metavar="A/B",
        help="rows that start in this window, as 1s/1s250ms or 2s/ (=-1ms/5s before the session start)",
    )
    group.add_argument(
        "--filter-nvtx", metavar="NAME", help="the same for an NVTX range: NAME[@DOMAIN][/INDEX]"
    )
    group.add_argument(
        "--gpu", type=int, action="append", metavar="N", help="only this GPU; repeatable"
    )
    group.add_argument(
        "--pid", type=int, action="append", metavar="N", help="only this process; repeatable"
    )


def memory(text: str) -> str:
    """Read a size of memory; the text stays as it is."""
    try:
        parse_size(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def positive(text: str) -> int:
    """Read a number of rows, which is above 0."""
    if not text.isdecimal() or int(text) == 0:
        msg = f"{text!r} is not a number of rows above 0"
        raise argparse.ArgumentTypeError(msg)
    return int(text)


def from_zero(text: str) -> int:
    """Read a number of steps, which may be 0."""
    if not text.isdecimal():
        msg = f"{text!r} is no number of steps, 0 or more"
        raise argparse.ArgumentTypeError(msg)
    return int(text)


def is_filtered(args: argparse.Namespace) -> bool:
    """Say whether any filter was given."""
    given = (args.filter_time, args.filter_nvtx, args.gpu, args.pid)
    return any(value is not None for value in given)


def none_here(args: argparse.Namespace) -> str:
    """Say that something was recorded and is not there."""
    return f"recorded, and there was none{' in the part that was asked for' * is_filtered(args)}."


def show_progress(args: argparse.Namespace) -> bool:
    """Say whether a progress bar has a place to be drawn."""
    return not args.quiet and sys.stderr.isatty()


@contextlib.contextmanager
def told_runs(
    args: argparse.Namespace, what: str, total: int | None = None
) -> Iterator[Callable[[str], None] | None]:
    """Show runs on a bar on stderr, where it is a terminal.

    Parameters
    ----------
    args : Namespace
        How much to say.
    what : str
        What is done with the runs.
    total : int, optional
        How many there are.

    Yields
    ------
    callable or None
        To be called with the name of each run; None where no bar is shown.
    """
    if not show_progress(args):
        yield None
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, unit=" runs", desc=what, leave=False) as bar:

        def tell(name: str) -> None:
            bar.set_postfix_str(name)
            bar.update()

        yield tell


def filtered(trace: Trace, args: argparse.Namespace) -> Trace:
    """Apply the filters that were given."""
    return trace.filter(time=args.filter_time, pid=args.pid, device=args.gpu, nvtx=args.filter_nvtx)


def located(args: argparse.Namespace) -> Path:
    """Return the capture that was named; of a folder of reports the newest, which stderr names."""
    from nsan.opening import capture_at

    path = capture_at(args.trace)
    if path != args.trace and not args.quiet:
        complain(f"{path.name} is the newest capture of this folder.")
    return path


def documented(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the summary document of the trace as filtered, and the manifest of the whole trace.

    Without filters this reads the manifest of the store, and imports no frame library.
    """
    from nsan.contract import document, summary
    from nsan.opening import store_of

    folder, manifest = store_of(located(args), progress=show_progress(args))
    if not is_filtered(args):
        return document(manifest["info"], manifest["totals"]), manifest
    from polars.exceptions import PolarsError

    from nsan.io.store import open_store

    try:
        return summary(filtered(open_store(folder, manifest), args)), manifest
    except (PolarsError, OSError) as error:
        raise BrokenStoreError(folder, f"a part of it cannot be read ({error})") from error


def um_status(args: argparse.Namespace, manifest: dict[str, Any]) -> int:
    """Return 0, or 3 with a word on stderr if the whole trace has nothing of Unified Memory."""
    from nsan.contract import has_um_data

    if has_um_data(manifest["info"], manifest["totals"]):
        return 0
    if not args.quiet:
        complain(
            f"{args.trace.name} holds no Unified Memory data: no migration, no page fault, no "
            "managed allocation."
        )
    return _NO_UM_DATA


def write_result(args: argparse.Namespace, text: str) -> None:
    """Write a finished text to stdout, or to the file that was named."""
    if args.output is None:
        _show(args, text)
        return
    write_file(args, lambda file: file.write_bytes(text.encode("utf-8", "backslashreplace")))


def write_pieces(args: argparse.Namespace, pieces: Iterable[str]) -> None:
    """Write a text that may take gigabytes, as :func:`write_result`; each piece is whole lines, or JSON.

    Nothing is shown before all is made: an error must not leave half a document.
    """
    import tempfile

    if args.output is not None:
        write_file(args, lambda file: _write_all(file, pieces))
        return
    with tempfile.TemporaryFile(
        "w+", encoding="utf-8", errors="surrogatepass", newline="\n"
    ) as kept:
        kept.writelines(pieces)
        kept.seek(0)
        while lines := kept.readlines(_SHOWN_AT_ONCE):
            _show(args, "".join(lines))


def _show(args: argparse.Namespace, text: str) -> None:
    shown = sys.stdout is not None and sys.stdout.isatty() and args.format == "csv"
    emit("\n".join(map(safe, text.split("\n"))) if shown else text)


def _write_all(place: Path, pieces: Iterable[str]) -> None:
    with place.open("wb") as file:
        file.writelines(piece.encode("utf-8", "backslashreplace") for piece in pieces)


def write_file(args: argparse.Namespace, write: Callable[[Path], object]) -> None:
    """Write the file that was named, beside its place and then into it: whole, or not at all.

    Parameters
    ----------
    args : Namespace
        Output, whether it may be replaced, and the trace, which may not.
    write : callable
        Writes a file of a given name.

    Raises
    ------
    UsageError, OutputExistsError, OutputIsInputError, OutputWriteError
        One for each way in which it goes wrong.
    """
    path = output_path(args)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(beside)
        beside.replace(path)
    except OSError as error:
        raise OutputWriteError(path, error.strerror or str(error)) from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def refuse_inputs(args: argparse.Namespace, inputs: Sequence[Path], output: Path | None) -> None:
    """Refuse to write over, or into, what is read; of a command that reads several traces.

    Parameters
    ----------
    args : Namespace
        Its ``trace`` becomes the first input.
    inputs : sequence of Path
        What is read.
    output : Path, optional
        What is written.

    Raises
    ------
    OutputIsInputError
        If that is one of them, or lies in a folder that is.
    """
    args.trace = inputs[0]
    if output is None:
        return
    real = output.resolve()
    for each in map(Path.resolve, inputs):
        if real == each or each in real.parents:
            raise OutputIsInputError(output)


def output_path(args: argparse.Namespace) -> Path:
    """Return the file that was named, if it may be written: it is no input, and nothing is lost.

    Parameters
    ----------
    args : Namespace
        Output, whether it may be replaced, and the trace, which may not.

    Returns
    -------
    Path
        Where.

    Raises
    ------
    UsageError, OutputExistsError, OutputIsInputError
        If it may not.
    """
    path: Path | None = args.output
    if path is None:
        msg = f"--format {args.format} needs a file: add -o FILE."
        raise UsageError(msg)
    if args.trace is not None:
        real, source = path.resolve(), args.trace.resolve()
        logs = [source.with_name(source.name + suffix) for suffix in ("-wal", "-shm", "-journal")]
        if real in {source, *logs} or source in real.parents:
            raise OutputIsInputError(path)
    if os.path.lexists(path) and not args.force_overwrite:
        raise OutputExistsError(path)
    return path
