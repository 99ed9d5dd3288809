#!/usr/bin/env python3
"""Which allocations of managed memory fault and move, for `nsys stats -r nsan_um_alloc_sum`."""

import pathlib
import sys

if not __package__:  # run by nsys, or by its path
    sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))

from nsan.stats_reports import _report
from nsan.stats_reports._allocations import by_allocation


class NsanUmAllocSum(_report.UmReport):
    """Traffic and faults by allocation."""

    script_name = "nsan_um_alloc_sum"
    display_name = "Unified Memory by Allocation (nsan)"
    usage = f"""{{SCRIPT}}[:rows=<limit>][:process=<id>] -- Unified Memory by Allocation (nsan)
{_report.FILTERS}
    Output: one row per allocation of managed memory; most bytes moved first
        Pid : Process
        Allocation : Name of the variable where nsys has one, else address and size
        Virtual Address : First byte
        Size : Bytes allocated
        Basis : allocation (recorded), guessed (no allocations were recorded: a run of VA blocks in which
            something happened) or unattributed (in no allocation that was there at that time)
        HtoD, DtoH, DtoD Migration Size : Bytes moved to a GPU, to the CPU, and from one GPU to another
        Evicted Size : Moved to make room on a GPU
        Faulted Size : Came to a GPU because their pages faulted
        Migrations : Copies that concern it; one over two allocations counts in both
        GPU Fault Batches : Rows of GPU page faults, batches of the driver, whose lowest page is in it
        Lowest-Page Faults : Their recorded counts, which are of the lowest page only
        CPU Page Faults : In it

    An allocation holds its addresses from its call to its release; addresses are used again. Bytes and faults
    add up to all: the last rows are the allocations that are not shown, and what lies in none.
    Record allocations with `nsys profile --cuda-memory-usage=true`.
"""

    columns = (
        _report.Column("Pid"),
        _report.Column("Allocation"),
        _report.Column("Virtual Address:addr_uint"),
        _report.Column("Size:mem_B", adds=True),
        _report.Column("Basis"),
        _report.Column("HtoD Migration Size:mem_B", adds=True),
        _report.Column("DtoH Migration Size:mem_B", adds=True),
        _report.Column("DtoD Migration Size:mem_B", adds=True),
        _report.Column("Evicted Size:mem_B", adds=True),
        _report.Column("Faulted Size:mem_B", adds=True),
        _report.Column("Migrations", adds=True),
        _report.Column("GPU Fault Batches", adds=True),
        _report.Column("Lowest-Page Faults", adds=True),
        _report.Column("CPU Page Faults", adds=True),
    )
    rest_at = 1
    says = ("migrations", "gpu_faults", "cpu_faults", "memory_events")

    def rows(self) -> _report.Rows:
        """Add up by allocation."""
        return by_allocation(self)


if __name__ == "__main__":
    NsanUmAllocSum.Main()
