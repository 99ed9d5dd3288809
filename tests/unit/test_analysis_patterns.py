"""Access patterns against programs of the driver model whose walk is known, and a real capture."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal
from programs import modelled

from nsan.analysis.clustering.patterns import ACCESS_PATTERNS, access_patterns
from nsan.analysis.clustering.walks import classes_of
from nsan.model.access import Broadcast, Chase, Random, Stencil, Stream, Strided, Zipf
from nsan.model.program import Allocate, HostTouch, Kernel, Launch, Synchronize
from nsan.model.recording import record
from nsan.opening import open_trace
from nsan.schema import ALLOCATIONS, GPU_FAULTS, KERNELS, MIGRATIONS
from nsan.units import KIB, MIB

SAMPLES = Path(__file__).parents[2] / "sample_data"
BLOCK = 2 << 20
TABLES = ("gpu_faults", "migrations", "kernels", "allocations")


@cache
def _walked(access, mib=8, grid=None, threads=256, repeat=1, **machine):
    """Tables of a program in which one kernel walks once through an array that the CPU filled."""
    size = mib * MIB
    kernel = Kernel("walk", grid or size // (threads * 4), threads, (access,), repeat=repeat)
    ran = modelled(
        Allocate("a", size), HostTouch("a", write=True), Launch(kernel), Synchronize(), **machine
    )
    return record(ran.happened, ran.settings, "walk")


def _classed(tables, **options):
    return access_patterns(*(tables[name].lazy() for name in TABLES), **options).collect()


def _without(tables, *names):
    return tables | {name: tables[name].clear() for name in names}


def _pattern(access, *args, **kwargs):
    [row] = _classed(_walked(access, *args, **kwargs)).rows(named=True)
    return row


FORWARD, BACKWARD = Stream(allocation="a"), Stream(allocation="a", backward=True)


@pytest.mark.parametrize("shape", [{}, {"grid": 216}, {"grid": 1, "threads": 32}])
@pytest.mark.parametrize(("access", "sign"), [(FORWARD, 1), (BACKWARD, -1)])
def test_a_stream_is_one_whatever_the_number_of_thread_blocks(access, sign, shape):
    row = _pattern(access, **shape)
    assert row["pattern"] == ("stream_forward" if sign > 0 else "stream_backward")
    assert row["slope_bytes"] * sign > 0
    assert row["n_passes"] == 1


def test_one_thread_that_streams_shows_six_faults_per_block_and_no_stride():
    row = _pattern(FORWARD, mib=16, grid=1, threads=32)
    assert (row["n_batches"], row["n_faulted_pages"]) == (48, 48)
    # 64, 64, 128, 256 and 512 KiB inside a block: 64 KiB is two of six distances.
    assert row["stride_bytes"] == 64 * KIB
    assert row["stride_fraction"] == pytest.approx(16 / 47)
    # The last fault is at half of the last block.
    assert row["span_bytes"] == 15 * MIB + 4 * KIB
    assert row["span_fraction"] == (15 * MIB + 4 * KIB) / (16 * MIB)
    assert row["density_fraction"] == 48 / (15 * 256 + 1)


@pytest.mark.parametrize("stride", [8, 16, 64, 128])
def test_many_threads_at_a_stride_show_it_inside_their_batches(stride):
    access = Strided(allocation="a", stride_bytes=stride * KIB)
    row = _pattern(access, grid=max(8 * MIB // (stride * KIB * 256), 1))
    assert (row["pattern"], row["stride_bytes"]) == ("strided", stride * KIB)


@pytest.mark.parametrize("stride", [128, 512, 2048, 4096])
def test_one_thread_at_a_stride_shows_it_from_batch_to_batch(stride):
    access = Strided(allocation="a", stride_bytes=stride * KIB)
    row = _pattern(access, mib=32, grid=1, threads=1)
    assert (row["pattern"], row["stride_bytes"]) == ("strided", stride * KIB)


def test_one_thread_with_a_stride_up_to_64_kib_cannot_be_told_from_a_stream():
    stream = _walked(FORWARD, mib=8, grid=1, threads=1)
    strided = _walked(Strided(allocation="a", stride_bytes=64 * KIB), mib=8, grid=1, threads=1)
    where = [tables["migrations"].select("va", "bytes", "cause_id") for tables in (stream, strided)]
    assert_frame_equal(*where)
    assert _classed(strided)["pattern"].to_list() == ["stream_forward"]


@pytest.mark.parametrize(
    ("access", "shape"),
    [
        (Random(allocation="a", draws=32), {"grid": 128}),
        (Zipf(allocation="a", draws=32), {"grid": 128}),
        (Chase(allocation="a", hops=48), {"grid": 8, "threads": 32}),
        (Chase(allocation="a", hops=48), {"grid": 1, "threads": 32}),
    ],
)
@pytest.mark.parametrize("share", [1, 2])
def test_gathers_and_chases_are_random_also_while_memory_is_short(access, shape, share):
    assert _pattern(access, capacity_bytes=8 * MIB // share, **shape)["pattern"] == "random"


def test_medians_that_drift_by_eviction_do_not_make_a_gather_a_stream():
    row = _pattern(Zipf(allocation="a", draws=32), mib=24, grid=192, capacity_bytes=6 * MIB)
    assert row["r2"] > 0.8  # the line is there
    assert row["pattern"] == "random"


def test_tiles_and_shared_reads_advance_like_a_stream():
    tiles = Stencil(allocation="a", width=1448, height=1448, tile=12, halo=2)
    assert _pattern(tiles, grid=121 * 121)["pattern"] == "stream_forward"
    assert _pattern(Broadcast(allocation="a"), grid=64)["pattern"] == "stream_forward"


def test_each_pass_over_an_array_that_does_not_fit_begins_anew():
    row = _pattern(FORWARD, grid=1, threads=32, repeat=4, capacity_bytes=4 * MIB)
    assert (row["pattern"], row["n_passes"], row["n_batches"]) == ("stream_forward", 4, 4 * 24)


def test_a_few_batches_are_no_evidence_for_a_line():
    row = _pattern(FORWARD, mib=2)
    assert row["n_batches"] < 6
    assert row["pattern"] == "too_few"
    [forced] = _classed(_walked(FORWARD, mib=2), least_batches=3)["pattern"]
    assert forced == "stream_forward"


def test_fault_rows_and_allocations_only_help():
    for access in (FORWARD, BACKWARD):
        tables = _without(_walked(access), "gpu_faults", "allocations")
        [row] = _classed(tables).rows(named=True)
        assert row["pattern"] == _pattern(access)["pattern"]
        assert (row["is_allocation"], row["region_bytes"], row["span_fraction"]) == (
            False,
            8 * MIB,
            None,
        )


# Real captures and samples ------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NSAN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def _opened(path):
    trace = open_trace(path)
    return {name: getattr(trace, name).collect() for name in TABLES}


def test_both_arrays_of_the_real_vector_add_are_streams():
    found = _classed(_opened(SAMPLES / "um_vector_add_rtx4060l.sqlite"))
    assert found["pattern"].to_list() == ["stream_forward", "stream_forward"]
    assert found["kernel"].to_list() == ["add", "add"]
    # The trace has no allocations: the two arrays of 4 MiB lie side by side.
    assert found["va"].to_list() == [128138671554560, 128138675748864]
    assert found["region_bytes"].to_list() == [4 * MIB, 4 * MIB]
    assert found["n_faulted_pages"].to_list() == [12, 12]


def test_the_real_hotspot_streams_through_its_two_inputs():
    found = _classed(_opened(SAMPLES / "nvprof_hotspot_v100_8192.log.gz"))
    assert found["pattern"].to_list() == ["stream_forward", "stream_forward"]
    assert found["has_causes"].to_list() == [False, False]
    assert found["faulted_bytes"].to_list() == [256 * MIB, 256 * MIB]


@pytest.mark.parametrize(
    ("name", "pattern", "rows"),
    [
        ("stream", "stream_forward", 2),
        ("random", "random", 1),
        ("oversubscribed_sweep", "stream_forward", 1),
    ],
)
def test_the_samples_are_what_their_names_say(name, pattern, rows):
    found = _classed(_opened(SAMPLES / "model" / name / f"{name}.sqlite"))
    assert found["pattern"].to_list() == [pattern] * rows


# Plain figures ------------------------------------------------------------------------------------


def _copies(pages, *, group=0, per_batch=1):
    return pl.DataFrame(
        {
            "group": [group] * len(pages),
            "batch_id": [i // per_batch for i in range(len(pages))],
            "va": [page * 4096 for page in pages],
            "bytes": [4096] * len(pages),
            "has_causes": [True] * len(pages),
        },
        schema_overrides={"va": pl.UInt64},
    )


def test_work_that_stays_in_one_place_and_jumps_is_clustered():
    # Ten batches of eight pages in each of four places, the places in no order.
    places = [40_000, 3_000, 60_000, 20_000]
    pages = [p + (37 * b + 11 * k * k) % 400 for p in places for b in range(10) for k in range(8)]
    [row] = classes_of(_copies(pages, per_batch=8)).rows(named=True)
    assert row["r2"] < 0.8
    assert row["pattern"] == "clustered"


def test_the_line_is_that_of_least_squares():
    # x = 0..5, y = 0, 1, 2, 4, 8, 16 leaves of 16 pages: Sxy 51.5, Sxx 17.5, Syy 180.83 leaves.
    [row] = classes_of(_copies([16 * leaf for leaf in (0, 1, 2, 4, 8, 16)])).rows(named=True)
    assert row["slope_bytes"] == pytest.approx(51.5 / 17.5 * 65536)
    assert row["r2"] == pytest.approx(51.5**2 / (17.5 * (341 - 31**2 / 6)))


def test_the_median_of_a_batch_counts_pages_of_long_copies():
    # Pages 0..9 and 100 in each batch: the median is page 5 of the batch, so the line advances by 10.
    rows = [
        {
            "group": 0,
            "batch_id": b,
            "va": (b * 10 + first) * 4096,
            "bytes": n * 4096,
            "has_causes": True,
        }
        for b in range(8)
        for first, n in ((0, 10), (100, 1))
    ]
    found = classes_of(pl.DataFrame(rows, schema_overrides={"va": pl.UInt64}))
    assert found["slope_bytes"].to_list() == [pytest.approx(10 * 4096)]
    # Pages 0 to 79 and 100, 110, .. 170.
    assert found["n_faulted_pages"].to_list() == [88]


def test_groups_and_the_order_of_rows_do_not_matter():
    one = pl.concat([_copies(range(0, 900, 9)), _copies(range(900, 0, -9), group=1)])
    found = classes_of(one)
    assert found["pattern"].to_list() == ["strided", "strided"]
    assert [s > 0 for s in found["slope_bytes"]] == [True, False]
    assert_frame_equal(found, classes_of(one.sample(fraction=1, shuffle=True, seed=3)))


# Regions ------------------------------------------------------------------------------------------


def _table(table, rows):
    return pl.DataFrame([dict.fromkeys(table.schema) | row for row in rows], schema=table.schema)


def _one_by_one(vas, *, start=0):
    return [
        {
            "start_ns": start + 10_000_000 * i,
            "end_ns": start + 10_000_000 * i + 10,
            "pid": 1,
            "device_id": 0,
        }
        | {"va": va, "bytes": 4096, "direction": "htod", "cause_id": 2}
        for i, va in enumerate(vas)
    ]


def _regions(copies, allocations=(), kernels=()):
    tables = {
        "gpu_faults": _table(GPU_FAULTS, []),
        "migrations": _table(MIGRATIONS, copies),
        "kernels": _table(KERNELS, kernels),
        "allocations": _table(ALLOCATIONS, allocations),
    }
    return _classed(tables)


def test_an_address_belongs_to_the_allocation_alive_at_the_time():
    life = {"pid": 1, "device_id": 0, "kind": "managed"}
    allocations = [
        life
        | {"va": 0, "bytes": 8 * BLOCK, "alloc_ns": None, "free_ns": 35_000_000, "name": "first"},
        life
        | {"va": BLOCK, "bytes": BLOCK, "alloc_ns": 35_000_000, "free_ns": None, "name": "second"},
        life | {"va": 0, "bytes": 8 * BLOCK, "alloc_ns": 0, "free_ns": None, "kind": "device"},
        life
        | {"va": BLOCK, "bytes": BLOCK, "alloc_ns": 0, "free_ns": None, "pid": 2, "name": "other"},
    ]
    # Copies at 0, 10, .. 60 ms; the last two in no allocation that lives.
    copies = _one_by_one([BLOCK, 0, 7 * BLOCK, BLOCK, BLOCK, 0, 2 * BLOCK])
    found = _regions(copies, allocations).select(
        "allocation", "va", "region_bytes", "faulted_bytes"
    )
    assert sorted(found.rows(), key=str) == sorted(
        [
            ("first", 0, 8 * BLOCK, 4 * 4096),
            ("second", BLOCK, BLOCK, 4096),
            (None, 0, 3 * BLOCK, 2 * 4096),
        ],
        key=str,
    )


def test_outside_allocations_neighbouring_blocks_are_one_run():
    found = _regions(_one_by_one([0, 5 * BLOCK, BLOCK, 10 * BLOCK]))
    # Blocks 0, 1 and 5 are at most 4 apart; 10 is 5 away.
    assert found.select("va", "region_bytes").rows() == [(0, 6 * BLOCK), (10 * BLOCK, BLOCK)]


def test_a_kernel_counts_where_it_runs_alone():
    span = {"pid": 1, "device_id": 0}
    kernels = [
        span | {"name": "a", "start_ns": 0, "end_ns": 25_000_000},
        span | {"name": "b", "start_ns": 15_000_000, "end_ns": 35_000_000},
    ]
    found = _regions(_one_by_one([0, 4096, 8192, 12288, 16384]), kernels=kernels)
    assert found.select("kernel", "n_batches").rows() == [(None, 2), ("a", 2), ("b", 1)]


def test_processes_and_gpus_do_not_mix_and_bytes_close():
    rows = _one_by_one([0, 4096, 8192])
    rows += [row | {"device_id": 1} for row in rows] + [
        row | {"pid": None, "device_id": None} for row in rows
    ]
    rows += [row | {"cause_id": 3} for row in rows] + [row | {"start_ns": None} for row in rows[:2]]
    found = _regions(rows)
    assert found.select("pid", "device_id", "faulted_bytes").rows() == [
        (None, None, 3 * 4096),
        (1, 0, 3 * 4096),
        (1, 1, 3 * 4096),
    ]


def test_no_copies_give_no_rows():
    assert _regions([]).schema == ACCESS_PATTERNS.schema
    assert _regions([]).height == 0
