// The blocks of a pool, cell by cell: how much of each is held, by several at once, cached or free.
import { byId, make, makeSvg, say } from "./dom.js";
import { number, plural } from "./format.js";

const MAX_CELLS = 1024;
const CELL_PX = [22, 16, 12, 9, 7];
const NUM_HUES = 6;
export const mapPath = (poolId) => `v1/pools/${poolId}/block-map?cells=${MAX_CELLS}`;

export class HeatMap {
  #map = null;
  #columns = 1;
  #cellPx = 12;

  constructor() {
    const slider = byId("heat-cell");
    slider.addEventListener("input", () => this.#tell());
    byId("heat").addEventListener("pointermove", (event) => this.#look(event));
    new ResizeObserver(() => this.#draw()).observe(byId("heat"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw());
  }

  show(map) {
    this.#map = map;
    byId("heat-cell").max = map.used.length - 1;
    const sum = (values) => values.reduce((total, value) => total + value, 0);
    const each = map.slabs_per_cell === 1 ? "A cell is a slab." : `${number(map.slabs_per_cell)} slabs are drawn together in each cell.`;
    say(byId("heat-summary"), `${plural(sum(map.used), "block")} used, ${number(sum(map.shared))} of them shared, ${number(sum(map.cached))} cached; ` +
      `${number(sum(map.owned))} of ${plural(map.num_slabs, "slab")} have an owner. ${each}`);
    showLegend(map);
    this.#draw();
    this.#tell();
  }

  #draw() {
    const map = this.#map;
    const canvas = byId("heat");
    const width = canvas.parentElement.clientWidth;
    if (!map || !width) return;
    this.#cellPx = CELL_PX.find((size) => Math.ceil(map.used.length / Math.floor(width / size)) * size <= 260) || CELL_PX.at(-1);
    this.#columns = Math.max(1, Math.floor(width / this.#cellPx));
    const rows = Math.ceil(map.used.length / this.#columns);
    const scale = devicePixelRatio || 1;
    const [wide, high] = [this.#columns * this.#cellPx, rows * this.#cellPx];
    if (canvas.width !== Math.round(wide * scale) || canvas.height !== Math.round(high * scale)) {
      canvas.width = Math.round(wide * scale);
      canvas.height = Math.round(high * scale);
    }
    canvas.style.inlineSize = `${wide}px`;
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, wide, high);
    const colours = readColours();
    map.used.forEach((_, place) => this.#drawCell(context, colours, place));
  }

  #drawCell(context, colours, place) {
    const map = this.#map;
    const size = this.#cellPx - 1;
    const left = (place % this.#columns) * this.#cellPx;
    const top = Math.floor(place / this.#columns) * this.#cellPx;
    const blocks = map.used[place] + map.cached[place] + map.free[place];
    context.fillStyle = colours.nobody;
    context.fillRect(left, top, size, size);
    if (!blocks) return;
    const owned = map.owned[place] / slabsOf(map, place);
    const hue = map.owners[place] > 0 ? (map.owners[place] - 1) % NUM_HUES : NUM_HUES - 1;
    let bottom = top + size;
    const stack = [[map.used[place], colours.edges[hue]], [map.cached[place], colours.cached], [map.free[place], colours.fills[hue]]];
    for (const [count, colour] of stack) {
      const high = (count / blocks) * owned * size;
      context.fillStyle = colour;
      context.fillRect(left, bottom - high, size, high);
      bottom -= high;
    }
    if (map.shared[place]) {
      const dot = Math.max(2, Math.round(size / 3));
      context.fillStyle = colours.shared;
      context.fillRect(left + Math.round((size - dot) / 2), top + size - dot - Math.max(1, Math.round(size / 8)), dot, dot);
    }
  }

  #look(event) {
    if (!this.#map) return;
    const place = Math.floor(event.offsetY / this.#cellPx) * this.#columns + Math.floor(event.offsetX / this.#cellPx);
    if (place < 0 || place >= this.#map.used.length) return;
    byId("heat-cell").value = place;
    this.#tell();
  }

  #tell() {
    const text = wordsOf(this.#map, Math.min(Number(byId("heat-cell").value), this.#map.used.length - 1));
    say(byId("heat-cell-text"), text);
    byId("heat-cell").setAttribute("aria-valuetext", text);
  }
}

const slabsOf = (map, place) => Math.min(map.slabs_per_cell, map.num_slabs - place * map.slabs_per_cell);

function wordsOf(map, place) {
  const first = place * map.slabs_per_cell;
  const last = first + slabsOf(map, place) - 1;
  const where = first === last ? `slab ${number(first)}` : `slabs ${number(first)} to ${number(last)}`;
  const owner = map.owners[place];
  if (!owner) return `${where}: nobody's${first === 0 ? ", slab 0 is never handed out" : ""}`;
  const whose = owner > 0 ? `block table ${owner - 1}` : "several block tables";
  const most = map.most_held[place] > 1 ? `, up to ${map.most_held[place]} times` : "";
  return `${where}, ${whose}: ${number(map.used[place])} used, ${number(map.shared[place])} shared${most}, ${number(map.cached[place])} cached, ${number(map.free[place])} free`;
}

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const hues = Array.from({ length: NUM_HUES }, (_, hue) => hue);
  return {
    edges: hues.map((hue) => colour(`--h${hue}-edge`)), fills: hues.map((hue) => colour(`--h${hue}`)),
    cached: colour("--control"), shared: colour("--paper"), nobody: colour("--tail"),
  };
}

function showLegend(map) {
  const tables = [...new Set(map.owners.filter((owner) => owner > 0))].map((owner) => owner - 1).sort((a, b) => a - b);
  const hues = [...new Set(tables.map((table) => table % NUM_HUES))];
  const parts = hues.map((hue) => {
    const mine = tables.filter((table) => table % NUM_HUES === hue); // there are more tables than colours to tell apart
    return [`var(--h${hue}-edge)`, `used, ${mine.length > 1 ? "tables" : "table"} ${mine.join(", ")}`];
  });
  parts.push(["var(--control)", "cached"], ["var(--tail)", "nobody's"]);
  const key = JSON.stringify(parts);
  const legend = byId("heat-legend");
  if (legend.dataset.key === key) return;
  legend.dataset.key = key;
  const entries = parts.map(([colour, text]) => {
    const swatch = makeSvg("rect", { width: 10, height: 10 });
    swatch.style.fill = colour;
    return make("span", {}, makeSvg("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, swatch), text);
  });
  const notch = makeSvg("rect", { x: 3.5, y: 5.5, width: 3.5, height: 3.5 });
  notch.style.fill = "var(--paper)";
  const used = makeSvg("rect", { width: 10, height: 10 });
  used.style.fill = "var(--ink)";
  const shared = make("span", {}, makeSvg("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, used, notch), "shared by several");
  legend.replaceChildren(...entries, shared);
}
