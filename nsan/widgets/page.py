"""The offline copy: one HTML file that holds data, script and style, and asks nobody for anything.

Data is JSON in which no ``<`` stands, so that a name from a trace cannot end the element that holds it;
the page's policy allows the one script and the one style of this file, by their hashes, and nothing else.
"""

from __future__ import annotations

import contextlib
import html
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from nsan.errors import NsanError, OutputExistsError, OutputWriteError, UsageError
from nsan.offline import script_hash
from nsan.text import shortened

_SUFFIXES: Final = (".html", ".htm")

_PAGE: Final = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{bodies}
<noscript><p>{title}: this copy draws with JavaScript, which is switched off here.</p></noscript>
<script type="module">{script}</script>
</body>
</html>
"""

_BODY: Final = """<div id="nsan-{number}"></div>
<script type="application/json" id="nsan-data-{number}">{data}</script>"""

_PAGE_STYLE: Final = (
    "\nhtml{color-scheme:light dark}body{margin:8px;font-family:system-ui,sans-serif}"
)


class PageExistsError(OutputExistsError):
    """A page may not take the place of what is there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        msg = f"{path} exists already. Choose another name, or give force_overwrite=True."
        NsanError.__init__(self, msg)


class PageWriteError(OutputWriteError):
    """A page could not be written; what was at its place is still there."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path, self.reason = path, reason
        msg = f"Cannot write {path}: {reason}. Nothing there was changed. Give another path."
        NsanError.__init__(self, msg)


def _inlined(source: str, tag: str) -> str:
    """Keep text of our own from ending the element that holds it."""
    return source.replace(f"</{tag}", f"<\\/{tag}")


def page(title: str, copies: Iterable[Mapping[str, Any]], script: str, style: str) -> str:
    """Write the page.

    Parameters
    ----------
    title : str
        Title; a text from a trace as a rule.
    copies : iterable of mapping
        What each explorer of the page shows, ready for JSON.
    script : str
        The explorer's module, which has a function ``offline(el, data)``.
    style : str
        The explorer's style.

    Returns
    -------
    str
        HTML, ASCII but for the script and style.
    """
    bodies, starts = [], []
    for number, data in enumerate(copies):
        text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
        bodies.append(_BODY.format(number=number, data=text))
        starts.append(
            f'offline(document.getElementById("nsan-{number}"),'
            f'JSON.parse(document.getElementById("nsan-data-{number}").textContent));'
        )
    code = _inlined(script, "script") + "\n" + "\n".join(starts) + "\n"
    looks = _inlined(style, "style") + _PAGE_STYLE
    policy = (
        f"default-src 'none'; script-src {script_hash(code)}; style-src {script_hash(looks)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return _PAGE.format(
        policy=policy,
        title=html.escape(shortened(title)),
        style=looks,
        bodies="\n".join(bodies),
        script=code,
    )


def sources() -> tuple[str, str]:
    """Read the script and the style of the explorer.

    Returns
    -------
    str, str
        ``explorer.js`` and ``explorer.css`` of this package.
    """
    script, style = (Path(__file__).with_name(f"explorer.{kind}") for kind in ("js", "css"))
    return script.read_text(encoding="utf-8"), style.read_text(encoding="utf-8")


def write_page(path: str | Path, text: str, *, force_overwrite: bool = False) -> Path:
    """Write a page whole, or not at all.

    Parameters
    ----------
    path : str or Path
        Where; ends in ``.html``, so that no trace is ever overwritten.
    text : str
        The page.
    force_overwrite : bool, default False
        Replace a file that is there.

    Returns
    -------
    Path
        Where it is.

    Raises
    ------
    UsageError
        If the name does not end in ``.html``.
    OutputExistsError
        If the file is there and may not be replaced.
    OutputWriteError
        If it cannot be written; what was there stays.
    """
    place = Path(path)
    if place.suffix.lower() not in _SUFFIXES:
        msg = f"{place} is not the name of a web page. Give one that ends in .html."
        raise UsageError(msg)
    if os.path.lexists(place) and not force_overwrite:
        raise PageExistsError(place)
    beside = place.with_name(f".{place.name}.{os.getpid()}.part")
    try:
        beside.write_text(text, encoding="utf-8", newline="\n")
        beside.replace(place)
    except OSError as error:
        raise PageWriteError(place, error.strerror or str(error)) from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
    return place
