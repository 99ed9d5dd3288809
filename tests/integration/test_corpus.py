"""A corpus is read by nsan and by everybody else, and says what the reports say."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import exports as x
import fleets
import polars as pl
import pyarrow as pa
import pyarrow.dataset
import pytest

import nsan
from nsan.corpus_errors import BrokenCorpusError, NotACorpusError
from nsan.errors import UnknownNameError, UsageError
from nsan.fleet.importing import import_fleet
from nsan.schema import TABLES

GUIDE = Path(__file__).parents[2] / "docs" / "fleet.md"
NAMES = ("mon/rank0.sqlite", "mon/rank1.sqlite", "tue b=%/rank0.sqlite", "tue b=%/plain.sqlite")
RUNS = (("nights/mon", 0), ("nights/mon", 1), ("nights/tue b=%", 0), ("nights/tue b=%/plain", None))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Exports, and a corpus of them in a folder, in a store of objects, and below what looks like a partition."""
    import fsspec

    folder = tmp_path_factory.mktemp("made")
    address = f"memory://{folder.name}/fleet"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NSAN_CACHE_DIR", str(folder / "cache"))
        inputs = dict(zip(RUNS, fleets.write(folder / "nights", NAMES), strict=True))
        places = folder / "fleet[1]", address, folder / "run=7" / "fleet"
        for place in places:
            assert import_fleet([folder / "nights"], place).failures == []
    yield inputs, places
    fsspec.filesystem("memory").rm(f"/{folder.name}", recursive=True)


@pytest.fixture
def inputs(made):
    return made[0]


@pytest.fixture(params=["folder", "objects", "below a partition"])
def corpus(made, request):
    kinds = ["folder", "objects", "below a partition"]
    return nsan.open_corpus(made[1][kinds.index(request.param)])


@pytest.fixture
def corpus_folder(made, tmp_path):
    """A corpus that a test may change."""
    return Path(shutil.copytree(made[1][0], tmp_path / "fleet[1]"))


def by_sql(inputs, query):
    """Ask each export itself."""
    return {run: x.ask(path, query) for run, path in inputs.items()}


def by_report(frame, *values):
    groups = frame.group_by("run", "rank").agg(*values).collect().rows()
    return {(run, rank): rest for run, rank, *rest in groups}


def test_rows_of_all_reports_are_those_of_the_exports(corpus, inputs):
    query = f"SELECT count(*), sum(bytes), min(start) FROM {x.MEMCPY} WHERE copyKind = 11"
    expected = {run: list(rows[0]) for run, rows in by_sql(inputs, query).items()}
    figures = pl.len(), pl.col("bytes").sum(), pl.col("start_ns").min()
    assert by_report(corpus.migrations, *figures) == expected
    faults = f"SELECT sum(numberOfPageFaults) FROM {x.GPU_FAULTS}"
    expected = {run: list(rows[0]) for run, rows in by_sql(inputs, faults).items()}
    assert by_report(corpus.gpu_faults, pl.col("n_page_faults").sum()) == expected


def test_every_table_has_its_columns_behind_who_it_is_of(corpus):
    who = {"run": pl.String, "rank": pl.Int64, "source": pl.String}
    for name, table in TABLES.items():
        frame = getattr(corpus, name)
        assert frame.collect_schema() == pl.Schema({**who, **table.schema}), name
        assert frame.collect().schema == pl.Schema({**who, **table.schema}), name
    assert corpus.cpu_faults.collect().is_empty()
    assert corpus.migrations.select("source", "bytes").collect().columns == ["source", "bytes"]


def test_reports_are_listed_in_order(corpus):
    listed = corpus.reports.select("run", "rank").rows()
    assert listed == sorted(RUNS, key=lambda each: (each[0], each[1] is None))
    assert [(member.run, member.rank) for member in corpus.members] == listed
    assert corpus.reports["source"][0] == "nights/mon/rank0.sqlite"
    assert all(member.totals["counts"]["migrations"] == 3 for member in corpus.members)
    assert corpus.failures == ()
    assert "4 reports, 3 runs" in repr(corpus)


@pytest.mark.parametrize("run", [RUNS[1], RUNS[3]])
def test_a_report_of_a_corpus_is_a_trace_like_any_other(corpus, inputs, run):
    trace, own = corpus.trace(*run), nsan.open_trace(inputs[run])
    for name in TABLES:
        assert getattr(trace, name).collect().equals(getattr(own, name).collect()), name
    assert trace.info == own.info
    assert nsan.summary(trace) == nsan.summary(own)
    for analysis in ("migrations_by_cause", "refaults"):
        mine, others = (nsan.analyse(each, analysis).collect() for each in (trace, own))
        assert mine.equals(others)
    early = trace.filter(time=(0, 1_500)).migrations.collect()
    assert early.equals(own.filter(time=(0, 1_500)).migrations.collect())


def test_a_report_that_is_not_there_is_refused_with_those_that_are(corpus):
    with pytest.raises(UnknownNameError, match="mon"):
        corpus.trace("wed", 0)
    with pytest.raises(UnknownNameError, match=r"0 \(nights/mon/rank0.sqlite\)"):
        corpus.trace("nights/mon", 7)


def spoil(folder, but):
    """Make every part unreadable except those of one partition."""
    spoilt = 0
    for part in folder.rglob("*.parquet"):
        if but not in part.as_posix():
            part.write_bytes(b"\0" * part.stat().st_size)
            spoilt += 1
    assert spoilt > 5


@pytest.mark.parametrize(
    ("keep", "but", "seed"),
    [
        (pl.col("run") == "nights/tue b=%", "run=nights%2Ftue%20b%3D%25/", 2),
        ((pl.col("rank") == 1) & (pl.col("bytes") > 0), "run=nights%2Fmon/rank=1/", 1),
        (pl.col("rank").is_null(), "rank=__HIVE", 3),
        (pl.col("run").is_in(["nights/mon"]) & (pl.col("rank") < 1), "run=nights%2Fmon/rank=0/", 0),
    ],
)
def test_a_filter_opens_no_file_of_other_reports(corpus_folder, keep, but, seed):
    spoil(corpus_folder, but)
    found = nsan.open_corpus(corpus_folder).migrations.filter(keep).collect()
    assert found["bytes"].to_list() == [4096 * (seed + 1)] * 3


def test_a_filter_fetches_no_part_of_other_reports(made, monkeypatch):
    from nsan.io.corpus_place import RemotePlace

    fetched, read = [], RemotePlace.read
    monkeypatch.setattr(
        RemotePlace, "read", lambda place, names: fetched.extend(names) or read(place, names)
    )
    corpus = nsan.open_corpus(made[1][1])
    fetched.clear()
    keep = (pl.col("run") == "nights/mon") & (pl.col("bytes") > 4096) & (pl.col("rank") >= 0)
    found = corpus.migrations.filter(keep).collect()
    assert found["rank"].to_list() == [1, 1, 1]
    assert len(fetched) == 2
    fetched.clear()
    assert corpus.migrations.head(2).collect().height == 2
    assert len(fetched) == 1
    # Nothing about who it is: every part may have such rows.
    assert corpus.migrations.filter(pl.col("va").is_not_null()).collect().height == 12


# Other readers


def test_polars_reads_a_table_as_it_is(corpus_folder, inputs):
    rows = pl.scan_parquet(
        pl_folder(corpus_folder) + "/migrations/**/*.parquet",
        hive_partitioning=True,
        hive_schema={"run": pl.String, "rank": pl.Int64},
    )
    query = f"SELECT sum(bytes) FROM {x.MEMCPY} WHERE copyKind = 11"
    expected = {run: list(rows[0]) for run, rows in by_sql(inputs, query).items()}
    assert by_report(rows, pl.col("bytes").sum()) == expected


def pl_folder(folder):
    return str(folder).replace("[", "[[]")


def test_pyarrow_and_pandas_read_a_table_as_it_is(corpus_folder, inputs):
    partitions = pa.schema([("run", pa.string()), ("rank", pa.int64())])
    rows = pa.dataset.dataset(
        corpus_folder / "migrations",
        partitioning=pa.dataset.partitioning(partitions, flavor="hive"),
    )
    table = rows.to_table(filter=pa.dataset.field("run") == "nights/tue b=%").to_pandas()
    assert table["bytes"].tolist() == [3 * 4096] * 3
    assert set(table["direction"]) == {"htod"}
    everything = rows.to_table().to_pandas()
    found = everything.groupby(["run", "rank"], dropna=False)["bytes"].sum()
    assert len(found) == 4
    assert (
        found["nights/mon", 1]
        == x.ask(inputs["nights/mon", 1], f"SELECT sum(bytes) FROM {x.MEMCPY}")[0][0]
    )


def test_pandas_reads_a_table_as_the_guide_says(corpus_folder, inputs):
    import pandas as pd

    code = re.findall(r"```py\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    code = next(each for each in code if "import pandas" in each)
    code = code.replace("fleet/migrations", f"{corpus_folder}/migrations")
    names = {}
    exec(code.replace("nights/monday", "nights/mon"), names)
    rows = names["rows"]
    assert isinstance(rows, pd.DataFrame)
    found = {rank: of["bytes"].sum() for rank, of in rows.groupby("rank")}
    query = f"SELECT sum(bytes) FROM {x.MEMCPY}"
    assert found == {rank: x.ask(inputs["nights/mon", rank], query)[0][0] for rank in (0, 1)}


# What is not whole


def test_a_damaged_part_that_is_fetched_says_which(made, inputs):
    import fsspec

    address = f"{made[1][1]}-damaged"
    import_fleet([next(iter(inputs.values())).parents[1]], address)
    system = fsspec.filesystem("memory")
    name = next(n for n in system.find(address.removeprefix("memory:/")) if "/migrations/" in n)
    system.pipe_file(name, bytes(system.size(name)))
    with pytest.raises(BrokenCorpusError, match=r"migrations/run=.*is damaged(.|\n)*nsan import"):
        nsan.open_corpus(address).migrations.collect()


def test_parts_that_no_report_lists_are_not_read(corpus_folder):
    part = next((corpus_folder / "migrations" / "run=nights%2Fmon" / "rank=1").glob("*.parquet"))
    part.with_name("aaaaaaaaaaaa-00000000-00000.parquet").write_bytes(part.read_bytes())
    assert nsan.open_corpus(corpus_folder).migrations.collect().height == 12


def test_a_corpus_that_lacks_a_part_says_which_and_what_helps(corpus_folder):
    next((corpus_folder / "kernels").rglob("*.parquet")).unlink()
    with pytest.raises(
        BrokenCorpusError, match=r"kernels/run=.* is missing or cut short(.|\n)*nsan import"
    ):
        nsan.open_corpus(corpus_folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"store_format": 4}', '{"store_format": 999}'])
def test_a_corpus_with_a_document_that_cannot_be_used_says_so(corpus_folder, text):
    (corpus_folder / "reports" / "zzz.json").write_text(text)
    with pytest.raises(BrokenCorpusError, match=r"reports/zzz\.json"):
        nsan.open_corpus(corpus_folder)


def test_a_place_without_a_corpus_is_refused(tmp_path):
    for place in (tmp_path, tmp_path / "nowhere", "memory://nowhere/at/all"):
        with pytest.raises(NotACorpusError, match="nsan import FOLDER -o"):
            nsan.open_corpus(place)


def test_a_corpus_of_a_later_nsan_is_refused(corpus_folder):
    (corpus_folder / "corpus.json").write_text(json.dumps({"corpus_format": 2}))
    with pytest.raises(BrokenCorpusError, match="another version"):
        nsan.open_corpus(corpus_folder)


def test_reports_of_one_run_and_rank_are_told_apart_by_their_source(tmp_path):
    # The run is text, though it looks like a number.
    fleets.write(tmp_path / "n", ["017/rank0.sqlite", "017/node1/rank0.sqlite"])
    import_fleet([tmp_path / "n"], tmp_path / "fleet")
    corpus = nsan.open_corpus(tmp_path / "fleet")
    sums = corpus.migrations.group_by("run", "rank", "source").agg(pl.col("bytes").sum())
    assert sorted(sums.collect().rows()) == [
        ("n/017", 0, "n/017/node1/rank0.sqlite", 3 * 2 * 4096),
        ("n/017", 0, "n/017/rank0.sqlite", 3 * 4096),
    ]
    with pytest.raises(UsageError, match="2 reports of rank 0: give source="):
        corpus.trace("n/017", 0)
    one = corpus.trace("n/017", 0, source="n/017/rank0.sqlite")
    assert one.migrations.collect()["bytes"].to_list() == [4096] * 3
