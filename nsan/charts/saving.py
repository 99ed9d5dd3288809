"""Charts as files: pictures for a paper, and a page that needs no network.

Altair's own HTML runs code that stands in data, and loads scripts from elsewhere. The page here has one
script bundle, a policy that allows nothing from outside, and data that cannot end its script element.
"""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

import altair as alt

from nsan.charts.theme import look
from nsan.errors import (
    ExtraMissingError,
    NsanError,
    OutputExistsError,
    OutputWriteError,
    UsageError,
)
from nsan.offline import script_hash
from nsan.text import safe, shortened

SUFFIXES: Final = (".png", ".svg", ".pdf", ".json", ".html")
"""Formats of a saved chart, by the suffix of the file."""

LARGEST_SCALE: Final = 10.0


class ChartError(NsanError):
    """A chart cannot be drawn; ``reason`` is what the renderer said."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        lines = [line.strip() for line in reason.splitlines()]
        said = next((line for line in lines if line.startswith("Error:")), "".join(lines[:1]))
        super().__init__(
            f"The chart cannot be drawn ({shortened(said.removeprefix('Error: '), 200)}). Its specification "
            "and data can be saved all the same, with a name that ends in .json."
        )


_PAGE: Final = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src {scripts}; \
style-src 'unsafe-inline'; img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>html, body {{ margin: 0; background: {ground}; color: {text}; font-family: sans-serif; }} \
#chart {{ padding: 8px; overflow-x: auto; }}</style>
</head>
<body>
<div id="chart" role="img"></div>
<script>{bundle}</script>
<script type="application/json" id="spec">{spec}</script>
<script>{start}</script>
</body>
</html>
"""

EMBED_OPTIONS: Final = (
    '{ mode: "vega-lite", renderer: "svg", actions: false, ast: true, loader: { http: {} } }'
)
"""What ``vegaEmbed`` is told, as JavaScript.

With ``ast`` Vega interprets its expressions: a page needs no right to make code of text.
"""

_START: Final = f"""
const spec = JSON.parse(document.getElementById("spec").textContent);
const options = {EMBED_OPTIONS};
vegaEmbed("#chart", spec, options).catch((error) => {{
  document.getElementById("chart").textContent = "The chart cannot be drawn: " + error.message;
}});
"""


def save(
    chart: alt.TopLevelMixin, path: str | Path, *, scale: float = 2.0, overwrite: bool = False
) -> Path:
    """Save a chart as a file: a picture, a page of its own, or its specification.

    Parameters
    ----------
    chart : altair chart
        The chart.
    path : str or Path
        The file; its suffix is the format: .png, .svg, .pdf, .json or .html.
    scale : float, default 2.0
        Pixels of a .png for each pixel of the chart.
    overwrite : bool, default False
        Replace a file that is there.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    UsageError
        If the suffix is none of these, or the scale is not above 0 and at most 10.
    OutputExistsError
        If the file exists.
    OutputWriteError
        If it cannot be written; nothing half-written is left.
    ChartError
        If the chart cannot be drawn.
    """
    place = Path(path)
    write = _writer(place.suffix, scale)
    if place.exists() and not overwrite:
        raise OutputExistsError(place)
    data = write(specification(chart))
    beside = place.with_name(f".{place.name}.{os.getpid()}.part")
    try:
        beside.write_bytes(data)
        beside.replace(place)
    except OSError as error:
        raise OutputWriteError(place, error.strerror or str(error)) from error
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
    return place


def rendered(chart: alt.TopLevelMixin, suffix: str, *, scale: float = 2.0) -> bytes:
    """Render a chart in memory, as :func:`save` writes it.

    Parameters
    ----------
    chart : altair chart
        The chart.
    suffix : {".png", ".svg", ".pdf", ".json", ".html"}
        The format.
    scale : float, default 2.0
        Pixels of a .png for each pixel of the chart.

    Returns
    -------
    bytes
        What the file holds.

    Raises
    ------
    UsageError
        If there is no such format.
    ChartError
        If the chart cannot be drawn.
    """
    return _writer(suffix, scale)(specification(chart))


def specification(chart: alt.TopLevelMixin) -> dict[str, Any]:
    """Return the Vega-Lite specification of a chart, with its data.

    Parameters
    ----------
    chart : altair chart
        The chart.

    Returns
    -------
    dict
        Plain containers; data stand in ``datasets``, whatever data transformer is set.
    """
    # A transformer that a user has set may write files or refer to a server.
    with alt.data_transformers.enable("default", max_rows=5000):
        spec: dict[str, Any] = chart.to_dict()
    return spec


def jpeg_of(svg: str, *, scale: float = 1.0, quality: int = 75) -> bytes:
    """Draw a picture of a chart in pixels, small rather than sharp.

    Parameters
    ----------
    svg : str
        What :func:`rendered` gave for ".svg".
    scale : float, default 1.0
        Pixels for each pixel of the picture.
    quality : int, default 75
        Of 100.

    Returns
    -------
    bytes
        A JPEG.

    Raises
    ------
    ChartError
        If it cannot be drawn.
    """
    # No chart of nsan's has a picture within it; one that has could lead the renderer elsewhere.
    alone = re.sub(r"<image\b[^>]*>", "", svg)
    try:
        return bytes(_vl_convert().svg_to_jpeg(alone, scale=scale, quality=quality))
    except Exception as error:  # What it raises is not declared.
        raise ChartError(str(error)) from error


def check_format(suffix: str, scale: float) -> None:
    """Refuse a format that does not exist, or a scale that makes no sense.

    Parameters
    ----------
    suffix : str
        Suffix of the file, with its dot.
    scale : float
        Pixels of a .png for each pixel of the chart.

    Raises
    ------
    UsageError
        If it can be known before anything is drawn that nothing can be written.
    """
    if not 0 < scale <= LARGEST_SCALE:
        msg = f"A scale of {scale}: give one above 0, and at most {LARGEST_SCALE:g}."
        raise UsageError(msg)
    if suffix.lower() not in SUFFIXES:
        msg = f"{suffix or 'No suffix'} is no format of a chart. There are: {', '.join(SUFFIXES)}."
        raise UsageError(msg)


def _writer(suffix: str, scale: float) -> Callable[[dict[str, Any]], bytes]:
    """Choose how a format is written."""
    check_format(suffix, scale)
    writers: dict[str, Callable[[dict[str, Any]], bytes]] = {
        ".json": lambda spec: (json.dumps(spec, indent=1) + "\n").encode(),
        ".html": lambda spec: page(spec).encode(),
        ".png": lambda spec: bytes(_convert("png", spec, scale=scale)),
        ".svg": lambda spec: str(_convert("svg", spec)).encode(),
        ".pdf": lambda spec: bytes(_convert("pdf", spec)),
    }
    return writers[suffix.lower()]


def _version() -> str:
    """Return the version of Vega-Lite that Altair writes, as vl-convert names it."""
    return ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])


def _convert(kind: str, spec: dict[str, Any], **more: float) -> Any:
    """Render with vl-convert, which has no network to go to."""
    convert = getattr(_vl_convert(), f"vegalite_to_{kind}")
    try:
        return convert(spec, vl_version=_version(), allowed_base_urls=[], **more)
    except Exception as error:  # What it raises is not declared.
        raise ChartError(str(error)) from error


def _vl_convert() -> Any:
    try:
        import vl_convert
    except ImportError as error:
        raise ExtraMissingError("Saving a chart", "vl-convert-python", "report") from error
    return vl_convert


@cache
def bundle() -> str:
    """Give the script that draws charts in a page, which has ``vegaEmbed`` then.

    Returns
    -------
    str
        JavaScript that may stand in a script element.
    """
    # "</script" inside a script would end it; in the bundle it can only stand in a text.
    text = str(_vl_convert().javascript_bundle(vl_version=_version()))
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def page(spec: dict[str, Any]) -> str:
    """Write a page that shows a chart and loads nothing.

    Parameters
    ----------
    spec : dict
        A Vega-Lite specification with its data.

    Returns
    -------
    str
        HTML. Text of the data stays text.

    Raises
    ------
    ChartError
        If the chart cannot be drawn.
    """
    _convert("svg", spec)  # A browser draws what this draws; what it cannot is an error now.
    ground = spec.get("config", {}).get("background", look("light").ground)
    dark = ground == look("dark").ground
    return _PAGE.format(
        title=html.escape(safe(_title(spec))),
        ground=html.escape(str(ground), quote=True),
        text=look("dark" if dark else "light").text,
        scripts=f"{script_hash(bundle())} {script_hash(_START)}",
        bundle=bundle(),
        start=_START,
        # In a script element only "<" can begin an end tag or a comment.
        spec=json.dumps(spec).replace("<", "\\u003c"),
    )


def _title(spec: dict[str, Any]) -> str:
    title = spec.get("title", "nsan")
    text = title.get("text", "nsan") if isinstance(title, dict) else title
    return " ".join(text) if isinstance(text, list) else str(text)
