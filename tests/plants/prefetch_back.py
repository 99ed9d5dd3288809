"""Results of the GPU that the CPU takes back by page faults."""

from planting import Plant

from nsan.model.access import Stream
from nsan.model.making import Recipe
from nsan.model.program import (
    CPU,
    Allocate,
    HostTouch,
    Kernel,
    Launch,
    Prefetch,
    Program,
    Synchronize,
)
from nsan.units import MIB

_SIZE = 32 * MIB
_COMPUTE = Kernel("compute", _SIZE // 1024, 256, (Stream(allocation="results", write=True),))


def _computed(*back):
    return Program(
        "results",
        (
            Allocate("other", 2 * MIB),
            Allocate("results", _SIZE),
            Prefetch("results"),
            Launch(_COMPUTE),
            Synchronize(),
            *back,
            HostTouch("results"),
        ),
    )


PLANTS = (
    Plant(
        "results-by-faults",
        "prefetch_back",
        Recipe(_computed()),
        "results",
        Recipe(_computed(Prefetch("results", CPU), Synchronize())),
    ),
)
CLEAN = ()
