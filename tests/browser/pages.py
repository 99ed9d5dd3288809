"""Pages for tests of the explorer: the copy in a file, and a live view without a notebook around it.

The live page stands between a real :class:`nsan.widgets.explorer.Explorer` and the real ``explorer.js``:
what the script sends goes to the explorer, what the explorer answers goes to the script. Only the
Jupyter transport is left out; ``test_jupyterlab.py`` has that.
"""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path

import nsan.widgets

ROOT = ".nsan-explorer"
SOURCES = Path(nsan.widgets.__file__).parent
TRAITS = ("config", "clusters", "panel", "error", "filters", "busy")

_START = """
const values = VALUES;
const listeners = new Map();
const tell = (name, ...given) => (listeners.get(name) ?? []).forEach((act) => act(...given));
const bytes = (text) => new DataView(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
window.deliver = (events) => {
  for (const event of events) {
    if (event.trait) {
      values[event.trait] = event.value;
      tell(`change:${event.trait}`);
    } else tell("msg:custom", event.message, event.buffers.map(bytes));
  }
};
const model = {
  get: (name) => values[name],
  on: (name, act) => listeners.set(name, [...(listeners.get(name) ?? []), act]),
  off: (name, act) => listeners.set(name, (listeners.get(name) ?? []).filter((one) => one !== act)),
  send: (message) => {
    if (window.kernelIsGone) throw new Error("Cannot send");  // as JupyterLab does
    window.toPython(JSON.stringify(message)).then(window.deliver);
  },
};
window.cleanUp = render({ model, el: document.getElementById("cell") });
window.nListeners = () => [...listeners.values()].reduce((sum, one) => sum + one.length, 0);
"""

_PAGE = """<!DOCTYPE html><html><head><meta charset="utf-8"><style>{style}
body {{ margin: 8px; background: {ground}; }}
[data-jp-theme-light="false"] {{ --jp-layout-color0: #111; --jp-layout-color2: #424242;
  --jp-ui-font-color0: #fff; --jp-ui-font-color2: rgba(255, 255, 255, 0.54);
  --jp-border-color1: #616161; }}</style></head>
<body {attributes}><div id="cell"></div><script type="module">{script}</script></body></html>"""


_WATCH_TEXT = """
const fill = CanvasRenderingContext2D.prototype.fillText;
const clear = CanvasRenderingContext2D.prototype.clearRect;
CanvasRenderingContext2D.prototype.clearRect = function (...given) {
  this.canvas.drawnTexts = [];
  return clear.apply(this, given);
};
CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...most) {
  const width = Math.min(this.measureText(text).width, most[0] ?? Infinity);
  const left = x - { left: 0, center: 0.5, right: 1 }[this.textAlign] * width;
  (this.canvas.drawnTexts ??= []).push({ text, left, right: left + width, y });
  return fill.call(this, text, x, y, ...most);
};
"""


def watch_text(page):
    """Note what is written on canvases from now on; to be called before the page is opened."""
    page.add_init_script(_WATCH_TEXT)


def texts(page, name):
    """Return the texts of a canvas with their px, as last drawn; needs :func:`watch_text`."""
    return part(page, name).evaluate("canvas => canvas.drawnTexts")


class Live:
    """An explorer and the page that shows it."""

    def __init__(self, page, explorer, *, jupyter_theme=None):
        self.page, self.explorer = page, explorer
        self.sent, self._out, self.is_held = [], [], False
        explorer.send = self._keep
        explorer.observe(self._keep_trait, list(TRAITS))
        page.expose_function("toPython", self._from_browser)
        attributes = "" if jupyter_theme is None else f'data-jp-theme-light="{jupyter_theme}"'
        values = json.dumps({name: getattr(explorer, name) for name in TRAITS})
        script = (SOURCES / "explorer.js").read_text(encoding="utf-8")
        script += _START.replace("VALUES", values.replace("<", "\\u003c"))
        style = (SOURCES / "explorer.css").read_text(encoding="utf-8")
        ground = "#111" if jupyter_theme == "false" else "#fff"
        page.goto("about:blank")
        page.set_content(
            _PAGE.format(style=style, script=script, ground=ground, attributes=attributes)
        )
        wait_for_view(page)

    def _keep(self, content, buffers=None):
        packed = [base64.b64encode(bytes(each)).decode() for each in buffers or []]
        self._out.append({"message": content, "buffers": packed})

    def _keep_trait(self, change):
        self._out.append({"trait": change["name"], "value": change["new"]})

    def _from_browser(self, text):
        message = json.loads(text)
        self.sent.append(message)
        self.explorer._on_message(None, message)
        return [] if self.is_held else self._taken()

    def settle(self):
        """Wait until what the page shows and what Python knows is the same."""
        origin = self.explorer.scene.origin_ns

        def is_settled():
            known = tuple(side - origin for side in self.explorer.window)
            return known == window(self.page) and self.explorer.place == place(self.page)

        wait_for(self.page, is_settled, "page and Python agree")

    def _taken(self):
        out, self._out = self._out, []
        return out

    def flush(self):
        """Bring to the page what Python code has caused."""
        self.page.evaluate("events => window.deliver(events)", self._taken())


def wait_for(page, condition, what, seconds=20):
    """Wait until a condition of Python holds, and let the page work meanwhile.

    A script of the page's own could not wait in the offline copy: its policy allows no eval.
    """
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s in vain until {what}"
        page.wait_for_timeout(15)


def wait_until(page, script, **given):
    """Wait until a script says true; not in the offline copy, whose policy allows no eval."""
    page.wait_for_function(script, **given)


def wait_for_view(page, more_than=0):
    """Wait until the explorer has drawn an answer."""
    page.wait_for_selector(f"{ROOT}[data-views]")
    wait_for(page, lambda: int(state(page, "views")) > more_than, "a view is drawn")


def state(page, name):
    """Read what the explorer says of itself: window, place, by, views, mode, theme or box."""
    return page.locator(ROOT).get_attribute(f"data-{name}")


def window(page):
    """Return the shown window, ns from the origin."""
    return tuple(int(side) for side in state(page, "window").split(","))


def place(page):
    """Return the shown stretch of the map, folded bytes."""
    return tuple(int(side) for side in state(page, "place").split(","))


def part(page, name):
    """Find a part of the explorer by its name for tests."""
    return page.locator(f'{ROOT} [data-nsan="{name}"]')


def point(page, name, x, y):
    """Return the page's coordinates of a point of a canvas, from shares of its plot."""
    canvas = part(page, name)
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    gutter = float(canvas.get_attribute("data-gutter"))
    width = box["width"] - gutter - float(canvas.get_attribute("data-right"))
    return box["x"] + gutter + x * width, box["y"] + y * box["height"]


def drag(page, name, start, end):
    """Drag on a canvas between two points given as shares of its plot."""
    page.mouse.move(*point(page, name, *start))
    page.mouse.down()
    page.mouse.move(*point(page, name, *((a + b) / 2 for a, b in zip(start, end, strict=True))))
    page.mouse.move(*point(page, name, *end))
    page.mouse.up()


def colours(page, name):
    """Count the colours of a canvas."""
    script = """canvas => {
      const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
      return new Set(new Uint32Array(data.buffer)).size;
    }"""
    return part(page, name).evaluate(script)
