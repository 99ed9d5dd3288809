"""A real JupyterLab for tests, in a home of its own, and its notebooks in a browser."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

START_SECONDS = 60
RUN_SECONDS = 120
_POLL_SECONDS = 0.05

_READY = """async () => {
  const panel = jupyterapp.shell.currentWidget;
  await panel.context.ready;
  await panel.sessionContext.ready;
  return panel.sessionContext.session.kernel.name;
}"""
_RUN = """async code => {
  const kernel = jupyterapp.shell.currentWidget.sessionContext.session.kernel;
  const future = kernel.requestExecute({code, store_history: false});
  const said = {text: "", error: ""};
  future.onIOPub = message => {
    if (message.header.msg_type === "stream") said.text += message.content.text;
    if (message.header.msg_type === "error") said.error += message.content.traceback.join("\\n");
  };
  await future.done;
  return said;
}"""
_SCROLL = """async number => {
  const notebook = jupyterapp.shell.currentWidget.content;
  const cell = notebook.widgets.filter(cell => cell.model.type === "code")[number];
  await notebook.scrollToItem(notebook.widgets.indexOf(cell), "start");
  await cell.ready;
  cell.node.dataset.test = number;
}"""
_NEW_CELL = """async code => {
  const {commands, shell} = jupyterapp;
  const notebook = shell.currentWidget.content;
  notebook.activeCellIndex = notebook.widgets.length - 1;
  await commands.execute("notebook:insert-cell-below");
  notebook.activeCell.model.sharedModel.setSource(code);
  await commands.execute("notebook:run-cell");
  return notebook.activeCell.model.outputs.toJSON();
}"""
_CELLS = """() => jupyterapp.shell.currentWidget.content.widgets
  .filter(cell => cell.model.type === "code")
  .map(cell => ({
    source: cell.model.sharedModel.getSource(),
    count: cell.model.executionCount,
    outputs: cell.model.outputs.toJSON(),
  }))"""


@dataclass
class Server:
    """A running JupyterLab: its address, its folder, where its words go."""

    url: str
    folder: Path
    log: Path


@contextlib.contextmanager
def server(home: Path, *, start=("-m", "jupyterlab")):
    """Run JupyterLab until the end of the block.

    Parameters
    ----------
    home : Path
        An empty folder: home of the server, of its settings and of everything a kernel writes. Its
        notebooks are those of ``home/work``.
    start : sequence of str
        What this Python runs to start it; options of JupyterLab are added.

    Yields
    ------
    Server
        It answers.
    """
    work, runtime, log = home / "work", home / "runtime", home / "jupyter.log"
    work.mkdir(parents=True)
    _settings(home / "settings")
    with log.open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, *start, *_options(work)],
            env=_environment(home, runtime),
            cwd=work,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its kernels end with it
        )
    try:
        yield Server(_address(process, runtime, log), work, log)
    finally:
        _end(process)


def _options(work):
    return [
        "--no-browser",
        "--allow-root",
        "--ip=127.0.0.1",
        "--ServerApp.port_retries=200",
        f"--ServerApp.root_dir={work}",
        "--IdentityProvider.token=",
        "--PasswordIdentityProvider.hashed_password=",
        "--LabApp.expose_app_in_browser=True",
        "--LabApp.news_url=",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        "--LabApp.extension_manager=readonly",
        "--JupyterNotebookApp.expose_app_in_browser=True",
    ]


def _settings(folder):
    """Answer in advance what JupyterLab would ask a new user about news."""
    place = folder / "@jupyterlab" / "apputils-extension"
    place.mkdir(parents=True)
    answers = {"fetchNews": "false", "checkForUpdates": False}
    (place / "notification.jupyterlab-settings").write_text(json.dumps(answers))


def _environment(home, runtime):
    mine = {
        "HOME": home,
        "JUPYTER_CONFIG_DIR": home / "config",
        "JUPYTER_DATA_DIR": home / "data",
        "JUPYTER_RUNTIME_DIR": runtime,
        "JUPYTERLAB_SETTINGS_DIR": home / "settings",
        "JUPYTERLAB_WORKSPACES_DIR": home / "workspaces",
        "IPYTHONDIR": home / "ipython",
        "NSAN_CACHE_DIR": home / "cache",
    }
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JUPYTER", "JPY_"))
    }
    # A debugger for cells costs a second and is not used here.
    return {**kept, **{name: str(place) for name, place in mine.items()}, "PYDEVD_USE_CYTHON": "NO"}


def _address(process, runtime, log):
    """Wait until the server has written where it is, and answers there."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        for file in runtime.glob("jpserver-*.json"):
            with contextlib.suppress(ValueError, urllib.error.URLError, ConnectionError):
                url = json.loads(file.read_text())["url"]
                with urllib.request.urlopen(f"{url}api/status", timeout=5):
                    return url
        time.sleep(_POLL_SECONDS)
    message = f"JupyterLab does not answer; it said:\n{log.read_text(errors='replace')[-3000:]}"
    raise RuntimeError(message)


def _end(process):
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # a kernel that did not hear


class Notebook:
    """A notebook that is open in a browser.

    Parameters
    ----------
    page : playwright Page
        An empty one.
    server : Server
        Where the notebook is.
    name : str
        File in the server's folder.
    classic : bool
        Notebook 7 instead of JupyterLab.
    """

    def __init__(self, page, server, name, *, classic=False):
        self.page, self.server, self.name = page, server, name
        # In a workspace of its own: JupyterLab opens again what the last page of one had open.
        lab = f"lab/workspaces/{name.partition('.')[0]}/tree"
        page.goto(f"{server.url}{'notebooks' if classic else lab}/{name}")
        page.wait_for_function(
            "name => globalThis.jupyterapp?.shell.currentWidget?.context?.path === name", arg=name
        )
        page.evaluate(_READY)

    def run_all(self):
        """Run every cell; return the cells as dicts of source, count and outputs."""
        self.page.evaluate("() => jupyterapp.commands.execute('notebook:run-all-cells')")
        return self.cells()

    def cells(self):
        """Return the code cells as they are now."""
        return self.page.evaluate(_CELLS)

    def run(self, code):
        """Run code in the kernel of the notebook; return what it prints."""
        said = self.page.evaluate(_RUN, code)
        assert not said["error"], said["error"]
        return said["text"]

    def value(self, code):
        """Return the value of an expression in the kernel, through JSON."""
        return json.loads(self.run(f"import json; print(json.dumps({code}))"))

    def until(self, code, expected):
        """Wait until an expression in the kernel has a value."""
        until = time.monotonic() + RUN_SECONDS
        got = self.value(code)
        while got != expected:
            assert time.monotonic() < until, f"{code} is {got}, not {expected}"
            self.page.wait_for_function(
                "() => new Promise(go => requestAnimationFrame(() => go(true)))"
            )
            got = self.value(code)

    def run_in_new_cell(self, code):
        """Run code in a new last cell; return its outputs."""
        return self.page.evaluate(_NEW_CELL, code)

    def output(self, number):
        """Bring the output of a code cell into view: JupyterLab draws what is near it only."""
        self.page.evaluate(_SCROLL, number)
        return self.page.locator(f".jp-Cell[data-test='{number}'] .jp-Cell-outputArea")


def errors(cells):
    """Return what went wrong in cells, as text."""
    return [
        f"{output['ename']}: {output['evalue']}"
        for cell in cells
        for output in cell["outputs"]
        if output["output_type"] == "error"
    ]


def notebook_of(*cells):
    """Build a notebook of Python cells, in the format of a file."""
    return {
        "cells": [
            {
                "cell_type": "code",
                "id": f"cell-{number}",
                "execution_count": None,
                "metadata": {},
                "outputs": [],
                "source": source,
            }
            for number, source in enumerate(cells)
        ],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
