"""How a chart shows in a notebook: without a network, with or without somebody who looks on.

altair's own form loads scripts from outside, and is of a version that JupyterLab 4 does not know.
"""

from __future__ import annotations

from typing import Any, Final

import altair as alt

_EMBEDDED: Final = {
    "actions": {"export": True, "source": False, "compiled": False, "editor": False}
}
"""What the menu of a chart offers: nothing that goes outside."""


def shown(chart: alt.TopLevelMixin, *, is_live: bool) -> Any:
    """Give a chart the form that shows where a notebook runs.

    Parameters
    ----------
    chart : altair chart
        Any chart, nsan's or a user's own.
    is_live : bool
        Whether there is a front end that draws widgets; if not, the form is a picture (SVG).

    Returns
    -------
    dict or tuple
        What IPython shows: contents by type, and perhaps notes on them. Whoever has chosen a renderer
        of altair gets that one's. Neither the renderer nor the limit of rows is changed.
    """
    if alt.renderers.active != "default":
        return chart._repr_mimebundle_()
    chosen = (
        alt.renderers.enable("jupyter", offline=True, embed_options=_EMBEDDED)
        if is_live
        else alt.renderers.enable("svg")
    )
    with chosen:
        return chart._repr_mimebundle_()
