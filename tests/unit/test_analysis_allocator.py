"""Analyses of a memory snapshot: the golden values of five real files, and histories made here.

``Tiny`` below is a small allocator of its own (default settings, lists and loops): it writes a history and
knows the levels, lives and free blocks at every entry, so it is what the analyses are compared with.
"""

from __future__ import annotations

import itertools
import os
import random
from functools import cache
from pathlib import Path

import polars as pl
import pytest
from allocator_snapshots import random_snapshot
from polars.testing import assert_frame_equal

import nsan
from nsan.analysis.allocator.agreement import replay_check
from nsan.analysis.allocator.call_sites import call_sites
from nsan.analysis.allocator.oom import allocator_ooms
from nsan.analysis.allocator.replayed import REPLAY_READS, replays_of
from nsan.analysis.allocator.segments import allocator_segments, held_segments
from nsan.analysis.allocator.state import allocator_state
from nsan.analysis.allocator.tensors import allocator_frames, allocator_tensors
from nsan.analysis.allocator.timeline import allocator_timeline
from nsan.analysis.allocator.utilization import allocator_utilization
from nsan.analysis.allocator.va_blocks import shared_va_blocks
from nsan.errors import UsageError
from nsan.torch_alloc.replay import state_at
from nsan.torch_alloc.settings import AllocatorSettings
from nsan.torch_alloc.tables import SNAPSHOT_TABLES

FOLDER = Path(nsan.__file__).parent.parent / "sample_data" / "snapshots"
DECOMFL = "decomfl_opt125m_full_history"
VERL = "verl_vllm_two_mempools"
KIVI = "kivi_llama_state_only"
OPT = "flexgen_opt1.3b_old_format"
OOM = "flexgen_oom_old_format"
FILES = [DECOMFL, VERL, KIVI, OPT, OOM]

KIB, MIB = 1 << 10, 1 << 20
LEVELS = ["reserved_bytes", "allocated_bytes", "active_bytes", "requested_bytes"]
N = 500 if os.environ.get("NSAN_SOAK") == "1" else 20

ANALYSES = [
    allocator_state,
    allocator_segments,
    held_segments,
    shared_va_blocks,
    allocator_timeline,
    allocator_utilization,
    allocator_tensors,
    allocator_frames,
    allocator_ooms,
    replay_check,
]


@cache
def real(name):
    """Read the tables of a real snapshot once."""
    snapshot = nsan.open_snapshot(FOLDER / f"{name}.pickle.gz")
    return {table: getattr(snapshot, table).collect() for table in SNAPSHOT_TABLES}


def run(function, tables, **options):
    """Run an analysis as the command line does: it gets the columns that it declares."""
    about = function.__nsan_analysis__
    return about.run({name: frame.lazy() for name, frame in tables.items()}, options).collect()


def made(**rows):
    """Build the tables of a snapshot from rows that name only what matters."""
    usual = {
        "segments": {"device_id": 0, "stream": 0, "pool": "0,0", "is_expandable": False},
        "blocks": {"device_id": 0, "stream": 0, "pool": "0,0"},
        "allocator_events": {"device_id": 0, "stream": 0},
    }
    return {
        name: pl.DataFrame(
            [{**usual.get(name, {}), **row} for row in rows.get(name, ())], schema=table.schema
        )
        for name, table in SNAPSHOT_TABLES.items()
    }


def block(segment_id, va, size, state="active_allocated", **more):
    asked = {} if "requested_bytes" in more else {"requested_bytes": size}
    return {"segment_id": segment_id, "va": va, "bytes": size, "state": state, **asked, **more}


def segment(segment_id, va, size, **more):
    kind = "small" if size == 2 * MIB else "large"
    return {"segment_id": segment_id, "va": va, "bytes": size, "size_class": kind, **more}


# The state.

GOLDEN = {
    # segments, blocks, active, pending, inactive, reserved, allocated, active, requested, waste,
    # inactive bytes, largest, free segments, their bytes, VA blocks, shared VA blocks
    DECOMFL: (
        *(61, 468, 397, 0, 71, 1897922560, 1014430208, 1014430208, 1011485828, 2944380),
        *(883492352, 155189248, 18, 650117120, 493, 107),
    ),
    VERL: (
        *(127, 638, 534, 9, 95, 26189234176, 24916034560, 25513411584, 25483614352, 29797232),
        *(675822592, 272629760, 8, 287309824, 12204, 116),
    ),
    KIVI: (
        *(259, 868, 839, 0, 29, 17133731840, 16397578240, 16397578240, 16380108168, 17470072),
        *(736153600, 452984832, 2, 486539264, 7829, 209),
    ),
    OPT: (
        *(257, 948, 785, 0, 163, 7608467456, 5683450880, 5683450880, 5683449864, 1016),
        *(1925016576, 207618048, 57, 1501560832, 2716, 3),
    ),
    OOM: (
        *(176, 463, 460, 0, 3, 11844714496, 11840159744, 11840159744, 11840159744, 0),
        *(4554752, 2080768, 0, 0, 5648, 2),
    ),
}
"""From the README of the snapshots, which was measured without nsan."""

GOLDEN_COLUMNS = (
    *("n_segments", "n_blocks", "n_allocated_blocks", "n_pending_blocks", "n_cached_blocks"),
    *("reserved_bytes", "allocated_bytes", "active_bytes", "requested_bytes", "waste_bytes"),
    *("cached_bytes", "largest_cached_bytes", "n_free_segments", "free_segment_bytes"),
    *("n_va_blocks", "n_shared_va_blocks"),
)


@pytest.mark.parametrize("name", FILES)
def test_the_state_of_a_real_snapshot_has_the_golden_values(name):
    row = run(allocator_state, real(name)).filter(pl.col("pool") == "all").row(0, named=True)
    assert tuple(row[column] for column in GOLDEN_COLUMNS) == GOLDEN[name]
    assert (
        row["requested_bytes"] + row["waste_bytes"] + row["cached_bytes"] == row["reserved_bytes"]
    )
    assert row["external_fraction"] == 1 - GOLDEN[name][11] / GOLDEN[name][10]
    assert row["utilization_fraction"] == GOLDEN[name][7] / GOLDEN[name][5]
    assert row["pending_bytes"] == row["active_bytes"] - row["allocated_bytes"]


def test_two_mempools_are_kept_apart_from_the_default_pool():
    found = run(allocator_state, real(VERL))
    rows = {row["pool"]: row for row in found.iter_rows(named=True)}
    assert list(rows) == ["all", "0,0", "0,1", "0,2"]
    assert [rows[pool]["n_segments"] for pool in ("0,0", "0,1", "0,2")] == [59, 44, 24]
    assert rows["0,2"]["reserved_bytes"] == 24 * 866 * MIB
    assert rows["0,2"]["largest_cached_bytes"] is None
    assert rows["0,2"]["external_fraction"] is None
    assert rows["0,0"]["pending_bytes"] == 597377024
    assert rows["0,1"]["pending_bytes"] == 0


@pytest.mark.parametrize("name", FILES)
def test_the_pools_add_up_to_the_row_of_all_pools(name):
    found = run(allocator_state, real(name)).drop("largest_cached_bytes")
    counts = [c for c in found.columns if "va_blocks" not in c and c.endswith("_bytes")]
    counts += [c for c in found.columns if c.startswith("n_") and "va_blocks" not in c]
    whole = found.filter(pl.col("pool") == "all").select(counts)
    parts = found.filter(pl.col("pool") != "all").select(pl.col(counts).sum())
    assert_frame_equal(whole, parts)


def test_a_block_ends_before_the_next_va_block_begins():
    tables = made(
        segments=[segment(0, 0, 20 * MIB)],
        blocks=[
            block(0, 0, 2 * MIB),  # fills the first VA block, and not a byte more
            block(0, 2 * MIB, 2 * MIB + 512),  # one block of 512 byte into the third
            block(0, 4 * MIB + 512, 512, "inactive"),
            block(0, 4 * MIB + 1024, 6 * MIB),  # the third to the sixth
            block(0, 10 * MIB + 1024, 10 * MIB - 1024, "inactive"),
        ],
    )
    row = run(allocator_state, tables).row(0, named=True)
    assert (row["n_va_blocks"], row["n_shared_va_blocks"]) == (6, 1)
    shared = run(shared_va_blocks, tables).row(0, named=True)
    assert shared == {
        "device_id": 0,
        "va_block": 2,
        "va": 4 * MIB,
        "n_tensors": 2,
        "live_bytes": 2 * MIB - 512,
        "cached_bytes": 512,
        "largest_bytes": 6 * MIB,
        "smallest_bytes": 2 * MIB + 512,
        "n_segments": 1,
        "n_pools": 1,
    }


def va_blocks_by_hand(blocks):
    """Count tensors and bytes of each VA block, one VA block of each block at a time."""
    touched = {}
    for gpu, va, size, state in blocks.select("device_id", "va", "bytes", "state").iter_rows():
        for number in range(va // (2 * MIB), (va + size - 1) // (2 * MIB) + 1):
            low, high = max(va, number * 2 * MIB), min(va + size, (number + 1) * 2 * MIB)
            counts = touched.setdefault((gpu, number), [0, 0, 0])
            counts[0] += state != "inactive"
            counts[1 + (state == "inactive")] += high - low
    return touched


@pytest.mark.parametrize("name", FILES)
def test_shared_va_blocks_are_those_that_a_walk_over_every_va_block_finds(name):
    found = run(shared_va_blocks, real(name))
    expected = {
        key: tuple(counts)
        for key, counts in va_blocks_by_hand(real(name)["blocks"]).items()
        if counts[0] > 1
    }
    rows = found.select("device_id", "va_block", "n_tensors", "live_bytes", "cached_bytes").rows()
    assert {(gpu, number): tuple(rest) for gpu, number, *rest in rows} == expected
    assert found.height == GOLDEN[name][-1]
    assert found["n_tensors"].is_sorted(descending=True)


def test_a_block_at_the_end_of_the_address_space_does_not_wrap_around():
    top = (1 << 64) - 4 * KIB
    tables = made(
        segments=[segment(0, top, 1 << 46)], blocks=[block(0, top, 1 << 46), block(0, 0, 512)]
    )
    row = run(allocator_state, tables).row(0, named=True)
    assert row["n_va_blocks"] == (1 << 25) + 2
    assert run(shared_va_blocks, tables).is_empty()


def test_gpus_that_use_the_same_addresses_and_pools_are_kept_apart():
    one = made(segments=[segment(0, 0, 2 * MIB)], blocks=[block(0, 0, 512), block(0, 512, 512)])
    two = made(
        segments=[segment(0, 0, 2 * MIB), segment(1, 0, 2 * MIB, device_id=1)],
        blocks=[block(0, 0, 512), block(0, 512, 512), block(1, 0, 2 * MIB, device_id=1)],
    )
    for function in (allocator_state, allocator_segments, shared_va_blocks):
        both = run(function, two)
        assert_frame_equal(both.filter(pl.col("device_id") == 0), run(function, one))
    state = run(allocator_state, two).filter(device_id=1)
    assert state["n_shared_va_blocks"].to_list() == [0, 0]


def test_an_unknown_request_makes_requested_and_waste_unknown_not_smaller():
    tables = made(
        segments=[segment(0, 0, 2 * MIB)],
        blocks=[block(0, 0, 512, requested_bytes=None), block(0, 512, 512, requested_bytes=4)],
    )
    row = run(allocator_state, tables).row(0, named=True)
    assert row["active_bytes"] == 1024
    assert row["requested_bytes"] is None
    assert row["waste_bytes"] is None


def test_the_request_of_a_free_block_is_stale_and_does_not_count():
    tables = made(
        segments=[segment(0, 0, 2 * MIB)],
        blocks=[
            block(0, 0, 512, requested_bytes=100),
            block(0, 512, 512, "active_pending_free", requested_bytes=200),
            block(0, 1024, 2 * MIB - 1024, "inactive", requested_bytes=300),
        ],
    )
    row = run(allocator_state, tables).row(0, named=True)
    assert (row["requested_bytes"], row["waste_bytes"]) == (300, 1024 - 300)
    assert (row["allocated_bytes"], row["active_bytes"]) == (512, 1024)
    assert row["n_free_segments"] == 0


def test_a_block_of_an_unknown_state_counts_as_in_use():
    tables = made(segments=[segment(0, 0, 2 * MIB)], blocks=[block(0, 0, 2 * MIB, "other")])
    row = run(allocator_state, tables).row(0, named=True)
    assert (row["n_other_blocks"], row["active_bytes"], row["allocated_bytes"]) == (1, 2 * MIB, 0)
    assert row["n_free_segments"] == 0


# Segments.


@pytest.mark.parametrize("name", FILES)
def test_segments_close_with_their_blocks_and_with_the_state(name):
    found = run(allocator_segments, real(name))
    state = run(allocator_state, real(name)).filter(pl.col("pool") == "all").row(0, named=True)
    assert (found["live_bytes"] + found["cached_bytes"]).to_list() == found["bytes"].to_list()
    assert found["n_blocks"].sum() == state["n_blocks"]
    assert found.filter(pl.col("n_tensors") == 0)["bytes"].sum() == state["free_segment_bytes"]
    assert found["cached_bytes"].is_sorted(descending=True)
    assert found["largest_cached_bytes"].max() == state["largest_cached_bytes"]
    assert found.filter("is_returnable").height == state["n_free_segments"]


def test_a_free_segment_of_a_private_pool_may_or_may_not_be_returnable():
    tables = made(
        segments=[
            segment(0, 0, 2 * MIB),
            segment(1, 2 * MIB, 2 * MIB, pool="0,1"),
            segment(2, 4 * MIB, 2 * MIB, pool="0,1"),
        ],
        blocks=[
            block(0, 0, 2 * MIB, "inactive"),
            block(1, 2 * MIB, 2 * MIB, "inactive", pool="0,1"),
            block(2, 4 * MIB, 512, pool="0,1"),
            block(2, 4 * MIB + 512, 2 * MIB - 512, "inactive", pool="0,1"),
        ],
    )
    found = run(allocator_segments, tables)
    assert found["is_returnable"].to_list() == [True, None, False]
    assert found["utilization_fraction"].to_list() == [0.0, 0.0, 512 / (2 * MIB)]


def test_a_segment_held_by_a_twentieth_is_listed_with_its_largest_tensor_and_one_byte_more_is_not():
    limit = 20 * MIB // 20
    tables = made(
        segments=[segment(0, 0, 20 * MIB), segment(1, 20 * MIB, 20 * MIB)],
        blocks=[
            block(0, 0, 512, stack_id=1),
            block(0, 512, limit - 512, stack_id=2),
            block(0, limit, 20 * MIB - limit, "inactive"),
            block(1, 20 * MIB, limit + 512),
            block(1, 21 * MIB + 512, 19 * MIB - 512, "inactive"),
        ],
        stacks=[
            {"stack_id": 2, "depth": 0, "function": "f", "source_file": "a.py", "source_line": 3}
        ],
    )
    row = run(held_segments, tables).row(0, named=True)
    assert (row["segment_id"], row["live_bytes"], row["n_tensors"]) == (0, limit, 2)
    assert (row["holder_bytes"], row["holder_va"]) == (limit - 512, 512)
    assert (row["function"], row["source_line"], row["part"]) == ("f", 3, "program")
    assert run(held_segments, tables).height == 1
    assert run(held_segments, tables, most_fraction=0.06).height == 2


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(UsageError, match="most_fraction"):
        run(held_segments, made(), most_fraction=share)


# Frames of the program.

TORCH = "site-packages/torch/nn/functional.py"


@pytest.mark.parametrize(
    ("files", "depth", "part"),
    [
        ([TORCH, "model.py", "main.py"], 1, "program"),
        (["??", "c10.cpp", TORCH, r"C:\site-packages\torch\x.py", "model.py"], 4, "program"),
        ([TORCH, "site-packages/torchvision/models/vgg.py"], 1, "program"),
        ([TORCH, "lib/python3.11/contextlib.py", "train.py"], 2, "program"),
        (["<eval_with_key>.5", "train.py"], 0, "program"),
        (["/usr/lib/python3.11/site-packages/einops/x.py"], 0, "program"),
        ([TORCH, "site-packages/torch/optim/adam.py", "lib/python3.11/threading.py"], 1, "library"),
        (["??", "/usr/lib/python3.10/threading.py"], 1, "library"),
        (["??", "Module.cpp", "crtstuff.c"], None, "native"),
    ],
)
def test_the_frame_of_a_stack_is_the_innermost_one_of_the_program(files, depth, part):
    stacks = made(
        stacks=[
            {"stack_id": 7, "depth": i, "function": f"f{i}", "source_file": name, "source_line": i}
            for i, name in enumerate(files)
        ]
    )["stacks"]
    found = call_sites(stacks.sample(fraction=1, shuffle=True, seed=1).lazy()).collect()
    name = None if depth is None else f"f{depth}"
    expected = (name, None if depth is None else files[depth], depth, part)
    assert found.select("function", "source_file", "source_line", "part").row(0) == expected
    assert found.height == 1


# Histories.


class Tiny:
    """A caching allocator of default settings, one stream and one pool, that knows all about itself."""

    def __init__(self, seed=0, device_id=0):
        self.random = random.Random(seed)
        self.device_id = device_id
        self.bases = [(1 << 40) + (i << 28) for i in range(400)]
        self.random.shuffle(self.bases)
        self.segments = {}  # base: (size, is small, [[va, size, request, state, tensor], ...])
        self.events, self.levels, self.tensors, self.free_at = [], [], [], {}
        self.now = 1_700_000_000_000_000

    def write(self, action, va, size, **more):
        row = {"action": action, "va": va, "bytes": size, "time_us": self.now}
        self.events.append({"device_id": self.device_id, "stream": 0, **row, **more})
        self.levels.append(self.level())
        self.now += self.random.randrange(0, 50)

    def level(self):
        blocks = [b for _, _, blocks in self.segments.values() for b in blocks]
        return (
            sum(size for size, _, _ in self.segments.values()),
            sum(b[1] for b in blocks if b[3] == "active_allocated"),
            sum(b[1] for b in blocks if b[3] != "inactive"),
            sum(b[2] for b in blocks if b[3] != "inactive"),
        )

    def allocate(self, request, stack_id=None):
        rounded = max(512, -(-request // 512) * 512)
        small = rounded <= MIB
        fits = [
            (b[1], b[0], base)
            for base, (_, kind, blocks) in self.segments.items()
            for b in blocks
            if kind == small and b[3] == "inactive" and b[1] >= rounded
        ]
        if not fits:
            fits = [self.new_segment(rounded, small)]
        size, va, base = min(fits)
        blocks = self.segments[base][2]
        at = next(i for i, b in enumerate(blocks) if b[0] == va)
        rest = size - rounded
        kept = rounded if rest >= 512 and (small or rest > MIB) else size
        tensor = len(self.tensors)
        self.tensors.append(
            {"alloc": len(self.events), "free": None, "block": kept, "bytes": request}
            | {"stack_id": stack_id, "alloc_us": self.now, "free_us": None}
        )
        parts = [[va, kept, request, "active_allocated", tensor]]
        if kept < size:
            parts.append([va + kept, size - kept, 0, "inactive", None])
        blocks[at : at + 1] = parts
        self.write("alloc", va, request, stack_id=stack_id)
        return va

    def new_segment(self, rounded, small):
        size = 2 * MIB if small else 20 * MIB
        if rounded >= 10 * MIB:
            size = -(-rounded // (2 * MIB)) * 2 * MIB
        base = self.bases.pop()
        self.segments[base] = (size, small, [[base, size, 0, "inactive", None]])
        self.write("segment_alloc", base, size)
        return size, base, base

    def find(self, va):
        return next(
            (blocks, b)
            for _, _, blocks in self.segments.values()
            for b in blocks
            if b[0] == va and b[3] != "inactive"
        )

    def free(self, va, pending=False):
        b = self.find(va)[1]
        b[3] = "active_pending_free"
        self.write("free_requested", va, b[2])
        if not pending:
            self.complete(va)

    def complete(self, va):
        blocks, b = self.find(va)
        request, tensor = b[2], self.tensors[b[4]]
        tensor["free"], tensor["free_us"] = len(self.events), self.now
        b[2:] = [0, "inactive", None]
        for i in range(len(blocks) - 1, 0, -1):
            if blocks[i][3] == blocks[i - 1][3] == "inactive":
                blocks[i - 1][1] += blocks.pop(i)[1]
        self.write("free_completed", va, request)

    def empty_cache(self):
        found = [
            (small, blocks[0][1], base)
            for base, (_, small, blocks) in self.segments.items()
            if len(blocks) == 1 and blocks[0][3] == "inactive"
        ]
        for _, size, base in sorted(found):
            del self.segments[base]
            self.write("segment_free", base, size)

    def fail(self, request, **more):
        self.free_at[len(self.events)] = self.free_blocks()
        self.write("oom", None, request, **more)

    def free_blocks(self):
        return sorted(
            (small, b[1])
            for _, small, blocks in self.segments.values()
            for b in blocks
            if b[3] == "inactive"
        )

    def run(self, n_steps, n_stacks=4):
        held, pending = [], []
        for _ in range(n_steps):
            what = self.random.random()
            if what < 0.55 or not held:
                size = int(2 ** self.random.uniform(6, 25))
                stack_id = self.random.randrange(n_stacks + 1)
                held.append(self.allocate(size, None if stack_id == n_stacks else stack_id))
            elif what < 0.95:
                va = held.pop(self.random.randrange(len(held)))
                slow = self.random.random() < 0.2
                self.free(va, pending=slow)
                if slow:
                    pending.append(va)
            elif pending:
                self.complete(pending.pop(0))
            else:
                self.empty_cache()
        return self

    def tables(self, cut=0):
        """Give the snapshot that PyTorch would, without the first entries."""
        segments, blocks = [], []
        for i, (base, (size, small, parts)) in enumerate(sorted(self.segments.items())):
            kind = "small" if small else "large"
            more = {"device_id": self.device_id}
            segments.append(segment(i, base, size, **more) | {"size_class": kind})
            for va, part, request, state, tensor in parts:
                stack = None if tensor is None else self.tensors[tensor]["stack_id"]
                more |= {"requested_bytes": request, "stack_id": stack}
                blocks.append(block(i, va, part, state, **more))
        events = [row | {"sequence": i} for i, row in enumerate(self.events[cut:])]
        return made(segments=segments, blocks=blocks, allocator_events=events, stacks=STACK_ROWS)


STACK_ROWS = [
    {"stack_id": 0, "depth": 0, "function": "f", "source_file": TORCH, "source_line": 1},
    {"stack_id": 0, "depth": 1, "function": "g", "source_file": "a.py", "source_line": 2},
    # The same frame by another way.
    {"stack_id": 1, "depth": 0, "function": "g", "source_file": "a.py", "source_line": 2},
    {"stack_id": 2, "depth": 0, "function": "h", "source_file": "a.py", "source_line": 9},
    {"stack_id": 3, "depth": 0, "function": "i", "source_file": "??", "source_line": 0},
]
SITE_OF = {
    0: ("g", "a.py", 2, "program"),
    1: ("g", "a.py", 2, "program"),
    2: ("h", "a.py", 9, "program"),
    3: (None, None, None, "native"),
    None: (None, None, None, "unattributed"),
}


def together(*parts):
    return {name: pl.concat([part[name] for part in parts]) for name in parts[0]}


def shuffled(tables):
    return {n: f.sample(fraction=1, shuffle=True, seed=5) for n, f in tables.items()}


def expected_timeline(tiny, cut=0):
    before = tiny.levels[cut - 1] if cut else (0, 0, 0, 0)
    rows = [(-1, *before)]
    for sequence, level in enumerate(tiny.levels[cut:]):
        if level != before:
            rows.append((sequence, *level))
        before = level
    return rows


@pytest.mark.parametrize("seed", range(N))
def test_the_timeline_is_what_the_allocator_went_through(seed):
    tiny = Tiny(seed).run(120)
    found = run(allocator_timeline, shuffled(tiny.tables()))
    assert found.select("sequence", *LEVELS).rows() == expected_timeline(tiny)
    assert (found["cached_bytes"] == found["reserved_bytes"] - found["active_bytes"]).all()
    times = [0] + [(row["time_us"] - tiny.events[0]["time_us"]) * 1000 for row in tiny.events]
    assert found["time_ns"].to_list() == [times[i + 1] for i in found["sequence"]]
    assert found["replay_kind"].unique().to_list() == ["derived"]


def untold_rests(tiny, cut):
    """Sum what blocks hold that nothing tells of.

    A block from before the history that was handed out whole and freed since may count without its
    rest: the free block behind it may have grown, so that it seems to have been split (replay.py).
    """
    return sum(
        t["block"] - -(-t["bytes"] // 512) * 512
        for t in tiny.tensors
        if t["alloc"] < cut and t["free"] is not None and t["free"] >= cut
    )


@pytest.mark.parametrize("seed", range(N))
def test_a_partial_history_starts_at_its_true_level_and_nothing_goes_below_zero(seed):
    tiny = Tiny(seed).run(120)
    cut = tiny.random.randrange(1, len(tiny.events) - 1)
    found = run(allocator_timeline, tiny.tables(cut))
    rows, expected = found.select("sequence", *LEVELS).rows(), expected_timeline(tiny, cut)
    rests = untold_rests(tiny, cut)
    if not rests:
        assert rows == expected
    for row, true in zip(rows, expected, strict=True):
        assert (row[0], row[1], row[4]) == (true[0], true[1], true[4])
        assert true[2] - rests <= row[2] <= true[2]
        assert true[3] - rests <= row[3] <= true[3]
    assert rows[-1] == expected[-1]
    assert found.select(pl.min_horizontal(*LEVELS, "cached_bytes").min()).item() >= 0


@pytest.mark.parametrize("seed", range(N))
def test_utilization_is_peak_over_peak_and_the_instants_are_those_of_the_history(seed):
    tiny = Tiny(seed).run(120)
    row = run(allocator_utilization, shuffled(tiny.tables())).row(0, named=True)
    reserved, allocated, active, requested = zip(*tiny.levels, strict=True)
    peak, at = max(reserved), active.index(max(active))
    assert row["utilization_fraction"] == max(active) / peak
    assert row["fragmentation_fraction"] == 1 - max(active) / peak
    assert (row["peak_reserved_bytes"], row["peak_active_bytes"]) == (peak, max(active))
    assert row["peak_allocated_bytes"] == max(allocated)
    assert row["peak_active_sequence"] == at
    assert row["waste_at_peak_bytes"] == active[at] - requested[at]
    rises = reserved.index(peak)
    assert row["peak_reserved_sequence"] == rises
    # The entry after a new segment is the allocation that asked for it.
    assert tiny.events[rises]["action"] == "segment_alloc"
    assert row["utilization_at_peak_fraction"] == active[rises + 1] / peak
    rest = [a / r for a, r in zip(active[rises + 1 :], reserved[rises + 1 :], strict=True) if r]
    assert row["least_utilization_fraction"] == min(rest)
    times = [event["time_us"] for event in tiny.events]
    spans = [b - a for a, b in itertools.pairwise(times)]
    weighed = [(a / r, t) for a, r, t in zip(active, reserved, spans, strict=False) if r]
    mean = sum(u * t for u, t in weighed) / sum(t for _, t in weighed)
    assert row["mean_utilization_fraction"] == pytest.approx(mean, rel=1e-12)
    assert row["is_complete"] is True
    assert row["n_entries"] == len(tiny.events)
    assert row["final_active_bytes"] == active[-1]


@pytest.mark.parametrize("seed", range(N))
def test_tensors_have_the_lives_that_the_allocator_gave_them(seed):
    tiny = Tiny(seed).run(120)
    found = run(allocator_tensors, shuffled(tiny.tables()))
    start, end = tiny.events[0]["time_us"], tiny.events[-1]["time_us"]
    expected = []
    for t in tiny.tensors:
        life = (t["free_us"] or end) - t["alloc_us"]
        freed = None if t["free"] is None else (t["free_us"] - start) * 1000
        when = (life * 1000, t["free"] is None, (t["alloc_us"] - start) * 1000, freed)
        sizes = (t["block"], t["bytes"])
        expected.append((t["alloc"], t["free"], *sizes, *when, *SITE_OF[t["stack_id"]]))
    columns = ("alloc_sequence", "free_sequence", "block_bytes", "requested_bytes", "life_ns")
    more = ("is_held_at_end", "alloc_ns", "free_ns", "function", "source_file", "source_line")
    rows = found.select(*columns, *more, "part").sort("alloc_sequence").rows()
    assert rows == expected
    assert found["byte_seconds"].is_sorted(descending=True)
    for row in found.head(20).iter_rows(named=True):
        product = row["block_bytes"] * row["life_ns"] / 1e9
        assert row["byte_seconds"] == pytest.approx(product, rel=1e-12)
    assert not found["is_held_at_start"].any()


@pytest.mark.parametrize("seed", range(N))
def test_frames_add_up_to_the_peak_and_know_their_own(seed):
    tiny = Tiny(seed).run(120)
    found = run(allocator_frames, shuffled(tiny.tables()))
    active = [level[2] for level in tiny.levels]
    at = active.index(max(active))
    assert found["peak_bytes"].sum() == max(active)
    by_site = {}
    for t in tiny.tensors:
        by_site.setdefault(SITE_OF[t["stack_id"]], []).append(t)
    sites = found.select("function", "source_file", "source_line", "part").rows()
    assert set(sites) == set(by_site)
    assert len(sites) == len(by_site)
    for site, row in zip(sites, found.iter_rows(named=True), strict=True):
        live = [
            sum(t["block"] for t in by_site[site] if t["alloc"] <= i < (t["free"] or 1 << 60))
            for i in range(len(active))
        ]
        assert row["n_tensors"] == len(by_site[site])
        assert row["block_bytes"] == sum(t["block"] for t in by_site[site])
        assert (row["peak_bytes"], row["own_peak_bytes"]) == (live[at], max(live))
        assert (row["start_bytes"], row["end_bytes"]) == (0, live[-1])
    assert found["peak_bytes"].is_sorted(descending=True)


@pytest.mark.parametrize("seed", range(N))
def test_of_a_partial_history_what_was_held_before_it_counts_from_its_start(seed):
    tiny = Tiny(seed).run(120)
    cut = tiny.random.randrange(1, len(tiny.events) - 1)
    tables = tiny.tables(cut)
    tensors = run(allocator_tensors, tables)
    there = [t for t in tiny.tensors if t["free"] is None or t["free"] >= cut]
    assert tensors.height == len(there)
    assert tensors.filter("is_held_at_start").height == sum(t["alloc"] < cut for t in there)
    start, end = tiny.events[cut]["time_us"], tiny.events[-1]["time_us"]
    lives = sorted(((t["free_us"] or end) - max(t["alloc_us"], start)) * 1000 for t in there)
    assert sorted(tensors["life_ns"]) == lives
    frames = run(allocator_frames, tables)
    levels = [tiny.levels[cut - 1], *tiny.levels[cut:]]
    rests = untold_rests(tiny, cut)
    assert 0 <= max(level[2] for level in levels) - frames["peak_bytes"].sum() <= rests
    assert 0 <= levels[0][2] - frames["start_bytes"].sum() <= rests
    assert frames["end_bytes"].sum() == levels[-1][2]
    row = run(allocator_utilization, tables).row(0, named=True)
    if row["n_entries"] > 1:
        assert 0 <= max(level[2] for level in levels) - row["peak_active_bytes"] <= rests
        assert row["is_complete"] == (levels[0] == (0, 0, 0, 0))


# Out of memory.


def broken_up():
    """Hold every other 2.5 MiB of two segments of 20 MiB: 20 MiB free, no 10 MiB at one place."""
    tiny = Tiny()
    places = [tiny.allocate(5 * MIB // 2) for _ in range(16)]
    for va in places[::2]:
        tiny.free(va)
    return tiny


@pytest.mark.parametrize(
    ("request_bytes", "verdict"),
    [
        (5 * MIB // 2, "unexplained"),
        (5 * MIB // 2 + 512, "fragmentation"),
        (20 * MIB, "fragmentation"),
        (20 * MIB + 512, "elsewhere"),
        (22 * MIB - 512, "elsewhere"),
        (22 * MIB, "capacity"),
        (MIB, "unexplained"),
    ],
)
def test_an_oom_is_called_what_it_is(request_bytes, verdict):
    tiny = broken_up()
    tiny.allocate(512)  # the small pool has 2 MiB - 512 free: no help for large requests
    tiny.fail(request_bytes, device_free_bytes=MIB, stack_id=2)
    tiny.allocate(100)
    row = run(allocator_ooms, tiny.tables()).row(0, named=True)
    large = request_bytes > MIB
    assert row["request_bytes"] == request_bytes
    assert row["verdict"] == verdict
    assert row["size_class"] == ("large" if large else "small")
    assert row["fitting_bytes"] == (20 * MIB if large else 2 * MIB - 512)
    assert row["largest_fitting_bytes"] == (5 * MIB // 2 if large else 2 * MIB - 512)
    assert (row["reserved_bytes"], row["cached_bytes"]) == (42 * MIB, 22 * MIB - 512)
    assert row["active_bytes"] == 20 * MIB + 512
    assert (row["device_free_bytes"], row["function"]) == (MIB, "h")
    assert row["sequence"] == len(tiny.events) - 2


@pytest.mark.parametrize("seed", range(N))
def test_each_oom_of_a_long_history_sees_the_free_blocks_of_its_own_moment(seed):
    tiny = Tiny(seed)
    for _ in range(6):
        tiny.run(25)
        tiny.fail(3 * MIB)
    found = run(allocator_ooms, shuffled(tiny.tables()))
    assert found["sequence"].to_list() == list(tiny.free_at)
    for row in found.iter_rows(named=True):
        free = tiny.free_at[row["sequence"]]
        large = [size for small, size in free if not small]
        assert row["cached_bytes"] == sum(size for _, size in free)
        assert row["fitting_bytes"] == sum(large)
        assert row["largest_fitting_bytes"] == max(large, default=None)


def test_what_is_free_in_another_pool_or_stream_does_not_fit():
    near, far = 1 << 40, 1 << 41
    tables = made(
        segments=[
            segment(0, near, 20 * MIB),
            segment(1, far, 20 * MIB, pool="0,1"),
            segment(2, far + 20 * MIB, 20 * MIB, stream=7),
        ],
        blocks=[
            block(0, near, 16 * MIB),
            block(0, near + 16 * MIB, 4 * MIB, "inactive"),
            block(1, far, 14 * MIB, pool="0,1"),
            block(1, far + 14 * MIB, 6 * MIB, "inactive", pool="0,1"),
            block(2, far + 20 * MIB, 12 * MIB, stream=7),
            block(2, far + 32 * MIB, 8 * MIB, "inactive", stream=7),
        ],
        allocator_events=[
            {"sequence": i, "action": "oom", "bytes": size, "pool": pool, "stream": stream}
            for i, (size, pool, stream) in enumerate(
                [
                    (5 * MIB, None, 0),
                    (5 * MIB, "0,1", 0),
                    (18 * MIB, "0,0", 7),
                    (19 * MIB, "0,0", 7),
                ]
            )
        ],
    )
    found = run(allocator_ooms, tables)
    assert found["verdict"].to_list() == ["elsewhere", "unexplained", "elsewhere", "capacity"]
    assert found["fitting_bytes"].to_list() == [4 * MIB, 6 * MIB, 8 * MIB, 8 * MIB]
    assert found["cached_bytes"].to_list() == [18 * MIB] * 4
    assert found["pool"].to_list() == ["0,0", "0,1", "0,0", "0,0"]


def test_the_free_part_of_an_expandable_segment_is_what_was_mapped_then():
    base = 1 << 40
    steps = [
        ("segment_map", base, 20 * MIB),
        ("alloc", base, 3 * MIB),
        ("oom", None, 18 * MIB),
        ("segment_map", base + 20 * MIB, 20 * MIB),
        ("alloc", base + 3 * MIB, 30 * MIB),
        ("oom", None, 18 * MIB),
    ]
    tables = made(
        segments=[segment(0, base, 40 * MIB, is_expandable=True)],
        blocks=[
            block(0, base, 3 * MIB),
            block(0, base + 3 * MIB, 30 * MIB),
            block(0, base + 33 * MIB, 7 * MIB, "inactive"),
        ],
        allocator_events=[
            {"sequence": i, "action": action, "va": va, "bytes": size}
            for i, (action, va, size) in enumerate(steps)
        ],
        allocator_settings=[
            {"name": "expandable_segments", "value": "True", "is_recorded": True},
        ],
    )
    found = run(allocator_ooms, tables)
    assert found["reserved_bytes"].to_list() == [20 * MIB, 40 * MIB]
    assert found["cached_bytes"].to_list() == [17 * MIB, 7 * MIB]
    assert found["fitting_bytes"].to_list() == [17 * MIB, 7 * MIB]
    assert found["verdict"].to_list() == ["capacity", "capacity"]
    levels = run(allocator_timeline, tables)
    assert levels["reserved_bytes"].to_list() == [n * MIB for n in (0, 20, 20, 40, 40)]
    row = run(allocator_utilization, tables).row(0, named=True)
    assert row["utilization_fraction"] == 33 / 40
    assert row["largest_cached_at_peak_bytes"] == 7 * MIB


@pytest.mark.parametrize("seed", range(N))
def test_free_blocks_from_the_lives_of_tensors_are_those_of_a_replay_that_stops_there(seed):
    tiny = Tiny(seed).run(80)
    cut = tiny.random.randrange(len(tiny.events))
    found = replays_of(*(tiny.tables(cut)[name].lazy() for name in REPLAY_READS))
    n = len(tiny.events) - cut
    for sequence in {-1, 0, n - 1, tiny.random.randrange(n)}:
        at = None if sequence < 0 else sequence
        state = state_at(*found.recorded[0], found.settings, sequence=at)
        expected = state.filter(pl.col("state") == "inactive").select("va", "bytes", "segment_va")
        got = found.free_at(0, sequence)
        assert_frame_equal(got.select("va", "bytes", "segment_va"), expected.sort("va"))


# What real histories give.


def test_the_real_history_is_replayed_without_a_difference():
    row = run(replay_check, real(DECOMFL)).row(0, named=True)
    assert row["n_entries"] == 23105
    assert (row["n_allocs"], row["n_addresses_exact"]) == (7946, 7946)
    assert (row["n_segments_made"], row["n_segments_exact"]) == (61, 61)
    assert (row["n_final_blocks"], row["n_final_blocks_exact"]) == (468, 468)
    assert row["first_difference"] is None
    assert (row["is_complete"], row["tie_break"], row["replay_kind"]) == (
        True,
        "address",
        "derived",
    )


def test_the_real_history_has_the_golden_peaks():
    row = run(allocator_utilization, real(DECOMFL)).row(0, named=True)
    assert round(row["utilization_fraction"], 4) == 0.9436
    assert row["utilization_fraction"] + row["fragmentation_fraction"] == 1
    assert (row["peak_allocated_bytes"], row["peak_active_bytes"]) == (1790894592, 1790894592)
    assert (row["peak_active_sequence"], row["peak_reserved_sequence"]) == (11205, 11204)
    assert row["peak_reserved_bytes"] == 1897922560
    # Both peaks are of the same request, so the instant is the quotient of the peaks.
    assert row["utilization_at_peak_fraction"] == row["utilization_fraction"]
    assert row["final_utilization_fraction"] == 1014430208 / 1897922560
    assert row["least_utilization_fraction"] <= row["final_utilization_fraction"]
    timeline = run(allocator_timeline, real(DECOMFL))
    assert timeline.select("sequence", *LEVELS).row(0) == (-1, 0, 0, 0, 0)
    assert timeline.select(LEVELS).row(-1) == (1897922560, 1014430208, 1014430208, 1011485828)


def test_the_lives_of_the_real_history_are_those_of_its_pairs_of_entries():
    open_ones, expected = {}, []
    events = real(DECOMFL)["allocator_events"].sort("sequence")
    columns = ("sequence", "action", "va", "bytes", "time_us", "stack_id")
    for sequence, action, va, size, time, stack in events.select(columns).iter_rows():
        if action == "alloc":
            open_ones[va] = [sequence, None, size, time, stack]
        elif action == "free_completed":
            pair = open_ones.pop(va)
            pair[1], pair[3] = sequence, (time - pair[3]) * 1000
            expected.append(tuple(pair))
    found = run(allocator_tensors, real(DECOMFL))
    held = found.filter("is_held_at_end")
    columns = ("alloc_sequence", "free_sequence", "requested_bytes", "life_ns", "stack_id")
    rows = found.filter(~pl.col("is_held_at_end")).select(columns).rows()
    assert sorted(rows) == sorted(expected)
    assert (held.height, held["block_bytes"].sum()) == (397, 1014430208)
    assert set(held["alloc_sequence"]) == {pair[0] for pair in open_ones.values()}
    assert found.height == 7946


def test_the_frames_of_the_real_history_add_up_to_its_peak():
    found = run(allocator_frames, real(DECOMFL))
    assert found["peak_bytes"].sum() == 1790894592
    assert found["end_bytes"].sum() == 1014430208
    assert found["n_tensors"].sum() == 7946
    assert (found["own_peak_bytes"] >= found["peak_bytes"]).all()
    assert not found["source_file"].str.contains("site-packages/torch/").any()


@pytest.mark.parametrize("name", [VERL, KIVI, OPT, OOM])
def test_without_a_history_its_figures_are_unknown_and_the_state_stands(name):
    row = run(allocator_utilization, real(name)).row(0, named=True)
    assert row["n_entries"] <= 1
    state = {"device_id", "n_entries", "final_utilization_fraction", "final_active_bytes"}
    for column in row.keys() - state - {"final_reserved_bytes"}:
        assert row[column] is None, column
    assert row["final_active_bytes"] == GOLDEN[name][7]
    assert row["final_reserved_bytes"] == GOLDEN[name][5]


def test_tensors_without_a_history_are_the_blocks_in_use_and_their_lives_are_unknown():
    found = run(allocator_tensors, real(VERL))
    assert (found.height, found["block_bytes"].sum()) == (534 + 9, 25513411584)
    assert found["requested_bytes"].sum() == 25483614352
    assert found["life_ns"].null_count() == found.height
    assert found["byte_entries"].null_count() == found.height
    assert found["block_bytes"].is_sorted(descending=True)
    assert found["is_held_at_end"].all()
    frames = run(allocator_frames, real(VERL))
    assert frames["end_bytes"].sum() == 25513411584
    assert frames["peak_bytes"].null_count() == frames.height
    top = frames.row(0, named=True)
    assert (top["function"], top["end_bytes"]) == ("_allocate_kv_cache", 24 * 866 * MIB)
    assert run(allocator_timeline, real(VERL)).is_empty()


# What holds of all of them.


@pytest.mark.parametrize("function", ANALYSES, ids=lambda f: f.__name__)
def test_nothing_gives_nothing_with_the_promised_columns(function):
    found = run(function, made())
    assert found.is_empty()
    assert found.schema == function.__nsan_analysis__.result.schema


@pytest.mark.parametrize("function", ANALYSES, ids=lambda f: f.__name__)
def test_two_gpus_with_the_same_addresses_do_not_change_each_other(function):
    one, other = Tiny(3).run(60), Tiny(4, device_id=1)
    other.bases = list(one.bases) + other.bases
    other.run(50)
    one.fail(30 * MIB)
    other.fail(3 * MIB)
    both = together(one.tables(), other.tables() | {"stacks": made()["stacks"]})
    found = run(function, both)
    for gpu, tiny in enumerate((one, other)):
        mine = found.filter(pl.col("device_id") == gpu)
        assert_frame_equal(mine, run(function, tiny.tables()))


def test_the_level_before_a_history_is_told_even_if_the_gpu_before_it_ended_at_the_same():
    one, other = Tiny(1), Tiny(2, device_id=1)
    one.free(one.allocate(100))
    one.empty_cache()
    other.allocate(100)
    found = run(allocator_timeline, together(one.tables(), other.tables()))
    assert found["device_id"].to_list() == [0] * 6 + [1] * 3
    assert found.filter(device_id=1)["sequence"].to_list() == [-1, 0, 1]


def test_a_history_that_the_rules_do_not_explain_makes_the_figures_reconstructed():
    tables = Tiny(8).run(60).tables()
    events = tables["allocator_events"]
    first = events.filter(pl.col("action") == "alloc")["sequence"][0]
    lost = tables | {"allocator_events": events.filter(pl.col("sequence") != first)}
    check = run(replay_check, lost).row(0, named=True)
    assert check["replay_kind"] == "reconstructed"
    assert check["n_allocs"] == run(replay_check, tables)["n_allocs"][0] - 1
    assert run(allocator_timeline, lost)["replay_kind"].unique().to_list() == ["reconstructed"]
    levels = run(allocator_timeline, lost).select(*LEVELS, "cached_bytes")
    assert levels.select(pl.min_horizontal(pl.all()).min()).item() >= 0
    frames = run(allocator_frames, lost)
    assert frames["peak_bytes"].sum() == levels["active_bytes"].max()
    assert frames["end_bytes"].sum() == levels["active_bytes"][-1]


@pytest.mark.parametrize("function", ANALYSES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", [DECOMFL, VERL])
def test_the_order_of_rows_decides_nothing(function, name):
    assert_frame_equal(run(function, shuffled(real(name))), run(function, real(name)))


def test_the_kept_replay_is_not_taken_for_another_snapshot():
    one, other = Tiny(5).run(40).tables(), Tiny(6).run(40).tables()
    first = run(allocator_timeline, one)
    second = run(allocator_timeline, other)
    assert not first.equals(second)
    # One address less: the same shape, another history.
    changed = one | {
        "allocator_settings": made(
            allocator_settings=[{"name": "torch_version", "value": "2.13", "is_recorded": True}]
        )["allocator_settings"]
    }
    assert run(replay_check, changed)["tie_break"].to_list() == ["segment"]
    assert_frame_equal(run(allocator_timeline, one), first)


def test_without_times_lives_are_counted_in_entries():
    tables = Tiny(7).run(80).tables()
    events = tables["allocator_events"].with_columns(time_us=pl.lit(None, pl.Int64))
    found = run(allocator_tensors, tables | {"allocator_events": events})
    timed = run(allocator_tensors, tables).sort("alloc_sequence")
    assert found["life_ns"].null_count() == found["byte_seconds"].null_count() == found.height
    assert found["byte_entries"].is_sorted(descending=True)
    same = found.sort("alloc_sequence")
    assert_frame_equal(same.select("life_entries"), timed.select("life_entries"))
    freed = same.filter(pl.col("free_sequence").is_not_null())
    spans = freed["free_sequence"] - freed["alloc_sequence"]
    assert freed["life_entries"].to_list() == spans.to_list()
    held = same.filter("is_held_at_end")
    assert held["life_entries"].to_list() == [events.height - at for at in held["alloc_sequence"]]
    row = run(allocator_utilization, tables | {"allocator_events": events}).row(0, named=True)
    assert row["mean_utilization_fraction"] is None
    assert row["peak_active_ns"] is None
    assert row["utilization_fraction"] is not None


@pytest.mark.parametrize("seed", [7, 8, 25])
def test_free_blocks_of_expandable_segments_are_found_in_every_mapped_range(seed):
    """At the end they are what the snapshot's own state lists."""
    settings = AllocatorSettings(expandable_segments=True, device_bytes=320 * MIB)
    frames = random_snapshot(seed=seed, n_devices=1, settings=settings)
    known = pl.DataFrame([{"name": "expandable_segments", "value": "True", "is_recorded": True}])
    frames["allocator_settings"] = pl.concat([frames["allocator_settings"], known])
    found = replays_of(
        *(
            frames[name].lazy()
            for name in ("segments", "blocks", "allocator_events", "allocator_settings")
        )
    )
    last = frames["allocator_events"]["sequence"].max()
    listed = frames["blocks"].filter(pl.col("state") == "inactive").select("va", "bytes").sort("va")
    free = found.free_at(0, last)
    assert free.select("va", "bytes").rows() == listed.rows()
    assert free["size_class"].null_count() == 0
    assert (
        frames["segments"].height > found.segments.filter(pl.col("free_sequence").is_null()).height
    )


def test_a_history_of_one_entry_is_none():
    """Recording with enabled="state" leaves the last entry: a free of what no state knows any more."""
    tiny = Tiny(3).run(120)
    tables = tiny.tables(len(tiny.events) - 1)
    assert tables["allocator_events"].height == 1
    assert run(allocator_timeline, tables).is_empty()
    tensors = run(allocator_tensors, tables)
    held = [t for t in tiny.tensors if t["free"] is None]
    assert sorted(tensors["block_bytes"]) == sorted(t["block"] for t in held)
    assert tensors["life_ns"].null_count() == tensors.height
    assert run(allocator_frames, tables)["peak_bytes"].null_count() > 0
    row = run(allocator_utilization, tables).row(0, named=True)
    assert (row["n_entries"], row["peak_active_bytes"]) == (1, None)


def test_a_held_block_lends_its_stack_to_an_entry_without_one():
    tiny = Tiny(3).run(120)
    tables = tiny.tables()
    bare = tables["allocator_events"].with_columns(stack_id=pl.lit(None, pl.Int64))
    stacked = run(allocator_tensors, tables | {"allocator_events": bare})
    whole = run(allocator_tensors, tables)
    held, sites = pl.col("is_held_at_end"), ("va", "function", "source_line", "part")
    assert whole.filter(held)["function"].null_count() < whole.filter(held).height
    assert sorted(stacked.filter(held).select(sites).rows(), key=str) == sorted(
        whole.filter(held).select(sites).rows(), key=str
    )
    assert stacked.filter(~held)["part"].unique().to_list() == ["unattributed"]
