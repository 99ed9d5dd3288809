from __future__ import annotations

import os
import random

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from nsan.analysis.views import addresses as module
from nsan.analysis.views.addresses import Addresses
from nsan.analysis.views.tables import RUNS

N = 200 if os.environ.get("NSAN_SOAK") == "1" else 10
BLOCK = 2 << 20
TOP = (1 << 64) - 4096


def ranges(*rows):
    schema = {"pid": pl.UInt32, "va": pl.UInt64, "bytes": pl.Int64}
    return pl.DataFrame(rows, schema=schema, orient="row")


def named(*rows):
    schema = {"pid": pl.UInt32, "va": pl.UInt64, "bytes": pl.Int64, "name": pl.String}
    return pl.DataFrame(rows, schema=schema, orient="row")


def test_unused_blocks_between_runs_are_folded_away():
    found = Addresses.build([ranges((1, 0, 4096), (1, BLOCK, 4096), (1, 9 * BLOCK + 5, 1))])
    want = pl.DataFrame(
        [(0, 2 * BLOCK, 1, 0, 2, None), (2 * BLOCK, 3 * BLOCK, 1, 9 * BLOCK, 1, None)],
        schema=RUNS.schema,
        orient="row",
    )
    assert_frame_equal(found.runs, want)
    assert found.total_bytes == 3 * BLOCK


def test_a_range_uses_every_block_that_it_touches():
    # From the last byte of block 3 to the first of block 6.
    found = Addresses.build([ranges((1, 4 * BLOCK - 1, 2 * BLOCK + 2))])
    assert found.runs.rows() == [(0, 4 * BLOCK, 1, 3 * BLOCK, 4, None)]


def test_a_short_range_that_begins_with_a_long_one_does_not_shorten_it():
    found = Addresses.build([ranges((1, 0, 1), (1, 0, 5 * BLOCK), (1, 0, 3 * BLOCK), (1, 0, 1))])
    assert found.total_bytes == 5 * BLOCK


def test_each_process_has_its_own_stretch_and_the_one_without_a_number_too():
    found = Addresses.build([ranges((2, 0, 1), (None, 0, 1), (1, 0, 1))])
    assert found.runs["pid"].to_list() == [1, 2, None]
    assert found.runs["place_start"].to_list() == [0, BLOCK, 2 * BLOCK]
    placed = found.place(ranges((None, 7, 1), (2, 7, 1), (3, 7, 1), (1, None, 1)))
    assert placed["place"].to_list() == [2 * BLOCK + 7, BLOCK + 7, None, None]


def test_addresses_in_the_upper_half_keep_every_bit():
    found = Addresses.build([ranges((1, TOP, 1 << 40), (1, 1 << 63, 4096))])
    placed = found.place(ranges((1, TOP, 1), (1, 1 << 63, 1)))
    assert placed["place"].to_list() == [2 * BLOCK - 4096, 0]
    assert found.va_at(2 * BLOCK - 4096) == (1, TOP)


def test_unknown_and_senseless_sizes_use_one_byte():
    found = Addresses.build([ranges((1, 0, None), (1, 5 * BLOCK, 0), (1, 8 * BLOCK, -7))])
    assert found.runs["n_blocks"].to_list() == [1, 1, 1]


def test_a_damaged_size_does_not_fill_the_map():
    found = Addresses.build([ranges((1, 0, 1 << 62))])
    assert found.total_bytes == module.MOST_RANGE_BYTES


def test_a_run_takes_the_name_of_the_only_named_allocation_that_begins_in_it():
    used = ranges((1, 0, 1), (1, 5 * BLOCK, 1), (1, 9 * BLOCK, 1))
    names = named(
        (1, 0, 1, "weights"), (1, 0, 1, None), (1, 5 * BLOCK, 1, "a"), (1, 5 * BLOCK + 64, 1, "b")
    )
    assert Addresses.build([used], names).runs["name"].to_list() == ["weights", None, None]


def test_outside_the_folded_space_there_is_no_address():
    found = Addresses.build([ranges((1, BLOCK, 1))])
    assert found.va_at(-1) is None
    assert found.va_at(BLOCK) is None
    assert found.va_at(BLOCK - 1) == (1, 2 * BLOCK - 1)


def test_nothing_gives_an_empty_space():
    found = Addresses.build([])
    assert_frame_equal(found.runs, pl.DataFrame(schema=RUNS.schema))
    assert found.total_bytes == 0
    assert found.place(ranges((1, 0, 1)))["place"].to_list() == [None]


@pytest.mark.parametrize("most_table", [1 << 22, 1])
def test_places_agree_with_a_walk_over_all_blocks(monkeypatch, most_table):
    monkeypatch.setattr(module, "_MOST_TABLE", most_table)
    monkeypatch.setattr(module, "AT_ONCE", 7)
    draw = random.Random(3)
    for _ in range(N):
        rows = [
            (draw.choice([1, 2, None]), draw.randrange(60 * BLOCK), draw.randrange(1, 4 * BLOCK))
            for _ in range(draw.randrange(1, 40))
        ]
        used = sorted(
            {
                (pid is None, pid or 0, block)
                for pid, va, size in rows
                for block in range(va // BLOCK, (va + size - 1) // BLOCK + 1)
            }
        )
        found = Addresses.build([ranges(*rows)])
        assert found.total_bytes == len(used) * BLOCK
        asked = [(draw.choice([1, 2, None]), draw.randrange(70 * BLOCK), 1) for _ in range(30)]
        want = []
        for pid, va, _ in asked:
            key = (pid is None, pid or 0, va // BLOCK)
            want.append(used.index(key) * BLOCK + va % BLOCK if key in used else None)
        assert found.place(ranges(*asked))["place"].to_list() == want
        for (pid, va, _), place in zip(asked, want, strict=True):
            assert place is None or found.va_at(place) == (pid, va)
