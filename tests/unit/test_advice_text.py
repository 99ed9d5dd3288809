"""What `nsan advise` says to people and to machines, from advice made by hand."""

from __future__ import annotations

import csv
import io
import json
import re
from types import SimpleNamespace

import polars as pl
import pytest

from nsan.advice_document import COLUMNS, Answer, advice_document, table_rows
from nsan.advice_pages import Look, text_of
from nsan.advice_text import gain_words, number_words
from nsan.advising import NOTHING, Advised
from nsan.analysis.advisor.advice import Advice, Gain, Number, Rows, Silent, Target
from nsan.contract_advice import ADVICE_KEYS
from nsan.contract_keys import keys_in
from nsan.tabular.text import csv_text
from nsan.what_if import Tried, WhatIf

X = Target("x", 0, 4 << 20, 0x7F00_0000_0000, "scale")
BOUND = Gain(12_300_000, "derived", "time in which page faults waited, less that of one copy")
ROWS = Rows(
    "faults_by_allocation",
    pl.DataFrame(
        {
            "name": ["x", "y"] * 4,
            "bytes": [4 << 20] * 8,
            "va": pl.Series([0x7F00_0000_0000] * 8, dtype=pl.UInt64),
        }
    ),
)
PREFETCH = Advice(
    "prefetch_before_use",
    "Prefetch `x` before `scale`",
    "`scale` waited 13.000 ms for page faults.",
    (Number("waited", 13_000_000, "ns", "derived"), Number("pages", 3, "pages", "recorded")),
    (ROWS,),
    "Copy it before the launch.",
    ("// in the stream of scale", "cudaMemPrefetchAsync(x, 4194304, 0, stream);"),
    (X,),
    "No page fault is left in `scale`.",
    "kernels.waiting_ns>-50%",
    BOUND,
    "high",
)
NOTED = Advice(
    "switches", "Record GPU faults", "They were off.", (), (), "Switch them on.",
    ("--cuda-um-gpu-page-faults=true",), (), "They are there.", level="info",
)  # fmt: skip
SILENT = (
    Silent("ping_pong", "No page went to and fro."),
    Silent("read_mostly", "No page went to and fro."),
    Silent("lost_rows", "GPU faults were not recorded: record them.", is_known=False),
)


def answer(*advice, silent=SILENT, what_if=None, kernels=None, **summary):
    about = {
        "source": "run.sqlite",
        "source_kind": "nsys",
        "duration_ns": 40_000_000,
        "windows_ns": None,
        **summary,
    }
    asked = SimpleNamespace(
        summary=about,
        is_part=about["windows_ns"] is not None,
        kinds=lambda _, frame: dict.fromkeys(frame.columns, "derived"),
        rows_of=lambda _: kernels,
    )
    return Answer(asked, Advised(advice, tuple(silent)), what_if)


def said(*advice, width=100, markdown=False, verbose=False, rows=None, **how):
    return text_of(answer(*advice, **how), Look(width, markdown, verbose, rows))


def tried(*found):
    return WhatIf(tuple(found), seeds=(1, 2, 3), errors=("gpu: 2 %", "host: x/ 2"))


# Words --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gain", "text"),
    [
        (BOUND, "at most 12.300 ms of 40.000 ms (31%)"),
        (Gain(9_000_000, "modelled", "", 500_000), "about 9.000 ms +- 500.000 us of 40.000 ms (22%)"),
        (Gain(-9_000_000, "modelled", "", 500_000), "costs 9.000 ms +- 500.000 us of 40.000 ms (22%)"),
        (Gain(9_000, "modelled", "", 9_000), "no gain beyond chance (9.000 us +- 9.000 us)"),
        (Gain(-3_000, "modelled", "", 9_000), "no gain beyond chance (-3.000 us +- 9.000 us)"),
    ],
)  # fmt: skip
def test_a_gain_is_a_bound_a_figure_with_its_error_a_cost_or_nothing(gain, text):
    assert gain_words(gain, 40_000_000) == text


def test_a_gain_of_a_run_of_unknown_length_has_no_share():
    assert gain_words(BOUND, 0) == "at most 12.300 ms"
    assert gain_words(BOUND, 9_000_000) == "at most 12.300 ms"  # of kernels alone, not of the run


def test_figures_are_written_by_their_unit():
    assert number_words(Number("moved", 3 << 20, "byte", "derived")) == "moved: 3.00 MiB"
    assert number_words(Number("share", 0.123, "fraction", "derived")) == "share: 12.3%"
    assert number_words(Number("seen", 1, "pages", "recorded")) == "seen: 1 page"


# The text -----------------------------------------------------------------------------------------


def test_an_advice_says_what_to_do_why_and_what_shows_that_it_worked():
    assert said(PREFETCH) == (
        "run.sqlite: 1 thing to change\n"
        "  The run takes 40.000 ms from its first event to its last.\n"
        "\n"
        "1. high: Prefetch `x` before `scale`\n"
        "   Gain     at most 12.300 ms of 40.000 ms (31%), derived: time in which page faults waited, less\n"
        "            that of one copy.\n"
        "   Found    `scale` waited 13.000 ms for page faults.\n"
        "   Do       Copy it before the launch.\n"
        "              // in the stream of scale\n"
        "              cudaMemPrefetchAsync(x, 4194304, 0, stream);\n"
        "   Check    No page fault is left in `scale`.\n"
        "              nsan compare BEFORE AFTER --fail-on 'kernels.waiting_ns>-50%'\n"
        "\n"
        "2 other rules found nothing to advise: -v says why.\n"
        "\n"
        "Not known:\n"
        "  - GPU faults were not recorded: record them.\n"
    )


def test_of_a_clean_trace_it_says_that_there_is_nothing_to_do_and_why():
    assert said(silent=SILENT[:2], duration_ns=None) == (
        "run.sqlite: nothing to do\n\nWhy there is nothing to do:\n  - No page went to and fro.\n"
    )


def test_of_a_clean_trace_with_gaps_it_says_how_far_that_goes():
    text = said()
    assert text.startswith("run.sqlite: nothing to do, as far as is known\n")
    assert "Not known:\n  - GPU faults were not recorded" in text


def test_what_is_worth_knowing_is_no_thing_to_change():
    text = said(NOTED)
    assert text.startswith("run.sqlite: nothing to do")
    assert "Good to know (-v says more)\n  - Record GPU faults. They were off.\n" in text
    assert "--cuda-um" not in text
    assert "1. info: Record GPU faults" in said(NOTED, verbose=True)
    assert "--cuda-um-gpu-page-faults=true" in said(NOTED, verbose=True)


def test_verbose_adds_numbers_rows_and_every_reason():
    text = said(PREFETCH, verbose=True)
    assert (
        "   Numbers  waited: 13.000 ms (derived)\n            pages: 3 pages (recorded)\n" in text
    )
    assert "   Rows of faults_by_allocation (derived):\n" in text
    assert text.count("4.00 MiB") == 5
    assert "(3 more rows (--rows N))" in text
    assert "  - No page went to and fro. (ping_pong, read_mostly)\n" in text
    assert said(PREFETCH, verbose=True, rows=8).count("4.00 MiB") == 8
    assert said(PREFETCH, verbose=True, rows=1).count("4.00 MiB") == 1


def test_columns_without_room_are_counted():
    narrow = said(PREFETCH, verbose=True, width=30)
    assert "0x00007f0000000000" not in narrow
    assert "1 more column (--json)" in narrow


def test_a_long_name_is_cut_and_hides_no_other_column():
    rows = Rows("faults_by_allocation", ROWS.frame.with_columns(name=pl.lit("template<" * 30)))
    text = said(Advice(**{**PREFETCH.__dict__, "rows": (rows,)}), verbose=True)
    assert text.count("template<") < 9 * 5
    assert text.count("4.00 MiB") == 5
    assert "0x00007f0000000000" in text
    assert "more column" not in text
    narrow = said(Advice(**{**PREFETCH.__dict__, "rows": (rows,)}), verbose=True, width=20)
    assert "\n   Name\n" in narrow  # the first column stays, whatever room there is


@pytest.mark.parametrize("width", [30, 40, 60, 80, 110])
def test_sentences_fit_the_terminal_and_lines_of_code_stay_whole(width):
    lines = said(PREFETCH, width=width, what_if=tried(Tried(reason="It is none."))).splitlines()
    code = "              "
    longest = max(len(line) for line in lines if not line.startswith(code))
    assert longest <= max(width, 36)  # below that no word fits beside its label
    assert f"{code}cudaMemPrefetchAsync(x, 4194304, 0, stream);" in lines


def test_a_level_is_painted_where_it_stands_and_nowhere_else():
    high = Advice(**{**PREFETCH.__dict__, "title": "Raise high memory"})
    text = text_of(answer(high), Look(paint=lambda level: f"<{level}>"))
    assert "1. <high>: Raise high memory" in text
    assert text.count("<") == 1


def test_gains_that_may_overlap_say_so():
    assert "gains do not add up" not in re.sub(r"\s+", " ", said(PREFETCH))
    assert "gains do not add up" in re.sub(r"\s+", " ", said(PREFETCH, PREFETCH))


def test_a_part_and_a_modelled_trace_say_what_they_are():
    assert "The part that was asked for takes 40.000 ms" in said(windows_ns=[[0, 1]])
    text = " ".join(said(source_kind="nsan-model").split())
    assert "every row is the model's, and so is every figure" in text


def test_a_bound_of_a_modelled_trace_is_derived_from_modelled_rows():
    assert "(31%), derived: time in which" in said(PREFETCH)
    text = " ".join(said(PREFETCH, source_kind="nsan-model").split())
    assert "(31%), derived from modelled rows: time in which" in text


def test_of_a_part_without_an_event_it_says_only_that():
    nothing = [Silent(rule, f"{NOTHING[0].upper()}{NOTHING[1:]}.", is_known=False) for rule in "ab"]
    assert said(silent=nothing, duration_ns=None) == (
        "run.sqlite: no event is in the part that was asked for\n"
    )


def test_where_only_kernels_have_times_they_stand_for_the_run():
    kernels = pl.DataFrame({"work": ["kernel"], "time_ns": [7_000_000]})
    text = said(PREFETCH, duration_ns=None, kernels=kernels)
    assert "The run takes" not in text
    assert "Kernels take 7.000 ms in all" in text


# What-if ------------------------------------------------------------------------------------------


def test_a_modelled_gain_stands_below_the_bound_with_both_its_errors():
    gain = Gain(9_000_000, "modelled", "mean of 3 runs with it", 500_000)
    text = re.sub(r"\s+", " ", said(PREFETCH, what_if=tried(Tried(gain))))
    assert (
        "one copy. about 9.000 ms +- 500.000 us of 40.000 ms (22%), modelled: mean of 3 runs"
        in text
    )
    assert "under the seeds 1, 2, 3." in text
    assert "its profiles state: gpu: 2 %; host: x/ 2." in text


def test_advice_that_could_not_be_tried_says_why():
    text = said(PREFETCH, what_if=tried(Tried(reason="It fits already.")))
    assert "            not tried in the driver model. It fits already.\n" in text
    assert "seeds" not in text


def test_a_trace_that_could_not_be_tried_says_why_once():
    text = said(PREFETCH, PREFETCH, what_if=WhatIf(reason="This trace was recorded."))
    assert text.count("Not tried in the driver model: This trace was recorded.") == 1
    assert "about" not in text


# Hostile names ------------------------------------------------------------------------------------

EVIL = "x\x1b[31m`|<img src=x onerror=alert(1)>\n# title\u202e"


def hostile():
    return Advice(
        "rule", f"Prefetch {EVIL}", f"{EVIL} waits.", (Number(EVIL, 1, "ns", "derived"),),
        (Rows("", pl.DataFrame({"name": [EVIL]})),), f"Do {EVIL}", (f"call({EVIL}); ```",),
        (Target(EVIL, 0, 1, 1, EVIL),), f"Check {EVIL}", "", BOUND, "high",
    )  # fmt: skip


@pytest.mark.parametrize("markdown", [False, True])
def test_a_hostile_name_neither_moves_the_cursor_nor_breaks_a_line(markdown):
    text = said(
        hostile(), markdown=markdown, verbose=True, silent=[Silent(EVIL, f"{EVIL}.")], source=EVIL
    )
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", text)
    assert "\n# title" not in text


def test_a_hostile_name_is_no_markup_in_markdown():
    text = said(hostile(), markdown=True, verbose=True, source=EVIL)
    inside = re.search(r"^````text\n(.*?)\n````$", text, re.DOTALL | re.MULTILINE)
    assert "```" in inside[1]  # the fence is longer than any run of backticks in the code
    outside = text.replace(inside[0], "")
    assert "<img" not in outside
    assert not re.search(r"(?<!\\)`(?!`)", outside)


def test_markdown_has_a_heading_for_each_advice_and_code_in_fences():
    text = said(PREFETCH, markdown=True)
    assert text.startswith("# run.sqlite: 1 thing to change\n")
    assert "\n## 1. Prefetch \\`x\\` before \\`scale\\` (high)\n" in text
    assert "\n```text\n// in the stream of scale\ncudaMemPrefetchAsync" in text
    assert "\n- **Gain**: at most 12.300 ms" in text


# For machines -------------------------------------------------------------------------------------


def test_the_document_holds_each_number_with_unit_and_kind():
    gain = Gain(9_000_000, "modelled", "3 runs", 500_000)
    document = advice_document(answer(PREFETCH, what_if=tried(Tried(gain))))
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["schema"] == 1
    found = document["advice"][0]
    assert found["numbers"][0] == {
        "label": "waited", "value": 13_000_000, "unit": "ns", "kind": "derived"
    }  # fmt: skip
    assert found["targets"] == [
        {
            "pid": None,
            "allocation": "x",
            "allocation_id": 0,
            "va": "0x00007f0000000000",
            "bytes": 4 << 20,
            "kernel": "scale",
            "is_guessed": False,
        }
    ]
    assert [(g["ns"], g["kind"], g["is_bound"], g["error_ns"]) for g in found["gains"]] == [
        (12_300_000, "derived", True, None),
        (9_000_000, "modelled", False, 500_000),
    ]
    assert found["gains"][0]["share"] == pytest.approx(0.3075)
    assert found["gate"] == "kernels.waiting_ns>-50%"
    assert document["what_if"]["seeds"] == [1, 2, 3]
    assert document["silent"][2] == {
        "rule": "lost_rows", "reason": "GPU faults were not recorded: record them.", "is_known": False
    }  # fmt: skip


def test_rows_in_the_document_have_units_kinds_and_addresses_as_text():
    rows = advice_document(answer(PREFETCH))["advice"][0]["rows"][0]
    assert rows["analysis"] == "faults_by_allocation"
    assert rows["columns"][2] == {"name": "va", "unit": "byte address", "kind": "derived"}
    assert len(rows["rows"]) == 8
    assert rows["rows"][0] == {"name": "x", "bytes": 4 << 20, "va": "0x00007f0000000000"}


def test_rows_of_the_trace_itself_are_recorded():
    frame = pl.DataFrame({"va": pl.Series([1 << 40], dtype=pl.UInt64), "share": [float("nan")]})
    advice = Advice(**{**PREFETCH.__dict__, "rows": (Rows("", frame),)})
    rows = advice_document(answer(advice))["advice"][0]["rows"][0]
    assert rows["analysis"] is None
    assert rows["columns"][0] == {"name": "va", "unit": None, "kind": "recorded"}
    assert rows["rows"] == [{"va": "0x0000010000000000", "share": None}]


def test_nobody_asked_the_model_is_null_and_not_empty():
    document = advice_document(answer(PREFETCH))
    assert document["what_if"] is None
    assert document["advice"][0]["not_modelled"] is None
    reason = advice_document(answer(PREFETCH, what_if=WhatIf(reason="Recorded.")))["what_if"]
    assert reason == {"reason": "Recorded.", "seeds": [], "errors": []}


def test_every_key_of_the_document_is_documented_and_every_documented_key_is_there():
    bare = Advice(
        "rule", "Do", "", (), (Rows("", ROWS.frame),), "", (), (Target(),), "", level="info"
    )
    asked = Advice(**{**PREFETCH.__dict__, "rows": (Rows(ROWS.analysis, ROWS.frame, {"a": "b"}),)})
    gain = Gain(-9, "modelled", "3 runs", 5)
    nan = Rows("", pl.DataFrame({"share": [float("nan")]}))
    odd = Advice(**{**PREFETCH.__dict__, "rows": (nan,)})
    documents = [
        advice_document(each)
        for each in (
            answer(asked, bare, what_if=tried(Tried(gain), Tried(reason="None."))),
            answer(PREFETCH, odd, what_if=WhatIf(reason="Recorded."), windows_ns=[[0, 9]]),
            answer(PREFETCH, duration_ns=None),
        )
    ]
    found = {pair for document in documents for pair in keys_in(document)}
    declared = {key.path: key for key in ADVICE_KEYS}
    assert {path for path, _ in found} == set(declared)
    assert len(declared) == len(ADVICE_KEYS)
    for path, kind in found:
        key = declared[path]
        whole = key.type == "number" and kind == "integer"
        assert key.null if kind is None else kind == key.type or whole or key.type == "any", path


def test_a_table_has_one_row_per_advice():
    gain = Gain(-9, "modelled", "3 runs", 5)
    what_if = tried(Tried(gain), Tried(reason="None."))
    rows = table_rows(advice_document(answer(PREFETCH, NOTED, what_if=what_if)))
    read = list(csv.DictReader(io.StringIO(csv_text(rows, COLUMNS))))
    assert [row["title"] for row in read] == ["Prefetch `x` before `scale`", "Record GPU faults"]
    assert (read[0]["gain_ns"], read[0]["gain_kind"]) == ("12300000", "derived")
    assert (read[0]["modelled_ns"], read[0]["modelled_error_ns"]) == ("-9", "5")
    assert read[0]["va"] == "0x00007f0000000000"
    assert read[0]["calls"].split("\n")[1] == "cudaMemPrefetchAsync(x, 4194304, 0, stream);"
    assert (read[1]["va"], read[1]["gain_ns"], read[1]["not_modelled"]) == ("", "", "None.")
