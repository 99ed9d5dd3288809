from __future__ import annotations

import polars as pl
import pytest

from nsan.errors import SchemaMismatchError
from nsan.schema import CPU_FAULTS, GPU_FAULTS, MIGRATIONS, TABLES
from nsan.uvm import constants as uvm

COLUMNS = [(table, column) for table in TABLES.values() for column in table.columns]


@pytest.mark.parametrize("table", TABLES.values(), ids=list(TABLES))
def test_an_empty_frame_is_its_own_table(table):
    empty = table.empty()
    assert table.validate(empty) is empty
    assert empty.collect().height == 0
    assert list(empty.collect_schema()) == [column.name for column in table.columns]


@pytest.mark.parametrize(
    "column", [column for _, column in COLUMNS], ids=[f"{t.name}.{c.name}" for t, c in COLUMNS]
)
def test_a_column_says_its_unit_and_its_meaning(column):
    assert column.unit.strip()
    assert column.doc.strip().endswith(".")
    assert column.name == column.name.lower()
    suffixes = {"_ns": "ns", "_bytes": "byte", "_bytes_per_s": "byte/s"}
    for suffix, unit in suffixes.items():
        if column.name.endswith(suffix):
            assert column.unit == unit
    if column.name.endswith("_ns"):
        assert column.dtype == pl.Int64
    if column.name in {"va", "pc"}:
        assert (column.dtype, column.unit) == (pl.UInt64, "byte address")


@pytest.mark.parametrize("table", TABLES.values(), ids=list(TABLES))
def test_a_table_says_what_a_row_is_and_names_no_column_twice(table):
    assert table.row.startswith("one ")
    names = [column.name for column in table.columns]
    assert len(names) == len(set(names))


def test_a_missing_column_is_named():
    with pytest.raises(SchemaMismatchError, match="no column 'va'") as caught:
        GPU_FAULTS.validate(GPU_FAULTS.empty().drop("va"))
    assert caught.value.table == "gpu_faults"
    assert len(caught.value.problems) == 1


def test_a_column_of_another_type_is_named_with_both_types():
    with pytest.raises(SchemaMismatchError, match="'va' is Int64 instead of UInt64"):
        CPU_FAULTS.validate(CPU_FAULTS.empty().with_columns(pl.col("va").cast(pl.Int64)))


def test_an_unexpected_column_is_named():
    with pytest.raises(SchemaMismatchError, match="unexpected column 'size'"):
        MIGRATIONS.validate(MIGRATIONS.empty().with_columns(size=pl.lit(1)))


def test_every_wrong_column_is_named_at_once():
    wrong = MIGRATIONS.empty().drop("pid").with_columns(bytes=pl.lit(0.5), extra=pl.lit(1))
    with pytest.raises(SchemaMismatchError) as caught:
        MIGRATIONS.validate(wrong)
    text = str(caught.value)
    assert all(name in text for name in ("'pid'", "'bytes'", "'extra'", "migrations"))
    assert len(caught.value.problems) == 3


def test_an_all_null_column_is_not_taken_for_a_typed_one():
    with pytest.raises(SchemaMismatchError, match="'va' is Null"):
        GPU_FAULTS.validate(GPU_FAULTS.empty().with_columns(va=pl.lit(None)))


def test_labels_hold_the_numbers_of_the_driver_and_other():
    assert [uvm.CAUSES[n] for n in range(6)] == [
        "unknown",
        "user",
        "coherence",
        "prefetch",
        "eviction",
        "access_counters",
    ]
    assert [uvm.ACCESSES[n] for n in range(5)] == ["unknown", "read", "write", "atomic", "prefetch"]
    assert uvm.DIRECTIONS == {11: "htod", 12: "dtoh", 13: "dtod"}
    assert "other" in MIGRATIONS.schema["cause"].categories
    assert "other" in GPU_FAULTS.schema["access"].categories
