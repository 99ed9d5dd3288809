/**
 * The explorer of nsan: one linked view of a Unified Memory trace, drawn on canvases.
 *
 * Python holds the events; this file never sees more than it can draw. It asks for what a window
 * needs (`look`), draws the last answer scaled at once while it waits, and says what the user
 * points at (`hover`), picks (`pick`) and keeps (`filter`). Only a `go` from Python moves the view.
 *
 * Numbers are relative: times are nanoseconds from `config.origin_ns`, places are bytes on an
 * address axis whose unused stretches are folded away. Addresses are text made by BigInt.
 * Names from a trace are hostile: they reach the page by textContent and fillText only.
 *
 * The file has no import, no build step and asks nothing of a network.
 */

// ---------------------------------------------------------------- constants

/** Cells that one picture of the map has at most: what a message may carry. */
const MOST_COLUMNS = 480;
const MOST_ROWS = 220;
/** The narrowest window (ns) and the least stretch of addresses (bytes) that can be shown. */
const LEAST_TIME = 40;
const LEAST_PLACE = 4096;
/** Waiting times in ms: before a look, before a hover, until a look counts as slow or as lost. */
const LOOK_DELAY = 30;
const HOVER_DELAY = 70;
const SLOW_LOOK = 400;
const LOST_LOOK = 15000;
/** Sizes in CSS px. */
const OVERVIEW_HEIGHT = 84;
const OVERVIEW_AXIS = 18;
const OVERVIEW_FAULTS = 12;
const AXIS_HEIGHT = 24;
const INTERVALS_HEIGHT = 20;
const BARS_HEIGHT = 28;
const LANE_GAP = 4;
const RIGHT = 10;
const HANDLE = 6;
const DEFAULT_MAP_HEIGHT = 300;

/** Said once where the kernel was restarted or has ended. */
const GONE = "The kernel does not answer any more: run the cell again.";

const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif';
const BOLD = `600 ${FONT}`;
const MONO = '10.5px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace';

/** The ramp for density and latency, few to many, by theme. */
const RAMPS = {
  light: ["#d3e6c3", "#86c9b0", "#3a9fb5", "#2c67a6", "#2b3380", "#190f45"],
  dark: ["#3a3173", "#74398c", "#b8437a", "#e8685a", "#f8a34c", "#fcea8a"],
};

/** What each filter is called, in the order of the toolbar. */
const FILTERS = [
  ["pid", "Process"],
  ["device", "GPU"],
  ["cause", "Cause"],
  ["access", "Access"],
  ["kernel", "Kernel"],
  ["nvtx", "NVTX"],
  ["allocation", "Allocation"],
];

/** Filters that leave out what lies outside of what they name: one entry is a choice already. */
const CUTTING = new Map([
  ["kernel", "Only while these ran"],
  ["nvtx", "Only inside these ranges"],
  ["allocation", "Only in these"],
]);

const HELP = [
  ["Overview: drag", "choose the window of time"],
  ["Overview: drag inside, or an edge", "move or resize the window"],
  ["Overview: double-click", "show all"],
  ["Wheel", "zoom in time where the pointer is"],
  ["Ctrl or Alt + wheel on the map", "zoom in addresses"],
  ["Shift + wheel, drag on the lanes", "move in time"],
  ["Drag on the map", "select a box of time and addresses"],
  ["Double-click in the box", "zoom into the box"],
  ["Double-click elsewhere", "zoom out"],
  ["Click a kernel, a range, a batch, a cluster", "go there; its facts stand in the panel"],
  ["Click the legend", "show only that; Ctrl + click adds one; the same again shows all"],
  ["Arrow keys", "move in time and in addresses"],
  ["+ and -", "zoom in time; with Shift also in addresses"],
  ["Home", "show all"],
  ["Backspace", "go back to the view before"],
  ["Enter", "zoom into the box"],
  ["Esc", "clear what is selected"],
  ["?", "this help"],
];

// ---------------------------------------------------------------- text

/** Characters that steer a terminal or the direction of text, and halves of characters. */
const UNSAFE =
  /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

/**
 * Make text harmless and short: unsafe characters become visible, the middle of a long text gives way.
 * @param {*} text Anything.
 * @param {number} most Characters at most.
 * @returns {string}
 */
function clean(text, most = 200) {
  let whole = String(text ?? "");
  if (whole.length > 2 * most) whole = `${whole.slice(0, most)}\u2026${whole.slice(-most)}`;
  whole = whole.replace(UNSAFE, (found) => `\\x${found.charCodeAt(0).toString(16).padStart(2, "0")}`);
  if (whole.length <= most) return whole;
  const head = Math.floor(most / 2);
  return `${whole.slice(0, head)}\u2026${whole.slice(whole.length - (most - head - 1))}`;
}

const TIME_UNITS = [
  ["ns", 1],
  ["us", 1e3],
  ["ms", 1e6],
  ["s", 1e9],
];

/** The largest unit of time that is not longer than the value. */
function timeUnit(ns) {
  let best = TIME_UNITS[0];
  for (const unit of TIME_UNITS) if (Math.abs(ns) >= unit[1]) best = unit;
  return best;
}

/** Write nanoseconds with the unit that fits, as nsan does everywhere: `2.338 ms`. */
function timeText(ns) {
  const [unit, size] = timeUnit(ns);
  return `${(ns / size).toFixed(size === 1 ? 0 : 3)} ${unit}`;
}

/** Write bytes with a binary unit: `8.00 MiB`. */
function bytesText(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  let value = n;
  while (value >= 1024 && power < units.length - 1) {
    value /= 1024;
    power += 1;
  }
  const digits = power === 0 || (Number.isInteger(value) && value >= 10) ? 0 : value < 100 ? 2 : 1;
  return `${value.toFixed(digits)} ${units[power]}`;
}

/** Write a count with thin grouping: `3 202 621`. */
function countText(n) {
  return Math.round(n)
    .toString()
    .replace(/\B(?=(\d{3})+$)/g, "\u2009");
}

/** Write a value in the unit that Python names. */
function valueText(value, unit) {
  if (unit === "byte") return bytesText(value);
  if (unit === "ns") return timeText(value);
  if (value > 0 && value < 0.95) return `${value.toPrecision(1)} ${unit ?? ""}`.trim();
  const word = value === 1 ? String(unit ?? "").replace(/s$/, "") : (unit ?? "");
  return `${value < 10 && !Number.isInteger(value) ? value.toFixed(1) : countText(value)} ${word}`.trim();
}

/** Keep the groups of a number on one line. */
function unbroken(text) {
  return text.replace(/(\d)[ \u2009](?=\d{3}(?!\d))/g, "$1\u202f");
}

/** Write an address without leading zeros. */
function hexText(va) {
  return `0x${va.toString(16)}`;
}

/** Leave out the leading zeros of a text that is an address and nothing else. */
function shortAddress(text) {
  return String(text).replace(/^0x0+(?=[0-9a-f]+$)/, "0x");
}

/** A stable number from a text: names keep their colour in every view. */
function hash(text) {
  let value = 2166136261;
  for (let i = 0; i < Math.min(text.length, 400); i++) value = Math.imul(value ^ text.charCodeAt(i), 16777619);
  return value >>> 0;
}

// ---------------------------------------------------------------- numbers

/** The smallest 1, 2 or 5 times a power of ten that is not below the value; at least 1. */
function niceStep(value) {
  if (!(value > 1)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  for (const factor of [1, 2, 5, 10]) if (factor * power >= value * 0.9999) return factor * power;
  return 10 * power;
}

/** Move a range into another one, and give it a least length. */
function within([start, end], [low, high], least) {
  const span = Math.min(Math.max(end - start, Math.min(least, high - low)), high - low);
  const begin = Math.min(Math.max(start, low), high - span);
  return [begin, begin + span];
}

const same = (a, b) => a[0] === b[0] && a[1] === b[1];

/**
 * Choose the ticks of a time axis and their words.
 * @param {[number, number]} window ns from the origin.
 * @param {number} origin The origin in ns of the session.
 * @param {number} width px.
 * @returns {{ticks: {t: number, text: string}[], base: string}} `base` is what the ticks add to, or "".
 */
function timeAxis([start, end], origin, width) {
  const step = niceStep(((end - start) * 92) / Math.max(width, 1));
  const most = Math.max(Math.abs(origin + start), Math.abs(origin + end), 1);
  let [unit, size] = timeUnit(most);
  let base = 0;
  let baseText = "";
  const digitsOf = (s) => Math.max(0, Math.ceil(Math.log10(s / step) - 1e-9));
  if (digitsOf(size) > 3) {
    const power = 10 ** Math.ceil(Math.log10(end - start));
    base = Math.floor((origin + start) / power) * power;
    baseText = `${trimmed((base / size).toFixed(digitsOfTen(size / power)))} ${unit}`;
    [unit, size] = timeUnit(Math.max(origin + end - base, 1));
  }
  const digits = Math.min(digitsOf(size), 9);
  const ticks = [];
  const first = Math.ceil((origin + start - base) / step);
  for (let i = first; i * step + base <= origin + end && ticks.length < 200; i++) {
    const text = `${baseText ? "+" : ""}${((i * step) / size).toFixed(digits)} ${unit}`;
    ticks.push({ t: base + i * step - origin, text });
  }
  return { ticks, base: baseText };
}

const digitsOfTen = (ratio) => Math.max(0, Math.min(9, Math.round(Math.log10(ratio))));
const trimmed = (text) => (text.includes(".") ? text.replace(/0+$/, "").replace(/\.$/, "") : text);

/** Read a number with a unit out of a cell's text, so that it sorts by size; else the text itself. */
function sortKey(text) {
  const factors = {
    ns: 1, us: 1e3, ms: 1e6, s: 1e9,
    B: 1, KiB: 1024, MiB: 1024 ** 2, GiB: 1024 ** 3, TiB: 1024 ** 4,
    "B/s": 1, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "%": 1, "": 1,
  };
  const found = /^(-?[\d\s\u2009\u202f,]*\.?\d+)\s*([^\d\s]*)$/.exec(String(text ?? "").trim());
  if (!found || !(found[2] in factors)) return text === "-" || text === "" ? null : text;
  return Number(found[1].replace(/[\s\u2009\u202f,]/g, "")) * factors[found[2]];
}

/** Compare two sort keys: numbers before texts. */
function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

/** Turn `#rrggbb` into [r, g, b]. */
function rgb(colour) {
  const value = Number.parseInt(colour.slice(1), 16);
  return [(value >> 16) & 255, (value >> 8) & 255, value & 255];
}

/** The colour of a ramp at a share from 0 to 1, as [r, g, b]. */
function rampAt(stops, share) {
  const at = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(at), stops.length - 2);
  const [a, b] = [rgb(stops[low]), rgb(stops[low + 1])];
  return a.map((part, i) => Math.round(part + (b[i] - part) * (at - low)));
}

// ---------------------------------------------------------------- elements

/**
 * Make an element; text goes in as text.
 * @param {string} tag
 * @param {Object} [given] `class`, `text`, `hook` (data-nsan), `title`; anything else is an attribute.
 * @param {...(Node|null)} children
 * @returns {HTMLElement}
 */
function make(tag, given = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (value === null || value === undefined) continue;
    if (name === "text") element.textContent = value;
    else if (name === "hook") element.dataset.nsan = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter(Boolean));
  return element;
}

/** A badge for a figure that is not recorded; nothing where the whole trace is of that kind anyway. */
function badge(kind, whole = "recorded") {
  if (!kind || kind === "recorded" || kind === whole) return null;
  return make("span", { class: "nsan-badge", text: clean(kind, 30), title: `This figure is ${clean(kind, 30)}.` });
}

/** A canvas that knows its size in CSS px and draws sharp on every screen. */
class Surface {
  constructor(hook, label) {
    this.canvas = make("canvas", { hook, role: "img", "aria-label": label });
    this.context = this.canvas.getContext("2d");
    this.width = 0;
    this.height = 0;
  }

  /** Take a size, and begin to draw on empty ground. */
  begin(width, height) {
    const ratio = window.devicePixelRatio || 1;
    const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (this.canvas.width !== w || this.canvas.height !== h) {
      this.canvas.width = w;
      this.canvas.height = h;
      this.canvas.style.height = `${height}px`;
    }
    this.width = width;
    this.height = height;
    const context = this.context;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = FONT;
    context.textBaseline = "middle";
    context.textAlign = "left";
    context.direction = "ltr";
    return context;
  }

  /** Where an event is on the canvas, in CSS px. */
  at(event) {
    const box = this.canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }
}

/** Shorten a text until it fits so many px; "" where not even three characters do. */
function fitted(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let [low, high] = [0, text.length];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (context.measureText(`${text.slice(0, middle)}\u2026`).width <= width) low = middle;
    else high = middle - 1;
  }
  return low >= 3 ? `${text.slice(0, low)}\u2026` : "";
}

// ---------------------------------------------------------------- pictures of the map

/** Turn the buffers of a raster into one category and one level a cell. */
function cellsOf(map, buffers) {
  const bytes = buffers.map((b) => (b instanceof ArrayBuffer ? new Uint8Array(b) : new Uint8Array(b.buffer, b.byteOffset, b.byteLength)));
  const size = map.columns * map.rows;
  if (map.encoding === "dense") return { category: bytes[0], level: bytes[1] };
  const [category, level] = [new Uint8Array(size), new Uint8Array(size)];
  const index = new Uint32Array(bytes[0].slice().buffer);
  for (let i = 0; i < index.length; i++) {
    category[index[i]] = bytes[1][i];
    level[index[i]] = bytes[2][i];
  }
  return { category, level };
}

/** Rows without a category lie below all others. */
const order = (category) => (category < 0 ? 1000 : category);

/** One answer to a look, ready to be drawn. */
class View {
  /** @param {Object} message The `view` message. @param {Array} buffers Its buffers. */
  constructor(message, buffers) {
    Object.assign(this, message);
    this.map = message.map ?? null;
    this.cells = this.map?.mode === "raster" && this.map.n !== 0 ? cellsOf(this.map, buffers) : null;
    // At many rows the cells cover a little more than was asked: whole bins that Python has ready.
    this.cellWindow = this.map?.window ?? this.window;
    this.cellPlace = this.map?.place ?? this.place;
    this.names = (message.names ?? []).map((name) => clean(name));
    this.lanes = new Map((message.lanes ?? []).map((lane) => [lane.id, lane]));
    this.picture = null;
  }

  /** The value that a level stands for, in the unit of the view. */
  valueOf(level) {
    const { min = 1, max = 1 } = this.map;
    return min * (max / min) ** ((level - 1) / 254);
  }

  /** The level that a value has: the inverse of valueOf. */
  levelOf(value) {
    const { min = 1, max = 1 } = this.map;
    if (!(max > min)) return 255;
    return Math.min(255, Math.max(1, 1 + (254 * Math.log(value / min)) / Math.log(max / min)));
  }

  /** The category and level of the cell at a time and place; null where it is empty. */
  cellAt(t, y) {
    if (!this.cells) return null;
    const { columns, rows } = this.map;
    const column = Math.floor(((t - this.cellWindow[0]) / (this.cellWindow[1] - this.cellWindow[0])) * columns);
    const row = Math.floor(((y - this.cellPlace[0]) / (this.cellPlace[1] - this.cellPlace[0])) * rows);
    if (column < 0 || column >= columns || row < 0 || row >= rows) return null;
    const index = row * columns + column;
    const level = this.cells.level[index];
    return level ? { category: this.cells.category[index] - 1, level } : null;
  }

  /** The single rows, those of the first categories on top: page faults over what they bring along. */
  sortedMarks() {
    this.sorted ??= [...this.map.marks].sort((a, b) => order(b[4]) - order(a[4]));
    return this.sorted;
  }

  /** Paint the raster once for a theme: a small canvas with one pixel a cell. */
  paint(colourOf) {
    if (!this.cells) return null;
    if (this.picture) return this.picture;
    const { columns, rows } = this.map;
    const canvas = document.createElement("canvas");
    canvas.width = columns;
    canvas.height = rows;
    const context = canvas.getContext("2d");
    const image = context.createImageData(columns, rows);
    const pixels = new Uint32Array(image.data.buffer);
    const known = new Map();
    for (let row = 0; row < rows; row++) {
      // Row 0 is the lowest address and stands at the bottom.
      const line = (rows - 1 - row) * columns;
      for (let column = 0; column < columns; column++) {
        const index = row * columns + column;
        const level = this.cells.level[index];
        if (!level) continue;
        const key = (this.cells.category[index] << 8) | level;
        let pixel = known.get(key);
        if (pixel === undefined) {
          const [r, g, b, a] = colourOf(this.cells.category[index] - 1, level);
          pixel = ((a << 24) | (b << 16) | (g << 8) | r) >>> 0;
          known.set(key, pixel);
        }
        pixels[line + column] = pixel;
      }
    }
    context.putImageData(image, 0, 0);
    this.picture = canvas;
    return canvas;
  }
}

// ---------------------------------------------------------------- the overview

/** The whole trace in one strip: bytes by cause, rows of faults, and the window as a brush. */
class Overview {
  constructor(app) {
    this.app = app;
    this.surface = new Surface("overview", "The whole trace: bytes moved over time, with the shown window");
    this.drag = null;
  }

  /** Time at an x, on the whole extent. */
  timeAt(x) {
    const { gutter, plotWidth } = this.app;
    const [start, end] = this.app.extent;
    return start + ((x - gutter) / plotWidth) * (end - start);
  }

  toX(t) {
    const { gutter, plotWidth } = this.app;
    const [start, end] = this.app.extent;
    return gutter + ((t - start) / (end - start)) * plotWidth;
  }

  draw() {
    const { app } = this;
    const c = this.surface.begin(app.width, OVERVIEW_HEIGHT);
    const bottom = OVERVIEW_HEIGHT - OVERVIEW_AXIS;
    this.surface.canvas.dataset.gutter = app.gutter;
    this.surface.canvas.dataset.right = RIGHT;
    c.fillStyle = app.colours.plot;
    c.fillRect(app.gutter, 0, app.plotWidth, bottom);
    this.drawStacks(c, bottom);
    this.drawFaults(c);
    this.drawAxis(c, bottom);
    this.drawBrush(c, bottom);
  }

  drawStacks(c, bottom) {
    const { app } = this;
    const overview = app.config.overview ?? {};
    const columns = overview.columns ?? 0;
    const stacks = overview.stacks ?? [];
    const sums = new Float64Array(columns);
    for (const stack of stacks) stack.values.forEach((value, i) => (sums[i] += value));
    const most = sums.reduce((a, b) => Math.max(a, b), 0);
    const room = bottom - OVERVIEW_FAULTS - 4;
    const base = new Float64Array(columns);
    const step = app.plotWidth / Math.max(columns, 1);
    for (const stack of stacks) {
      c.fillStyle = app.categoryColour("cause", stack.category);
      for (let i = 0; i < columns; i++) {
        const value = stack.values[i];
        if (!value || !most) continue;
        const height = Math.max((value / most) * room, 0.7);
        c.fillRect(app.gutter + i * step, bottom - base[i] - height, Math.max(step, 1), height);
        base[i] += height;
      }
    }
    c.font = BOLD;
    c.fillStyle = app.colours.text;
    c.fillText("Whole trace", 4, OVERVIEW_FAULTS + 12);
    c.font = FONT;
    c.fillStyle = app.colours.faint;
    c.fillText(most ? "bytes moved" : "nothing moved", 4, OVERVIEW_FAULTS + 27);
    if (most && app.gutter > 110) {
      const [start, end] = app.extent;
      c.fillText(`top ${bytesText(most)} in ${shortTime((end - start) / columns)}`, 4, OVERVIEW_FAULTS + 41, app.gutter - 10);
    }
  }

  drawFaults(c) {
    const { app } = this;
    const { faults, fault_label: label } = app.config.overview ?? {};
    c.font = FONT;
    c.fillStyle = app.colours.faint;
    c.fillText(faults ? (label ?? "fault rows") : "no fault rows", 4, OVERVIEW_FAULTS / 2 + 1, app.gutter - 8);
    if (!faults) return;
    const most = faults.reduce((a, b) => Math.max(a, b), 0);
    const step = app.plotWidth / Math.max(faults.length, 1);
    c.fillStyle = app.colours.text;
    faults.forEach((value, i) => {
      if (!value) return;
      c.globalAlpha = 0.2 + (0.7 * Math.log1p(value)) / Math.log1p(most);
      c.fillRect(app.gutter + i * step, 2, Math.max(step, 1), OVERVIEW_FAULTS - 4);
    });
    c.globalAlpha = 1;
  }

  drawAxis(c, bottom) {
    const { app } = this;
    const { ticks } = timeAxis(app.extent, app.origin, app.plotWidth);
    c.strokeStyle = app.colours.line;
    c.lineWidth = 1;
    c.beginPath();
    c.moveTo(app.gutter, bottom + 0.5);
    c.lineTo(app.gutter + app.plotWidth, bottom + 0.5);
    for (const { t } of ticks) {
      const x = Math.round(this.toX(t)) + 0.5;
      c.moveTo(x, bottom);
      c.lineTo(x, bottom + 4);
    }
    c.stroke();
    app.tickLabels(c, ticks, (t) => this.toX(t), bottom + 11);
  }

  drawBrush(c, bottom) {
    const { app } = this;
    const [left, right] = app.window.map((t) => this.toX(t));
    c.fillStyle = app.colours.shade;
    c.fillRect(app.gutter, 0, left - app.gutter, bottom);
    c.fillRect(right, 0, app.gutter + app.plotWidth - right, bottom);
    if (same(app.window, app.extent)) return;
    c.strokeStyle = app.colours.accent;
    c.lineWidth = 1.5;
    c.strokeRect(left, 0.75, Math.max(right - left, 1.5), bottom - 1.5);
    c.fillStyle = app.colours.accent;
    // Where the window is too narrow for two handles, one mark on top says where it is.
    const grips = right - left < 9 ? [[(left + right) / 2 - 4, -4, 8, 9]] : [left, right].map((x) => [x - 2.5, bottom / 2 - 10, 5, 20]);
    for (const grip of grips) {
      c.beginPath();
      c.roundRect(...grip, 2.5);
      c.fill();
    }
  }

  /** What a press at an x would do: move an edge, move the window, or begin a new one. */
  partAt(x) {
    const { app } = this;
    if (same(app.window, app.extent)) return "new";
    const [left, right] = app.window.map((t) => this.toX(t));
    const reach = right - left < 4 * HANDLE ? HANDLE / 2 : HANDLE;
    if (Math.abs(x - left) <= reach) return "left";
    if (Math.abs(x - right) <= reach) return "right";
    return x > left && x < right ? "move" : "new";
  }

  hover({ x }) {
    const cursors = { left: "ew-resize", right: "ew-resize", move: "grab", new: "crosshair" };
    this.surface.canvas.style.cursor = cursors[this.partAt(x)];
    this.app.tooltip.hide();
  }

  press({ x }) {
    const { app } = this;
    this.drag = { part: this.partAt(x), from: this.timeAt(x), window: app.window, place: app.place };
    app.remember();
    return true;
  }

  move({ x }) {
    const { app, drag } = this;
    const t = Math.min(Math.max(this.timeAt(x), app.extent[0]), app.extent[1]);
    const [start, end] = drag.window;
    if (drag.part === "move") app.show(within([start + t - drag.from, end + t - drag.from], app.extent, LEAST_TIME));
    else {
      const fixed = drag.part === "left" ? end : drag.part === "right" ? start : drag.from;
      app.show([Math.min(fixed, t), Math.max(fixed, t)]);
    }
  }

  release() {
    this.drag = null;
  }

  cancel() {
    this.app.show(this.drag.window);
    this.drag = null;
  }

  /** A click beside the window brings its middle there. */
  click({ x }) {
    const { app } = this;
    if (same(app.window, app.extent)) return;
    const half = (app.window[1] - app.window[0]) / 2;
    const t = this.timeAt(x);
    if (t < app.window[0] || t > app.window[1]) app.show([t - half, t + half]);
  }

  doubleClick() {
    this.app.showAll();
  }

  wheel(event, { x }) {
    return this.app.wheelTime(event, this.timeAt(x));
  }
}

/** Write a duration with two or three digits. */
function shortTime(ns) {
  const [unit, size] = timeUnit(ns);
  const value = ns / size;
  return `${value < 10 && size > 1 ? value.toFixed(1) : Math.round(value)} ${unit}`;
}

// ---------------------------------------------------------------- the lanes

/** What a merged run is a number of, by what a click on one of it picks. */
const SEVERAL = { kernel: "kernels", nvtx: "ranges", batch: "batches" };

/** The time axis, and below it kernels, ranges, batches and what moved, one lane each. */
class Lanes {
  constructor(app) {
    this.app = app;
    this.surface = new Surface("lanes", "Kernels, ranges, batches and migrations in the shown window");
    this.drag = null;
    this.rows = [];
    this.hits = [];
  }

  /** Where each lane stands; returns the height of all. */
  layOut() {
    let y = AXIS_HEIGHT;
    this.rows = (this.app.config.lanes ?? []).map((lane) => {
      const height = lane.kind === "bars" ? BARS_HEIGHT : INTERVALS_HEIGHT;
      const row = { lane, y, height };
      y += height + LANE_GAP;
      return row;
    });
    return y + 2;
  }

  draw() {
    const { app } = this;
    const height = this.layOut();
    const c = this.surface.begin(app.width, height);
    this.surface.canvas.dataset.gutter = app.gutter;
    this.surface.canvas.dataset.right = RIGHT;
    this.hits = [];
    this.drawAxis(c, height);
    for (const row of this.rows) {
      c.save();
      c.beginPath();
      c.rect(app.gutter, row.y, app.plotWidth, row.height);
      c.clip();
      c.fillStyle = app.colours.plot;
      c.fillRect(app.gutter, row.y, app.plotWidth, row.height);
      app.drawGrid(c, row.y, row.y + row.height);
      if (row.lane.kind === "bars") this.drawBars(c, row);
      else this.drawIntervals(c, row);
      c.restore();
      this.drawLabel(c, row);
    }
    app.drawCrosshair(c, AXIS_HEIGHT, height, true);
  }

  drawAxis(c) {
    const { app } = this;
    const { ticks, base } = app.axis;
    c.font = FONT;
    c.fillStyle = app.colours.faint;
    c.fillText(base ? `${base} +` : app.isRelative ? "from the first event" : "time", 4, AXIS_HEIGHT / 2, app.gutter - 8);
    app.tickLabels(c, ticks, (t) => app.toX(t), AXIS_HEIGHT / 2, app.crosshairWords(c));
    c.strokeStyle = app.colours.line;
    c.beginPath();
    for (const { t } of ticks) {
      const x = Math.round(app.toX(t)) + 0.5;
      if (x < app.gutter || x > app.gutter + app.plotWidth) continue;
      c.moveTo(x, AXIS_HEIGHT - 4);
      c.lineTo(x, AXIS_HEIGHT);
    }
    c.stroke();
  }

  drawLabel(c, { lane, y, height }) {
    const { app } = this;
    c.font = FONT;
    c.fillStyle = app.colours.text;
    let left = 4;
    if (lane.category) {
      c.fillStyle = app.categoryColour(lane.of ?? "cause", lane.category);
      c.fillRect(4, y + 4, 8, 8);
      c.fillStyle = app.colours.text;
      left = 16;
    }
    const middle = lane.kind === "bars" ? y + 8 : y + height / 2;
    c.fillText(fitted(c, clean(lane.label, 80), app.gutter - left - 6), left, middle);
    if (lane.kind !== "bars") return;
    const top = app.view?.lanes.get(lane.id)?.max;
    c.fillStyle = app.colours.faint;
    const unit = app.view?.lanes.get(lane.id)?.unit ?? lane.unit ?? "byte";
    c.fillText(fitted(c, top ? `top ${valueText(top, unit)}` : app.isAnswered() ? "none here" : "", app.gutter - left - 6), left, y + 21);
  }

  drawBars(c, { lane, y, height }) {
    const { app } = this;
    const colour = lane.category ? app.categoryColour(lane.of ?? "cause", lane.category) : app.colours.neutral;
    for (const view of app.views()) {
      const bars = view.lanes.get(lane.id);
      if (!bars?.values) continue;
      const [start, end] = view.window;
      const [left, right] = [app.toX(start), app.toX(end)];
      if (view !== app.base || app.view === app.base) {
        c.fillStyle = app.colours.plot;
        c.fillRect(left, y, right - left, height);
        app.drawGrid(c, y, y + height, left, right);
      }
      const step = (right - left) / bars.values.length;
      c.fillStyle = colour;
      for (let i = 0; i < bars.values.length; i++) {
        const value = bars.values[i];
        const x = left + i * step;
        if (!value || x + step < app.gutter || x > app.gutter + app.plotWidth) continue;
        const bar = Math.max((value / bars.max) * (height - 2), 1);
        c.fillRect(x, y + height - bar, Math.max(step, 1), bar);
      }
    }
  }

  drawIntervals(c, { lane, y, height }) {
    const { app } = this;
    const [low, high] = [app.gutter, app.gutter + app.plotWidth];
    const views = app.views();
    const view = views.at(-1);
    const drawn = [];
    for (const one of views) {
      const items = one.lanes.get(lane.id)?.items ?? [];
      for (const item of items) {
        // What the finer view covers comes from there.
        if (one !== view && item[0] >= view.window[0] && item[1] <= view.window[1]) continue;
        const left = Math.max(app.toX(item[0]), low);
        const right = Math.min(Math.max(app.toX(item[1]), app.toX(item[0]) + 1.5), high);
        if (right < low || left > high || right <= left) continue;
        const hit = { lane, item, name: one.names[item[2]] ?? "", left, right, y, bottom: y + height };
        this.drawItem(c, hit);
        drawn.push(hit);
      }
    }
    this.hits.push(...drawn);
    // Words come last, and end where the next interval begins: intervals may overlap.
    drawn.sort((a, b) => a.left - b.left);
    drawn.forEach((hit, i) => this.drawName(c, hit, Math.min(hit.right, drawn[i + 1]?.left ?? hit.right)));
  }

  drawItem(c, { lane, item, name, left, right, y, bottom }) {
    const { app } = this;
    const height = bottom - y;
    const several = item[3] > 1;
    c.globalAlpha = several ? 0.65 : 1;
    c.fillStyle = app.intervalColour(lane, name, item);
    const width = right - left;
    c.fillRect(left, y + 1, width > 3 ? width - 0.7 : width, height - 2);
    c.globalAlpha = 1;
    if (several && width > 6) {
      // A merged run is striped, so that nobody takes it for one interval.
      c.fillStyle = app.colours.stripe;
      for (let x = left + 3; x < right - 1; x += 6) c.fillRect(x, y + 1, 1.5, height - 2);
    }
    const picked = app.picked;
    if (picked && !several && picked.what === lane.pick && picked.id === item[4]) {
      c.strokeStyle = app.colours.accent;
      c.lineWidth = 2;
      c.strokeRect(left + 1, y + 2, Math.max(width - 2.7, 1), height - 4);
    }
  }

  drawName(c, { lane, item, name, left, y, bottom }, right) {
    const width = right - left;
    if (width < 26) return;
    c.font = FONT;
    const several = item[3] > 1;
    const count = countText(item[3]);
    const plain = `${count} ${SEVERAL[lane.pick] ?? "intervals"}`;
    const words = several ? (name ? `${count}\u2009\u00d7 ${name}` : plain) : name;
    // A number that has lost its word says nothing.
    const text = several && !name ? (c.measureText(words).width <= width - 10 ? words : "") : fitted(c, words, width - 10);
    if (!text) return;
    c.fillStyle = this.app.colours.intervalText;
    c.fillText(text, left + 5, (y + bottom) / 2 + 0.5);
  }

  /** The item or the lane under a point. */
  hitAt({ x, y }) {
    const row = this.rows.find((one) => y >= one.y && y < one.y + one.height);
    if (!row) return null;
    // A narrow item is hard to meet: one px on each side counts too.
    const items = this.hits.filter((one) => one.lane === row.lane && x >= one.left - 1 && x <= one.right + 1);
    const best = items.sort((a, b) => a.right - a.left - (b.right - b.left))[0];
    return { row, hit: best ?? null };
  }

  hover(point) {
    const { app } = this;
    const found = this.hitAt(point);
    this.surface.canvas.style.cursor = found?.hit?.lane.pick ? "pointer" : "grab";
    app.point(point.x >= app.gutter ? app.timeAt(point.x) : null, null);
    if (!found) app.tooltip.hide();
    else if (point.x < app.gutter) app.tooltip.show(this.surface, point, [clean(found.row.lane.label, 300)]);
    else app.tooltip.show(this.surface, point, this.words(found, point));
  }

  words({ row, hit }, { x }) {
    const { app } = this;
    const { lane } = row;
    if (lane.kind === "bars") {
      const view = app.view;
      const bars = view?.lanes.get(lane.id);
      const t = app.timeAt(x);
      if (!bars?.values || t < view.window[0] || t >= view.window[1]) return null;
      const size = (view.window[1] - view.window[0]) / bars.values.length;
      const index = Math.floor((t - view.window[0]) / size);
      const value = bars.values[index] ?? 0;
      return [clean(lane.label, 80), `${valueText(value, bars.unit ?? lane.unit ?? "byte")} in ${shortTime(size)}`, `from ${app.timeWords(view.window[0] + index * size)}`];
    }
    if (!hit) return null;
    const [start, end, , n] = hit.item;
    if (n > 1) return [hit.name, `${countText(n)} in this stretch; the name is the one busy longest`, `${timeText(end - start)} from ${app.timeWords(start)}`, "click to zoom in"];
    return [hit.name || clean(lane.label), `takes ${timeText(end - start)}`, `starts at ${app.timeWords(start)}`];
  }

  press({ x }) {
    const { app } = this;
    if (x < app.gutter) return false;
    this.drag = { x, window: app.window };
    app.remember();
    return true;
  }

  move({ x }) {
    const { app, drag } = this;
    this.surface.canvas.style.cursor = "grabbing";
    const shift = ((drag.x - x) / app.plotWidth) * (drag.window[1] - drag.window[0]);
    app.show(within([drag.window[0] + shift, drag.window[1] + shift], app.extent, LEAST_TIME));
  }

  release() {
    this.drag = null;
  }

  cancel() {
    this.app.show(this.drag.window);
    this.drag = null;
  }

  click(point) {
    const { app } = this;
    const hit = this.hitAt(point)?.hit;
    if (!hit) {
      if (point.x >= app.gutter) app.pick(null);
      return;
    }
    const [start, end, , n, id] = hit.item;
    const is_one = n === 1 && id !== null && id !== undefined && id !== -1;
    if (is_one && hit.lane.pick) {
      app.remember();
      app.pick({ what: hit.lane.pick, id, window: [start, end] });
    } else {
      app.remember();
      app.show(padded([start, end]));
    }
  }

  doubleClick(point) {
    if (this.hitAt(point)?.hit || point.x < this.app.gutter) return;
    this.app.remember();
    this.app.zoomTime(3, this.app.timeAt(point.x));
  }

  wheel(event, { x }) {
    return this.app.wheelTime(event, this.app.timeAt(Math.max(x, this.app.gutter)));
  }
}

/** A range with a little room on both sides. */
function padded([start, end]) {
  const room = Math.max((end - start) * 0.05, 10);
  return [start - room, end + room];
}

// ---------------------------------------------------------------- the map

/** Addresses against time: a heat map, or the single rows where few are in the window. */
class HeatMap {
  constructor(app) {
    this.app = app;
    this.surface = new Surface("map", "Addresses against time in the shown window");
    this.drag = null;
    this.box = null;
  }

  get height() {
    return this.app.config.height ?? DEFAULT_MAP_HEIGHT;
  }

  toY(place) {
    const [low, high] = this.app.place;
    return this.height - ((place - low) / (high - low)) * this.height;
  }

  placeAt(y) {
    const [low, high] = this.app.place;
    return low + ((this.height - y) / this.height) * (high - low);
  }

  draw() {
    const { app } = this;
    const c = this.surface.begin(app.width, this.height);
    this.surface.canvas.dataset.gutter = app.gutter;
    this.surface.canvas.dataset.right = RIGHT;
    c.fillStyle = app.colours.plot;
    c.fillRect(app.gutter, 0, app.plotWidth, this.height);
    c.save();
    c.beginPath();
    c.rect(app.gutter, 0, app.plotWidth, this.height);
    c.clip();
    app.drawGrid(c, 0, this.height);
    for (const view of app.views()) this.drawView(c, view);
    this.drawFolds(c);
    this.drawOutlines(c);
    app.drawCrosshair(c, 0, this.height, false);
    c.restore();
    this.drawAddresses(c);
    this.drawWords(c);
  }

  /** Draw one answer where it belongs in what is shown now. */
  drawView(c, view) {
    const { app } = this;
    if (!view.map) return;
    const [left, right] = view.cellWindow.map((t) => app.toX(t));
    const [bottom, top] = view.cellPlace.map((y) => this.toY(y));
    if (view !== app.base) {
      // The finer picture takes the place of the coarse one below it.
      c.fillStyle = app.colours.plot;
      c.fillRect(left, top, right - left, bottom - top);
      app.drawGrid(c, Math.max(top, 0), Math.min(bottom, this.height), Math.max(left, app.gutter), right);
    }
    if (view.map.mode === "marks") this.drawMarks(c, view);
    else {
      const picture = view.paint((category, level) => app.cellColour(view.by, category, level));
      if (!picture) return;
      c.imageSmoothingEnabled = false;
      c.drawImage(picture, left, top, right - left, bottom - top);
    }
  }

  drawMarks(c, view) {
    const { app } = this;
    const isRamp = app.isRamp(view.by);
    for (const [start, end, low, high, category, value] of view.sortedMarks()) {
      if (low === null || high === null) continue;
      const level = isRamp && value !== null ? view.levelOf(value) : 255;
      const [r, g, b] = app.cellColour(view.by, category, level);
      c.fillStyle = `rgb(${r},${g},${b})`;
      c.fillRect(...this.markBox(start, end, low, high));
    }
  }

  /** The px that a mark takes: never less than one can see. */
  markBox(start, end, low, high) {
    const { app } = this;
    const [x, y] = [app.toX(start), this.toY(high)];
    const width = Math.max(app.toX(end) - x, 2);
    const height = Math.max(this.toY(low) - y, 2);
    return [x, y - (height > 2 ? 0 : 1), width, height];
  }

  /** The runs of used addresses that are in view, lowest first, with their px. */
  visibleRuns() {
    const [low, high] = this.app.place;
    return this.app.runs
      .filter((run) => run.end > low && run.start < high)
      .map((run) => ({ run, bottom: this.toY(run.start), top: this.toY(run.end) }));
  }

  /** Mark each place where unused addresses are left out. */
  drawFolds(c) {
    const { app } = this;
    const folds = this.visibleRuns().filter(({ run }) => run.start > app.place[0]);
    if (!folds.length) return;
    const crowded = folds.length * 8 > this.height;
    c.strokeStyle = app.colours.fold;
    c.lineWidth = 1;
    c.setLineDash(crowded ? [1, 5] : [5, 4]);
    c.globalAlpha = crowded ? 0.5 : 1;
    c.beginPath();
    for (const { bottom } of folds) {
      const y = Math.round(bottom) + 0.5;
      c.moveTo(app.gutter, y);
      c.lineTo(app.gutter + app.plotWidth, y);
    }
    c.stroke();
    c.setLineDash([]);
    c.globalAlpha = 1;
  }

  drawOutlines(c) {
    const { app } = this;
    for (const [shape, isStrong] of [[app.lit, false], [app.picked?.what !== "box" ? app.picked : null, true]]) {
      if (!shape?.window || !shape.place) continue;
      const box = this.boxOf(shape);
      c.strokeStyle = app.colours.accent;
      c.lineWidth = isStrong ? 2 : 1.5;
      c.setLineDash(isStrong ? [] : [4, 3]);
      c.strokeRect(box.x, box.y, Math.max(box.width, 3), Math.max(box.height, 3));
      c.setLineDash([]);
    }
    const shape = this.box;
    if (!shape) return;
    const box = this.boxOf(shape);
    // A box that one has zoomed into is the view: nothing to mark.
    const isView = box.x <= app.gutter + 1 && box.x + box.width >= app.gutter + app.plotWidth - 1 && box.y <= 1 && box.y + box.height >= this.height - 1;
    if (isView && !this.drag) return;
    c.fillStyle = app.colours.select;
    c.fillRect(box.x, box.y, box.width, box.height);
    c.strokeStyle = app.colours.accent;
    c.lineWidth = 1.5;
    c.strokeRect(box.x, box.y, box.width, box.height);
    if (this.drag || box.width < 190 || box.height < 30) return;
    chip(c, app.colours, "double-click: zoom in \u00b7 Esc: clear", box.x + 5, box.y + 5);
  }

  boxOf({ window, place }) {
    const [x, right] = window.map((t) => this.app.toX(t));
    const [bottom, y] = place.map((p) => this.toY(p));
    return { x, y, width: right - x, height: bottom - y };
  }

  /** Addresses in the gutter: the start of each run first, then round addresses inside, never on each other. */
  drawAddresses(c) {
    const { app } = this;
    const taken = [];
    const put = (y, text, colour, font) => {
      if (y < 6 || y > this.height - 6 || taken.some((other) => Math.abs(other - y) < 14)) return false;
      taken.push(y);
      c.font = font;
      c.fillStyle = colour;
      c.textAlign = "right";
      c.fillText(fitted(c, text, app.gutter - 18), app.gutter - 12, y);
      c.textAlign = "left";
      return true;
    };
    const runs = this.visibleRuns();
    this.drawSpine(c, runs);
    const bySize = [...runs].sort((a, b) => b.bottom - b.top - (a.bottom - a.top));
    for (const { run, bottom, top } of bySize) {
      const edge = Math.min(Math.max(bottom - 7, 7), this.height - 7);
      const middle = (Math.max(top, 0) + Math.min(bottom, this.height)) / 2;
      if (run.va === null || run.va === undefined) {
        put(middle, clean(run.name ?? "other addresses", 40), app.colours.faint, FONT);
        continue;
      }
      if (bottom <= this.height + 1) put(edge, hexText(BigInt(run.va)), app.colours.text, MONO);
      const words = this.runWords(run);
      const room = Math.min(bottom, this.height) - Math.max(top, 0);
      if (words && room >= 30) put(Math.max(top, 0) + 8, words, app.colours.name, FONT);
    }
    for (const one of bySize) this.drawRound(one, put);
  }

  /** What a run is called: the allocation, and the process where there are several. */
  runWords(run) {
    const name = run.name ? clean(run.name, 60) : "";
    if (!this.app.hasProcesses) return name;
    return name ? `${name} (${run.pid})` : `process ${run.pid}`;
  }

  /** A line beside the map with a break at each fold. */
  drawSpine(c, runs) {
    const { app } = this;
    const x = app.gutter - 5.5;
    c.strokeStyle = app.colours.spine;
    c.lineWidth = 2;
    c.beginPath();
    for (const { bottom, top } of runs) {
      const gap = bottom - top > 6 ? 2 : 0.5;
      c.moveTo(x, Math.min(bottom, this.height) - gap);
      c.lineTo(x, Math.max(top, 0) + gap);
    }
    c.stroke();
  }

  /** Round addresses inside a run that is high enough. */
  drawRound({ run, bottom, top }, put) {
    const { app } = this;
    if (run.va === null || run.va === undefined) return;
    const perPixel = (app.place[1] - app.place[0]) / this.height;
    if (Math.min(bottom, this.height) - Math.max(top, 0) < 44) return;
    let step = 4096;
    while (step / perPixel < 40) step *= 2;
    const first = BigInt(run.va);
    const low = first + BigInt(Math.floor(Math.max(app.place[0] - run.start, 0)));
    const size = BigInt(step);
    let va = ((low + size - 1n) / size) * size;
    for (let i = 0; i < 40; i++, va += size) {
      const place = run.start + Number(va - first);
      if (place > run.end || place > app.place[1]) break;
      put(this.toY(place), hexText(va), app.colours.faint, MONO);
    }
  }

  /** Words where there is no picture. */
  drawWords(c) {
    const { app } = this;
    const words = app.emptyWords();
    if (!words) return;
    const [x, y] = [app.gutter + app.plotWidth / 2, this.height / 2];
    c.textAlign = "center";
    words.forEach((line, i) => {
      c.font = i ? FONT : `600 13px ${FONT.slice(5)}`;
      c.fillStyle = i ? app.colours.faint : app.colours.text;
      c.fillText(fitted(c, line, app.plotWidth - 20), x, y - (words.length - 1) * 9 + i * 19);
    });
    c.textAlign = "left";
  }

  /** Address, name and run at a place. */
  placeWords(place) {
    const run = this.app.runAt(place);
    if (!run) return null;
    if (run.va === null || run.va === undefined) return clean(run.name ?? "other addresses", 80);
    const va = BigInt(run.va) + BigInt(Math.floor(place - run.start));
    const words = this.runWords(run);
    return words ? `${hexText(va)}, ${words}` : hexText(va);
  }

  /** The fold nearest to a y, if it is within some px. */
  foldAt(y) {
    const { runs, place } = this.app;
    for (let i = 1; i < runs.length; i++) {
      const run = runs[i];
      if (run.start <= place[0] || run.start >= place[1] || Math.abs(this.toY(run.start) - y) > 3) continue;
      const before = runs[i - 1];
      if (run.va === null || before.va === null || run.pid !== before.pid) return "Other addresses begin here.";
      const gap = BigInt(run.va) - (BigInt(before.va) + BigInt(Math.round(before.end - before.start)));
      return `${bytesText(Number(gap))} of unused addresses are folded here.`;
    }
    return null;
  }

  hover(point) {
    const { app } = this;
    this.surface.canvas.style.cursor = "crosshair";
    if (point.x < app.gutter) {
      app.point(null, null);
      const words = this.foldAt(point.y) ?? this.placeWords(this.placeAt(point.y));
      app.tooltip.show(this.surface, point, words ? [words] : null);
      return;
    }
    const [t, place] = [app.timeAt(point.x), this.placeAt(point.y)];
    app.point(t, place);
    app.tooltip.show(this.surface, point, this.words(t, place, point));
    app.askHover(t, place);
  }

  words(t, place, { x, y }) {
    const { app } = this;
    const lines = [app.timeWords(t)];
    const where = this.placeWords(place);
    if (where) lines.push(where);
    const view = app.view;
    if (view?.map?.mode === "marks") {
      const mark = this.markAt(view, x, y);
      if (mark) {
        const value = mark[5] === null ? "" : `: ${valueText(mark[5], view.unit)}`;
        lines.unshift(`${clean(view.map.kinds?.[mark[6]] ?? "row", 80)}${value}`);
      }
    } else {
      const cell = view?.cellAt(t, place);
      if (cell) lines.unshift(`${app.categoryWord(view.by, cell.category)}: about ${valueText(view.valueOf(cell.level), view.unit)}`);
    }
    return lines;
  }

  markAt(view, x, y) {
    let best = null;
    for (const mark of view.sortedMarks()) {
      if (mark[2] === null) continue;
      const [left, top, width, height] = this.markBox(mark[0], mark[1], mark[2], mark[3]);
      if (x >= left - 2 && x <= left + width + 2 && y >= top - 2 && y <= top + height + 2) best = mark;
    }
    return best;
  }

  press(point) {
    if (point.x < this.app.gutter || !this.app.hasPlaces) return false;
    this.drag = { point, box: this.box };
    return true;
  }

  move(point) {
    const { app, drag } = this;
    const x = Math.min(Math.max(point.x, app.gutter), app.gutter + app.plotWidth);
    const y = Math.min(Math.max(point.y, 0), this.height);
    const [t0, t1] = [drag.point.x, x].map((one) => app.timeAt(one)).sort((a, b) => a - b);
    const [p0, p1] = [drag.point.y, y].map((one) => this.placeAt(one)).sort((a, b) => a - b);
    // A flat box is a stretch of time: nobody means a single row of pixels.
    const isFlat = Math.abs(y - drag.point.y) < 6 && Math.abs(x - drag.point.x) > 12;
    this.box = {
      window: [Math.floor(t0), Math.ceil(t1)],
      place: isFlat ? [...app.place].map(Math.round) : [Math.floor(p0), Math.ceil(p1)],
    };
    app.point(app.timeAt(x), this.placeAt(y));
    app.tooltip.show(this.surface, { x, y }, [`${timeText(t1 - t0)} x ${bytesText(this.box.place[1] - this.box.place[0])}`, `from ${app.timeWords(t0)}`]);
    app.invalidate();
  }

  release() {
    this.drag = null;
    this.app.tooltip.hide();
    if (this.box) this.app.pick({ what: "box", ...this.box });
    this.app.invalidate();
  }

  cancel() {
    this.box = this.drag.box;
    this.drag = null;
    this.app.invalidate();
  }

  isInBox(t, place) {
    const box = this.box;
    return box && t >= box.window[0] && t <= box.window[1] && place >= box.place[0] && place <= box.place[1];
  }

  click(point) {
    const { app } = this;
    if (point.x < app.gutter) return;
    if (!this.isInBox(app.timeAt(point.x), this.placeAt(point.y))) app.pick(null);
  }

  doubleClick(point) {
    const { app } = this;
    if (point.x < app.gutter) return;
    const [t, place] = [app.timeAt(point.x), this.placeAt(point.y)];
    app.remember();
    if (this.isInBox(t, place)) this.zoomToBox();
    else {
      app.zoomTime(3, t);
      app.zoomPlace(3, place);
    }
  }

  zoomToBox() {
    if (!this.box) return;
    this.app.show(this.box.window, this.box.place);
  }

  wheel(event, point) {
    const { app } = this;
    const isOnAxis = point.x < app.gutter;
    if (event.ctrlKey || event.altKey || isOnAxis) return app.wheelPlace(event, this.placeAt(point.y));
    return app.wheelTime(event, app.timeAt(point.x));
  }
}

/** Words on a small plate. */
function chip(c, colours, text, x, y) {
  c.font = FONT;
  const width = c.measureText(text).width + 12;
  c.fillStyle = colours.plate;
  c.beginPath();
  c.roundRect(x, y, width, 18, 4);
  c.fill();
  c.fillStyle = colours.text;
  c.fillText(text, x + 6, y + 9.5);
}

// ---------------------------------------------------------------- tooltip

class Tooltip {
  constructor(root) {
    this.root = root;
    this.element = make("div", { class: "nsan-tooltip", hook: "tooltip", role: "status", hidden: "" });
    root.append(this.element);
    this.own = [];
    this.more = [];
  }

  /** Show lines near a point of a surface; no lines hide it. */
  show(surface, point, lines) {
    if (!lines?.length) {
      this.hide();
      return;
    }
    this.own = lines;
    this.more = [];
    this.surface = surface;
    this.at = point;
    this.render();
  }

  /** Add what Python knows about the same point. */
  add(lines) {
    if (this.element.hidden) return;
    this.more = lines.map((line) => clean(line, 240));
    this.render();
  }

  render() {
    // What Python says is exact: it takes the place of what was read from the picture.
    const lines = this.more.length ? this.more : this.own;
    this.element.replaceChildren(...lines.map((line) => make("div", { text: clean(line, 240) })));
    this.element.hidden = false;
    const outer = this.root.getBoundingClientRect();
    const canvas = this.surface.canvas.getBoundingClientRect();
    const [width, height] = [this.element.offsetWidth, this.element.offsetHeight];
    const x = canvas.left - outer.left + this.at.x;
    const y = canvas.top - outer.top + this.at.y;
    const left = x + 14 + width < outer.width - 4 ? x + 14 : Math.max(x - 14 - width, 4);
    const top = y + 16 + height < outer.height - 4 ? y + 16 : Math.max(y - 12 - height, 4);
    this.element.style.left = `${left}px`;
    this.element.style.top = `${top}px`;
  }

  hide() {
    this.element.hidden = true;
  }
}

// ---------------------------------------------------------------- toolbar and filters

/** Colour by, filters, what is shown, and the buttons for the view. */
class Toolbar {
  constructor(app) {
    this.app = app;
    this.colourBy = make("div", { class: "nsan-segments", hook: "colour-by", role: "radiogroup", "aria-label": "Colour by" });
    this.filters = make("div", { class: "nsan-filters" });
    this.status = make("div", { class: "nsan-status", hook: "status", "aria-live": "polite" });
    this.back = this.button("back", "Back", "Go back to the view before (Backspace)", () => app.goBack());
    this.all = this.button("all", "Show all", "Show the whole trace (Home)", () => app.showAll());
    this.help = this.button("help", "?", "Keys and mouse (?)", () => app.toggleHelp());
    this.element = make(
      "div",
      { class: "nsan-toolbar" },
      make("span", { class: "nsan-caption", text: "Colour by" }),
      this.colourBy,
      this.filters,
      make("div", { class: "nsan-buttons" }, this.status, this.back, this.all, this.help),
    );
    this.open = null;
  }

  button(hook, text, title, act) {
    const button = make("button", { type: "button", class: "nsan-button", hook, text, title });
    this.app.listen(button, "click", act);
    return button;
  }

  /** Build what depends on the config. */
  build() {
    const { app } = this;
    this.colourBy.replaceChildren(
      ...(app.config.bys ?? []).map((by) => {
        const button = make("button", { type: "button", role: "radio", "data-value": by.id, text: clean(by.label, 30), title: `Colour the map by ${clean(by.label, 30)}` });
        app.listen(button, "click", () => app.colourBy(by.id));
        return button;
      }),
    );
    this.menus = app.config.offline
      ? []
      : FILTERS.filter(([key]) => (app.config.filters?.[key] ?? []).length > (CUTTING.has(key) ? 0 : 1)).map(([key, label]) => new FilterMenu(app, key, label));
    this.clear = this.button("filter-clear", "Clear filters", "Show everything again", () => app.setFilters({}));
    this.filters.replaceChildren(
      ...(this.menus.length ? [make("span", { class: "nsan-caption", text: "Filter" })] : []),
      ...this.menus.map((menu) => menu.element),
      this.clear,
    );
    this.update();
  }

  /** Show the state. */
  update() {
    const { app } = this;
    for (const button of this.colourBy.children) {
      const isOn = button.dataset.value === app.by;
      button.setAttribute("aria-checked", isOn);
      button.tabIndex = isOn ? 0 : -1;
    }
    for (const menu of this.menus ?? []) menu.update();
    if (this.clear) this.clear.hidden = !Object.values(app.filters).some((ids) => Array.isArray(ids));
    this.back.disabled = !app.history.length;
    this.all.disabled = app.isAll();
    this.status.textContent = app.statusWords();
  }
}

/** One filter: a button that opens a list with a search. */
class FilterMenu {
  constructor(app, key, label) {
    this.app = app;
    this.key = key;
    this.label = label;
    this.button = make("button", { type: "button", class: "nsan-button", hook: `filter-${key}`, "aria-haspopup": "true", "aria-expanded": "false" });
    this.popup = make("div", { class: "nsan-menu", hook: `filter-${key}-list`, role: "group", "aria-label": `Filter by ${label}`, hidden: "" });
    this.element = make("div", { class: "nsan-filter" }, this.button, this.popup);
    app.listen(this.button, "click", () => this.toggle(this.popup.hidden));
    app.listen(this.element, "keydown", (event) => {
      if (event.key !== "Escape" || this.popup.hidden) return;
      this.toggle(false);
      this.button.focus();
      event.stopPropagation();
    });
    this.update();
  }

  get entries() {
    return this.app.config.filters[this.key];
  }

  get kept() {
    return this.app.filters[this.key] ?? null;
  }

  toggle(isOpen) {
    if (isOpen) this.app.closeMenus();
    this.popup.hidden = !isOpen;
    this.button.setAttribute("aria-expanded", isOpen);
    if (!isOpen) return;
    this.fill();
    const outer = this.app.root.getBoundingClientRect();
    this.popup.style.left = "0px";
    const over = this.popup.getBoundingClientRect().right - (outer.right - 6);
    if (over > 0) this.popup.style.left = `${-over}px`;
    this.popup.querySelector("input")?.focus();
  }

  fill() {
    const { app } = this;
    this.list = make("div", { class: "nsan-menu-list" });
    const head = make("div", { class: "nsan-menu-head" });
    if (this.entries.length > 8) {
      this.search = make("input", { type: "search", placeholder: `Find among ${countText(this.entries.length)}`, "aria-label": "Find" });
      app.listen(this.search, "input", () => this.fillList());
      head.append(this.search);
    }
    const words = CUTTING.get(this.key);
    if (words) head.append(make("span", { class: "nsan-caption", text: words }));
    for (const [text, kept] of words ? [["All", null]] : [["All", null], ["None", []]]) {
      const button = make("button", { type: "button", class: "nsan-link", text, "data-value": text.toLowerCase() });
      app.listen(button, "click", () => app.setFilters({ ...app.filters, [this.key]: kept }));
      head.append(button);
    }
    this.popup.replaceChildren(head, this.list);
    const cut = app.config.filters_cut?.[this.key];
    if (cut) this.popup.append(make("div", { class: "nsan-note", text: `${countText(cut)} more are not listed.` }));
    this.fillList();
  }

  fillList() {
    const { app } = this;
    const wanted = (this.search?.value ?? "").toLowerCase();
    const found = this.entries.filter((entry) => String(entry.label).toLowerCase().includes(wanted));
    const rows = found.slice(0, 200).map((entry) => {
      const box = make("input", { type: "checkbox", value: entry.id });
      box.checked = this.isKept(entry.id);
      const words = make("span", { class: "nsan-name", dir: "ltr", text: clean(entry.label, 80), title: clean(entry.label, 600) });
      const swatch = this.key === "cause" || this.key === "access" ? app.swatch(this.key, entry.id) : null;
      const only = make("button", { type: "button", class: "nsan-link nsan-only", text: "only" });
      only.hidden = this.entries.length === 1;
      app.listen(box, "change", () => this.flip(entry.id, box.checked));
      app.listen(only, "click", (event) => {
        event.preventDefault();
        app.setFilters({ ...app.filters, [this.key]: [entry.id] });
      });
      return make("label", { class: "nsan-choice" }, box, swatch, words, only);
    });
    if (!rows.length) rows.push(make("div", { class: "nsan-note", text: "No name has this in it." }));
    if (found.length > 200) rows.push(make("div", { class: "nsan-note", text: `${countText(found.length - 200)} more: type to find them.` }));
    this.list.replaceChildren(...rows);
  }

  /** Whether a box is ticked: a filter that cuts begins with none, one that chooses among all with all. */
  isKept(id) {
    return this.kept === null ? !CUTTING.has(this.key) : this.kept.includes(id);
  }

  flip(id, isOn) {
    const all = this.entries.map((entry) => entry.id);
    const kept = new Set(all.filter((one) => this.isKept(one)));
    if (isOn) kept.add(id);
    else kept.delete(id);
    const ids = all.filter((one) => kept.has(one));
    // All kernels is less than all the time: there only "none" is no filter.
    const isNone = CUTTING.has(this.key) ? ids.length === 0 : ids.length === all.length;
    this.app.setFilters({ ...this.app.filters, [this.key]: isNone ? null : ids });
  }

  update() {
    const { kept } = this;
    const count = kept ? ` ${kept.length}/${this.entries.length}` : "";
    this.button.textContent = `${this.label}${count} \u25be`;
    this.button.classList.toggle("nsan-on", kept !== null);
    if (this.popup.hidden || !this.list) return;
    for (const box of this.list.querySelectorAll("input[type=checkbox]")) {
      const entry = this.entries.find((one) => String(one.id) === box.value);
      if (entry) box.checked = this.isKept(entry.id);
    }
  }
}

/** What the colours of the map mean; a click keeps only that. */
class Legend {
  constructor(app) {
    this.app = app;
    this.element = make("div", { class: "nsan-legend", hook: "legend" });
  }

  update() {
    const { app } = this;
    const key = JSON.stringify([app.by, app.theme, app.filters[app.by] ?? null, app.view?.map?.min, app.view?.map?.max, app.view?.by, app.isOtherShown()]);
    if (key === this.key) return;
    this.key = key;
    this.element.replaceChildren(...(app.isRamp(app.by) ? this.ramp() : this.categories()));
  }

  categories() {
    const { app } = this;
    const kept = app.filters[app.by] ?? null;
    const entries = app.presentCategories(app.by).map((entry) => {
      const isOn = kept === null || kept.includes(entry.id);
      const button = make(
        "button",
        { type: "button", "data-value": entry.id, "aria-pressed": isOn, title: app.config.offline ? null : "Show only this; Ctrl + click adds one; the same again shows all" },
        app.swatch(app.by, entry.id),
        make("span", { text: clean(entry.label, 40) }),
      );
      if (app.config.offline) button.disabled = true;
      else app.listen(button, "click", (event) => this.choose(entry.id, event.ctrlKey || event.metaKey || event.shiftKey));
      return button;
    });
    if (app.isOtherShown()) {
      entries.push(make("span", { class: "nsan-other" }, app.swatch(app.by, null), make("span", { text: clean(app.view.map.other ?? `no ${app.by}`, 40) })));
    }
    // They have addresses, but no cause and no access.
    if ((app.config.lanes ?? []).some((lane) => lane.id === "cpu_faults")) {
      entries.push(make("span", { class: "nsan-faint", text: "CPU page faults: lane only", title: "They have no cause and no access: colour by density to see their addresses." }));
    }
    return [make("span", { class: "nsan-caption", text: "Map" }), ...entries];
  }

  choose(id, isAdded) {
    const { app } = this;
    const all = app.presentCategories(app.by).map((entry) => entry.id);
    const kept = app.filters[app.by] ?? null;
    let ids = [id];
    if (isAdded && kept) ids = kept.includes(id) ? kept.filter((one) => one !== id) : [...kept, id];
    else if (kept?.length === 1 && kept[0] === id) ids = null;
    if (ids && (ids.length === 0 || ids.length === all.length)) ids = null;
    app.setFilters({ ...app.filters, [app.by]: ids });
  }

  ramp() {
    const { app } = this;
    const view = app.view?.by === app.by ? app.view : null;
    const bar = make("span", { class: "nsan-ramp" });
    bar.style.background = `linear-gradient(to right, ${RAMPS[app.theme].join(", ")})`;
    const label = (app.config.bys ?? []).find((by) => by.id === app.by)?.label ?? app.by;
    const map = view?.map;
    const words = (value) => (!map?.n ? "" : valueText(value, view.unit));
    return [
      make("span", { class: "nsan-caption", text: clean(label, 40) }),
      make("span", { text: words(map?.min ?? 1) }),
      bar,
      make("span", { text: words(map?.max) }),
      map?.n ? make("span", { class: "nsan-faint", text: "logarithmic" }) : null,
    ].filter(Boolean);
  }
}

// ---------------------------------------------------------------- clusters and facts

/** A part that scrolls, with a shade on each side where there is more. */
function scroller(app, ...children) {
  const body = make("div", { class: "nsan-scroll" }, ...children);
  app.listen(body, "scroll", () => shade(body), { passive: true });
  return body;
}

/** Say on which sides a part has more to scroll to. */
function shade(body) {
  const { scrollLeft, scrollTop, scrollWidth, scrollHeight, clientWidth, clientHeight } = body;
  const more = { left: scrollLeft > 1, right: scrollLeft + clientWidth < scrollWidth - 1, bottom: scrollTop + clientHeight < scrollHeight - 1 };
  if (body.parentElement) body.parentElement.dataset.more = Object.keys(more).filter((side) => more[side]).join(" ");
}

/** The columns of the clusters that one wants to see first, by their ids; the others follow. */
const FIRST_COLUMNS = ["start_ns", "duration_ns", "pid", "device_id", "pattern", "kernel", "n_pages", "n_faulted_pages", "bytes", "n_fault_rows"];

/** The clusters as a table: sorts by click, goes to a row by click or Enter. */
class ClusterTable {
  constructor(app) {
    this.app = app;
    this.sorted = null;
    this.body = scroller(app);
    this.title = make("div", { class: "nsan-section-title" });
    this.element = make("section", { class: "nsan-clusters", hook: "clusters", "aria-label": "Fault clusters" }, this.title, this.body);
  }

  /** What Python sends, each row with its number first, and the columns in the order of use. */
  get data() {
    const data = this.app.model.get("clusters") ?? {};
    if (!data.columns) return data;
    const rank = (column) => (FIRST_COLUMNS.includes(column.id) ? FIRST_COLUMNS.indexOf(column.id) : FIRST_COLUMNS.length);
    const places = data.columns.map((_, i) => i).sort((a, b) => rank(data.columns[a]) - rank(data.columns[b]) || a - b);
    const ordered = (list) => places.map((i) => list[i]);
    return {
      ...data,
      columns: [{ id: "#", label: "#", align: "right", title: "Number of the cluster" }, ...ordered(data.columns)],
      rows: (data.rows ?? []).map((row) => ({ ...row, cells: [String(row.number ?? row.id), ...ordered(row.cells)], sort: row.sort ? [row.number ?? row.id, ...ordered(row.sort)] : undefined })),
    };
  }

  update() {
    const { app, data } = this;
    const rows = data.rows ?? [];
    const total = data.total ?? rows.length;
    const count = !rows.length ? "" : total > rows.length ? `${countText(rows.length)} of ${countText(total)}` : countText(rows.length);
    this.title.replaceChildren(
      make("span", { text: "Fault clusters" }),
      ...(count ? [make("span", { class: "nsan-faint", text: count })] : []),
      ...[badge(data.kind, app.config.kind_word)].filter(Boolean),
    );
    if (!rows.length) {
      const words = data.state === "failed" ? "The clusters could not be computed." : data.state === "ready" || data.empty ? data.empty || "No fault cluster: no place in time and addresses has many page faults." : "Looking for clusters\u2026";
      this.body.replaceChildren(make("p", { class: "nsan-empty", text: clean(words, 300) }), ...this.note(data));
      shade(this.body);
      return;
    }
    const table = make("table", {}, this.head(data), make("tbody", {}, ...this.order(rows).map((row, i) => this.row(data, row, i))));
    this.body.replaceChildren(table, ...this.note(data));
    app.listen(table, "keydown", (event) => this.key(event));
    shade(this.body);
  }

  note(data) {
    return data.note ? [make("p", { class: "nsan-note", text: clean(data.note, 400) })] : [];
  }

  head(data) {
    const cells = data.columns.map((column, i) => {
      const button = make("button", { type: "button", text: clean(column.label, 40), title: clean(column.title ?? `Sort by ${column.label}`, 200) });
      this.app.listen(button, "click", () => this.sortBy(i, this.isNumeric(column)));
      const isSorted = this.sorted?.column === i;
      if (isSorted) button.textContent += this.sorted.isDown ? " \u25be" : " \u25b4";
      return make("th", { scope: "col", class: this.isNumeric(column) ? "nsan-number" : null, "aria-sort": isSorted ? (this.sorted.isDown ? "descending" : "ascending") : "none" }, button);
    });
    return make("thead", {}, make("tr", {}, ...cells));
  }

  cellClass(column) {
    if (this.isNumeric(column)) return "nsan-number";
    return column.id === "kernel" ? "nsan-wide" : null;
  }

  isNumeric(column) {
    return column.align === "right" || column.numeric === true;
  }

  sortBy(column, isNumeric) {
    const isDown = this.sorted?.column === column ? !this.sorted.isDown : isNumeric;
    this.sorted = { column, isDown };
    this.update();
    this.body.querySelectorAll("th button")[column].focus();
  }

  order(rows) {
    if (!this.sorted) return rows;
    const { column, isDown } = this.sorted;
    const key = (row) => (row.sort ? row.sort[column] : sortKey(row.cells[column]));
    const keyed = rows.map((row) => [key(row), row]);
    const known = keyed.filter(([k]) => k !== null && k !== undefined);
    known.sort((a, b) => (isDown ? compare(b[0], a[0]) : compare(a[0], b[0])));
    return [...known, ...keyed.filter(([k]) => k === null || k === undefined)].map(([, row]) => row);
  }

  row(data, row, index) {
    const { app } = this;
    const cells = row.cells.map((text, i) => make("td", { dir: "ltr", class: this.cellClass(data.columns[i]), text: clean(shortAddress(text), 80), title: String(text).length > 12 ? clean(text, 600) : null }));
    const isPicked = app.picked?.what === "cluster" && app.picked.id === row.id;
    const element = make("tr", { "data-id": row.id, tabindex: index === 0 ? 0 : -1, "aria-selected": isPicked }, ...cells);
    app.listen(element, "click", () => this.pick(row));
    app.listen(element, "pointerenter", () => app.light(row));
    app.listen(element, "pointerleave", () => app.light(null));
    app.listen(element, "focus", () => app.light(row));
    app.listen(element, "blur", () => app.light(null));
    return element;
  }

  pick(row) {
    this.app.remember();
    this.app.pick({ what: "cluster", id: row.id, window: row.window, place: row.place ?? undefined });
  }

  key(event) {
    const row = event.target.closest?.("tr[data-id]");
    if (!row) return;
    const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    if (step) row[step]?.focus();
    else if (event.key === "Enter" || event.key === " ") this.pick(this.data.rows.find((one) => String(one.id) === row.dataset.id));
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** Show which row is picked. */
  mark() {
    const { picked } = this.app;
    for (const row of this.body.querySelectorAll("tr[data-id]")) {
      row.setAttribute("aria-selected", picked?.what === "cluster" && String(picked.id) === row.dataset.id);
    }
  }
}

/** Facts on what is picked; on what is in view where nothing is. */
class Panel {
  constructor(app) {
    this.app = app;
    this.element = make("section", { class: "nsan-panel", hook: "panel", "aria-label": "Facts" });
  }

  update() {
    const { app } = this;
    const panel = app.panel();
    // Where all figures are of one kind, the title says so once.
    const kinds = new Set((panel.facts ?? []).map(([, , kind]) => kind).filter((kind) => kind && kind !== app.config.kind_word));
    const whole = kinds.size === 1 && !(panel.facts ?? []).some(([, , kind]) => kind === "recorded") ? [...kinds][0] : app.config.kind_word;
    const title = make("div", { class: "nsan-section-title" }, make("span", { class: "nsan-name", dir: "ltr", text: clean(panel.title, 90), title: clean(panel.title, 600) }), ...[badge(panel.kind ?? whole, app.config.kind_word)].filter(Boolean));
    if (panel.isPicked) {
      const close = make("button", { type: "button", class: "nsan-link", text: "clear", title: "Forget what is picked (Esc)" });
      app.listen(close, "click", () => app.pick(null));
      title.append(close);
    }
    const facts = make("dl", {});
    for (const [label, text, kind] of panel.facts ?? []) {
      facts.append(
        make("dt", { text: clean(label, 60) }),
        make("dd", {}, make("span", { class: "nsan-value", dir: "ltr", text: unbroken(clean(text, 160)), title: String(text).length > 100 ? clean(text, 600) : null }), ...[badge(kind, whole)].filter(Boolean)),
      );
    }
    const body = facts.childElementCount ? facts : make("p", { class: "nsan-empty", text: "Click a kernel, a range, a batch or a cluster, or drag a box on the map." });
    this.element.replaceChildren(title, scroller(app, body, ...(panel.note ? [make("p", { class: "nsan-note", text: clean(panel.note, 400) })] : [])));
    shade(this.element.lastChild);
  }
}

// ---------------------------------------------------------------- the whole

/** State and wiring: what is shown, what was asked, and who draws it. */
class Explorer {
  /**
   * @param {Object} model An anywidget model: get, on, off, send.
   * @param {HTMLElement} el Where to draw.
   */
  constructor(model, el) {
    this.model = model;
    this.id = Array.from({ length: 3 }, () => Math.random().toString(36).slice(2, 8)).join("");
    this.abort = new AbortController();
    this.timers = new Map();
    this.frame = 0;
    this.nLooks = 0;
    this.nDrawn = 0;
    this.nViews = 0;
    this.nHovers = 0;
    this.asked = null;
    this.isStale = false;
    this.view = null;
    this.bases = new Map();
    this.picked = null;
    this.lit = null;
    this.pointer = null;
    this.history = [];
    // What the user has changed since the last look: only that may move what Python knows.
    this.userMoved = new Set();
    this.failures = 0;
    this.isGone = false;
    this.foreignWheel = 0;
    this.lastPointer = null;
    this.width = 0;
    this.filters = {};
    this.by = "cause";
    this.theme = "light";
    this.build(el);
    this.takeConfig(true);
    this.takeFilters();
    this.connect(el);
  }

  // ---- building

  build(el) {
    this.root = make("div", { class: "nsan-explorer", tabindex: "0", role: "application", "aria-label": "Trace explorer of nsan" });
    this.header = make("header", { class: "nsan-header", hook: "header" });
    this.busy = make("span", { class: "nsan-busy", hook: "busy", role: "status", hidden: "" });
    this.toolbar = new Toolbar(this);
    this.overview = new Overview(this);
    this.lanes = new Lanes(this);
    this.map = new HeatMap(this);
    this.legend = new Legend(this);
    this.clusters = new ClusterTable(this);
    this.facts = new Panel(this);
    this.notes = make("ul", { class: "nsan-notes", hook: "notes" });
    this.error = make("div", { class: "nsan-error", hook: "error", role: "alert", hidden: "" });
    this.helpBox = this.buildHelp();
    this.root.append(
      this.header,
      this.toolbar.element,
      this.overview.surface.canvas,
      this.lanes.surface.canvas,
      this.map.surface.canvas,
      this.legend.element,
      make("div", { class: "nsan-below" }, this.clusters.element, this.facts.element),
      this.notes,
      this.error,
      this.helpBox,
    );
    this.tooltip = new Tooltip(this.root);
    el.append(this.root);
  }

  buildHelp() {
    const list = make("dl", {});
    for (const [keys, words] of HELP) list.append(make("dt", { text: keys }), make("dd", { text: words }));
    const close = make("button", { type: "button", class: "nsan-button", text: "Close" });
    this.listen(close, "click", () => this.toggleHelp(false));
    return make("div", { class: "nsan-help", hook: "help-text", role: "dialog", "aria-label": "Keys and mouse", hidden: "" }, make("div", { class: "nsan-section-title" }, make("span", { text: "Keys and mouse" }), close), list);
  }

  /** Listen until the view is destroyed; an error in the handler shows under the view. */
  listen(target, type, act, options = {}) {
    target.addEventListener(type, this.guarded(act), { signal: this.abort.signal, ...options });
  }

  guarded(act) {
    return (...given) => {
      try {
        return act(...given);
      } catch (error) {
        this.fail(error);
        return undefined;
      }
    };
  }

  /** Show an error of this file under the view, and tell Python. */
  fail(error) {
    const text = clean(`The view failed: ${error?.stack ?? error}`.replaceAll("\n", " | "), 600);
    this.failures += 1;
    this.showError(text);
    if (this.failures <= 3) this.send({ kind: "failed", text });
  }

  connect(el) {
    this.onModel = [
      ["change:config", () => this.takeConfig(false)],
      ["change:clusters", () => this.clusters.update()],
      ["change:panel", () => this.takePanel()],
      ["change:error", () => this.showError(this.model.get("error"))],
      ["change:filters", () => this.takeFilters()],
      ["change:busy", () => this.showBusy()],
      ["msg:custom", (message, buffers) => this.receive(message, buffers ?? [])],
    ].map(([name, act]) => [name, this.guarded(act)]);
    for (const [name, act] of this.onModel) this.model.on(name, act);
    for (const part of [this.overview, this.lanes, this.map]) this.connectPart(part);
    this.listen(window, "keydown", (event) => this.claimKey(event), { capture: true });
    this.listen(this.root, "keydown", (event) => this.key(event));
    this.listen(document, "pointerdown", (event) => this.pressAnywhere(event), { capture: true });
    this.listen(document, "wheel", (event) => this.wheelAnywhere(event), { capture: true, passive: true });
    this.sizes = new ResizeObserver(this.guarded(() => this.resize()));
    this.sizes.observe(this.root);
    this.themes = new MutationObserver(this.guarded(() => this.takeTheme()));
    this.themes.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name", "class", "data-vscode-theme-kind"] });
    this.darkness = window.matchMedia("(prefers-color-scheme: dark)");
    this.listen(this.darkness, "change", () => this.takeTheme());
    this.takePanel();
    this.clusters.update();
    this.showError(this.model.get("error"));
    this.showBusy();
    this.resize();
  }

  /** Mouse and pen on one canvas: hover, drag, click, double-click, wheel. */
  connectPart(part) {
    const { canvas } = part.surface;
    let pressed = null;
    let hasMoved = false;
    this.listen(canvas, "pointerdown", (event) => {
      if (event.button !== 0 || !this.isReady) return;
      this.root.focus({ preventScroll: true });
      hasMoved = false;
      const point = part.surface.at(event);
      if (!part.press(point)) return;
      pressed = point;
      canvas.setPointerCapture(event.pointerId);
    });
    this.listen(canvas, "pointermove", (event) => {
      if (!this.isReady) return;
      const point = part.surface.at(event);
      if (!pressed) part.hover(point);
      else if (hasMoved || Math.hypot(point.x - pressed.x, point.y - pressed.y) > 3) {
        hasMoved = true;
        part.move(point);
      }
    });
    const release = (isKept) => {
      if (!pressed) return;
      pressed = null;
      if (isKept && hasMoved) part.release();
      else if (isKept) part.drag = null;
      else part.cancel();
    };
    this.listen(canvas, "pointerup", () => release(true));
    this.listen(canvas, "pointercancel", () => release(false));
    this.cancels = [...(this.cancels ?? []), () => pressed && (release(false), true)];
    // The second click of a double-click is no click of its own.
    this.listen(canvas, "click", (event) => {
      if (this.isReady && !hasMoved && event.detail <= 1) part.click(part.surface.at(event));
    });
    this.listen(canvas, "dblclick", (event) => {
      if (this.isReady && !hasMoved) part.doubleClick(part.surface.at(event));
    });
    this.listen(canvas, "pointerleave", () => {
      this.tooltip.hide();
      this.point(null, null);
    });
    this.listen(
      canvas,
      "wheel",
      (event) => {
        if (!this.isReady || this.isScrolling(event)) return;
        if (part.wheel(event, part.surface.at(event))) event.preventDefault();
      },
      { passive: false },
    );
  }

  // ---- from Python

  takeConfig(isFirst) {
    const config = this.model.get("config") ?? {};
    const before = this.config;
    this.config = config;
    this.extent = [config.extent?.[0] ?? 0, Math.max(config.extent?.[1] ?? 1, (config.extent?.[0] ?? 0) + 1)];
    this.places = [0, Math.max(config.places ?? 0, 1)];
    this.runs = config.runs ?? [];
    this.hasPlaces = this.runs.length > 0;
    this.hasProcesses = new Set(this.runs.filter((run) => run.va).map((run) => run.pid)).size > 1;
    const origin = Number(config.origin_ns ?? 0);
    // Beyond some hours the session's clock is a date: times count from the first event then.
    this.isRelative = Math.abs(origin) > 1e13;
    this.origin = this.isRelative ? 0 : origin;
    const isOther = !before?.extent || !same(before.extent, config.extent ?? []) || before.places !== config.places;
    if (isFirst || isOther) {
      this.window = [...this.extent];
      this.place = [...this.places];
      this.history = [];
      this.view = null;
      this.bases.clear();
    }
    if (!(config.bys ?? []).some((by) => by.id === this.by)) this.by = config.bys?.[0]?.id ?? "cause";
    this.takeTheme();
    this.buildHeader();
    const choices = JSON.stringify([config.bys, config.filters, config.filters_cut, config.offline]);
    if (choices !== this.choices) this.toolbar.build();
    this.choices = choices;
    this.notes.replaceChildren(...(config.notes ?? []).map((note) => make("li", { text: clean(note, 400) })));
    this.notes.hidden = !(config.notes ?? []).length;
    this.invalidate();
    if (isFirst || isOther) this.look();
  }

  get isReady() {
    return Boolean(this.config?.extent);
  }

  buildHeader() {
    const { config } = this;
    const figures = (config.figures ?? []).map(([label, text, kind]) =>
      make("div", { class: "nsan-figure" }, make("span", { class: "nsan-figure-label", text: clean(label, 40) }), make("span", { class: "nsan-figure-text", text: clean(text, 60) }), ...[badge(kind, config.kind_word)].filter(Boolean)),
    );
    this.header.replaceChildren(
      make(
        "div",
        { class: "nsan-title" },
        make("strong", { class: "nsan-name", dir: "ltr", text: clean(config.title ?? "nsan", 120), title: clean(config.title ?? "", 600) }),
        ...[badge(config.kind_word ?? config.kind)].filter(Boolean),
        ...(config.offline ? [make("span", { class: "nsan-badge", text: "offline copy", title: "A stored picture: zooming enlarges it, filters need the notebook." })] : []),
        make("span", { class: "nsan-faint nsan-name", dir: "ltr", text: clean(config.subtitle ?? "", 200) }),
        this.busy,
      ),
      ...(figures.length ? [make("div", { class: "nsan-figures" }, ...figures, make("span", { class: "nsan-faint", hook: "more-figures" }))] : []),
    );
    this.fitFigures();
  }

  /** Keep the figures to two lines; what does not fit is said in a title, and stands in the panel. */
  fitFigures() {
    const box = this.header.querySelector(".nsan-figures");
    if (!box || !this.width) return;
    const more = box.lastChild;
    const figures = [...box.children].slice(0, -1);
    for (const one of figures) one.hidden = false;
    let n = figures.length;
    const say = () => {
      more.textContent = n < figures.length ? `and ${figures.length - n} more` : "";
      more.title = figures.slice(n).map((one) => [...one.children].map((part) => part.textContent).join(" ")).join("\n");
    };
    say();
    const lines = () => new Set([...box.children].filter((one) => !one.hidden && one.textContent).map((one) => one.offsetTop + one.offsetHeight)).size;
    while (n > 1 && lines() > 2) {
      n -= 1;
      figures[n].hidden = true;
      say();
    }
  }

  takeFilters() {
    this.filters = { ...(this.model.get("filters") ?? {}) };
    this.toolbar.update();
    this.invalidate();
  }

  takePanel() {
    const panel = this.model.get("panel") ?? {};
    const isOther = panel.what && panel.what !== "box" && panel.id !== undefined && panel.id !== this.picked?.id;
    if (isOther) this.picked = { what: panel.what, id: panel.id };
    // Python code has cleared what was picked.
    if (!panel.title) this.picked = this.map.box = null;
    this.facts.update();
    this.clusters.mark();
    this.invalidate();
  }

  showBusy() {
    const words = this.isSlow ? (this.asked ? "Waiting for this window\u2026" : "No answer yet: the kernel is busy, or gone") : this.model.get("busy");
    this.busy.textContent = clean(words, 120);
    this.busy.hidden = !words;
  }

  showError(text) {
    this.error.hidden = !text;
    if (!text) {
      this.error.replaceChildren();
      return;
    }
    const close = make("button", { type: "button", class: "nsan-link", text: "hide" });
    this.listen(close, "click", () => {
      this.showError("");
      this.send({ kind: "clear_error" });
    });
    const lines = String(text).split("\n").slice(-60);
    this.error.replaceChildren(make("div", { class: "nsan-section-title" }, make("span", { text: "An error" }), close), make("pre", { text: lines.map((line) => clean(line, 400)).join("\n") }));
  }

  receive(message, buffers) {
    if (message.kind === "view" && message.view === this.id) this.takeView(message, buffers);
    else if (message.kind === "go") this.go(message);
    else if (message.kind === "stale") {
      this.bases.clear();
      this.isStale = true;
      this.look();
    } else if (message.kind === "failed" && message.view === this.id && message.id === this.asked?.id) {
      // No picture comes: the error area says why. The next move asks again.
      this.endLook();
    } else if (message.kind === "hover" && message.view === this.id && message.id === this.nHovers) {
      if (message.lines?.length) this.tooltip.add(message.lines);
    }
  }

  /** Move because Python code says so: exactly there. */
  go({ window, place, by }) {
    if (by) {
      this.by = by;
      this.userMoved.delete("by");
    }
    if (window !== undefined) this.userMoved.delete("window");
    if (place !== undefined) this.userMoved.delete("place");
    this.hasMoved = true;
    const next = window === null ? [...this.extent] : (window ?? this.window);
    const nextPlace = place === null ? [...this.places] : (place ?? this.place);
    if (!same(next, this.window) || !same(nextPlace, this.place)) {
      if (!this.isRemembered) this.remember();
      this.window = [...next];
      this.place = [...nextPlace];
    }
    this.isRemembered = false;
    this.moved();
  }

  /** Say what is shown now, ask for it, and draw what there is already. */
  moved() {
    this.tell();
    this.look();
    this.invalidate();
  }

  takeView(message, buffers) {
    // An answer may come late, from a kernel that was busy; one to an older question is of no use.
    if (!(message.id > this.nDrawn && message.id <= this.nLooks)) return;
    this.nDrawn = message.id;
    const isAgain = this.asked?.isAgain;
    this.endLook();
    if (!this.nViews && !this.hasMoved) {
      this.window = [...message.window];
      this.place = [...message.place];
      this.by = message.by;
    }
    if (message.by === this.by) {
      this.view = new View(message, buffers);
      this.isStale = false;
      if (same(this.view.window, this.extent) && same(this.view.place, this.places)) this.bases.set(this.by, this.view);
      this.nViews += 1;
      if (!this.facts.element.contains(document.activeElement)) this.facts.update();
      this.invalidate();
    }
    if (isAgain) this.look();
  }

  // ---- to Python

  /**
   * Send a message; where the kernel is gone, say so once. Each try is a try: nothing is lost by it.
   * @returns {boolean} Whether it was sent.
   */
  send(message) {
    try {
      this.model.send(message);
    } catch {
      // What the notebook says of it is of no use to the reader: "Cannot send".
      if (!this.isGone) this.showError(GONE);
      this.setGone(true);
      return false;
    }
    if (this.isGone) this.setGone(false);
    return true;
  }

  setGone(isGone) {
    this.isGone = isGone;
    this.facts.update();
    this.invalidate();
  }

  /** Ask for what the window needs: soon, one question at a time. */
  look() {
    if (!this.isReady) return;
    if (this.asked) {
      this.asked.isAgain = true;
      return;
    }
    if (!this.timers.has("look")) this.later("look", LOOK_DELAY, () => this.ask());
  }

  ask() {
    this.cancelTimer("look");
    if (!this.width || !this.isReady) return;
    if (this.asked) {
      this.asked.isAgain = true;
      return;
    }
    this.nLooks += 1;
    // The first look takes over what Python code has set before; then the browser says what it shows.
    const isFirst = !this.nViews && !this.hasMoved;
    this.asked = { id: this.nLooks, isAgain: false };
    this.later("slow", SLOW_LOOK, () => this.setSlow(true));
    this.later("lost", LOST_LOOK, () => {
      // The kernel may be busy for long, or gone. The next move may ask again; a late answer is taken.
      this.asked = null;
      this.setSlow(true);
    });
    const isSent = this.send({
      kind: "look",
      view: this.id,
      id: this.nLooks,
      window: isFirst ? null : this.window,
      place: isFirst ? null : this.place,
      by: isFirst ? null : this.by,
      // The same explorer may be shown twice: a view that is only drawn anew moves nothing in Python.
      moved: this.userMoved.size > 0,
      columns: Math.max(1, Math.min(MOST_COLUMNS, Math.floor(this.plotWidth / 2))),
      rows: Math.max(1, Math.min(MOST_ROWS, Math.floor(this.map.height / 2))),
    });
    if (isSent) this.userMoved.clear();
    else this.endLook();
  }

  endLook() {
    this.asked = null;
    this.cancelTimer("slow");
    this.cancelTimer("lost");
    this.setSlow(false);
  }

  setSlow(isSlow) {
    const isOther = Boolean(this.isSlow) !== isSlow;
    this.isSlow = isSlow;
    this.showBusy();
    if (isOther && !this.panel().isPicked) this.facts.update();
  }

  askHover(t, place) {
    this.nHovers += 1;
    if (this.config.offline) return;
    const id = this.nHovers;
    this.cancelTimer("hover");
    this.later("hover", HOVER_DELAY, () =>
      this.send({
        kind: "hover",
        view: this.id,
        id,
        t,
        y: place,
        dt: (this.window[1] - this.window[0]) / this.plotWidth,
        dy: (this.place[1] - this.place[0]) / this.map.height,
      }),
    );
  }

  /** Pick a thing, or nothing. */
  pick(thing) {
    if (!thing && !this.picked && !this.map.box && !this.model.get("panel")?.title) return;
    if (thing?.what !== "box") this.map.box = null;
    this.picked = thing;
    this.isRemembered = Boolean(thing);
    this.send({ kind: "pick", ...(thing ?? { what: null }) });
    this.clusters.mark();
    this.facts.update();
    this.invalidate();
  }

  setFilters(filters) {
    this.filters = Object.fromEntries(FILTERS.map(([key]) => [key, filters[key] ?? null]));
    this.toolbar.update();
    this.invalidate();
    this.cancelTimer("filter");
    this.later("filter", 120, () => this.send({ kind: "filter", filters: this.filters }));
  }

  colourBy(by) {
    if (by === this.by) return;
    this.hasMoved = true;
    this.userMoved.add("by");
    this.by = by;
    this.look();
    this.invalidate();
  }

  // ---- moving

  /** Show a window of time and, if given, of places, because the user wants it; then ask for it. */
  show(window, place = this.place) {
    this.hasMoved = true;
    const [nextWindow, nextPlace] = [within(window, this.extent, LEAST_TIME), within(place, this.places, LEAST_PLACE)];
    if (!same(nextWindow, this.window)) this.userMoved.add("window");
    if (!same(nextPlace, this.place)) this.userMoved.add("place");
    this.window = nextWindow;
    this.place = nextPlace;
    this.moved();
  }

  isAll() {
    return same(this.window, this.extent) && same(this.place, this.places);
  }

  showAll() {
    if (this.isAll()) return;
    this.remember();
    this.show(this.extent, this.places);
  }

  /** Keep the view for "back"; a gesture of many small steps is one. */
  remember() {
    const last = this.history.at(-1);
    if (last && same(last.window, this.window) && same(last.place, this.place)) return;
    this.history.push({ window: this.window, place: this.place });
    if (this.history.length > 100) this.history.shift();
  }

  goBack() {
    let last = this.history.pop();
    while (last && same(last.window, this.window) && same(last.place, this.place)) last = this.history.pop();
    if (last) this.show(last.window, last.place);
    this.invalidate();
  }

  zoomed([low, high], [all0, all1], factor, at, least) {
    const span = Math.min(Math.max((high - low) * factor, Math.min(least, all1 - all0)), all1 - all0);
    const share = (Math.min(Math.max(at, low), high) - low) / (high - low);
    const start = at - share * span;
    return within([start, start + span], [all0, all1], least);
  }

  zoomTime(factor, at = (this.window[0] + this.window[1]) / 2) {
    this.show(this.zoomed(this.window, this.extent, factor, at, LEAST_TIME));
  }

  zoomPlace(factor, at = (this.place[0] + this.place[1]) / 2) {
    this.show(this.window, this.zoomed(this.place, this.places, factor, at, LEAST_PLACE));
  }

  panTime(share) {
    const shift = (this.window[1] - this.window[0]) * share;
    this.show([this.window[0] + shift, this.window[1] + shift]);
  }

  panPlace(share) {
    const shift = (this.place[1] - this.place[0]) * share;
    this.show(this.window, [this.place[0] + shift, this.place[1] + shift]);
  }

  /** Many turns of the wheel are one step of "back". */
  rememberGesture() {
    if (!this.timers.has("gesture")) this.remember();
    this.cancelTimer("gesture");
    this.later("gesture", 700, () => {});
  }

  /** Zoom or move in time by a wheel; says whether the event was used. */
  wheelTime(event, at) {
    const [dx, dy] = turn(event);
    const isPan = event.shiftKey || Math.abs(dx) > Math.abs(dy);
    if (isPan) {
      if (this.isWhole(this.window, this.extent)) return false;
      this.rememberGesture();
      this.panTime((Math.abs(dx) > Math.abs(dy) ? dx : dy) / 800);
      return true;
    }
    // Where there is nothing left to zoom out of, the page scrolls as it does elsewhere.
    if (dy > 0 && this.isWhole(this.window, this.extent)) return event.ctrlKey;
    this.rememberGesture();
    this.zoomTime(Math.exp(dy * 0.0018), at);
    return true;
  }

  wheelPlace(event, at) {
    const [, dy] = turn(event);
    if (!this.hasPlaces || (dy > 0 && this.isWhole(this.place, this.places))) return true;
    this.rememberGesture();
    this.zoomPlace(Math.exp(dy * 0.0018), at);
    return true;
  }

  isWhole(range, all) {
    return same(range, all);
  }

  /** A page that scrolls under the pointer goes on scrolling, until the pointer moves. */
  isScrolling(event) {
    const isGoingOn = event.timeStamp - this.foreignWheel < 350 && this.lastPointer?.screenX === event.screenX && this.lastPointer?.screenY === event.screenY;
    if (isGoingOn) this.foreignWheel = event.timeStamp;
    return isGoingOn;
  }

  wheelAnywhere(event) {
    if (this.root.contains(event.target)) return;
    this.foreignWheel = event.timeStamp;
    this.lastPointer = { screenX: event.screenX, screenY: event.screenY };
  }

  pressAnywhere(event) {
    if (!event.target.closest?.(".nsan-filter") || !this.root.contains(event.target)) this.closeMenus();
  }

  closeMenus() {
    for (const menu of this.toolbar.menus ?? []) if (!menu.popup.hidden) menu.toggle(false);
  }

  /** JupyterLab leaves a key alone where this attribute is: only those without Ctrl and the like. */
  claimKey(event) {
    const isOurs = !event.ctrlKey && !event.metaKey && !event.altKey && !(event.shiftKey && event.key === "Enter");
    this.root.toggleAttribute("data-lm-suppress-shortcuts", isOurs);
  }

  key(event) {
    const isInControl = event.target !== this.root && event.target.closest?.("input, table, .nsan-menu, .nsan-help");
    const isButton = event.target.closest?.("button");
    if (isInControl && event.key !== "Escape") return;
    if (isButton && (event.key === "Enter" || event.key === " ")) return;
    if (isButton?.getAttribute("role") === "radio" && event.key.startsWith("Arrow")) this.nextColour(event.key === "ArrowRight" || event.key === "ArrowDown" ? 1 : -1);
    else if (event.metaKey || event.altKey || event.ctrlKey || (event.shiftKey && event.key === "Enter") || !this.act(event)) return;
    event.preventDefault();
    event.stopPropagation();
  }

  nextColour(step) {
    const bys = this.config.bys.map((by) => by.id);
    const next = bys[(bys.indexOf(this.by) + step + bys.length) % bys.length];
    this.colourBy(next);
    this.toolbar.update();
    this.toolbar.colourBy.querySelector('[aria-checked="true"]')?.focus();
  }

  /** Do what a key says; false where it says nothing. */
  act(event) {
    if (!this.isReady) return false;
    const moves = {
      ArrowLeft: () => this.panTime(-0.15),
      ArrowRight: () => this.panTime(0.15),
      ArrowUp: () => this.panPlace(0.15),
      ArrowDown: () => this.panPlace(-0.15),
      "+": () => this.zoomKey(1 / 1.5, event.shiftKey && event.code !== "Equal" && event.code !== "BracketRight"),
      "=": () => this.zoomKey(1 / 1.5, false),
      "*": () => this.zoomKey(1 / 1.5, true),
      "-": () => this.zoomKey(1.5, false),
      _: () => this.zoomKey(1.5, true),
    };
    const others = {
      Home: () => this.showAll(),
      Backspace: () => this.goBack(),
      Enter: () => this.zoomBoxKey(),
      Escape: () => this.escape(),
      "?": () => this.toggleHelp(),
    };
    if (event.key in moves) {
      this.rememberGesture();
      moves[event.key]();
      return true;
    }
    if (!(event.key in others)) return false;
    others[event.key]();
    return true;
  }

  zoomKey(factor, isBoth) {
    const at = this.pointer?.t ?? undefined;
    this.zoomTime(factor, at);
    if (isBoth) this.zoomPlace(factor, this.pointer?.place ?? undefined);
  }

  zoomBoxKey() {
    if (!this.map.box) return;
    this.remember();
    this.map.zoomToBox();
  }

  escape() {
    if (!this.helpBox.hidden) this.toggleHelp(false);
    else if (this.cancels.some((cancel) => cancel())) this.tooltip.hide();
    else this.pick(null);
  }

  toggleHelp(isShown = this.helpBox.hidden) {
    this.helpBox.hidden = !isShown;
    if (isShown) this.helpBox.querySelector("button").focus();
    else this.root.focus({ preventScroll: true });
  }

  /** Where the pointer is: a line through all parts. */
  point(t, place) {
    this.pointer = t === null ? null : { t, place };
    this.invalidate();
  }

  /** Outline a cluster while the pointer is on its row. */
  light(row) {
    this.lit = row;
    this.invalidate();
  }

  // ---- drawing

  later(name, wait, act) {
    const timer = setTimeout(
      this.guarded(() => {
        this.timers.delete(name);
        act();
      }),
      wait,
    );
    this.timers.set(name, timer);
  }

  cancelTimer(name) {
    clearTimeout(this.timers.get(name));
    this.timers.delete(name);
  }

  resize() {
    // JupyterLab renders before the element is in the document: until then it has no style to read.
    if (!this.colours?.text) this.takeTheme();
    const width = Math.floor(this.root.clientWidth - 2 * this.padding());
    if (width <= 0 || width === this.width) return;
    const isFirst = !this.width;
    this.width = width;
    this.gutter = width >= 820 ? 156 : width >= 640 ? 128 : 108;
    this.plotWidth = Math.max(width - this.gutter - RIGHT, 20);
    this.root.classList.toggle("nsan-small", width < 640);
    this.root.classList.toggle("nsan-narrow", width < 1040);
    this.fitFigures();
    shade(this.clusters.body);
    this.facts.update();
    if (isFirst) this.ask();
    else this.look();
    this.invalidate();
  }

  padding() {
    return Number.parseFloat(getComputedStyle(this.root).paddingLeft) || 0;
  }

  invalidate() {
    if (!this.frame) this.frame = requestAnimationFrame(this.guarded(() => this.draw()));
  }

  draw() {
    this.frame = 0;
    if (!this.width) return;
    this.axis = timeAxis(this.window, this.origin, this.plotWidth);
    this.overview.draw();
    this.lanes.draw();
    this.map.draw();
    this.legend.update();
    this.toolbar.update();
    this.tell();
  }

  /** Say on the element what is shown, for tests and for style sheets. */
  tell() {
    const { dataset } = this.root;
    dataset.window = this.window.map(Math.round).join(",");
    dataset.place = this.place.map(Math.round).join(",");
    dataset.by = this.view?.by ?? "";
    dataset.views = this.nViews;
    dataset.mode = this.view?.map?.mode ?? "none";
    const { box } = this.map;
    if (box) dataset.box = [...box.window, ...box.place].map(Math.round).join(",");
    else delete dataset.box;
  }

  /** What to draw: the whole trace coarsely, and the last answer on it. */
  views() {
    const base = this.base;
    if (!this.view || this.isStale) return base && base.by === this.by ? [base] : this.view ? [this.view] : [];
    return base && base !== this.view ? [base, this.view] : [this.view];
  }

  /** The stored picture of the whole trace in the present colours. */
  get base() {
    return this.bases.get(this.view?.by ?? this.by) ?? null;
  }

  toX(t) {
    return this.gutter + ((t - this.window[0]) / (this.window[1] - this.window[0])) * this.plotWidth;
  }

  timeAt(x) {
    return this.window[0] + ((x - this.gutter) / this.plotWidth) * (this.window[1] - this.window[0]);
  }

  drawGrid(c, top, bottom, left = this.gutter, right = this.gutter + this.plotWidth) {
    c.strokeStyle = this.colours.grid;
    c.lineWidth = 1;
    c.beginPath();
    for (const { t } of this.axis.ticks) {
      const x = Math.round(this.toX(t)) + 0.5;
      if (x < left || x > right) continue;
      c.moveTo(x, top);
      c.lineTo(x, bottom);
    }
    c.stroke();
  }

  /** Labels of ticks, left out where they would touch. */
  tickLabels(c, ticks, toX, y, taken = null) {
    c.font = FONT;
    c.fillStyle = this.colours.faint;
    c.textAlign = "center";
    let free = this.gutter - 14;
    for (const { t, text } of ticks) {
      const width = c.measureText(text).width;
      const x = Math.min(Math.max(toX(t), this.gutter + width / 2), this.gutter + this.plotWidth + RIGHT - width / 2);
      if (Math.abs(x - toX(t)) > width / 2 + 1 || x - width / 2 < free + 12) continue;
      if (taken && x + width / 2 > taken.left - 3 && x - width / 2 < taken.left + taken.width + 3) continue;
      c.fillText(text, x, y);
      free = x + width / 2;
    }
    c.textAlign = "left";
  }

  drawCrosshair(c, top, bottom, hasText) {
    if (!this.pointer) return;
    const x = Math.round(this.toX(this.pointer.t)) + 0.5;
    if (x < this.gutter || x > this.gutter + this.plotWidth) return;
    c.strokeStyle = this.colours.cross;
    c.lineWidth = 1;
    c.beginPath();
    c.moveTo(x, top);
    c.lineTo(x, bottom);
    c.stroke();
    if (!hasText) return;
    const { text, left } = this.crosshairWords(c);
    chip(c, this.colours, text, left, 3);
  }

  /** The time at the pointer, and the px of the axis that its words take. */
  crosshairWords(c) {
    if (!this.pointer) return null;
    c.font = FONT;
    const x = this.toX(this.pointer.t);
    const text = this.timeWords(this.pointer.t);
    const width = c.measureText(text).width + 12;
    const left = Math.min(Math.max(x - width / 2, this.gutter), this.gutter + this.plotWidth - width + RIGHT);
    return { text, left, width };
  }

  // ---- words

  /** A time of the view as the session counts it, to the ns that the zoom can tell. */
  timeWords(t) {
    const ns = this.origin + t;
    const [unit, size] = timeUnit(ns);
    const perPixel = (this.window[1] - this.window[0]) / Math.max(this.plotWidth, 1);
    const digits = Math.max(0, Math.min(Math.log10(size), Math.ceil(Math.log10(size / Math.max(perPixel, 1)))));
    return `${(ns / size).toFixed(digits)} ${unit}`;
  }

  statusWords() {
    if (!this.isReady) return "";
    const [start, end] = this.window;
    if (this.isAll()) return `all ${shortTime(end - start)}`;
    const part = `${shortTime(end - start)} of ${shortTime(this.extent[1] - this.extent[0])}`;
    const places = same(this.place, this.places) ? "" : `, ${bytesText(Math.round(this.place[1] - this.place[0]))} of ${bytesText(this.places[1])}`;
    return `${part}${places}`;
  }

  /** Whether the last answer is of what is shown now: only then can one say that there is nothing. */
  isAnswered() {
    const { view } = this;
    if (!view || this.isStale || view.by !== this.by) return false;
    // Python answers in whole ns and bytes. A copy in a file has one answer to everything.
    const near = (a, b) => Math.abs(a[0] - b[0]) < 1.5 && Math.abs(a[1] - b[1]) < 1.5;
    return Boolean(this.config.offline) || (near(view.window, this.window) && near(view.place, this.place));
  }

  /** Why the map is empty, in words; null where it is not, or nobody knows yet. */
  emptyWords() {
    if (!this.isReady) return [this.model.get("busy") ? clean(this.model.get("busy"), 80) : "Waiting for the trace\u2026"];
    if (!this.hasPlaces) return ["No event of this trace has an address", "The lanes above show when things moved."];
    if (!this.view) return this.base ? null : [this.isGone ? "No picture" : "Drawing\u2026"];
    if (!this.isAnswered()) return null;
    const map = this.view.map;
    const isEmpty = !map || (map.mode === "raster" ? map.n === 0 : !map.marks?.length);
    if (!isEmpty) return null;
    const others = this.otherWords();
    if (others) return others;
    const isFiltered = Object.values(this.filters).some((ids) => Array.isArray(ids));
    if (isFiltered) return ["Nothing here passes the filters", "\u201cClear filters\u201d shows everything again."];
    if (!this.isAll()) return ["Nothing in this window", clean(map?.empty ?? "Home shows the whole trace.", 120)];
    if (map?.empty) return [clean(map.empty, 120), "Choose another colour above."];
    return ["Nothing to draw in this colour", "Choose another colour above."];
  }

  /** What there is of the other kind, where the colour speaks of one kind only. */
  otherWords() {
    const total = (lanes) => lanes.reduce((sum, lane) => sum + (this.view.lanes.get(lane.id)?.values ?? []).reduce((a, b) => a + b, 0), 0);
    const bars = (this.config.lanes ?? []).filter((lane) => lane.kind === "bars");
    if (this.view.by === "cause") {
      const n = total(bars.filter((lane) => lane.id === "gpu_faults"));
      return n ? [`No copies here; ${valueText(n, "fault rows")}: colour by access`, "Fault rows of all addresses in this window."] : null;
    }
    if (this.view.by === "access") {
      const n = total(bars.filter((lane) => lane.category));
      return n ? [`No GPU fault rows here; ${bytesText(n)} moved: colour by cause`, "Copies of all addresses in this window."] : null;
    }
    return null;
  }

  panel() {
    const panel = this.model.get("panel") ?? {};
    if (panel.title) return { ...panel, isPicked: true };
    const title = (this.isSlow || this.isGone) && this.view && !this.isAnswered() ? "In the view before" : "In view";
    return { title: this.map?.box ? "In the box" : title, facts: this.view?.facts ?? [] };
  }

  runAt(place) {
    let [low, high] = [0, this.runs.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.runs[middle].start <= place) low = middle;
      else high = middle - 1;
    }
    const run = this.runs[low];
    return run && place >= run.start && place <= run.end ? run : null;
  }

  // ---- colours

  takeTheme() {
    const forced = this.config?.theme;
    const isForced = forced === "light" || forced === "dark";
    const light = document.body.dataset.jpThemeLight;
    const code = document.body.dataset.vscodeThemeKind ?? "";
    let theme = window.matchMedia("(prefers-color-scheme: dark)").matches && this.config?.offline ? "dark" : "light";
    if (light !== undefined) theme = light === "false" ? "dark" : "light";
    else if (code) theme = code.includes("light") ? "light" : "dark";
    if (isForced) theme = forced;
    this.theme = theme;
    this.root.dataset.theme = theme;
    this.root.dataset.host = light !== undefined && !isForced ? "jupyter" : "page";
    const style = getComputedStyle(this.root);
    const read = (name) => style.getPropertyValue(`--nsan-${name}`).trim();
    const names = ["text", "faint", "name", "plot", "grid", "line", "spine", "fold", "accent", "select", "shade", "cross", "plate", "neutral", "stripe"];
    this.colours = Object.fromEntries(names.map((name) => [name, read(name)]));
    this.colours.intervalText = read("interval-text");
    for (const view of [this.view, ...this.bases.values()]) if (view) view.picture = null;
    this.legend.key = null;
    if (this.toolbar.menus) this.toolbar.update();
    this.invalidate();
  }

  isRamp(by) {
    return !(this.config.categories?.[by]?.length);
  }

  /** The categories that this trace has. */
  presentCategories(by) {
    const all = this.config.categories?.[by] ?? [];
    const present = new Set((this.config.filters?.[by] ?? []).map((entry) => entry.id));
    return present.size ? all.filter((entry) => present.has(entry.id)) : all;
  }

  category(by, id) {
    return (this.config.categories?.[by] ?? []).find((entry) => entry.id === id) ?? null;
  }

  categoryColour(by, id) {
    return this.category(by, id)?.[this.theme] ?? (this.theme === "dark" ? "#9a9a9a" : "#8a8a8a");
  }

  categoryWord(by, index) {
    if (this.isRamp(by)) return clean((this.config.bys ?? []).find((one) => one.id === by)?.label ?? by, 40);
    return clean(this.config.categories[by][index]?.label ?? `no ${by}`, 40);
  }

  /** The colour of a cell as [r, g, b, alpha]: the category's, stronger where there is more. */
  cellColour(by, category, level) {
    const share = (level - 1) / 254;
    if (this.isRamp(by)) return [...rampAt(RAMPS[this.theme], share), 255];
    const entry = this.config.categories[by][category];
    return [...rgb(entry?.[this.theme] ?? "#8a8a8a"), Math.round(105 + 150 * share)];
  }

  /** The colour of an interval: names keep theirs, quiet enough to leave the causes loud. */
  intervalColour(lane, name, item) {
    const isDark = this.theme === "dark";
    if (lane.pick === "batch") return isDark ? (item[4] % 2 ? "#5c6570" : "#6d7783") : item[4] % 2 ? "#b9c2cc" : "#a6b1bd";
    const hue = (hash(name) % 24) * 15;
    return isDark ? `hsl(${hue} 26% 37%)` : `hsl(${hue} 36% 79%)`;
  }

  swatch(by, id) {
    const element = make("span", { class: "nsan-swatch" });
    element.style.background = this.categoryColour(by, id);
    return element;
  }

  /** Whether the picture has cells of no category. */
  isOtherShown() {
    const view = this.view;
    if (!view || view.by !== this.by || this.isRamp(this.by)) return false;
    if (view.hasOther === undefined) {
      if (view.map?.mode === "marks") view.hasOther = view.map.marks.some((mark) => mark[4] < 0);
      else view.hasOther = view.cells ? view.cells.level.some((level, i) => level > 0 && view.cells.category[i] === 0) : false;
    }
    return view.hasOther;
  }

  destroy() {
    this.abort.abort();
    this.sizes.disconnect();
    this.themes.disconnect();
    cancelAnimationFrame(this.frame);
    for (const timer of this.timers.values()) clearTimeout(timer);
    for (const [name, act] of this.onModel) this.model.off(name, act);
    this.root.remove();
  }
}

/** The turn of a wheel in px, whatever unit the browser counts in. */
function turn(event) {
  const size = event.deltaMode === 1 ? 30 : event.deltaMode === 2 ? 400 : 1;
  return [event.deltaX * size, event.deltaY * size];
}

// ---------------------------------------------------------------- entry points

/**
 * Draw the explorer into a cell.
 * @param {{model: Object, el: HTMLElement}} given As anywidget gives it.
 * @returns {function(): void} Cleans up.
 */
function render({ model, el }) {
  const explorer = new Explorer(model, el);
  return () => explorer.destroy();
}

export default { render };

// ---------------------------------------------------------------- the offline page

/** Undo base64 and zlib. */
async function inflated(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new DataView(await new Response(stream).arrayBuffer());
}

/** Stands for Python in a page that was written to a file: answers from what is stored there. */
class StoredModel {
  constructor(data, buffers) {
    this.data = data;
    this.buffers = buffers;
    this.values = { config: { ...data.config, offline: true }, clusters: data.clusters ?? {}, panel: data.panel ?? {}, error: data.error ?? "", filters: data.filters ?? {}, busy: "" };
    this.listeners = new Map();
  }

  get(name) {
    return this.values[name];
  }

  on(name, act) {
    this.listeners.set(name, [...(this.listeners.get(name) ?? []), act]);
  }

  off(name, act) {
    this.listeners.set(name, (this.listeners.get(name) ?? []).filter((one) => one !== act));
  }

  tell(name, ...given) {
    for (const act of this.listeners.get(name) ?? []) act(...given);
  }

  set(name, value) {
    this.values[name] = value;
    this.tell(`change:${name}`);
  }

  send(message) {
    if (message.kind === "look") setTimeout(() => this.look(message), 0);
    else if (message.kind === "pick") setTimeout(() => this.pick(message), 0);
    else if (message.kind === "clear_error") this.set("error", "");
  }

  look(message) {
    const by = message.by ?? Object.keys(this.data.views)[0];
    const stored = this.data.views[by];
    const address = { view: message.view, id: message.id };
    if (stored) this.tell("msg:custom", { ...stored.message, ...address }, this.buffers[by]);
    else this.tell("msg:custom", { kind: "failed", ...address }, []);
  }

  pick({ what, id, window, place }) {
    if (!what) {
      this.set("panel", {});
      return;
    }
    if (window && what !== "box") {
      const range = within(padded(window), this.data.config.extent, LEAST_TIME);
      this.tell("msg:custom", { kind: "go", window: range, place: place ? within(padded(place), [0, this.data.config.places], LEAST_PLACE) : undefined });
    }
    if (what === "cluster") this.set("panel", this.clusterPanel(id));
    else if (window) this.set("panel", this.windowPanel(what, window, place, id));
  }

  clusterPanel(id) {
    const stored = this.data.panels?.[id];
    if (stored) return stored;
    const { columns = [], rows = [], kind } = this.values.clusters;
    const row = rows.find((one) => one.id === id);
    const facts = columns.map((column, i) => [column.label, row?.cells[i] ?? "", ""]);
    return { title: `Cluster ${id}`, what: "cluster", kind, facts };
  }

  windowPanel(what, [start, end], place, id) {
    const titles = { kernel: "Kernel", nvtx: "NVTX range", batch: "Batch", box: "In the box" };
    const facts = [
      ["Name", this.nameOf(what, id), ""],
      ["Start", `${timeText(start)} after the first event`, ""],
      ["Length", timeText(end - start), ""],
      ["Addresses", place ? bytesText(place[1] - place[0]) : "", ""],
    ];
    return { title: titles[what] ?? what, what, facts: facts.filter(([, text]) => text), note: "More facts need the notebook: this is an offline copy." };
  }

  nameOf(what, id) {
    const lanes = (this.data.config.lanes ?? []).filter((lane) => lane.pick === what).map((lane) => lane.id);
    for (const { message } of Object.values(this.data.views)) {
      for (const lane of message.lanes ?? []) {
        const item = lanes.includes(lane.id) && lane.items?.find((one) => one[4] === id);
        if (item) return message.names?.[item[2]] ?? "";
      }
    }
    return "";
  }
}

/**
 * Draw the explorer from what a page has stored, without Python.
 * @param {HTMLElement} el Where to draw.
 * @param {Object} data config, clusters and one stored view by colour.
 * @returns {Promise<function(): void>} Cleans up.
 */
export async function offline(el, data) {
  const buffers = {};
  for (const [by, stored] of Object.entries(data.views)) {
    buffers[by] = await Promise.all((stored.buffers ?? []).map(inflated));
  }
  return render({ model: new StoredModel(data, buffers), el });
}
