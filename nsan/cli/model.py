"""Make traces with known truth: run a program on a software model of the UVM driver.

No GPU is needed. The model is checked against real captures; what it makes says everywhere that it is
modelled and not recorded. FOLDER gets FOLDER.sqlite, an export that nsan and nsys tools open, the
truth as Parquet tables in truth/, and model.json, which says how it was made.

Examples
--------
  nsan model list
  nsan model run sweep --oversubscription-factor 1.5 -o sweep15
  nsan model run stream --prefetch ahead --size 256MiB -o ahead && nsan ahead/ahead.sqlite
  nsan model run gpt2-small --allocator raw --oversubscription-factor 1.5 -o gpt2
  nsan model sweep gpt2-small --factors 0.9,1.25,1.5,2 --hints none,prefetch -o sweep
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsan.cli import model_sweep
from nsan.cli.arguments import add_verbosity, show_progress
from nsan.cli.model_arguments import (
    add_driver,
    add_training,
    count,
    driver_settings,
    tell_of_compiling,
    training,
)
from nsan.cli.terminal import complain, emit
from nsan.errors import UsageError
from nsan.model import check_installed
from nsan.tabular.text import json_text
from nsan.units import format_bytes, format_count, parse_size

if TYPE_CHECKING:
    from nsan.model.making import Recipe
    from nsan.model.origin import Origin
    from nsan.model.settings import Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    raw = argparse.RawDescriptionHelpFormatter
    listing = actions.add_parser(
        "list", help="workloads, GPUs and hosts there are", formatter_class=raw
    )
    listing.add_argument("--json", action="store_true", help="for machines")
    samples = actions.add_parser(
        "samples", help="make the modelled traces of sample_data again", formatter_class=raw
    )
    samples.add_argument("-o", "--output", type=Path, metavar="FOLDER", required=True)
    samples.add_argument("--force-overwrite", action="store_true", help="replace earlier ones")
    add_verbosity(samples)
    making = actions.add_parser(
        "run", help="run a workload and write its trace", description=__doc__, formatter_class=raw
    )
    _add_program(making)
    _add_network(making)
    _add_capacity(making)
    add_driver(making)
    _add_recording(making)
    making.add_argument(
        "-o", "--output", type=Path, metavar="FOLDER", required=True, help="where the files go"
    )
    making.add_argument("--force-overwrite", action="store_true", help="replace an earlier run")
    making.add_argument("--json", action="store_true", help="write model.json to stdout")
    add_verbosity(making)
    sweeping = actions.add_parser(
        "sweep",
        help="train a network under each factor, allocator and hint",
        description=model_sweep.__doc__,
        formatter_class=raw,
    )
    model_sweep.add_arguments(sweeping)


def _add_program(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("program")
    group.add_argument("workload", metavar="WORKLOAD", help="a name that `nsan model list` shows")
    group.add_argument(
        "--size",
        type=parse_size,
        help="managed memory in all, default 64MiB; a network has its own",
    )
    group.add_argument(
        "--iterations", type=count, metavar="N", help="steps, default 1, of a network 2"
    )
    group.add_argument(
        "--prefetch",
        choices=("none", "ahead", "late", "back"),
        help="user prefetches: before the kernel, after its launch, or before it and back to the CPU",
    )
    group.add_argument(
        "--gpus", type=count, metavar="N", help="GPUs; what the workload needs by default"
    )


def _add_network(parser: argparse.ArgumentParser) -> None:
    group = add_training(parser)
    group.add_argument(
        "--allocator",
        metavar="NAME",
        help="raw or caching (default); caching:release+drop takes mechanisms away: `nsan model list`",
    )
    group.add_argument(
        "--hint",
        action="append",
        default=[],
        metavar="KIND[:ROLES]",
        help="prefetches or advice for tensors, as prefetch:parameter+optimizer; repeatable; kinds and "
        "roles: `nsan model list`",
    )


def _add_capacity(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("GPU memory")
    group.add_argument(
        "--oversubscription-factor",
        type=float,
        metavar="F",
        help="footprint over GPU memory: 1.5 leaves two thirds of the room; of a network the "
        "footprint is the peak of its live tensors, so that allocators get the same memory",
    )
    group.add_argument("--capacity", type=parse_size, help="GPU memory for managed pages")


def _add_recording(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("recording")
    group.add_argument(
        "--schema", default="3.7.2", help="2.9.1, 3.0.0, 3.7.2 (default), 3.17 or 3.25"
    )
    group.add_argument("--all-tables", action="store_true", help="also empty ones (--lazy=false)")
    group.add_argument("--no-gpu-faults", action="store_true", help="switch off")
    group.add_argument("--no-cpu-faults", action="store_true", help="switch off")
    group.add_argument("--no-memory-usage", action="store_true", help="switch off")
    group.add_argument("--shuffle-rows", action="store_true", help="rows of a table in any order")
    group.add_argument(
        "--fault-rows",
        choices=("batch", "page", "block"),
        default="batch",
        help="what one fault row is; real ones are batches",
    )
    group.add_argument("--jitter", type=_time, default=0, help="late ends of fault rows, up to")
    group.add_argument("--lost", type=_time, default=0, help="rows lost after 8192, for how long")
    group.add_argument("--skew", type=_time, default=0, help="CPU clock ahead by")
    group.add_argument("--drift", type=float, default=0.0, metavar="PPM", help="and ever more so")


def _time(text: str) -> int:
    from nsan.units import parse_time

    return parse_time(text)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.action == "list":
        emit(_listing(as_json=args.json))
        return 0
    check_installed()
    if args.action == "samples":
        return _samples(args)
    if args.action == "sweep":
        tell_of_compiling(args)
        return model_sweep.run(args)
    from nsan.model.making import make

    recipe = _recipe(args)
    tell_of_compiling(args)
    n_operations = len(recipe.program.operations)
    with _progress_bar(n_operations, args.workload, show=show_progress(args)) as tell:
        about = make(recipe, args.output, overwrite=args.force_overwrite, progress=tell)
    emit(json_text(about) if args.json else _account(about, args.output))
    return 0


def _samples(args: argparse.Namespace) -> int:
    from nsan.model.samples import make_samples

    tell = None if args.quiet else complain
    hashes = make_samples(args.output, overwrite=args.force_overwrite, tell=tell)
    emit("".join(f"{args.output / name}\n" for name in hashes))
    return 0


def _recipe(args: argparse.Namespace) -> Recipe:
    from nsan.model.making import Recipe, check_factor, oversubscribed, peak_bytes
    from nsan.model.nsys_export import ExportOptions
    from nsan.model.recording import Style

    if args.capacity is not None and args.oversubscription_factor is not None:
        msg = "--capacity and --oversubscription-factor say the same thing: give one of them."
        raise UsageError(msg)
    settings, origin = _origin(args)
    program, placed = origin.made(settings)
    if args.oversubscription_factor is not None:
        footprint = peak_bytes(program) if placed is None else placed.peak_tensor_bytes
        settings = oversubscribed(settings, footprint, args.oversubscription_factor)
        check_factor(settings, footprint, args.oversubscription_factor)
    style = Style(args.fault_rows, args.jitter, args.lost, args.skew, args.drift, args.seed)
    options = ExportOptions(
        schema=args.schema,
        lazy=not args.all_tables,
        gpu_faults=not args.no_gpu_faults,
        cpu_faults=not args.no_cpu_faults,
        memory_usage=not args.no_memory_usage,
        shuffle_seed=args.seed if args.shuffle_rows else None,
    )
    return Recipe(program, settings, style, options, placed, origin)


def _origin(args: argparse.Namespace) -> tuple[Settings, Origin]:
    """Find the workload, and refuse options that mean nothing to it."""
    from nsan.model.origin import Built, Trained
    from nsan.model.size import Size
    from nsan.model.workloads import NETWORKS, workload

    if args.workload in NETWORKS:
        _refuse(args, "size", "prefetch", "gpus")
        settings = driver_settings(args)
        how = training(args, args.allocator or "caching", args.hint, args.iterations)
        return settings, Trained(args.workload, how)
    _refuse(args, "batch", "sequence", "image", "varying", "allocator", "hint")
    chosen = workload(args.workload)
    n_gpus = args.gpus or chosen.gpus
    size = Size(
        args.size or Size.n_bytes, args.iterations or 1, args.prefetch or "none", n_gpus, args.seed
    )
    return driver_settings(args, n_gpus), Built(chosen.name, size)


def _refuse(args: argparse.Namespace, *names: str) -> None:
    for name in names:
        if getattr(args, name):
            msg = f"--{name} means nothing to the workload {args.workload!r}: leave it out."
            raise UsageError(msg)


@contextmanager
def _progress_bar(total: int, name: str, *, show: bool) -> Iterator[Callable[[int, int], None]]:
    """Count operations of the program on a bar on stderr."""
    if not show:
        yield lambda _operations, _batches: None
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, unit=" operations", desc=f"model {name}", leave=False) as bar:

        def tell(operations: int, batches: int) -> None:
            bar.n = operations
            bar.set_postfix_str(f"{format_count(batches)} batches")

        yield tell


def _account(about: dict[str, Any], folder: Path) -> str:
    """Say what was made."""
    from nsan.model.making import SNAPSHOT, export_name

    rows = about["rows"]
    facts = about["truth"]
    allocator = about.get("allocator")
    tensors = of_tensors = ""
    if allocator:
        tensors = f"{format_bytes(allocator['peak_tensor_bytes'])} of tensors, "
        of_tensors = f", of the tensors {allocator['tensor_oversubscription_factor']:.2f}"
    lines = [
        f"modelled: {about['program']} on {about['profiles']['gpu']['description']}",
        f"  {tensors}{format_bytes(about['peak_managed_bytes'])} managed, "
        f"{format_bytes(about['capacity_bytes'])} of GPU memory for it: "
        f"oversubscription factor {about['oversubscription_factor']:.2f}{of_tensors}",
        f"  {format_count(rows.get('gpu_faults', 0))} GPU fault rows, "
        f"{format_count(rows.get('migrations', 0))} migrations, "
        f"{format_count(facts['evictions']['rows'])} evictions, "
        f"{format_count(facts['refaults']['rows'])} refaults",
        f"  times: host {about['settings']['host']}, {about['profiles']['host']['error']}",
        f"{folder / export_name(folder)}",
        *([f"{folder / SNAPSHOT}"] if allocator else []),
    ]
    return "\n".join(lines) + "\n"


def _listing(*, as_json: bool) -> str:
    check_installed()
    from nsan.model.hints import HINTS
    from nsan.model.networks.tensors import ROLES
    from nsan.model.placing import ALLOCATORS, SWITCHES
    from nsan.model.profiles import GPUS, HOSTS
    from nsan.model.workloads import NETWORKS, WORKLOADS

    tables = {
        "workloads": {name: item.description for name, item in WORKLOADS.items()},
        "networks": {name: item.description for name, item in NETWORKS.items()},
        "allocators": ALLOCATORS,
        "switches": {f"caching:{name}": text for name, text in SWITCHES.items()},
        "hints": {**HINTS, "ROLES": " ".join(ROLES)},
        "GPUs": {name: item.description for name, item in GPUS.items()},
        "hosts": {name: f"{item.description}; {item.error}" for name, item in HOSTS.items()},
    }
    if as_json:
        return json_text(tables)
    width = max(len(name) for table in tables.values() for name in table)
    blocks = [
        "\n".join([f"{title}:", *(f"  {name:<{width}}  {text}" for name, text in table.items())])
        for title, table in tables.items()
    ]
    return "\n\n".join(blocks) + "\n"
