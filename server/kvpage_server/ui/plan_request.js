// What the controls say, as a plan request. The config's own text goes into it as it is, so that the server judges what
// was pasted and not what this page made of it.
import { bytes, GIB } from "./format.js";

export const STRATEGIES = ["auto", "unify", "scale_then_pad", "slab", "nested"];
const MODEL_NUMBERS = ["tp", "block_size"];
const REQUEST_NUMBERS = ["max_model_len", "max_num_batched_tokens"];

export class Fault extends Error {
  /** `field`: id of the control that it is about. */
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

/** What the text is: {kind: "model"} for a config.json, {kind: "layers", request} for a plan request. */
export function read(text) {
  const value = parsed("config", text);
  const isRequest = Array.isArray(value.layers) || (typeof value.model === "object" && value.model !== null);
  return isRequest ? { kind: "layers", request: value } : { kind: "model" };
}

function parsed(field, text) {
  if (!text.trim()) throw new Fault(field, "Paste a config.json, or pick an example.");
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Fault(field, `This is not JSON: ${error.message}`);
  }
  if (typeof value !== "object" || value === null || Array.isArray(value)) {
    throw new Fault(field, "A config.json holds a JSON object: { … }");
  }
  return value;
}

/** The request's JSON. Throws `Fault` for what can be seen here already. */
export function requestText(state, strategy = state.strategy) {
  const source = read(state.config);
  const fields = requestFields(state, strategy);
  if (source.kind === "layers") {
    const { num_blocks: _, ...rest } = source.request;
    return JSON.stringify({ ...rest, ...fields }, null, 1);
  }
  const model = Object.entries(modelFields(state)).map(([name, value]) => `"${name}": ${JSON.stringify(value)}`);
  model.unshift(`"config": ${state.config.trim()}`);
  if (state.draft.trim()) {
    parsed("draft", state.draft);
    model.push(`"draft": ${state.draft.trim()}`);
  }
  const outer = Object.entries(fields).map(([name, value]) => `"${name}": ${JSON.stringify(value)}`);
  return `{${[...outer, `"model": {${model.join(", ")}}`].join(", ")}}`;
}

function requestFields(state, strategy) {
  const fields = { strategy, memory_bytes: memoryBytes(state) };
  for (const name of REQUEST_NUMBERS) if (state[name] !== "") fields[name] = asNumber(name, state[name]);
  return fields;
}

function modelFields(state) {
  const fields = {};
  for (const name of MODEL_NUMBERS) if (state[name] !== "") fields[name] = asNumber(name, state[name]);
  if (state.kv_dtype !== "auto") fields.kv_dtype = state.kv_dtype;
  if (state.mtp) fields.mtp = true;
  return fields;
}

export function memoryBytes(state) {
  const gib = asNumber("memory", state.memory);
  if (!(gib > 0)) throw new Fault("memory", "Say how much memory one rank has for the cache: GiB, more than 0.");
  return Math.round(gib * GIB);
}

function asNumber(field, text) {
  const value = Number(text);
  if (text === "" || !Number.isFinite(value)) throw new Fault(field, "This must be a number.");
  return value;
}

const FIELD_OF = [
  ["/model/tp", "tp"], ["/model/kv_dtype", "kv_dtype"], ["/model/block_size", "block_size"], ["/model/mtp", "mtp"],
  ["/model/draft", "draft"], ["/model", "config"], ["/layers", "config"], ["/memory_bytes", "memory"],
  ["/max_model_len", "max_model_len"], ["/max_num_batched_tokens", "max_num_batched_tokens"], ["/strategy", "strategy"],
];
const FIELD_OF_CODE = { "not-enough-memory": "memory", "json-invalid": "config" };

/** The page asks for GiB, the API for bytes. */
function inUnitsOfPage({ code, message, details }) {
  const needed = details.needed_bytes;
  if (code !== "not-enough-memory" || !Number.isFinite(needed)) return message;
  return `This is too little for a single block besides the null block: at least ${atLeast(needed)} GiB (${bytes(needed)}).`;
}

/** Rounded up, so that who types it has enough. */
function atLeast(sizeBytes) {
  const digits = 10 ** Math.max(0, 3 - Math.floor(Math.log10(sizeBytes / GIB)));
  return String(Math.ceil((sizeBytes / GIB) * digits) / digits);
}

/** The server's refusal as faults of controls; `field` is null for what is about none of them. */
export function faultsOf(problem) {
  const found = problem.errors.map(({ pointer, detail }) => {
    const place = FIELD_OF.find(([start]) => pointer === start || pointer.startsWith(`${start}/`));
    const inside = pointer.replace(/^\/model\/(config|draft)\/?/, "").replace(/^\//, "").replaceAll("/", ", ");
    const isInText = place && (place[1] === "config" || place[1] === "draft") && inside;
    const words = detail.replaceAll(/\/model\/(?:config|draft)\/([\w/]+)/g, (_, steps) => steps.replaceAll("/", ", "));
    return { field: place ? place[1] : null, message: isInText ? `${inside}: ${words}` : words };
  });
  return found.length ? found : [{ field: FIELD_OF_CODE[problem.code] || null, message: inUnitsOfPage(problem) }];
}
