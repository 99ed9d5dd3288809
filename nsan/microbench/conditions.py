"""Under what a run was made, in the words that sweeps, comparisons and tables use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nsan.microbench.work import Work


def condition_of(work: Work, about: Mapping[str, Any]) -> dict[str, Any]:
    """Say under what a run was made.

    Parameters
    ----------
    work : Work
        What was asked for.
    about : mapping
        What the program says of its run; may be empty.

    Returns
    -------
    dict
        ``allocator``, ``factor`` (footprint over GPU memory; of a network the peak of its live tensors, so that
        both allocators get the same memory; None: as much as was free), ``prefetch``, ``advice``, ``hint``
        (both in one word), ``pattern`` or ``network``, and ``axes``: every flag of the program with its value.
        What is not known is None.
    """
    axes = about.get("axes")
    axes = dict(axes) if isinstance(axes, Mapping) else {}
    found: dict[str, Any] = {
        "pattern": axes.get("pattern"),
        "network": about.get("network"),
        "allocator": axes.get("allocator"),
        "factor": axes.get("oversubscription_factor"),
        "prefetch": axes.get("prefetch"),
        "advice": axes.get("advice"),
    }
    found |= {key: value for key, value in work.asked.items() if value is not None}
    return {**found, "hint": hint_of(found["prefetch"], found["advice"]), "axes": axes}


def hint_of(prefetch: str | None, advice: str | None) -> str | None:
    """Write what the driver is told in one word; None: not known.

    Parameters
    ----------
    prefetch, advice : str or None
        As the programs name them.

    Returns
    -------
    str or None
        "none", "prefetch:whole", "advice:read-mostly", or both with a plus.

    Examples
    --------
    >>> hint_of("whole", "none"), hint_of("ahead", "read-mostly"), hint_of("none", "none")
    ('prefetch:whole', 'prefetch:ahead+advice:read-mostly', 'none')
    """
    if prefetch is None or advice is None:
        return None
    parts = [("prefetch", prefetch), ("advice", advice)]
    return "+".join(f"{kind}:{value}" for kind, value in parts if value != "none") or "none"
