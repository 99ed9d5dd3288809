// Draws the charts of a report in the place of their pictures. A chart that cannot be drawn stays a picture.

/** Undo base64 and zlib. */
async function inflated(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).text();
}

/** Let the browser answer to its user. */
const rest = () => new Promise((resolve) => setTimeout(resolve));

/** Draw one chart beside the page, then put it in its place. */
async function draw(figure, packed) {
  const place = document.createElement("div");
  const spec = JSON.parse(await inflated(packed));
  await vegaEmbed(place, spec, OPTIONS);
  place.setAttribute("role", "img");
  place.setAttribute("aria-label", figure.querySelector("img").alt);
  figure.querySelector("img").replaceWith(place);
  figure.dataset.drawn = "live";
  shade(figure);
}

/** Draw all charts, the first first. */
async function drawAll({ bundle, specs }) {
  const script = document.createElement("script");
  script.textContent = await inflated(bundle); // the page's policy knows its hash
  document.head.append(script);
  for (const [number, packed] of Object.entries(specs)) {
    const figure = document.querySelector(`figure[data-chart="${number}"]`);
    try {
      await draw(figure, packed);
    } catch (error) {
      figure.dataset.drawn = "picture";
      console.warn(`A chart stays a picture: ${error.message}`);
    }
    await rest();
  }
}

/** Mark in the contents where the reader is. */
function follow(links) {
  const headings = links.map((link) => document.getElementById(link.hash.slice(1)));
  const mark = () => {
    const at = headings.findLastIndex((heading) => heading.getBoundingClientRect().top < 120);
    links.forEach((link, i) => link.setAttribute("aria-current", i === Math.max(at, 0)));
  };
  addEventListener("scroll", mark, { passive: true });
  mark();
}

/** Say on which sides a part that is wider than the page goes on. */
function shade(part) {
  const { scrollLeft, scrollWidth, clientWidth } = part;
  const sides = { left: scrollLeft > 1, right: scrollLeft + clientWidth < scrollWidth - 1 };
  const more = Object.keys(sides).filter((side) => sides[side]);
  if (more.length) part.dataset.more = more.join(" ");
  else delete part.dataset.more;
}

const resized = new ResizeObserver((entries) => entries.forEach((entry) => shade(entry.target)));
for (const part of document.querySelectorAll(".nsan-chart, .nsan-table, .nsan-output")) {
  part.addEventListener("scroll", () => shade(part), { passive: true });
  resized.observe(part);
}
const links = [...document.querySelectorAll("nav.nsan-beside a")];
if (links.length) follow(links);
const data = document.querySelector('script[type="application/json"]');
if (data && "DecompressionStream" in window) {
  await drawAll(JSON.parse(data.textContent));
  document.documentElement.dataset.charts = "drawn";
}
