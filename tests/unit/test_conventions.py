from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from functools import cache
from pathlib import Path

import pytest

import nsan

ROOT = Path(nsan.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
CUDA_FILES = sorted(
    path
    for path in (ROOT / "microbench").rglob("*.*")
    if path.suffix in {".cu", ".cuh", ".hpp", ".sh"}
)
MAX_LINES = 450
MAX_PARAMETERS = 6


def modules():
    found = pkgutil.walk_packages([str(ROOT)], "nsan.")
    return ["nsan", *(m.name for m in found if not m.name.endswith("__main__"))]


def public_functions():
    """Public functions and methods by full name, where they are defined."""
    for name in modules():
        module = importlib.import_module(name)
        for key, thing in vars(module).items():
            if key.startswith("_") or getattr(thing, "__module__", None) != name:
                continue
            if inspect.isfunction(thing):
                yield f"{name}.{key}", thing
            elif inspect.isclass(thing):
                for method, function in vars(thing).items():
                    plain = inspect.unwrap(getattr(function, "__func__", function))
                    if not method.startswith("_") and inspect.isfunction(plain):
                        yield f"{name}.{key}.{method}", plain


def public_classes():
    for name in modules():
        for key, thing in vars(importlib.import_module(name)).items():
            if inspect.isclass(thing) and thing.__module__ == name and not key.startswith("_"):
                yield f"{name}.{key}", thing


FUNCTIONS = dict(public_functions())
CLASSES = dict(public_classes())
TOOLS = ("intervals", "segments", "nearest", "result", "catalog", "faults", "migrations", "health")
"""Modules of analyses whose every function is for others to build on."""
ANALYSES = {
    name: function
    for name, function in FUNCTIONS.items()
    if hasattr(function, "__nsan_analysis__")
    or any(name.startswith(f"nsan.analysis.{tool}.") for tool in TOOLS)
}


def parameters(function):
    found = inspect.signature(function).parameters.values()
    return [p for p in found if p.name not in {"self", "cls"}]


@cache
def nodes_of(path):
    """Statements and expressions of a file that the checks below look at."""
    kept = (ast.Import, ast.ImportFrom, ast.Call)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, kept)]


def imported(path):
    """Full names of what a file imports, at the top and inside functions."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name, places):
    return any(name == place or name.startswith(f"{place}.") for place in places)


def test_the_walk_finds_the_package():
    assert len(FUNCTIONS) > 50
    assert "nsan.trace.Trace.filter" in FUNCTIONS
    assert "nsan.analysis.intervals.union" in ANALYSES


@pytest.mark.parametrize("name", modules())
def test_a_module_says_what_it_is(name):
    assert (importlib.import_module(name).__doc__ or "").strip()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_says_what_it_does(name):
    doc = inspect.getdoc(FUNCTIONS[name]) or ""
    assert doc.strip(), "no docstring"
    assert doc.strip().splitlines()[0].endswith("."), "the first line is no sentence"


@pytest.mark.parametrize("name", CLASSES)
def test_a_public_class_says_what_it_is(name):
    # A dataclass without a docstring gets its signature as one.
    doc = CLASSES[name].__doc__ or ""
    assert doc.strip()
    assert not doc.startswith(f"{CLASSES[name].__name__}(")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_has_few_parameters_and_no_positional_switch(name):
    found = parameters(FUNCTIONS[name])
    about = getattr(FUNCTIONS[name], "__nsan_analysis__", None)
    # The tables that an analysis reads are its parameters; they are as many as it needs.
    assert len(found) - (len(about.reads) if about else 0) <= MAX_PARAMETERS
    switches = [
        p.name
        for p in found
        if p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD}
        and (isinstance(p.default, bool) or p.annotation in {"bool", bool})
    ]
    assert not switches
    assert not [p.name for p in found if p.kind is p.VAR_KEYWORD]


@pytest.mark.parametrize("name", ANALYSES)
def test_an_analysis_documents_each_parameter_and_its_result(name):
    function, doc = ANALYSES[name], inspect.getdoc(ANALYSES[name]) or ""
    if not parameters(function):
        return
    assert re.search(r"^Parameters\n-{10}$", doc, re.MULTILINE)
    assert re.search(r"^Returns\n-{7}$", doc, re.MULTILINE)
    section = doc.partition("Parameters\n----------\n")[2].partition("Returns\n-------")[0]
    documented = re.findall(r"^\*?(\w[\w, ]*) : \S", section, re.MULTILINE)
    names = {part.strip() for line in documented for part in line.split(",")}
    assert {p.name for p in parameters(function)} == names


@pytest.mark.parametrize("name", ANALYSES)
def test_an_analysis_takes_frames_first_and_the_rest_by_name(name):
    kinds = [p.kind for p in parameters(ANALYSES[name])]
    assert kinds == sorted(kinds)
    frames = [p for p in parameters(ANALYSES[name]) if "Frame" in str(p.annotation)]
    assert all(p.kind in {p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL} for p in frames)


@cache
def files_of(part):
    return [path for path in FILES if path.relative_to(ROOT).parts[0] == part]


def files_outside(*parts):
    theirs = {path for part in parts for path in files_of(part)}
    return [path for path in FILES if path not in theirs]


ANALYSIS_NEVER = (
    "nsan.io",
    "nsan.model",
    "nsan.trace",
    "nsan.opening",
    "nsan.totals",
    "nsan.cli",
    "nsan.charts",
    "nsan.widgets",
    "nsan.report",
    "sqlalchemy",
    "sqlite3",
    "adbc_driver_sqlite",
    "altair",
    "pathlib",
)
LEAVES = ("errors.py", "units.py", "schema.py", "info.py", "uvm", "torch_alloc")
"""What everything else may build on."""
LEAVES_NEVER = ("nsan.io", "nsan.trace", "nsan.analysis", "nsan.cli", "nsan.opening", "nsan.totals")
IO_NEVER = ("nsan.analysis", "nsan.cli", "nsan.totals", "nsan.opening", "nsan.contract")
DATABASES = ("sqlalchemy", "sqlite3", "adbc_driver_sqlite", "adbc_driver_manager", "connectorx")


def breaches(paths, never):
    return [
        f"{path.relative_to(ROOT)}: {name}"
        for path in paths
        for name in imported(path)
        if within(name, never)
    ]


def test_analysis_sees_no_path_no_database_and_no_trace():
    assert len(files_of("analysis")) > 3
    assert breaches(files_of("analysis"), ANALYSIS_NEVER) == []


def test_the_leaves_import_nothing_above_them():
    paths = [path for leaf in LEAVES for path in files_of(leaf)]
    assert len(paths) >= len(LEAVES)
    assert breaches(paths, LEAVES_NEVER) == []


def test_readers_import_no_analysis_and_no_command():
    assert breaches(files_of("io"), IO_NEVER) == []


MICROBENCH_NEVER = ("nsan.cli", "nsan.charts", "nsan.widgets", "nsan.report", "nsan.analysis")


def test_the_microbenchmark_makes_traces_and_draws_nothing():
    assert breaches(files_of("microbench"), MICROBENCH_NEVER) == []
    assert breaches(files_outside("microbench", "cli"), ("nsan.microbench",)) == []


def test_only_the_command_line_imports_the_command_line():
    # The package itself only names what resolves on first use.
    others = files_outside("cli", "__init__.py", "__main__.py")
    assert breaches(others, ("nsan.cli",)) == []


CHARTS_NEVER = (
    "nsan.io",
    "nsan.model",
    "nsan.trace",
    "nsan.opening",
    "nsan.analysing",
    "nsan.widgets",
    "nsan.cli",
    "ipywidgets",
    "anywidget",
)


def calls(path):
    """Names of the methods that a file calls."""
    called = (node.func for node in nodes_of(path) if isinstance(node, ast.Call))
    return {func.attr for func in called if isinstance(func, ast.Attribute)}


def test_charts_draw_frames_and_see_nothing_else():
    assert len(files_of("charts")) > 3
    assert breaches(files_of("charts"), CHARTS_NEVER) == []


def test_charts_never_group_or_join():
    grouping = {"group_by", "group_by_dynamic", "join_asof", "join_where", "agg", "pivot"}
    found = {path.name: calls(path) & grouping for path in files_of("charts")}
    assert {name: each for name, each in found.items() if each} == {}


@pytest.mark.parametrize(
    ("library", "home"),
    [
        ("altair", "charts"),
        ("vl_convert", "charts"),
        ("ipywidgets", "widgets"),
        ("anywidget", "widgets"),
        ("papermill", "report"),
        ("nbconvert", "report"),
        ("nbformat", "report"),
    ],
)
def test_a_library_of_views_is_imported_in_one_place(library, home):
    assert breaches(files_outside(home), (library,)) == []


def test_databases_are_read_in_io_only():
    assert breaches(files_outside("io"), DATABASES) == []


def test_the_check_of_imports_can_fail(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from nsan.io import store\n    import sqlalchemy.sql\n")
    assert [name for name in imported(bad) if within(name, ANALYSIS_NEVER)] == [
        "nsan.io.store",
        "sqlalchemy.sql",
    ]


@pytest.mark.parametrize(
    "path", [*FILES, *CUDA_FILES], ids=lambda path: str(path.relative_to(ROOT))
)
def test_a_module_is_short_enough_to_read(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_a_manifest_is_checked_for_every_table_and_every_total(built):
    """The manifest names both without a frame library; they must stay those of the modules."""
    import exports as x

    import nsan
    from nsan.io.manifest import TABLE_NAMES, TOTALS_KEYS
    from nsan.schema import TABLES
    from nsan.totals import totals

    trace = nsan.open_trace(built(x.Export().add(x.KERNEL, x.kernel(0, 1))))
    assert tuple(TABLES) == TABLE_NAMES
    assert set(TOTALS_KEYS) == totals(trace).keys()
