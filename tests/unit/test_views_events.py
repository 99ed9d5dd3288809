from __future__ import annotations

import os
import random
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

import nsan
from nsan.analysis.driver.batches import batches, with_batch_id
from nsan.analysis.views.events import view_events
from nsan.analysis.views.tables import LAYERS, OWNERS, RECORDED, SELECTED
from nsan.schema import TABLES

N = 200 if os.environ.get("NSAN_SOAK") == "1" else 10
ROOT = Path(__file__).parents[2]
BLOCK = 2 << 20
MODELLED = ("oversubscribed_sweep", "two_gpus", "ping_pong")


def table(name, *rows):
    """Rows of a table of a trace, as dicts; what is not said is null."""
    return pl.LazyFrame(
        [{column: row.get(column) for column in TABLES[name].schema} for row in rows],
        schema=TABLES[name].schema,
    )


def copy(start, va, size=4096, *, cause="coherence", direction="htod", **more):
    known = {"start_ns": start, "end_ns": start + 10, "pid": 1, "device_id": 0, "va": va}
    return {**known, "bytes": size, "cause": cause, "direction": direction, **more}


def fault(start, end, va=0, n=1, access="read", **more):
    known = {"start_ns": start, "end_ns": end, "pid": 1, "device_id": 0, "va": va}
    return {**known, "n_page_faults": n, "access": access, **more}


def events(**tables):
    return view_events({name: table(name, *rows) for name, rows in tables.items()})


def of(path):
    trace = nsan.open_trace(ROOT / path)
    return trace, view_events({name: getattr(trace, name) for name in TABLES})


@pytest.mark.parametrize(
    "path",
    [
        *(f"sample_data/model/{name}/{name}.sqlite" for name in MODELLED),
        "sample_data/um_vector_add_rtx4060l.sqlite",
        "sample_data/nvprof_hotspot_v100_8192.log.gz",
    ],
)
def test_every_row_comes_back_as_it_was_recorded(path):
    trace, found = of(path)
    frame = found.frame
    total = 0
    for name in ("migrations", "gpu_faults", "cpu_faults"):
        mine = frame.filter(pl.col("table") == name)
        raw = getattr(trace, name).collect()
        # The access of a copy is derived; that of a fault row is recorded.
        same = [c for c in SELECTED.schema if c in raw.columns]
        assert_frame_equal(mine.select(same).sort(same), raw.select(same).sort(same))
        total += raw.height
    assert found.n_rows == total
    assert frame["start_ns"].is_sorted()


@pytest.mark.parametrize("name", MODELLED)
def test_the_access_of_a_copy_is_that_of_its_batch(name):
    trace, found = of(f"sample_data/model/{name}/{name}.sqlite")
    known = with_batch_id(trace.gpu_faults, trace.migrations).collect()
    access = batches(trace.gpu_faults, trace.migrations).collect().select("batch_id", "access")
    keys = ["start_ns", "end_ns", "pid", "device_id", "va", "bytes", "direction"]
    asked = pl.col("cause_id").is_in([2, 3]) & (pl.col("direction") != "dtoh")
    want = known.filter(asked).join(access, on="batch_id").select(*keys, "access")
    assert want.height > 50
    mine = found.frame.filter(pl.col("table") == "migrations", pl.col("access").is_not_null())
    assert_frame_equal(mine.select(*keys, "access").sort(keys), want.sort(keys))


def test_a_copy_takes_the_access_of_the_row_that_ends_next_if_it_lies_inside():
    found = events(
        gpu_faults=[fault(0, 100, access="read"), fault(90, 200, access="write")],
        migrations=[
            copy(100, 0),  # starts with the end of the first row: reaches out of it
            copy(50, 0),
            copy(101, 0),
            copy(195, 0),  # reaches out of the last row
            copy(300, 0),  # after the last row
            copy(120, 0, cause="eviction", direction="dtoh"),
            copy(121, 0, direction="dtoh"),  # a CPU fault
            copy(122, 0, cause="user"),
            copy(123, 0, end_ns=None),
            copy(124, 0, device_id=1),
        ],
    )
    frame = found.frame.filter(pl.col("table") == "migrations")
    got = dict(frame.select("start_ns", "access").rows())
    assert got == dict.fromkeys([100, 195, 300, 120, 121, 122, 123, 124]) | {
        50: "read",
        101: "write",
    }


def test_rows_that_end_together_agree_on_an_access_or_have_none():
    found = events(
        gpu_faults=[
            fault(0, 100, access="read"),
            fault(5, 100, access="read"),
            fault(100, 200, access="read"),
            fault(110, 200, access="write"),
        ],
        migrations=[copy(3, 0), copy(150, 0)],
    )
    frame = found.frame.filter(pl.col("table") == "migrations")
    assert frame["access"].to_list() == ["read", None]


def test_without_fault_rows_the_access_of_copies_is_not_known():
    found = events(migrations=[copy(0, 0)])
    assert found.frame["access"].to_list() == [None]


def test_layers_and_owners_say_what_the_numbers_mean():
    found = events(
        migrations=[copy(0, 0), copy(1, 0, device_id=1), copy(2, 0, cause=None, direction=None)],
        cpu_faults=[{"start_ns": 5, "pid": 1, "va": 0}, {"start_ns": 6, "pid": None, "va": 0}],
    )
    assert found.layers.schema == LAYERS.schema
    assert found.owners.schema == OWNERS.schema
    assert found.layers.rows() == [
        (0, "migrations", "htod", "coherence", None),
        (1, "migrations", None, None, None),
        (2, "cpu_faults", None, None, None),
    ]
    assert found.owners.rows() == [(0, 1, 0), (1, 1, 1), (2, 1, None), (3, None, None)]
    assert found.frame["layer"].to_list() == [0, 0, 1, 2, 2]
    assert found.frame["owner"].to_list() == [0, 1, 0, 2, 3]


def test_rows_without_a_start_are_told_and_left_out():
    found = events(migrations=[copy(5, 0), copy(0, 0, start_ns=None)])
    assert found.n_rows == 1
    assert found.n_without_start == 1


def test_rows_without_an_address_stay_but_have_no_place():
    found = events(migrations=[copy(0, None), copy(1, BLOCK)])
    assert found.frame["place"].to_list() == [None, 0]
    assert found.frame["va"].to_list() == [None, BLOCK]


def test_odd_values_come_back_exactly():
    rows = [
        copy(0, (1 << 64) - 4096, None),
        copy(1, (1 << 63) + 1, 1 << 40, end_ns=1 << 50),
        copy(2, 3, 0, end_ns=-5),
        copy(3, None, None, end_ns=None, pid=None, device_id=None, cause=None, direction=None),
    ]
    raw = table("migrations", *rows)
    found = view_events({"migrations": raw})
    same = [c for c in SELECTED.schema if c in TABLES["migrations"].schema]
    assert_frame_equal(found.frame.select(same), raw.select(same).collect())


def test_a_capture_without_rows_gives_empty_tables():
    found = view_events({})
    assert found.n_rows == 0
    assert found.extent == (0, 1)
    assert_frame_equal(found.frame, pl.DataFrame(schema=RECORDED.schema))
    assert found.kept(owners=[0], layers=[]).n_rows == 0


def test_managed_allocations_count_as_used_memory():
    allocation = {"pid": 1, "va": 0, "bytes": 4 * BLOCK, "kind": "managed", "name": "w"}
    found = events(
        migrations=[copy(0, 2 * BLOCK)],
        allocations=[allocation, {**allocation, "va": 50 * BLOCK, "kind": "device"}],
    )
    assert found.addresses.total_bytes == 4 * BLOCK
    assert found.addresses.runs["name"].to_list() == ["w"]


def random_events(draw):
    return events(
        migrations=[
            copy(
                draw.randrange(200),
                draw.choice([None, draw.randrange(20) * BLOCK + 4096 * draw.randrange(512)]),
                4096,
                cause=draw.choice(["coherence", "user", None]),
                device_id=draw.randrange(3),
            )
            for _ in range(60)
        ],
        cpu_faults=[
            {"start_ns": draw.randrange(200), "pid": 1, "va": draw.randrange(20) * BLOCK}
            for _ in range(20)
        ],
    )


def test_filters_keep_what_plain_loops_keep():
    draw = random.Random(1)
    for _ in range(N):
        found = random_events(draw)
        times = [sorted(draw.sample(range(210), 2)) for _ in range(draw.randrange(4))]
        total = found.addresses.total_bytes
        spans = [
            (
                *sorted(draw.sample(range(total + 5), 2)),
                *(draw.choice([None, draw.randrange(200)]) for _ in range(2)),
            )
            for _ in range(draw.randrange(6))
        ]
        windows = pl.DataFrame(times, schema=["start_ns", "end_ns"], orient="row")
        schema = dict.fromkeys(["place_start", "place_end", "alloc_ns", "free_ns"], pl.Int64)
        places = pl.DataFrame(spans, schema=schema, orient="row")
        owners = draw.sample(range(4), 2)
        layers = draw.sample(range(found.layers.height), 2)
        got = found.kept(owners=owners, layers=layers, windows=windows, places=places)
        want = [
            row
            for row in found.frame.rows(named=True)
            if row["owner"] in owners
            and row["layer"] in layers
            and any(low <= row["start_ns"] < high for low, high in times)
            and row["place"] is not None
            and any(
                low <= row["place"] < high
                and (born is None or born <= row["start_ns"])
                and (died is None or row["start_ns"] < died)
                for low, high, born, died in spans
            )
        ]
        assert got.frame.rows(named=True) == want
        assert got.extent == found.extent
        assert got.addresses is found.addresses


def test_lives_that_lie_in_each_other_are_one():
    found = events(migrations=[copy(start, 0) for start in range(10)])
    lives = [(0, BLOCK, 0, 9), (0, BLOCK, 2, 4), (0, BLOCK, 3, 7)]
    columns = ["place_start", "place_end", "alloc_ns", "free_ns"]
    kept = found.kept(places=pl.DataFrame(lives, schema=columns, orient="row"))
    assert kept.frame["start_ns"].to_list() == [*range(9)]


def test_no_filter_keeps_all_and_an_empty_one_nothing():
    found = random_events(random.Random(2))
    assert_frame_equal(found.kept().frame, found.frame)
    assert found.kept(layers=[]).n_rows == 0
    assert found.kept(windows=pl.DataFrame(schema=["start_ns", "end_ns"])).n_rows == 0
    everywhere = pl.DataFrame({"place_start": [0], "place_end": [1 << 60]})
    with_place = found.frame.filter(pl.col("place").is_not_null())
    assert_frame_equal(found.kept(places=everywhere).frame, with_place)


def test_a_row_takes_about_twenty_byte():
    _, found = of("sample_data/model/oversubscribed_sweep/oversubscribed_sweep.sqlite")
    assert found.n_bytes < 23 * found.n_rows
