"""Rows that came in any order are put in order bucket by bucket, and none is lost or doubled."""

from __future__ import annotations

import random

import polars as pl
import pytest

from nsan.io.store import StoreWriter
from nsan.schema import GPU_FAULTS


def frame(starts, seed=1):
    draw = random.Random(seed)
    rows = [
        {"start_ns": start, "end_ns": draw.randrange(5), "va": number, "pid": 1, "device_id": 0}
        for number, start in enumerate(starts)
    ]
    return pl.DataFrame(rows, schema=GPU_FAULTS.schema)


def written(tmp_path, parts, rows_per_part):
    """What a store holds of parts that were added in this order, file by file."""
    writer = StoreWriter(tmp_path, rows_per_part=rows_per_part)
    for number, part in enumerate(parts):
        writer.add("gpu_faults", number, part)
    described = writer.finish_tables()["gpu_faults"]
    files = [tmp_path / "gpu_faults" / part["name"] for part in described["parts"]]
    assert sorted(files) == sorted((tmp_path / "gpu_faults").iterdir()), "scratch was left"
    assert described["n_rows"] == sum(part.height for part in parts)
    return [pl.read_parquet(file) for file in files]


@pytest.mark.parametrize("rows_per_part", [1, 7, 64, 10_000])
@pytest.mark.parametrize("shape", ["shuffled", "many ties", "no start", "all equal", "far away"])
def test_rows_in_any_order_come_out_in_order(tmp_path, rows_per_part, shape):
    draw = random.Random(rows_per_part)
    starts = {
        "shuffled": draw.sample(range(300), 300),
        "many ties": [draw.randrange(4) for _ in range(300)],
        "no start": [draw.choice([None, 1, 2, 300]) for _ in range(300)],
        "all equal": [5] * 300,
        "far away": [*draw.sample(range(299), 299), 1 << 61],
    }[shape]
    whole = frame(starts)
    parts = [whole.slice(at, 20) for at in range(0, 300, 20)]
    found = written(tmp_path, parts, rows_per_part)
    keys = ["start_ns", "end_ns", "device_id", "pid", "va"]
    assert pl.concat(found).equals(whole.sort(keys, nulls_last=True))
    if shape == "shuffled" and rows_per_part < 300:
        assert len(found) > 300 // rows_per_part // 4, "it was sorted in one piece"


def test_rows_that_all_lack_a_start_are_kept(tmp_path):
    parts = [frame([None] * 5), frame([None] * 5, seed=2)]
    assert pl.concat(written(tmp_path, parts, 3)).height == 10
