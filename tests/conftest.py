from __future__ import annotations

import importlib.util
import itertools
import os

import exports
import hypothesis
import pytest
from vendor import installed_versions

import nsan

SOAK = os.environ.get("NSAN_SOAK") == "1"
"""`make soak`: large counts. `make test`: small counts, fixed seeds."""

hypothesis.settings.register_profile(
    "test", max_examples=25, deadline=None, derandomize=True, print_blob=True
)
hypothesis.settings.register_profile("soak", max_examples=1000, deadline=None, print_blob=True)
hypothesis.settings.load_profile("soak" if SOAK else "test")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """No test reads or writes the user's cache."""
    monkeypatch.setenv("NSAN_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def real(tmp_path):
    """Unpack a real export by name."""
    return lambda name: exports.unpack(name, tmp_path)


@pytest.fixture
def built(tmp_path):
    """Write exports that a test has put together, each to a file of its own."""
    numbers = itertools.count()
    return lambda export: export.write(tmp_path / f"built-{next(numbers)}.sqlite")


@pytest.fixture
def trace_of(built):
    """Open an export that a test has put together."""
    return lambda export: nsan.open_trace(built(export))


@pytest.fixture
def summary_of(built):
    """Summarise an export that a test has put together."""
    return lambda export: nsan.summary(built(export))


def pytest_runtest_setup(item):
    """Where a real nsys is promised (CI), a test that would skip for want of it fails."""
    promised = os.environ.get("NSAN_REQUIRE_NSYS") == "1"
    if promised and item.get_closest_marker("nsys") and not installed_versions():
        pytest.fail("NSAN_REQUIRE_NSYS=1, but no nsys is installed", pytrace=False)


def pytest_terminal_summary(terminalreporter):
    """Print the statistics that tests leave behind, which must be read even where all is well."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for name, text in report.user_properties:
                if name == "statistics":
                    terminalreporter.section(report.nodeid)
                    terminalreporter.line(text)


def hide_package(monkeypatch, hidden):
    """Make a package look not installed to whoever asks for its spec."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == hidden else found(name, *a)
    )
