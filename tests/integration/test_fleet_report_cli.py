"""`nsan report` of many reports: one file for the fleet, and its sections one by one."""

from __future__ import annotations

import json
import re

import exports as x
import pytest
from fleet_members import MS, failure, group, member, moving, run_of

pytest.importorskip("papermill", reason="pip install 'nsan[report]'")

from nsan.cli import main
from nsan.errors import NsanError
from nsan.fleet.document import fleet_document
from nsan.report.blocks import Heading, Picture, Points, Table, Text
from nsan.report.fleet import FleetReport, fleet_at

SECTIONS = ("head", "standing_out", "um_time", "runs", "causes", "ranks", "failed", "provenance")
MOST_MARKS = 5000


@pytest.fixture(scope="module")
def nights(tmp_path_factory):
    """Two nights of four ranks and one damaged report, in a folder with a hostile name."""
    folder = tmp_path_factory.mktemp("made") / "n<img src=x onerror=alert(1)>"
    for night in ("night1", "night2"):
        (folder / night).mkdir(parents=True)
        for rank in range(4):
            busy = 90 if (night, rank) == ("night2", 2) else 10
            export = x.Export().add(x.MEMCPY, x.migration(0, busy * MS, x.MIB * busy))
            export.add(x.KERNEL, x.kernel(0, 100 * MS)).write(folder / night / f"rank{rank}.sqlite")
    (folder / "night1" / "rank4.sqlite").write_bytes(b"SQLite format 3\0" + bytes(5000))
    return folder


def report_of(members, failures=(), **options):
    return FleetReport(fleet_document(members, failures, name="nights"), **options)


def words(blocks):
    said = [block.text for block in blocks if isinstance(block, Text | Heading)]
    said += [point.text for block in blocks if isinstance(block, Points) for point in block.points]
    return "\n".join(said)


def of_type(blocks, kind):
    return [block for block in blocks if isinstance(block, kind)]


def marks(picture):
    return sum(len(rows) for rows in picture.spec["datasets"].values())


# The command ---------------------------------------------------------------------------------------


def test_a_folder_of_reports_becomes_one_page(nights, tmp_path, monkeypatch, capsys):
    """It is complete and small, names what stands out and what failed, and holds no path of this machine."""
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(nights), "-o", "fleet.html"]) == 1
    said = capsys.readouterr()
    assert said.out == "fleet.html\n"
    assert "night1/rank4.sqlite" in said.err
    page = (tmp_path / "fleet.html").read_text()
    assert len(page.encode()) < 3_000_000
    outlier = r"rank 2 of n.{0,60}/night2: UM at work for 90\.000 ms, 9 times the median of 4 ranks"
    assert re.search(outlier, page)
    assert re.search(r"night1/rank4\.sqlite: .*damaged", page)
    assert page.count("<figure") == 3
    assert str(nights.parent) not in page
    assert "<img src=x" not in page
    assert not re.search(r"(src|href)=\"(?!data:|#)", page)


def test_what_goes_with_one_trace_only_is_refused(nights, capsys):
    for option in (["--snapshot", str(nights / "night1" / "rank0.sqlite")], ["--gpu", "0"]):
        assert main(["report", str(nights), *option, "-o", "/dev/null/x.html"]) == 2
        assert "one" in capsys.readouterr().err
    one = str(nights / "night1" / "rank0.sqlite")
    assert main(["report", one, "--workers", "2", "-o", "a.html"]) == 2
    assert "--workers is for several reports" in capsys.readouterr().err


def test_a_notebook_for_one_trace_takes_one(nights, capsys):
    paths = [str(nights / "night1" / f"rank{rank}.sqlite") for rank in range(2)]
    assert main(["report", *paths, "--notebook", "report", "-o", "a.html"]) == 2
    assert "takes one trace" in capsys.readouterr().err


def test_a_parameter_that_an_option_sets_is_refused(nights, capsys):
    for value in ("TRACES=[]", "SUMMARY=x"):
        assert main(["report", str(nights), "-p", value, "-o", "a.html"]) == 2
        assert f"the parameter {value.partition('=')[0]} is set by" in capsys.readouterr().err


# The sections --------------------------------------------------------------------------------------


def test_every_section_says_something_of_a_fleet_that_has_it_all():
    members = [*run_of([10, 11, 12, 13, 14, 300], run="a"), *run_of([10, 11], run="b")]
    report = report_of(members, [failure()])
    for name in SECTIONS:
        blocks = getattr(report, name)()
        assert blocks
        assert not [each for each in of_type(blocks, Text) if each.tone == "empty"], name


def test_what_says_nothing_is_marked_so_that_the_page_leaves_it_out():
    report = report_of([member(off=("migrations", "gpu_faults"))])
    empty = {
        name
        for name in SECTIONS
        if [getattr(each, "tone", "") for each in getattr(report, name)()] == ["empty"]
    }
    assert empty == {"standing_out", "runs", "causes", "failed"}
    assert "neither migrations nor GPU faults were recorded" in words(report.um_time())


def test_no_report_at_all_is_said_and_breaks_no_section():
    report = report_of([], [failure()])
    for name in SECTIONS:
        assert getattr(report, name)()
    assert "No report could be read." in words(report.head())


def test_bars_show_the_times_of_the_ranks_and_who_stands_out():
    (picture,) = of_type(report_of(run_of([10, 11, 12, 13, 14, 300])).um_time(), Picture)
    (rows,) = picture.spec["datasets"].values()
    assert [row["value"] for row in rows] == [10, 11, 12, 13, 14, 300]
    assert [row["side"] for row in rows] == ["like the others"] * 5 + ["stands out: more"]


def test_a_chart_of_runs_has_them_in_the_order_of_their_start_with_least_median_and_largest():
    members = [
        member(f"n{day}", rank, groups=moving(10 * day + rank), start=day * 86_400 * 10**9)
        for day in (2, 1)
        for rank in range(3)
    ]
    (picture,) = of_type(report_of(members).runs(), Picture)
    (rows,) = picture.spec["datasets"].values()
    found = [(row["run"], row["min"], row["median"], row["max"]) for row in rows]
    assert found == [("n1", 10, 11, 12), ("n2", 20, 21, 22)]


def test_causes_are_those_of_the_ranks_that_moved_most():
    few = [group("htod", "user", 1 << 20, 1), group("dtoh", "eviction", 3 << 20, 1)]
    many = [group("htod", "coherence", 8 << 20, 1)]
    report = report_of([member(rank=0, groups=few), member(rank=1, groups=many)])
    (picture,) = of_type(report.causes(), Picture)
    (rows,) = picture.spec["datasets"].values()
    assert [(row["label"], row["cause"], row["size"]) for row in rows] == [
        ("rank 1 of night", "page fault", 8),
        ("rank 0 of night", "user prefetch", 1),
        ("rank 0 of night", "eviction", 3),
    ]


@pytest.mark.parametrize(("runs", "ranks"), [(1, 1000), (1000, 1), (40, 25)])
def test_a_thousand_reports_stay_a_small_page(runs, ranks):
    members = [
        each
        for run in range(runs)
        for each in run_of([100 + rank % 9 for rank in range(ranks)], run=f"run{run}")
    ]
    report, size = report_of(members), 0
    for name in SECTIONS:
        blocks = getattr(report, name)()
        for picture in of_type(blocks, Picture):
            assert 0 < marks(picture) <= MOST_MARKS
            size += len(picture.svg) + len(json.dumps(picture.spec))
        assert sum(len(table.rows) for table in of_type(blocks, Table)) < 200
    assert size < 2_000_000


def test_the_theme_is_that_of_every_chart():
    members = [*run_of([10, 11], run="a"), *run_of([10, 11], run="b")]
    report = report_of(members, theme="dark")
    pictures = [
        each
        for name in ("um_time", "runs", "causes")
        for each in of_type(getattr(report, name)(), Picture)
    ]
    assert {each.spec["config"]["background"] for each in pictures} == {"#16181d"}
    assert len(pictures) == 3


# Where it is from ----------------------------------------------------------------------------------


def test_a_summary_that_was_written_is_the_same_as_reading_again(nights, tmp_path):
    whole = fleet_at([nights])
    place = tmp_path / "fleet.json"
    place.write_text(json.dumps(whole))
    assert fleet_at(["nowhere"], summary=str(place)) == whole
    assert (whole["n_reports"], whole["n_failed"]) == (8, 1)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"document": "other"}', "\udcff"])
def test_a_file_that_holds_no_summary_of_a_fleet_is_refused(text, tmp_path):
    place = tmp_path / "a.json"
    place.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(NsanError, match="no summary of a fleet"):
        fleet_at([], summary=str(place))
