#!/usr/bin/env python3
"""Why memory moved, and which way, for `nsys stats -r nsan_um_cause_sum`."""

import pathlib
import sys

if not __package__:  # run by nsys, or by its path
    sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))

from nsan.stats_reports import _report
from nsan.stats_reports._causes import causes


class NsanUmCauseSum(_report.UmReport):
    """Migrations by direction and cause."""

    DEFAULT_ROW_LIMIT = -1

    script_name = "nsan_um_cause_sum"
    display_name = "Unified Memory Migrations by Direction and Cause (nsan)"
    usage = f"""{{SCRIPT}}[:process=<id>] -- Unified Memory Migrations by Direction and Cause (nsan)
{_report.FILTERS}
    Output: one row per process, GPU, direction and cause; most bytes first
        Size (%) : Share of all bytes moved
        Size : Bytes moved
        Count : Copies
        Min Size, Max Size : Of a copy
        Migration Time : Time in which at least one of these copies ran (a union)
        Migration Throughput : Size over Migration Time
        Pid : Process
        Device : CUDA ordinal of the GPU in its process; of two GPUs the one that got the bytes
        Direction : HtoD, DtoH or DtoD
        Cause : User prefetch (a call or hint), Page fault (which CUPTI calls coherence), Speculative prefetch
            (the driver's own), Eviction (no room on the GPU), Access counters, Unknown

    The causes are told by their numbers; the labels of nsys differ between its versions.
"""

    columns = (
        _report.Column("Size (%)"),
        _report.Column("Size:mem_B", adds=True),
        _report.Column("Count", adds=True),
        _report.Column("Min Size:mem_B"),
        _report.Column("Max Size:mem_B"),
        _report.Column("Migration Time:dur_ns"),
        _report.Column("Migration Throughput:thru_B"),
        _report.Column("Pid"),
        _report.Column("Device"),
        _report.Column("Direction"),
        _report.Column("Cause"),
    )
    rest_at = 10
    one_of = says = ("migrations",)

    def rows(self) -> _report.Rows:
        """Add up by direction and cause."""
        return causes(self)


if __name__ == "__main__":
    NsanUmCauseSum.Main()
