"""Build and run the CUDA microbenchmark: programs that make traces on a real GPU.

uvm_bench runs one access pattern over managed memory, dl_bench plays the training steps of a network,
torch_uvm trains a PyTorch model. All have the same axes as flags, and write what they know of their run:
allocations with names, phases, bytes that are certain. nsan gives the allocations of the trace these names.

Building needs CUDA's nvcc (11.8 or later) and no GPU, running a Linux machine with an NVIDIA GPU.

Examples
--------
  nsan bench list
  nsan bench run uvm_bench -o stream -- --pattern stream --bytes 1GiB
  nsan bench run dl_bench --network resnet-50 -o resnet -- --allocator caching
  nsan bench sweep uvm_bench -o sweep --patterns stream,random --factors 0.5,0.8 -- --bytes 1GiB
"""

from __future__ import annotations

import argparse
import inspect
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nsan.cli import bench_device_check, bench_run, bench_sweep
from nsan.cli.arguments import add_verbosity
from nsan.cli.bench_arguments import ActionParser, add_compiler, teller
from nsan.cli.terminal import emit
from nsan.errors import NsanError, OutputExistsError, OutputWriteError
from nsan.tabular.text import json_text
from nsan.text import safe

if TYPE_CHECKING:
    from nsan.microbench.building import Build

_DRIVER: Final = Path("/sys/module/nvidia/version")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    actions = parser.add_subparsers(
        dest="action", metavar="ACTION", required=True, parser_class=ActionParser
    )
    raw = argparse.RawDescriptionHelpFormatter
    building = actions.add_parser(
        "build", help="compile the programs", description=_about(_build), formatter_class=raw
    )
    _add_build(building)
    listing = actions.add_parser(
        "list",
        help="what can be run, and what is ready here",
        description=_about(_list),
        formatter_class=raw,
    )
    listing.add_argument("--json", action="store_true", help="for machines")
    add_compiler(listing)
    for name, module, what in (
        ("run", bench_run, "run a program alone and under nsys"),
        ("sweep", bench_sweep, "run a program under each factor, allocator and hint"),
        ("device-check", bench_device_check, "for machines where nothing can be installed"),
    ):
        action = actions.add_parser(
            name, help=what, description=module.__doc__, formatter_class=raw
        )
        module.add_arguments(action)
        action.set_defaults(act=module.run)
    building.set_defaults(act=_build)
    listing.set_defaults(act=_list)


def _about(action: Callable[..., object]) -> str:
    return (inspect.getdoc(action) or "") + "\n"


def _add_build(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "programs", nargs="*", metavar="PROGRAM", help="default: all that can be compiled"
    )
    add_compiler(parser)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FOLDER", help="copy them there; default: the cache"
    )
    parser.add_argument("--force-overwrite", action="store_true", help="replace other files there")
    add_verbosity(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    status: int = args.act(args)
    return status


def _build(args: argparse.Namespace) -> int:
    """Compile the programs with CUDA's nvcc, each once; a second call compiles nothing.

    They are kept in the user's cache folder and found there by `nsan bench run`. For the GPU of this
    machine by default, or where there is none for every major one, which takes some minutes.
    """
    from nsan.microbench import building

    made = building.built(
        args.programs or list(building.PROGRAMS), arch=args.arch, nvcc=args.nvcc, tell=teller(args)
    )
    paths = made.values() if args.output is None else _copied(list(made.values()), args)
    emit("".join(f"{safe(path)}\n" for path in paths))
    return 0


def _copied(files: Sequence[Path], args: argparse.Namespace) -> list[Path]:
    """Copy what was built into a folder of the user's."""
    folder: Path = args.output
    places = [folder / file.name for file in files]
    for file, place in zip(files, places, strict=True):
        if os.path.lexists(place) and not args.force_overwrite and not _same(file, place):
            raise OutputExistsError(place)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, place in zip(files, places, strict=True):
            beside = place.with_name(f".{place.name}.{os.getpid()}.part")
            try:
                shutil.copy2(file, beside)
                beside.replace(place)
            finally:
                beside.unlink(missing_ok=True)
    except OSError as error:
        raise OutputWriteError(folder, error.strerror or str(error)) from error
    return places


def _same(one: Path, other: Path) -> bool:
    import filecmp

    return other.is_file() and filecmp.cmp(one, other, shallow=False)


def _list(args: argparse.Namespace) -> int:
    """Say what can be run, with which values of each axis, and what of it is ready on this machine."""
    document = _document(args)
    emit(json_text(document) if args.json else _text(document))
    return 0


def _document(args: argparse.Namespace) -> dict[str, Any]:
    from nsan.microbench import building
    from nsan.microbench.catalog import (
        ADVICES,
        ALLOCATORS,
        EXIT_STATUSES,
        PATTERNS,
        PREFETCHES,
        SCRIPTS,
    )
    from nsan.model.workloads import NETWORKS

    plan: Build | None = None
    missing: list[str] = []
    try:
        plan = building.planned(arch=args.arch, nvcc=args.nvcc)
    except NsanError as error:
        missing.append(str(error).splitlines()[0])
    tools = _tools(plan, missing)
    return {
        "schema": 1,
        "programs": {**building.PROGRAMS, **SCRIPTS},
        "patterns": dict(PATTERNS),
        "networks": {name: each.description for name, each in NETWORKS.items()},
        "allocators": dict(ALLOCATORS),
        "prefetches": dict(PREFETCHES),
        "advices": dict(ADVICES),
        "exit_statuses": {str(number): what for number, what in EXIT_STATUSES.items()},
        "built": [
            program
            for program in building.PROGRAMS
            if plan is not None and plan.path_of(program).is_file()
        ],
        "tools": tools,
        "ready": not missing,
        "missing": missing,
    }


def _tools(plan: Build | None, missing: list[str]) -> dict[str, str | None]:
    """Look for what running needs; add what is not there to a list, with the way out."""
    from nsan.io import nsys_cli
    from nsan.nsys_errors import NsysError

    driver = nsys = None
    with suppress(OSError):
        driver = _DRIVER.read_text(encoding="utf-8", errors="replace").strip()
    if driver is None:
        missing.append(
            "The NVIDIA driver is not loaded: there is no GPU here, or no driver for it. Programs can be built, "
            "not run; `nsan bench device-check --pack` takes them to another machine."
        )
    try:
        program = nsys_cli.find_nsys()
        nsys = nsys_cli.version_of(program) if program is not None else None
        if nsys is None:
            missing.append(
                "nsys is not found: install Nsight Systems, set NSYS, or run with --no-nsys."
            )
    except NsysError as error:
        missing.append(str(error))
    return {
        "nvcc": None if plan is None else plan.compiler.version,
        "arch": None if plan is None else plan.arch,
        "driver": driver,
        "nsys": nsys,
        "torch": _version_of("torch"),
    }


def _version_of(package: str) -> str | None:
    """Look which version of a package this Python has; another one may be named with --python."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _text(document: dict[str, Any]) -> str:
    titles = {
        "programs": "programs",
        "patterns": "patterns of uvm_bench (--pattern)",
        "networks": "networks for dl_bench (--network)",
        "allocators": "--allocator",
        "prefetches": "--prefetch",
        "advices": "--advice",
    }
    width = max(len(name) for key in titles for name in document[key])
    blocks = [
        "\n".join(
            [f"{title}:", *(f"  {name:<{width}}  {text}" for name, text in document[key].items())]
        )
        for key, title in titles.items()
    ]
    tools = document["tools"]
    here = [
        f"  {name:<{width}}  {safe(tools[name] or 'not found')}"
        for name in ("nvcc", "driver", "nsys", "torch")
    ]
    here.append(f"  {'built':<{width}}  {', '.join(document['built']) or 'nothing yet'}")
    blocks.append("\n".join(["here:", *here]))
    state = ["Ready."] if document["ready"] else [f"- {safe(line)}" for line in document["missing"]]
    return "\n\n".join([*blocks, "\n".join(state)]) + "\n"
