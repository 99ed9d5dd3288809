"""Compare the driver model with real captures, and print two Markdown tables.

The first states programs of public nsys captures and sets the model's rows against what those captures
hold; the second does so for the hotspot traces of an older profiler, which have GPU fault rows.
Nothing is fitted here: GPUs and hosts are the model's profiles, the same for every size.

    python -m benchmarks.calibration [--nvprof FOLDER]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final

import polars as pl

import nsan
from nsan.model.access import Stream
from nsan.model.happened import Happened
from nsan.model.machine import run
from nsan.model.program import (
    Allocate,
    HostTouch,
    Kernel,
    Launch,
    Prefetch,
    Program,
    Synchronize,
)
from nsan.model.recording import BASE_VA, record
from nsan.model.settings import Settings
from nsan.model.workloads.patterns import ONE_THREAD_NS_PER_MIB, hotspot, vector_add
from nsan.units import KIB, MIB
from nsan.uvm.constants import VA_BLOCK_BYTES

NVPROF: Final = Path(__file__).parents[1] / "tests" / "data" / "nvprof"

PAGE: Final = 4 * KIB
USER, FAULT, AHEAD = "user", "coherence", "prefetch"

SERVICES: Final = tuple(
    (KIB * start, KIB * size)
    for start, size in ((0, 64), (64, 64), (128, 128), (256, 256), (512, 512), (1024, 1024))
)
"""Where a walk through a block faults, and how much then moves: its page, and the rest in a second row."""

Copy = tuple[int, int, str]
"""Address from the lowest array on, bytes, cause."""


@dataclass(frozen=True)
class Capture:
    """Real captures of one program, by what was counted in them.

    Attributes
    ----------
    name : str
        Short names of the captures.
    level : str
        "A": all rows and their order; "B": all rows, order nearly; "E": totals only.
    program : Program
        What ran.
    settings : Settings
        GPU and host.
    htod, dtoh : (int, int)
        Rows and bytes.
    n_batches : int
        Batches that moved pages, of one capture; the mean where there are several.
    kernel_ms : tuple of float
        The shortest and the longest kernel; of captures by one thread only the extremes of all eight
        are known.
    stands_for : str, optional
        The machine, where there is no profile of it.
    faulted_share, pages_per_batch : float, optional
        Share of the pages that faulted, and median of those in a batch; level E only.
    """

    name: str
    level: str
    program: Program
    settings: Settings
    htod: tuple[int, int]
    dtoh: tuple[int, int]
    n_batches: int
    kernel_ms: tuple[float, ...] = ()
    stands_for: str = ""
    faulted_share: float = 0.0
    pages_per_batch: float = 0.0


def _copy_program(*, output_on_gpu: bool = False) -> Program:
    """Copy one array of 16 MiB into another; the output is prefetched too, or made by the GPU."""
    threads = 1 if output_on_gpu else 256
    compute = ONE_THREAD_NS_PER_MIB if output_on_gpu else 200_000.0
    streams = (Stream(allocation="in"), Stream(allocation="out", write=True))
    before = () if output_on_gpu else (HostTouch("out", write=True), Prefetch("out"))
    return Program(
        "copy",
        (
            Allocate("in", 16 * MIB),
            Allocate("out", 16 * MIB),
            HostTouch("in", write=True),
            Prefetch("in"),
            *before,
            Launch(Kernel("copy", 1, threads, streams, compute_ns_per_mib=compute)),
            Synchronize(),
            HostTouch("out"),
        ),
    )


def _add(mib: int, grid: int, threads: int = 256, *, prefetch: str = "none") -> Program:
    """Add two arrays; the second of large ones lies lower, as in the captures."""
    return vector_add(mib * MIB, grid, threads=threads, prefetch=prefetch, descending=mib >= 256)


A100: Final = Settings(gpu="a100-sxm4-40gb", host="epyc-7763")
PCIE: Final = Settings(gpu="a100-pcie", host="epyc-7713")
RTX_3060: Final = Settings(gpu="rtx-3060", host="desktop")
RTX_4060: Final = Settings(gpu="rtx-4060-laptop", host="desktop")

CAPTURES: Final = tuple(
    Capture(name, level, program, settings, htod, dtoh, *more)
    for name, level, program, settings, htod, dtoh, *more in (
        ("V", "A", _add(4, 1), RTX_4060, (48, 8 * MIB), (24, 4 * MIB), 12, (2.34,)),
        ("H", "A", _add(4, 1), RTX_3060, (48, 8 * MIB), (24, 4 * MIB), 12, (5.99,), "RTX 2080 Ti on a slow link"),
        ("G4-G21", "A", vector_add(512, 1, threads=128), RTX_3060, (2, 64 * KIB), (2, 64 * KIB), 1, (0.08, 0.26)),
        ("S1 S6 L1", "A", _add(256, 1, 1), A100, (3072, 512 * MIB), (1536, 256 * MIB), 768, (6252.0,)),
        ("I1-I3", "A", _add(1024, 1, 1), A100, (12_288, 2048 * MIB), (6144, 1024 * MIB), 3072),
        ("C1", "A", _add(2048, 1, 1), PCIE, (24_576, 4096 * MIB), (12_288, 2048 * MIB), 6144, (51_544.0,)),
        ("C2", "A", _add(2048, 1, 1), A100, (24_576, 4096 * MIB), (12_288, 2048 * MIB), 6144, (51_544.0,), "A100-SXM4-80GB"),
        ("S5", "A", _add(256, 262_144, prefetch="ahead"), A100, (256, 512 * MIB), (1536, 256 * MIB), 0, (0.60,)),
        ("L4", "A", _add(256, 1, prefetch="ahead"), A100, (256, 512 * MIB), (1536, 256 * MIB), 0, (130.9,)),
        ("J4", "A", _add(2048, 1, prefetch="ahead"), A100, (2048, 4096 * MIB), (12_288, 2048 * MIB), 0),
        ("C6", "A", _add(2048, 1, prefetch="ahead"), PCIE, (2048, 4096 * MIB), (12_288, 2048 * MIB), 0),
        ("C7", "A", _add(2048, 1, prefetch="ahead"), A100, (2048, 4096 * MIB), (12_288, 2048 * MIB), 0, (), "A100-SXM4-80GB"),
        ("W1 W2", "A", _copy_program(), RTX_3060, (16, 32 * MIB), (96, 16 * MIB), 0, (), "RTX 3080"),
        ("W3", "A", _copy_program(output_on_gpu=True), RTX_3060, (8, 16 * MIB), (96, 16 * MIB), 0, (), "RTX 3080"),
        ("S2 L2 L3", "B", _add(256, 1), A100, (3072, 512 * MIB), (1536, 256 * MIB), 773, (181.0, 184.0)),
        ("I4 I5", "B", _add(1024, 1), PCIE, (12_288, 2048 * MIB), (6144, 1024 * MIB), 3086, (1264.0, 1311.0)),
        ("C3", "B", _add(2048, 1), A100, (24_576, 4096 * MIB), (12_288, 2048 * MIB), 6173, (1997.0,), "A100-SXM4-80GB"),
        ("S4", "E", _add(256, 262_144), A100, (19_766, 512 * MIB), (1536, 256 * MIB), 434, (113.7,), "", 0.164, 47.5),
        ("G1", "E", _add(4, 4096), RTX_3060, (78, 8 * MIB), (24, 4 * MIB), 12, (1.87,), "", 0.107, 19.0),
    )
)  # fmt: skip
"""Programs of calibration.md 6 that its tables state; grids of prefetched ones are free (1 taken)."""


def capture(name: str) -> Capture:
    """Find a capture by its short name."""
    return next(c for c in CAPTURES if c.name == name)


@dataclass(frozen=True, repr=False)
class Run:
    """A modelled run: what happened, the trace of it, and the machine."""

    happened: Happened
    tables: dict[str, pl.DataFrame]
    settings: Settings

    def copies(self, direction: str) -> list[Copy]:
        """List the copies of one direction in order of start."""
        return copies(self.tables["migrations"], BASE_VA, direction)

    @property
    def n_moving_batches(self) -> int:
        """Count the batches that moved pages."""
        batches = self.happened.log["copies"].filter(pl.col("batch") >= 0)["batch"]
        return batches.n_unique()

    @property
    def kernel_ms(self) -> float:
        """Sum the times of the kernels."""
        return _kernel_ms(self.tables)

    @property
    def faulted_pages(self) -> pl.Series:
        """Count the pages that faults brought, batch by batch."""
        brought = self.happened.log["copies"].filter(pl.col("dst") > 0, pl.col("cause") == 2)
        return brought.group_by("batch").agg(pl.col("n_pages").sum())["n_pages"]


@cache
def modelled(program: Program, settings: Settings) -> Run:
    """Run a program, once."""
    happened = run(program, settings)
    return Run(happened, record(happened, settings, program.name), settings)


def copies(migrations: pl.DataFrame, base: int, direction: str) -> list[Copy]:
    """List the copies of one direction of a trace, in its order."""
    chosen = migrations.filter(pl.col("direction") == direction)
    offsets = chosen["va"].cast(pl.Int64) - base
    return list(zip(offsets, chosen["bytes"], chosen["cause"].cast(pl.String), strict=True))


def _walk(starts: list[int], n_blocks: int) -> Iterator[Copy]:
    """Fault through arrays side by side: in each service the lower array goes first."""
    for block in range(n_blocks):
        for offset, size in SERVICES:
            for start in starts:
                at = start + block * VA_BLOCK_BYTES + offset
                yield at, PAGE, FAULT
                yield at + PAGE, size - PAGE, AHEAD


def expected_copies(of: Capture) -> tuple[list[Copy], list[Copy]]:
    """Give the rows of a level A or B capture by the rule of calibration.md 6.

    The next fault is the first absent page of each array, the lower one first. Prefetched arrays move
    in rows of 2 MiB in order of the calls. The host faults its way through the array it reads.
    """
    sizes = [op.n_bytes for op in of.program.operations if isinstance(op, Allocate)]
    if sizes[0] < VA_BLOCK_BYTES:  # both in one page
        rows = [(0, PAGE, FAULT), (PAGE, 15 * PAGE, AHEAD)]
        return rows, rows
    n_blocks = sizes[0] // VA_BLOCK_BYTES
    ahead = [op.allocation for op in of.program.operations if isinstance(op, Prefetch)]
    first, second = (sizes[0], 0) if of.program.descending else (0, sizes[0])
    back = list(_walk([second], n_blocks))
    if not ahead:
        return list(_walk([0, sizes[0]], n_blocks)), back
    starts = [first, second][: len(ahead)]
    moved = [
        (s + b * VA_BLOCK_BYTES, VA_BLOCK_BYTES, USER) for s in starts for b in range(n_blocks)
    ]
    return moved, back


# The hotspot traces ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hotspot:
    """One hotspot trace, and the facts of the run that are no parameters of the driver.

    Attributes
    ----------
    host : str
        "x86" or "p9".
    n : int
        Rows and columns.
    first_read_us : int
        From the launch to the host's first read of the result. In the trace it is the first CPU fault
        after the launch. Only in the smallest run on x86 that comes too late: the result shares its
        64 KiB with the inputs, so the host reads pages that are still its own; its second page, 0.7 ms
        of printing after the first, faults 1.1 ms after the launch.
    contended : bool
        The host reads a page before the GPU is done with it, so that who has it when is a race.
    order : tuple of str
        Arrays, lowest first.
    """

    host: str
    n: int
    first_read_us: int
    contended: bool = False
    order: tuple[str, ...] = ("temperature", "power", "result")

    @property
    def log(self) -> str:
        """Name of the trace."""
        return f"v100_{self.host}_hotspot_11_{self.n}.log.gz"

    @property
    def settings(self) -> Settings:
        """The machine, the same for all sizes."""
        host = {"x86": "v100-x86", "p9": "power9"}[self.host]
        return Settings(gpu="v100-sxm2-16gb", host=host)

    @property
    def program(self) -> Program:
        """The program, with its arrays where they lay."""
        program = hotspot(self.n, host_delay_ns=1000 * self.first_read_us)
        rest = [op for op in program.operations if not isinstance(op, Allocate)]
        arrays = [Allocate(name, 4 * self.n * self.n) for name in self.order]
        return replace(program, operations=(*arrays, *rest))


_DOWN: Final = ("result", "power", "temperature")

HOTSPOTS: Final = (
    Hotspot("x86", 64, 300, contended=True),
    Hotspot("x86", 128, 50, contended=True),
    Hotspot("x86", 256, 70, contended=True),
    Hotspot("x86", 512, 180, contended=True),
    Hotspot("x86", 1024, 610, contended=True),
    Hotspot("x86", 2048, 3350, contended=True, order=("result", "temperature", "power")),
    Hotspot("x86", 4096, 13_500, order=_DOWN),
    Hotspot("x86", 8192, 40_400, order=_DOWN),
    Hotspot("p9", 64, 3800),
    Hotspot("p9", 128, 1270),
    Hotspot("p9", 256, 1270),
    Hotspot("p9", 512, 1750),
    Hotspot("p9", 1024, 1700, contended=True),
    Hotspot("p9", 2048, 4200),
    Hotspot("p9", 4096, 2600),
    Hotspot("p9", 8192, 7100),
)


def real_tables(log: Path, folder: Path) -> dict[str, pl.DataFrame]:
    """Read a trace with nsan; its store goes into a folder."""
    trace = nsan.open_trace(nsan.import_trace(log, folder / log.name))
    names = ("gpu_faults", "cpu_faults", "migrations", "driver_events", "kernels", "allocations")
    return {name: getattr(trace, name).collect() for name in names}


def result_of(tables: Mapping[str, pl.DataFrame], which: int = 2) -> tuple[int, int]:
    """Give the half-open range of the array that only the GPU writes: the third that was allocated."""
    row = tables["allocations"].row(which, named=True)
    return row["va"], row["va"] + row["bytes"]


def figures(tables: Mapping[str, pl.DataFrame], result: tuple[int, int]) -> dict[str, float]:
    """Count what the second table shows, in a trace that is real or modelled."""
    faults, moves = tables["gpu_faults"], tables["migrations"]
    into = moves.filter(pl.col("direction") == "htod")
    back = moves.filter(pl.col("direction") == "dtoh")
    again = pl.struct("va", "n_page_faults")
    return {
        "HtoD MiB": into["bytes"].sum() / MIB,
        "DtoH MiB": back["bytes"].sum() / MIB,
        "fault rows": faults.height,
        "other than repeats": faults.height - faults.filter(again == again.shift(1)).height,
        "in the result": faults.filter(pl.col("va").is_between(*result, closed="left")).height,
        "HtoD rows": into.height,
        "DtoH rows": back.height,
        "CPU faults": tables["cpu_faults"].height,
        "thrash rows": tables["driver_events"].filter(pl.col("kind") == "thrashing").height,
        "kernel ms": _kernel_ms(tables),
        "pages to and fro": _returned(moves),
    }


def modelled_figures(case: Hotspot) -> dict[str, float]:
    """Count the same in the model's trace."""
    run_ = modelled(case.program, case.settings)
    return figures(run_.tables, result_of(run_.tables, case.order.index("result")))


def _kernel_ms(tables: Mapping[str, pl.DataFrame]) -> float:
    kernels = tables["kernels"]
    return float((kernels["end_ns"] - kernels["start_ns"]).sum() / 1e6)


def _returned(moves: pl.DataFrame) -> int:
    """Count trips of pages of 4 KiB to the GPU after they had left it for the host."""
    first = pl.col("va").cast(pl.Int64) // PAGE
    pages = moves.select("direction", page=pl.int_ranges(first, first + pl.col("bytes") // PAGE))
    came_back = (pl.col("direction") == "dtoh").cum_max().over("page")
    return pages.explode("page").filter(came_back, pl.col("direction") == "htod").height


# Printing ----------------------------------------------------------------------------------------


def _print_table(rows: list[tuple[str, ...]]) -> None:
    for row in (rows[0], ("---",) * len(rows[0]), *rows[1:]):
        print("| " + " | ".join(row) + " |")
    print()


def _number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:.4g}"


def _pair(real: float, model: float) -> str:
    if real == model:
        return f"**{_number(real)}**"
    ratio = f" ({model / real:.2f})" if real else ""
    return f"{_number(real)} / {_number(model)}{ratio}"


def _verdict(of: Capture, run_: Run) -> str:
    """Compare rows one by one, where the capture's are known."""
    back = "DtoH equal" if run_.copies("dtoh") == expected_copies(of)[1] else "DtoH **differs**"
    if of.level == "E":
        share = run_.faulted_pages.sum() * PAGE / of.htod[1]
        return (
            f"{back}; faulted share {of.faulted_share:.1%} / {share:.1%}; pages per batch "
            f"{_pair(of.pages_per_batch, float(run_.faulted_pages.median()))}"
        )
    mine, theirs = run_.copies("htod"), expected_copies(of)[0]
    if mine == theirs and back == "DtoH equal":
        return "yes" if of.level == "A" else "multiset yes; order that of the rule"
    return f"HtoD multiset {'equal' if sorted(mine) == sorted(theirs) else '**differs**'}, {back}"


def _capture_row(of: Capture) -> tuple[str, ...]:
    run_ = modelled(of.program, of.settings)
    into, back = run_.copies("htod"), run_.copies("dtoh")
    times = "-"
    if of.kernel_ms:
        real = "-".join(_number(ms) for ms in of.kernel_ms)
        middle = sum(of.kernel_ms) / len(of.kernel_ms)
        times = f"{real} / {_number(run_.kernel_ms)} ({run_.kernel_ms / middle:.2f})"
    profile = f"{of.settings.gpu}, {of.settings.host}"
    return (
        of.name,
        of.level,
        f"{profile} for {of.stands_for}" if of.stands_for else profile,
        _pair(of.htod[0], len(into)),
        _pair(of.dtoh[0], len(back)),
        _pair(of.htod[1] / MIB, sum(size for _, size, _ in into) / MIB),
        _pair(of.dtoh[1] / MIB, sum(size for _, size, _ in back) / MIB),
        _pair(of.n_batches, run_.n_moving_batches),
        _verdict(of, run_),
        times,
    )


def _print_captures() -> None:
    print("Captures / model (model/capture); equal figures in bold, printed once.\n")
    head = ("captures", "level", "profiles", "HtoD rows", "DtoH rows", "HtoD MiB", "DtoH MiB")
    head += ("batches", "every row and their order equal", "kernel ms")
    _print_table([head, *(_capture_row(of) for of in CAPTURES)])
    print("Errors that the profiles state:\n")
    used = [of.settings for of in CAPTURES] + [case.settings for case in HOTSPOTS]
    profiles = [p for s in used for p in (s.gpu_profile, s.host_profile)]
    for profile in dict.fromkeys(profiles):
        print(f"- {profile.name}: {profile.error} ({profile.source})")
    print()


def _print_hotspots(logs: Path) -> None:
    rows: list[tuple[str, ...]] = []
    exact, off = [], []
    with tempfile.TemporaryDirectory(prefix="nsan-calibration-") as folder:
        for case in HOTSPOTS:
            tables = real_tables(logs / case.log, Path(folder))
            real, model = figures(tables, result_of(tables)), modelled_figures(case)
            name = f"{case.host} {case.n}"
            if not rows:
                rows.append(("host, N", "contended", *real))
            contended = "yes" if case.contended else "no"
            rows.append((name, contended, *(_pair(real[k], model[k]) for k in real)))
            pages = [round((model[k] - real[k]) * MIB / PAGE) for k in ("HtoD MiB", "DtoH MiB")]
            if pages == [0, 0]:
                exact.append(name)
            else:
                off.append(f"{name} {pages[0]:+d} / {pages[1]:+d}")
    print("Hotspot, real / model (model/real); equal figures in bold, printed once.\n")
    _print_table(rows)
    print(f"HtoD and DtoH bytes exact: {', '.join(exact)}.")
    print(f"Pages of 4 KiB by which the model differs, HtoD / DtoH: {', '.join(off)}.")


def main() -> None:
    """Run all programs and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--nvprof", type=Path, default=NVPROF, metavar="FOLDER", help="where the hotspot traces are"
    )
    args = parser.parse_args()
    _print_captures()
    _print_hotspots(args.nvprof)


if __name__ == "__main__":
    main()
