"""Advice about the allocator: memory made again, dead traffic, fragments; the times by hand."""

from __future__ import annotations

import json
import random

import polars as pl
import pytest
from exports import (
    DTOH,
    EVICTION,
    GPU_FAULTS,
    KERNEL,
    MEMCPY,
    MEMORY,
    MIB,
    REPOSITORY,
    RUNTIME,
    VA,
    WRITE,
    Export,
    api_call,
    cpu_fault,
    gpu_fault,
    kernel,
    memory_event,
    migration,
)

from nsan.analysis.advisor.advice import Advice, Silent
from nsan.analysis.advisor.dead import dead_copies
from nsan.analysis.advisor.ranking import level_of
from nsan.analysis.advisor.remade import with_reuse
from nsan.analysis.advisor.rules.allocator import dead_traffic, returns_memory
from nsan.analysis.advisor.rules.fragmentation import fragmentation
from nsan.asking import Asked
from nsan.schema import TABLES

MALLOC, FREE = 2, 9
SIZE = 16 * MIB
PCA_ON = REPOSITORY / "sample_data/model/pca_on"


def loop(**changed):
    """Three times: 16 MiB are made, a kernel fills them and waits for first touches, they are given back.

    Calls: [100, 200) [2000, 2300) [2500, 2600) [4000, 4400) [4400, 4500) [6000, 6500); kernels at 1000 to 2000,
    3000 to 4000, 5000 to 6000, in which the driver serves 400, 300 and 500 ns.
    """
    export = Export(**changed)
    export.strings = export.strings | {FREE: "cudaFree_v3020"}
    for made, gone in ((200, 2300), (2600, 4400), (4500, 6500)):
        export.add(MEMORY, memory_event(made, VA, SIZE), memory_event(gone, VA, SIZE, free=True))
    export.add(KERNEL, *[kernel(start, start + 1000) for start in (1000, 3000, 5000)])
    for start, end in ((100, 200), (2500, 2600), (4400, 4500)):
        export.add(RUNTIME, api_call(start, end, name=MALLOC))
    for start, end in ((2000, 2300), (4000, 4400), (6000, 6500)):
        export.add(RUNTIME, api_call(start, end, name=FREE))
    return export


def with_faults(export):
    served = ((1100, 1500), (3100, 3400), (5100, 5600))
    return export.add(GPU_FAULTS, *[gpu_fault(*each, access=WRITE) for each in served])


@pytest.fixture
def said(built):
    """Ask one rule about an export; it says one thing."""

    def ask(export, rule=returns_memory):
        (found,) = rule(Asked(built(export)))
        return found

    return ask


def values(advice):
    return {number.label: number.value for number in advice.numbers}


# Memory that is made again --------------------------------------------------------------------------


def test_memory_made_again_in_a_loop_costs_its_first_touches_and_the_pauses_at_the_calls(said):
    found = said(with_faults(loop()))
    # Served again: 300 + 500. Pauses: 100 before the first kernel, 300 + 100, 400 + 100, and 500 at the end.
    assert found.gain.ns == (300 + 500) + (100 + 400 + 500 + 500)
    assert found.gain.kind == "reconstructed"
    assert values(found)["made again"] == 2
    assert values(found)["bytes made again"] == 2 * SIZE


def test_the_advice_names_the_allocation_its_size_and_how_often_it_is_made(said):
    found = said(with_faults(loop()))
    assert found.title.startswith("Allocate allocation 0 (16.00 MiB at 0x7f0000000000) once")
    assert found.title.endswith("3 times")
    assert (found.target.va, found.target.bytes, found.target.kernel) == (VA, SIZE, "add")
    assert f"cudaMallocManaged(&p0, {SIZE});" in found.calls[0]


def test_a_call_that_waits_for_the_gpu_counts_what_the_host_could_have_done_meanwhile(said):
    export = with_faults(loop())
    # The second cudaFree is called at 3500 and waits 500 ns for the kernel; its pause lasts 1000 ns.
    row = next(each for each in export.rows[RUNTIME] if each["start"] == 4000)
    row["start"] = 3500
    found = said(export)
    assert values(found)["pauses of GPUs at the calls, at most"] == 100 + 400 + (500 + 500) + 500


def test_a_pause_without_such_a_call_counts_nothing(said):
    export = with_faults(loop()).add(KERNEL, kernel(7000, 8000), kernel(20_000, 21_000))
    found = said(export)
    assert values(found)["pauses of GPUs at the calls, at most"] == 1500


def test_memory_that_is_kept_is_no_case(said):
    export = Export().add(
        MEMORY, memory_event(200, VA, SIZE), memory_event(6500, VA, SIZE, free=True)
    )
    found = said(export.add(KERNEL, kernel(1000, 2000)))
    assert isinstance(found, Silent)
    assert found.is_known
    assert "none was made again" in found.reason


def test_memory_that_is_made_again_once_is_no_habit(said):
    export = loop()
    export.rows[MEMORY] = export.rows[MEMORY][:4]
    found = said(export)
    assert (found.is_known, found.reason) == (
        True,
        "Of 2 managed allocations 1 of them was made again.",
    )


def test_without_rows_of_page_faults_there_is_no_bound_and_the_calls_alone_decide(said):
    found = said(loop(options={"COLLECT_UVM_GPU_PAGE_FAULTS": "false"}))
    assert found.gain is None
    assert found.level == "high"  # 1500 of 6400 ns
    assert "first touches of them" not in values(found)
    assert "page faults were not recorded" in found.finding


def test_where_gpu_memory_was_full_no_bound_is_claimed_and_the_level_is_one_less(said):
    out = migration(3150, 3250, 2 * MIB, VA + 64 * MIB, kind=DTOH, cause=EVICTION)
    found = said(with_faults(loop()).add(MEMCPY, out))
    assert found.gain is None
    assert found.level == "medium"
    assert "evicted" in found.remedy
    # Room would have to be made with a cache, too: its 100 ns are none of what first touches cost.
    assert values(found)["service of these"] == 300 - 100 + 500


def test_what_the_cpu_writes_first_is_said_to_have_to_come_back(said):
    quiet = said(with_faults(loop()))
    export = with_faults(loop()).add("CUDA_UM_CPU_PAGE_FAULT_EVENTS", cpu_fault(2700, VA + 4096))
    assert "CPU" not in quiet.remedy
    assert "What the CPU writes first" in said(export).remedy


def test_without_rows_of_allocations_it_is_not_known(said):
    export = loop(options={"COLLECT_GPU_MEMORY_USAGE": "false"})
    del export.rows[MEMORY]
    found = said(export)
    assert not found.is_known
    assert found.reason.startswith("3 calls allocated managed memory")
    assert "--cuda-memory-usage=true" in found.reason


def test_a_capture_without_managed_memory_has_none_to_keep(said):
    found = said(Export().add(KERNEL, kernel(1, 2)))
    assert (found.is_known, found.reason) == (
        True,
        "The capture has no call that allocates managed memory.",
    )


def by_loop(rows):
    """Say which allocations fit for more than half, one moment after the other."""
    moments = []
    for i, (pid, size, made, gone) in enumerate(rows):
        moments.append((made, 1, i, pid, size))
        if gone is not None:
            moments.append((gone, 0, i, pid, -size))
    held, most, found = {}, {}, {}
    for _, is_made, i, pid, change in sorted(moments):
        held[pid] = held.get(pid, 0) + change
        grown = max(held[pid] - most.get(pid, 0), 0)
        most[pid] = max(most.get(pid, 0), held[pid])
        if is_made:
            found[i] = 2 * grown < change and most[pid] - grown > 0
    return [found[i] for i in range(len(rows))]


@pytest.mark.parametrize("seed", range(8))
def test_what_fits_into_memory_given_back_is_found_as_by_a_plain_loop(seed):
    rng, rows = random.Random(seed), []
    for i in range(60):
        made = rng.randrange(1000)
        gone = made + 1 + rng.randrange(200) if rng.random() < 0.8 else None
        rows.append(
            (rng.choice((1, 2)), rng.randrange(1, 50), 10_000 * made + i, gone and 10_000 * gone)
        )
    columns = ("pid", "bytes", "alloc_ns", "free_ns")
    frame = pl.DataFrame(rows, schema=columns, orient="row").with_row_index("allocation_id")
    assert with_reuse(frame)["is_remade"].to_list() == by_loop(rows)


# Dead traffic ---------------------------------------------------------------------------------------


class Made:
    """Facts whose analyses are frames made by hand."""

    is_part = False

    def __init__(self, *, has_snapshot=True, summary=(), **frames):
        self.has_snapshot, self.frames = has_snapshot, frames
        empty = {"n": 0, "groups": [], "bytes": 0}
        self.summary = {"migrations": empty, "source_kind": "nsys-sqlite", **dict(summary)}

    def rows_of(self, name, _options=None):
        found = self.frames.get(name)
        return None if found is None or found.is_empty() else found

    def lazy(self, name, _options=None):
        return self.frames[name].lazy()

    def events(self, name):
        return self.frames[name].lazy() if name in self.frames else TABLES[name].empty()


def moved(*rows):
    """Parts of migrations: migration, from, to, direction, bytes, dead, batch; all in one segment."""
    names = ("migration", "start_ns", "end_ns", "direction", "bytes", "is_dead", "batch_id")
    frame = pl.DataFrame(rows, schema=names, orient="row")
    return frame.with_columns(OWN, segment_va=pl.lit(VA, pl.UInt64))


OWN = (pl.lit(1, pl.UInt32).alias("pid"), pl.lit(0, pl.Int64).alias("device_id"))
PYTHON = {"processes": pl.DataFrame({"name": ["python3"]})}


def test_dead_copies_count_by_their_share_and_each_instant_once():
    parts = moved(
        (0, 1000, 1100, "htod", 300, True, 0),  # three quarters of it: 1000 to 1075
        (0, 1000, 1100, "htod", 100, False, 0),
        (1, 1050, 1150, "htod", 400, True, 0),  # 1050 to 1150: together 1000 to 1150
        (2, 1200, 1300, "htod", 400, False, 0),
        (3, 1500, 1600, "dtoh", 400, True, 1),  # since 1450, when service of its batch began
        (4, 1700, 1800, "dtoh", 400, False, 1),
        (5, 1900, 2000, "dtoh", 400, True, 1),  # since 1800, when the copy before it ended
    )
    batches = pl.DataFrame({"batch_id": [0, 1], "end_ns": [1310, 2010], "service_ns": [330, 560]})
    found = dead_copies(Made(migrated_parts=parts, batches=batches.with_columns(OWN)))
    assert (found.in_bytes, found.out_bytes) == (700, 800)
    assert found.busy_ns == 150 + (1600 - 1450) + (2000 - 1800)
    assert found.waited_ns == found.busy_ns  # no kernel ran that could have gone on
    assert found.segments.rows() == [(VA, 2400, 1500)]


def launches(*spans, grid=1):
    rows = pl.DataFrame(spans, schema=("start_ns", "end_ns"), orient="row")
    return rows.with_columns(OWN, name=pl.lit("k"), demangled=pl.lit("k"), grid=grid, block=1)


@pytest.mark.parametrize(
    ("kernels", "waited"),
    [
        # Alone it takes 1000: the one with 200 of dead copies took 50 longer. 100 more lie beside kernels.
        (launches((0, 1050), (2000, 3000)), 50 + 100),
        # The quickest counts, and where the dead copies took less than that, they.
        (launches((0, 1050), (2000, 3000), (3000, 3700)), 200 + 100),
        # Shorter than alone: then it had less to do.
        (launches((0, 1050), (2000, 3500)), 200 + 100),
        # Never alone, or with another grid: nothing tells.
        (launches((0, 1050)), 200 + 100),
        (pl.concat([launches((0, 1050)), launches((2000, 3000), grid=2)]), 200 + 100),
    ],
)
def test_a_kernel_waited_for_dead_copies_no_longer_than_it_took_more_than_alone(kernels, waited):
    parts = moved(
        (0, 100, 300, "htod", 400, True, 0),
        (1, 1200, 1300, "htod", 400, True, 1),
    )
    batches = pl.DataFrame({"batch_id": [0, 1], "end_ns": [310, 1310], "service_ns": [220, 120]})
    batches = batches.with_columns(OWN)
    found = dead_copies(Made(migrated_parts=parts, batches=batches, kernels=kernels))
    assert (found.busy_ns, found.waited_ns) == (300, waited)


def test_dead_bytes_of_the_sample_are_those_that_the_model_knows():
    (found,) = dead_traffic(Asked(PCA_ON / "pca_on.sqlite"))
    truth = json.loads((PCA_ON / "model.json").read_text())["figures"]
    assert values(found)["dead bytes evicted"] == truth["dead_out_bytes"]
    assert values(found)["dead bytes brought back"] == truth["dead_in_bytes"]
    assert truth["dead_out_bytes"] > 0
    # Of the evicted bytes this part was dead; half of it has to go.
    part = truth["dead_out_bytes"] / truth["evicted_bytes"]
    assert found.gate == f"migrations.eviction_bytes>-{round(50 * part)}%"


def test_without_a_cache_nothing_that_moves_is_dead():
    (found,) = dead_traffic(Asked(REPOSITORY / "sample_data/model/pca_off/pca_off.sqlite"))
    assert isinstance(found, Silent)
    assert found.is_known
    assert found.reason.startswith("None of the 1.01 GiB")


@pytest.mark.parametrize(
    ("groups", "is_known", "words"),
    [
        ([], True, "No managed memory moved"),
        ([("htod", "coherence")], True, "Nothing was evicted"),
        ([("dtoh", "eviction")], False, "memory snapshot"),
        ([("htod", "unknown")], False, "memory snapshot"),
    ],
)
def test_without_a_snapshot_only_evictions_leave_it_open(groups, is_known, words):
    rows = [{"direction": way, "cause": cause, "bytes": 1} for way, cause in groups]
    summary = {"migrations": {"n": len(rows), "groups": rows}}
    (found,) = dead_traffic(Made(has_snapshot=False, summary=summary, **PYTHON))
    assert (found.is_known, words in found.reason) == (is_known, True)


@pytest.mark.parametrize(
    ("table", "column", "name", "is_torch"),
    [
        ("processes", "name", "python3.12", True),
        ("kernels", "demangled", "void at::native::vectorized_elementwise_kernel<4>(int)", True),
        ("nvtx_ranges", "name", "aten::add", True),
        ("processes", "name", "solver_python_free", False),
        ("kernels", "demangled", "void flat::natively<c10>()", False),
        ("nvtx_ranges", "name", "step", False),
    ],
)
def test_of_pytorch_advice_speaks_only_where_something_hints_at_it(table, column, name, is_torch):
    rows = [{"direction": "dtoh", "cause": "eviction", "bytes": 1}]
    facts = Made(
        has_snapshot=False,
        summary={"migrations": {"n": 1, "groups": rows}},
        **{
            table: TABLES[table].empty().collect().clear(1).with_columns(pl.lit(name).alias(column))
        },
    )
    for rule in (dead_traffic, fragmentation):
        (found,) = rule(facts)
        assert found.is_known != is_torch
        assert ("snapshot" in found.reason) == is_torch


def test_a_loop_of_cpp_gets_no_line_of_pytorch(said):
    found = said(loop())
    assert len(found.calls) == 1
    assert found.calls[0].startswith("cudaMallocManaged(&p0, ")


def test_a_snapshot_that_does_not_fit_is_no_all_clear():
    (found,) = dead_traffic(Made(summary={"migrations": {"n": 3, "groups": []}}))
    assert (found.is_known, found.reason) == (
        False,
        "The memory snapshot could not be laid over what moved.",
    )


def test_where_the_snapshot_knows_little_of_what_moved_it_is_no_all_clear():
    traffic = pl.DataFrame(
        {"state": ["unknown", "live"], "is_dead": [None, False], "bytes": [60, 40]}
    )
    (found,) = dead_traffic(Made(state_traffic=traffic))
    assert not found.is_known


# Fragments ------------------------------------------------------------------------------------------


def fragmented(saved, reserved=1000 * MIB, *, evicted=0, what_if=None):
    row = {
        "device_id": 0,
        "peak_reserved_bytes": reserved,
        "peak_active_bytes": reserved - saved,
        "utilization_fraction": 1 - saved / reserved,
        "baseline_reserved_bytes": reserved,
        "stitched_reserved_bytes": reserved - saved,
        "saved_bytes": saved,
        "most_saved_bytes": saved,
        "n_stitches": 3,
    }
    groups = [{"direction": "dtoh", "cause": "eviction", "bytes": evicted}] if evicted else []
    frames = {} if what_if is None else {"allocator_what_if": what_if}
    facts = Made(
        summary={"migrations": {"n": len(groups), "groups": groups}},
        stitching=pl.DataFrame([row]),
        **frames,
    )
    (found,) = fragmentation(facts)
    return found


@pytest.mark.parametrize(
    ("saved", "evicted", "level"),
    [(100, 1, "medium"), (99, 1, "low"), (30, 1, "low"), (100, 0, "low"), (99, 0, "info")],
)
def test_fragments_weigh_more_where_gpu_memory_was_full(saved, evicted, level):
    found = fragmented(saved * MIB, evicted=evicted * MIB)
    assert (found.level, found.gain) == (level, None)
    assert ("were evicted" in found.finding) == bool(evicted)


@pytest.mark.parametrize("saved", [-2, 0, 19, 29])
def test_few_fragments_are_no_case(saved):
    found = fragmented(saved * MIB, 100 * MIB if saved == 19 else 1000 * MIB)
    assert isinstance(found, Silent)
    assert found.is_known


def test_settings_are_named_only_where_they_help_and_never_expandable_segments_for_managed_memory():
    settings = {
        "max_split_size_mb:64": -30 * MIB,
        "roundup_power2_divisions:4": -50 * MIB,
        "garbage_collection_threshold:0.6": 0,
        "expandable_segments:True": -90 * MIB,
        "stitching": -100 * MIB,
    }
    what_if = pl.DataFrame(
        {"setting": list(settings), "difference_bytes": list(settings.values())}
    ).with_columns(out_of_memory=False)
    found = fragmented(100 * MIB, what_if=what_if)
    assert found.calls == (
        "PYTORCH_CUDA_ALLOC_CONF=roundup_power2_divisions:4  # reserves 50.00 MiB less (modelled)",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True  # only without managed memory: 90.00 MiB less (modelled)",
    )


def test_without_a_snapshot_or_its_history_fragments_are_not_known():
    for facts in (Made(has_snapshot=False, **PYTHON), Made()):
        (found,) = fragmentation(facts)
        assert not found.is_known


def test_levels_follow_from_the_gain_where_there_is_one(said):
    found = said(with_faults(loop()))
    assert isinstance(found, Advice)
    assert found.level is None
    # 2300 ns: a tenth of 23 000, less of any longer run.
    assert [level_of(found, span) for span in (23_000, 23_001)] == ["high", "medium"]
