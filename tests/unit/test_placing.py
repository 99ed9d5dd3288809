"""Tensor programs under an allocator, and the history it leaves."""

from __future__ import annotations

import polars as pl
import pytest

from nsan.errors import UsageError
from nsan.model.access import Random
from nsan.model.allocator_history import snapshot_frames
from nsan.model.hints import Hint, parse_hint
from nsan.model.networks import tensors as t
from nsan.model.placing import placed
from nsan.model.profiles import gpu_profile
from nsan.model.program import Advise, Allocate, Copy, Free, Launch, Mark, Prefetch, PushRange
from nsan.model.recording import BASE_VA
from nsan.units import KIB, MIB

GPU = gpu_profile("a100-sxm4-40gb")
W, A, B = (
    t.Tensor("w", 3 * MIB, "parameter"),
    t.Tensor("a#1", 2 * MIB, "activation"),
    t.Tensor("b#1", 100 * KIB, "activation"),
)
STEP = t.TensorProgram(
    "little",
    (
        t.Create(W),
        t.HostWrite("w"),
        t.Step(1),
        t.Phase("forward"),
        t.Create(A),
        t.Compute("layer forward", ("w",), ("a#1",), 1e6),
        t.Create(B),
        t.Compute("loss", ("a#1",), ("b#1",), 0.0),
        t.Phase("backward"),
        t.Compute("layer backward", ("a#1", "b#1"), ("w",), 1e6),
        t.Drop("a#1"),
        t.Drop("b#1"),
    ),
)


def of(made, kind):
    return [operation for operation in made.program.operations if isinstance(operation, kind)]


def test_without_caching_each_tensor_is_an_allocation_that_is_freed_when_it_dies():
    made = placed(STEP, "raw", GPU)
    assert [(each.name, each.n_bytes) for each in of(made, Allocate)] == [
        ("w", 3 * MIB),
        ("a#1", 2 * MIB),
        ("b#1", 100 * KIB),
    ]
    assert [each.name for each in of(made, Free)] == ["a#1", "b#1"]


def test_with_caching_the_driver_sees_segments_and_no_free():
    made = placed(STEP, "caching", GPU)
    # 3 and 2 MiB share a segment for requests of 1 to 10 MiB, 100 KiB has one of the small pool.
    assert [(each.name, each.n_bytes) for each in of(made, Allocate)] == [
        ("segment 0", 20 * MIB),
        ("segment 1", 2 * MIB),
    ]
    assert of(made, Free) == []


def test_a_kernel_touches_the_part_of_the_segment_that_its_tensor_has():
    made = placed(STEP, "caching", GPU)
    forward = of(made, Launch)[0].kernel
    touched = [(s.allocation, s.offset_bytes, s.n_bytes, s.write) for s in forward.streams]
    assert touched == [
        ("segment 0", 0, 3 * MIB, False),
        ("segment 0", 3 * MIB, 2 * MIB, True),
    ]
    assert of(made, Copy) == [Copy("segment 0", offset_bytes=0, n_bytes=3 * MIB)]


def test_what_is_read_and_written_is_one_access_that_writes():
    program = t.TensorProgram(
        "p", (t.Create(W), t.Create(A), t.Compute("add", ("w", "a#1"), ("a#1",), 0.0))
    )
    (launch,) = of(placed(program, "raw", GPU), Launch)
    assert [(s.allocation, s.write) for s in launch.kernel.streams] == [("w", False), ("a#1", True)]


def test_the_peak_of_the_tensors_does_not_depend_on_the_allocator():
    assert [placed(STEP, kind, GPU).peak_tensor_bytes for kind in ("raw", "caching")] == [
        5 * MIB + 100 * KIB
    ] * 2


def test_a_kernel_that_computes_takes_its_time_and_a_slow_memory_its_own():
    """Per thread block the model spends compute_ns_per_mib x MiB of a step; the grid runs in rounds."""

    def kernel_ns(flops):
        program = t.TensorProgram("p", (t.Create(W), t.Compute("k", ("w",), (), flops)))
        (launch,) = of(placed(program, "raw", GPU), Launch)
        kernel = launch.kernel
        slots = GPU.n_sms * (GPU.blocks_per_sm // 4)
        rounds = -(-kernel.grid // slots)
        return kernel.compute_ns_per_mib * kernel.threads * 4 / MIB * rounds

    # 108 multiprocessors x 100 GFLOP/s: 1.08e9 operations are 100 us.
    assert kernel_ns(1.08e9) == pytest.approx(100_000)
    # 3 MiB at 80 % of 1.555 TB/s would be 2.5 us: below what any kernel takes.
    assert kernel_ns(0.0) == pytest.approx(4_000)


def test_a_lookup_touches_a_few_rows_of_the_table():
    table = t.Tensor("wte", 300 * 1024 * 3072, "parameter")
    out = t.Tensor("out", 256 * 3072, "activation")
    lookup = t.Compute("wte embedding forward", ("wte",), ("out",), 0.0)
    program = t.TensorProgram(
        "p", (t.Create(table), t.Create(out), lookup), {"sparse_reads": {lookup.name: 256 * 3072}}
    )
    (launch,) = of(placed(program, "raw", GPU), Launch)
    gather, written = launch.kernel.streams
    assert isinstance(gather, Random)
    assert (gather.element_bytes, gather.n_bytes) == (3072, table.n_bytes)
    assert gather.draws * launch.kernel.grid == pytest.approx(256, abs=launch.kernel.grid)
    assert written.write


def test_steps_and_phases_are_marks_and_ranges_of_the_trace():
    made = placed(STEP, "caching", GPU)
    assert [each.text for each in of(made, Mark)] == ["step 1"]
    assert [each.text for each in of(made, PushRange)] == ["step", "forward", "backward"]


@pytest.mark.parametrize(
    ("allocator", "kind", "expected"),
    [
        # b has 100 KiB: too little for a hint.
        ("caching", "prefetch", [("segment 0", 0, 3 * MIB), ("segment 0", 3 * MIB, 2 * MIB)]),
        ("caching", "prefetch-object", [("segment 0", 0, None)]),
        ("raw", "prefetch-object", [("w", 0, None), ("a#1", 0, None)]),
        ("raw", "prefetch", [("w", 0, 3 * MIB), ("a#1", 0, 2 * MIB)]),
    ],
)
def test_prefetches_come_before_each_kernel(allocator, kind, expected):
    made = placed(STEP, allocator, GPU, hints=(Hint(kind),))
    operations = list(made.program.operations)
    first = next(i for i, each in enumerate(operations) if isinstance(each, Launch))
    before = [each for each in operations[:first] if isinstance(each, Prefetch)]
    assert [(p.allocation, p.offset_bytes, p.n_bytes) for p in before] == expected


def test_a_hint_for_one_role_leaves_the_others_alone():
    made = placed(STEP, "caching", GPU, hints=(Hint("prefetch", ("parameter",)),))
    assert {(p.offset_bytes, p.n_bytes) for p in of(made, Prefetch)} == {(0, 3 * MIB)}


def test_advice_is_given_with_the_tensor_and_taken_back_before_its_place_is_free():
    made = placed(STEP, "caching", GPU, hints=(Hint("preferred-cpu", ("activation",)),))
    assert of(made, Advise) == [
        Advise("segment 0", "preferred_location", -1, 3 * MIB, 2 * MIB),
        Advise("segment 0", "unset_preferred_location", -1, 3 * MIB, 2 * MIB),
    ]


def test_a_hint_reads_as_it_is_written():
    assert parse_hint("none") is None
    for text in ("prefetch", "read-mostly:parameter+buffer"):
        assert str(parse_hint(text)) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [("prefetsch", "'prefetsch'"), ("prefetch:weights", "'weights'")],
)
def test_an_unknown_hint_lists_those_that_exist(text, said):
    with pytest.raises(UsageError, match=said) as error:
        parse_hint(text)
    assert "There are" in str(error.value)


def test_an_unknown_allocator_lists_those_that_exist():
    with pytest.raises(UsageError, match="raw, caching"):
        placed(STEP, "rmm", GPU)


@pytest.mark.parametrize("kind", ["raw", "caching"])
def test_the_history_has_the_addresses_of_the_trace_and_the_times_of_the_run(kind):
    made = placed(STEP, kind, GPU)
    times = [1_000 * (i + 1) for i in range(len(made.program.operations))]
    frames = snapshot_frames(made.history, times)
    events = frames["allocator_events"]
    allocated = events.filter(pl.col("action") == "segment_alloc")
    done = [i + 1 for i, each in enumerate(made.program.operations) if isinstance(each, Allocate)]
    assert allocated["time_us"].to_list() == done
    assert allocated["va"].min() == BASE_VA
    assert (allocated["va"] % (2 * MIB) == 0).all()
    assert events["time_us"].is_sorted()
    names = dict(frames["stacks"].select("stack_id", "function").iter_rows())
    assert [names[i] for i in events.filter(pl.col("action") == "alloc")["stack_id"]] == [
        "w",
        "a",
        "b",
    ]


def test_the_final_state_of_the_history_adds_up():
    frames = snapshot_frames(placed(STEP, "caching", GPU).history, [0] * 100)
    segments, blocks = frames["segments"], frames["blocks"]
    assert segments["bytes"].sum() == blocks["bytes"].sum() == 22 * MIB
    assert segments["active_bytes"].sum() == segments["requested_bytes"].sum() == 3 * MIB
    assert blocks.filter(pl.col("state") != "inactive")["bytes"].to_list() == [3 * MIB]


def test_a_copy_from_the_host_goes_to_the_place_of_its_tensor():
    program = t.TensorProgram("p", (t.Create(W), t.Create(A), t.HostWrite("a#1")))
    (copy,) = of(placed(program, "caching", GPU), Copy)
    assert copy == Copy("segment 0", offset_bytes=3 * MIB, n_bytes=2 * MIB)


def test_a_tensor_that_died_does_not_count_for_the_peak():
    later = t.Tensor("c#1", 4 * MIB, "activation")
    operations = (t.Create(W), t.Create(A), t.Drop("a#1"), t.Create(later))
    made = placed(t.TensorProgram("p", operations), "caching", GPU)
    assert made.peak_tensor_bytes == 7 * MIB  # 3 + 4; with the dead one it would be 9
