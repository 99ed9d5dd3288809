"""What the caching allocator did to the driver: neighbours, dead traffic, the ledger of steps, the effect."""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter, defaultdict

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from nsan.analysis.catalog import find
from nsan.analysis.pca.costs import CostInput, step_costs
from nsan.analysis.pca.decomposition import decomposition
from nsan.analysis.pca.effect import PCA_EFFECT, pca_effect
from nsan.analysis.pca.first_touch import first_touches, ledger_input, silent_batches
from nsan.analysis.pca.join import JoinInput, join
from nsan.analysis.pca.ledger import LEDGER_READS, OF_HISTORY, step_ledger
from nsan.analysis.pca.ratios import ratios, warm_steps
from nsan.analysis.pca.sharing import (
    va_block_sharing,
    with_neighbours,
    with_service,
    with_tensors_there,
)
from nsan.analysis.pca.tables import (
    CLOCK_FITS,
    JOINED_TABLES,
    STATE,
    STEP_LEDGER,
    TENSOR_FAULTS,
    TENSOR_LIVES,
    TENSOR_MOVES,
)
from nsan.analysis.pca.traffic import (
    annotation_traffic,
    line_traffic,
    state_traffic,
    tensor_traffic,
    with_copy_ns,
)
from nsan.model.allocator_history import snapshot_frames
from nsan.model.machine import run
from nsan.model.making import oversubscribed
from nsan.model.placing import placed
from nsan.model.profiles import gpu_profile
from nsan.model.recording import record
from nsan.model.settings import DEFAULT_SETTINGS
from nsan.model.tensor_truth import dead_bytes, tensor_truth
from nsan.model.truth import TRUTH_TABLES
from nsan.model.workloads import network
from nsan.schema import ALLOCATIONS, API_CALLS, GPU_FAULTS, MIGRATIONS, NVTX_RANGES, TABLES
from nsan.torch_alloc.tables import SNAPSHOT_TABLES
from nsan.units import KIB, MIB

N = 200 if os.environ.get("NSAN_SOAK") == "1" else 10
BLOCK = 2 * MIB
A = 1 << 40
"""A VA block, and where the segment of most tests begins."""

JOIN = ("tensor_moves", "tensor_faults", "tensor_lives")


# Frames by hand. ----------------------------------------------------------------------------------


def frame(table, rows, **defaults):
    """Make a table of a join or trace of rows that name only what matters."""
    known = [{**dict.fromkeys(table.schema), **defaults, **row} for row in rows]
    return pl.DataFrame(known, schema=table.schema)


def moves(*rows):
    """One part per migration, each 10 ns after the one before, unless a row says otherwise."""
    numbered = [
        {
            "migration": number,
            "start_ns": 10 * number,
            "end_ns": 10 * number + 8,
            "is_dead": row.get("state", "live") in ("cached", "unused")
            or row.get("is_stale", False),
            **row,
        }
        for number, row in enumerate(rows)
    ]
    return frame(
        TENSOR_MOVES,
        numbered,
        pid=1,
        device_id=0,
        va=A,
        bytes=4 * KIB,
        direction="htod",
        cause="coherence",
        batch_id=0,
        position=10,
        order="stream",
        state="live",
        segment_va=A,
        is_stale=False,
    )


def faults(*rows):
    return frame(
        TENSOR_FAULTS,
        rows,
        pid=1,
        device_id=0,
        start_ns=0,
        processor="gpu",
        va=A,
        batch_id=0,
        position=10,
        order="stream",
        state="live",
        segment_va=A,
    )


def lives(*rows):
    return frame(
        TENSOR_LIVES,
        rows,
        pid=1,
        device_id=0,
        va=A,
        block_bytes=4 * KIB,
        reused_bytes=0,
        segment_va=A,
        segment_bytes=BLOCK,
        part="unattributed",
    )


def prefetched(tensor, **row):
    return {"cause": "prefetch", "tensor_id": tensor, **row}


def faulted(tensor, **row):
    return {"cause": "coherence", "tensor_id": tensor, **row}


def evicted(tensor, size=4 * KIB, **row):
    return {"direction": "dtoh", "cause": "eviction", "tensor_id": tensor, "bytes": size, **row}


def neighbours(*rows, fault_rows=()):
    """Numbers of the rows that are neighbours coming in, and of those going out."""
    found = with_neighbours(moves(*rows), faults(*fault_rows))
    return (
        [number for number, is_one in enumerate(found["neighbour_in"]) if is_one],
        [number for number, is_one in enumerate(found["neighbour_out"]) if is_one],
    )


# Neighbours coming in. ----------------------------------------------------------------------------


def test_live_bytes_prefetched_beside_a_tensor_that_faulted_are_a_neighbours():
    assert neighbours(faulted(1), prefetched(1), prefetched(2)) == ([2], [])


def test_a_tensor_that_faulted_itself_is_no_neighbour():
    assert neighbours(faulted(1), faulted(2), prefetched(2)) == ([], [])


@pytest.mark.parametrize(
    "other",
    [
        {"segment_va": A + BLOCK},
        {"segment_va": None},
        {"va": A + BLOCK},
        {"batch_id": 1},
        {"device_id": 1},
        {"pid": 2},
        {"state": "cached"},
        {"state": "pending"},
        {"is_stale": True},
        {"cause": "user"},
        {"direction": "dtod"},
    ],
)
def test_what_is_elsewhere_dead_or_asked_for_is_no_neighbour(other):
    assert neighbours(faulted(1), prefetched(2, **other)) == ([], [])


def test_bytes_that_may_be_stale_or_not_count_as_live():
    assert neighbours(faulted(1), prefetched(2, is_stale=None)) == ([1], [])


def test_without_a_fault_in_the_vablock_there_is_no_neighbour():
    assert neighbours(prefetched(1), prefetched(2)) == ([], [])


def test_copies_of_no_batch_have_no_neighbours():
    assert neighbours(faulted(1, batch_id=None), prefetched(2, batch_id=None)) == ([], [])


def test_the_page_of_the_fault_row_faulted_too():
    row = {"tensor_id": 1, "va": A + 4 * KIB}
    assert neighbours(prefetched(1), prefetched(2), fault_rows=[row]) == ([1], [])


@pytest.mark.parametrize(
    "other", [{"va": A + BLOCK}, {"batch_id": 1}, {"processor": "cpu"}, {"segment_va": A + BLOCK}]
)
def test_a_fault_row_elsewhere_makes_no_neighbour(other):
    row = {"tensor_id": 1, **other}
    assert neighbours(prefetched(2), fault_rows=[row]) == ([], [])


def test_a_fault_on_memory_of_no_tensor_makes_no_neighbour():
    assert neighbours(faulted(None, state="unused"), prefetched(2)) == ([], [])


# Neighbours going out. ----------------------------------------------------------------------------


def test_of_an_eviction_all_tensors_but_the_largest_are_neighbours():
    rows = [evicted(1, 8 * KIB), evicted(2, 4 * KIB), evicted(3, 6 * KIB), evicted(2, 3 * KIB)]
    assert neighbours(*rows) == ([], [1, 2, 3])


def test_of_tensors_of_the_same_size_the_first_is_the_largest():
    assert neighbours(evicted(2), evicted(1)) == ([], [0])


def test_a_tensor_alone_in_its_vablock_has_no_neighbour():
    assert neighbours(evicted(1), evicted(1)) == ([], [])


def test_tensors_of_two_segments_are_no_neighbours():
    assert neighbours(evicted(1), evicted(2, segment_va=A + MIB)) == ([], [])


def test_each_segment_of_a_vablock_has_its_own_largest_tensor():
    other = {"segment_va": A + MIB}
    rows = [evicted(1, 8), evicted(2, 4), evicted(3, 2, **other), evicted(4, 1, **other)]
    assert neighbours(*rows) == ([], [1, 3])


def test_cached_bytes_are_neither_a_neighbour_nor_the_largest():
    assert neighbours(evicted(1, 8 * KIB, state="cached"), evicted(2)) == ([], [])


def test_two_batches_are_two_evictions():
    assert neighbours(evicted(1), evicted(2, batch_id=1)) == ([], [])


def test_another_vablock_between_them_makes_two_evictions():
    assert neighbours(evicted(1), evicted(9, va=A + BLOCK), evicted(2)) == ([], [])


def test_an_arrival_between_them_does_not():
    assert neighbours(evicted(1), faulted(9, va=A + BLOCK), evicted(2)) == ([], [2])


def test_bytes_that_the_program_asks_out_are_no_neighbours():
    rows = [evicted(1), evicted(2, cause="user"), evicted(3, cause="coherence")]
    assert neighbours(*rows) == ([], [])


def test_marking_keeps_rows_and_order():
    given = moves(evicted(1), faulted(1, va=A + BLOCK), evicted(2)).reverse()
    found = with_neighbours(given, faults())
    assert_frame_equal(found.select(given.columns), given)
    assert found["neighbour_out"].to_list() == [True, False, False]


def neighbours_by_loop(rows, fault_rows):
    """The definitions of the two marks, word by word."""
    live = [row["state"] == "live" and not row["is_stale"] for row in rows]
    incoming = []
    for row, is_live in zip(rows, live, strict=True):
        place = (row["batch_id"], row["va"] // BLOCK)
        asked = [
            other
            for other in [*(r for r in rows if r["cause"] == "coherence"), *fault_rows]
            if (other["batch_id"], other["va"] // BLOCK) == place and other["tensor_id"] is not None
        ]
        incoming.append(
            row["cause"] == "prefetch"
            and is_live
            and row["batch_id"] is not None
            and row["tensor_id"] not in {other["tensor_id"] for other in asked}
            and row["segment_va"] in {other["segment_va"] for other in asked}
        )
    outgoing = [False] * len(rows)
    leaving = [number for number, row in enumerate(rows) if row["cause"] == "eviction"]
    together = itertools.groupby(leaving, lambda n: (rows[n]["va"] // BLOCK, rows[n]["batch_id"]))
    for _, numbers in together:
        sizes = defaultdict(Counter)
        members = [n for n in numbers if rows[n]["state"] == "live"]
        for n in members:
            sizes[rows[n]["segment_va"]][rows[n]["tensor_id"]] += rows[n]["bytes"]
        for n in members:
            there = sizes[rows[n]["segment_va"]]
            largest = min(there, key=lambda tensor: (-there[tensor], tensor))
            outgoing[n] = len(there) > 1 and rows[n]["tensor_id"] != largest
    return incoming, outgoing


def random_rows(dice, n):
    """Parts of tensors 1 to 8: 1 to 4 in the segment at A, the others in one beside it."""
    rows = []
    for _ in range(n):
        tensor = dice.randint(1, 8)
        cause = dice.choice(["coherence", "prefetch", "prefetch", "eviction", "eviction"])
        state = dice.choice(["live", "live", "live", "cached", "unused"])
        rows.append(
            {
                "tensor_id": None if state == "unused" else tensor,
                "segment_va": A if tensor < 5 else A + MIB,
                "va": A + dice.choice([0, 0, BLOCK]),
                "bytes": dice.randint(1, 9) * 512,
                "cause": cause,
                "direction": "dtoh" if cause == "eviction" else "htod",
                "batch_id": dice.choice([0, 0, 0, 1, None]),
                "state": state,
                "is_stale": cause != "eviction" and state == "live" and dice.random() < 0.2,
            }
        )
    return rows


@pytest.mark.parametrize("number", range(N))
def test_neighbours_are_those_of_a_plain_loop(number):
    dice = random.Random(number)
    rows = random_rows(dice, 60)
    fault_rows = [
        {"tensor_id": dice.randint(1, 8), "segment_va": A, "va": A, "batch_id": each}
        for each in (0, 1)
        if dice.random() < 0.3
    ]
    found = with_neighbours(moves(*rows), faults(*fault_rows))
    incoming, outgoing = neighbours_by_loop(rows, fault_rows)
    assert found["neighbour_in"].to_list() == incoming
    assert found["neighbour_out"].to_list() == outgoing


def test_services_of_a_vablock_follow_time_not_the_order_of_rows():
    given = moves(faulted(1), faulted(1, va=A + BLOCK), prefetched(1), prefetched(2)).reverse()
    found = with_service(given)["service"].to_list()
    assert found[0] == found[1]
    assert len(set(found)) == 3


# Who was there. -----------------------------------------------------------------------------------


def there(tensors, *positions, va=A):
    """Tensors that hold bytes of a VA block, and that hold or held them last, at some positions."""
    asked = pl.DataFrame({"position": positions}, schema={"position": pl.Int64}).with_columns(
        pid=pl.lit(1, pl.UInt32),
        segment_va=pl.lit(A, pl.UInt64),
        va_block=pl.lit(va // BLOCK, pl.UInt64),
    )
    found = with_tensors_there(asked, tensors)
    return list(zip(found["n_held"], found["n_there"], strict=True))


def test_a_tensor_is_held_after_its_allocation_until_its_free_is_complete():
    tensors = lives({"tensor_id": 1, "alloc_sequence": 3, "free_sequence": 7})
    assert there(tensors, 3, 4, 7, 8) == [(0, 0), (1, 1), (1, 1), (0, 1)]


def test_freed_bytes_stay_those_of_a_tensor_until_all_are_given_away():
    tensors = lives(
        {"tensor_id": 1, "alloc_sequence": 0, "free_sequence": 2, "block_bytes": 8 * KIB},
        {"tensor_id": 2, "alloc_sequence": 4, "reused_bytes": 4 * KIB},
        {"tensor_id": 3, "alloc_sequence": 6, "reused_bytes": 4 * KIB, "va": A + 4 * KIB},
    )
    assert there(tensors, 1, 3, 5, 7) == [(1, 1), (0, 1), (1, 2), (2, 2)]


def test_bytes_in_another_vablock_do_not_count():
    tensors = lives(
        {"tensor_id": 1, "alloc_sequence": 0, "block_bytes": BLOCK + 512},
        {"tensor_id": 2, "alloc_sequence": 1, "va": A + BLOCK + 512},
        {"tensor_id": 3, "alloc_sequence": 2, "va": A + 2 * BLOCK},
    )
    assert there(tensors, 9) == [(1, 1)]
    assert there(tensors, 9, va=A + BLOCK) == [(2, 2)]


def test_bytes_given_away_before_their_free_are_held_by_the_new_tensor_alone():
    """A history that lost a free: what was given to another tensor is no longer the first one's."""
    tensors = lives(
        {"tensor_id": 1, "alloc_sequence": 0},
        {"tensor_id": 2, "alloc_sequence": 4, "reused_bytes": 4 * KIB},
    )
    assert there(tensors, 3, 5) == [(1, 1), (1, 1)]


def test_a_block_that_was_held_before_the_history_is_there_from_its_begin():
    assert there(lives({"tensor_id": 1}), 0, 5) == [(1, 1), (1, 1)]


def test_a_segment_made_again_at_the_same_address_has_none_of_the_tensors_before():
    tensors = lives(
        {"tensor_id": 1, "alloc_sequence": 1, "free_sequence": 5},
        {"tensor_id": 2, "alloc_sequence": 2, "free_sequence": 5, "va": A + 8 * KIB},
        {"tensor_id": 3, "alloc_sequence": 9},
    )
    assert there(tensors, 6, 9, 10) == [(0, 2), (0, 2), (1, 1)]


def test_a_block_reused_at_the_begin_of_a_segment_leaves_the_others_there():
    tensors = lives(
        {"tensor_id": 1, "alloc_sequence": 1, "free_sequence": 5},
        {"tensor_id": 2, "alloc_sequence": 2, "free_sequence": 5, "va": A + 8 * KIB},
        {"tensor_id": 3, "alloc_sequence": 9, "reused_bytes": 4 * KIB},
    )
    assert there(tensors, 10) == [(1, 2)]


def test_what_is_outside_any_segment_or_of_no_known_position_has_no_count():
    asked = pl.DataFrame(
        {
            "pid": [1, 1],
            "segment_va": [None, A],
            "va_block": [A // BLOCK] * 2,
            "position": [9, None],
        },
        schema={
            "pid": pl.UInt32,
            "segment_va": pl.UInt64,
            "va_block": pl.UInt64,
            "position": pl.Int64,
        },
    )
    found = with_tensors_there(asked, lives({"tensor_id": 1, "alloc_sequence": 3}))
    assert found.select("n_held", "n_there").rows() == [(None, None)] * 2


def random_history(dice, n, slots=24):
    """A history of one segment of three VA blocks: blocks of whole slots, split and reused at will."""
    slot = 3 * BLOCK // slots
    free, held, last, tensors = [True] * slots, {}, [None] * slots, []
    for sequence in range(n):
        if held and dice.random() < 0.5:
            tensor = dice.choice([*held])
            for each in held.pop(tensor):
                free[each] = True
            tensors[tensor]["free_sequence"] = sequence
            continue
        # The first block of a segment lies at its begin.
        first = dice.randrange(slots) if tensors else 0
        size = next((k for k in range(7) if first + k >= slots or not free[first + k]), 7)
        if size:
            own = range(first, first + dice.randint(1, size))
            tensor = len(tensors)
            reused = sum(last[each] is not None for each in own)
            for each in own:
                free[each], last[each] = False, tensor
            held[tensor] = own
            tensors.append(
                {
                    "tensor_id": tensor,
                    "alloc_sequence": sequence,
                    "free_sequence": None,
                    "va": A + own[0] * slot,
                    "block_bytes": len(own) * slot,
                    "reused_bytes": reused * slot,
                    "slots": own,
                }
            )
    return tensors, slots


def there_by_loop(tensors, slots, block, position):
    last = [None] * slots
    held = set()
    for tensor in tensors:
        if tensor["alloc_sequence"] < position:
            for each in tensor["slots"]:
                last[each] = tensor["tensor_id"]
            if tensor["free_sequence"] is None or position <= tensor["free_sequence"]:
                held.add(tensor["tensor_id"])
    here = set(last[block * slots // 3 : (block + 1) * slots // 3]) - {None}
    return len(here & held), len(here)


@pytest.mark.parametrize("number", range(N))
def test_who_is_there_is_as_in_a_plain_loop(number):
    dice = random.Random(1000 + number)
    tensors, slots = random_history(dice, 80)
    known = lives(*({k: v for k, v in each.items() if k != "slots"} for each in tensors))
    positions = [*range(0, 84, 3)]
    for block in range(3):
        expected = [there_by_loop(tensors, slots, block, position) for position in positions]
        assert there(known, *positions, va=A + block * BLOCK) == expected


def test_sharing_of_vablocks_by_hand():
    moved = moves(
        faulted(1, position=2),
        prefetched(2, va=A + 4 * KIB, position=3, bytes=8 * KIB),
        evicted(1, position=5, batch_id=1),
        evicted(3, 12 * KIB, va=A + 12 * KIB, position=5, batch_id=1),
        evicted(None, va=A + 64 * BLOCK, segment_va=None, state="outside", batch_id=2),
    )
    rows = faults({"tensor_id": 1, "position": 2}, {"processor": "cpu", "tensor_id": 1})
    tensors = lives(
        {"tensor_id": 1, "alloc_sequence": 0},
        {"tensor_id": 2, "alloc_sequence": 1, "free_sequence": 3, "va": A + 4 * KIB},
        {"tensor_id": 3, "alloc_sequence": 4, "va": A + 12 * KIB},
        {"tensor_id": 4, "alloc_sequence": 6, "va": A + 24 * KIB},
        {"tensor_id": 5, "alloc_sequence": 0, "va": A + BLOCK},
    )
    found = va_block_sharing(*(each.lazy() for each in (moved, rows, tensors))).collect()
    columns = [name for name in found.columns if name[:2] in {"n_", "mo", "in", "ou", "ne"}]
    assert found["segment_va"].to_list() == [A, None]
    # Tensor 4 came after the last move, tensor 5 lies beside; at 3 lay 1 and 2, at 5 lay 1 and 3.
    assert found.select(columns).rows() == [
        (3, 2, 1, 12 * KIB, 16 * KIB, 8 * KIB, 4 * KIB),
        (None, None, 0, 0, 4 * KIB, 0, 0),
    ]


# Traffic. -----------------------------------------------------------------------------------------


def test_copy_time_is_shared_by_bytes_and_adds_up():
    whole = {"migration": 0, "start_ns": 0, "end_ns": 10}
    given = moves(
        *({**whole, "va": A + n * KIB, "bytes": KIB} for n in (2, 0, 1)),
        {"migration": 1, "start_ns": 20, "end_ns": 27, "bytes": 600},
        {"migration": 1, "start_ns": 20, "end_ns": 27, "bytes": 100, "va": A + 600},
        {"migration": 2, "end_ns": None},
    )
    # 10 over three equal parts: 3 each, and one more for the lowest. 7 over 600 and 100: 6 and 1.
    assert with_copy_ns(given)["copy_ns"].to_list() == [3, 4, 3, 6, 1, None]


def test_what_rounding_leaves_goes_to_the_part_with_the_largest_remainder():
    whole = {"migration": 0, "start_ns": 0, "end_ns": 10}
    given = moves(*({**whole, "va": A + n, "bytes": size} for n, size in enumerate((1, 5, 3))))
    # 10 x 1/9, 5/9, 3/9: 1.1, 5.6, 3.3.
    assert with_copy_ns(given)["copy_ns"].to_list() == [1, 6, 3]


def test_copy_time_of_sizes_beyond_64_bit_is_exact():
    long = {"migration": 0, "start_ns": 0, "end_ns": 1 << 45}
    given = moves({**long, "bytes": 1 << 40}, {**long, "bytes": 1 << 40, "va": A + (1 << 40)})
    assert with_copy_ns(given)["copy_ns"].to_list() == [1 << 44, 1 << 44]


def test_traffic_by_state_tells_dead_and_stale_from_live():
    given = moves(
        faulted(1, bytes=100),
        faulted(1, bytes=50, is_stale=True),
        faulted(1, bytes=25, is_stale=None, is_dead=None),
        evicted(2, 10, state="cached"),
        evicted(2, 15, state="cached"),
    )
    found = state_traffic(given.lazy()).collect()
    columns = ["direction", "state", "is_dead", "n_parts", "bytes", "bytes_fraction", "copy_ns"]
    assert found.select(columns).rows() == [
        ("htod", "live", None, 1, 25, 0.125, 8),
        ("htod", "live", False, 1, 100, 0.5, 8),
        ("htod", "live", True, 1, 50, 0.25, 8),
        ("dtoh", "cached", True, 2, 25, 0.125, 16),
    ]


MOVED = moves(
    faulted(1, bytes=100, device_id=1),
    prefetched(1, bytes=200),
    prefetched(1, bytes=40, state="cached"),
    {"cause": "user", "tensor_id": 2, "bytes": 7},
    {"cause": "access_counters", "tensor_id": 2, "bytes": 3},
    evicted(2, 5),
    {"cause": "coherence", "direction": "dtoh", "tensor_id": 2, "bytes": 4},
    evicted(None, 9, state="outside"),
)
FAULTED = faults(
    {"tensor_id": 1},
    {"tensor_id": 3, "state": "cached"},
    {"tensor_id": 3, "processor": "cpu", "device_id": None},
    {"processor": "cpu", "device_id": None, "state": "outside"},
)
LIVED = lives(
    {
        "tensor_id": 1,
        "block_bytes": 400,
        "part": "program",
        "source_line": 7,
        "annotation": "forward",
    },
    {"tensor_id": 2, "block_bytes": 100, "part": "program", "source_line": 7},
    {"tensor_id": 3, "block_bytes": 50, "annotation": "forward"},
    {"tensor_id": 4, "block_bytes": 50},
)
FIGURES = [
    "n_fault_rows",
    "n_cpu_faults",
    "in_bytes",
    "in_coherence_bytes",
    "in_prefetch_bytes",
    "in_user_bytes",
    "in_other_bytes",
    "out_bytes",
    "evicted_bytes",
    "dead_in_bytes",
    "dead_out_bytes",
    "refetch_ratio",
]
ONE = (1, 0, 340, 100, 240, 0, 0, 0, 0, 40, 0, 0.85)
TWO = (0, 0, 10, 0, 0, 7, 3, 9, 5, 0, 0, 0.1)
THREE = (1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0)
NOBODY = (0, 0, 0, 0, 0, 0, 0, 9, 9, 0, 0, None)
NOBODY_ON_CPU = (0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, None)


def of_tables(analysis, moved=MOVED, rows=FAULTED, tensors=LIVED):
    return analysis(moved.lazy(), rows.lazy(), tensors.lazy()).collect()


def test_traffic_by_tensor_by_hand_with_what_is_of_no_tensor():
    found = of_tables(tensor_traffic)
    keys = found.select("device_id", "tensor_id").rows()
    assert keys == [(0, 1), (0, 2), (0, None), (0, 3), (None, None)]
    assert found.select(FIGURES).rows() == [ONE, TWO, NOBODY, THREE, NOBODY_ON_CPU]


def test_traffic_by_line_adds_up_its_tensors():
    found = of_tables(line_traffic)
    both = (1, 0, 350, 100, 240, 7, 3, 9, 5, 40, 0, 0.7)
    assert found.select("part", "source_line", "n_tensors").rows() == [
        ("program", 7, 2),
        (None, None, 0),
        ("unattributed", None, 1),
        (None, None, 0),
    ]
    assert found.select(FIGURES).rows() == [both, NOBODY, THREE, NOBODY_ON_CPU]


def test_traffic_by_annotation_tells_tensors_outside_of_ranges_from_no_tensor():
    found = of_tables(annotation_traffic)
    forward = (2, 1, 340, 100, 240, 0, 0, 0, 0, 40, 0, 340 / 450)
    assert found.select("annotation", "is_tensor", "n_tensors").rows() == [
        ("forward", True, 2),
        (None, True, 1),
        (None, False, 0),
        (None, False, 0),
    ]
    assert found.select(FIGURES).rows() == [forward, TWO, NOBODY, NOBODY_ON_CPU]


@pytest.mark.parametrize("analysis", [tensor_traffic, line_traffic, annotation_traffic])
@pytest.mark.parametrize("number", range(N))
def test_traffic_adds_up_to_the_moves_and_faults(analysis, number):
    dice = random.Random(2000 + number)
    moved = moves(*({**row, "device_id": dice.choice([0, 1])} for row in random_rows(dice, 50)))
    rows = faults(
        *(
            {
                "tensor_id": dice.choice([None, *range(1, 9)]),
                "processor": dice.choice(["gpu", "cpu"]),
            }
            for _ in range(20)
        )
    )
    tensors = lives(
        *({"tensor_id": n, "source_line": n % 3, "annotation": f"{n % 2}"} for n in range(1, 9))
    )
    found = of_tables(analysis, moved, rows, tensors)
    sums = Counter()
    for row in moved.iter_rows(named=True):
        way = "out" if row["direction"] == "dtoh" else "in"
        sums[f"{way}_bytes"] += row["bytes"]
        sums[f"dead_{way}_bytes"] += row["bytes"] * row["is_dead"]
        if way == "in":
            sums[f"in_{row['cause']}_bytes"] += row["bytes"]
    for name, total in sums.items():
        assert found[name].sum() == total, name
    processors = Counter(rows["processor"].to_list())
    assert found["n_fault_rows"].sum() == processors["gpu"]
    assert found["n_cpu_faults"].sum() == processors["cpu"]


def test_what_one_gpu_moves_of_a_tensor_of_another_is_no_memory_of_no_tensor():
    moved = moves(
        faulted(1, bytes=100, device_id=1),
        faulted(None, bytes=7, device_id=1, state="outside", segment_va=None),
    )
    for analysis in (line_traffic, annotation_traffic):
        found = of_tables(analysis, moved, faults())
        rows = found.select("device_id", "n_tensors", "block_bytes", "in_bytes").rows()
        assert rows == [(0, 1, 400, 100), (1, 0, None, 7)]


def test_tensors_that_were_left_out_of_the_lives_are_not_memory_of_no_tensor():
    moved = moves(faulted(9, bytes=100), faulted(None, bytes=7, state="outside", segment_va=None))
    found = of_tables(line_traffic, moved, faults())
    rows = found.select("part", "n_tensors", "block_bytes", "refetch_ratio", "in_bytes").rows()
    assert rows == [("unattributed", 1, None, None, 100), (None, 0, None, None, 7)]


# What the history does not tell. ------------------------------------------------------------------

UNKNOWN = {
    "state": "unknown",
    "tensor_id": None,
    "segment_va": None,
    "position": None,
    "is_stale": None,
    "is_dead": None,
}


def untold(tables, where, names=JOIN[:2]):
    """Let the history not tell of some of the moves and fault rows."""
    found = dict(tables)
    for name in names:
        table = tables[name].collect()
        known = {key: value for key, value in UNKNOWN.items() if key in table.columns}
        found[name] = table.with_columns(
            pl.when(where)
            .then(pl.lit(value, table.schema[key]))
            .otherwise(key)
            .cast(table.schema[key])
            .alias(key)
            for key, value in known.items()
        ).lazy()
    return found


CACHED = pl.col("state") == "cached"
STARTS = pl.col("start_ns")


def test_bytes_of_unknown_state_are_neither_dead_nor_live_and_stay_in_the_sums():
    tables = untold(small_run(), CACHED)
    found = effect(tables).row(0, named=True)
    expected = {
        "in_bytes": 20 * KIB,
        "out_bytes": 8 * KIB,
        "unknown_bytes": 4 * KIB,
        "dead_in_bytes": 0,
        "outside_bytes": 0,
        "dead_fraction": 0.0,
        # The batch that brought them may be dead or not.
        "n_dead_rows": None,
        "n_first_touch": 2,
    }
    assert {name: found[name] for name in expected} == expected
    states = state_traffic(tables["tensor_moves"]).collect()
    assert states["bytes"].sum() == 28 * KIB
    assert states.filter(state="unknown").select("is_dead", "bytes").rows() == [(None, 4 * KIB)]
    for analysis in (tensor_traffic, line_traffic, annotation_traffic):
        rows = analysis(*(tables[name] for name in JOIN)).collect()
        assert rows["in_bytes"].sum() + rows["out_bytes"].sum() == 28 * KIB
        nobody = rows.filter(pl.col("block_bytes").is_null())
        assert nobody.select("n_fault_rows", "in_bytes", "dead_in_bytes").rows() == [
            (1, 4 * KIB, 0)
        ]
        assert "n_tensors" not in rows.columns or nobody["n_tensors"].to_list() == [0]
    blocks = va_block_sharing(*(tables[name] for name in JOIN)).collect()
    assert blocks["in_bytes"].sum() == 20 * KIB


def test_a_share_of_dead_bytes_is_of_those_whose_state_is_known():
    tables = untold(small_run(), STARTS == 2500)
    # 4 KiB of 28 were dead, of 24 now.
    assert effect(tables)["dead_fraction"].to_list() == [1 / 6]
    assert effect(tables)["n_dead_rows"].to_list() == [1]


def test_a_batch_of_known_live_and_unknown_bytes_is_not_dead():
    tables = untold(small_run(), STARTS == 1355)
    assert effect(tables)["n_dead_rows"].to_list() == [1]


def test_bytes_placed_by_overlapping_work_or_by_time_alone_are_counted():
    out = {"direction": "dtoh"}
    given = moves(
        {"bytes": 3},
        {"bytes": 8, "order": "overlap"},
        {"bytes": 16, "order": "overlap", **out, "cause": "eviction"},
        {"bytes": 32, "order": "overlap", **UNKNOWN},
        {"bytes": 1, "order": "host"},
        {"bytes": 2, "order": "host", **out, "cause": "eviction"},
        {"bytes": 4, "order": "host", **out, "cause": "user"},
        # Asked for by faults of the CPU: in the order of the host by right.
        {"bytes": 64, "order": "host", **out, "cause": "coherence"},
        {"bytes": 128, "order": "host", **out, "cause": "prefetch"},
        {"bytes": 256, "order": "host", **UNKNOWN},
        {"bytes": 512, "order": None, **UNKNOWN},
    )
    found = effect(tables_of(tensor_moves=given))
    names = ["overlap_bytes", "host_order_bytes", "unknown_bytes"]
    assert found.select(names).rows() == [(24, 7, 800)]


@pytest.mark.parametrize(
    "which",
    [
        ("tensor_moves", STARTS == 1320),
        ("tensor_moves", STARTS == 1355),
        ("tensor_faults", STARTS == 1300),
    ],
)
def test_a_step_that_the_history_does_not_tell_wholly_has_no_figure_of_it(which):
    name, where = which
    found = ledger(untold(small_run(), where, [name]))
    unknown, whole = found.row(0, named=True), found.row(1, named=True)
    expected = STEP_0 | dict.fromkeys(OF_HISTORY)
    assert {key: unknown[key] for key in expected} == expected
    assert {key: whole[key] for key in STEP_1} == STEP_1


def test_a_fault_of_the_cpu_that_the_history_does_not_tell_is_of_any_gpu():
    tables = small_run()
    more = faults({"start_ns": 2900, "processor": "cpu", "device_id": None, "batch_id": None})
    tables["tensor_faults"] = pl.concat([tables["tensor_faults"].collect(), more]).lazy()
    assert ledger(tables)["dead_in_bytes"].to_list() == [0, 4 * KIB]
    found = ledger(untold(tables, STARTS == 2900, ["tensor_faults"]))
    assert found["dead_in_bytes"].to_list() == [0, None]
    elsewhere = pl.lit(7, pl.UInt32).alias("pid")
    tables["tensor_faults"] = tables["tensor_faults"].with_columns(
        pl.when(STARTS == 2900).then(elsewhere).otherwise("pid")
    )
    found = ledger(untold(tables, STARTS == 2900, ["tensor_faults"]))
    assert found["dead_in_bytes"].to_list() == [0, 4 * KIB]


def test_a_first_touch_on_memory_of_unknown_state_is_one_but_nothing_says_that_it_is_shared():
    found = effect(untold(small_run(), STARTS == 1100))
    assert found.select("n_first_touch", "first_touch_ns").rows() == [(2, 110)]
    names = ["n_shared_first_touch", "n_first_touch_avoided", "n_first_touch_avoided_error"]
    assert found.select(names).rows() == [(None,) * 3]


def without_pid(tables, *names):
    nobody = pl.lit(None, pl.UInt32).alias("pid")
    return tables | {name: tables[name].with_columns(nobody) for name in names}


def test_where_copies_do_not_say_their_process_no_silent_batch_is_a_first_touch():
    """Every fault row looks as if it had copied nothing: 4 first touches where 2 are right."""
    tables = without_pid(untold(small_run(), STARTS >= 0), "migrations", "tensor_moves")
    names = ["n_first_touch", "first_touch_ns", "n_shared_first_touch", "n_dead_rows"]
    found = effect(tables)
    assert found.select("pid", "in_bytes", *names).rows() == [
        (None, 20 * KIB, *(None,) * 4),
        (1, 0, *(None,) * 4),
    ]
    steps = ledger(tables)
    # What was moved in the step may be of its process.
    assert steps.select("in_bytes", "out_bytes", *names).rows() == [(None,) * 6] * 2
    assert steps["n_fault_rows"].to_list() == [2, 1]


def test_where_no_row_says_its_process_all_belong_together():
    tables = small_run()
    nowhere = without_pid(
        tables, *(name for name in tables if "pid" in tables[name].collect_schema())
    )
    assert_frame_equal(effect(nowhere).drop("pid"), effect(tables).drop("pid"))
    assert_frame_equal(ledger(nowhere).drop("pid"), ledger(tables).drop("pid"))


def test_fault_rows_that_do_not_say_their_process_are_of_no_step():
    assert ledger(without_pid(small_run(), "gpu_faults"))["n_fault_rows"].to_list() == [None] * 2


def test_a_copy_without_an_address_leaves_first_touches_unknown():
    nowhere = pl.when(STARTS == 1350).then(None).otherwise("va").alias("va")
    tables = small_run()
    tables["migrations"] = tables["migrations"].with_columns(nowhere)
    assert effect(tables)["n_first_touch"].to_list() == [None]


def n_tensors_of_steps(*limits, **tables):
    found = ledger(small_run() | {"nvtx_ranges": ranges(*limits).lazy(), **tables})
    return found["n_tensors"].to_list(), found["dead_in_bytes"].to_list()


def test_steps_outside_of_all_that_a_snapshot_tells_have_unknown_tensors():
    """Tensors are known from 50 to 2000; nothing moves in the first and the last step."""
    steps = ((0, 50), (1000, 2500), (3000, 4000))
    assert n_tensors_of_steps(*steps) == ([None, 3, None], [0, 4 * KIB, 0])
    # Without a snapshot the trace has all that was allocated.
    none = CLOCK_FITS.empty()
    assert n_tensors_of_steps(*steps, clock_fits=none)[0] == [0, 3, 0]


def test_the_end_of_a_tensor_is_known_to_the_history_too():
    freed = small_run()["tensor_lives"].with_columns(free_ns=pl.lit(3000, pl.Int64))
    assert n_tensors_of_steps((3000, 4000), tensor_lives=freed)[0] == [0]


def test_a_process_of_which_the_snapshot_knows_no_tensor_has_unknown_tensors():
    elsewhere = small_run()["tensor_lives"].with_columns(pid=pl.lit(7, pl.UInt32))
    assert n_tensors_of_steps((1000, 2000), tensor_lives=elsewhere)[0] == [None]
    other_gpu = small_run()["tensor_lives"].with_columns(device_id=pl.lit(7, pl.Int64))
    found = ledger(small_run() | {"tensor_lives": other_gpu})
    assert found.filter(device_id=0)["n_tensors"].to_list() == [0, 0]


def test_what_a_step_cost_is_unknown_where_the_history_does_not_tell_it():
    tables = untold(small_run(), STARTS == 1320)
    steps = ledger(tables)
    names = (*JOIN, "allocations", "gpu_faults", "migrations")
    found = ledger_input(*(tables[name] for name in names))
    nothing = pl.LazyFrame(
        schema={name: steps.schema[name] for name in ("pid", "device_id", "start_ns", "end_ns")}
    )
    costs = step_costs(steps, CostInput(found, nothing, tables["api_calls"]))
    known = {"pid", "device_id", "step", "idle_ns", "other_idle_ns"}
    first, second = costs.rows(named=True)
    assert {name for name, value in first.items() if value is not None} == known
    assert second["rest_ns"] is not None
    both = pl.concat([steps, costs.drop("pid", "device_id", "step")], how="horizontal")
    off, on = warm_steps(ledger_of_zeros(both), warmup=0), warm_steps(both, warmup=0)
    parts = decomposition(off, on)
    dead = parts.filter(figure="in_bytes")
    assert dict(dead.select("part", "value").rows()) == {
        "difference": 10 * KIB,
        "reuse": 0,
        "dead": None,
        "packing": None,
        "remainder": 10 * KIB,
    }
    assert ratios(off, on).filter(figure="in_bytes")["on"].to_list() == [10 * KIB]


def ledger_of_zeros(frame):
    times = {"pid", "device_id", "step", "start_ns", "end_ns", "wall_ns"}
    return frame.with_columns(
        pl.lit(0, dtype).alias(name) for name, dtype in frame.schema.items() if name not in times
    )


# The ledger. --------------------------------------------------------------------------------------


def tables_of(**given):
    """Every table that the ledger and the effect read, empty where none is given."""
    found = {name: table.empty() for name, table in {**JOINED_TABLES, **TABLES}.items()}
    return found | {name: each.lazy() for name, each in given.items()}


def ledger(tables, **options):
    return step_ledger(*(tables[name] for name in LEDGER_READS), **options).collect()


def effect(tables):
    names = [*PCA_READS]
    return pca_effect(*(tables[name] for name in names)).collect()


PCA_READS = (
    "clock_fits",
    "tensor_moves",
    "tensor_faults",
    "tensor_lives",
    "allocations",
    "gpu_faults",
    "migrations",
)


def ranges(*limits, name="step", pid=1):
    rows = [{"start_ns": a, "end_ns": b, "name": name, "pid": pid} for a, b in limits]
    return frame(NVTX_RANGES, rows)


def fault_rows(*rows):
    """Rows of the fault table: start, end, address."""
    named = [{"start_ns": a, "end_ns": b, "va": va} for a, b, va in rows]
    return frame(GPU_FAULTS, named, pid=1, device_id=0, n_page_faults=1, access="read", access_id=1)


def copies(*rows):
    """Migrations: start, end, address, bytes, direction, cause."""
    ids = {"user": 1, "coherence": 2, "prefetch": 3, "eviction": 4}
    named = [
        {
            "start_ns": a,
            "end_ns": b,
            "va": va,
            "bytes": size,
            "direction": way,
            "cause": cause,
            "cause_id": ids[cause],
        }
        for a, b, va, size, way, cause in rows
    ]
    return frame(MIGRATIONS, named, pid=1, device_id=0)


def parts_of(migrations, *named):
    """The parts of migrations, one each, as a join would give them."""
    rows = [
        {**row, "migration": number, **own}
        for number, (row, own) in enumerate(
            zip(migrations.iter_rows(named=True), named, strict=True)
        )
    ]
    keys = [*TENSOR_MOVES.schema]
    return moves(*({k: v for k, v in row.items() if k in keys} for row in rows))


def small_run():
    """Two steps of 1000 ns, a setup before them; three tensors of 4 KiB in one VA block.

    Batches: 0 in the setup, a first touch; 1 in step 0, a first touch; 2 in step 0 brings 4 KiB by fault
    and 8 KiB by prefetch and evicts; 3 in step 1 brings cached bytes only.
    """
    rows = fault_rows(
        (100, 150, A),
        (1100, 1160, A + 8 * KIB),
        (1300, 1400, A + BLOCK),
        (2100, 2200, A + 2 * BLOCK),
    )
    moved = copies(
        (1320, 1330, A, 8 * KIB, "dtoh", "eviction"),
        (1350, 1354, A + BLOCK, 4 * KIB, "htod", "coherence"),
        (1355, 1363, A + BLOCK + 4 * KIB, 8 * KIB, "htod", "prefetch"),
        (2150, 2156, A + 2 * BLOCK, 4 * KIB, "htod", "coherence"),
        (2500, 2510, A + BLOCK, 4 * KIB, "htod", "user"),
    )
    parts = parts_of(
        moved,
        {"tensor_id": 1, "batch_id": 2},
        {"tensor_id": 3, "batch_id": 2},
        {"tensor_id": 4, "batch_id": 2},
        {"tensor_id": 5, "batch_id": 3, "state": "cached", "is_dead": True},
        {"tensor_id": 3, "batch_id": None},
    )
    # The first migration is of two tensors: half each.
    first = parts.row(0, named=True)
    halves = [
        {**first, "bytes": 4 * KIB},
        {**first, "bytes": 4 * KIB, "va": A + 4 * KIB, "tensor_id": 2},
    ]
    parts = pl.concat([pl.DataFrame(halves, schema=TENSOR_MOVES.schema), parts[1:]])
    return tables_of(
        tensor_moves=parts,
        tensor_faults=faults(
            {"start_ns": 100, "va": A, "batch_id": 0, "tensor_id": 1, "position": 1},
            {"start_ns": 1100, "va": A + 8 * KIB, "batch_id": 1, "tensor_id": 2, "position": 4},
            {"start_ns": 1300, "va": A + BLOCK, "batch_id": 2, "tensor_id": 3},
            {
                "start_ns": 2100,
                "va": A + 2 * BLOCK,
                "batch_id": 3,
                "tensor_id": 5,
                "state": "cached",
            },
        ),
        tensor_lives=lives(
            {"tensor_id": 1, "alloc_sequence": 0, "alloc_ns": 50},
            {
                "tensor_id": 2,
                "alloc_sequence": 3,
                "alloc_ns": 1050,
                "va": A + 4 * KIB,
                "block_bytes": 8 * KIB,
            },
            {"tensor_id": 3, "alloc_sequence": 5, "alloc_ns": 1250, "va": A + BLOCK},
            {
                "tensor_id": 4,
                "alloc_sequence": 6,
                "alloc_ns": 2000,
                "va": A + BLOCK + 4 * KIB,
                "reused_bytes": KIB,
            },
            {
                "tensor_id": 5,
                "alloc_sequence": 7,
                "free_sequence": 8,
                "alloc_ns": None,
                "va": A + 2 * BLOCK,
            },
        ),
        nvtx_ranges=ranges((1000, 2000), (2000, 3000)),
        api_calls=frame(
            API_CALLS,
            [
                {"start_ns": 40, "end_ns": 45, "name": "cudaMallocManaged_v6000"},
                {"start_ns": 1010, "end_ns": 1030, "name": "cudaMallocManaged_v6000"},
                {"start_ns": 1020, "end_ns": 1040, "name": "cuMemFree_v2"},
                {"start_ns": 1050, "end_ns": 1060, "name": "cudaFreeHost_v2020"},
                {"start_ns": 1990, "end_ns": 2020, "name": "cudaFree_v3020"},
            ],
            pid=1,
        ),
        allocations=frame(
            ALLOCATIONS,
            [
                {"alloc_ns": 45, "va": A, "kind": "managed"},
                {"alloc_ns": 1030, "va": A + 8 * BLOCK, "kind": "managed", "free_ns": 1500},
                {"alloc_ns": 1040, "va": A + 16 * BLOCK, "kind": "device"},
            ],
            pid=1,
            device_id=0,
            bytes=4 * BLOCK,
        ),
        gpu_faults=rows,
        migrations=moved,
        clock_fits=frame(
            CLOCK_FITS,
            [
                {"method": "segments", "is_used": True, "residual_max_ns": 300.0},
                {"method": "session_start", "is_used": False, "residual_max_ns": 9e9},
            ],
        ),
    )


STEP_0 = {
    "wall_ns": 1000,
    "n_fault_rows": 2,
    "n_first_touch": 1,
    "first_touch_ns": 60,
    "n_shared_first_touch": 1,
    "n_dead_rows": 0,
    "n_managed_allocs": 1,
    "n_tensors": 2,
    "tensor_bytes": 12 * KIB,
    "reused_bytes": 0,
    # 1010 to 1040, and 1990 to the end of the step.
    "memory_api_ns": 40,
    "in_bytes": 12 * KIB,
    "out_bytes": 8 * KIB,
    "dead_in_bytes": 0,
    "dead_out_bytes": 0,
    "dead_in_ns": 0,
    "dead_out_ns": 0,
    "neighbour_in_bytes": 8 * KIB,
    "neighbour_out_bytes": 4 * KIB,
    "neighbour_in_ns": 8,
    "neighbour_out_ns": 5,
}
STEP_1 = {
    "wall_ns": 1000,
    "n_fault_rows": 1,
    "n_first_touch": 0,
    "first_touch_ns": 0,
    "n_shared_first_touch": 0,
    "n_dead_rows": 1,
    "n_managed_allocs": 0,
    "n_tensors": 1,
    "tensor_bytes": 4 * KIB,
    "reused_bytes": KIB,
    "memory_api_ns": 0,
    "in_bytes": 8 * KIB,
    "out_bytes": 0,
    "dead_in_bytes": 4 * KIB,
    "dead_out_bytes": 0,
    "dead_in_ns": 6,
    "dead_out_ns": 0,
    "neighbour_in_bytes": 0,
    "neighbour_out_bytes": 0,
    "neighbour_in_ns": 0,
    "neighbour_out_ns": 0,
}


def test_the_ledger_of_a_small_run_by_hand():
    found = ledger(small_run())
    assert found.select("pid", "device_id", "step").rows() == [(1, 0, 0), (1, 0, 1)]
    for row, expected in zip(found.iter_rows(named=True), (STEP_0, STEP_1), strict=True):
        assert {name: row[name] for name in expected} == expected


def test_a_row_that_starts_where_a_step_ends_is_not_in_it():
    for end, n_rows in ((1300, 1), (1301, 2)):
        found = ledger(small_run() | {"nvtx_ranges": ranges((1000, end)).lazy()})
        assert found["n_fault_rows"].to_list() == [n_rows]


def test_a_first_touch_beside_a_tensor_that_was_freed_is_shared_too():
    tables = small_run()
    before = pl.col("tensor_id") == 1
    gone = pl.when(before).then(2).otherwise("free_sequence").alias("free_sequence")
    tables["tensor_lives"] = tables["tensor_lives"].with_columns(gone)
    assert ledger(tables)["n_shared_first_touch"].to_list() == [1, 0]
    alone = tables | {"tensor_lives": tables["tensor_lives"].filter(~before)}
    assert ledger(alone)["n_shared_first_touch"].to_list() == [0, 0]


def test_a_batch_of_bytes_that_may_be_stale_or_not_is_not_dead():
    tables = small_run()
    live = {"state": pl.lit("live", STATE), "is_dead": pl.lit(None, pl.Boolean)}
    tables["tensor_moves"] = tables["tensor_moves"].with_columns(**live)
    found = ledger(tables)
    assert found["n_dead_rows"].to_list() == [0, 0]
    assert found["dead_in_bytes"].to_list() == [0, 0]


def test_a_step_is_the_range_that_the_option_names():
    tables = small_run() | {"nvtx_ranges": ranges((1000, 3000), name="train").lazy()}
    assert ledger(tables).height == 0
    found = ledger(tables, step="train")
    assert found["in_bytes"].to_list() == [20 * KIB]


def test_of_steps_that_overlap_the_earlier_counts():
    tables = small_run() | {"nvtx_ranges": ranges((1000, 3000), (1200, 1400), (2000, 3100)).lazy()}
    assert ledger(tables).select("step", "start_ns", "in_bytes").rows() == [(0, 1000, 20 * KIB)]


def test_steps_of_another_process_have_rows_of_their_own_gpus_only():
    more = pl.concat([ranges((1000, 2000)), ranges((0, 9000), pid=2)])
    found = ledger(small_run() | {"nvtx_ranges": more.lazy()})
    assert found.select("pid", "step", "in_bytes").rows() == [(1, 0, 12 * KIB)]


def test_without_fault_rows_what_batches_did_is_null_in_the_ledger_and_the_effect():
    """That the rows themselves were not recorded only the capture knows."""
    tables = small_run() | {"gpu_faults": GPU_FAULTS.empty()}
    unknown = ["n_first_touch", "first_touch_ns", "n_shared_first_touch", "n_dead_rows"]
    found = ledger(tables)
    assert found.select(unknown).rows() == [(None,) * 4] * 2
    assert found["in_bytes"].to_list() == [12 * KIB, 8 * KIB]
    whole = effect(tables)
    more = ["n_first_touch_avoided", "n_first_touch_avoided_error"]
    assert whole.select(*unknown, *more).rows() == [(None,) * 6]
    assert whole["in_bytes"].to_list() == [20 * KIB]


def test_where_the_rows_of_a_gpu_are_no_batches_only_their_number_is_known():
    other = fault_rows((1100, 1200, A)).with_columns(device_id=pl.lit(5, pl.Int64))
    found = ledger(small_run() | {"gpu_faults": other.lazy()})
    columns = ["device_id", "n_fault_rows", "n_first_touch", "n_dead_rows"]
    # GPU 0 has batches of copies and no row: its rows are missing. GPU 5 has one row.
    assert found.filter(step=0).select(columns).rows() == [(0, 0, None, None), (5, 1, 1, 0)]


def test_the_ledger_adds_up_to_the_run_where_steps_cover_it():
    tables = small_run() | {"nvtx_ranges": ranges((0, 1100), (1100, 1355), (1355, 9000)).lazy()}
    sums, whole = ledger(tables).sum(), effect(tables)
    shared = [
        name
        for name in STEP_LEDGER.schema
        if name in PCA_EFFECT.schema and name not in {"pid", "device_id"}
    ]
    assert len(shared) > 15
    # The tensor without a time is in no step.
    known = [name for name in shared if name not in {"n_tensors", "tensor_bytes"}]
    assert sums.select(known).rows() == whole.select(known).cast(sums.select(known).schema).rows()
    assert (whole["n_tensors"].item(), sums["n_tensors"].item()) == (5, 4)


@pytest.mark.parametrize(
    "name", ["pca_effect", "step_ledger", "tensor_traffic", "va_block_sharing"]
)
def test_the_columns_that_an_analysis_declares_are_all_that_it_reads(name):
    tables = small_run()
    found = find(name)
    whole = found.function(*(tables[each] for each in found.reads)).collect()
    assert whole.height > 0
    assert_frame_equal(found.run(tables).collect(), whole)


def test_order_of_rows_does_not_matter():
    tables = small_run()
    turned = {name: each.reverse() for name, each in tables.items()}
    assert_frame_equal(ledger(turned), ledger(tables))
    assert_frame_equal(effect(turned), effect(tables))


# First touches. -----------------------------------------------------------------------------------


def touched(rows, moved, *allocated):
    spans = [{"alloc_ns": a, "free_ns": b, "va": va} for a, b, va in allocated]
    known = frame(ALLOCATIONS, spans, pid=1, device_id=0, bytes=BLOCK, kind="managed")
    named = {"allocations": known, "gpu_faults": rows, "migrations": moved}
    tables = tables_of(**named)
    found = ledger_input(*(tables[name] for name in (*JOIN, *named)))
    return first_touches(found)["start_ns"].to_list()


CAME = copies((120, 140, A, 4 * KIB, "htod", "coherence"))
LEFT = copies((120, 140, A, 4 * KIB, "dtoh", "eviction"))
FIRST, AGAIN = (110, 150, A), (500, 560, A)


def test_memory_made_again_at_an_address_that_moved_before_is_touched_for_the_first_time():
    assert touched(fault_rows(FIRST, AGAIN), CAME, (0, 300, A), (400, None, A)) == [500]


def test_a_silent_batch_on_a_page_that_came_for_the_same_allocation_is_none():
    assert touched(fault_rows(FIRST, AGAIN), CAME, (0, None, A)) == []


def test_memory_made_again_where_bytes_only_left_before_is_touched_for_the_first_time():
    assert touched(fault_rows(AGAIN), LEFT, (0, 300, A), (400, None, A)) == [500]
    assert touched(fault_rows(AGAIN), LEFT, (0, None, A)) == []


def test_a_page_that_an_older_allocation_still_holds_is_not_new():
    older, younger = (0, None, A - BLOCK + 1024), (400, None, A + 1024)
    assert touched(fault_rows(FIRST, AGAIN), CAME, older, younger) == []


def test_without_allocations_only_what_never_moved_is_a_first_touch():
    assert touched(fault_rows(FIRST, AGAIN, (700, 760, A + BLOCK)), CAME) == [700]


def held(allocated, state="live", position=6):
    """First touches where a page came at position 3, and a silent batch hits a tensor on it at position 6."""
    tables = tables_of(
        gpu_faults=fault_rows(FIRST, AGAIN),
        migrations=CAME,
        allocations=frame(
            ALLOCATIONS,
            [{"alloc_ns": 0, "va": A, "pid": 1, "device_id": 0, "bytes": BLOCK, "kind": "managed"}],
        ),
        tensor_moves=parts_of(CAME, {"tensor_id": 1, "position": 3}),
        tensor_faults=faults(
            {"batch_id": 0, "tensor_id": 1, "position": 3},
            {"batch_id": 1, "tensor_id": 2, "position": position, "state": state},
        ),
        tensor_lives=lives(
            {"tensor_id": 1, "alloc_sequence": 0, "free_sequence": 3},
            {"tensor_id": 2, "alloc_sequence": allocated, "free_sequence": 9},
        ),
    )
    names = (*JOIN, "allocations", "gpu_faults", "migrations")
    return first_touches(ledger_input(*(tables[name] for name in names)))["start_ns"].to_list()


def test_a_silent_batch_on_a_page_that_moved_only_for_a_former_tensor_is_a_first_touch():
    assert held(allocated=4) == [500]
    assert held(allocated=3) == [500]


def test_a_silent_batch_on_a_page_that_moved_for_its_tensor_is_none():
    assert held(allocated=2) == []
    assert held(allocated=None) == []


def test_a_silent_batch_on_memory_that_no_tensor_holds_is_none():
    assert held(allocated=4, state="cached") == []


def silent(fault, came=None, alloc_ns=None, allocated=((0, None, A),)):
    """Say of the silent batch at 500, on a page that came before, whether it is a first touch."""
    spans = [{"alloc_ns": a, "free_ns": b, "va": va} for a, b, va in allocated]
    tables = tables_of(
        gpu_faults=fault_rows(FIRST, AGAIN),
        migrations=CAME,
        allocations=frame(ALLOCATIONS, spans, pid=1, device_id=0, bytes=BLOCK, kind="managed"),
        tensor_moves=parts_of(CAME, came or {"tensor_id": 1, "position": 3}),
        tensor_faults=faults(
            {"batch_id": 0, "tensor_id": 1, "position": 3},
            {"batch_id": 1, "position": 6, **fault},
        ),
        tensor_lives=lives({"tensor_id": 2, "alloc_sequence": 4, "alloc_ns": alloc_ns}),
    )
    names = (*JOIN, "allocations", "gpu_faults", "migrations")
    return silent_batches(ledger_input(*(tables[name] for name in names)))["is_first"].to_list()


NOWHERE = {key: UNKNOWN[key] for key in ("state", "tensor_id", "segment_va", "position")}


def test_nothing_says_of_a_silent_batch_on_memory_of_unknown_state_whether_it_is_a_first_touch():
    assert silent({"tensor_id": None, "state": "cached"}) == [False]
    assert silent(NOWHERE) == [None]
    # That the allocation is younger than the last move says it all the same.
    assert silent(NOWHERE, allocated=((0, 300, A), (400, None, A))) == [True]


def test_an_unknown_move_is_older_than_a_tensor_only_if_it_began_before_its_allocation():
    holder = {"tensor_id": 2}
    assert silent(holder, alloc_ns=300) == [True]
    assert silent(holder, UNKNOWN, alloc_ns=300) == [True]
    assert silent(holder, UNKNOWN, alloc_ns=110) == [None]
    assert silent(holder, UNKNOWN) == [None]


def test_without_allocations_nothing_says_since_when_memory_outside_of_segments_is_new():
    outside = {"tensor_id": None, "segment_va": None, "state": "outside"}
    assert silent(outside) == [False]
    assert silent(outside, allocated=()) == [None]
    # The process has allocations, and none at that address: it was made before the capture.
    assert silent(outside, allocated=((0, None, A + BLOCK),)) == [False]
    assert silent({"tensor_id": 1}, allocated=()) == [False]


def test_where_a_silent_batch_cannot_be_told_the_number_of_first_touches_is_unknown():
    tables = untold(small_run(), STARTS == 2500)
    again = fault_rows((2700, 2760, A + BLOCK))
    tables["gpu_faults"] = pl.concat([tables["gpu_faults"].collect(), again]).lazy()
    row = {"start_ns": 2700, "va": A + BLOCK, "batch_id": 4, **NOWHERE}
    tables["tensor_faults"] = pl.concat([tables["tensor_faults"].collect(), faults(row)]).lazy()
    names = ["n_first_touch", "first_touch_ns"]
    assert ledger(tables).select(names).rows() == [(1, 60), (None, None)]
    assert effect(tables).select(names).rows() == [(None, None)]


def test_first_touches_count_batches_where_a_batch_has_several_rows():
    """Two batches of 40 rows each, as a driver writes that reports every page."""
    pages = [
        (100 + at, 150 + at, A + n * 4 * KIB + at * 100) for at in (0, 4096) for n in range(40)
    ]
    found = effect(tables_of(gpu_faults=fault_rows(*pages)))
    assert found.select("n_fault_rows", "n_first_touch").rows() == [(80, 2)]


# The effect. --------------------------------------------------------------------------------------


def test_the_effect_of_a_small_run_by_hand():
    found = effect(small_run()).row(0, named=True)
    expected = {
        "n_managed_allocs": 2,
        "n_managed_frees": 1,
        "n_tensors": 5,
        "n_fault_rows": 4,
        "fault_rows_per_alloc": 2.0,
        "n_first_touch": 2,
        "first_touch_ns": 110,
        "n_shared_first_touch": 1,
        "n_dead_rows": 1,
        "tensor_bytes": 24 * KIB,
        "reused_bytes": KIB,
        "in_bytes": 20 * KIB,
        "out_bytes": 8 * KIB,
        "dead_in_bytes": 4 * KIB,
        "stale_in_bytes": 0,
        "dead_out_bytes": 0,
        "dead_fraction": 1 / 7,
        "dead_in_ns": 6,
        # Services at position 10: VA block 0 (2 tensors), 1 (2) by fault, 1 by the program; in VA block 2
        # no tensor held a byte.
        "mean_tensors_per_va_block": 2.0,
        "most_tensors_per_va_block": 2,
        "neighbour_in_bytes": 8 * KIB,
        "neighbour_out_bytes": 4 * KIB,
        "outside_bytes": 0,
        "clock_residual_ns": 300.0,
    }
    assert {name: found[name] for name in expected} == expected


def avoided(fresh, *reused):
    """What reuse saved, and its error; of fresh tensors size, first touches, and line."""
    tensors, named, rows = [], [], []
    for number, (size, touches, line) in enumerate(fresh):
        place = {"va": A + number * BLOCK, "alloc_sequence": number, "tensor_id": number}
        tensors.append({**place, "block_bytes": size, **line})
        for each in range(touches):
            va = place["va"] + each * 64 * KIB
            named.append({"batch_id": len(rows), "va": va, "tensor_id": number})
            rows.append((100 * len(rows) + 100, 100 * len(rows) + 150, va))
    for number, (size, line) in enumerate(reused, len(tensors)):
        again = {"alloc_sequence": number, "block_bytes": size, "reused_bytes": size}
        tensors.append({"tensor_id": number, **again, **line})
    tables = tables_of(
        gpu_faults=fault_rows(*rows), tensor_lives=lives(*tensors), tensor_faults=faults(*named)
    )
    found = effect(tables)
    return found["n_first_touch_avoided"].item(), found["n_first_touch_avoided_error"].item()


ONE_LINE, OTHER_LINE = ({"part": "program", "source_line": n} for n in (1, 2))


def test_first_touches_avoided_follow_from_what_fresh_bytes_of_the_line_cost():
    """Line 1: 4 first touches in 200 fresh bytes, 500 reused; line 2: 10 in 100, none reused."""
    fresh = [(100, 1, ONE_LINE), (100, 3, ONE_LINE), (100, 10, OTHER_LINE)]
    assert avoided(fresh, (500, ONE_LINE)) == (10, pytest.approx(500 / 200 * 4**0.5))


def test_a_line_that_had_no_fresh_memory_is_judged_by_size():
    """Size class 64 to 127: 4 first touches in 200 byte; the others do not count."""
    fresh = [(100, 1, ONE_LINE), (100, 3, OTHER_LINE), (1000, 9, OTHER_LINE)]
    third = {"part": "program", "source_line": 3}
    assert avoided(fresh, (120, third)) == (2, pytest.approx(120 / 200 * 4**0.5))


def test_tensors_without_a_call_stack_are_judged_by_size():
    fresh = [(100, 1, {}), (1000, 9, {})]
    assert avoided(fresh, (120, {})) == (1, pytest.approx(1.2))


def test_a_size_that_was_never_fresh_is_judged_by_all_tensors():
    """6 first touches in 600 fresh byte, 600 reused."""
    fresh = [(100, 1, {}), (200, 2, {}), (300, 3, {})]
    assert avoided(fresh, (600, {})) == (6, pytest.approx(6**0.5))


def test_each_class_of_reused_tensors_adds_to_the_estimate_and_its_error():
    """Line 1: 200 reused x 4 / 200; line 2: 300 reused x 0 / 100, which might have been 1."""
    fresh = [(200, 4, ONE_LINE), (100, 0, OTHER_LINE)]
    found = avoided(fresh, (200, ONE_LINE), (300, OTHER_LINE))
    assert found == (4, pytest.approx((4 + 9) ** 0.5))


def test_nothing_says_what_reuse_saves_where_no_byte_was_fresh():
    tensors = lives({"tensor_id": 1, "alloc_sequence": 1, "reused_bytes": 4 * KIB})
    tables = tables_of(gpu_faults=fault_rows((1, 2, A)), tensor_lives=tensors)
    assert effect(tables)["n_first_touch_avoided"].to_list() == [None]


# Modelled runs, end to end. -----------------------------------------------------------------------


ALLOCATORS = ("raw", "caching", "caching:apart")


@pytest.fixture(scope="module")
def runs():
    """AlexNet trained twice on two tiny images in memory for two thirds of it, by allocator.

    Each with its tables, joined with the snapshot of its allocator, and the truth: of the batches that
    brought nothing, and of the moves.
    """
    tensors = network("alexnet").build(
        steps=2, batch=2, sequence=None, image=64, varying=False, seed=1
    )
    return {name: trained(tensors, name) for name in ALLOCATORS}


def trained(tensors, allocator):
    made = placed(tensors, allocator, gpu_profile(DEFAULT_SETTINGS.gpu))
    settings = oversubscribed(DEFAULT_SETTINGS, made.peak_tensor_bytes, 1.5)
    happened = run(made.program, settings)
    trace = record(happened, settings, "test")
    known = tables_of(**{name: each for name, each in trace.items() if name in TABLES})
    known |= {name: table.empty() for name, table in SNAPSHOT_TABLES.items()}
    frames = snapshot_frames(made.history, happened.operation_ns)
    known |= {name: each.lazy() for name, each in frames.items()}
    tables = known | {name: each.lazy() for name, each in join(JoinInput(known, known, 0)).items()}
    moved = tensor_truth(happened, settings, made.history)["tensor_moves"]
    brought = happened.log["copies"].filter(pl.col("dst") > 0).select("batch")
    serviced = TRUTH_TABLES["batches"].build(happened, settings, trace)
    return tables, serviced.join(brought, on="batch", how="anti"), moved


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_first_touches_of_a_modelled_run_are_those_of_the_truth(runs, allocator):
    tables, truth, _ = runs[allocator]
    names = (*JOIN, "allocations", "gpu_faults", "migrations")
    found = first_touches(ledger_input(*(tables[name] for name in names)))
    expected = truth.filter(pl.col("outcome") == "first_touch").sort("end_ns")
    assert expected.height > 500
    assert found["end_ns"].to_list() == expected["end_ns"].to_list()


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_dead_traffic_of_a_modelled_run_is_that_of_the_truth(runs, allocator):
    tables, _, truth = runs[allocator]
    expected = dead_bytes(truth)
    found = effect(tables).row(0, named=True)
    assert {name: found[name] for name in expected} == expected
    by_state = state_traffic(tables["tensor_moves"]).collect()
    for way in ("in", "out"):
        dead = by_state.filter("is_dead", (pl.col("direction") == "dtoh") == (way == "out"))
        assert dead["bytes"].sum() == expected[f"dead_{way}_bytes"]
    assert (min(expected.values()) > 0) == (allocator != "raw")


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_only_where_tensors_are_packed_have_they_neighbours(runs, allocator):
    tables = runs[allocator][0]
    found = effect(tables).row(0, named=True)
    packed = allocator == "caching"
    names = ["neighbour_in_bytes", "neighbour_out_bytes", "neighbour_in_ns", "neighbour_out_ns"]
    for name in (*names, "n_shared_first_touch"):
        assert (found[name] > 0) == packed, name
    assert (found["most_tensors_per_va_block"] > 1) == packed
    assert (found["mean_tensors_per_va_block"] > 1) == packed
    blocks = va_block_sharing(*(tables[name] for name in JOIN)).collect()
    assert blocks.select(names[:2]).sum().row(0) == tuple(found[name] for name in names[:2])


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_neighbours_of_a_modelled_run_are_those_of_a_plain_loop(runs, allocator):
    moved, rows = (runs[allocator][0][name].collect() for name in JOIN[:2])
    # The loop is slow: some VA blocks will do, those that most tensors share among them.
    blocks = moved.group_by(va_block=pl.col("va") // BLOCK).agg(pl.col("tensor_id").n_unique())
    chosen = blocks.sort("tensor_id", "va_block", descending=True)["va_block"].head(12).implode()
    few, touched_there = (
        each.filter((pl.col("va") // BLOCK).is_in(chosen)).sort("start_ns", "va")
        for each in (moved, rows)
    )
    found = with_neighbours(few, touched_there)
    incoming, outgoing = neighbours_by_loop(few.to_dicts(), touched_there.to_dicts())
    assert found["neighbour_in"].to_list() == incoming
    assert found["neighbour_out"].to_list() == outgoing
    assert (sum(incoming) + sum(outgoing) > 10) == (allocator == "caching")


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_every_table_of_a_modelled_run_adds_up_to_its_trace(runs, allocator):
    tables = runs[allocator][0]
    moved = tables["migrations"].collect()
    into = moved.filter(pl.col("direction") != "dtoh")["bytes"].sum()
    out = moved["bytes"].sum() - into
    n_rows = tables["gpu_faults"].collect().height
    for analysis in (tensor_traffic, line_traffic, annotation_traffic, va_block_sharing):
        found = analysis(*(tables[name] for name in JOIN)).collect().sum()
        names = ("in_bytes", "out_bytes", "n_fault_rows")
        assert tuple(found[name].item() for name in names) == (into, out, n_rows), analysis
    whole = effect(tables).row(0, named=True)
    assert (whole["in_bytes"], whole["out_bytes"], whole["n_fault_rows"]) == (into, out, n_rows)
    duration = moved.select((pl.col("end_ns") - pl.col("start_ns")).sum()).item()
    assert state_traffic(tables["tensor_moves"]).collect()["copy_ns"].sum() == duration


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_the_ledger_of_a_modelled_run_is_that_of_a_plain_loop(runs, allocator):
    tables = runs[allocator][0]
    found = ledger(tables)
    frames = {
        name: tables[name].collect() for name in ("tensor_moves", "tensor_lives", "gpu_faults")
    }
    managed = tables["allocations"].collect().filter(pl.col("kind") == "managed")
    assert found.height == 2
    for row in found.iter_rows(named=True):

        def inside(rows, at="start_ns", limits=(row["start_ns"], row["end_ns"])):
            known = (each for each in rows.iter_rows(named=True) if each[at] is not None)
            return [each for each in known if limits[0] <= each[at] < limits[1]]

        expected = Counter()
        for part in inside(frames["tensor_moves"]):
            way = "out" if part["direction"] == "dtoh" else "in"
            expected[f"{way}_bytes"] += part["bytes"]
            expected[f"dead_{way}_bytes"] += part["bytes"] if part["is_dead"] else 0
        made = inside(frames["tensor_lives"], "alloc_ns")
        expected["n_tensors"] = len(made)
        expected["tensor_bytes"] = sum(each["block_bytes"] for each in made)
        expected["reused_bytes"] = sum(each["reused_bytes"] for each in made)
        expected["n_fault_rows"] = len(inside(frames["gpu_faults"]))
        expected["n_managed_allocs"] = len(inside(managed, "alloc_ns"))
        assert {name: row[name] for name in expected} == dict(expected)
        assert 0 <= row["memory_api_ns"] <= row["wall_ns"]
