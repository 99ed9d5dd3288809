from __future__ import annotations

import exports as x
import pytest


@pytest.fixture
def allocations_of(trace_of):
    def read(*rows):
        return trace_of(x.Export().add(x.MEMORY, *rows)).allocations.collect()

    return read


def lives(frame):
    return frame.select("alloc_ns", "free_ns", "va").rows()


def test_a_release_is_paired_with_its_allocation(allocations_of):
    got = allocations_of(
        x.memory_event(10, x.VA, 4096),
        x.memory_event(20, x.VA + x.MIB, 8192),
        x.memory_event(30, x.VA, 4096, free=True),
        x.memory_event(40, x.VA + x.MIB, 8192, free=True),
    )
    assert lives(got) == [(10, 30, x.VA), (20, 40, x.VA + x.MIB)]
    assert got["bytes"].to_list() == [4096, 8192]
    assert got["kind"].to_list() == ["managed", "managed"]


def test_an_address_that_is_used_again_is_another_allocation(allocations_of):
    got = allocations_of(
        x.memory_event(0, x.VA, 4096),
        x.memory_event(10, x.VA, 4096, free=True),
        x.memory_event(10, x.VA, 8192),  # in the same nanosecond
        x.memory_event(20, x.VA, 8192, free=True),
        x.memory_event(30, x.VA, 65536),
    )
    assert lives(got) == [(0, 10, x.VA), (10, 20, x.VA), (30, None, x.VA)]
    assert got["bytes"].to_list() == [4096, 8192, 65536]


def test_rows_in_any_order_pair_by_time(allocations_of):
    got = allocations_of(
        x.memory_event(20, x.VA, 8192),
        x.memory_event(10, x.VA, 4096, free=True),
        x.memory_event(30, x.VA, 8192, free=True),
        x.memory_event(0, x.VA, 4096),
    )
    assert lives(got) == [(0, 10, x.VA), (20, 30, x.VA)]


def test_a_release_without_an_allocation_was_allocated_before_the_capture(allocations_of):
    got = allocations_of(
        x.memory_event(5, x.VA, 4096, free=True),
        x.memory_event(10, x.VA, 8192),
        x.memory_event(20, x.VA, 8192, free=True),
    )
    assert lives(got) == [(None, 5, x.VA), (10, 20, x.VA)]


def test_an_allocation_without_a_release_lives_on(allocations_of):
    assert lives(allocations_of(x.memory_event(5, x.VA, 4096))) == [(5, None, x.VA)]


def test_an_allocation_whose_release_was_lost_does_not_take_the_next_one(allocations_of):
    got = allocations_of(
        x.memory_event(0, x.VA, 4096),
        x.memory_event(10, x.VA, 8192),
        x.memory_event(20, x.VA, 8192, free=True),
        x.memory_event(30, x.VA, 8192, free=True),
    )
    # the second release has no allocation either
    assert lives(got) == [(None, 30, x.VA), (0, None, x.VA), (10, 20, x.VA)]


def test_one_address_in_two_processes_is_two_allocations(allocations_of):
    got = allocations_of(
        x.memory_event(0, x.VA, 4096, pid=1),
        x.memory_event(5, x.VA, 8192, pid=2),
        x.memory_event(10, x.VA, 8192, pid=2, free=True),
        x.memory_event(20, x.VA, 4096, pid=1, free=True),
    )
    assert got.select("pid", "alloc_ns", "free_ns", "bytes").rows() == [
        (1, 0, 20, 4096),
        (2, 5, 10, 8192),
    ]


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (0, "pageable"),
        (1, "pinned"),
        (2, "device"),
        (4, "managed"),
        (6, "managed_static"),
        (99, "other"),
    ],
)
def test_a_kind_of_memory_is_decided_by_its_number(allocations_of, number, kind):
    assert allocations_of(x.memory_event(0, x.VA, 1, kind=number))["kind"].to_list() == [kind]


def test_only_managed_memory_counts_as_managed(summary_of):
    got = summary_of(
        x.Export().add(
            x.MEMORY,
            x.memory_event(0, x.VA, 4096, kind=4),
            x.memory_event(1, x.VA + x.MIB, 100, kind=6, name="table"),
            x.memory_event(2, x.VA + 2 * x.MIB, 1 << 20, kind=2),
            x.memory_event(9, x.VA, 4096, kind=4, free=True),
        )
    )
    assert got["managed"] == {"n_allocations": 2, "bytes": 4196, "n_calls": 0}


def test_a_name_and_an_address_above_the_sign_bit_are_kept(allocations_of):
    got = allocations_of(x.memory_event(0, -(1 << 47), 4096, kind=6, name="weights"))
    assert got.select("va", "name").row(0) == (0xFFFF_8000_0000_0000, "weights")
