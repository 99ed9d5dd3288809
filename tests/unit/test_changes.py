"""Remedies as changes of a program: each against the same program written by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import programs, run_to_end

from nsan.errors import ProgramError
from nsan.model.access import Stream
from nsan.model.changes import (
    allocating,
    fitting,
    with_advice,
    with_first_touch,
    with_prefetches,
    without_prefetcher,
    without_prefetches,
)
from nsan.model.making import Recipe
from nsan.model.origin import Built, Trained
from nsan.model.parts import ChangeError, Spot, parts_of
from nsan.model.program import (
    CPU,
    Advise,
    Allocate,
    Fill,
    Free,
    HostTouch,
    Kernel,
    Launch,
    Prefetch,
    Program,
    Synchronize,
)
from nsan.model.recording import BASE_VA
from nsan.model.settings import Settings
from nsan.model.size import Size
from nsan.model.workloads import workload
from nsan.model.workloads.training import TrainingRun
from nsan.units import KIB, MIB


def kernel(name, *arrays, **how):
    return Kernel(name, 4, 256, tuple(Stream(allocation=each, **how) for each in arrays))


X, Y = Allocate("x", 4 * MIB), Allocate("y", 2 * MIB)
FILL_X, FILL_Y = HostTouch("x", write=True), HostTouch("y", write=True)
ADD, SCALE = Launch(kernel("add", "x", "y")), Launch(kernel("scale", "x"))


def program(*operations, **how):
    return Program("p", operations, **how)


BOTH = program(X, Y, FILL_X, FILL_Y, ADD, SCALE, Synchronize(), HostTouch("x"))


# What is meant ------------------------------------------------------------------------------------


def named(parts):
    return [(each.name, each.offset_bytes, each.n_bytes) for each in parts]


def test_an_allocation_is_found_by_its_number():
    assert named(parts_of(BOTH, Spot(1))) == [("y", 0, None)]


def test_an_allocation_is_found_by_its_address_as_the_trace_has_it():
    assert named(parts_of(BOTH, Spot(va=BASE_VA + 4 * MIB))) == [("y", 0, None)]
    assert named(parts_of(BOTH, Spot(0, BASE_VA, 4 * MIB))) == [("x", 0, None)]


def test_later_allocations_of_a_descending_program_lie_lower():
    down = program(X, Y, descending=True)
    assert named(parts_of(down, Spot(va=BASE_VA))) == [("y", 0, None)]
    assert named(parts_of(down, Spot(va=BASE_VA + 2 * MIB))) == [("x", 0, None)]


def test_a_part_is_a_part():
    spot = Spot(0, BASE_VA + MIB, 2 * MIB)
    assert named(parts_of(BOTH, spot)) == [("x", MIB, 2 * MIB)]
    assert named(parts_of(BOTH, Spot(0, BASE_VA + MIB, 3 * MIB))) == [("x", MIB, None)]


def test_guessed_bounds_mean_every_allocation_that_they_meet():
    spot = Spot(va=BASE_VA + 3 * MIB, n_bytes=2 * MIB)
    assert named(parts_of(BOTH, spot)) == [("x", 3 * MIB, None), ("y", 0, MIB)]


def test_of_allocations_that_followed_each_other_at_an_address_the_number_tells():
    churn = program(X, Y, Allocate("t", 2 * MIB), Free("t"), Allocate("t", 2 * MIB), Free("t"))
    there = BASE_VA + 6 * MIB
    assert [part.first for part in parts_of(churn, Spot(va=there))] == [2, 4]
    assert [(p.first, p.last) for p in parts_of(churn, Spot(3, there, 2 * MIB))] == [(4, 5)]


def test_a_number_of_another_count_yields_to_the_address():
    assert named(parts_of(BOTH, Spot(0, BASE_VA + 4 * MIB, 2 * MIB))) == [("y", 0, None)]
    assert named(parts_of(BOTH, Spot(9, BASE_VA, 4 * MIB))) == [("x", 0, None)]


def test_nothing_named_is_everything():
    assert named(parts_of(BOTH, Spot())) == [("x", 0, None), ("y", 0, None)]


@pytest.mark.parametrize("va", [0, BASE_VA - 1, BASE_VA + 6 * MIB])
def test_an_address_outside_is_refused(va):
    with pytest.raises(ChangeError, match="no managed allocation"):
        parts_of(BOTH, Spot(va=va, n_bytes=1))


# Prefetches ---------------------------------------------------------------------------------------


def test_a_prefetch_stands_before_each_launch_that_uses_the_memory():
    ahead = Prefetch("x")
    by_hand = program(X, Y, FILL_X, FILL_Y, ahead, ADD, ahead, SCALE, Synchronize(), HostTouch("x"))
    assert with_prefetches(BOTH, Spot(0)) == by_hand


def test_a_prefetch_can_be_for_one_kernel():
    by_hand = program(
        X, Y, FILL_X, FILL_Y, ADD, Prefetch("x"), SCALE, Synchronize(), HostTouch("x")
    )
    assert with_prefetches(BOTH, Spot(0, kernel="scale")) == by_hand


def test_a_prefetch_of_all_memory_takes_what_each_launch_uses():
    found = with_prefetches(BOTH, Spot(kernel="add")).operations
    assert found[4:7] == (Prefetch("x"), Prefetch("y"), ADD)
    assert len(found) == len(BOTH.operations) + 2


def test_the_workload_with_prefetches_is_what_the_change_makes_of_it_without():
    stream = workload("stream")
    plain, ahead = stream.build(Size(4 * MIB)), stream.build(Size(4 * MIB, prefetch="ahead"))
    assert with_prefetches(plain, Spot()) == ahead
    assert without_prefetches(ahead, Spot()) == plain


def test_a_part_is_prefetched_where_a_launch_uses_a_byte_of_it():
    front = Launch(kernel("front", "x", n_bytes=MIB))
    back = Launch(kernel("back", "x", offset_bytes=MIB, n_bytes=MIB))
    plain = program(X, front, back)
    found = with_prefetches(plain, Spot(0, BASE_VA + MIB, MIB))
    assert found == program(X, front, Prefetch("x", 0, MIB, MIB), back)


def test_a_prefetch_takes_the_place_of_pieces_of_it():
    pieces = [Prefetch("x", 0, at, MIB) for at in range(0, 4 * MIB, MIB)]
    other = (Prefetch("y"), Prefetch("x", CPU))
    plain = program(X, Y, *pieces, ADD, *pieces, *other, SCALE)
    found = with_prefetches(plain, Spot(0, kernel="scale"))
    assert found == program(X, Y, *pieces, ADD, *other, Prefetch("x"), SCALE)
    # What reaches beyond the part stays.
    front = with_prefetches(plain, Spot(0, BASE_VA, 2 * MIB, "scale"))
    assert front == program(
        X, Y, *pieces, ADD, *pieces[2:], *other, Prefetch("x", 0, 0, 2 * MIB), SCALE
    )
    whole = program(X, Prefetch("x"), SCALE)
    assert with_prefetches(whole, Spot(0, BASE_VA, MIB)).operations.count(Prefetch("x")) == 1


def test_a_prefetch_to_a_gpu_is_for_its_own_launches():
    two = program(X, FILL_X, Launch(ADD.kernel, 0), Launch(SCALE.kernel, 1))
    assert with_prefetches(two, Spot(0), 1).operations[-2:] == (Prefetch("x", 1), two.operations[3])
    with pytest.raises(ChangeError, match="No launch on that GPU"):
        with_prefetches(two, Spot(0), 2)


def test_a_prefetch_is_for_the_allocation_of_its_time():
    first, use = Allocate("t", 2 * MIB), Launch(kernel("use", "t"))
    churn = program(first, use, Synchronize(), Free("t"), first, use, Synchronize(), Free("t"))
    found = with_prefetches(churn, Spot(1)).operations
    assert found.count(Prefetch("t")) == 1
    assert found[5:7] == (Prefetch("t"), use)


def test_memory_goes_back_before_the_host_touches_it_again_and_only_then():
    plain = program(X, FILL_X, SCALE, HostTouch("x"), HostTouch("x"), SCALE, HostTouch("x"))
    back = (Prefetch("x", CPU), Synchronize())
    by_hand = program(
        X, FILL_X, SCALE, *back, HostTouch("x"), HostTouch("x"), SCALE, *back, HostTouch("x")
    )  # fmt: skip
    assert with_prefetches(plain, Spot(0), CPU) == by_hand
    with pytest.raises(ChangeError, match="does not touch"):
        with_prefetches(program(X, FILL_X, SCALE), Spot(0), CPU)


def test_a_kernel_that_there_is_not_is_refused():
    with pytest.raises(ChangeError, match="No launch"):
        with_prefetches(BOTH, Spot(0, kernel="nobody"))


def test_prefetches_of_one_allocation_are_left_out():
    full = program(X, Y, Prefetch("x"), Prefetch("y"), ADD, Prefetch("x", CPU))
    assert without_prefetches(full, Spot(0)) == program(X, Y, Prefetch("y"), ADD)
    assert without_prefetches(full, Spot(0), 0) == program(
        X, Y, Prefetch("y"), ADD, Prefetch("x", CPU)
    )
    with pytest.raises(ChangeError, match="does not prefetch"):
        without_prefetches(BOTH, Spot(0))


# Advice and first touch ---------------------------------------------------------------------------


def test_advice_stands_before_the_first_launch_that_uses_the_memory():
    by_hand = program(
        X, Y, FILL_X, FILL_Y, Advise("x", "preferred_location", CPU), ADD, SCALE, Synchronize(),
        HostTouch("x"),
    )  # fmt: skip
    assert with_advice(BOTH, Spot(0), "preferred_location", CPU) == by_hand
    with pytest.raises(ChangeError, match="No launch uses"):
        with_advice(program(X, FILL_X), Spot(0), "read_mostly")


def test_what_needs_peer_access_is_not_tried():
    spot = Spot(0)
    at_gpu = with_advice(BOTH, spot, "preferred_location", 1)
    with pytest.raises(ChangeError, match="needs peer access"):
        with_advice(at_gpu, spot, "accessed_by", 0)
    # Its own memory, that of another array, and the CPU's are mapped without.
    assert with_advice(at_gpu, spot, "accessed_by", 1)
    assert with_advice(at_gpu, Spot(1), "accessed_by", 0)
    assert with_advice(with_advice(BOTH, spot, "preferred_location", CPU), spot, "accessed_by", 0)


def test_each_allocation_of_a_name_gets_its_own_advice():
    step = (Allocate("t", 2 * MIB), Launch(kernel("use", "t")), Synchronize(), Free("t"))
    found = with_advice(program(*step, *step), Spot(), "read_mostly").operations
    assert found.count(Advise("t", "read_mostly")) == 2


def test_the_first_fill_of_the_host_becomes_one_of_the_gpu():
    found = with_first_touch(BOTH, Spot(0), 1).operations
    assert found == (*BOTH.operations[:2], Prefetch("x", 1), Fill("x", 1), *BOTH.operations[3:])


def test_only_fills_before_the_first_use_are_moved():
    plain = program(X, HostTouch("x", write=True, offset_bytes=MIB), SCALE, FILL_X)
    found = with_first_touch(plain, Spot(0)).operations
    assert found[1] == Prefetch("x", 0, MIB)
    fill = found[2].kernel
    assert fill.streams == (Stream(allocation="x", write=True, offset_bytes=MIB, n_bytes=3 * MIB),)
    assert fill.grid * fill.threads * 4 == 3 * MIB
    assert found[3:] == (SCALE, FILL_X)
    with pytest.raises(ChangeError, match="does not fill"):
        with_first_touch(program(X, HostTouch("x"), SCALE, FILL_X), Spot(0))


# The machine --------------------------------------------------------------------------------------


def test_a_program_that_did_not_fit_gets_all_memory():
    recipe = Recipe(BOTH, Settings(capacity_bytes=4 * MIB))
    assert fitting(recipe) == Recipe(BOTH, Settings())


def test_what_has_all_memory_already_is_refused():
    with pytest.raises(ChangeError, match="all its memory already"):
        fitting(Recipe(BOTH, Settings()))


def test_what_no_memory_of_the_gpu_can_hold_is_refused():
    vast = program(Allocate("x", 64 << 30))
    with pytest.raises(ChangeError, match=r"holds 64\.00 GiB: more than all memory .*, 39\.50 GiB"):
        fitting(Recipe(vast, Settings(capacity_bytes=4 * MIB)))


def test_tensors_get_another_allocator_in_the_same_memory():
    training = TrainingRun(steps=1, batch=2, allocator="raw")
    settings = Settings(capacity_bytes=8 * MIB)
    program, placed = Trained("resnet-8", training).made(settings)
    recipe = Recipe(program, settings, placed=placed, origin=Trained("resnet-8", training))
    found = allocating(recipe, "caching")
    by_hand, _ = Trained("resnet-8", TrainingRun(steps=1, batch=2)).made(settings)
    assert found.program == by_hand
    assert found.settings == settings
    with pytest.raises(ChangeError, match="already"):
        allocating(found, "caching")


@pytest.mark.parametrize("origin", [None, Built("stream", Size())])
def test_a_program_without_tensors_has_no_allocator(origin):
    with pytest.raises(ChangeError, match="networks of nsan only"):
        allocating(Recipe(BOTH, origin=origin), "caching")


def test_the_prefetcher_goes_off_once():
    off = without_prefetcher(Recipe(BOTH))
    assert off == Recipe(BOTH, Settings(prefetch=False))
    with pytest.raises(ChangeError, match="off already"):
        without_prefetcher(off)


# Any program --------------------------------------------------------------------------------------

CHANGES = {
    "prefetch": lambda p: with_prefetches(p, Spot()),
    "back": lambda p: with_prefetches(p, Spot(), CPU),
    "read mostly": lambda p: with_advice(p, Spot(), "read_mostly"),
    "first touch": lambda p: with_first_touch(p, Spot()),
    "no prefetch": lambda p: without_prefetches(p, Spot()),
    "the first": lambda p: with_prefetches(p, Spot(0)),
    "somewhere": lambda p: with_advice(p, Spot(va=BASE_VA + 8 * KIB, n_bytes=MIB), "read_mostly"),
}


@given(st.sampled_from(sorted(CHANGES)), programs())
def test_a_changed_program_runs_where_the_program_did(change, drawn):
    plain, settings = drawn
    try:
        run_to_end(plain, settings)
        changed = CHANGES[change](plain)
    except (ProgramError, ChangeError):
        return
    assert run_to_end(changed, settings).happened.end_ns > 0
