"""The caching allocator of the C++ programs against nsan.torch_alloc, and against numbers worked out by hand."""

from __future__ import annotations

import random

import cpp
import pytest
from allocator_programs import RandomProgram, Recorded
from conftest import SOAK

from nsan.torch_alloc.settings import AllocatorSettings
from nsan.units import GIB, MIB

N_PROGRAMS = 1000
N_STEPS = 2000 if SOAK else 400
FIRST_VA = 0x7F00_0000_0000


class Written:
    """A machine of one stream and the default pool that writes down what it is asked."""

    def __init__(self, machine):
        self.machine = machine
        self.operations = []
        self.n_made = 0
        self.numbers = {}

    def allocate(self, n_bytes, **_):
        self.operations.append(f"a {n_bytes}")
        block = self.machine.allocate(n_bytes)
        self.numbers[block], self.n_made = self.n_made, self.n_made + 1
        return block

    def free(self, block, **_):
        self.operations.append(f"f {self.numbers[block]}")
        self.machine.free(block)

    def empty_cache(self):
        self.operations.append("e")
        self.machine.empty_cache()

    def close_pool(self, _):
        """There is one pool."""

    def pending_blocks(self):
        return []


class OneStreamProgram(RandomProgram):
    """The random programs of the allocator's own tests, with the default settings and one stream."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.limit = self.rng.choice([None, None, 96 * MIB, 300 * MIB, GIB])
        self.recorded = Recorded(AllocatorSettings(device_bytes=self.limit))
        self.written = Written(self.recorded.machine)
        self.held = []
        self.sizes = [self._size() for _ in range(12)]

    @property
    def machine(self):
        return self.written

    def text(self):
        return "\n".join([f"program {self.limit or 0}", *self.written.operations, "end", ""])

    def told(self):
        """What the C++ program must say of it, without its messages."""
        machine = self.recorded.machine
        entries = [f"entry {action} {va} {n}" for action, va, n, *_ in self.recorded.entries]
        segments = [
            f"segment {s.va} {s.n_bytes} {'small' if s.is_small else 'large'}"
            for s in machine.segments()
        ]
        blocks = [
            f"block {b.segment.va} {b.va} {b.n_bytes} {b.requested_bytes} {b.state}"
            for b in machine.blocks()
        ]
        sums = [
            machine.reserved_bytes,
            machine.peak_reserved_bytes,
            machine.allocated_bytes,
            machine.peak_allocated_bytes,
            machine.n_segments_made,
            machine.n_retries,
        ]
        return [*entries, *segments, *blocks, "sums " + " ".join(map(str, sums)), "end"]


@pytest.fixture(scope="module")
def allocator():
    """Run programs in C++; the lines of each."""
    program = cpp.built("test_allocator", ["test_allocator.cpp"])

    def run(text):
        ended = cpp.run(program, stdin=text)
        assert (ended.returncode, ended.stderr) == (0, "")
        return [[*lines.splitlines(), "end"] for lines in ended.stdout.split("\nend\n")[:-1]]

    return run


def without_errors(lines):
    return [line for line in lines if not line.startswith("error")]


def test_random_programs_leave_the_segments_blocks_and_history_of_the_checked_allocator(allocator):
    programs = [OneStreamProgram(seed) for seed in range(N_PROGRAMS)]
    for program in programs:
        for _ in range(N_STEPS):
            program.step()
    said = allocator("".join(program.text() for program in programs))
    assert len(said) == N_PROGRAMS
    for seed, (program, lines) in enumerate(zip(programs, said, strict=True)):
        assert without_errors(lines) == program.told(), f"seed {seed}"
    entries = [entry[0] for program in programs for entry in program.recorded.entries]
    assert entries.count("free_completed") > 50 * N_PROGRAMS
    n_retries = sum(program.recorded.machine.n_retries for program in programs)
    assert n_retries > entries.count("oom") > N_PROGRAMS // 4


def run_by_hand(allocator, *operations, limit=0):
    (lines,) = allocator("\n".join([f"program {limit}", *operations, "end", ""]))
    return lines


def blocks_of(lines):
    """Address from the first segment, size and state of each block."""
    found = [line.split() for line in lines if line.startswith("block")]
    return [(int(va) - FIRST_VA, int(n), state) for _, _, va, n, _, state in found]


def test_requests_are_rounded_and_split_off_the_front(allocator):
    lines = run_by_hand(allocator, "a 1", "a 513", f"a {MIB}")
    assert blocks_of(lines) == [
        (0, 512, "allocated"),
        (512, 1024, "allocated"),
        (1536, MIB, "allocated"),
        (1536 + MIB, 2 * MIB - 1536 - MIB, "free"),
    ]


@pytest.mark.parametrize(
    ("asked", "segment"),
    [
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (21 * MIB, 22 * MIB),
    ],
)
def test_a_new_segment_has_the_size_that_pytorch_takes(allocator, asked, segment):
    lines = run_by_hand(allocator, f"a {asked}")
    assert lines[0] == f"entry segment_alloc {FIRST_VA} {segment}"


def test_a_large_block_is_split_only_if_more_than_one_mib_remains(allocator):
    whole = run_by_hand(allocator, f"a {11 * MIB}")
    assert blocks_of(whole) == [(0, 12 * MIB, "allocated")]
    split = run_by_hand(allocator, f"a {11 * MIB - 512}")
    assert blocks_of(split) == [
        (0, 11 * MIB - 512, "allocated"),
        (11 * MIB - 512, MIB + 512, "free"),
    ]


def test_of_blocks_of_one_size_the_lowest_address_is_taken(allocator):
    # Three segments of 12 MiB; the third is freed first, then the first.
    lines = run_by_hand(allocator, *[f"a {12 * MIB}"] * 3, "f 2", "f 0", f"a {12 * MIB}")
    assert lines[-6] == f"segment {FIRST_VA + 24 * MIB} {12 * MIB} large"
    assert blocks_of(lines) == [
        (0, 12 * MIB, "allocated"),
        (12 * MIB, 12 * MIB, "allocated"),
        (24 * MIB, 12 * MIB, "free"),
    ]


def test_the_smallest_block_that_fits_is_taken_wherever_it_lies(allocator):
    lines = run_by_hand(
        allocator, f"a {30 * MIB}", f"a {12 * MIB}", "f 0", "f 1", f"a {11 * MIB + 512}"
    )
    assert blocks_of(lines) == [(0, 30 * MIB, "free"), (30 * MIB, 12 * MIB, "allocated")]


def test_freed_neighbours_merge_and_segments_that_touch_do_not(allocator):
    lines = run_by_hand(
        allocator, *[f"a {MIB}"] * 2, "f 0", "f 1", f"a {12 * MIB}", f"a {12 * MIB}", "f 2", "f 3"
    )
    assert blocks_of(lines) == [
        (0, 2 * MIB, "free"),
        (2 * MIB, 12 * MIB, "free"),
        (14 * MIB, 12 * MIB, "free"),
    ]


def test_when_no_segment_is_to_be_had_every_free_one_is_given_back_and_the_request_tried_again(
    allocator,
):
    # 32 MiB: 2 + 10 + 20 are taken; 22 MiB more fit only when the two free ones went, the large one first.
    lines = run_by_hand(
        allocator,
        *["a 512", f"a {10 * MIB}", f"a {2 * MIB}", "f 0", "f 2", f"a {22 * MIB}"],
        limit=32 * MIB,
    )
    entries = [line for line in lines if line.startswith("entry")]
    assert entries[-4:] == [
        f"entry segment_free {FIRST_VA + 12 * MIB} {20 * MIB}",
        f"entry segment_free {FIRST_VA} {2 * MIB}",
        f"entry segment_alloc {FIRST_VA + 32 * MIB} {22 * MIB}",
        f"entry alloc {FIRST_VA + 32 * MIB} {22 * MIB}",
    ]
    assert lines[-2] == f"sums {32 * MIB} {32 * MIB} {32 * MIB} {32 * MIB} 4 1"


def test_a_request_that_cannot_be_served_changes_nothing_but_the_history(allocator):
    lines = run_by_hand(
        allocator, f"a {10 * MIB}", f"a {20 * MIB + 1}", f"a {10 * MIB}", limit=20 * MIB
    )
    assert lines[2:6] == [
        f"entry oom 0 {20 * MIB + 512}",
        f"error out of memory: {20 * MIB + 512} byte asked for, {10 * MIB} byte reserved (segments: 1), of "
        f"these {10 * MIB} byte in use",
        f"entry segment_alloc {FIRST_VA + 10 * MIB} {10 * MIB}",
        f"entry alloc {FIRST_VA + 10 * MIB} {10 * MIB}",
    ]


def test_emptying_the_cache_keeps_segments_that_are_partly_in_use(allocator):
    lines = run_by_hand(
        allocator, *["a 512", "a 512", f"a {12 * MIB}", f"a {2 * MIB}", "f 1", "f 3", "f 2", "e"]
    )
    freed = [line for line in lines if line.startswith("entry segment_free")]
    assert freed == [
        f"entry segment_free {FIRST_VA + 2 * MIB} {12 * MIB}",
        f"entry segment_free {FIRST_VA + 14 * MIB} {20 * MIB}",
    ]
    assert blocks_of(lines) == [(0, 512, "allocated"), (512, 2 * MIB - 512, "free")]


@pytest.mark.parametrize(
    ("operations", "message"),
    [
        (["a 0"], "a request for 0 byte never reaches the caching allocator: ask for at least 1"),
        (
            [f"a {2**64 - 1}"],
            f"a request for {2**64 - 1} byte: no GPU has as many addresses",
        ),
        (
            ["a 1", "f 0", "f 0"],
            f"the caching allocator holds no tensor at address {FIRST_VA:#x}: free it once",
        ),
    ],
)
def test_what_no_program_may_ask_is_refused_in_one_line(allocator, operations, message):
    errors = [line for line in run_by_hand(allocator, *operations) if line.startswith("error")]
    assert errors == [f"error {message}"]
