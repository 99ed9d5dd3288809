"""uvm_bench's patterns, over a device layer on the CPU: results, bytes, the order of calls, what is certain."""

from __future__ import annotations

import csv
import json
import re
from itertools import pairwise, product

import cpp
import pytest
from conftest import SOAK

KIB, MIB, GIB = 2**10, 2**20, 2**30
PATTERNS = (
    "stream",
    "stride",
    "random",
    "gather",
    "stencil2d",
    "pointer-chase",
    "ping-pong",
    "broadcast-read",
    "first-touch",
    "signature",
    "hotspot",
    "vector-add",
)
REFUSED, USAGE, FAILED = 7, 2, 1


@pytest.fixture(scope="module")
def program():
    return cpp.built("test_uvm_bench", ["test_uvm_bench.cpp"])


@pytest.fixture
def measured(program, tmp_path):
    """Run uvm_bench with flags; return its JSON, its calls and its tables."""

    def run(*flags, gpu=8 * GIB, out="out"):
        log, out = tmp_path / "calls", tmp_path / out
        environment = {"NSAN_HOST_LOG": str(log), "NSAN_HOST_GPU_BYTES": str(gpu)}
        done = cpp.run(program, "run", *flags, "--out", out, environment=environment)
        assert (done.returncode, done.stderr) == (0, "")
        return Measured(json.loads(done.stdout), log.read_text().splitlines(), out)

    return run


class Measured:
    def __init__(self, told, calls, folder):
        self.told, self.calls, self.folder = told, calls, folder

    def table(self, name):
        with (self.folder / f"{name}.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    def bytes(self):
        """Return (least, most) of each (phase, allocation, direction), phases as "run 0"."""
        phases = [f"{row['name']} {row['iteration']}".strip() for row in self.table("phases")]
        names = [row["name"] for row in self.table("allocations")]
        found = {}
        for row in self.table("expected"):
            phase, name = phases[int(row["phase"])], names[int(row["allocation"])]
            key = (phase, name, row["direction"])
            value = (int(row["least_bytes"]), int(row["most_bytes"]))
            assert found.setdefault(key, value) == value  # of allocations of one name, too
        return found

    def moved(self):
        """Return what moves at all; certainly nothing moves in the other rows."""
        return {key: value for key, value in self.bytes().items() if value != (0, 0)}

    def launches(self):
        return [call.split()[1] for call in self.calls if call.startswith("launch ")]


def verified(program, which):
    """Return (pattern, allocator, prefetch, advice) of runs that must all have been right."""
    done = cpp.run(program, which)
    assert (done.returncode, done.stderr) == (0, "")
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(run["verified"] is True for run in runs)
    axes = ("pattern", "allocator", "prefetch", "advice")
    return [tuple(run["axes"][axis] for axis in axes) for run in runs]


def test_every_pattern_is_right_with_every_allocator_prefetch_and_advice(program):
    prefetches, advices = (
        ("none", "whole", "ahead"),
        ("none", "read-mostly", "preferred-cpu", "accessed-by"),
    )
    axes = product(PATTERNS, ("raw", "caching"), prefetches, advices)
    assert verified(program, "all") == list(axes)


def test_no_pattern_depends_on_the_order_of_threads(program):
    runs = verified(program, "backwards")
    assert [run[::2] for run in runs] == list(product(PATTERNS, ("none", "whole", "ahead")))


def test_a_launch_that_the_gpu_left_out_shows_whichever_it_was_and_whatever_memory_held_before(
    program,
):
    done = cpp.run(program, "lazy")
    assert done.returncode == 0
    runs = [line.split() for line in done.stdout.splitlines() if not line.startswith("{")]
    axes = product(PATTERNS, ("raw", "caching"), ("none", "whole", "ahead"))
    assert {tuple(run[:3]) for run in runs} == set(axes)

    # Of three iterations every launch, in 8 parts with ahead.
    def numbers(*axes):
        return [int(run[3]) for run in runs if tuple(run[:3]) == axes]

    assert numbers("vector-add", "caching", "none") == [1, 2, 3]
    assert numbers("vector-add", "raw", "ahead") == list(range(1, 25))
    assert numbers("random", "raw", "ahead") == [1, 2, 3]  # it cannot be cut
    hidden = [run for run in runs if run[4] != str(FAILED)]
    assert hidden == []
    said = done.stderr.splitlines()
    assert len(said) == len(runs)
    for (pattern, *_), line in zip(runs, said, strict=True):
        assert line.startswith(
            (
                f"uvm_bench: --pattern {pattern}: element ",
                f"uvm_bench: --pattern {pattern}: what the kernels of all it",
            )
        )
    # Of an earlier iteration nothing is left that could be looked at.
    first = runs.index(["vector-add", "raw", "none", "1", str(FAILED)])
    assert "of all iterations added up" in said[first]
    assert "element" in said[first + 2]


# Worked out by hand for 64 MiB and pages of 4 KiB: arrays are multiples of 2 MiB.
DIVIDED = {
    # a third is 21.3 MiB
    "stream": [("b", 20 * MIB), ("c", 20 * MIB), ("a", 20 * MIB)],
    "vector-add": [("a", 20 * MIB), ("b", 20 * MIB), ("c", 20 * MIB)],
    "hotspot": [("temperature", 20 * MIB), ("power", 20 * MIB), ("result", 20 * MIB)],
    # a word out for each 8 KiB: 62 MiB / 8 KiB = 7936 words
    "stride": [("data", 62 * MIB), ("out", 31_744)],
    "random": [("data", 32 * MIB), ("out", 32 * MIB)],
    "stencil2d": [("cells", 32 * MIB), ("next", 32 * MIB)],
    # 8 MiB less a page are left beside the table: 33 times an index of 8 bytes for a row of 256
    "gather": [("table", 56 * MIB), ("rows", 6 * MIB // 32), ("out", 6 * MIB)],
    "pointer-chase": [("nodes", 62 * MIB), ("result", 4 * KIB)],
    "signature": [("data", 62 * MIB), ("result", 4 * KIB)],
    "ping-pong": [("data", 64 * MIB)],
    "first-touch": [("data", 64 * MIB)],
    "broadcast-read": [("buffer", 2 * MIB), ("out", 62 * MIB)],
}


def planned(program, *arguments):
    lines = [line.split() for line in cpp.run(program, "plan", *arguments).stdout.splitlines()]
    *arrays, kernels = [(name, int(first), int(second)) for name, first, second in lines]
    return arrays, kernels[1:]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_bytes_are_divided_as_the_help_says(program, pattern):
    arrays, _ = planned(program, pattern, 64 * MIB, 4096)
    assert [(name, n_bytes) for name, n_bytes, _ in arrays] == DIVIDED[pattern]


@pytest.mark.parametrize("page", [4 * KIB, 64 * KIB])
@pytest.mark.parametrize("n_pages", [24, 31, 511, 513, 1600] if not SOAK else range(24, 1700, 37))
def test_arrays_together_are_never_more_than_was_asked_for(program, n_pages, page):
    for stride, spare in product((4, 12, 4 * KIB, 100 * KIB), (0, page - 1)):
        n_bytes = n_pages * page + spare
        done = cpp.run(program, "plan", "every", n_bytes, page, stride)
        patterns = [
            part.splitlines() for part in re.split(r"^kernels.*\n", done.stdout, flags=re.M)
        ]
        assert [len(arrays) for arrays in patterns] == [3, 2, 2, 3, 2, 2, 1, 2, 1, 2, 3, 3, 0]
        for arrays in patterns:
            sizes = [(int(size), int(touched)) for _, size, touched in map(str.split, arrays)]
            assert sum(size for size, _ in sizes) <= n_bytes
            assert all(0 < touched <= -(-size // page) * page for size, touched in sizes)


KERNELS = {  # read and written in an iteration, for 64 MiB
    "stream": (40 * MIB, 20 * MIB),
    "vector-add": (40 * MIB, 20 * MIB),
    "hotspot": (40 * MIB, 20 * MIB),
    "stencil2d": (32 * MIB, 32 * MIB),
    "stride": (4 * 7936, 4 * 7936),
    "random": (32 * MIB, 32 * MIB),
    "gather": (6 * MIB + 6 * MIB // 32, 6 * MIB),
    "pointer-chase": (16 * 15_872, 16),  # nodes of 4 KiB in 62 MiB
    "signature": (4 * 15_872, 8),
    "ping-pong": (64 * MIB, 64 * MIB),
    "first-touch": (0, 64 * MIB),
    "broadcast-read": (64 * 2 * MIB, 62 * MIB),  # 2 SMs, 32 thread blocks each
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_run_declares_what_its_kernels_read_and_write(program, pattern):
    assert planned(program, pattern, 64 * MIB, 4096)[1] == KERNELS[pattern]


def test_a_stride_above_a_page_touches_that_page_only_and_one_below_all(program):
    touched = {
        stride: planned(program, "stride", 65 * MIB, 4096, stride)[0][0][1:]
        for stride in (512, 4096, 8192, MIB)
    }
    assert touched == {
        512: (64 * MIB, 64 * MIB),
        4096: (64 * MIB, 64 * MIB),
        8192: (64 * MIB, 32 * MIB),
        MIB: (64 * MIB, 64 * 4096),
    }


def test_nodes_touch_the_pages_that_they_begin_on(program):
    def touched(node):
        return planned(program, "pointer-chase", 64 * MIB, 4096, 8192, node)[0][0][2]

    assert touched(16) == touched(4096) == 62 * MIB
    assert touched(8192) == 31 * MIB
    # 21 162 nodes of 3072 bytes: the last begins at byte 65 006 592, on page 15 870 of 15 872
    assert touched(3072) == 15_871 * 4096


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 1000, 4097])
def test_a_permutation_has_every_number_once(program, n):
    done = cpp.run(program, "permutation", n, 7)
    assert sorted(map(int, done.stdout.split())) == list(range(n))


def test_a_permutation_is_shuffled_and_the_seed_says_how(program):
    one, same, other = (
        list(map(int, cpp.run(program, "permutation", 4096, seed).stdout.split()))
        for seed in (1, 1, 2)
    )
    assert one == same != other
    # A random one has 1 number in its place and 2 next to the one before, on average.
    assert sum(i == value for i, value in enumerate(one)) < 10
    assert sum(abs(b - a) == 1 for a, b in pairwise(one)) < 20


@pytest.mark.parametrize("exponent", ["0.5", "1", "1.1", "2.5"])
def test_rows_are_asked_for_as_a_zipf_distribution_says(program, exponent):
    n, draws = 200, 100_000
    counts = list(map(int, cpp.run(program, "zipf", n, exponent, 3, draws).stdout.split()))
    assert sum(counts) == draws
    weights = [rank ** -float(exponent) for rank in range(1, n + 1)]
    expected = [draws * weight / sum(weights) for weight in weights]
    # Ranks that are drawn too seldom for chi-square count as one.
    kept = sum(count >= 20 for count in expected)
    pairs = [*zip(counts[:kept], expected[:kept], strict=True)]
    if kept < n:
        pairs.append((sum(counts[kept:]), sum(expected[kept:])))
    distance = sum((found - wanted) ** 2 / wanted for found, wanted in pairs)
    freedom = len(pairs) - 1
    # Six standard deviations of chi-square.
    assert distance < freedom + 6 * (2 * freedom) ** 0.5


def test_one_row_is_all_rows(program):
    assert cpp.run(program, "zipf", 1, "1.1", 1, 10).stdout.split() == ["10"]


def test_stencils_compute_what_their_names_say(program):
    cell, north, south, west, east, power = 300.0, 310.0, 290.0, 304.0, 320.0, 0.5
    done = cpp.run(program, "rules", cell, north, south, west, east, power)
    diffused, heated = map(float, done.stdout.split())
    # Half the cell, an eighth of each neighbour.
    assert diffused == 303.0
    # hotspot: step/capacity x (power + flow over Ry = Rx = 10 + to 80 degrees over Rz = 20480)
    flow = (north + south - 2 * cell) / 10 + (west + east - 2 * cell) / 10 + (80 - cell) / 20480
    assert heated == pytest.approx(cell + 1.365 * (power + flow), rel=1e-6)


def test_every_call_of_cuda_is_checked():
    """But those that tell an error's name, ask why there is no GPU, or clean up in the end."""
    unchecked = {
        "cudaGetErrorName",
        "cudaGetErrorString",
        "cudaGetLastError",
        "cudaGetDeviceCount",
        "cudaDriverGetVersion",
        "cudaStreamDestroy",
        "cudaEventDestroy",
    }
    text = (cpp.HEADERS / "nsan" / "cuda_device.cuh").read_text()
    calls = re.findall(r"(NSAN_CHECK\()?\b(cuda[A-Z]\w+)\(", text)
    assert len([name for checked, name in calls if checked]) >= 15
    assert {name for checked, name in calls if not checked} == unchecked


@pytest.mark.parametrize("name", ["cuda_device.cuh", "footprint.hpp", "memory.hpp", "program.hpp"])
def test_what_both_programs_share_names_no_flag_of_one_of_them(name):
    """How to take less memory is added by the program that ends: `About::size`."""
    assert not re.search(r"--(bytes|batch|iterations)", (cpp.HEADERS / "nsan" / name).read_text())


CERTAIN = ("--iterations", "2", "--pattern")


def certain_zeros(phases, names):
    return {(phase, name, way) for phase in phases for name in names for way in ("htod", "dtoh")}


@pytest.mark.parametrize("pattern", ["vector-add", "stream"])
def test_inputs_come_to_the_gpu_once_and_the_output_back_once(measured, pattern):
    run = measured(*CERTAIN, pattern, "--bytes", "6MiB")
    first, second, out = ("a", "b", "c") if pattern == "vector-add" else ("b", "c", "a")
    each = (2 * MIB, 2 * MIB)
    assert run.moved() == {
        ("run 0", first, "htod"): each,
        ("run 0", second, "htod"): each,
        ("check", out, "dtoh"): each,
    }
    # What certainly does not move is said as well, the output of each iteration being another array.
    phases = ("init", "run 0", "run 1")
    assert set(run.bytes()) == certain_zeros(phases, (first, second)) | certain_zeros(
        ("run 0", "run 1", "check"), (out,)
    )


def test_an_array_that_the_gpu_filled_does_not_move(measured):
    run = measured(*CERTAIN, "vector-add", "--bytes", "6MiB", "--init", "gpu")
    assert run.moved() == {("check", "c", "dtoh"): (2 * MIB, 2 * MIB)}
    assert run.launches() == ["fill_floats", "fill_floats", "vector_add", "vector_add"]


def test_memory_that_nobody_touched_is_not_copied(measured):
    run = measured(*CERTAIN, "first-touch", "--bytes", "4MiB")
    assert run.moved() == {("check", "data", "dtoh"): (4 * MIB, 4 * MIB)}
    assert len([row for row in run.table("allocations") if row["name"] == "data"]) == 2


def test_a_stride_moves_the_pages_that_it_touches_at_least_and_the_array_at_most(measured):
    run = measured(*CERTAIN, "stride", "--bytes", "17MiB", "--stride-bytes", "64KiB")
    # 16 MiB / 64 KiB = 256 pages; the 1 KiB out shares its VA block
    assert run.moved() == {("run 0", "data", "htod"): (256 * 4096, 16 * MIB)}


def test_a_gather_moves_the_pages_of_its_rows_at_least(measured):
    run = measured(*CERTAIN, "gather", "--bytes", "24MiB")
    told = {array["name"]: array for array in run.told["arrays"]}
    # 7/8 of it are 21 MiB; 2 MiB out are 8192 rows. Every row is on one page.
    assert told["table"]["bytes"] == 20 * MIB
    touched = told["table"]["touched_bytes"]
    assert touched % 4096 == 0
    assert 1000 * 4096 < touched < min(8192 * 4096, 20 * MIB)
    assert run.moved() == {
        ("run 0", "table", "htod"): (touched, 20 * MIB),
        ("check", "out", "dtoh"): (2 * MIB, 2 * MIB),
    }


@pytest.mark.parametrize(
    ("pattern", "arrays"),
    [("stencil2d", {"cells": 2}), ("hotspot", {"temperature": 2, "power": 2})],
)
def test_an_output_that_becomes_an_input_stays_on_the_gpu(measured, pattern, arrays):
    run = measured(*CERTAIN, pattern, "--bytes", f"{2 + 2 * len(arrays)}MiB")
    out = "next" if pattern == "stencil2d" else "result"
    wanted = {("run 0", name, "htod"): (n * MIB, n * MIB) for name, n in arrays.items()}
    back = next(iter(arrays.values())) * MIB
    assert run.moved() == wanted | {("check", out, "dtoh"): (back, back)}


def test_of_ping_pong_only_the_first_turn_is_certain(measured):
    run = measured(*CERTAIN, "ping-pong", "--bytes", "4MiB")
    assert run.moved() == {("run 0", "data", "htod"): (4 * MIB, 4 * MIB)}
    assert set(run.bytes()) == certain_zeros(("init", "host-write 0", "run 0"), ("data",))


def test_a_buffer_that_the_cpu_writes_anew_is_certain_once(measured):
    run = measured(*CERTAIN, "broadcast-read", "--bytes", "16MiB")
    assert run.moved() == {
        ("run 0", "buffer", "htod"): (2 * MIB, 2 * MIB),
        ("check", "out", "dtoh"): (14 * MIB, 14 * MIB),
    }


@pytest.mark.parametrize("pattern", ["signature", "pointer-chase"])
def test_a_single_thread_moves_the_whole_array(measured, pattern):
    run = measured(*CERTAIN, pattern, "--bytes", "4MiB")
    name = "data" if pattern == "signature" else "nodes"
    assert run.moved() == {("run 0", name, "htod"): (2 * MIB, 2 * MIB)}


@pytest.mark.parametrize(
    "flags",
    [
        ("--allocator", "caching"),
        ("--prefetch", "whole"),
        ("--prefetch", "ahead"),
        ("--advice", "accessed-by"),
        ("--oversubscription-factor", "1", "--allow-oversubscription"),
        ("--oversubscription-factor", "1.5", "--allow-oversubscription"),
    ],
)
def test_with_hints_or_without_room_nothing_is_certain(measured, flags):
    run = measured("--pattern", "vector-add", "--bytes", "24MiB", *flags)
    assert run.bytes() == {}
    assert run.told["verified"] is True


def test_where_arrays_share_a_va_block_nothing_is_certain(measured):
    run = measured("--pattern", "vector-add", "--bytes", "3MiB")
    assert [array["bytes"] for array in run.told["arrays"]] == [MIB] * 3
    assert run.bytes() == {}


def test_phases_lie_in_a_step_each(measured):
    run = measured("--pattern", "broadcast-read", "--bytes", "160KiB", "--iterations", "2")
    ranges = [call for call in run.calls if call.startswith(("push_range", "pop_range"))]
    once = ["push_range {}", "pop_range"]
    names = ("allocate", "host-write", "run", "free")
    steps = [["push_range step", *(line.format(name) for name in kept for line in once), "pop_range"]
             for kept in (names, names[:-1])]  # fmt: skip
    outside = [line.format(name) for name in ("allocate", "init") for line in once]
    assert ranges == [*outside, *steps[0], *steps[1], "push_range check", "pop_range"]


def calls_between(run, first, last):
    """Return prefetches, launches and waits from the first launch range on."""
    start = run.calls.index(f"push_range {first}")
    return [
        call
        for call in run.calls[start : run.calls.index(f"push_range {last}")]
        if call.split()[0] in ("prefetch", "launch", "follow")
    ]


def test_whole_brings_every_array_before_the_kernel(measured):
    run = measured("--pattern", "vector-add", "--bytes", "96KiB", "--prefetch", "whole")
    once = [*["prefetch 32768 gpu main"] * 3, "launch vector_add 32x256 main"]
    assert calls_between(run, "run", "check") == once * 3


def test_ahead_brings_a_part_while_the_kernel_works_on_the_one_before(measured):
    flags = ("--bytes", "96KiB", "--prefetch", "ahead", "--iterations", "1")
    run = measured("--pattern", "vector-add", *flags)
    part = ["prefetch 4096 gpu prefetch"] * 3  # 8 parts of a page of each array
    kernel = "launch vector_add 4x256 main"
    after_prefetch, after_kernel = "follow main prefetch", "follow prefetch main"
    body = [after_prefetch, after_kernel, *part, kernel] * 7
    assert calls_between(run, "run", "check") == [*part, *body, after_prefetch, kernel]


def test_ahead_brings_the_rows_around_a_part_of_a_grid(measured):
    # 2 x 128 KiB: 256 rows of 128 floats, 8 parts of 32 rows; a row more on each side that has one
    flags = ("--bytes", "256KiB", "--prefetch", "ahead", "--iterations", "1")
    run = measured("--pattern", "stencil2d", *flags)
    fetched = [call.split()[1] for call in run.calls if call.startswith("prefetch")]
    rows = [33, 32, *[34, 32] * 6, 33, 32]
    assert fetched == [str(n * 512) for n in rows]


def test_ahead_brings_what_every_part_needs_with_the_first_one(measured):
    # 39 pages in 8 parts of 5 or 4 pages, and the page of the result
    flags = ("--bytes", "160KiB", "--prefetch", "ahead", "--iterations", "1")
    run = measured("--pattern", "signature", *flags)
    fetched = [int(call.split()[1]) // 4096 for call in run.calls if call.startswith("prefetch")]
    assert fetched == [5, 1, 5, 5, 5, 5, 5, 5, 4]


@pytest.mark.parametrize("pattern", ["random", "gather", "pointer-chase", "broadcast-read"])
def test_what_cannot_be_cut_is_brought_whole_on_the_other_stream(measured, pattern):
    run = measured(
        "--pattern", pattern, "--bytes", "160KiB", "--prefetch", "ahead", "--iterations", "1"
    )
    sizes = [array["bytes"] for array in run.told["arrays"]]
    fetched, rest = (
        calls_between(run, "run", "check")[: len(sizes)],
        calls_between(run, "run", "check")[len(sizes) :],
    )
    assert fetched == [f"prefetch {size} gpu prefetch" for size in sizes]
    assert [call.split()[0] for call in rest] == ["follow", "launch"]


@pytest.mark.parametrize(
    ("pattern", "sizes"),
    [("vector-add", [32768] * 2), ("gather", [86016, 128]), ("ping-pong", []), ("first-touch", [])],
)
def test_read_mostly_goes_to_arrays_that_nobody_writes(measured, pattern, sizes):
    run = measured("--pattern", pattern, "--bytes", "96KiB", "--advice", "read-mostly")
    advised = [call for call in run.calls if call.startswith("advise")]
    assert advised == [f"advise {size} read-mostly" for size in sizes]


def test_other_advice_goes_to_every_array_whenever_it_is_allocated(measured):
    run = measured("--pattern", "vector-add", "--bytes", "96KiB", "--advice", "accessed-by")
    assert run.calls.count("advise 32768 accessed-by") == 2 + 3


def test_raw_allocates_an_output_in_each_iteration_and_caching_once(measured):
    run = measured("--pattern", "vector-add", "--bytes", "6MiB", "--iterations", "3")
    assert run.calls.count(f"allocate_managed {2 * MIB}") == 2 + 3
    assert not (run.folder / "history.csv").exists()


def test_caching_allocates_an_output_once(measured):
    run = measured("--pattern", "vector-add", "--bytes", "30MiB", "--allocator", "caching")
    assert run.calls.count(f"allocate_managed {10 * MIB}") == 3
    history = run.table("history")
    actions = [row["action"] for row in history if row["tensor"] == "c"]
    served = ["alloc", "free_requested", "free_completed"]
    assert actions == ["segment_alloc", *served, *served, "alloc"]
    managed = {row["name"] for row in run.table("allocations") if row["kind"] == "managed"}
    assert managed == {f"segment {i} (large)" for i in (1, 2, 3)}


@pytest.mark.parametrize(
    ("pattern", "n_bytes", "segments"),
    [
        ("vector-add", 6, 20),  # three of 2 MiB in one segment of 20
        ("vector-add", 24, 40),  # of three of 8 MiB two in one
        ("vector-add", 30, 30),  # from 10 MiB on each has a segment of its own size
    ],
)
def test_the_footprint_of_a_cache_is_that_of_its_segments(measured, pattern, n_bytes, segments):
    flags = ("--pattern", pattern, "--bytes", f"{n_bytes}MiB", "--allocator", "caching")
    footprint = measured(*flags).told["footprint"]
    assert footprint["managed_bytes"] == segments * MIB
    assert footprint["tensor_bytes"] == n_bytes * MIB


TALLY = 8 * 4097
"""What kernels add up takes of the GPU, before anything is planned: 4096 sums, and a word that tells errors."""


def test_a_factor_counts_all_arrays(measured):
    flags = ("--pattern", "vector-add", "--bytes", "24MiB", "--oversubscription-factor", "0.25")
    footprint = measured(*flags, gpu=GIB + TALLY).told["footprint"]
    assert footprint["managed_bytes"] == 24 * MIB
    assert footprint["available_bytes"] == 96 * MIB
    assert footprint["free_bytes_at_end"] == 96 * MIB + TALLY
    assert footprint["ballast_bytes"] == GIB - 96 * MIB


def test_the_gpus_own_memory_holds_what_kernels_add_up_and_no_more(measured):
    run = measured("--pattern", "random", "--bytes", "160KiB")
    rows = [row for row in run.table("allocations") if row["kind"] == "device"]
    assert [(row["name"], row["role"], int(row["bytes"])) for row in rows] == [
        ("tally of kernels", "buffer", TALLY)
    ]
    # Set to zeroes before anything is measured, looked at in the check and not before.
    copies = [i for i, call in enumerate(run.calls) if call == f"copy {TALLY}"]
    assert [
        copies[0] < run.calls.index("push_range init"),
        copies[1] > run.calls.index("push_range check"),
    ] == [True] * 2
    assert len(copies) == 2
    assert not any(call.startswith("leaked") for call in run.calls)


@pytest.mark.parametrize(
    ("at", "n_launches", "open_phase"),
    [
        ("push_range init", 0, "init"),  # in the CPU's fill
        ("launch:3", 3, "run"),  # between the parts of an iteration
        ("push_range host-write:2", 8, "host-write"),
        ("push_range check", 24, "check"),
    ],
)
def test_an_interrupt_does_not_wait_for_a_long_phase_to_end(
    program, tmp_path, at, n_launches, open_phase
):
    log, out = tmp_path / "calls", tmp_path / "out"
    flags = ("--pattern", "ping-pong", "--bytes", "160KiB", "--prefetch", "ahead", "--out", out)
    environment = {"NSAN_HOST_LOG": str(log), "NSAN_HOST_INTERRUPT": at}
    done = cpp.run(program, "run", *flags, environment=environment)
    assert (done.returncode, done.stdout) == (130, "")
    assert log.read_text().count("launch ping_pong") == n_launches
    told = json.loads((out / "run.json").read_text())
    assert told["status"] == "interrupted"
    assert [phase["name"] for phase in told["phases"] if phase["ns"] is None] == [open_phase]


def test_a_factor_leaves_the_same_memory_with_a_cache_and_without(measured):
    flags = ("--pattern", "vector-add", "--bytes", "24MiB", "--oversubscription-factor", "1.25")
    flags += ("--allow-oversubscription", "--allocator")
    raw, cached = (
        measured(*flags, kind, gpu=GIB + TALLY, out=kind).told["footprint"]
        for kind in ("raw", "caching")
    )
    # 24 MiB / 1.25 are 19.2, in granules of 2 MiB; of three arrays of 8 MiB two share a segment of 20.
    left = {"available_bytes": 20 * MIB, "ballast_bytes": GIB - 20 * MIB, "free_bytes": GIB}
    left["free_bytes_at_end"] = 20 * MIB + TALLY
    left |= {"tensor_bytes": 24 * MIB, "tensor_oversubscription_factor": 1.2}
    assert raw == left | {"managed_bytes": 24 * MIB, "oversubscription_factor": 1.2}
    assert cached == left | {"managed_bytes": 40 * MIB, "oversubscription_factor": 2}


def test_a_cache_that_would_not_fit_is_refused_though_its_arrays_would(program, tmp_path):
    # 96 MiB are left, of which 64 stay free.
    flags = ("--pattern", "vector-add", "--bytes", "24MiB", "--oversubscription-factor")
    gpu = {"NSAN_HOST_GPU_BYTES": str(8 * GIB + TALLY), "NSAN_HOST_LOG": str(tmp_path / "calls")}
    assert cpp.run(program, "run", *flags, "0.25", environment=gpu).returncode == 0
    done = cpp.run(program, "run", *flags, "0.25", "--allocator", "caching", environment=gpu)
    assert (done.returncode, done.stdout) == (REFUSED, "")
    # 24 MiB over 40 + 64.
    assert done.stderr == (
        "uvm_bench: 40 MiB of managed memory, which the caching allocator reserves in whole segments for 24 MiB of "
        "tensors, is more than the 32 MiB that fit safely into the 96 MiB that the GPU has left after the ballast: some "
        "drivers can hang the whole machine when they evict; --allow-oversubscription does it all the same; without it, "
        "at most --oversubscription-factor 0.2307; a smaller --bytes takes less\n"
    )
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call for call in calls if "allocate" in call] == [
        f"allocate_device {TALLY}"
    ]  # no ballast
    assert cpp.run(program, "run", *flags, "0.2307", "--allocator", "caching").returncode == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--pattern", "strem"), "'strem' is none of stream, stride"),
        (("--pattern", "strem"), "did you mean stream?"),
        (("--init", "disk"), "--init: 'disk' is none of cpu, gpu"),
        (("--bytes", "12287"), "--bytes 12287 is too little for --pattern stream: give it 12288"),
        (("--pattern", "gather", "--bytes", "64KiB"), "give it 98304 or more"),
        (("--pattern", "stride", "--stride-bytes", "6"), "--stride-bytes 6: give it a multiple of 4"),
        (("--zipf-exponent", "0"), "--zipf-exponent"),
        (("--zipf-exponent", "nan"), "--zipf-exponent"),
        (("--pattern", "pointer-chase", "--node-bytes", "24"), "give it a multiple of 16"),
        (("--pattern", "pointer-chase", "--node-bytes", "1GiB"), "is more than --bytes holds"),
        (("--pattern", "pointer-chase", "--chasers", "257"), "--chasers 257: from 1 to 256"),
        (("--pattern", "pointer-chase", "--chasers", "0"), "--chasers"),
        (("--grain", "line"), "--grain: 'line' is none of page, element"),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_told_in_one_line_before_a_gpu_is_asked_for(program, flags, said):
    without = {"NSAN_HOST_WITHOUT": "driver"}
    done = cpp.run(program, "run", *flags, environment=without)
    assert (done.returncode, done.stdout) == (USAGE, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_few_nodes_have_no_more_chasers(program):
    flags = ("--pattern", "pointer-chase", "--bytes", "12KiB", "--chasers", "3")
    done = cpp.run(program, "run", *flags)
    assert "--chasers 3: from 1 to 2" in done.stderr


@pytest.mark.parametrize("chasers", [1, 3, 256])
def test_chasers_go_round_together(measured, chasers):
    flags = ("--bytes", "1100KiB", "--node-bytes", "1KiB", "--chasers", chasers)
    run = measured("--pattern", "pointer-chase", *flags)
    assert run.told["verified"] is True
    assert run.launches() == ["pointer_chase"] * 3
    assert f"launch pointer_chase 1x{chasers} main" in run.calls


@pytest.mark.parametrize(("grain", "reads"), [("page", 39), ("element", 39 * 1024)])
def test_a_signature_is_one_thread(measured, grain, reads):
    run = measured("--pattern", "signature", "--bytes", "160KiB", "--grain", grain)
    assert "launch signature_read 1x1 main" in run.calls
    assert run.told["kernel_read_bytes"] == 4 * reads


def test_help_names_every_pattern_without_a_gpu(program):
    done = cpp.run(program, "run", "--help", environment={"NSAN_HOST_WITHOUT": "driver"})
    assert done.returncode == 0
    assert f"--pattern {'|'.join(PATTERNS)}\n" in done.stdout
    told = " ".join(done.stdout.split())
    assert all(f"{pattern}: " in told for pattern in PATTERNS)
