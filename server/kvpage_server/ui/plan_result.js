// One plan: figures, picture, waste, and what became of each layer.
import { bar, byId, fillTable, make, say } from "./dom.js";
import { bytes, decimal, number, percent, plural } from "./format.js";

let pictureUrl = null;

/** `state`: what the controls said. */
export function showPlan(plan, picture, state) {
  say(byId("plan-status"), `Planned by ${plan.strategy}: ${plural(plan.num_blocks, blockWord(plan))} of ${bytes(plan.slab_bytes)}${atOnce(plan)}.`);
  byId("capacity").replaceChildren(...figures(plan).map(([name, value, more]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, make("strong", {}, value), make("span", {}, more)))));
  showNotes([...(plan.notes || []), ...remarks(plan, state)]);
  showPicture(plan, picture);
  showWaste(plan);
  showLayers(plan);
}

const blockWord = (plan) => (plan.groups.some((group) => group.blocks_per_slab > 1) ? "slab" : "block");

function atOnce({ capacity }) {
  return capacity.max_concurrency === null ? "" : `, room for ${decimal(capacity.max_concurrency)} requests of ${number(capacity.max_model_len)} tokens`;
}

function* eachFigure(plan) {
  const { capacity } = plan;
  const length = capacity.max_model_len;
  if (capacity.max_concurrency !== null) {
    yield ["Requests at once", decimal(capacity.max_concurrency), `of ${number(length)} tokens, the null block counted`];
    yield ["Tokens they hold", number(Math.floor(capacity.max_concurrency * length)), `each request in ${bytes(capacity.request_bytes)}`];
  }
  const longest = capacity.longest_request_tokens;
  yield ["Longest request", longest === null ? "any length" : number(longest), longest === null ? "it holds the same" : "tokens, beside the null block"];
  yield [blockWord(plan) === "slab" ? "Slabs" : "Blocks", number(plan.num_blocks), `of ${number(plan.slab_bytes)} bytes`];
  yield ["Pool", bytes(plan.buffer_size_bytes), `${plural(plan.groups.length, "block table")}`];
  yield ["A token takes", bytes(Math.round(capacity.bytes_per_token)), capacity.fixed_request_bytes ? `and each request ${bytes(capacity.fixed_request_bytes)} besides` : "and a request nothing besides"];
}

/** What a plan does not say of itself: what was asked for and came otherwise. */
function* remarks({ capacity, layers }, { block_size: asked }) {
  const sizes = new Set(Object.values(layers).filter(({ kind, group }) => kind !== "mamba" && group !== null).map((layer) => layer.block_size));
  if (asked !== "" && sizes.size && !sizes.has(Number(asked))) {
    yield `blocks of ${asked} tokens were asked for; by this strategy they have ${[...sizes].map(number).join(", ")} (see the decisions)`;
  }
  if (capacity.max_concurrency !== null && capacity.max_concurrency < 1) {
    yield `the memory does not hold one request of ${number(capacity.max_model_len)} tokens`;
  }
}

function showNotes(notes) {
  byId("notes-box").hidden = !notes.length;
  byId("notes").replaceChildren(...notes.map((note) => make("li", {}, note)));
}

const figures = (plan) => [...eachFigure(plan)];

function showPicture(plan, picture) {
  if (pictureUrl) URL.revokeObjectURL(pictureUrl);
  pictureUrl = URL.createObjectURL(picture);
  const words = `Layout by ${plan.strategy}: ${plural(plan.groups.length, "block table")} over ${plural(plan.num_blocks, blockWord(plan))}`;
  byId("picture").replaceChildren(make("img", { src: pictureUrl, alt: words }));
  byId("picture-link").setAttribute("href", `v1/plans/${plan.plan_id}/layout.svg`);
}

const PARTS = [
  ["live", "Live", "live_bytes"], ["padding", "Padding", "padding_bytes"],
  ["rounding", "Group rounding", "group_rounding_bytes"], ["tail", "Tail of last blocks", "tail_bytes"],
];

function showWaste({ waste, capacity }) {
  const length = capacity.max_model_len;
  say(byId("waste-of"), length === null ? "Of one block of every table:" : `Of what one request of ${number(length)} tokens holds, ${number(waste.total_bytes)} bytes:`);
  const total = waste.total_bytes || 1;
  const rows = PARTS.map(([kind, name, field]) => [name, bar([[kind, waste[field] / total]]), number(waste[field]), percent(waste[field] / total)]);
  rows.push(["Memory too little for a block", "", number(waste.unallocated_bytes), "–"]);
  fillTable(byId("waste"), ["Part", { text: "As a bar", quiet: true }, { text: "Bytes", number: true }, { text: "Share", number: true }], rows);
}

/** What a request of the longest length holds beyond what it needs, as a share. */
export const wasted = ({ waste }) => (waste.total_bytes ? 1 - waste.live_bytes / waste.total_bytes : 0);

function showLayers(plan) {
  const columns = [
    "Tables", "Layers", "Kind", "Decision", { text: "Block size", number: true },
    { text: "Page bytes", number: true }, { text: "Padding", number: true }, "Why",
  ];
  fillTable(byId("layers"), columns, merged(Object.values(plan.layers)).map(layerRow));
}

/** Layers of which everything that is shown is the same, together; their block tables are often several. */
function merged(layers) {
  const found = new Map();
  for (const layer of layers) {
    const look = JSON.stringify([layer.kind, layer.decision, layer.reason, layer.block_size, layer.page_size_bytes, layer.real_page_size_bytes]);
    if (!found.has(look)) found.set(look, []);
    found.get(look).push(layer);
  }
  return [...found.values()];
}

function layerRow(alike) {
  const [layer] = alike;
  const padding = layer.page_size_bytes - layer.real_page_size_bytes;
  const tables = layer.group === null ? "–" : ranges(alike.map(({ group }) => group));
  return [
    tables, make("td", { class: "names" }, ...namesOf(alike.map(({ name }) => name))), layer.kind.replaceAll("_", " "),
    make("td", {}, make("span", { class: `decision ${layer.decision}` }, layer.decision.replaceAll("_", " "))),
    layer.kind === "mamba" ? "state" : number(layer.block_size), number(layer.page_size_bytes), number(padding), make("td", { class: "why" }, layer.reason),
  ];
}

/** `model.layers.*.attn`, and which; names that have no such pattern by the first and the last. */
function namesOf(names) {
  if (names.length === 1) return [breakable(names[0])];
  const patterns = new Set(names.map((name) => name.replace(/\d+/, "*")));
  const count = ` (${number(names.length)})`;
  if (patterns.size > 1) return [breakable(names[0]), " … ", breakable(names.at(-1)), count];
  const numbers = names.map((name) => Number(/\d+/.exec(name)?.[0]));
  return [breakable([...patterns][0]), make("br"), make("span", { class: "which" }, `${ranges(numbers)}${count}`)];
}

/** May be broken after a dot, not amid a word. */
function breakable(name) {
  const parts = name.split(/(?<=\.)/);
  return make("span", {}, ...parts.flatMap((part, place) => (place ? [make("wbr"), part] : [part])));
}

const MOST_RANGES = 8;

/** "0–4, 6–10, …" */
function ranges(numbers) {
  const found = [];
  for (const value of [...new Set(numbers)].sort((a, b) => a - b)) {
    if (found.length && found.at(-1)[1] === value - 1) found.at(-1)[1] = value;
    else found.push([value, value]);
  }
  const texts = found.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`));
  return texts.length > MOST_RANGES ? `${texts.slice(0, MOST_RANGES).join(", ")}, …` : texts.join(", ");
}
