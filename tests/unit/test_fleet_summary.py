"""What is said of many reports: their document and its text, of members with figures of one's own."""

from __future__ import annotations

import json

import pytest
from fleet_members import MIB, MS, failure, group, member, moving, run_of

from nsan.contract_fleet import FLEET_KEYS
from nsan.contract_keys import keys_in
from nsan.fleet.document import fleet_document, fleet_name
from nsan.fleet.tables import rank_rows, utc
from nsan.fleet.text import fleet_text, outlier_lines, straggler_lines

EVIL = "</script><img src=x onerror=alert(1)>|`x`\x1b[31m\u202e\n# h"


def total(document, figure):
    (row,) = [row for row in document["totals"] if row["figure"] == figure]
    return row


def outlier_text(*members):
    return [each["text"] for each in fleet_document(members)["outliers"]]


# The document --------------------------------------------------------------------------------------


def test_the_document_has_the_keys_that_are_documented_and_no_others():
    evicting = [group("dtoh", "eviction", 900 * MIB, 500 * MS)]
    documents = [
        fleet_document([]),
        fleet_document(run_of([100, 101, 102, 103, 104, 105]), [failure()], name="x"),
        fleet_document([*run_of([0] * 5), member(rank=6, groups=evicting, start=5)]),
        fleet_document([member(rank=None, off=("migrations", "gpu_faults", "allocations"))] * 2),
        fleet_document(
            [m for n in range(8) for m in run_of([99, 100 + 200 * (n == 7)], run=f"{n}")]
        ),
        fleet_document([*run_of([9]), member("two", 1, program=None, duration_ns=None, gpu=None)]),
        fleet_document(
            [member(groups=[group(None, None, None, 0) | {"n": None, "busy_ns": None}], busy_ns=9)]
        ),
    ]
    known = {key.path: key for key in FLEET_KEYS}
    assert len(known) == len(FLEET_KEYS)
    found = {pair for each in json.loads(json.dumps(documents)) for pair in keys_in(each)}
    assert {path for path, _ in found} == set(known)
    for path, kind in found:
        key = known[path]
        whole = key.type == "number" and kind == "integer"
        assert key.null if kind is None else kind == key.type or whole, (path, kind)


def test_sums_are_those_of_the_reports_and_unknown_where_one_lacks_the_figure():
    members = [*run_of([10, 20, 40]), member(rank=3, off=("migrations",))]
    row = total(fleet_document(members), "migrations_busy_ns")
    assert (row["sum"], row["known_sum"], row["n_known"], row["n_reports"]) == (None, 70 * MS, 3, 4)
    assert (row["min"], row["median"], row["max"]) == (10 * MS, 20 * MS, 40 * MS)
    whole = total(fleet_document(members[:3]), "migrations_busy_ns")
    assert whole["sum"] == 70 * MS


def test_a_sum_may_be_larger_than_any_one_report_could_be():
    huge = moving(1, n_bytes=2**62)
    document = fleet_document([member(rank=rank, groups=huge) for rank in range(4)])
    assert total(document, "bytes")["sum"] == 2**64
    assert document["migrations"][0]["bytes"] == 2**64


def test_migrations_of_all_reports_are_by_direction_and_cause():
    a = [group("htod", "user", 3, 1, n=2), group("dtoh", "eviction", 9, 2)]
    b = [group("htod", "user", 4, 5), group("htod", "user", 1, 1, pid=8)]
    document = fleet_document([member(groups=a), member(rank=1, groups=b)])
    assert document["migrations"] == [
        {
            "direction": "dtoh",
            "cause": "eviction",
            "n_reports": 1,
            "n": 1,
            "bytes": 9,
            "busy_ns": 2,
        },
        {"direction": "htod", "cause": "user", "n_reports": 2, "n": 4, "bytes": 8, "busy_ns": 7},
    ]


def test_a_run_counts_its_reports_failures_and_outliers_and_begins_with_the_first():
    members = [
        member("a", rank, groups=moving(busy), start=start)
        for rank, (busy, start) in enumerate(zip([100] * 6 + [500], range(70, 0, -10), strict=True))
    ]
    document = fleet_document(members, [failure(run="a"), failure(run="gone", rank=None)])
    run, gone = document["runs"]
    assert (run["n_reports"], run["n_failed"], run["n_outliers"]) == (7, 1, 1)
    assert run["started_utc_ns"] == 10
    assert (gone["run"], gone["n_reports"], gone["n_failed"], gone["figures"]) == ("gone", 0, 1, {})
    assert (document["n_runs"], document["n_reports"], document["n_failed"]) == (2, 7, 2)


def test_a_modelled_report_began_at_no_time_of_day():
    (run,) = fleet_document([member(kind="nsan-model", start=0)])["runs"]
    assert run["started_utc_ns"] is None


# Why -----------------------------------------------------------------------------------------------


def test_an_outlier_says_which_figure_how_far_and_which_cause_brought_most_of_it():
    usual = [
        member(rank=rank, groups=[group("htod", "coherence", 100 * MIB, (100 + rank) * MS)])
        for rank in range(7)
    ]
    more = [
        group("htod", "coherence", 120 * MIB, 120 * MS),
        group("dtoh", "eviction", 300 * MIB, 230 * MS),
    ]
    (text,) = outlier_text(*usual, member(rank=7, groups=more))
    # Median of 100 to 106 and 350 ms: 103.5 ms; MAD 2 ms; 246.5 / 2 = 123 MADs.
    assert text == (
        "rank 7 of night: UM at work for 350.000 ms, 3.38 times the median of 8 ranks (103.500 ms), 123 MADs "
        "above: it moved 420.00 MiB where 100.00 MiB are usual, 300.00 MiB more by eviction; it alone was short of GPU "
        "memory."
    )


def test_an_outlier_that_moved_as_much_moved_it_more_slowly():
    (text,) = outlier_text(*run_of([100, 101, 102, 103, 104, 105, 106, 1000]))
    # 1 MiB in 1 s; the median rank takes 103.5 ms.
    assert (
        "it moved about as much as others (1.00 MiB), but slower: 1.05 MB/s where 10.13 MB/s are"
        in text
    )


def test_an_outlier_with_more_fault_rows_or_another_gpu_says_so():
    usual = [member(rank=r, faults_ns=(100 + r) * MS, fault_rows=10) for r in range(7)]
    odd = member(rank=7, faults_ns=900 * MS, fault_rows=1300, gpu="GPU Y")
    (text,) = outlier_text(*usual, odd)
    assert "UM at work for 900.000 ms" in text
    assert "1 300 rows of GPU faults where 10 are usual" in text
    assert "its GPU is GPU Y, GPU X is usual" in text


def test_an_outlier_with_more_managed_memory_than_its_gpu_has_room_for_says_so():
    few = [group("dtoh", "eviction", 10 * MIB, 10 * MS)]
    many = [group("dtoh", "eviction", 11 * MIB, 500 * MS)]
    usual = [member(rank=r, groups=few) for r in range(7)]
    (text,) = outlier_text(*usual, member(rank=7, groups=many, managed_bytes=1500 * MIB))
    assert (
        "GPU memory is shorter (managed memory is 1.50 of that of its GPUs, 0.50 is usual)" in text
    )


def test_an_outlier_of_which_nothing_else_differs_admits_it():
    usual = [member(rank=r, faults_ns=100 * MS, fault_rows=10) for r in range(7)]
    (text,) = outlier_text(*usual, member(rank=7, faults_ns=900 * MS, fault_rows=10))
    assert text.endswith("no figure of its totals tells why.")


def test_a_rank_that_was_recorded_for_less_time_says_so():
    usual = [member(rank=r, groups=moving(100)) for r in range(7)]
    odd = member(rank=7, groups=moving(10, n_bytes=MIB // 10), duration_ns=100 * MS)
    (text,) = outlier_text(*usual, odd)
    assert "it was recorded for 100.000 ms only, 1.000 s are usual" in text


def test_who_takes_longest_is_said_with_its_um_time_and_without_times_of_day():
    members = [
        member(rank=r, groups=moving(busy), duration_ns=took * MS)
        for r, (busy, took) in enumerate([(100, 1000), (110, 1010), (500, 1600)])
    ]
    (row,) = fleet_document(members)["stragglers"]
    assert row["text"] == (
        "rank 2 of night took longest: 1.600 s, 590.000 ms beyond the median of 3 ranks; in it UM is at work "
        "390.000 ms longer than in the median one (66% of that)."
    )


def test_an_outlier_by_a_figure_of_which_the_other_is_not_recorded_names_that_figure():
    members = run_of([100, 101, 102, 103, 104, 105, 106, 1000], off=("gpu_faults",))
    (text,) = outlier_text(*members)
    assert text.startswith("rank 7 of night: migrations in flight for 1.000 s, 9.66 times")


def test_ranks_that_took_about_as_long_may_have_waited_for_each_other():
    (row,) = fleet_document(run_of([100, 500]))["stragglers"]
    assert row["text"] == (
        "Both ranks took about as long as each other (0.0% apart), as where ranks wait for each other; then UM time, not "
        "duration, shows who may hold the others up."
    )


def test_without_um_time_it_is_not_said_to_show_who_holds_the_others_up():
    (none,) = fleet_document(run_of([0, 0, 0]))["stragglers"]
    assert none["text"] == (
        "All 3 ranks took about as long as each other (0.0% apart); none of them has UM time."
    )
    (unknown,) = fleet_document(run_of([9, 9], off=("migrations", "gpu_faults")))["stragglers"]
    assert unknown["text"].endswith("(0.0% apart); UM time is not known of all of them.")
    nights = [each for n in range(2) for each in run_of([0, 0], run=f"n{n}")]
    (line,) = straggler_lines(fleet_document(nights))
    assert line == "2 runs in which all took about as long as each other."


def test_um_time_that_is_a_small_part_of_the_delay_is_not_given_as_its_reason():
    members = [
        member(rank=r, groups=moving(100 + (r == 2)), duration_ns=(1000 + 4000 * (r == 2)) * MS)
        for r in range(5)
    ]
    (row,) = fleet_document(members)["stragglers"]
    assert row["text"].endswith(
        "4.000 s beyond the median of 5 ranks; UM time hardly tells why: in it UM is at work only 1.000 ms longer than in "
        "the median one."
    )


# What was judged -----------------------------------------------------------------------------------


def lines_of(*members, failures=()):
    return outlier_lines(fleet_document(members, failures))


def test_that_none_stands_out_is_said_of_as_many_as_were_judged():
    runs = [each for n in range(2) for each in run_of([100, 101, 102, 103, 104, 105], run=f"n{n}")]
    lacking = member("n0", 6, off=("migrations", "gpu_faults"))
    alone = run_of([100, 900], run="n2")
    first, *_ = lines_of(*runs, lacking, *alone)
    assert first == "12 ranks of 2 runs judged by UM time: none stands out from its run."
    (_, second, *_) = lines_of(
        *runs, *(each for n in (3, 4) for each in run_of([99] * 6, run=f"n{n}"))
    )
    assert second == "4 runs judged against each other by UM time: none stands out."


@pytest.mark.parametrize(
    ("members", "why"),
    [
        (run_of([100, 300]), "here a run has 2 reports at most"),
        (run_of([9] * 4, off=("migrations", "gpu_faults")), "no report has recorded migrations"),
        ([member(rank=r, program=f"p{r}") for r in range(4)], "with the same program"),
        ([member(f"n{r}", None, groups=moving(r)) for r in range(2)], "1 report at most"),
    ],
    ids=["two ranks", "not recorded", "other programs", "two nights"],
)
def test_where_nothing_could_be_judged_nobody_is_said_not_to_stand_out(members, why):
    first, *_ = lines_of(*members)
    assert first.startswith("Nothing could be judged: ")
    assert why in first
    assert not any("stands out from" in line for line in lines_of(*members))


def test_of_three_to_five_ranks_the_value_is_said_that_would_be_named():
    # Linear alone: the median 110 ms, MAD 10 ms, bound 112.6: 110 + 112.6 * 14.826 ms.
    lines = lines_of(*run_of([100, 110, 190]))
    (few,) = [line for line in lines if "beyond doubt" in line]
    assert few == (
        "Of 3 ranks only one far beyond doubt is named: here from 1.779 s on, where the median is 110.000 ms."
    )
    two = [each for n in range(2) for each in run_of([100, 110, 190 - n], run=f"n{n}")]
    (few,) = [line for line in lines_of(*two) if "beyond doubt" in line]
    assert few.endswith("here from 16.2 times the median on.")
    assert not [line for line in lines_of(*run_of([100] * 6)) if "beyond doubt" in line]


def test_a_fifth_of_the_ranks_is_a_group_and_said_in_one_sentence():
    (line,) = lines_of(*run_of([100, 101, 102, 103, 104, 300, 310, 320]))
    assert line.startswith(
        "3 of 8 ranks of night are a group apart, with more UM time than the others (ranks 5, 6, 7): two groups rather than "
        "outliers. The farthest is rank 7 of night: UM at work for 320.000 ms"
    )
    rows = fleet_document(run_of([100, 101, 102, 103, 104, 300, 310, 320]))["outliers"]
    assert [row["rank"] for row in rows] == [7, 6, 5]


def test_more_than_ten_ranks_are_a_group_however_many_others_there_are():
    usual, slow = [100 + rank % 7 for rank in range(180)], [500 + rank for rank in range(20)]
    (line,) = lines_of(*run_of([*usual, *slow]))
    assert line.startswith("20 of 200 ranks of night are a group apart")
    assert "ranks 180, 181, 182, 183, 184, 185, 186, 187 and 12 more" in line


def test_times_that_spread_widely_are_said_to_and_nobody_is_named():
    # From rank to rank 1.4 times as far from the median, without a gap: a long tail.
    tail = [101 + round(2 * 1.4**step) for step in range(19)]
    lines = lines_of(*run_of([100 + rank % 3 for rank in range(80)] + tail))
    assert lines[0].startswith("99 ranks of 1 run judged by UM time: none stands out")
    (wide,) = [line for line in lines if "spreads widely" in line]
    assert "99 ranks of night spreads widely: 100.000 ms to 955.000 ms, median 101.000 ms." in wide


def test_reports_of_the_same_rank_are_named_with_their_files():
    members = [
        member(rank=r, source=f"night/{k}/r{r}", groups=moving(100 + r + 700 * (k * r == 3)))
        for k in range(2)
        for r in range(4)
    ]
    out, note, *_ = lines_of(*members)
    assert out.startswith("rank 3 of night (night/1/r3): UM at work for 803.000 ms")
    assert "the median of 8 reports" in out
    assert note == (
        "4 ranks with several reports, as rank 0 of night (night/0/r0 and night/1/r0): each report is judged for itself. If "
        "they are of different runs, `--rank-pattern` tells them apart."
    )


def test_a_night_of_one_report_has_no_median_rank():
    nights = [member(f"n{n}", None, groups=moving(100 + n + 200 * (n == 7))) for n in range(8)]
    (line,) = lines_of(*nights)
    assert line.startswith("run n7: UM at work for 307.000 ms, 2.97 times the median of 8 runs")
    pairs = [each for n in range(8) for each in run_of([99, 100 + 300 * (n == 7)], run=f"n{n}")]
    first, *_ = lines_of(*pairs)
    assert first.startswith("run n7, median of its reports: UM at work for 249.500 ms")


# The text ------------------------------------------------------------------------------------------


def text_of(members, failures=(), **options):
    return fleet_text(fleet_document(members, failures, name="nights"), **options)


def test_the_text_begins_with_what_there_is_and_names_what_failed():
    text = text_of(run_of([100, 101, 102]), [failure(reason="it is damaged. Export it again.")])
    assert text.startswith("nights: 3 reports of 1 run, 1 more report failed\n")
    assert "Failed\n  night/rank9.sqlite: it is damaged. Export it again.\n" in text


def test_a_thousand_ranks_are_a_page_with_the_worst_first():
    members = run_of([100 + rank % 7 for rank in range(999)] + [900])
    text = text_of(members)
    assert len(text.splitlines()) < 50
    (line,) = [line for line in text.splitlines() if line.strip().startswith("999 ")]
    assert line.rstrip().endswith("stands out: more")
    assert "(992 more rows: `--rows 1000`)" in text
    assert text_of(members, rows=3).count("\n") < text.count("\n")
    assert "(1 more row: `--rows 1000`)" in text_of(members, rows=999)


def test_fewer_tables_than_runs_say_how_many_more_there_are():
    members = [each for n in range(9) for each in run_of([100, 101], run=f"n{n}")]
    text = text_of(members)
    assert "and 3 more runs: `--format csv` has a row for each report." in text


def test_runs_of_one_report_have_one_table_together():
    members = [member(f"n{n}", None, source=f"n{n}/x.sqlite", groups=moving(n)) for n in range(4)]
    text = text_of(members)
    assert text.count("worst first") == 1
    assert "4 runs of one report each, worst first" in text
    assert text.index("n3/x.sqlite") < text.index("n0/x.sqlite")


def test_what_no_report_recorded_is_said_with_its_switch_and_never_as_0():
    text = text_of(run_of([5, 6], off=("gpu_faults", "cpu_faults")))
    assert (
        "GPU page faults: not recorded in any report: `nsys profile --cuda-um-gpu-page-faults=true ...`"
        in text
    )
    assert "GPU fault rows" not in text
    assert "Fault rows" not in text


def test_what_some_reports_lack_is_a_sum_of_the_others_and_says_so():
    text = text_of([*run_of([5, 6]), member(rank=2, off=("migrations",))])
    assert "migrations: 2, 2.00 MiB; not known of 1 report" in text


def test_ranks_of_a_run_are_worst_first_and_unknown_last():
    members = [*run_of([100, 300, 200]), member(rank=3, off=("migrations", "gpu_faults"))]
    rows = rank_rows(fleet_document(members), "night")
    assert [row["rank"] for row in rows] == [1, 2, 0, 3]


def test_nights_are_in_the_order_in_which_they_began():
    days = [3, 1, 2]
    members = [
        member(f"n{day}", rank, groups=moving(9), start=day * 86_400 * 10**9)
        for day in days
        for rank in range(2)
    ]
    text = text_of(members)
    runs = text[text.index("\nRuns\n") :]
    assert runs.index("1970-01-02") < runs.index("1970-01-03") < runs.index("1970-01-04")


def test_no_report_at_all_says_so():
    text = text_of([], [failure()])
    assert "No report could be read." in text
    assert "night/rank9.sqlite" in text


@pytest.mark.parametrize("markdown", [False, True])
def test_hostile_names_stay_text(markdown):
    members = [
        member(EVIL, rank, source=EVIL, groups=moving(b), program=EVIL, gpu=EVIL)
        for rank, b in enumerate([100, 101, 102, 103, 104, 900])
    ]
    text = fleet_text(
        fleet_document(members, [failure(EVIL, EVIL, run=EVIL)], name=EVIL), markdown=markdown
    )
    assert not {"\x1b", "\u202e"} & set(text)
    assert "\n# h" not in text
    if markdown:
        assert "<img" not in text


def test_a_fleet_is_called_by_what_was_named_without_its_folders(tmp_path):
    paths = [tmp_path / f"n{number}" for number in range(5)]
    assert fleet_name(paths[:2]) == "n0, n1"
    assert fleet_name(paths) == "n0, n1, n2 and 2 more"


def test_a_time_that_no_calendar_has_is_unknown():
    assert utc(2**63 - 1).startswith("2262-")
    assert utc(2**80) == "unknown"
