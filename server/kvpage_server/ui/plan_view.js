// The plan view: the controls are read, the server is asked, and the latest answer is shown.
import { ask, askJson, later, Problem } from "./api.js";
import { showComparison } from "./comparison.js";
import { showCopies } from "./copies.js";
import { byId, make, say } from "./dom.js";
import { loadExamples, settingsOf } from "./examples.js";
import { plural } from "./format.js";
import { showPlan } from "./plan_result.js";
import { Fault, faultsOf, read, requestText } from "./plan_request.js";
import { asFragment, DEFAULTS, memoryOfRange, ofFragment, rangeOfMemory, readForm, stateOf, writeForm } from "./plan_state.js";
import { forgetUnfinished, keepUnfinished, unfinished } from "./unfinished.js";

const DEBOUNCE_MS = 180;
const COMPARE_AFTER_MS = 250;
const FIELDS = ["config", "strategy", "memory", "tp", "kv_dtype", "max_model_len", "block_size", "max_num_batched_tokens", "mtp", "draft"];
const OF_MODELS = ["tp", "kv_dtype", "block_size", "mtp", "draft"];
const MAX_FILE_BYTES = 4 * 2 ** 20; // the server takes no more

let examples = [];
let running = new AbortController();
let address = ""; // the fragment that this view has set itself
let brought = {}; // by a plan request: name of a setting -> what it says
let before = {}; // what stood there

export async function startPlan() {
  const form = byId("plan-form");
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", (event) => changed(event.target));
  byId("file").addEventListener("change", () => takeFile(byId("file").files[0]));
  startDropping(byId("drop"));
  try {
    examples = await loadExamples();
  } catch (problem) {
    showFaults([{ field: null, message: problem.message }]);
  }
  byId("example").append(...examples.map(({ name, title }) => make("option", { value: name }, title)));
  writeForm({ ...DEFAULTS, ...stateOf(examples[0]) });
}

/** Shows what a fragment says, or what was here before. */
export async function openPlan(fragment) {
  if (fragment.toString() === address && address) return;
  sayOdd([]);
  try {
    const typed = unfinished();
    const said = typed ? { state: { ...DEFAULTS, ...typed }, odd: [] } : await ofFragment(fragment, examples);
    if (said) opened(said.state);
    sayOdd(said ? said.odd : []);
  } catch {
    showFaults([{ field: "config", message: "The link is damaged: what it says cannot be read." }]);
    return;
  }
  plan(0);
}

function opened(state) {
  writeForm(state);
  before = DEFAULTS;
  try {
    brought = settingsOfText(state.config);
  } catch {
    brought = {}; // told when it is planned
  }
}

function sayOdd(odd) {
  byId("link-note").hidden = !odd.length;
  say(byId("link-note"), `The link says ${odd.join(" and ")}, which cannot be set here; what is set stands in the fields.`);
}

function changed(control) {
  if (control.id === "file") return;
  sayOdd([]);
  if (control.id === "example") {
    const example = examples.find(({ name }) => name === control.value);
    const form = { ...withSettings(example ? example.settings : {}), ...(example ? { draft: "", mtp: false } : { config: "" }) };
    writeForm({ ...form, ...stateOf(example) });
    if (!example) byId("config").focus();
  }
  if (control.id === "config") textChanged();
  if (control.id === "memory-range") byId("memory").value = memoryOfRange(control.value);
  if (control.id === "memory") byId("memory-range").value = rangeOfMemory(control.value);
  plan(DEBOUNCE_MS);
}

/** Another text is nobody's example, and a plan request brings its settings along. */
function textChanged() {
  byId("example").value = "";
  try {
    writeForm(withSettings(settingsOfText(byId("config").value)));
  } catch {
    // told when it is planned
  }
}

function settingsOfText(text) {
  const source = read(text);
  return source.kind === "layers" ? settingsOf(source.request) : {};
}

/** The form with these settings; those of the request before go with it, but for what was changed since. */
function withSettings(settings) {
  const form = readForm();
  for (const name of Object.keys(brought)) if (form[name] === brought[name]) form[name] = before[name];
  brought = settings;
  before = Object.fromEntries(Object.keys(settings).map((name) => [name, form[name]]));
  return { ...form, ...settings };
}

async function takeFile(file) {
  byId("file").value = "";
  if (!file) return;
  if (file.size > MAX_FILE_BYTES) {
    showFaults([{ field: "config", message: `${file.name} has ${plural(file.size, "byte")}; a config.json has some thousand.` }]);
    return;
  }
  byId("config").value = await file.text();
  textChanged();
  plan(0);
}

function startDropping(place) {
  place.addEventListener("dragover", (event) => {
    event.preventDefault();
    place.classList.add("over");
  });
  place.addEventListener("dragleave", () => place.classList.remove("over"));
  place.addEventListener("drop", (event) => {
    place.classList.remove("over");
    if (!event.dataTransfer.files.length) return; // text that is dropped lands in the field by itself
    event.preventDefault();
    takeFile(event.dataTransfer.files[0]);
  });
}

async function plan(delayMs) {
  running.abort();
  running = new AbortController();
  const { signal } = running;
  keepUnfinished(readForm());
  try {
    await later(delayMs, signal);
    await planNow(readForm(), signal);
  } catch (error) {
    if (signal.aborted) return; // a later change is on its way
    byId("plan-view").removeAttribute("data-busy");
    if (error instanceof Fault) showFaults([{ field: error.field, message: error.message }]);
    else if (error instanceof Problem) showFaults(faultsOf(error));
    else throw error;
  }
}

async function planNow(state, signal) {
  const isOfModel = !state.config.trim() || read(state.config).kind === "model";
  for (const id of OF_MODELS) byId(id).disabled = !isOfModel;
  byId("layers-hint").hidden = isOfModel;
  const text = requestText(state);
  byId("plan-view").setAttribute("data-busy", "");
  const made = await askJson("v1/plans", { method: "POST", body: text, signal });
  if (made.ranks) throw new Fault("config", "This request is of several ranks; the page plans one. Leave ranks out.");
  const picture = await (await ask(`v1/plans/${made.plan_id}/layout.svg`, { signal })).blob();
  showFaults([]);
  byId("plan-result").hidden = false;
  showPlan(made, picture, state);
  const fragment = await asFragment(state);
  signal.throwIfAborted();
  address = fragment;
  history.replaceState(null, "", `${location.pathname}#${fragment}`);
  forgetUnfinished();
  showCopies(state, text, made, fragment, isOfModel);
  byId("plan-view").removeAttribute("data-busy");
  byId("plan-view").dataset.planned = made.plan_id;
  await later(COMPARE_AFTER_MS, signal); // while something is being turned, one plan at a time is enough
  await showComparison(state, made, signal, (strategy) => {
    writeForm({ ...readForm(), strategy });
    plan(0);
  });
}

function showFaults(faults) {
  for (const id of FIELDS) {
    const mine = faults.filter(({ field }) => field === id).map(({ message }) => message);
    say(byId(`${id}-error`), mine.join(" "));
    if (mine.length) byId(id).setAttribute("aria-invalid", "true");
    else byId(id).removeAttribute("aria-invalid");
    if (mine.length && ["max_num_batched_tokens", "mtp", "draft"].includes(id)) byId("more").open = true;
  }
  const summary = byId("plan-fault");
  summary.hidden = !faults.length;
  summary.replaceChildren(...faults.map((fault) => make("p", {}, labelled(fault))));
  byId("plan-result").classList.toggle("stale", faults.length > 0);
  if (faults.length) say(byId("plan-status"), byId("plan-result").hidden ? "" : "What follows is of the last settings that had a plan.");
}

function labelled({ field, message }) {
  const label = field && (document.querySelector(`label[for="${field}"]`)?.textContent || { strategy: "Strategy", mtp: "More" }[field]);
  return label ? `${label}: ${message}` : message;
}
