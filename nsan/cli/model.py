"""Make traces with known truth: run a program on a software model of the UVM driver.

No GPU is needed. The model is checked against real captures; what it makes says everywhere that it is
modelled and not recorded. FOLDER gets FOLDER.sqlite, an export that nsan and nsys tools open, the
truth as Parquet tables in truth/, and model.json, which says how it was made.

Examples
--------
  nsan model list
  nsan model run sweep --oversubscription-factor 1.5 -o sweep15
  nsan model run stream --prefetch ahead --size 256MiB -o ahead && nsan ahead/ahead.sqlite
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsan.cli.arguments import add_verbosity, show_progress
from nsan.cli.render import complain, emit, json_text
from nsan.errors import ExtraMissingError, UsageError
from nsan.units import format_bytes, format_count, parse_size

if TYPE_CHECKING:
    from nsan.model.making import Recipe


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
    _add_driver(making)
    _add_recording(making)
    making.add_argument(
        "-o", "--output", type=Path, metavar="FOLDER", required=True, help="where the files go"
    )
    making.add_argument("--force-overwrite", action="store_true", help="replace an earlier run")
    making.add_argument("--json", action="store_true", help="write model.json to stdout")
    add_verbosity(making)


def _add_program(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("program")
    group.add_argument("workload", metavar="WORKLOAD", help="a name that `nsan model list` shows")
    group.add_argument(
        "--size", type=parse_size, default="64MiB", help="managed memory in all, default 64MiB"
    )
    group.add_argument("--iterations", type=_count, default=1, metavar="N", help="steps, default 1")
    group.add_argument(
        "--prefetch",
        choices=("none", "ahead", "late", "back"),
        default="none",
        help="user prefetches: before the kernel, after its launch, or before it and back to the CPU",
    )
    group.add_argument(
        "--gpus", type=_count, metavar="N", help="GPUs; what the workload needs by default"
    )
    group.add_argument("--seed", type=int, default=1, help="all that is random follows from it")


def _add_driver(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("machine and driver")
    group.add_argument("--gpu", default="a100-sxm4-40gb", metavar="NAME", help="GPU profile")
    group.add_argument("--host", default="epyc-7763", metavar="NAME", help="host profile")
    group.add_argument(
        "--oversubscription-factor",
        type=float,
        metavar="F",
        help="footprint over GPU memory: 1.5 leaves two thirds of the room",
    )
    group.add_argument("--capacity", type=parse_size, help="GPU memory for managed pages")
    group.add_argument("--no-prefetcher", action="store_true", help="density prefetcher off")
    group.add_argument("--prefetch-threshold", type=int, default=51, metavar="PERCENT")
    group.add_argument("--batch-size", type=_count, default=256, metavar="N", help="default 256")
    group.add_argument(
        "--no-thrashing-mitigation", action="store_true", help="let pages go to and fro"
    )
    group.add_argument("--no-peer", action="store_true", help="GPUs copy through the CPU")


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


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("take 1 or more")
    return number


def _time(text: str) -> int:
    from nsan.units import parse_time

    return parse_time(text)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.action == "list":
        emit(_listing(as_json=args.json))
        return 0
    _need_numba()
    if args.action == "samples":
        return _samples(args)
    from nsan.model.making import make

    recipe = _recipe(args)
    if not args.quiet and not _is_compiled():
        complain("compiling the model, once: about half a minute")
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


def _need_numba() -> None:
    from importlib.util import find_spec

    if find_spec("numba") is None:
        raise ExtraMissingError("The driver model", "numba", "model")


def _is_compiled() -> bool:
    from nsan.model.engine.jit import is_compiled

    return is_compiled()


def _recipe(args: argparse.Namespace) -> Recipe:
    from nsan.model.making import Recipe, oversubscribed
    from nsan.model.nsys_export import ExportOptions
    from nsan.model.recording import Style
    from nsan.model.settings import Settings
    from nsan.model.size import Size
    from nsan.model.workloads import workload

    if args.capacity is not None and args.oversubscription_factor is not None:
        msg = "--capacity and --oversubscription-factor say the same thing: give one of them."
        raise UsageError(msg)
    chosen = workload(args.workload)
    n_gpus = args.gpus or chosen.gpus
    program = chosen.build(Size(args.size, args.iterations, args.prefetch, n_gpus, args.seed))
    settings = Settings(
        gpu=args.gpu,
        host=args.host,
        n_gpus=n_gpus,
        capacity_bytes=args.capacity,
        prefetch=not args.no_prefetcher,
        prefetch_threshold=args.prefetch_threshold,
        batch_size=args.batch_size,
        thrashing=not args.no_thrashing_mitigation,
        peer=not args.no_peer,
        seed=args.seed,
    )
    if args.oversubscription_factor is not None:
        settings = oversubscribed(settings, program, args.oversubscription_factor)
    style = Style(args.fault_rows, args.jitter, args.lost, args.skew, args.drift, args.seed)
    options = ExportOptions(
        schema=args.schema,
        lazy=not args.all_tables,
        gpu_faults=not args.no_gpu_faults,
        cpu_faults=not args.no_cpu_faults,
        memory_usage=not args.no_memory_usage,
        shuffle_seed=args.seed if args.shuffle_rows else None,
    )
    return Recipe(program, settings, style, options)


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
    from nsan.model.making import export_name

    rows = about["rows"]
    facts = about["truth"]
    lines = [
        f"modelled: {about['program']} on {about['profiles']['gpu']['description']}",
        f"  {format_bytes(about['peak_managed_bytes'])} managed, "
        f"{format_bytes(about['capacity_bytes'])} of GPU memory for it",
        f"  {format_count(rows.get('gpu_faults', 0))} GPU fault rows, "
        f"{format_count(rows.get('migrations', 0))} migrations, "
        f"{format_count(facts['evictions']['rows'])} evictions, "
        f"{format_count(facts['refaults']['rows'])} refaults",
        f"  times: host {about['settings']['host']}, {about['profiles']['host']['error']}",
        f"{folder / export_name(folder)}",
    ]
    return "\n".join(lines) + "\n"


def _listing(*, as_json: bool) -> str:
    _need_numba()
    from nsan.model.profiles import GPUS, HOSTS
    from nsan.model.workloads import WORKLOADS

    tables = {
        "workloads": {name: item.description for name, item in WORKLOADS.items()},
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
