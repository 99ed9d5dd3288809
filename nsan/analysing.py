"""One way to run any analysis on a trace: by name, with options, a user's own like nsan's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsan.analysis.catalog import Analysis, find
from nsan.errors import UsageError
from nsan.plugins import own_analyses

if TYPE_CHECKING:
    import polars as pl

    from nsan.trace import Trace


def analyse(
    trace: Trace,
    name: str,
    *,
    options: Mapping[str, Any] | None = None,
    plugins: Iterable[str | Path] = (),
) -> pl.LazyFrame:
    """Run an analysis on a trace.

    Parameters
    ----------
    trace : Trace
        A whole trace, or what :meth:`nsan.Trace.filter` left of it.
    name : str
        Name of the analysis, as listed by ``nsan analyse --list``.
    options : mapping, optional
        Values for its options.
    plugins : iterable of str or Path
        Python files with analyses of your own.

    Returns
    -------
    LazyFrame
        The result; nothing is computed before it is collected.

    Raises
    ------
    NsanError
        If there is no such analysis or option, or a plug-in cannot be used.

    Examples
    --------
    >>> import nsan
    >>> trace = nsan.open_trace("sample_data/um_vector_add_rtx4060l.sqlite")  # doctest: +SKIP
    >>> nsan.analyse(trace, "batches").collect().height  # doctest: +SKIP
    12
    """
    return run_analysis(trace, find(name, own_analyses(plugins)), options)


def run_analysis(
    trace: Trace, analysis: Analysis, options: Mapping[str, Any] | None = None
) -> pl.LazyFrame:
    """Run an analysis that was found already; see :func:`analyse`."""
    if analysis.whole and trace.is_filtered:
        msg = (
            f"{analysis.name} needs the whole capture: what a filter leaves out would look lost. "
            "Ask without filters."
        )
        raise UsageError(msg)
    return analysis.run({table: getattr(trace, table) for table in analysis.reads}, options)


def parse_options(analysis: Analysis, texts: Iterable[str]) -> dict[str, Any]:
    """Read options written as ``NAME=VALUE``; the default says what type a value is of.

    Parameters
    ----------
    analysis : Analysis
        Whose options.
    texts : iterable of str
        One per option.

    Returns
    -------
    dict
        Values by name.

    Raises
    ------
    UsageError
        If a text is no option of the analysis.
    """
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or name not in analysis.options:
            known = ", ".join(f"{key}={_written(each)}" for key, each in analysis.options.items())
            msg = f"{text!r} sets no option of {analysis.name}. Options and defaults: {known or 'none'}."
            raise UsageError(msg)
        found[name] = _parsed(analysis, name, value.strip())
    return found


def _written(value: object) -> str:
    return "" if value is None else str(value)


def _parsed(analysis: Analysis, name: str, text: str) -> Any:
    default = analysis.options[name]
    try:
        if isinstance(default, bool):
            return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[
                text.lower()
            ]
        if isinstance(default, int):
            return int(text.replace("_", ""))
        if isinstance(default, float):
            return float(text)
    except (ValueError, KeyError) as error:
        kind = {bool: "true or false", int: "a whole number", float: "a number"}[type(default)]
        msg = f"{name}={text!r}: {name} of {analysis.name} is {kind} (default {default})."
        raise UsageError(msg) from error
    return text
