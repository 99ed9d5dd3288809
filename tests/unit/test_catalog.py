"""What holds of every analysis in the catalogue, whatever it computes."""

from __future__ import annotations

import inspect
from functools import cache
from pathlib import Path

import polars as pl
import pytest
from allocator_snapshots import random_snapshot
from polars.testing import assert_frame_equal

import nsan
from nsan.analysis import catalog as cat
from nsan.analysis.pca.join import JoinInput, join
from nsan.analysis.pca.tables import JOINED_TABLES
from nsan.analysis.result import KINDS, Result, derived
from nsan.errors import AnalysisError, UsageError
from nsan.schema import TABLES
from nsan.torch_alloc.tables import SNAPSHOT_TABLES

ROOT = Path(nsan.__file__).parent.parent
CATALOG = cat.catalog()
NAMES = list(CATALOG)
ALL_TABLES = {**TABLES, **SNAPSHOT_TABLES, **JOINED_TABLES}
SAMPLES = {
    name: ROOT / "sample_data" / "model" / name / f"{name}.sqlite"
    for name in ("oversubscribed_sweep", "ping_pong", "two_gpus", "user_prefetch")
} | {"vector_add": ROOT / "sample_data" / "um_vector_add_rtx4060l.sqlite"}

UNITS = {
    *("ns", "byte", "byte/s", "fraction", "byte address", "id", "label", "text", "flag", "number"),
}
COUNTED = {
    *("rows", "batches", "pushes", "pages", "faults", "copies", "VA blocks", "kernels", "moves"),
    *("segments", "blocks", "tensors", "entries", "parts", "pairs", "moments", "allocations"),
}


@cache
def tables(sample, cache_dir):
    """Read a sample once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NSAN_CACHE_DIR", cache_dir)
        trace = nsan.open_trace(SAMPLES[sample])
        # No program of these had a cache: each allocation counts as a tensor.
        plain = {name: getattr(trace, name) for name in TABLES}
        return {
            **{name: table.collect() for name, table in plain.items()},
            **random_snapshot(seed=2 + len(sample)),
            **join(JoinInput(plain, None, None)),
        }


@pytest.fixture(scope="module")
def of_sample(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("catalog"))
    return lambda sample: tables(sample, folder)


def of_snapshot(found):
    return found.subject == "snapshot"


def run(name, frames):
    return CATALOG[name].run({table: frame.lazy() for table, frame in frames.items()}).collect()


def rows_of(frame):
    """Rows in one order, whatever the ids are called."""
    return frame.sort(frame.columns, nulls_last=True)


@pytest.mark.parametrize("name", NAMES)
def test_an_analysis_says_what_it_answers_and_what_each_column_is(name):
    found = CATALOG[name]
    assert found.question.endswith("?")
    assert found.complexity.startswith("O(")
    assert found.source
    names = [column.name for column in found.result.columns]
    assert len(names) == len(set(names))
    for column in found.result.columns:
        assert column.doc.strip().endswith(".")
        assert column.kind in KINDS
        assert column.unit in UNITS or column.unit.isidentifier() or " " in column.unit, column


@pytest.mark.parametrize("name", NAMES)
def test_nothing_gives_nothing_of_the_same_columns(name):
    found = run(name, {table: each.empty().collect() for table, each in ALL_TABLES.items()})
    assert found.schema == CATALOG[name].result.schema
    assert found.is_empty()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_computed_before_it_is_collected(name):
    def never():
        raise AssertionError("computed too early")

    frames = {table: pl.defer(never, schema=each.schema) for table, each in ALL_TABLES.items()}
    assert isinstance(CATALOG[name].run(frames), pl.LazyFrame)


@pytest.mark.parametrize("sample", ["ping_pong", "two_gpus", "user_prefetch", "vector_add"])
@pytest.mark.parametrize("name", NAMES)
def test_only_the_declared_columns_are_read_and_their_order_of_rows_does_not_matter(
    name, sample, of_sample
):
    frames = of_sample(sample)
    mixed = {
        table: frames[table].select(columns).sample(fraction=1, shuffle=True, seed=3)
        for table, columns in CATALOG[name].reads.items()
    }
    assert_frame_equal(run(name, mixed), run(name, frames))


@pytest.mark.parametrize("name", NAMES)
def test_broken_sizes_and_places_neither_stop_an_analysis_nor_fill_the_memory(name, of_sample):
    frames = dict(of_sample("oversubscribed_sweep"))
    first = pl.int_range(pl.len()) % 500 == 3
    second = pl.int_range(pl.len()) % 500 == 7
    huge = pl.when(first).then(1 << 46).otherwise("bytes").alias("bytes")
    high = pl.when(second).then(pl.lit((1 << 64) - 4096, pl.UInt64)).otherwise("va").alias("va")
    for table in ("migrations", "allocations", "segments", "blocks", "allocator_events"):
        frames[table] = frames[table].with_columns(huge, high)
    for table in ("gpu_faults", "cpu_faults", "tensor_moves", "tensor_faults", "tensor_lives"):
        frames[table] = frames[table].with_columns(high)
    assert run(name, frames).schema == CATALOG[name].result.schema


def doubled(frames):
    """Put the same events into a second process, 7 numbers on, which uses other GPUs' names."""
    both = {}
    for table, frame in frames.items():
        if "pid" not in frame.columns:
            both[table] = frame
            continue
        changes = [(pl.col("pid") + 7).alias("pid")]
        if "range_id" in frame.columns:
            shift = (frame["range_id"].max() or 0) + 1
            changes += [pl.col("range_id") + shift, pl.col("parent") + shift]
        joined = {"tensor_id", "migration", "batch_id"} & set(frame.columns)
        changes += [pl.col(name) + 1_000_000 for name in joined]  # unique in a whole join
        both[table] = pl.concat([frame, frame.with_columns(changes)])
    return both


@pytest.mark.parametrize("sample", ["two_gpus", "vector_add"])
@pytest.mark.parametrize("name", [n for n in NAMES if "pid" in CATALOG[n].result.schema])
def test_a_second_process_changes_nothing_for_the_first(name, sample, of_sample):
    frames = of_sample(sample)
    alone, beside = run(name, frames), run(name, doubled(frames))
    pids = frames["processes"]["pid"].to_list()
    numbers = [
        column.name
        for column in CATALOG[name].result.columns
        if column.unit == "id" and column.name not in {"pid", "device_id", "va_block"}
    ]
    shares = [
        c.name
        for c in CATALOG[name].result.columns
        if c.name in {"traffic_fraction", "bytes_fraction"}
    ]
    mine = beside.filter(pl.col("pid").is_in(pids)).drop(*numbers, *shares)
    assert_frame_equal(rows_of(mine), rows_of(alone.drop(*numbers, *shares)))


@pytest.mark.parametrize(
    "name",
    [n for n in NAMES if "device_id" in CATALOG[n].result.schema and of_snapshot(CATALOG[n])],
)
def test_a_second_gpu_changes_nothing_for_the_first(name, of_sample):
    frames = {table: of_sample("vector_add")[table] for table in SNAPSHOT_TABLES}
    first = {
        table: frame.filter(pl.col("device_id") == 0) if "device_id" in frame.columns else frame
        for table, frame in frames.items()
    }
    both = run(name, frames).filter(pl.col("device_id") == 0)
    assert both.height
    assert_frame_equal(rows_of(both), rows_of(run(name, first)))


def test_each_function_of_the_catalogue_is_listed_once():
    modules = [cat.import_module(f"nsan.analysis.{name}") for name in cat.MODULES]
    listed = [found.name for module in modules for found in cat.analyses_in(module)]
    assert len(listed) == len(set(listed)) == len(CATALOG)
    folder = Path(inspect.getfile(cat)).parent
    decorated = {
        ".".join(path.relative_to(folder).with_suffix("").parts)
        for path in folder.rglob("*.py")
        if "\n@analysis(" in path.read_text("utf-8")
    }
    assert decorated == set(cat.MODULES)


def test_an_unknown_name_lists_those_that_exist():
    with pytest.raises(UsageError, match="batches"):
        cat.find("bathces")


def test_dashes_in_a_name_count_as_underscores():
    assert cat.find("faults-by-page") is CATALOG["faults_by_page"]


ONE = Result("one", "one row", (derived("n", pl.Int64, "rows", "Rows."),))


def declared(function, **more):
    says = {"question": "How many?", "result": ONE, "reads": {"migrations": ("bytes",)}, **more}
    return cat.analysis(**says)(function)


def test_a_declaration_that_does_not_fit_the_function_is_refused():
    with pytest.raises(AnalysisError, match="its parameters are"):
        declared(lambda gpu_faults: gpu_faults)
    with pytest.raises(AnalysisError, match="has no table 'faults'"):
        declared(lambda faults: faults, reads={"faults": ()})
    with pytest.raises(AnalysisError, match="no column"):
        declared(lambda migrations: migrations, reads={"migrations": ("size",)})
    with pytest.raises(AnalysisError, match="no default"):
        declared(lambda migrations, *, gap: migrations.head(gap))


def test_a_result_of_other_columns_than_promised_is_refused():
    wrong = declared(lambda migrations: migrations.select(n=pl.len().cast(pl.Int32)))
    found = wrong.__nsan_analysis__
    with pytest.raises(AnalysisError, match="'n' is Int32 instead of Int64"):
        found.run({"migrations": TABLES["migrations"].empty()})
    eager = declared(lambda migrations: migrations.select(n=pl.len()).collect())
    with pytest.raises(AnalysisError, match="not a LazyFrame"):
        eager.__nsan_analysis__.run({"migrations": TABLES["migrations"].empty()})


def test_an_option_that_does_not_exist_is_refused_by_name():
    with pytest.raises(UsageError, match="option of batches"):
        CATALOG["batches"].run({t: TABLES[t].empty() for t in TABLES}, {"gap": 1})


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("working_set", "window_ns", 0),
        ("working_set", "window_ns", -1),
        ("block_successors", "top", 0),
        ("ping_pong", "window_ns", -1),
        ("memory_ledger", "capacity_bytes", -1),
    ],
)
def test_a_number_that_makes_no_sense_is_refused(name, option, value):
    with pytest.raises(UsageError, match=f"{option}={value}"):
        CATALOG[name].run({t: TABLES[t].empty() for t in TABLES}, {option: value})


def test_an_analysis_gets_only_the_columns_that_it_declares():
    greedy = declared(lambda migrations: migrations.select(n=pl.col("va").len().cast(pl.Int64)))
    with pytest.raises(pl.exceptions.ColumnNotFoundError, match="va"):
        greedy.__nsan_analysis__.run({"migrations": TABLES["migrations"].empty()})


@pytest.mark.parametrize("name", ["pushes", "batches"])
def test_copies_that_differ_in_their_cause_alone_have_one_order(name, of_sample):
    frames = dict(of_sample("vector_add"))
    both = pl.concat(
        [frames["migrations"], frames["migrations"].with_columns(cause_id=pl.lit(2, pl.Int64))]
    )
    other = pl.concat([both.tail(both.height // 2), both.head(both.height // 2)])
    assert_frame_equal(
        run(name, frames | {"migrations": both}), run(name, frames | {"migrations": other})
    )
