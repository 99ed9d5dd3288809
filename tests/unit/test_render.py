from __future__ import annotations

import csv
import io
import json
from types import SimpleNamespace

import pytest

from nsan.cli.terminal import coloured
from nsan.tabular.text import (
    Field,
    csv_pieces,
    csv_text,
    flat,
    indented,
    json_pieces,
    json_text,
    table,
    word,
)
from nsan.text import safe

NAME = (Field("name", "Name", word, right=False), Field("n", "N", str))

HOSTILE = {
    "escape": "\x1b[31mred\x1b[0m",
    "bell": "a\x07b",
    "title": "\x1b]0;pwned\x07",
    "C1 control": "\x9b31m",
    "delete": "a\x7fb",
    "right to left override": "gpj.\u202eexe",
    "isolate": "a\u2066b\u2069",
    "marks": "\u200e\u200f",
    "arabic letter mark": "a\u061cb",
    "line separator": "a\u2028b\u2029c",
    "newline": "a\nb",
    "carriage return": "ok\rbad",
    "tab": "a\tb",
    "null": "a\0b",
}
VISIBLE = set(map(chr, [*range(0x20), *range(0x7F, 0xA0), 0x61C, 0x200E, 0x200F])) | set(
    map(chr, [*range(0x2028, 0x202F), *range(0x2066, 0x206A)])
)
"""Characters that move, colour or reorder text."""


@pytest.mark.parametrize("text", HOSTILE.values(), ids=list(HOSTILE))
def test_no_character_that_acts_reaches_a_terminal(text):
    assert not VISIBLE & set(safe(text))


def test_harmless_text_is_left_as_it_is():
    text = "void add<float>(float*, int) caf\u00e9 \u4e2d\u6587 \U0001f600 a_b*c"
    assert safe(text) == text


def test_a_character_that_acts_is_written_by_its_number():
    assert safe("a\x1b[1mb\u202ec") == r"a\x1b[1mb\x202ec"


def test_a_missing_label_is_unknown():
    assert [word(None), word(0), word("")] == ["unknown", "0", ""]


def test_a_name_with_a_newline_stays_in_its_row():
    text = table([{"name": "a\nb", "n": 1}, {"name": "c", "n": 22}], NAME)
    assert text.splitlines() == ["Name     N", "------  --", r"a\x0ab   1", "c       22"]


def test_a_table_without_rows_has_its_header():
    assert table([], NAME).split()[:2] == ["Name", "N"]


def test_numbers_that_are_text_are_not_rewritten():
    assert "0010" in table([{"name": "0010", "n": "1e5"}], NAME)
    assert "1e5" in table([{"name": "0010", "n": "1e5"}], NAME)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a|b", r"a\|b"),
        ("<script>x</script>", "&lt;script>x&lt;/script>"),
        ("a & b", "a &amp; b"),
        ("&lt;", "&amp;lt;"),
        ("a\nb", "x0ab"),
    ],
)
def test_markdown_cells_hold_neither_bars_nor_tags(name, shown):
    lines = table([{"name": name, "n": 1}], NAME, markdown=True).splitlines()
    assert len(lines) == 3
    assert shown in lines[2]
    assert "<" not in lines[2]


def test_a_backslash_before_a_bar_does_not_split_a_markdown_cell():
    line = table([{"name": "a\\|b", "n": 1}], NAME, markdown=True).splitlines()[2]
    bars, escaped = 0, False
    for character in line:
        bars += character == "|" and not escaped
        escaped = character == "\\" and not escaped
    assert bars == 3  # the two edges and the one between two cells


@pytest.mark.parametrize(
    "name", ["![x](http://evil.example/p.png)", "[click](javascript:alert(1))", "`code`", "**b**"]
)
def test_markdown_in_a_name_stays_text(name):
    line = table([{"name": name, "n": 1}], NAME, markdown=True).splitlines()[2]
    assert name not in line


def read_back(text):
    return list(csv.reader(io.StringIO(text, newline="")))


@pytest.mark.parametrize(
    "name",
    ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", '=HYPERLINK("http://evil.example")'],
)
def test_a_name_that_is_a_formula_is_made_text(name):
    [_, [cell, _]] = read_back(csv_text([{"name": name, "n": 1}], ["name", "n"]))
    assert cell == f"'{name}"


def test_csv_holds_raw_numbers_and_nothing_for_null():
    rows = [{"name": None, "n": -5, "x": 1}, {"name": "a,b", "n": 1.5, "x": 2}]
    text = csv_text(rows, ["name", "n"])
    assert text == 'name,n\n,-5\n"a,b",1.5\n'


@pytest.mark.parametrize("name", ['say "hi"', "a,b", "a\nb", "a\rb", "a|b", "</script>", "\u4e2d"])
def test_csv_gives_back_the_name_it_was_given(name):
    [_, [cell, _]] = read_back(csv_text([{"name": name, "n": 1}], ["name", "n"]))
    assert cell == name


def test_json_holds_null_and_refuses_what_is_no_number():
    assert json.loads(json_text({"a": None, "b": "\x1b\u202e"})) == {"a": None, "b": "\x1b\u202e"}
    assert "\x1b" not in json_text({"b": "\x1b"})
    with pytest.raises(ValueError, match="JSON"):
        json_text({"a": float("nan")})


def test_a_document_is_flattened_by_path_and_lists_stay_out():
    got = flat({"a": {"b": 1, "c": {"d": None}}, "rows": [{"x": 1}], "e": "f"})
    assert [(row["key"], row["value"]) for row in got] == [("a.b", 1), ("a.c.d", None), ("e", "f")]


def test_indenting_leaves_empty_lines_empty():
    assert indented("a\n\nb") == "  a\n\n  b"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr("nsan.cli.terminal.sys", SimpleNamespace(stdout=Terminal()))
    return monkeypatch


@pytest.mark.usefixtures("terminal")
def test_a_status_is_coloured_in_a_terminal():
    assert coloured("fail") == "\x1b[31mfail\x1b[0m"
    assert coloured("ok") == "\x1b[32mok\x1b[0m"
    assert coloured("missing") == "missing"


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_colour_where_it_is_not_wanted(terminal, name, value):
    terminal.setenv(name, value)
    assert coloured("fail") == "fail"


def test_an_empty_no_color_asks_for_nothing(terminal):
    # no-color.org: "when present and not an empty string"
    terminal.setenv("NO_COLOR", "")
    assert coloured("fail") == "\x1b[31mfail\x1b[0m"


def test_no_colour_in_a_pipe(terminal):
    terminal.setattr("nsan.cli.terminal.sys", SimpleNamespace(stdout=io.StringIO()))
    assert coloured("fail") == "fail"


ROWS = [{"name": 'a"\n[]', "va": "0x10", "n": None}, {"name": "é", "va": None, "n": [1, {"b": 2}]}]


@pytest.mark.parametrize("parts", [[], [[]], [ROWS], [ROWS[:1], [], ROWS[1:]], [[], ROWS * 3]])
def test_json_in_pieces_is_the_json_of_the_whole(parts):
    about = {"schema": 1, "options": {}, "columns": [{"name": "n"}]}
    whole = {**about, "rows": [row for part in parts for row in part]}
    assert "".join(json_pieces(about, parts)) == json.dumps(whole, indent=2) + "\n"


@pytest.mark.parametrize("ends", ["", "\r"])
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_csv_in_pieces_is_the_csv_of_the_whole_and_reads_back(ends, cut):
    rows = [{"name": f"a,b{ends}", "n": 1}, {"name": None, "n": -2}]
    pieces = [*csv_pieces([rows[:cut], rows[cut:]], ["name", "n"], returns=bool(ends))]
    assert "".join(pieces) == csv_text(rows, ["name", "n"])
    read = csv.reader(io.StringIO("".join(pieces), newline=""))
    assert [*read] == [["name", "n"], [f"a,b{ends}", "1"], ["", "-2"]]
