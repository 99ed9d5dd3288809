"""nsan's reports for `nsys stats` give the figures of nsan itself, on samples and on rows drawn at random."""

from __future__ import annotations

import random

import exports as x
import polars as pl
import pytest
import stats_reports
from conftest import SOAK
from exports import REPOSITORY

import nsan
from nsan.analysis.migrations import busy_by_group

pytestmark = pytest.mark.nsys

FEW = ("um_vector_add_rtx4060l", "two_gpus", "ping_pong", "pca_off", "first_touch")
SAMPLES = [
    path for path in sorted(REPOSITORY.glob("sample_data/**/*.sqlite")) if SOAK or path.stem in FEW
]
BLOCK = 2 * x.MIB
PAGE = 4 * x.KIB
ASKED = {
    "total": ("total_sum",),
    "cause": ("cause_sum",),
    "block": ("sum", "by=block", "rows=-1"),
    "range": ("sum", "rows=-1"),
    "kernel": ("kern_sum", "rows=-1"),
    "allocation": ("alloc_sum", "rows=-1"),
    "refault": ("refault_sum", "rows=-1"),
}
WORDS = {"htod": "HtoD", "dtoh": "DtoH", "dtod": "DtoD"}
CAUSES = {
    "unknown": "Unknown",
    "user": "User prefetch",
    "coherence": "Page fault",
    "prefetch": "Speculative prefetch",
    "eviction": "Eviction",
    "access_counters": "Access counters",
}


def reports_of(path, *arguments):
    asked = [(name, path, *own, *arguments) for name, *own in ASKED.values()]
    return dict(zip(ASKED, stats_reports.run(asked), strict=True))


def check(path):
    """Compare every report with nsan; say whether there was Unified Memory to compare."""
    trace, found = nsan.open_trace(path), reports_of(path)
    if found["total"].status == 27:
        check_nothing(trace, found)
        return False
    check_totals(trace, found["total"])
    check_causes(trace, found["cause"])
    check_blocks(trace, found["block"])
    check_ranges(found["block"], found["range"])
    check_kernels(trace, found["kernel"])
    check_allocations(trace, found["allocation"])
    check_refaults(trace, found["refault"])
    return True


def check_nothing(trace, found):
    """A capture without Unified Memory has no row of it in nsan either."""
    assert {result.status for result in found.values()} == {27}
    summary = nsan.summary(trace)
    assert not summary["migrations"]["n"]
    assert not summary["gpu_faults"]["n_rows"]
    assert not summary["cpu_faults"]["n"]


def recorded(trace, kind):
    return trace.info.capture[kind].answer == "recorded"


def sums(trace, keys):
    size, way = pl.col("bytes"), pl.col("direction")
    evicted = (way == "dtoh") & (pl.col("cause") == "eviction")
    return (
        trace.migrations.group_by(keys)
        .agg(
            pl.len().alias("n"),
            *(size.filter(way == name).sum().alias(name) for name in WORDS),
            size.filter(evicted).sum().alias("evicted"),
        )
        .collect()
    )


def check_totals(trace, found):
    rows = found.by("Pid", "Device")
    for row in sums(trace, ["pid", "device_id"]).to_dicts():
        mine = rows[row["pid"], row["device_id"]]
        assert mine["Migrations"] == row["n"]
        assert [mine[f"{word} Migration Size"] for word in WORDS.values()] == [
            row[name] for name in WORDS
        ]
        assert mine["Evicted Size"] == row["evicted"]
    busy = busy_by_group(trace.migrations, None, by=["pid", "device_id"]).to_dicts()
    for row in busy:
        assert rows[row["pid"], row["device_id"]]["Migration Time"] == row["covered_ns"]
    summary = nsan.summary(trace)
    assert found.total("Migrations") == summary["migrations"]["n"]
    if recorded(trace, "gpu_faults"):
        assert found.total("GPU Fault Batches") == summary["gpu_faults"]["n_rows"]
        assert found.total("Lowest-Page Faults") == summary["gpu_faults"]["n_page_faults"]
    else:
        assert {row["GPU Fault Batches"] for row in found.rows} == {None}
    if recorded(trace, "cpu_faults"):
        assert found.total("CPU Page Faults") == summary["cpu_faults"]["n"]
    else:
        assert {row["CPU Page Faults"] for row in found.rows} == {None}


def check_causes(trace, found):
    rows = found.by("Pid", "Device", "Direction", "Cause")
    expected = nsan.analyse(trace, "traffic_matrix").collect().to_dicts()
    assert len(rows) == len(expected)
    for row in expected:
        way, cause = WORDS[row["direction"]], CAUSES[row["cause"]]
        mine = rows[row["pid"], row["device_id"], way, cause]
        assert (mine["Count"], mine["Size"]) == (row["n_migrations"], row["bytes"])
        assert mine["Migration Time"] == row["busy_ns"]
        assert mine["Migration Throughput"] == pytest.approx(row["bytes_per_s"])
        assert mine["Size (%)"] == pytest.approx(100 * row["bytes_fraction"], abs=0.051)


def check_blocks(trace, found):
    block = (pl.col("va") // BLOCK).cast(pl.Int64).alias("block")
    rows = found.by("Virtual Address", "Pid", "Device")
    for row in sums(trace, ["pid", "device_id", block]).to_dicts():
        mine = rows[row["block"] * BLOCK, row["pid"], row["device_id"]]
        assert [mine[f"{word} Migration Size"] for word in WORDS.values()] == [
            row[name] for name in WORDS
        ]
        assert (mine["Migrations"], mine["Evicted Size"]) == (row["n"], row["evicted"])
    placed = trace.migrations.with_columns(block)
    for row in busy_by_group(placed, None, by=["pid", "device_id", "block"]).to_dicts():
        mine = rows[row["block"] * BLOCK, row["pid"], row["device_id"]]
        assert mine["Migration Time"] == row["covered_ns"]
    for row in nsan.analyse(trace, "faults_by_va_block").collect().to_dicts():
        mine = [
            each
            for (va, pid, _), each in rows.items()
            if (va, pid) == (row["va_block"] * BLOCK, row["pid"])
        ]
        if row["n_fault_rows"] is not None:
            assert sum(each["GPU Fault Batches"] for each in mine) == row["n_fault_rows"]
            assert sum(each["Lowest-Page Faults"] for each in mine) == row["n_page_faults"]
        if row["n_cpu_faults"] is not None:
            assert sum(each["CPU Page Faults"] for each in mine) == row["n_cpu_faults"]


def check_ranges(blocks, ranges):
    """Ranges are the blocks, put together: the same blocks, and the same sums."""
    assert covered(ranges) == covered(blocks)
    for column in ("HtoD Migration Size", "DtoH Migration Size", "Migrations", "Evicted Size"):
        assert ranges.total(column) == blocks.total(column)


def covered(found):
    return sorted(
        (row["Pid"], row["Device"] is None, row["Device"] or 0, va)
        for row in found.rows
        for va in range(row["Virtual Address"], row["Virtual Address"] + row["Range Size"], BLOCK)
    )


def check_kernels(trace, found):
    rows = found.by("Pid", "Device", "Work", "Name")
    same = {
        "Instances": "n_instances",
        "Time": "time_ns",
        "GPU Fault Batches": "n_fault_rows",
        "Lowest-Page Faults": "n_page_faults",
        "Faulted Size": "coherence_bytes",
        "Prefetched Size": "prefetch_bytes",
        "To GPU Size": "in_bytes",
        "Evicted Size": "evicted_bytes",
    }
    with_rows = set(trace.gpu_faults.select("pid", "device_id").unique().collect().rows())
    for row in nsan.analyse(trace, "faults_by_kernel").collect().to_dicts():
        gpu, is_rest = (row["pid"], row["device_id"]), row["name"] is None
        name = row["work"] if is_rest else row["name"]
        mine = rows.get((*gpu, row["work"], name))
        if mine is None:
            assert row["work"] in {"cpu", "user_prefetch", "ambiguous"}
            assert not any(row[name] for name in ("n_fault_rows", "in_bytes", "evicted_bytes"))
            continue
        skipped = ("Instances", "Time") if is_rest else ()
        for header, column in same.items():
            if header not in skipped:
                assert mine[header] == row[column], (name, header)
        exposed = row["exposed_ns"] if gpu in with_rows else None
        if recorded(trace, "gpu_faults"):
            assert (mine["Exposed Time"] or 0) == (exposed or 0), name
        else:
            assert mine["Exposed Time"] is None


def check_allocations(trace, found):
    same = {
        "HtoD Migration Size": "in_bytes",
        "DtoH Migration Size": "out_bytes",
        "DtoD Migration Size": "between_bytes",
        "Evicted Size": "evicted_bytes",
        "Migrations": "n_migrations",
        "GPU Fault Batches": "n_lowest_page_rows",
        "Lowest-Page Faults": "n_page_faults",
        "CPU Page Faults": "n_cpu_faults",
        "Size": "bytes",
    }
    expected = nsan.analyse(trace, "faults_by_allocation").collect()
    rows = [{**row, "Pages": row["Faulted Size"] // PAGE} for row in found.rows]
    assert table(rows, ["Pid", "Basis", "Virtual Address", "Pages", *same]) == table(
        expected.to_dicts(), ["pid", "part", "va", "n_faulted_pages", *same.values()]
    )


def check_refaults(trace, found):
    expected = nsan.analyse(trace, "refaults_by_va_block").collect()
    if expected.is_empty():
        assert found.status == 27
        assert "nothing was evicted" in found.message
        return
    same = {
        "Evictions": "n_evictions",
        "Evicted Size": "evicted_bytes",
        "Refaulted Size": "refaulted_bytes",
        "Premature Size": "premature_bytes",
        "Elsewhere Size": "elsewhere_bytes",
        "Unreturned Size": "unreturned_bytes",
    }
    placed = expected.with_columns(va=pl.col("va_block") * BLOCK)
    assert table(found.rows, ["Pid", "Device", "Virtual Address", *same]) == table(
        placed.to_dicts(), ["pid", "device_id", "va", *same.values()]
    )
    back = (
        nsan.analyse(trace, "refaults")
        .filter(pl.col("is_same_device") & pl.col("is_by_fault"))
        .select(pl.col("bytes").sum())
        .collect()
        .item()
    )
    assert found.total("Faulted Back Size") == back


def table(rows, columns):
    """Rows as tuples in a fixed order, whatever order they came in."""
    return sorted(
        (tuple(row[column] for column in columns) for row in rows),
        key=lambda row: [(value is None, str(type(value)), value) for value in row],
    )


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_every_report_gives_what_nsan_gives_of_a_sample(path):
    assert check(path)


RECORDED = [name for name in x.real_traces() if not name.startswith(("nocuda", "reduced"))]


@pytest.mark.parametrize("name", RECORDED if SOAK else [n for n in RECORDED if n.startswith("um_")])
def test_every_report_gives_what_nsan_gives_of_a_recorded_export(name, real):
    assert check(real(name)) or not name.startswith("um_")


SEEDS = range(60 if SOAK else 6)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_report_gives_what_nsan_gives_of_rows_drawn_at_random(seed, built):
    assert check(built(drawn(random.Random(seed))))


def drawn(rng):
    """Rows of one or two processes and GPUs: everything overlaps, some tables are missing."""
    export = x.Export(lazy=rng.random() < 0.5)
    pids, devices = (7, 8)[: rng.randint(1, 2)], (0, 1)[: rng.randint(1, 2)]
    n = rng.randint(50, 300)
    made = Drawn(rng, pids, devices)
    export.add(x.MEMCPY, *(made.any_copy() for _ in range(n)))
    export.add(x.MEMCPY, *(row for _ in range(n) for row in made.thrash()))
    export.add(x.MEMCPY, *chained(rng, n, pids))
    tables = {
        x.GPU_FAULTS: lambda: [made.gpu_fault() for _ in range(n)],
        x.CPU_FAULTS: lambda: [made.cpu_fault() for _ in range(n)],
        x.KERNEL: lambda: [made.kernel() for _ in range(60)],
        x.MEMORY: lambda: allocated(rng, pids[0]),
    }
    for table, rows in tables.items():
        if rng.random() < 0.8:
            export.add(table, *rows())
    return export.add(x.MEMCPY, *(made.explicit_copy() for _ in range(9)))


class Drawn:
    """Rows at random places and times."""

    def __init__(self, rng, pids, devices):
        self.rng, self.pids, self.devices = rng, pids, devices

    def where(self):
        return {"pid": self.rng.choice(self.pids), "device": self.rng.choice(self.devices)}

    def page(self):
        return x.VA + PAGE * self.rng.randrange(6 * 512)

    def span(self, longest):
        start = self.rng.randrange(20_000_000)
        return start, start + self.rng.randrange(longest)

    def copied(self, **more):
        va = self.page()
        size = PAGE * self.rng.randint(1, 512 - va // PAGE % 512)
        return x.migration(*self.span(200_000), size, va, **{**self.where(), **more})

    def any_copy(self):
        kind = self.rng.choice((x.HTOD, x.DTOH, x.DTOD))
        row = self.copied(kind=kind, cause=self.rng.choice((0, 1, 2, 3, 4, 5, None)))
        return {**row, "srcDeviceId": self.rng.choice(self.devices)}

    def thrash(self):
        """Give an eviction, and a copy that brings pages back."""
        yield self.copied(kind=x.DTOH, cause=x.EVICTION)
        yield self.copied(cause=self.rng.choice((1, 2, 3)))

    def gpu_fault(self):
        n = self.rng.randint(1, 256)
        return x.gpu_fault(*self.span(300_000), self.page(), n=n, **self.where())

    def cpu_fault(self):
        return x.cpu_fault(self.span(1)[0], self.page(), pid=self.rng.choice(self.pids))

    def kernel(self):
        return x.kernel(*self.span(400_000), name=self.rng.choice((1, 3)), **self.where())

    def explicit_copy(self):
        return x.copy(*self.span(90_000), 64, kind=self.rng.choice((1, 2, 8)), **self.where())


def chained(rng, n, pids):
    """Copies of pushes: each begins 1 ns after the one before, in one block."""
    for _ in range(n // 4):
        start, block = rng.randrange(20_000_000), x.VA + BLOCK * rng.randrange(6)
        kind, cause = rng.choice(((x.DTOH, x.EVICTION), (x.HTOD, x.COHERENCE)))
        pid = rng.choice(pids)
        for i in range(rng.randint(1, 4)):
            end = start + rng.randrange(1, 3000)
            yield x.migration(
                start, end, PAGE * 16, block + PAGE * 16 * i, kind=kind, cause=cause, pid=pid
            )
            start = end + rng.choice((0, 1, 1, 1, 2))


def allocated(rng, pid):
    """Allocations that use addresses again, some never released, some made before the capture."""
    for _ in range(rng.randint(1, 30)):
        va = x.VA + 64 * x.KIB * rng.randrange(6 * 32)
        size, start = rng.randrange(1, 3 * BLOCK), rng.randrange(20_000_000)
        kind, name = rng.choice((4, 4, 4, 2, 6, 7)), rng.choice((None, "weights"))
        if rng.random() < 0.9:
            yield x.memory_event(start, va, size, kind=kind, pid=pid, name=name)
        if rng.random() < 0.7:
            yield x.memory_event(
                start + rng.randrange(9_000_000), va, size, free=True, kind=kind, pid=pid
            )
