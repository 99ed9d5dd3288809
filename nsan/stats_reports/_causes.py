"""Migrations by direction and cause, as :func:`nsan.analysis.traffic.traffic_matrix`."""

from __future__ import annotations

from nsan.stats_reports._export import complete
from nsan.stats_reports._report import (
    Busy,
    Rows,
    UmReport,
    busy_times,
    hottest,
    ordered,
    percent,
)

DIRECTIONS = {11: "HtoD", 12: "DtoH", 13: "DtoD"}
CAUSES = {
    0: "Unknown",
    1: "User prefetch",
    2: "Page fault",
    3: "Speculative prefetch",
    4: "Eviction",
    5: "Access counters",
}
"""As the nsys UI names them, spelt right."""


def cause_word(cause: int) -> str:
    """Name a cause by its number; a number that has no name yet is shown."""
    return CAUSES.get(cause, f"Other ({cause})")


def causes(report: UmReport) -> Rows:
    """Give one row per process, GPU, direction and cause."""
    # A cause that was not recorded is as unknown as cause 0.
    keys = ["pid", "device", "kind", "COALESCE(cause, 0)"]
    whole = "COUNT(bytes) = COUNT(*)"
    found = list(
        report.export.ask(
            f"""
            SELECT {", ".join(keys)}, COUNT(*), {complete("bytes")},
                CASE WHEN {whole} THEN MIN(bytes) END, CASE WHEN {whole} THEN MAX(bytes) END,
                COUNT(start) = COUNT(*) AND COUNT("end") = COUNT(*)
            FROM {report.export.rows("migrations")} GROUP BY 1, 2, 3, 4
            """
        )
    )
    busy = busy_times(report.export, keys)
    sizes = [row[5] for row in found]
    total = None if None in sizes else sum(sizes)
    rows = []
    found.sort(key=lambda row: (*hottest(row[5]), *ordered(*row[:4])))
    for pid, device, kind, cause, n, size, least, most, timed in found:
        ran = busy.get((pid, device, kind, cause), Busy())
        time = ran.ns if timed else None
        measured = (percent(size, total), size, n, least, most, time, ran.rate(size, time))
        rows.append((*measured, pid, device, DIRECTIONS[kind], cause_word(cause)))
    return Rows(rows)
