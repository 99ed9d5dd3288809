"""Memory that the CPU fills for nothing: the first kernel that uses it writes all of it."""

from planting import Clean, Plant

from nsan.model.access import Stream
from nsan.model.making import Recipe
from nsan.model.program import (
    Allocate,
    Fill,
    HostTouch,
    Kernel,
    Launch,
    Prefetch,
    Program,
    Synchronize,
)
from nsan.units import MIB

_SIZE = 24 * MIB
_WRITES = Kernel("initialise", _SIZE // 1024, 256, (Stream(allocation="state", write=True),))
_READS = Kernel(
    "advance",
    _SIZE // 1024,
    256,
    (Stream(allocation="state"), Stream(allocation="result", write=True, phase=1)),
)


def _filled_by(*filling):
    return Program(
        "filled",
        (
            Allocate("result", 2 * MIB),
            Allocate("state", _SIZE),
            *filling,
            Launch(_WRITES),
            Launch(_READS),
            Synchronize(),
            HostTouch("result"),
        ),
    )


# Pages that are nowhere yet are made by the prefetch, and nothing is copied.
_ON_GPU = (Prefetch("state"), Fill("state"))

PLANTS = (
    Plant(
        "filled-by-cpu",
        "first_touch_side",
        Recipe(_filled_by(HostTouch("state", write=True))),
        "state",
        Recipe(_filled_by(*_ON_GPU)),
    ),
)
CLEAN = (Clean("filled-by-gpu", Recipe(_filled_by(Prefetch("result"), *_ON_GPU))),)
