"""Kernels that wait for page faults on what could have been prefetched, and the like."""

from planting import Plant

from nsan.model.making import Recipe
from nsan.model.size import Size
from nsan.model.workloads import workload
from nsan.units import MIB

_STREAM = workload("stream")

PLANTS = (
    Plant(
        "no-prefetch",
        "prefetch_before_use",
        Recipe(_STREAM.build(Size(32 * MIB))),
        "x",
        Recipe(_STREAM.build(Size(32 * MIB, prefetch="ahead"))),
    ),
)
CLEAN = ()
