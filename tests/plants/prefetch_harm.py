"""A prefetch that pushes out what each step needs: the kernel uses little of what is brought."""

from planting import Plant

from nsan.model.access import Stream
from nsan.model.making import Recipe, oversubscribed
from nsan.model.program import (
    Allocate,
    HostTouch,
    Kernel,
    Launch,
    Prefetch,
    Program,
    Synchronize,
)
from nsan.model.settings import DEFAULT_SETTINGS
from nsan.units import MIB

_STATE, _TABLE, _USED = 24 * MIB, 20 * MIB, 2 * MIB
_ROOM = 30 * MIB
_ADVANCE = Kernel(
    "advance",
    _STATE // 1024,
    256,
    (Stream(allocation="state", write=True), Stream(allocation="table", n_bytes=_USED)),
)


def _stepped(*prefetches, n_steps=4):
    return Program(
        "stepped",
        (
            Allocate("state", _STATE),
            Allocate("table", _TABLE),
            HostTouch("table", write=True),
            *[*prefetches, Launch(_ADVANCE), Synchronize()] * n_steps,
        ),
    )


_TIGHT = oversubscribed(DEFAULT_SETTINGS, _STATE + _TABLE, (_STATE + _TABLE) / _ROOM)

PLANTS = (
    Plant(
        "harmful-prefetch",
        "prefetch_harm",
        Recipe(_stepped(Prefetch("table")), _TIGHT),
        "table",
        Recipe(_stepped(), _TIGHT),
    ),
)
CLEAN = ()
