#!/usr/bin/env python3
"""Where in memory Unified Memory is busiest, for `nsys stats -r nsan_um_sum`."""

from __future__ import annotations

import pathlib
import sys

if not __package__:  # run by nsys, or by its path
    sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))

from nsan.stats_reports import _report
from nsan.stats_reports._ranges import ranges


class NsanUmSum(_report.UmReport):
    """Traffic and faults by range of addresses."""

    script_name = "nsan_um_sum"
    display_name = "Unified Memory by Address Range (nsan)"
    usage = f"""{{SCRIPT}}[:rows=<limit>][:by=range|block][:process=<id>] -- Unified Memory by Address Range (nsan)
{_report.FILTERS}
        by=block - One row per VA block (2 MiB). Default is range: neighbouring blocks that moved the same bytes
            each way are one row.

    Output: one row per range, process and GPU; most bytes moved first
        Virtual Address : Start of the range, at a border of 2 MiB
        Range Size : Its size, a multiple of 2 MiB
        Pid : Process
        Device : CUDA ordinal of the GPU in its process
        HtoD, DtoH, DtoD Migration Size : Bytes moved to the GPU, to the CPU, and from another GPU
        Evicted Size : Part of DtoH, moved to make room
        Migrations : Number of copies of managed memory
        Migration Time : Time in which at least one of these copies ran (a union)
        Migration Throughput : Bytes of all directions over Migration Time
        GPU Fault Batches : Rows of GPU page faults, batches of the driver, whose lowest page is here. Pages of
            a batch in other ranges have no row: see the bytes for those
        Lowest-Page Faults : Their recorded counts, which are of the lowest page only
        CPU Page Faults : In a row without a GPU where several GPUs use the block
    The last row adds up the ranges that are not shown.
"""

    _arg_opts = ([["by"], {"type": str, "help": "range or block", "default": "range"}],)

    columns = (
        _report.Column("Virtual Address:addr_uint"),
        _report.Column("Range Size:mem_B", adds=True),
        _report.Column("Pid"),
        _report.Column("Device"),
        _report.Column("HtoD Migration Size:mem_B", adds=True),
        _report.Column("DtoH Migration Size:mem_B", adds=True),
        _report.Column("DtoD Migration Size:mem_B", adds=True),
        _report.Column("Evicted Size:mem_B", adds=True),
        _report.Column("Migrations", adds=True),
        _report.Column("Migration Time:dur_ns"),
        _report.Column("Migration Throughput:thru_B"),
        _report.Column("GPU Fault Batches", adds=True),
        _report.Column("Lowest-Page Faults", adds=True),
        _report.Column("CPU Page Faults", adds=True),
    )

    def setup(self) -> str | None:
        """Check what rows stand for."""
        message = super().setup()
        if message is None and self.parsed_args.by not in {"range", "block"}:
            raise self.Error_ArgumentError("nsan_um_sum: by= takes range or block.")
        return message

    def rows(self) -> _report.Rows:
        """Add up by range of addresses."""
        return ranges(self, merge=self.parsed_args.by == "range")


if __name__ == "__main__":
    NsanUmSum.Main()
