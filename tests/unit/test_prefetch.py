"""The density prefetcher against its rule, worked out page by page."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsan.uvm.constants import BIG_PAGE_BYTES, PAGE_BYTES, VA_BLOCK_BYTES
from nsan.uvm.prefetch import choose_leaves, choose_leaves_of_many

LEAVES = VA_BLOCK_BYTES // BIG_PAGE_BYTES
LEAF = BIG_PAGE_BYTES // PAGE_BYTES
KIB_PER_PAGE = PAGE_BYTES // 1024


def by_the_rule(occupied, faulted, n_pages, leaf_pages, threshold):
    """Climb from every faulted page; keep the largest node that is dense enough. Sets of pages."""
    chosen = set()
    for page in faulted:
        largest = set()
        size = leaf_pages
        while size <= n_pages:
            first = page // size * size
            node = set(range(first, first + size))
            if len(node & occupied) * 100 > size * threshold:
                largest = node
            size *= 2
        chosen |= largest
    return chosen


def chosen_pages(occupied, faulted, n_pages, leaf_pages, threshold=51):
    """The same answer from the function under test."""
    n_leaves = n_pages // leaf_pages
    counts = [0] * n_leaves
    for page in occupied:
        counts[page // leaf_pages] += 1
    hit = [0] * n_leaves
    for page in faulted:
        hit[page // leaf_pages] = 1
    chosen = [7] * n_leaves
    choose_leaves(counts, hit, chosen, leaf_pages, threshold)
    assert set(chosen) <= {0, 1}
    return {page for page in range(n_pages) if chosen[page // leaf_pages]}


def widened(pages):
    """The whole leaves of some pages."""
    return {first * LEAF + i for first in {page // LEAF for page in pages} for i in range(LEAF)}


def brought(resident, *faults, threshold=51):
    """Pages that faults bring into a block of 512 pages: their leaves, and what is chosen besides."""
    occupied = resident | widened(faults)
    chosen = chosen_pages(occupied, faults, LEAVES * LEAF, LEAF, threshold)
    return (widened(faults) | chosen) - resident


def signature(threshold):
    """KiB of each group when one thread goes through a block that is resident elsewhere."""
    resident, sizes = set(), []
    for page in range(LEAVES * LEAF):
        if page not in resident:
            new = brought(resident, page, threshold=threshold)
            sizes.append(len(new) * KIB_PER_PAGE)
            resident |= new
    return sizes


@st.composite
def blocks(draw):
    """A block of 1 to 32 leaves, what is resident, and what faulted."""
    leaf_pages = draw(st.sampled_from([1, 2, 16]))
    n_pages = leaf_pages * 2 ** draw(st.integers(0, 5))
    pages = st.integers(0, n_pages - 1)
    runs = draw(st.lists(st.tuples(pages, st.integers(1, n_pages)), max_size=5))
    occupied = {page for first, n in runs for page in range(first, min(first + n, n_pages))}
    return occupied, draw(st.sets(pages, max_size=4)), n_pages, leaf_pages


@given(blocks(), st.integers(1, 100))
def test_the_leaves_chosen_are_those_of_the_largest_dense_nodes_above_a_fault(block, threshold):
    occupied, faulted, n_pages, leaf_pages = block
    expected = by_the_rule(occupied | faulted, faulted, n_pages, leaf_pages, threshold)
    assert chosen_pages(occupied | faulted, faulted, n_pages, leaf_pages, threshold) == expected


@pytest.mark.parametrize("threshold", [50, 51, 53])
def test_one_thread_brings_a_block_in_six_groups(threshold):
    assert signature(threshold) == [64, 64, 128, 256, 512, 1024]


def test_at_49_percent_half_is_enough_so_each_group_doubles_from_the_first():
    # The first leaf is half of its 128 KiB node.
    assert signature(49) == [128, 128, 256, 512, 1024]


def test_at_54_percent_17_of_32_leaves_are_too_few_for_the_block():
    # 17 of 32 leaves are 53.1 %: one leaf more (56.3 %) brings the other 14 with itself.
    assert signature(54) == [64, 64, 128, 256, 512, 64, 960]


def test_exactly_half_of_a_node_is_not_enough():
    first_leaf = set(range(16))
    assert brought(set(), 0) == first_leaf  # 16 of the 32 pages of its parent
    first_half = set(range(256))
    # Leaf 15 is the last of the first half: 256 of 512 pages.
    assert brought(first_half - widened([255]), 255) == widened([255])


@pytest.mark.parametrize(("n_occupied", "taken"), [(8, 0), (9, 16)])
def test_a_leaf_of_16_pages_needs_nine(n_occupied, taken):
    # Pages that thrash are not widened, so a leaf can be partly occupied.
    occupied = set(range(n_occupied))
    assert len(chosen_pages(occupied, {0}, 512, 16)) == taken


@pytest.mark.parametrize(("n_occupied", "taken"), [(16, 0), (17, 32)])
def test_a_node_of_32_pages_needs_17(n_occupied, taken):
    occupied = set(range(8)) | set(range(16, 16 + n_occupied - 8))
    assert len(chosen_pages(occupied, {0}, 512, 16)) == taken


def test_two_faults_in_a_block_count_together():
    # Each alone brings its leaf; both make 32 of 64 pages, half; a third makes 48 of 64.
    assert brought(set(), 0) | brought(set(), 32) == widened([0, 32])
    assert brought(set(), 0, 32) == widened([0, 32])
    assert brought(set(), 0, 16, 32) == set(range(64))
    # 17 leaves of the block in one batch bring all of it, wherever they are.
    assert brought(set(), *range(0, 17 * 16, 16)) == set(range(512))
    assert brought(set(), *range(0, 16 * 16, 16)) == set(range(256))


def test_a_dense_node_without_a_fault_stays_out():
    # The second half is full but for its last leaf; the fault lies in the first half.
    resident = set(range(256, 496))
    assert brought(resident, 0) == set(range(16))


def test_the_largest_dense_node_counts_even_where_a_smaller_one_is_sparse():
    # Leaf 1 faults: with leaf 0 absent its parent is half full, but 272 of 512 pages are 53 %.
    resident = set(range(256, 512))
    assert brought(resident, 16) == set(range(256))


def test_a_threshold_of_100_percent_chooses_nothing():
    everything = set(range(512))
    assert chosen_pages(everything, {0}, 512, 16, 100) == set()
    assert chosen_pages(everything, {0}, 512, 16, 99) == everything


def test_nothing_is_chosen_without_a_fault():
    assert chosen_pages(set(range(512)), set(), 512, 16) == set()


def test_the_block_is_the_largest_node():
    # A full block stays 32 leaves: there is no node above it, whatever its neighbour holds.
    assert brought(set(range(16, 512)), 0) == set(range(16))
    assert len(chosen_pages(set(range(512)), {0}, 512, 16)) == 512


def test_pages_of_64_kib_are_leaves_themselves():
    # POWER9: the first fault brings its page, the second its page (two of two, two of four is half),
    # the third the rest of its four.
    assert chosen_pages({0}, {0}, 32, 1) == {0}
    assert chosen_pages({0, 1}, {1}, 32, 1) == {0, 1}
    assert chosen_pages({0, 1, 2}, {2}, 32, 1) == {0, 1, 2, 3}


@st.composite
def services(draw):
    """Services of blocks of the same shape: pages and faults of each leaf, and the threshold."""
    leaves = 2 ** draw(st.integers(0, 5))
    leaf_pages = draw(st.sampled_from([1, 2, 16]))
    n = draw(st.integers(0, 8))
    pages = st.one_of(st.just(0), st.just(leaf_pages), st.integers(0, leaf_pages))
    row = st.lists(pages, min_size=leaves, max_size=leaves)
    hits = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=leaves, max_size=leaves)
    occupied = draw(st.lists(row, min_size=n, max_size=n))
    faulted = draw(st.lists(hits, min_size=n, max_size=n))
    shape = (n, leaves)
    return np.array(occupied).reshape(shape), np.array(faulted).reshape(shape), leaf_pages


@given(services(), st.integers(1, 100))
@settings(max_examples=2000 if os.environ.get("NSAN_SOAK") == "1" else 200)
def test_many_services_at_once_give_what_each_gives_alone(many, threshold):
    occupied, faulted, leaf_pages = many
    before = occupied.copy()
    found = choose_leaves_of_many(occupied, faulted.astype(bool), leaf_pages, threshold)
    assert found.shape == occupied.shape
    assert (occupied == before).all()
    for i in range(len(occupied)):
        chosen = [7] * occupied.shape[1]
        choose_leaves(occupied[i].tolist(), faulted[i].tolist(), chosen, leaf_pages, threshold)
        assert found[i].astype(int).tolist() == chosen


def test_a_narrow_type_does_not_overflow():
    # 512 pages of a block do not fit into a byte.
    full = np.full((1, LEAVES), LEAF, dtype=np.uint8)
    hit = np.zeros((1, LEAVES), dtype=bool)
    hit[0, 3] = True
    assert choose_leaves_of_many(full, hit, LEAF, 99).all()
    assert not choose_leaves_of_many(full, hit, LEAF, 100).any()
