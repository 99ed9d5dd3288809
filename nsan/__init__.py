"""nsan: why a CUDA Unified Memory program is slow, where, and what would help.

Public names resolve on first use, so that ``import nsan`` pulls in no third-party library.

Examples
--------
>>> import nsan
>>> nsan.__version__.count(".")
2
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsan.advising import advise
    from nsan.analysing import analyse
    from nsan.charting import chart
    from nsan.comparing.document import compare
    from nsan.contract import summary
    from nsan.fleet.corpus import Corpus, open_corpus
    from nsan.fleet.importing import import_fleet
    from nsan.info import TraceInfo
    from nsan.joined import Joined, join
    from nsan.opening import import_trace, open_snapshot, open_trace
    from nsan.snapshot import Snapshot
    from nsan.trace import Trace
    from nsan.widgets.compare import compare_view
    from nsan.widgets.explorer import explore

__version__ = "0.1.0"

__all__ = [
    "Corpus",
    "Joined",
    "Snapshot",
    "Trace",
    "TraceInfo",
    "__version__",
    "advise",
    "analyse",
    "chart",
    "compare",
    "compare_view",
    "explore",
    "import_fleet",
    "import_trace",
    "join",
    "open_corpus",
    "open_snapshot",
    "open_trace",
    "summary",
]

_HOMES = {
    "Corpus": "nsan.fleet.corpus",
    "Joined": "nsan.joined",
    "Snapshot": "nsan.snapshot",
    "Trace": "nsan.trace",
    "TraceInfo": "nsan.info",
    "advise": "nsan.advising",
    "analyse": "nsan.analysing",
    "chart": "nsan.charting",
    "compare": "nsan.comparing.document",
    "compare_view": "nsan.widgets.compare",
    "explore": "nsan.widgets.explorer",
    "import_fleet": "nsan.fleet.importing",
    "import_trace": "nsan.opening",
    "join": "nsan.joined",
    "load_ipython_extension": "nsan.cli.magics",
    "open_corpus": "nsan.fleet.corpus",
    "open_snapshot": "nsan.opening",
    "open_trace": "nsan.opening",
    "summary": "nsan.contract",
    "unload_ipython_extension": "nsan.cli.magics",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        msg = f"module 'nsan' has no attribute {name!r}"
        raise AttributeError(msg)
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
