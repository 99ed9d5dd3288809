#!/usr/bin/env python3
"""What was evicted from GPUs and came back, for `nsys stats -r nsan_um_refault_sum`."""

from __future__ import annotations

import pathlib
import sys

if not __package__:  # run by nsys, or by its path
    sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))

from nsan.stats_reports import _report
from nsan.stats_reports._refaults import has_evictions, refaults


class NsanUmRefaultSum(_report.UmReport):
    """Evictions and refaults by VA block."""

    script_name = "nsan_um_refault_sum"
    display_name = "Unified Memory Evictions and Refaults by VA Block (nsan)"
    usage = f"""{{SCRIPT}}[:rows=<limit>][:premature=<ns>][:process=<id>] -- Unified Memory Evictions and Refaults (nsan)
{_report.FILTERS}
        premature=<ns> - What comes back sooner is premature. Default is 1000000000, a second.

    Output: one row per VA block (2 MiB) and GPU that evicted it; most refaulted bytes first
        Pid : Process
        Device : CUDA ordinal of the GPU that evicted
        Virtual Address : Start of the block
        Evictions : How many times the GPU evicted pages of it
        Evicted Size : Bytes moved to the CPU to make room
        Refaulted Size : Of these, came back to the same GPU
        Refaulted (%) : Share of the evicted bytes
        Faulted Back Size : Of the refaulted, came back because pages faulted, with what the driver prefetched
        Premature Size : Of the refaulted, came back within the time that `premature` says
        Elsewhere Size : Of the evicted, came to another GPU instead
        Unreturned Size : The rest: not back before the capture ends, or released
    The last row adds up the blocks that are not shown.

    A page counts once for each eviction, at its first later arrival. Filters choose the evictions; what came
    back is looked for in the whole capture. What is released does not come back, even if its address does.
"""

    _arg_opts = ([["premature"], {"type": int, "help": "ns", "default": 1000000000}],)

    columns = (
        _report.Column("Pid"),
        _report.Column("Device"),
        _report.Column("Virtual Address:addr_uint"),
        _report.Column("Evictions", adds=True),
        _report.Column("Evicted Size:mem_B", adds=True),
        _report.Column("Refaulted Size:mem_B", adds=True),
        _report.Column("Refaulted (%)"),
        _report.Column("Faulted Back Size:mem_B", adds=True),
        _report.Column("Premature Size:mem_B", adds=True),
        _report.Column("Elsewhere Size:mem_B", adds=True),
        _report.Column("Unreturned Size:mem_B", adds=True),
    )
    rest_at = 2
    one_of = says = ("migrations",)

    def setup(self) -> str | None:
        """Check what is soon."""
        message = super().setup()
        if message is None and self.parsed_args.premature < 0:
            raise self.Error_ArgumentError(
                "nsan_um_refault_sum: premature= takes a time, 0 ns or more."
            )
        return message

    def why_empty(self) -> str | None:
        """Say that no GPU evicted anything."""
        return (
            None
            if has_evictions(self.export)
            else "nothing was evicted: GPU memory was never full."
        )

    def rows(self) -> _report.Rows:
        """Follow what was evicted."""
        return refaults(self)


if __name__ == "__main__":
    NsanUmRefaultSum.Main()
