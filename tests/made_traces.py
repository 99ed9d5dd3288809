"""Traces made of rows, and a browser that is played by the test: for tests of the explorer."""

from __future__ import annotations

import json

import polars as pl

from nsan.info import Capture, TraceInfo
from nsan.schema import TABLES
from nsan.trace import Trace

MIB = 1 << 20
BLOCK = 2 * MIB


def table(name, rows):
    """Write rows of a table; a column that is not given is null."""
    schema = TABLES[name].schema
    columns = {column: [row.get(column) for row in rows] for column in schema}
    return pl.LazyFrame(columns, schema=schema)


def made(capture=None, **tables):
    """Make a trace of rows."""
    frames = {name: table(name, tables.get(name, [])) for name in TABLES}
    info = TraceInfo(source="made.sqlite", kind="nsys_sqlite", capture=capture or {})
    return Trace(**frames, info=info)


def copy(start, va=0, size=4096, **more):
    row = {"start_ns": start, "end_ns": start + 10, "pid": 1, "device_id": 0, "va": va}
    cause = {"bytes": size, "cause": "coherence", "direction": "htod", "cause_id": 2}
    return {**row, **cause, **more}


def fault(start, end, va=0, n=1, **more):
    row = {"start_ns": start, "end_ns": end, "pid": 1, "device_id": 0, "va": va}
    return {**row, "n_page_faults": n, "access": "read", "access_id": 1, **more}


def cpu_fault(start, va=0, pid=1):
    return {"start_ns": start, "pid": pid, "va": va}


def kernel(start, end, name="k", **more):
    row = {"start_ns": start, "end_ns": end, "pid": 1, "device_id": 0, "name": name}
    return {**row, **more}


def nvtx(start, end, name="r", **more):
    row = {"start_ns": start, "end_ns": end, "pid": 1, "tid": 1, "depth": 0, "name": name}
    return {**row, "closed": True, **more}


def opened(trace):
    """Explore a trace; return the explorer and its browser."""
    from nsan.widgets.explorer import explore

    explorer = explore(trace)
    assert explorer.ready(60)
    return explorer, Browser(explorer)


class Comm:
    """The wire between a widget and its view: keeps what is sent, as JSON."""

    comm_id = "test"

    def __init__(self):
        self.sent = []

    def send(self, data=None, metadata=None, buffers=None):  # noqa: ARG002
        self.sent.append((json.loads(json.dumps(data, allow_nan=False)), list(buffers or [])))

    def on_msg(self, act):
        self.act = act

    def close(self, *_, **__):
        pass


class Browser:
    """Plays the browser of one explorer."""

    def __init__(self, explorer):
        self.explorer, self.number = explorer, 0
        self.comm = explorer.comm = Comm()

    def tell(self, **content):
        """Send a message and return what Python sent because of it."""
        first = len(self.comm.sent)
        content = json.loads(json.dumps(content))
        self.comm.act(
            {"content": {"data": {"method": "custom", "content": content}}, "buffers": []}
        )
        return [
            (data["content"], buffers)
            for data, buffers in self.comm.sent[first:]
            if data["method"] == "custom"
        ]

    def look(self, window=None, place=None, by="cause", columns=480, rows=220):
        """Ask for a view; return it and its buffers."""
        self.number += 1
        asked = {"window": window, "place": place, "by": by, "columns": columns, "rows": rows}
        sent = self.tell(kind="look", view="v", id=self.number, **asked)
        views = [each for each in sent if each[0]["kind"] == "view"]
        assert len(views) == 1, self.explorer.error
        assert (views[0][0]["view"], views[0][0]["id"]) == ("v", self.number)
        return views[0]

    def sent(self, kind):
        """Messages of a kind that Python sent so far."""
        return [d["content"] for d, _ in self.comm.sent if d.get("content", {}).get("kind") == kind]


def not_recorded(switch):
    """Say that a kind of event was switched off."""
    return Capture("not_recorded", switch, "switched off")
