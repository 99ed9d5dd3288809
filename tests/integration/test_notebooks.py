"""The shipped notebooks: thin and without outputs, and what they show when papermill runs them on the samples."""

from __future__ import annotations

import ast
import json
import re
import sqlite3
from contextlib import closing

import exports as x
import polars as pl
import pytest

from nsan.notebooks import notebook, notebook_folder
from nsan.report.notebook_file import read_notebook
from nsan.report.parameters import parameters_of
from nsan.report.running import execute
from nsan.report.shown import MIME
from nsan.units import format_bytes

SHIPPED = sorted(path.name for path in notebook_folder().glob("*.ipynb"))
SAMPLES = x.REPOSITORY / "sample_data" / "model"
LINE = re.compile(r"[A-Z_]+: (str|int|float|bool|list) = .+  # \S.*")
LOADING = "%load_ext nsan\n"


def source_of(name):
    return json.loads((notebook_folder() / name).read_text())


def code_of(name):
    return [cell for cell in source_of(name)["cells"] if cell["cell_type"] == "code"]


# What is shipped -----------------------------------------------------------------------------------


def test_the_notebooks_are_these():
    assert SHIPPED == [
        "01-explore.ipynb",
        "02-report.ipynb",
        "03-compare.ipynb",
        "04-oversubscription-and-pca.ipynb",
        "05-allocator.ipynb",
        "06-fleet.ipynb",
    ]


@pytest.mark.parametrize("name", SHIPPED)
def test_every_cell_has_an_id_of_its_own(name):
    """That they are thin and hold no output is in ``test_lab.py``."""
    ids = [cell["id"] for cell in source_of(name)["cells"]]
    assert len(set(ids)) == len(ids) > 5


@pytest.mark.parametrize("name", SHIPPED)
def test_one_cell_has_the_parameters_each_with_type_default_and_help(name):
    tagged = [c for c in code_of(name) if "parameters" in c["metadata"].get("tags", [])]
    assert len(tagged) == 1
    lines = "".join(tagged[0]["source"]).splitlines()
    assert [line for line in lines if not LINE.fullmatch(line)] == []
    found = parameters_of(source_of(name), name)
    assert len(found) == len(lines)
    for each in found.values():
        assert type(each.default).__name__ == each.type
        assert each.help


@pytest.mark.parametrize("name", SHIPPED)
def test_a_notebook_sets_no_constant_but_its_parameters(name):
    for cell in code_of(name):
        if "parameters" in cell["metadata"].get("tags", []):
            continue
        tree = ast.parse("".join(cell["source"]).replace(LOADING, ""))
        names = [n for n in ast.walk(tree) if isinstance(n, ast.Name)]
        assert not [n.id for n in names if n.id.isupper() and isinstance(n.ctx, ast.Store)]


# What they show -------------------------------------------------------------------------------------


class Ran:
    """A notebook that has run: what its code cells gave."""

    def __init__(self, name, folder, **parameters):
        made = read_notebook(notebook(name))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NSAN_CACHE_DIR", str(folder / "cache"))
            patch.chdir(folder)
            made = execute(made, parameters, name=name)
        self.outputs = [out for cell in made.cells for out in cell.get("outputs", [])]
        self.blocks = [
            block
            for out in self.outputs
            for block in out.get("data", {}).get(MIME, {}).get("blocks", [])
        ]

    @property
    def kinds(self):
        return [
            out.get("name", out.output_type) if "data" not in out else next(iter(out.data))
            for out in self.outputs
        ]

    def tables(self):
        return [block for block in self.blocks if block["type"] == "Table"]

    def pictures(self):
        drawn = [block["svg"] for block in self.blocks if block["type"] == "Picture"]
        shown = (out.get("data", {}).get("image/svg+xml") for out in self.outputs)
        return [*drawn, *filter(None, shown)]

    def markdown(self):
        return "\n".join(
            out["data"]["text/markdown"]
            for out in self.outputs
            if "text/markdown" in out.get("data", {}) and MIME not in out["data"]
        )


def row_of(table, label):
    (found,) = (row for row in table["rows"] if row[0] == label)
    return list(found)


def ask(run, sql):
    place = SAMPLES / run
    path = f"file:{place / place.name}.sqlite?mode=ro&immutable=1"
    with closing(sqlite3.connect(path, uri=True)) as export:
        return export.execute(sql).fetchall()


def steps_of(run):
    """Start and end of each step."""
    return ask(run, "SELECT start, end FROM NVTX_EVENTS WHERE text = 'step' ORDER BY start")


def moved(run, start, end, *, way=(11, 12)):
    rows = ask(
        run,
        f"SELECT coalesce(sum(bytes), 0) FROM {x.MEMCPY} WHERE copyKind IN {(*way, -1)} "
        f"AND start >= {start} AND start < {end}",
    )
    return rows[0][0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("notebooks")


@pytest.fixture(scope="module")
def compared(folder):
    return Ran("compare", folder, OUTPUT=str(folder / "out"))


@pytest.fixture(scope="module")
def swept(folder):
    return Ran("oversubscription-and-pca", folder)


@pytest.fixture(scope="module")
def held(folder):
    return Ran("allocator", folder)


@pytest.mark.parametrize("name", ["compared", "swept", "held"])
def test_nothing_fails_and_nothing_is_said_on_the_side(name, request):
    ran = request.getfixturevalue(name)
    assert len(ran.outputs) >= 4
    assert not {"error", "stderr", "stdout"} & set(ran.kinds)
    assert not [block for block in ran.blocks if block.get("tone") in {"missing", "warning"}]
    for svg in ran.pictures():
        assert "<svg" in svg
        assert svg.count("<path") > 10


def test_compare_shows_both_sums_and_how_they_changed(compared):
    table = compared.tables()[0]
    assert table["heads"] == ["Figure", "A", "B", "B - A", "Change"]
    for way, name in ((11, "migrations.htod_bytes"), (12, "migrations.dtoh_bytes")):
        a, b = (moved(run, 0, 1 << 60, way=(way,)) for run in ("pca_off", "pca_on"))
        assert b > a > 0
        sums = [format_bytes(a), format_bytes(b), f"+{format_bytes(b - a)}"]
        assert row_of(table, name) == [name, *sums, f"{100 * (b - a) / a:+.1f} %"]
    warm = [moved(run, *steps_of(run)[1], way=(11,)) for run in ("pca_off", "pca_on")]
    assert row_of(table, "step.in_bytes")[1:3] == [format_bytes(size) for size in warm]
    assert table["notes"][-1].startswith("Every figure is the model's")


def test_compare_says_what_the_programs_do_differently(compared):
    said = [p["text"] for b in compared.blocks if b["type"] == "Points" for p in b["points"]]
    counts = [
        ask(run, "SELECT count(*) FROM CUDA_GPU_MEMORY_USAGE_EVENTS WHERE memoryOperationType = 0")
        for run in ("pca_off", "pca_on")
    ]
    (a,), (b,) = counts[0][0], counts[1][0]
    assert f"cudaMallocManaged: {a} calls in A, {b} calls in B" in said


def test_compare_shows_traces_of_two_profilers_without_any_range(folder, tmp_path):
    names = {"TRACE": "um_vector_add_rtx4060l.sqlite", "OTHER": "nvprof_hotspot_v100_1024.log.gz"}
    traces = {key: str(x.REPOSITORY / "sample_data" / name) for key, name in names.items()}
    ran = Ran("compare", folder, OUTPUT=str(tmp_path), **traces)
    said = [block["text"] for block in ran.blocks if block["type"] == "Text"]
    assert any(text.startswith("A and B ran on different GPUs.") for text in said)
    assert any(text.startswith("A and B run different programs") for text in said)
    assert any("time 0 is the first event of each" in text for text in said)
    assert (tmp_path / "compare.html").stat().st_size > 100_000


def test_no_cell_shows_a_path_and_no_key_is_told_where_none_can_be_pressed(compared):
    said = str([out.get("data", {}).get("text/plain", "") for out in compared.outputs])
    assert "Path(" not in said
    assert "Press" not in said
    assert "time 0 is the first `step` of each" in said


@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_written_around_the_cells_is_true_of_any_trace(name):
    """Of the sample a text speaks only as of what is shown by default; of keys, where the view is live."""
    cells = source_of(name)["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    parts = [part for text in texts for part in text.split("\n\n")]
    about = [
        p for p in parts if re.search(r"\b(samples? (is|are)|In the sample|AlexNet|ResNet|OPT-)", p)
    ]
    assert all("By default this" in part for part in about)
    assert not [p for p in parts if re.search(r"Press `|\bdrag\b|lists the keys", p)]


def test_compare_shows_both_views_without_a_front_end_and_writes_their_page(compared, folder):
    static = [
        out["data"]["text/html"]
        for out in compared.outputs
        if MIME not in out.get("data", {"": 0}) and "text/html" in out.get("data", {})
    ]
    assert any("pca_off.sqlite" in text and "pca_on.sqlite" in text for text in static)
    assert (folder / "out" / "compare.html").stat().st_size > 100_000


FACTORS = ("0.8", "1.1", "1.3", "1.5", "2")


def warm(run):
    return steps_of(run)[1:]


def test_the_sweep_shows_both_sides_of_the_allocator(swept):
    """More traffic where memory is exceeded, and no first touch: counted from the traces and their truth."""
    sentences = [
        point["text"]
        for block in swept.blocks
        if block["type"] == "Points"
        for point in block["points"]
    ]
    assert [text.split(":")[0] for text in sentences] == [f"resnet-8, factor {f}" for f in FACTORS]
    assert {
        point["kind"]
        for block in swept.blocks
        if block["type"] == "Points"
        for point in block["points"]
    } == {"modelled"}
    for factor, text in zip(FACTORS[2:], sentences[2:], strict=True):
        off, on = (
            sum(moved(run, *span) for span in warm(run))
            for run in (f"pca_sweep/{kind}-{factor}-none" for kind in ("raw", "caching"))
        )
        assert on > 1.5 * off
        assert f"traffic ({on / off:.3f} times" in text
        assert "fewer fault rows" in text


def test_the_sweep_counts_the_first_touches_that_the_truth_knows(swept):
    text = swept.markdown()
    means = []
    for factor in FACTORS:
        run = f"pca_sweep/raw-{factor}-none"
        batches = pl.read_parquet(SAMPLES / run / "truth" / "batches.parquet")
        first = batches.filter(pl.col("outcome") == "first_touch")["raised_ns"]
        spans = warm(run)
        n = sum(start <= at < end for at in first for start, end in spans)
        means.append(round(n / len(spans)))
    shown = re.findall(r"\| First touches *\| *(\d+) \| *(\d+) \|", text)
    assert shown == [(str(mean), "0") for mean in means]
    assert "Every figure is the model's." in text
    assert "the caching allocator makes" not in text


def test_the_sweep_draws_effect_account_and_what_moved(swept):
    effect, account, moves = swept.pictures()
    for word in ("Fault rows", "First touches", "Traffic, MiB", "Step time, ms", "modelled"):
        assert word in effect
    assert "dead traffic" in account
    assert "cached" in moves


def test_the_allocator_notebook_shows_the_golden_values_of_the_sample(held):
    """As sample_data/snapshots/README.md has them, counted there by plain Python over the pickle."""
    text = (x.REPOSITORY / "sample_data" / "snapshots" / "README.md").read_text()
    entries, allocs = re.search(
        r"([\d ]+) entries: \d+ segment_alloc, ([\d ]+) alloc,", text
    ).groups()
    replay = next(t for t in held.tables() if "Addresses exact" in t["heads"])
    cells = dict(zip(replay["heads"], replay["rows"][0], strict=True))
    assert (cells["Entries"], cells["Allocs"]) == (entries.strip(), allocs)
    assert cells["Addresses exact"] == cells["Allocs"]
    state = next(t for t in held.tables() if "Pool" in t["heads"])
    golden = re.search(r"\| decomfl \|.*", text.partition("## Golden values")[2])[0]
    reserved = int(re.findall(r"\d[\d ]{5,}\d", golden)[0].replace(" ", ""))
    assert state["rows"][0][state["heads"].index("Reserved")] == format_bytes(reserved)


def test_the_allocator_notebook_holds_a_modelled_trace_against_its_truth(held):
    effect = next(t for t in held.tables() if "Dead in" in t["heads"] and len(t["rows"]) == 1)
    cells = dict(zip(effect["heads"], effect["rows"][0], strict=True))
    moves = pl.read_parquet(SAMPLES / "pca_on" / "truth" / "tensor_moves.parquet")
    dead = moves.filter("is_dead").group_by("direction").agg(pl.col("bytes").sum())
    truth = {str(way): format_bytes(size) for way, size in dead.rows()}
    assert (cells["Dead in"], cells["Dead out"]) == (truth["htod"], truth["dtoh"])
    assert effect["notes"] == ["Figures are modelled."]
