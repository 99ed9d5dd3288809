"""Prefetches that push out what is needed: of a table of which a kernel uses little, and of all arrays at once."""

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

_NAMES, _ARRAY = "abc", 16 * MIB
_FULL = oversubscribed(DEFAULT_SETTINGS, 3 * _ARRAY, 1.2)


def _in_turn(n_steps=3, *, at_once):
    operations = [Allocate(name, _ARRAY) for name in _NAMES]
    operations += [HostTouch(name, write=True) for name in _NAMES]
    for _ in range(n_steps):
        operations += [Prefetch(name) for name in _NAMES if at_once]
        for name in _NAMES:
            update = Kernel(
                f"update_{name}", _ARRAY // 1024, 256, (Stream(allocation=name, write=True),)
            )
            operations += [] if at_once else [Prefetch(name)]
            operations += [Launch(update), Synchronize()]
    return Program("in_turn", tuple(operations))


PLANTS = (
    Plant(
        "prefetched-at-once",
        "prefetch_harm",
        Recipe(_in_turn(at_once=True), _FULL),
        remedied=Recipe(_in_turn(at_once=False), _FULL),
    ),
    Plant(
        "harmful-prefetch",
        "prefetch_harm",
        Recipe(_stepped(Prefetch("table")), _TIGHT),
        "table",
        Recipe(_stepped(), _TIGHT),
    ),
)
CLEAN = ()
