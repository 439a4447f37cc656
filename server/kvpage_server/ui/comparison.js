// The same request by every strategy, side by side.
import { askJson, Problem } from "./api.js";
import { bar, byId, fillTable, make } from "./dom.js";
import { bytes, decimal, number, percent } from "./format.js";
import { wasted } from "./plan_result.js";
import { requestText, STRATEGIES } from "./plan_request.js";

const COLUMNS = [
  "Strategy", { text: "Bytes a slab", number: true }, { text: "Slabs", number: true }, { text: "Tables", number: true },
  { text: "Requests at once", number: true }, { text: "Longest request", number: true }, { text: "Waste", number: true }, { text: "As a bar", quiet: true },
];

/** `choose(strategy)` is called by its button. One after the other: planning takes a processor. */
export async function showComparison(state, plan, signal, choose) {
  const found = new Map([[state.strategy, plan]]);
  draw(found, state.strategy, choose);
  for (const strategy of STRATEGIES) {
    if (found.has(strategy)) continue;
    try {
      found.set(strategy, await askJson("v1/plans", { method: "POST", body: requestText(state, strategy), signal }));
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      found.set(strategy, error);
    }
    draw(found, state.strategy, choose);
  }
  byId("compare").dataset.of = plan.plan_id;
}

function draw(found, current, choose) {
  const focused = document.activeElement?.dataset?.strategy;
  const plans = [...found.values()].filter((one) => !(one instanceof Problem));
  const best = Math.max(...plans.map(({ capacity }) => capacity.max_concurrency ?? 0));
  const isEqual = plans.every(({ capacity }) => capacity.max_concurrency === best);
  const rows = STRATEGIES.map((strategy) => row(strategy, found.get(strategy), strategy === current, isEqual ? null : best, choose));
  fillTable(byId("compare"), COLUMNS, rows);
  byId("compare").querySelectorAll("tbody tr").forEach((line, place) => line.classList.toggle("current", STRATEGIES[place] === current));
  if (focused) byId("compare").querySelector(`[data-strategy="${focused}"]`)?.focus();
}

function row(strategy, plan, isCurrent, best, choose) {
  const button = make("button", { type: "button", class: "link", "data-strategy": strategy, "aria-pressed": String(isCurrent), onclick: () => choose(strategy) }, strategy);
  if (plan === undefined) return [button, make("td", { colspan: 7 }, "…")];
  if (plan instanceof Problem) return [button, make("td", { colspan: 7, class: "why" }, `refused: ${plan.message}`)];
  const { capacity } = plan;
  const atOnce = capacity.max_concurrency === null ? "–" : decimal(capacity.max_concurrency);
  const name = plan.strategy === strategy ? button : make("td", {}, button, ` (${plan.strategy})`);
  const isBest = capacity.max_concurrency !== null && capacity.max_concurrency === best;
  return [
    name, make("td", { class: "number", title: bytes(plan.slab_bytes) }, number(plan.slab_bytes)), number(plan.num_blocks),
    String(plan.groups.length), make("td", { class: isBest ? "number best" : "number" }, atOnce, isBest ? make("span", { class: "visually-hidden" }, " (most)") : null),
    capacity.longest_request_tokens === null ? "any" : number(capacity.longest_request_tokens), percent(wasted(plan)), bar([["padding", wasted(plan)]]),
  ];
}
