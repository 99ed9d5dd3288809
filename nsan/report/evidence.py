"""What the verdict stands on: a few figures of the summary and of analyses, null where not known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from nsan import waiting
from nsan.health import NVPROF_KINDS
from nsan.info import MODEL_KIND
from nsan.reading import in_flight, n_gpus
from nsan.report.sections.saying import worst
from nsan.uvm.constants import VA_BLOCK_BYTES

if TYPE_CHECKING:
    from nsan.advising import Advised
    from nsan.report.report import Report
    from nsan.waiting import Waited

FAULTS: Final = ("coherence", "prefetch")
"""Causes of what page faults brought: the pages themselves, and what the driver's prefetcher added."""


@dataclass(frozen=True)
class Held:
    """The GPU work that page faults held up longest.

    ``kind`` is that of ``exposed_ns``: derived from fault rows, else reconstructed from copies.
    """

    name: str
    time_ns: int
    exposed_ns: int
    in_bytes: int
    n_rows: int | None
    kind: str


@dataclass(frozen=True)
class Place:
    """The one of several places that moved most, and what all of them moved together.

    ``is_by_launch``: what the GPU did was laid to where it was launched, not to what the CPU did meanwhile.
    """

    name: str
    bytes: int
    all_bytes: int
    size_bytes: int | None = None
    is_guessed: bool = False
    is_by_launch: bool = False


@dataclass(frozen=True)
class Memory:
    """What was evicted, what of it came back, and how much more there was than room.

    ``factor`` is derived where the GPU's memory explains the evictions; where less room was there than
    that, ``seen_factor`` is reconstructed from what was resident.
    """

    evicted_bytes: int
    refaulted_bytes: int | None = None
    factor: float | None = None
    seen_factor: float | None = None


@dataclass(frozen=True)
class Bounce:
    """Memory that faults moved to and fro often enough for the driver to act."""

    bytes: int
    moved_bytes: int
    n_va_blocks: int
    processors: str


@dataclass(frozen=True)
class Evidence:
    """Everything that the verdict is decided from.

    Attributes
    ----------
    answers : mapping of str to str
        By kind of event: "recorded", "not_recorded", "unknown".
    moved : mapping of (str, str) to int, or None
        Bytes by direction and cause; None where they are not known.
    n_copies : int, optional
        Migrations.
    times_in : float, optional
        How often each byte that the CPU sent came to its GPU, on average.
    n_gpus : int
        GPUs.
    in_flight : str
        For how long copies were under way, in words; empty where that is not known.
    n_kernels : int, optional
        Kernels and launches of graphs; of a part of a capture those that start in it.
    kernels_ns, waiting_ns : int, optional
        Time in which a kernel ran and, of that, at most in which a GPU fault waited, summed over GPUs; of
        a part of a capture what lies in it.
    waiting_kind : str
        Of which kind the latter is.
    n_fault_rows, n_kernel_names : int, optional
        GPU fault rows, and kernels of different names.
    outcomes, outcomes_kind : mapping of str to int, str
        Batches of fault rows by what became of them, and of which kind these numbers are.
    held : Held, optional
        The kernel that waited longest.
    alone_bytes : int
        Bytes to GPUs that came while nothing is known to have run there.
    allocation, range : Place, optional
        The allocation and the NVTX range that moved most.
    prefetches : mapping of str to int
        Prefetches of the program by outcome.
    memory, bounce : optional
        Evictions and ping-pong, where there are any.
    driver_events : mapping of str to int
        Of nvprof: what the driver did against ping-pong.
    checks : mapping of str to str
        By id: status of what was checked of the capture.
    advised : Advised, optional
        What the rules of the advisor say; None where they were not asked.
    span_ns : int
        Time from the first event to the last; 0 where it is not known.
    is_modelled, is_nvprof, is_part : bool
        Of what source it is, and whether filters chose a part.
    """

    answers: Mapping[str, str]
    moved: Mapping[tuple[str, str], int] | None = None
    n_copies: int | None = None
    times_in: float | None = None
    n_gpus: int = 1
    in_flight: str = ""
    n_kernels: int | None = None
    kernels_ns: int | None = None
    waiting_ns: int | None = None
    waiting_kind: str = "derived"
    n_fault_rows: int | None = None
    n_kernel_names: int | None = None
    outcomes: Mapping[str, int] = field(default_factory=dict)
    outcomes_kind: str = "derived"
    held: Held | None = None
    alone_bytes: int = 0
    allocation: Place | None = None
    range: Place | None = None
    prefetches: Mapping[str, int] = field(default_factory=dict)
    memory: Memory | None = None
    bounce: Bounce | None = None
    driver_events: Mapping[str, int] = field(default_factory=dict)
    checks: Mapping[str, str] = field(default_factory=dict)
    advised: Advised | None = None
    span_ns: int = 0
    is_modelled: bool = False
    is_nvprof: bool = False
    is_part: bool = False

    def bytes_of(self, direction: str, *causes: str) -> int:
        """Add up what moved one way, of some causes or of all."""
        return sum(
            size
            for (way, cause), size in (self.moved or {}).items()
            if way == direction and (not causes or cause in causes)
        )

    @property
    def to_gpu_bytes(self) -> int:
        """What came to GPUs, from the CPU or from one another."""
        return self.bytes_of("htod") + self.bytes_of("dtod")

    @property
    def is_coarse(self) -> bool:
        """Whether times are known too roughly to say what lies inside what."""
        return "times" in self.checks


def gather(report: Report) -> Evidence:
    """Ask the summary and the analyses for what the verdict needs.

    Parameters
    ----------
    report : Report
        A trace.

    Returns
    -------
    Evidence
        What they say; what cannot be asked is left unknown.
    """
    document = report.summary
    kernels, moved = waiting.by_kernel(report), _moved(document)
    in_all, n_names = _in_all(report, kernels)
    batches = report.rows_of("batch_latency")
    return Evidence(
        answers=document["capture"],
        moved=moved,
        n_copies=document["migrations"]["n"],
        times_in=_times_in(report.rows_of("amplification")),
        n_gpus=n_gpus(document),
        in_flight=in_flight(document),
        n_kernels=_n_kernels(document),
        kernels_ns=in_all.time_ns if in_all else document["kernels"]["busy_ns"],
        waiting_ns=in_all.exposed_ns if in_all else None,
        waiting_kind=in_all.kind if in_all else "derived",
        n_fault_rows=document["gpu_faults"]["n_rows"],
        n_kernel_names=n_names,
        outcomes=_counted(batches, "outcome", pl.col("n_batches").sum()),
        outcomes_kind=_kind(report, batches),
        held=None if kernels is None else _held(kernels),
        alone_bytes=0 if kernels is None else _alone(kernels),
        allocation=_allocation(report.rows_of("faults_by_allocation")),
        range=_range(report),
        prefetches=_counted(report.rows_of("user_prefetches"), "outcome", pl.len()),
        memory=_memory(report, moved or {}),
        bounce=_bounce(report.rows_of("ping_pong")),
        driver_events=document["driver_events"] or {},
        advised=report.advised,
        span_ns=document["duration_ns"] or 0,
        checks={check["id"]: check["status"] for check in document["health"]},
        is_modelled=document["source_kind"] == MODEL_KIND,
        is_nvprof=document["source_kind"] in NVPROF_KINDS,
        is_part=report.is_part,
    )


def gather_totals(report: Report) -> Evidence:
    """Take what the summary alone says, where the analyses would need too much memory.

    Parameters
    ----------
    report : Report
        A trace.

    Returns
    -------
    Evidence
        What its totals say; what only analyses can tell is left unknown.
    """
    document = report.summary
    known = Evidence(
        answers=document["capture"],
        moved=_moved(document),
        n_copies=document["migrations"]["n"],
        n_gpus=n_gpus(document),
        in_flight=in_flight(document),
        driver_events=document["driver_events"] or {},
        checks={check["id"]: check["status"] for check in document["health"]},
        is_modelled=document["source_kind"] == MODEL_KIND,
        is_nvprof=document["source_kind"] in NVPROF_KINDS,
        is_part=report.is_part,
    )
    evicted = known.bytes_of("dtoh", "eviction") + known.bytes_of("dtod", "eviction")
    return replace(known, memory=Memory(evicted) if evicted else None)


def _moved(document: Mapping[str, Any]) -> dict[tuple[str, str], int] | None:
    moved: dict[tuple[str, str], int] = {}
    groups = document["migrations"]["groups"]
    if groups is None or any(row["bytes"] is None for row in groups):
        return None
    for row in groups:
        key = (row["direction"], row["cause"])
        moved[key] = moved.get(key, 0) + row["bytes"]
    return moved


def _n_kernels(document: Mapping[str, Any]) -> int | None:
    counts = [document["kernels"][key] for key in ("n", "n_graph_launches")]
    return None if counts[0] is None else sum(each or 0 for each in counts)


def _in_all(report: Report, kernels: pl.DataFrame | None) -> tuple[Waited | None, int | None]:
    """Measure kernels of several names together, and count their names."""
    if kernels is None:
        return None, None
    n_names = _work(kernels)["name"].n_unique()
    is_known = n_names > 1 and report.summary["kernels"]["busy_ns"] is not None
    return waiting.in_all(report, kernels) if is_known else None, n_names


def _kind(report: Report, batches: pl.DataFrame | None) -> str:
    """Say of which kind numbers of batches are, as the analysis knows it."""
    if batches is None:
        return "derived"
    return worst(report.kinds("batch_latency", batches), ("outcome", "n_batches"))


def _times_in(found: pl.DataFrame | None) -> float | None:
    if found is None:
        return None
    came, distinct = int(found["htod_bytes"].sum()), int(found["unique_htod_bytes"].sum())
    return came / distinct if distinct else None


def _work(kernels: pl.DataFrame) -> pl.DataFrame:
    return kernels.filter(pl.col("work").is_in(["kernel", "graph"]), pl.col("name").is_not_null())


def _alone(kernels: pl.DataFrame) -> int:
    return int(kernels.filter(pl.col("work") == "unattributed")["in_bytes"].sum())


def _allocation_name(row: Mapping[str, Any]) -> str:
    """Name an allocation as it is in the program; one without a name by its address."""
    unnamed = row["name"] == f"0x{row['va'] or 0:x}, {row['bytes']} byte"
    return str(row["name"] if not unnamed else f"0x{row['va']:x}")


def _held(kernels: pl.DataFrame) -> Held | None:
    """Choose the kernel that waited longest; of those that did not wait, the one that brought most."""
    known = _work(kernels).filter(pl.col("exposed_ns").is_not_null(), pl.col("time_ns") > 0)
    known = known.sort("exposed_ns", "in_bytes", "time_ns", descending=True, maintain_order=True)
    for row in known.head(1).to_dicts():
        return Held(
            name=row["name"],
            time_ns=row["time_ns"],
            exposed_ns=row["exposed_ns"],
            in_bytes=row["in_bytes"] or 0,
            n_rows=row["n_fault_rows"],
            kind=row["exposed_kind"],
        )
    return None


def _allocation(found: pl.DataFrame | None) -> Place | None:
    if found is None:
        return None
    sizes = found.with_columns(
        moved=pl.sum_horizontal("in_bytes", "out_bytes", "between_bytes").fill_null(0)
    )
    named = sizes.filter(pl.col("part") != "unattributed").sort(
        "moved", descending=True, maintain_order=True
    )
    for row in named.head(1).to_dicts():
        return Place(
            name=_allocation_name(row),
            bytes=row["moved"],
            all_bytes=int(sizes["moved"].sum()),
            size_bytes=row["bytes"],
            is_guessed=row["part"] == "guessed",
        )
    return None


def _range(report: Report) -> Place | None:
    """Choose the NVTX range that brought most to GPUs, with ranges inside not counted."""
    options = report.nvtx_options()
    found = report.rows_of("faults_by_nvtx", options) if report.is_recorded("nvtx") else None
    if found is None:
        return None
    named = found.filter(pl.col("part") == "range").sort(
        "in_bytes", descending=True, maintain_order=True
    )
    for row in named.head(1).to_dicts():
        return Place(
            name=row["name"] or "",
            bytes=row["in_bytes"] or 0,
            all_bytes=int(found["in_bytes"].sum()),
            is_by_launch=bool(options),
        )
    return None


def _counted(found: pl.DataFrame | None, key: str, count: pl.Expr) -> dict[str, int]:
    if found is None:
        return {}
    rows = found.group_by(pl.col(key).cast(pl.String)).agg(n=count).drop_nulls().sort(key)
    return dict(rows.iter_rows())


def _memory(report: Report, moved: Mapping[tuple[str, str], int]) -> Memory | None:
    """Add up evictions over GPUs; the factor is that of the GPU with the least room."""
    evicted = sum(size for (_, cause), size in moved.items() if cause == "eviction")
    if not evicted:
        return None
    refaults, room = report.rows_of("refault_totals"), report.rows_of("oversubscription_factor")
    factors = None if room is None else room.filter(pl.col("evicted_bytes") > 0)
    factor = _most(factors, "oversubscription_factor")
    return Memory(
        evicted_bytes=evicted,
        refaulted_bytes=None if refaults is None else int(refaults["refaulted_bytes"].sum()),
        factor=factor if factor and factor >= 1 else None,
        seen_factor=_most(factors, "observed_factor"),
    )


def _most(found: pl.DataFrame | None, column: str) -> float | None:
    values = [] if found is None else found[column].drop_nulls().to_list()
    return max(values, default=None)


def _bounce(found: pl.DataFrame | None) -> Bounce | None:
    thrashing = None if found is None else found.filter("is_thrashing")
    if thrashing is None or not thrashing.height:
        return None
    most = thrashing.group_by("processors").agg(n=pl.col("moved_bytes").sum())
    return Bounce(
        bytes=int(thrashing["bytes"].sum()),
        moved_bytes=int(thrashing["moved_bytes"].sum()),
        n_va_blocks=thrashing.select("pid", pl.col("va") // VA_BLOCK_BYTES).n_unique(),
        processors=most.sort("n", "processors", descending=True)["processors"][0],
    )
