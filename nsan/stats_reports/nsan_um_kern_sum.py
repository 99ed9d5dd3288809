#!/usr/bin/env python3
"""Which kernels fault and move memory, for `nsys stats -r nsan_um_kern_sum`."""

import pathlib
import sys

if not __package__:  # run by nsys, or by its path
    sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))

from nsan.stats_reports import _report
from nsan.stats_reports._kernels import by_kernel


class NsanUmKernSum(_report.UmReport):
    """Faults and traffic by kernel."""

    script_name = "nsan_um_kern_sum"
    display_name = "Unified Memory by Kernel (nsan)"
    usage = f"""{{SCRIPT}}[:rows=<limit>][:process=<id>] -- Unified Memory by Kernel (nsan)
{_report.FILTERS}
    Output: one row per name of GPU work, process and GPU; longest exposed time first
        Pid : Process
        Device : CUDA ordinal of the GPU in its process
        Work : kernel, graph, copy or memset; or user_prefetch (copies that prefetch calls asked for), ambiguous
            (several kernels ran) or unattributed (nothing ran)
        Name : Of the kernel
        Instances : How many ran
        Time : Time in which at least one of them ran (a union)
        Exposed Time : Part of it in which a fault of its GPU waited: at most this much of it is stall
        GPU Fault Batches : Rows of GPU page faults, batches of the driver, raised while it ran
        Lowest-Page Faults : Their recorded counts, which are of the lowest page of each batch only
        Faulted Size : Bytes that came to the GPU because their pages faulted
        Prefetched Size : Bytes that the driver's prefetcher brought with them
        To GPU Size : All bytes that came to the GPU, from the CPU or another GPU
        Evicted Size : Bytes moved to the CPU to make room

    Rows of Unified Memory name no kernel. They belong to what ran from their start to their end, on the clock
    of faults (the times of kernels are moved by up to 100 us where rows lie just before or after work). Batches
    and bytes add up to all: the last rows are the kernels that are not shown, and the remainders of each GPU.
"""

    columns = (
        _report.Column("Pid"),
        _report.Column("Device"),
        _report.Column("Work"),
        _report.Column("Name"),
        _report.Column("Instances", adds=True),
        _report.Column("Time:dur_ns"),
        _report.Column("Exposed Time:dur_ns"),
        _report.Column("GPU Fault Batches", adds=True),
        _report.Column("Lowest-Page Faults", adds=True),
        _report.Column("Faulted Size:mem_B", adds=True),
        _report.Column("Prefetched Size:mem_B", adds=True),
        _report.Column("To GPU Size:mem_B", adds=True),
        _report.Column("Evicted Size:mem_B", adds=True),
    )
    rest_at = 3
    one_of = ("gpu_faults", "migrations")
    says = ("gpu_faults", "migrations")

    def rows(self) -> _report.Rows:
        """Lay faults and copies to kernels."""
        return by_kernel(self)


if __name__ == "__main__":
    NsanUmKernSum.Main()
