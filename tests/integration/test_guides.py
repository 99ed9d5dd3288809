"""The README and the guides under docs/: what they tell to type exists, and what they show is what comes out."""

from __future__ import annotations

import re
import runpy
import sqlite3
from contextlib import closing

import exports as x
import pytest
from readme import GUIDES, blocks, calls_of_nsan, questions, text_of, typed

from nsan.analysis.advisor.rules import RULES
from nsan.analysis.catalog import find as find_analysis
from nsan.charting import find as find_chart
from nsan.cli import _with_command, main, parser
from nsan.cli.allocator import BY, BY_JOINED
from nsan.notebooks import notebook_names

SAMPLES = x.REPOSITORY / "sample_data"
PCA_ON, PCA_OFF = (SAMPLES / "model" / name / f"{name}.sqlite" for name in ("pca_on", "pca_off"))
STANDS_FOR = {
    "TRACE": PCA_ON,
    "TRACE_ON": PCA_ON,
    "TRACE_OFF": PCA_OFF,
    "SNAPSHOT": PCA_ON.parent / "snapshot.pickle",
    "FOLDER": SAMPLES / "model" / "pca_sweep",
}
CALLS = [call for page in GUIDES for line in typed(page) for call in calls_of_nsan(line)]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: " ".join(call)[:60])
def test_every_command_of_the_guides_is_one_that_nsan_knows(call, monkeypatch):
    monkeypatch.setattr("os.path.lexists", lambda _: True)  # `nsan FILE`, of a file of the reader
    args = parser().parse_args(_with_command(call))
    assert args.command == call[0] or "." in call[0]
    if args.command == "analyse" and args.name and not args.plugins:
        assert find_analysis(args.name)
    if args.command == "export" and args.chart:
        assert find_chart(args.chart)
    if args.command == "allocator" and args.by != "summary":
        assert args.by in (BY if args.snapshot is None else BY_JOINED)


def test_the_table_of_the_readme_has_a_command_for_every_question():
    rows = [line for line in text_of("README.md").splitlines() if line.endswith("` |")]
    assert len(questions()) == len(rows) > 15
    assert all(question.endswith(("?", "?)", ".)")) for question, _ in questions())


@pytest.mark.parametrize(("question", "command"), questions(), ids=lambda value: value[:60])
def test_the_command_for_each_question_answers_it(question, command, capsys):
    arguments = [str(STANDS_FOR.get(word, word)) for word in command.split()[1:]]
    assert main(arguments) == 0, question
    assert capsys.readouterr().out.count("\n") > 2


def test_the_notebooks_that_the_guides_name_are_those_that_come_with_nsan():
    for page in ("README.md", "docs/looking.md"):
        named = set(re.findall(r"`0\d-([\w-]+)`", text_of(page)))
        assert named == set(notebook_names())


@pytest.mark.parametrize("page", GUIDES)
def test_what_a_guide_points_to_is_there(page):
    here = (x.REPOSITORY / page).parent
    targets = set(re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text_of(page)))
    assert all((here / place).exists() for place, _ in targets if place)
    for place, heading in targets:
        if place.endswith(".md") and heading:
            titles = re.findall(r"^#+ (.*)$", (here / place).read_text(), re.MULTILINE)
            plain = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]
            assert heading in plain


PYTHON = [
    (page, n)
    for page in GUIDES
    if page != "docs/model.md"
    for n in range(len(blocks(page, "python")))
]


@pytest.mark.parametrize(("page", "n"), PYTHON)
def test_the_python_of_the_guides_runs(page, n, tmp_path, monkeypatch):
    (tmp_path / "sample_data").symlink_to(SAMPLES)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "typed.py").write_text(blocks(page, "python")[n])
    assert runpy.run_path("typed.py")


def test_the_analysis_of_one_s_own_in_the_guide_runs_as_it_is_called_there(
    tmp_path, monkeypatch, capsys
):
    sample = SAMPLES / "um_vector_add_rtx4060l.sqlite"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(blocks("docs/analyses.md", "python")[0])
    (call,) = (found for found in CALLS if found[:2] == ["analyse", "small_copies"])
    call = [str(sample) if word == "report.nsys-rep" else word for word in call]
    assert main([*call, "--format", "csv"]) == 0
    query = f"SELECT COUNT(*) FROM {x.MEMCPY} WHERE copyKind IN (11, 12, 13) AND bytes <= 65536"
    with closing(sqlite3.connect(sample)) as export:
        (number,) = export.execute(query).fetchone()
    assert capsys.readouterr().out.splitlines()[1] == f"12082,{number}"


def test_the_guide_on_advice_lists_every_rule_with_its_question():
    listed = re.findall(r"^\| `(\w+)` \| (.+) \|$", text_of("docs/advice.md"), re.MULTILINE)
    assert listed == [(rule.name, rule.question) for rule in RULES]


SHOWN = {
    "docs/advice.md": [["advise", "model/oversubscribed_sweep/oversubscribed_sweep.sqlite"]],
    "docs/comparing.md": [["compare", "model/stream", "model/user_prefetch"]],
    "README.md": [["um_vector_add_rtx4060l.sqlite"]],
    "docs/allocator.md": [
        ["allocator", "snapshots/decomfl_opt125m_full_history.pickle.gz"],
        ["allocator", "model/pca_on/pca_on.sqlite", "--snapshot", "model/pca_on/snapshot.pickle"],
        ["pca", "model/pca_off", "model/pca_on"],
    ],
}
"""By page: the commands whose output its text blocks show, in order; whole paragraphs may be left out."""


@pytest.mark.parametrize(
    ("page", "n"), [(page, n) for page, commands in SHOWN.items() for n in range(len(commands))]
)
def test_what_a_guide_shows_is_what_the_command_prints(page, n, monkeypatch, capsys):
    monkeypatch.chdir(SAMPLES)
    assert len(blocks(page, "text")) == len(SHOWN[page])
    assert main(SHOWN[page][n]) == 0
    printed = iter(_paragraphs(capsys.readouterr().out))
    for paragraph in _paragraphs(blocks(page, "text")[n]):
        assert any(paragraph == each for each in printed), f"not printed here: {paragraph}"


def _paragraphs(text):
    """Split at empty lines; a guide may break a long line."""
    return [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]
