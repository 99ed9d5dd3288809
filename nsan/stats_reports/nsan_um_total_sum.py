#!/usr/bin/env python3
"""The totals of Unified Memory by process and GPU, for `nsys stats -r nsan_um_total_sum`."""

import pathlib
import sys

if not __package__:  # run by nsys, or by its path
    sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))

from nsan.stats_reports import _report
from nsan.stats_reports._totals import totals


class NsanUmTotalSum(_report.UmReport):
    """Totals by process and GPU."""

    DEFAULT_ROW_LIMIT = -1

    script_name = "nsan_um_total_sum"
    display_name = "Unified Memory Totals by Process and GPU (nsan)"
    usage = f"""{{SCRIPT}}[:process=<id>] -- Unified Memory Totals by Process and GPU (nsan)
{_report.FILTERS}
    Output: one row per process and GPU
        Pid : Process
        Device : CUDA ordinal of the GPU in its process
        Migrations : Number of copies of managed memory
        HtoD, DtoH, DtoD Migration Size : Bytes moved to the GPU, to the CPU, and from another GPU
        Evicted Size : Part of DtoH, moved to make room
        Migration Time : Time in which at least one of these copies ran (a union)
        Migration Throughput : Bytes of all directions over Migration Time
        GPU Fault Batches : Rows of GPU page faults; each is one batch of the driver
        Lowest-Page Faults : Their recorded counts, which are of the lowest page of each batch only
        CPU Page Faults : They have no GPU: a row of their own where the process used several
        Minimum, Maximum Virtual Address : Of the first bytes of copies, and of faults
        Not Recorded : What nsys was not asked to record, by the switch; such figures are empty, not 0
"""

    columns = (
        _report.Column("Pid"),
        _report.Column("Device"),
        _report.Column("Migrations", adds=True),
        _report.Column("HtoD Migration Size:mem_B", adds=True),
        _report.Column("DtoH Migration Size:mem_B", adds=True),
        _report.Column("DtoD Migration Size:mem_B", adds=True),
        _report.Column("Evicted Size:mem_B", adds=True),
        _report.Column("Migration Time:dur_ns"),
        _report.Column("Migration Throughput:thru_B"),
        _report.Column("GPU Fault Batches", adds=True),
        _report.Column("Lowest-Page Faults", adds=True),
        _report.Column("CPU Page Faults", adds=True),
        _report.Column("Minimum Virtual Address:addr_uint"),
        _report.Column("Maximum Virtual Address:addr_uint"),
        _report.Column("Not Recorded"),
    )

    def rows(self) -> _report.Rows:
        """Add up by process and GPU."""
        return totals(self)


if __name__ == "__main__":
    NsanUmTotalSum.Main()
