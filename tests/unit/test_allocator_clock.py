"""Means over time, where the clock of a history goes backwards."""

from __future__ import annotations

import polars as pl
import pytest
from allocator_programs import Recorded

from nsan.analysis.allocator.utilization import allocator_utilization
from nsan.torch_alloc.settings import DEFAULT_SETTINGS
from nsan.torch_alloc.tables import SNAPSHOT_TABLES
from nsan.units import MIB


def test_time_that_goes_backwards_does_not_count_in_the_mean_utilization():
    recorded = Recorded(DEFAULT_SETTINGS)
    recorded.machine.allocate(MIB)
    recorded.machine.free(recorded.machine.allocate(MIB), pending=True)
    segments, blocks, events = recorded.frames()
    events = events.with_columns(time_us=pl.Series([0, 10, 4, 24]))
    tables = (segments, blocks, events, SNAPSHOT_TABLES["allocator_settings"].empty().collect())
    row = allocator_utilization(*(table.lazy() for table in tables)).collect().row(0, named=True)
    # 10 us with none of 2 MiB in use, then half of it until time goes back by 6, then 20 us all of it.
    assert row["mean_utilization_fraction"] == pytest.approx(20 / 30)
