// How full pools were while this page looked on. Nothing is kept anywhere else.
import { makeSvg } from "./dom.js";
import { percent } from "./format.js";

const KEPT_S = 300;
const WIDTH = 480;
const HEIGHT = 150;
const LEFT = 40;
const BOTTOM = 18;

export class History {
  #samples = new Map();

  /** `share`: {used, cached}, each of the whole pool, 0 to 1. */
  add(poolId, atS, share) {
    const samples = this.#samples.get(poolId) || [];
    samples.push({ atS, ...share });
    while (samples[0].atS < atS - KEPT_S) samples.shift();
    this.#samples.set(poolId, samples);
  }

  of(poolId) {
    return this.#samples.get(poolId) || [];
  }

  /** Only these pools are still there. */
  keepOnly(poolIds) {
    for (const poolId of this.#samples.keys()) if (!poolIds.has(poolId)) this.#samples.delete(poolId);
  }
}

/** The chart of one pool: used below, cached upon it, the rest free. */
export function chart(samples) {
  const last = samples.at(-1);
  const span = Math.max(30, last.atS - samples[0].atS);
  const x = ({ atS }) => WIDTH - ((last.atS - atS) / span) * (WIDTH - LEFT);
  const y = (share) => (1 - share) * (HEIGHT - BOTTOM - 6) + 6;
  const lines = [0, 0.5, 1].flatMap((share) => [
    makeSvg("line", { class: "grid", x1: LEFT, x2: WIDTH, y1: y(share), y2: y(share) }),
    makeSvg("text", { x: LEFT - 6, y: y(share) + 4, "text-anchor": "end" }, `${100 * share}%`),
  ]);
  const ends = [
    makeSvg("text", { x: LEFT, y: HEIGHT - 3 }, `${Math.round(span)} s ago`),
    makeSvg("text", { x: WIDTH, y: HEIGHT - 3, "text-anchor": "end" }, "now"),
  ];
  const areas = [
    area("cached", samples, x, (one) => y(one.used), (one) => y(one.used + one.cached)),
    area("used", samples, x, () => y(0), (one) => y(one.used)),
  ];
  const words = `Now ${percent(last.used)} used, ${percent(last.cached)} cached; most used ${percent(Math.max(...samples.map(({ used }) => used)))}`;
  return makeSvg("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": words }, ...areas, ...lines, ...ends);
}

/** The same without words, for a row of a table. */
export function spark(samples) {
  const last = samples.at(-1);
  const span = Math.max(30, last.atS - samples[0].atS);
  const x = ({ atS }) => 100 - ((last.atS - atS) / span) * 100;
  const areas = [
    area("cached", samples, x, (one) => 20 * (1 - one.used), (one) => 20 * (1 - one.used - one.cached)),
    area("used", samples, x, () => 20, (one) => 20 * (1 - one.used)),
  ];
  const line = makeSvg("line", { class: "grid", x1: 0, x2: 100, y1: 20, y2: 20 });
  return makeSvg("svg", { class: "chart spark", viewBox: "0 0 100 20", preserveAspectRatio: "none", "aria-hidden": "true" }, ...areas, line);
}

function area(kind, samples, x, low, high) {
  const over = samples.map((one) => `${x(one).toFixed(1)},${high(one).toFixed(1)}`);
  const back = samples.map((one) => `${x(one).toFixed(1)},${low(one).toFixed(1)}`).reverse();
  return makeSvg("polygon", { class: kind, points: [...over, ...back].join(" ") });
}

/** Of the whole pool, in bytes: a slab that holds a block of a narrow group is not used in full. */
export function shareOf(blocks) {
  const total = (blocks.num_slabs - 1) * blocks.slab_bytes;
  const sum = (field) => blocks.groups.reduce((bytes, group) => bytes + group[field] * group.block_bytes, 0);
  return { used: sum("used") / total, cached: sum("cached") / total };
}
