"""The static form of a view: figures, pictures and the table of clusters, as HTML and as text.

For a plain script, nbconvert and papermill, where no browser is there to draw. A live view gets it as an
output of its own, for whoever opens the notebook later: JupyterLab shows an error in the place of a view
that has no kernel, and nothing that stands beside it in the same output. Everything is escaped.
"""

from __future__ import annotations

import base64
import html
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from nsan.errors import NsanError
from nsan.text import safe

if TYPE_CHECKING:
    from nsan.widgets.explorer import Explorer

CHARTS: Final = ("migrations_over_time", "address_time_map")
"""Charts of the static form: what the overview and the map of the live view show."""

_MOST_CLUSTERS: Final = 20

_MOST_DRAWN: Final = 2_000_000
"""With more events than this nobody's kernel is kept busy with pictures for later."""

_LIVE_NOTE: Final = (
    "The live view needs a running kernel: run the cell again. If it does not show then either "
    "(&quot;model not found&quot;), ipywidgets and anywidget of the kernel do not match those of the "
    "notebook&#x27;s server: pip install -U &#x27;nsan[lab]&#x27; in both, and reload the page."
)
_SAVED: Final = (
    # Where the live view is, nobody needs its copy.
    "<style>.jp-OutputArea:has(.nsan-explorer) .nsan-saved{{display:none}}</style>"
    '<details class="nsan-saved"><summary>{summary}</summary>{body}</details>'
)


def has_front_end() -> bool:
    """Say whether somebody looks: a notebook in a browser, not a script and not nbconvert.

    Returns
    -------
    bool
        False where there is no kernel, or where its client cannot answer questions, as papermill,
        nbconvert and nbclient.
    """
    try:
        from IPython import get_ipython
    except ModuleNotFoundError:
        return False
    kernel = getattr(get_ipython(), "kernel", None)
    return kernel is not None and bool(getattr(kernel, "_allow_stdin", False))


def bundle(explorers: Sequence[Explorer], live: Callable[[], Any]) -> Any:
    """Give a notebook what it can show.

    Parameters
    ----------
    explorers : sequence of Explorer
        What the view holds.
    live : callable
        Gives the live view's own bundle.

    Returns
    -------
    dict, or (dict, dict)
        With a front end the live view with small text beside it; else text and HTML with pictures.
    """
    if not has_front_end():
        for each in explorers:
            each.ready()
        return {"text/plain": _words(explorers), "text/html": _body(explorers, pictures=True)}
    ours = {"text/plain": _words(explorers), "text/html": f"<p>{_LIVE_NOTE}</p>"}
    _show_saved(explorers)
    shown = live()
    # ipywidgets gives the data alone, anywidget metadata too.
    data, metadata = shown if isinstance(shown, tuple) else (shown, {})
    return {**data, **ours}, metadata


def _words(explorers: Sequence[Explorer]) -> str:
    return "\n\n".join(str(each) for each in explorers)


def _body(explorers: Sequence[Explorer], *, pictures: bool) -> str:
    return "\n".join(_html(each, pictures=pictures) for each in explorers)


def _show_saved(explorers: Sequence[Explorer]) -> None:
    """Show what a notebook keeps, folded; clusters and pictures follow when they are there."""
    from IPython.display import display

    titles = " and ".join(each.config["title"] for each in explorers)
    summary = f"Saved copy of the view of {safe(titles)}"

    def saved(*, pictures: bool) -> dict[str, str]:
        body = f"<p>{_LIVE_NOTE}</p>" + _body(explorers, pictures=pictures)
        page = _SAVED.format(summary=html.escape(summary), body=body)
        return {"text/plain": summary, "text/html": page}

    shown = display(saved(pictures=False), raw=True, display_id=True)  # type: ignore[no-untyped-call]
    if shown is None:
        return

    def complete() -> None:
        for each in explorers:
            each.ready()
        few = all(each.scene.all_events.n_rows <= _MOST_DRAWN for each in explorers)
        shown.update(saved(pictures=few), raw=True)

    threading.Thread(target=complete, daemon=True).start()


def text(config: Mapping[str, Any], clusters: Mapping[str, Any]) -> str:
    """Write a view as text.

    Parameters
    ----------
    config : mapping
        What the browser is told.
    clusters : mapping
        The table of clusters.

    Returns
    -------
    str
        Title, figures, notes and the largest clusters; control characters are visible.
    """
    lines = [safe(config["title"]), "  " + safe(config["subtitle"])]
    for label, value, kind in config["figures"]:
        word = f" ({kind})" if kind not in {"", "recorded"} else ""
        lines.append(f"  {safe(label)}: {safe(value)}{word}")
    lines += [f"  {safe(note)}" for note in config["notes"]]
    return "\n".join([*lines, *_cluster_lines(clusters)])


def _cluster_lines(clusters: Mapping[str, Any]) -> list[str]:
    rows = clusters.get("rows")
    if rows is None:
        return []
    if not rows:
        return ["  " + safe(clusters["empty"])]
    heads = [column["label"] for column in clusters["columns"]]
    shown = [heads, *(row["cells"] for row in rows[:_MOST_CLUSTERS])]
    widths = [max(len(cells[place]) for cells in shown) for place in range(len(heads))]
    lines = [f"  Fault clusters ({clusters['kind']}; {clusters['note']})"]
    for cells in shown:
        padded = [
            cell.rjust(width) if column["align"] == "right" else cell.ljust(width)
            for cell, width, column in zip(cells, widths, clusters["columns"], strict=True)
        ]
        lines.append("    " + "  ".join(padded).rstrip())
    return lines


def _html(explorer: Explorer, *, pictures: bool) -> str:
    config, clusters = explorer.config, explorer.clusters
    parts = [f"<h4>{_escaped(config['title'])}</h4>", f"<p>{_escaped(config['subtitle'])}</p>"]
    parts.append(_figures(config["figures"]))
    parts += [f"<p>{_escaped(note)}</p>" for note in config["notes"]]
    if pictures:
        parts += _pictures(explorer)
    parts.append(_cluster_table(clusters))
    return '<div class="nsan-static">' + "\n".join(part for part in parts if part) + "</div>"


def _escaped(value: Any) -> str:
    return html.escape(safe(value))


def _figures(figures: Sequence[Sequence[str]]) -> str:
    rows = [
        f"<tr><td>{_escaped(label)}</td><td>{_escaped(value)}</td><td>{_escaped(kind)}</td></tr>"
        for label, value, kind in figures
    ]
    return "<table>" + "".join(rows) + "</table>"


def _pictures(explorer: Explorer) -> list[str]:
    """Draw the overview and the map; why one cannot be drawn is said in its place."""
    from nsan.charting import chart
    from nsan.charts.saving import rendered

    dark = explorer.config["theme"] == "dark"
    parts = []
    for name in CHARTS:
        try:
            drawn = chart(explorer.scene.trace, name, theme="dark" if dark else "light")
            picture = base64.b64encode(rendered(drawn, ".svg")).decode()
        except NsanError as error:
            parts.append(f"<p>{_escaped(name)}: {_escaped(error)}</p>")
            continue
        label = _escaped(name.replace("_", " "))
        parts.append(f'<p><img alt="{label}" src="data:image/svg+xml;base64,{picture}"></p>')
    return parts


def _cluster_table(clusters: Mapping[str, Any]) -> str:
    rows = clusters.get("rows")
    if rows is None:
        return ""
    if not rows:
        return f"<p>{_escaped(clusters['empty'])}</p>"
    heads = "".join(f"<th>{_escaped(column['label'])}</th>" for column in clusters["columns"])
    body = "".join(
        "<tr>" + "".join(f"<td>{_escaped(cell)}</td>" for cell in row["cells"]) + "</tr>"
        for row in rows[:_MOST_CLUSTERS]
    )
    note = f"<p>Fault clusters ({_escaped(clusters['kind'])}; {_escaped(clusters['note'])})</p>"
    return f"{note}<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
