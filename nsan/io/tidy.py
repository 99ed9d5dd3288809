"""Tidying up that nothing interrupts."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Hold back Ctrl-C and SIGTERM: an exception in the middle of tidying up would leave things."""
    held = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
