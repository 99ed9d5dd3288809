"""Run one analysis on a trace and print what it took: a process of :mod:`benchmarks.huge`."""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from pathlib import Path

import nsan
from nsan.analysis.catalog import find
from nsan.analysis.costs import rows_held


class _Peak(threading.Thread):
    """Watches this process's memory: the highest mark of a process counts its start, too."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.done = 0.0, threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.005):
            self.most = max(self.most, _resident_mb())


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def main() -> None:
    """Measure."""
    name, path = sys.argv[1:]
    trace, analysis = nsan.open_trace(path), find(name)
    tables = {table: getattr(trace, table) for table in analysis.reads}
    few = {table: frame.head(1_000).collect().lazy() for table, frame in tables.items()}
    analysis.run(few).collect()  # what is imported and compiled is no cost of rows
    rows, before, watch = rows_held(analysis, tables), _resident_mb(), _Peak()
    watch.start()
    cpu = time.process_time()
    height = analysis.run(tables).collect().height
    cpu = time.process_time() - cpu
    watch.done.set()
    watch.join()
    print(json.dumps({"rows": rows, "out": height, "cpu": cpu, "mb": max(watch.most - before, 0)}))


if __name__ == "__main__":
    main()
