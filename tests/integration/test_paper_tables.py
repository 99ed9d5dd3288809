"""`python -m benchmarks.papers`: three tables, what follows from them, and hints for tensors by name."""

from __future__ import annotations

import re
import sqlite3

import polars as pl
import pytest

from benchmarks.papers import caching, gains, hinting, notes, signs, stitching, verdicts
from benchmarks.papers.__main__ import main
from benchmarks.papers.claims import CLAIMS, Claim
from benchmarks.papers.markdown import ratio, spread
from benchmarks.papers.runs import WARMUP, Job, managed_peak, trend_of
from nsan.analysis.pca.ratios import COUNTED
from nsan.analysis.pca.switches import at_work, causal_parts
from nsan.analysis.result import KINDS
from nsan.errors import UnknownNameError, UsageError
from nsan.model.hints import Hint, meant, parse_hint
from nsan.model.networks.tensors import Compute, Create, Step, Tensor, TensorProgram
from nsan.model.placing import placed
from nsan.model.profiles import gpu_profile
from nsan.model.program import Prefetch
from nsan.model.sweep import Case, cases
from nsan.units import MIB

CONDITIONS = ("Factor", "Steps", "Tensors named", "torch")
"""Columns of numbers that name the row."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """All three tables in their small version, with their runs."""
    folder = tmp_path_factory.mktemp("papers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NSAN_CACHE_DIR", str(folder / "stores"))
        assert main(["--quick", "-o", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def texts(made):
    return {number: (made / f"table{number}.md").read_text() for number in (1, 2, 3)}


def tables(text):
    """The Markdown tables of a text: titles, alignments and rows of cells."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = [
            line.strip("| ").split(" | ") for line in block.replace("|  |", "| - |").splitlines()
        ]
        yield lines[0], lines[1], lines[2:]


def cell_row(text, title, *starts):
    """The row that starts with these cells of the table under a title."""
    rows = next(tables(text.split(title, 1)[1]))[2]
    return next(row for row in rows if tuple(row[: len(starts)]) == starts)


def cell(text, title, column, *starts):
    """One cell of that row."""
    titles = next(tables(text.split(title, 1)[1]))[0]
    return cell_row(text, title, *starts)[titles.index(column)]


# The tables -------------------------------------------------------------------------------------------


def test_every_table_says_whether_it_is_modelled_or_measured(texts):
    titles = [line for text in texts.values() for line in text.splitlines() if line[:3] == "## "]
    assert len(titles) == 5
    for title in titles:
        assert re.search(r": (modelled|measured)", title), title
    assert "measured (real snapshots" in texts[3]


def test_every_figure_says_of_which_kind_it_is(texts):
    found = [table for text in texts.values() for table in tables(text) if table[0][0] != "Claim"]
    n_labelled = 0
    for titles, alignment, (kinds, *rows) in found:
        if titles[0].startswith("Claim ("):
            continue
        for i, title in enumerate(titles):
            is_number = any(re.fullmatch(r"[+-]?[\d ]+(\.\d+)?( %)?", row[i]) for row in rows)
            if is_number and title not in CONDITIONS:
                assert kinds[i].strip("*") in KINDS, title
                n_labelled += 1
            assert (alignment[i] == "---:") == (kinds[i].strip("*") in KINDS)
    assert n_labelled > 30


def test_the_rows_that_were_asked_for_are_there(texts):
    assert float(cell(texts[1], "## Table 1", "Step, ms: off", "alexnet", "0.8")) > 0
    assert float(cell(texts[1], "## Table 1", "Step, ms: off", "alexnet", "1.25")) > 0
    hints = {row[3] for row in list(tables(texts[2]))[1][2]}
    assert {"none", "prefetch chosen", "prefetch all", "prefetch objects, all"} <= hints
    assert {"preferred-cpu chosen"} <= hints
    names = [row[0] for row in next(tables(texts[3]))[2][1:]]
    assert names == [
        "decomfl_opt125m_full_history",
        "flexgen_oom_old_format",
        "flexgen_opt1.3b_old_format",
        "kivi_llama_state_only",
        "verl_vllm_two_mempools",
    ]
    shapes = [row[1] for row in list(tables(texts[3]))[1][2][1:]]
    assert shapes == ["fixed", "varying, seed 1"]


@pytest.mark.parametrize("side", ["off", "on"])
def test_table_1_counts_what_stands_in_the_exports(made, texts, side):
    allocator = {"off": "raw", "on": "caching"}[side]
    run = f"{allocator}-1.25-none"
    database = sqlite3.connect(made / "alexnet" / run / f"{run}.sqlite")
    steps = database.execute(
        "select start, end from NVTX_EVENTS where text = 'step' order by start"
    ).fetchall()
    within = " or ".join(f"(start >= {a} and start < {b})" for a, b in steps[2:])
    (n_rows,) = database.execute(
        f"select count(*) from CUDA_UM_GPU_PAGE_FAULT_EVENTS where {within}"
    ).fetchone()
    (n_bytes,) = database.execute(
        f"select sum(bytes) from CUPTI_ACTIVITY_KIND_MEMCPY where copyKind = 11 and ({within})"
    ).fetchone()
    n = len(steps) - 2
    assert n >= 2
    row = next(row for row in next(tables(texts[1]))[2] if row[:2] == ["alexnet", "1.25"])
    first = {"off": 0, "on": 1}[side]
    warm_ms = sum(b - a for a, b in steps[2:]) / n / 1e6
    assert float(row[2 + first]) == pytest.approx(warm_ms, abs=0.06)
    assert int(row[5 + first].replace(" ", "")) == round(n_rows / n)
    assert float(row[8 + first].replace(" ", "")) == pytest.approx(n_bytes / n / MIB, abs=0.51)


def test_a_real_snapshot_has_the_figures_that_others_counted(texts):
    title, name = "## Table 3a", "decomfl_opt125m_full_history"
    # sample_data/snapshots/README.md: reserved 1 897 922 560 byte, and it is never more.
    assert cell(texts[3], title, "Peak reserved, MiB", name) == "1 810"
    assert cell(texts[3], title, "Entries", name) == "23 105"
    assert cell(texts[3], title, "Peak reserved, MiB", "kivi_llama_state_only") == "-"


def test_every_claim_stands_beside_its_source_and_mark(texts):
    for claim in CLAIMS:
        line = next(line for line in texts[claim.paper].splitlines() if claim.says in line)
        assert f"{claim.source} [{claim.mark}]" in line
        answer = line.rstrip("| ").rsplit(" | ", 1)[1]
        assert len(answer) > 20
        assert "This table cannot tell" not in answer
    assert {claim.paper for claim in CLAIMS} == {1, 2, 3}


def test_of_paper_1_no_number_is_quoted():
    of_paper_1 = [claim for claim in CLAIMS if claim.paper == 1]
    assert of_paper_1
    assert not any(re.search(r"\d", claim.says) for claim in of_paper_1)
    assert all(claim.low is None and claim.high is None for claim in of_paper_1)


def test_the_runs_are_kept_and_not_made_again(made):
    said = []
    job = Job(made, quick=True, tell=said.append)
    before = (made / "alexnet" / "raw-1.25-none" / "model.json").stat().st_mtime_ns
    wanted = cases([0.8, 1.25], ["raw", "caching"], ["none"])
    found = job.modelled("alexnet", wanted)
    assert [line.endswith(": there already") for line in said] == [True] * 4
    assert [case for case, _ in found] == wanted
    assert (made / "alexnet" / "raw-1.25-none" / "model.json").stat().st_mtime_ns == before


def test_runs_that_are_given_keep_their_kind(made, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("NSAN_CACHE_DIR", str(made / "stores"))
    for side, run in (("off", "raw-0.8-none"), ("on", "caching-0.8-none")):
        (tmp_path / "mine" / side).mkdir(parents=True)
        for name in (f"{run}.sqlite", "snapshot.pickle"):
            (tmp_path / "mine" / side / name).symlink_to(made / "alexnet" / run / name)
    (tmp_path / "mine" / "off" / "snapshot.pickle").unlink()
    assert main(["1", "--runs", str(tmp_path / "mine")]) == 0
    out = capsys.readouterr().out
    # The trace itself says that no GPU made it.
    assert "## Table 1. A step without and with the caching allocator (PCA): modelled" in out
    own = next(tables((made / "table1.md").read_text()))[2]
    given = next(tables(out))[2]
    at = next(row for row in own if row[:2] == ["alexnet", "0.8"])
    # What else takes room on a GPU is in no trace: the factor of a recorded run is not known.
    assert given[1][:2] == ["mine", "-"]
    assert given[1][2:] == at[2:]
    assert "a ballast or another process cannot be seen" in out
    assert "Not known from these runs." in out.split("moderate oversubscription")[1]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["1", "--runs", "{}/nowhere"], 1, "no such file or folder"),
        (["1", "--runs", "{}/empty"], 2, "holds no capture"),
    ],
)
def test_runs_that_are_no_pair_are_one_message(tmp_path, capsys, arguments, code, said):
    for side in ("off", "on"):
        (tmp_path / "empty" / side).mkdir(parents=True)
    assert main([each.format(tmp_path) for each in arguments]) == code
    assert said in capsys.readouterr().err


# What follows from table 1 ----------------------------------------------------------------------------


def paper1(factor, step, rows, moved, *, dead=0, name="net", **widths):
    """A row of table 1: (off, on) of time, fault rows and bytes in; as many bytes go out.

    The interval of a ratio holds so much on either side as ``widths`` say by its figure: by default nothing,
    None: there is no interval.
    """
    row = {"name": name, "factor": factor, "dead_in_bytes": dead, "dead_out_bytes": dead}
    row |= {"n_steps": (4, 4), "n_shortest": 4, "trends": {}}
    both = tuple(2 * value for value in moved)
    figures = {"step_ns": step, "fault_rows": rows, "in_bytes": moved, "out_bytes": moved}
    for figure, (off, on) in (figures | {"moved_bytes": both}).items():
        ratio, width = on / off if off else None, widths.get(figure, 0)
        known = ratio is not None and width is not None
        row |= {
            f"{figure}_off": off,
            f"{figure}_on": on,
            f"{figure}_ratio": ratio,
            f"{figure}_ratio_low": ratio - width if known else None,
            f"{figure}_ratio_high": ratio + width if known else None,
        }
    return row


FASTER = [
    paper1(1.25, (100, 60), (50, 20), (10, 30), dead=5),
    paper1(1.5, (100, 90), (50, 40), (10, 30), dead=5),
    paper1(2.0, (100, 130), (50, 45), (10, 30), dead=5),
]
SLOWER = [
    paper1(1.25, (100, 160), (50, 70), (30, 10)),
    paper1(1.5, (100, 150), (50, 60), (30, 10)),
    paper1(2.0, (100, 130), (50, 55), (30, 10)),
]


def test_the_verdict_of_a_network_follows_from_its_rows():
    said = verdicts.verdict("net", FASTER)
    assert "Fault rows: fewer at 1.25, 1.5 and 2." in said
    assert "Traffic: more at 1.25, 1.5 and 2." in said
    assert (
        "Time: faster at 1.25 and 1.5 and slower at 2; faster without a break up to factor 1.5."
        in said
    )
    assert "Fewer faults, more traffic and faster together: at 1.25 and 1.5." in said
    other = verdicts.verdict("net", SLOWER)
    assert "Fault rows: more at 1.25, 1.5 and 2." in other
    assert "Traffic: less at" in other
    assert "not faster even at the lowest factor" in other
    assert "Not all three together: at 1.25 and 1.5." in other
    assert "Fewer faults, more traffic" not in other


def test_the_claims_of_paper_1_are_judged_by_the_rows():
    agrees = verdicts.found(FASTER)
    assert agrees["faults"].startswith("Agrees: fewer fault rows in 3, more in 0 of 3 rows.")
    assert agrees["traffic"].startswith("Agrees: less in 0, more bytes in 3 of 3")
    # 10 dead bytes a step, of 40 more, in every row.
    assert "dead bytes are 0.25 times the additional bytes." in agrees["traffic"]
    assert agrees["moderate"].startswith("Agrees: faster in 2, slower in 0 of 2 moderate rows.")
    assert "together, of 2: in 2." in agrees["moderate"]
    differs = verdicts.found(SLOWER)
    assert all(text.startswith("Differs") for text in differs.values())
    assert "together, of 2: not in 2." in differs["moderate"]
    assert "Slower: 2; with more bytes 0 of them, with fewer fault rows 0." in differs["moderate"]
    part = verdicts.found([FASTER[0], SLOWER[1]])
    assert part["moderate"].startswith("Agrees in part: faster in 1, slower in 1 of 2")
    more = FASTER[0] | {"dead_in_bytes": 25}
    spread = verdicts.found([FASTER[0], more])["traffic"]
    assert "dead bytes are 0.25 to 0.75 times the additional bytes (mean 0.50)." in spread


TIED = paper1(1.5, (100, 97), (50, 20), (10, 30), step_ns=0.04)
"""Faster by its mean, but the interval of the ratio, 0.93 to 1.01, holds 1."""


def test_a_ratio_whose_interval_holds_1_is_a_tie_and_told_as_one():
    said = verdicts.verdict("net", [FASTER[0], TIED])
    assert (
        "Time: faster at 1.25 and a tie at 1.5; faster without a break up to factor 1.25." in said
    )
    assert "Fewer faults, more traffic and faster together: at 1.25." in said
    assert "Undecided, as one of the three is a tie: at 1.5." in said
    claims = verdicts.found([FASTER[0], TIED])
    assert claims["moderate"].startswith(
        "Agrees in part: faster in 1, slower in 0, a tie in 1 of 2 moderate rows."
    )
    assert claims["moderate"].endswith("together, of 2: in 1 and undecided by a tie in 1.")
    alone = verdicts.found([TIED])["moderate"]
    assert alone.startswith("Undecided: faster in 0, slower in 0, a tie in 1 of 1 moderate rows.")
    assert "Ratio 0.97 (net at 1.5)." in alone


@pytest.mark.parametrize(
    ("low", "high", "way"),
    [
        (0.90, 0.99, "less"), (0.90, 0.996, "tie"), (0.90, 1.0, "tie"), (1.0, 1.2, "tie"),
        (1.004, 1.2, "tie"), (1.01, 1.2, "more"), (1.01, None, "more"), (0.90, None, "tie"),
        (None, None, "less"),
    ],
)  # fmt: skip
def test_an_interval_is_taken_as_the_table_shows_it(low, high, way):
    row = TIED | {"step_ns_ratio_low": low, "step_ns_ratio_high": high}
    assert signs.time(row).way == way
    assert signs.time(row).is_bare == (low is None)


def test_one_part_that_fails_decides_and_a_tie_does_not():
    wider = FASTER[0] | {"fault_rows_ratio_high": 1.1}
    assert [signs.two_sided(row) for row in (FASTER[0], wider, SLOWER[0])] == ["yes", "tie", "no"]
    assert signs.two_sided(wider | {"moved_bytes_ratio_high": 0.9}) == "tie"
    assert signs.two_sided(SLOWER[0] | {"step_ns_on": None}) == "no"
    assert signs.two_sided(wider | {"step_ns_on": None}) == "unknown"


def test_without_an_interval_the_bare_sign_is_told_so():
    row = paper1(1.5, (100, 60), (50, 20), (10, 30), step_ns=None)
    nothing = paper1(0.8, (100, 60), (50, 20), (0, 0))
    appears = paper1(2.0, (100, 60), (50, 20), (0, 7))
    said = verdicts.verdict("net", [nothing, row, appears])
    assert "Time: faster at 0.8, 1.5 and 2 (without an interval, the bare sign: at 1.5)" in said
    assert (
        "Traffic: more at 1.5 and 2 and none without or with PCA at 0.8 (without an interval, the bare "
        "sign: at 2)." in said
    )
    claims = verdicts.found([nothing, row, appears])
    assert (
        "of 1 moderate rows. Without an interval, the bare sign: 1 of them." in claims["moderate"]
    )
    assert "more bytes in 2 of 2 rows that move bytes." in claims["traffic"]
    assert caching.with_texts([row])[0]["step_ns_text"] == "0.60 (no interval)"


def test_what_moves_both_ways_has_an_interval_of_its_own():
    # In: 30 or 50 instead of 20, out: 50 or 30 instead of 60: each swings, and the sum is always 80.
    off = steps(in_bytes=20, out_bytes=60)
    on = off.with_columns(in_bytes=pl.Series([30, 50]), out_bytes=pl.Series([50, 30]))
    row = caching.row_of("net", 1.5, [off], [on])
    assert (row["in_bytes_ratio_low"], row["in_bytes_ratio_high"]) == (1.5, 2.5)
    assert (row["moved_bytes_off"], row["moved_bytes_on"]) == (80, 80)
    assert (row["moved_bytes_ratio_low"], row["moved_bytes_ratio_high"]) == (1, 1)
    assert signs.traffic(row).way == "tie"


def test_at_factor_1_the_tensors_fit_and_beyond_the_highest_it_is_not_moderate():
    factors = (0.8, 1.0, 1.01, 1.5, 1.51, None)
    assert [verdicts.is_moderate({"factor": each}) for each in factors] == [
        False, False, True, True, False, False,
    ]  # fmt: skip


# What the figures of table 1 stand on -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "trend"),
    [
        ([130, 100, 100], 0.3), ([109, 100, 100], None), ([100, 100, 150], -0.2),
        ([100, 150, 50], None), ([0, 0, 0], None), ([7, 0, 0], float("inf")), ([0, 5], -1),
        ([100], None), ([100, None], None),
    ],
)  # fmt: skip
def test_a_run_still_trends_if_its_first_warm_step_is_far_from_the_later_ones(values, trend):
    assert trend_of(values) == (None if trend is None else pytest.approx(trend))


def test_the_runs_that_still_trend_are_named_under_the_table():
    still = steps(in_bytes=20, wall_ns=5)
    moves = still.with_columns(in_bytes=pl.Series([100, 80]))
    row = caching.row_of("net", 1.5, [still, moves], [still])
    text = caching.text(caching.with_texts([row]), modelled=True)
    assert "the first more than 10 % from the mean of the later ones" in text
    assert "other means: net at 1.5 without PCA (in +25 %)." in text
    assert "Means of 2 to 4 warm steps a side (the first 2 of each run are left out)." in text
    steady = caching.row_of("net", 1.5, [still], [still])
    assert "No run still trends" in " ".join(notes.note_of([steady]))
    alone = " ".join(notes.note_of([caching.row_of("net", 1.5, [still.head(1)], [still])]))
    assert "A run of one warm step, so that nothing tells whether it is warm: net at 1.5." in alone
    assert "No run still trends" not in alone
    repeated = caching.row_of("net", 1.5, [still.head(1), still.head(1)], [still])
    assert "A run of one warm step" in " ".join(notes.note_of([repeated]))


def test_a_run_without_a_warm_step_has_no_figures_and_is_named():
    none = steps(in_bytes=20).head(0)
    row = caching.row_of("net", None, [none], [steps(in_bytes=20)])
    text = caching.text(caching.with_texts([row]), modelled=False)
    assert "No warm step on one side, and so no figure: net at an unknown factor." in text
    assert cell(text, "## Table 1", "In, MiB: off", "net") == "-"
    assert "trend" not in text


def test_bytes_that_move_though_all_fits_are_discussed():
    moves = paper1(0.8, (100, 60), (50, 20), (5 * MIB, 0))
    assert "net at 0.8 (5 MiB in)" in verdicts.fits_sentence([moves])
    assert not verdicts.fits_sentence([moves | {"factor": 1.25}])
    assert not verdicts.fits_sentence([moves | {"in_bytes_off": 0}])


def test_without_a_moderate_factor_the_claim_is_not_judged():
    row = paper1(0.8, (100, 60), (50, 20), (0, 0))
    assert verdicts.found([row])["moderate"] == "Not known from these runs."
    assert verdicts.found([row])["traffic"] == "Not known from these runs."


def test_a_figure_that_is_not_known_is_called_so():
    row = FASTER[0] | {"in_bytes_on": None, "moved_bytes_on": None}
    assert "Traffic: unknown at 1.25." in verdicts.verdict("net", [row])
    assert "together" not in verdicts.verdict("net", [row])


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((-50, -70, 20, 0), "falls most by reuse (against dead traffic)"),
        ((-50, 0, -60, 10), "falls most by packing (against the rest)"),
        (
            (30, -10, 45, -5),
            "rises most by packing (against reuse and the rest)",
        ),
        ((30, 0, 31, -1), "rises most by packing"),
        ((-90, -46, -50, 6), "falls most by reuse and packing (against the rest)"),
        ((-80, -44, -50, 14), "falls most by packing (against the rest)"),
        ((0, -5, 5, 0), ""),
    ],
)
def test_the_mechanism_that_does_most_is_named(parts, said):
    names = ("difference", "reuse", "packing", "remainder")
    if "dead traffic" in said:
        names = ("difference", "reuse", "dead", "packing")
    split = {
        name: {"value": value, "low": value, "high": value}
        for name, value in zip(names, parts, strict=True)
    }
    assert verdicts.strongest(split) == said
    # Dead traffic is +0 to +373: never the opposite.
    split["packing"] |= {"low": 0, "high": 373}
    assert verdicts.strongest(split) == said


def test_a_mechanism_that_does_the_opposite_in_some_order_is_said_to():
    split = {"difference": {"value": -5, "low": None, "high": None}}
    split["reuse"] = {"value": -5, "low": -27, "high": 1}
    assert verdicts.strongest(split) == "falls most by reuse (not in every order)"


def test_what_is_a_tie_is_not_explained_by_a_mechanism():
    parts = [
        {"name": "net", "factor": factor, "figure": "step_ns", "part": part, "value": -5}
        | {"low": -5, "high": -5}
        for factor in (1.25, 1.5)
        for part in ("difference", "reuse")
    ]
    said = verdicts.verdict("net", [FASTER[0], TIED], parts)
    assert "step time falls most by reuse at 1.25; step time is a tie at 1.5." in said
    claims = verdicts.found([FASTER[0], TIED], parts)
    assert "step time falls most by reuse in 1 and is a tie in 1 of 2." in claims["moderate"]


def steps(**figures):
    """Two equal warm steps, as of `warm_steps`."""
    counted = dict.fromkeys(COUNTED, 0) | figures
    return pl.DataFrame([{"step": i, "wall_ns": 0, **counted} for i in (1, 2)])


def test_the_parts_of_the_mechanisms_stand_under_the_table_and_add_up():
    # Each mechanism at work adds its own number of fault rows; without a cache there are 100.
    rows = {"reuse": -40, "dead": 7, "packing": -3}
    runs = {
        at_work(each): steps(n_fault_rows=90 + sum(rows[m] for m in at_work(each)))
        for each in caching.SETS
    }
    raw = steps(n_fault_rows=100)
    parts = [{"name": "net", "factor": 1.5, **row} for row in causal_parts(runs, raw).to_dicts()]
    compared = caching.row_of("net", 1.5, [raw], [runs[frozenset(rows)]])
    switched = caching.Switched(parts, {"net": (736 * MIB, 946 * MIB)}, {2})
    text = caching.text(caching.with_texts([compared]), modelled=True, switched=switched)
    row = cell_row(text, "### Which mechanism", "net", "1.5", "Fault rows")
    assert row[3:] == ["-46", "-40", "+7", "-3", "-10"]
    assert "the number of fault rows falls most by reuse (against dead traffic) at 1.5" in text
    assert (
        "without is net 736 and 946 MiB, at equal GPU memory. The part of packing includes" in text
    )
    assert "The parts have no error of steps: each stands on means of 2 warm steps" in text


def test_without_more_memory_no_padding_is_told():
    said = " ".join(notes.parts_note(caching.Switched([], {"net": (5 * MIB, 5 * MIB)}, {4})))
    assert "Packing off needs no more managed memory in net." in said
    assert "pads" not in said


def test_the_managed_memory_of_a_run_is_that_of_its_allocations(made):
    run = made / "alexnet" / "raw-1.25-none"
    database = sqlite3.connect(run / "raw-1.25-none.sqlite")
    changes = database.execute(
        "select bytes * (case memoryOperationType when 0 then 1 else -1 end) "
        "from CUDA_GPU_MEMORY_USAGE_EVENTS where memKind = 4 order by start"
    ).fetchall()
    peak = held = 0
    for (change,) in changes:
        held += change
        peak = max(peak, held)
    assert peak > 0
    assert managed_peak(run) == peak


# What follows from table 2 ----------------------------------------------------------------------------


def paper2(hint, factor, gain, *, name="net", prefetcher=True, all_gain=0.0):
    row = {"name": name, "hint": hint, "factor": factor, "prefetcher": prefetcher}
    times = {"warm_ns": 100 / (1 + gain), "cold_ns": 100.0, "in_bytes": len(hint), "trend": None}
    return row | times | {"warm_gain": gain, "all_gain": all_gain}


def test_the_rule_chooses_what_comes_in_most_often_until_its_share_is_covered():
    profile = pl.DataFrame(
        {
            "name": ["big", "hot", "small", "cold", "warm"],
            "in_bytes": [400, 300, 200, 0, 100],
            "bytes": [400 * MIB, 100 * MIB, MIB - 1, 900 * MIB, 50 * MIB],
        }
    )
    # Per byte: hot 3, warm 2, big 1; small is too small and cold never comes. 60 % of 1000 is 600.
    assert hinting.choose(profile, share=0.6)["name"].to_list() == ["hot", "warm", "big"]
    assert hinting.choose(profile, share=0.4)["name"].to_list() == ["hot", "warm"]
    assert hinting.choose(profile, share=0.3)["name"].to_list() == ["hot"]


def test_where_nothing_comes_in_nothing_is_chosen_and_no_hint_is_for_all_by_mistake():
    nothing = pl.DataFrame({"name": ["a"], "in_bytes": [0], "bytes": [5 * MIB]})
    hints = hinting.hints_for(hinting.choose(nothing), {"a": "parameter"})
    assert set(hints) == {"prefetch all", "prefetch objects, all"}


def test_advice_goes_to_the_roles_for_which_it_makes_sense():
    chosen = pl.DataFrame({"name": ["w", "m"], "in_bytes": [9, 9], "bytes": [MIB, MIB]})
    hints = hinting.hints_for(chosen, {"w": "parameter", "m": "optimizer"})
    assert str(hints["prefetch chosen"]) == "prefetch@w+m"
    assert str(hints["read-mostly chosen"]) == "read-mostly@w"
    assert str(hints["accessed-by chosen"]) == "accessed-by@m"


def test_the_claims_of_paper_2_are_judged_by_the_rows():
    falls = [
        paper2("prefetch chosen", 1.25, 0.4), paper2("prefetch all", 1.25, 0.3),
        paper2("prefetch chosen", 3.0, 0.1), paper2("prefetch all", 3.0, -0.2),
        paper2("prefetch objects, all", 3.0, -0.6),
        paper2("prefetch objects, all", 0.8, 0.0, all_gain=0.38),
        paper2("prefetch all", 0.8, 0.0, all_gain=0.1),
    ]  # fmt: skip
    said = gains.found(falls)
    assert said["lower"].startswith("Agrees (2 of 2).")
    assert said["too_many"].startswith("Agrees. Hints for all tensors or objects are slower")
    assert (
        "in 2 of 3 runs above factor 1, and behind the chosen tensors in 3 of 3" in said["too_many"]
    )
    assert "net +38.0 %: 1 within the claimed range" in said["object_fits"]
    assert "net +10.0 %: 1 below the claimed range" in said["tensor_fits"]
    # A gain of -60 % is 2.5 times the time.
    assert "net 2.50: 1 within the claimed range" in said["object_slow"]
    # 21 byte with this hint, 4 without any.
    with_base = gains.found([*falls, paper2("none", 3.0, 0.0)])
    assert "net 2.50 (5.25 times the bytes in): 1 within" in with_base["object_slow"]
    assert "net is not faster (-20.0 %)" in said["tensor_three"]

    rises = [row | {"warm_gain": row["factor"] / 10} for row in falls]
    other = gains.found(rises)
    assert other["lower"].startswith("Differs (0 of 2).")
    assert other["too_many"].startswith("Differs.")
    assert "net 0.77: 1 below the claimed range" in other["object_slow"]
    assert "net is faster (+30.0 %)" in other["tensor_three"]


def test_the_number_of_steps_that_would_give_a_claimed_gain_is_told():
    base, hinted = {"cold_ns": 900, "warm_ns": 100}, {"cold_ns": 100, "warm_ns": 110}
    # (900 + 4 * 100) / (100 + 4 * 110) = 1300 / 540
    assert gains.steps_for_gain(base, hinted, 1300 / 540 - 1) == pytest.approx(4 + WARMUP)
    # Every step gains 50 %: no number of steps gives 60 %.
    half = {"cold_ns": 600, "warm_ns": 100 / 1.5}
    assert gains.steps_for_gain(base, half, 0.6) is None


def test_the_best_and_the_worst_hint_of_a_network_are_named():
    rows = [paper2("prefetch all", 1.5, 0.2), paper2("prefetch chosen", 1.5, 0.3)]
    said = gains.verdict("net", rows)
    assert "at 1.5 best is prefetch chosen (+30.0 %), worst is prefetch all (+20.0 %)" in said
    rows = [row | {"warm_gain": -row["warm_gain"]} for row in rows]
    assert "at 1.5 no hint gains (prefetch all -20.0 %)" in gains.verdict("net", rows)


# What follows from table 3 ----------------------------------------------------------------------------


def paper3(name, varying, reserved, stitched, active=100):
    row = {
        "name": name,
        "varying": varying,
        "varies": "length of the texts",
        "shapes": "varying, seed 1" if varying else "fixed",
        "peak_active_bytes": active * MIB,
        "peak_reserved_bytes": reserved * MIB,
        "stitched_reserved_bytes": stitched * MIB,
        "least_reserved_bytes": (active + 7) * MIB,
        "utilization_fraction": active / reserved,
        "stitched_utilization_fraction": active / stitched,
        "fragmentation_fraction": 1 - active / reserved,
        "saved_bytes": (reserved - stitched) * MIB,
    }
    return stitching.with_gain(row)


def test_what_stitching_does_follows_from_the_rows():
    # 80 % to 100 %: 20 points, which is within 5 to 29.
    better = [paper3("net", False, 125, 100), paper3("net", True, 170, 110)]
    said = stitching.verdict(better)
    assert "reserves less in 2 of 2 runs and more in 0" in said
    assert (
        "With varying shapes the mean fragmentation over the seeds rises for net (length of the texts: "
        "+21.2 points)." in said
    )
    assert "net (varying, seed 1): stitching saves 60 MiB" in said
    assert "reserve 70 MiB, stitching 10 MiB; its total is 3 MiB more than active large" in said
    found = stitching.found([], better)
    assert "+20.0 to +32.1 points: 1 within and 1 above the claimed range" in found["points"]
    assert "25" not in found["reserved"].split("claimed")[0]

    worse = [paper3("net", False, 125, 150), paper3("net", True, 110, 150)]
    said = stitching.verdict(worse)
    assert "reserves less in 0 of 2 runs and more in 2" in said
    assert "falls for net (length of the texts: -10.9 points)" in said
    seeds = [*better, paper3("net", True, 100, 100)]
    assert "(length of the texts: +0.6 points; -20.0 to +21.2 by seed)" in stitching.verdict(seeds)
    assert "stitching costs 40 MiB" in said
    assert "2 below the claimed range" in stitching.found([], worse)["points"]


def test_a_number_is_below_within_or_above_what_is_claimed():
    claim = Claim("key", 3, "5 to 29", "somewhere", "2", 5, 29)
    assert [claim.compare(value) for value in (4.9, 5, 29, 29.1, None)] == [
        "below", "within", "within", "above", "unknown",
    ]  # fmt: skip
    assert claim.count([1, 2, 10]) == "2 below and 1 within the claimed range"


# Hints by name ----------------------------------------------------------------------------------------

STEP = TensorProgram(
    "net",
    (
        Create(Tensor("w", 3 * MIB, "parameter")),
        Step(1),
        Create(Tensor("a#1", 2 * MIB, "activation")),
        Compute("forward", ("w",), ("a#1",), 1.0),
    ),
)


def test_a_hint_by_name_is_read_as_it_is_written():
    hint = parse_hint("prefetch@fc.weight+conv1 forward.workspace")
    assert hint == Hint("prefetch", names=("fc.weight", "conv1 forward.workspace"))
    assert str(hint) == "prefetch@fc.weight+conv1 forward.workspace"
    with pytest.raises(UsageError, match="names no tensor: write prefetch@NAME"):
        parse_hint("prefetch@")


def test_a_hint_by_name_is_for_these_tensors_of_every_step_and_no_others():
    hint = Hint("prefetch", names=("a",))
    assert meant(hint, "a#1", "activation", 4096)
    assert meant(hint, "a#27", "activation", 4096)
    assert not meant(hint, "ab#1", "activation", 5 * MIB)
    made = placed(STEP, "caching", gpu_profile("a100-sxm4-40gb"), hints=(hint,))
    asked = [each for each in made.program.operations if isinstance(each, Prefetch)]
    assert [(each.offset_bytes, each.n_bytes) for each in asked] == [(3 * MIB, 2 * MIB)]


def test_a_hint_for_a_tensor_that_the_network_lacks_is_refused():
    with pytest.raises(UnknownNameError, match=r"no tensor 'b'\. There are: .*w"):
        placed(STEP, "raw", gpu_profile("a100-sxm4-40gb"), hints=(Hint("prefetch", names=("b",)),))


def test_runs_with_other_tensors_have_other_folders_of_a_length_that_files_may_have():
    many = "+".join(f"encoder.layer.{i}.weight" for i in range(400))
    folders = {Case(1.5, "caching", f"prefetch@{names}").folder for names in (many, many + "x")}
    assert len(folders) == 2
    assert all(len(each) < 100 and "+" not in each for each in folders)


def test_one_allocator_written_in_two_ways_is_one_run():
    wanted = cases([1.5], ["caching:drop+apart", "caching:apart+drop"], ["none"])
    assert [each.allocator for each in wanted] == ["caching:drop+apart"]
    assert wanted[0].folder == "caching-drop-apart-1.5-none"


def test_the_eight_sets_of_switches_are_all_there():
    assert len(set(caching.SETS)) == 8
    assert {caching.allocator_name(each) for each in caching.SETS} >= {
        "caching", "caching:release", "caching:drop", "caching:apart", "caching:release+drop+apart",
    }  # fmt: skip


def test_values_that_look_alike_are_written_once():
    assert spread([0.7201, 0.7239], ratio) == "0.72"
    assert spread([0.72, 0.75, 0.73], ratio) == "0.72 to 0.75"


def test_the_steps_of_table_2_that_still_trend_are_named():
    row = paper2("prefetch all", 1.5, 0.2) | {"trend": -0.25, "prefetcher": False}
    said = gains.text([paper2("none", 1.5, 0.0), row], [])
    assert "in time: net at 1.5, prefetch all, no prefetcher (-25 %)." in said
    assert "still trend" not in gains.text([paper2("none", 1.5, 0.0)], [])
