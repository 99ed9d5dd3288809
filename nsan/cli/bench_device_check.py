"""Check a GPU machine where nothing can be installed: one archive there, its results home.

--pack makes one archive of nsys's own part for such machines, the programs, their sources and a script
that needs a shell only. What the script brings home, --import turns into captures. --samples makes
small ones of them that can be given away.

Examples
--------
  nsan bench device-check --pack check.tar.xz
  # on the GPU machine: tar xf check.tar.xz && nsan-device-check/run.sh
  nsan bench device-check --import results.tar.xz -o check
  nsan bench device-check --samples check -o samples
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nsan.cli.arguments import add_verbosity, told_runs
from nsan.cli.terminal import complain, emit
from nsan.errors import UsageError
from nsan.tabular.text import Field, dash, indented, json_text, table
from nsan.text import safe
from nsan.units import counted, format_bytes, format_count, format_time

if TYPE_CHECKING:
    from nsan.microbench.checking import Check, Checked
    from nsan.microbench.packing import Packed
    from nsan.microbench.sampling import Sample

_SOME_FAILED: Final = 1
_NOTHING: Final = "Nothing was migrated."


def _figure(write: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda value: "-" if value is None else write(value)


_FIELDS: Final = (
    Field("name", "Case", safe, right=False),
    Field("status", "Status", safe, right=False),
    Field("alone_ns", "Alone", _figure(format_time)),
    Field("n_kernels", "Kernels", _figure(format_count)),
    Field("n_migrations", "Migrations", _figure(format_count)),
    Field("htod_bytes", "To GPU", _figure(format_bytes)),
    Field("dtoh_bytes", "To CPU", _figure(format_bytes)),
    Field("n_fault_rows", "Fault rows", _figure(format_count)),
    Field("one_row_per_batch", "One row per batch", safe, right=False),
    Field("named", "Named", dash),
    Field("bytes", "Bytes", dash),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this action."""
    modes = parser.add_mutually_exclusive_group(required=True)
    modes.add_argument(
        "--pack",
        type=Path,
        metavar="FILE",
        help="make the archive: FILE.tar.xz; FILE.tar.gz, half as large again, for a machine without xz; or FILE.tar",
    )
    modes.add_argument(
        "--import",
        dest="results",
        type=Path,
        nargs="+",
        metavar="RESULTS",
        help="what run.sh named at its end: the archive, all its parts, or their folder",
    )
    modes.add_argument(
        "--samples", type=Path, metavar="CHECK", help="an imported check, to make small samples of"
    )
    group = parser.add_argument_group("for --pack")
    group.add_argument(
        "--nsys-folder",
        type=Path,
        metavar="FOLDER",
        help="the version of nsys to take, as /opt/nvidia/nsight-systems/2023.4.4; by default the one that "
        "`nsan doctor` shows",
    )
    group.add_argument(
        "--arch",
        metavar="ARCH",
        help="for whom to compile, as sm_90; by default every major GPU architecture",
    )
    group.add_argument(
        "--sources-only",
        action="store_true",
        help="no compiled programs: the GPU machine has nvcc and builds them",
    )
    group = parser.add_argument_group("output")
    group.add_argument(
        "-o", "--output", type=Path, metavar="FOLDER", help="for --import and --samples: to be made"
    )
    group.add_argument("--force-overwrite", action="store_true", help="replace what is there")
    group.add_argument("--json", action="store_true", help="for machines")
    add_verbosity(parser)


def run(args: argparse.Namespace) -> int:
    """Run what was asked for."""
    if args.pack is not None:
        return _pack(args)
    if args.output is None:
        msg = "--import and --samples make a folder: name it with -o FOLDER."
        raise UsageError(msg)
    return _samples(args) if args.results is None else _import(args)


def _pack(args: argparse.Namespace) -> int:
    from nsan.microbench.packing import pack

    if args.output is not None:
        msg = "--pack names its archive itself: leave -o out."
        raise UsageError(msg)
    packed = pack(
        args.pack,
        nsys_folder=args.nsys_folder,
        programs={} if args.sources_only else None,
        arch=args.arch,
        overwrite=args.force_overwrite,
        tell=None if args.quiet else complain,
    )
    if args.json:
        document = {
            "schema": 1,
            "file": packed.path.name,
            "bytes": packed.n_bytes,
            "nsys_version": packed.nsys_version,
            "programs": list(packed.programs),
            "cases": list(packed.cases),
            "brings_xz": packed.brings_xz,
        }
        emit(json_text(document))
    else:
        emit(_packed_text(packed))
    return 0


def _packed_text(packed: Packed) -> str:
    programs = ", ".join(packed.programs) or "sources only, to be built there"
    name = safe(packed.path.name)
    xz = "its own" if packed.brings_xz else "none: without one there, results are larger"
    return (
        f"{name}: {format_bytes(packed.n_bytes)}; to unpack it, a machine needs {_unpacked_by(name)}\n"
        f"  recorder  nsys {packed.nsys_version}, NVIDIA's: do not pass it on\n"
        f"  programs  {programs}\n"
        f"  cases     {', '.join(packed.cases)}\n"
        f"  xz        {xz}\n\n"
        "On the GPU machine:\n"
        f"  tar xf {name} && nsan-device-check/run.sh\n"
        "Then here, with what it named at its end:\n"
        "  nsan bench device-check --import results.tar.xz -o FOLDER\n"
    )


def _unpacked_by(name: str) -> str:
    more = {"xz": " and xz", "gz": " and gzip"}.get(name.rpartition(".")[2], "")
    return f"tar{more}"


def _import(args: argparse.Namespace) -> int:
    from nsan.microbench.checking import import_check

    with told_runs(args, "import") as tell:
        check = import_check(args.results, args.output, overwrite=args.force_overwrite, tell=tell)
    emit(json_text(check.to_dict()) if args.json else _check_text(check, verbose=args.verbose))
    return 0 if check.cases and all(each.is_well for each in check.cases) else _SOME_FAILED


def _check_text(check: Check, *, verbose: bool) -> str:
    machine = check.machine
    known = [machine.get(key) for key in ("gpu.name", "gpu.memory.total")]
    gpu = f"{known[0]}, {known[1]} MiB" if known[0] and known[1] else known[0] or "no GPU seen"
    head = (
        f"{gpu}, driver {machine.get('driver', 'not found')}, nsys {machine.get('nsys', 'unknown')}"
    )
    rows = [_row(each) for each in check.cases]
    parts = [safe(head), table(rows, _FIELDS)]
    parts += [_told(each, verbose=verbose) for each in check.cases]
    parts += _notes(check)
    well = sum(each.is_well for each in check.cases)
    parts.append(
        f"{well} of {counted(len(check.cases), 'case')} ended well. Each lies in a folder of its own below "
        f"{safe(check.folder)}: `nsan report {safe(check.folder / check.cases[0].case.name)}`."
        if check.cases
        else "No case was run."
    )
    return "\n\n".join(parts) + "\n"


def _row(each: Checked) -> dict[str, Any]:
    summary: Mapping[str, Any] = each.summary or {}
    moved, faults = summary.get("migrations", {}), summary.get("gpu_faults", {})
    alone = each.case.seconds_alone
    return {
        "name": each.case.name,
        "status": each.status,
        "alone_ns": None if alone is None else round(alone * 1e9),
        "n_kernels": summary.get("kernels", {}).get("n"),
        "n_migrations": moved.get("n"),
        "htod_bytes": moved.get("htod_bytes"),
        "dtoh_bytes": moved.get("dtoh_bytes"),
        "n_fault_rows": faults.get("n_rows"),
        "one_row_per_batch": each.one_row_per_batch,
        "named": each.named,
        "bytes": f"{moved_right.n_right} of {moved_right.n_checked}"
        if (moved_right := each.bytes) and moved_right.n_checked
        else None,
    }


def _told(each: Checked, *, verbose: bool) -> str:
    """Say what a case shows: its first answer in short, or all of it."""
    from nsan.cli.summary import summary_text
    from nsan.reading import reading

    head = safe(f"{each.case.name}: {each.case.command}")
    if each.summary is None:
        return head
    if verbose:
        return head + "\n" + indented(summary_text(each.summary, verbose=True))
    lines = reading(each.summary) or [_NOTHING] * (not each.warnings)
    return "\n".join([head, *(f"  {safe(line)}" for line in lines)])


def _notes(check: Check) -> list[str]:
    """List what went wrong and what nsan warns of, each once with all cases that it is about."""
    found: dict[str, list[str]] = {}
    for each in check.cases:
        texts = [each.case.reason, each.problem, *_of_bytes(each)]
        told = " ".join(texts)
        texts += [text for text in each.warnings if text not in told]
        for text in dict.fromkeys(filter(None, texts)):
            found.setdefault(text, []).append(each.case.name)
    lines = [f"  {_whose(names, check)}: {text}" for text, names in found.items()]
    return ["\n".join(["To know:", *map(safe, lines)])] if lines else []


def _of_bytes(each: Checked) -> tuple[str, ...]:
    if each.bytes is None or not each.is_well:
        return ()
    unchecked = each.bytes.reason
    return (*each.bytes.wrong, *([f"bytes were not checked: {unchecked}"] * bool(unchecked)))


def _whose(names: list[str], check: Check) -> str:
    everyone = len(names) == len(check.cases) > 1
    return "every case" if everyone else ", ".join(names)


def _samples(args: argparse.Namespace) -> int:
    from nsan.microbench.sampling import make_samples

    samples = make_samples(args.samples, args.output, overwrite=args.force_overwrite)
    if args.json:
        emit(json_text({"schema": 1, "samples": [_sample_row(each) for each in samples]}))
    else:
        emit("".join(f"{_sample_line(each)}\n" for each in samples))
    return 0 if all(each.file for each in samples) else _SOME_FAILED


def _sample_row(each: Sample) -> dict[str, Any]:
    return {
        "name": each.name,
        "file": each.file,
        "bytes": each.n_bytes,
        "reason": each.reason or None,
    }


def _sample_line(each: Sample) -> str:
    if each.file is None:
        return safe(f"{each.name}: left out, {each.reason}")
    return safe(f"{each.name}: {each.file}, {format_bytes(each.n_bytes or 0)}")
