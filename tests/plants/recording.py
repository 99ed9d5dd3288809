"""Recordings that are the problem: rows were lost, or nothing tells what went on."""

from planting import Plant

from nsan.model.access import Stream
from nsan.model.making import Recipe
from nsan.model.nsys_export import ExportOptions
from nsan.model.program import Allocate, Kernel, Launch, Program, Synchronize
from nsan.model.recording import Style
from nsan.model.size import Size
from nsan.model.workloads import workload
from nsan.units import MIB


def _unseen():
    """Memory that the GPU touches first: nothing moves, and without fault rows nothing shows."""
    fill = Kernel("fill", 16_384, 256, (Stream(allocation="data", write=True),))
    return Program("unseen", (Allocate("data", 16 * MIB), *[Launch(fill), Synchronize()] * 4))


PLANTS = (
    Plant(
        "lost-rows",
        "lost_rows",
        Recipe(workload("stream").build(Size(256 * MIB)), style=Style(lost_ns=3_000_000)),
    ),
    Plant(
        "switches-off",
        "switches_missing",
        Recipe(
            _unseen(), options=ExportOptions(gpu_faults=False, cpu_faults=False, memory_usage=False)
        ),
    ),
)
CLEAN = ()
