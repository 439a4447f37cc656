// What the controls of the plan view are set to, in the form and in the fragment of the address.
import { byId } from "./dom.js";

export const DEFAULTS = {
  example: "", config: "", draft: "", strategy: "auto", memory: "40", tp: "1", kv_dtype: "auto",
  max_model_len: "", block_size: "", max_num_batched_tokens: "", mtp: false,
};
const TEXTS = ["example", "config", "draft", "memory", "tp", "kv_dtype", "max_model_len", "block_size", "max_num_batched_tokens"];
const SHORT = ["strategy", "memory", "tp", "kv_dtype", "max_model_len", "block_size", "max_num_batched_tokens"];

export function readForm() {
  const state = Object.fromEntries(TEXTS.map((name) => [name, byId(name).value]));
  for (const name of TEXTS) if (byId(name).validity.badInput) state[name] = "?"; // typed, and no number
  state.strategy = document.querySelector('input[name="strategy"]:checked')?.value || DEFAULTS.strategy;
  state.kv_dtype ||= DEFAULTS.kv_dtype; // a link may name one that there is not
  state.mtp = byId("mtp").checked;
  return state;
}

export function writeForm(state) {
  for (const name of TEXTS) if (byId(name).value !== state[name]) byId(name).value = state[name];
  for (const radio of document.querySelectorAll('input[name="strategy"]')) radio.checked = radio.value === state.strategy;
  byId("mtp").checked = state.mtp;
  byId("memory-range").value = rangeOfMemory(state.memory);
}

// The range goes from 1 to 1,024 GiB, each step by the same factor.
const STEPS = 100;
export const rangeOfMemory = (gib) => (Number(gib) > 1 ? Math.round((STEPS * Math.log2(Number(gib))) / 10) : 0);
export function memoryOfRange(place) {
  const gib = 2 ** ((10 * Number(place)) / STEPS);
  return String(gib < 16 ? Math.round(gib * 2) / 2 : Math.round(gib));
}

/** The fragment that leads back here. A text of one's own goes into it packed; an example by its name. */
export async function asFragment(state) {
  const fragment = new URLSearchParams();
  if (state.example) fragment.set("example", state.example);
  else fragment.set("config", await packed(state.config));
  for (const name of SHORT) if (state[name] !== DEFAULTS[name]) fragment.set(name, state[name]);
  if (state.mtp) fragment.set("mtp", "1");
  if (state.draft.trim()) fragment.set("draft", await packed(state.draft));
  return fragment.toString();
}

/**
 * The state that a fragment says, and what of it no control can say (`tp=abc`), in whose place stands the default. Null
 * where it says nothing of a plan. Throws for what cannot be unpacked.
 */
export async function ofFragment(fragment, examples) {
  if (!["example", "config", "draft", "mtp", ...SHORT].some((name) => fragment.has(name))) return null;
  const state = { ...DEFAULTS };
  const example = examples.find(({ name }) => name === fragment.get("example"));
  const odd = fragment.has("example") && !example ? ["example"] : [];
  if (!fragment.has("config") || example) Object.assign(state, stateOf(example || examples[0]));
  else state.config = await unpacked(fragment.get("config"));
  for (const name of SHORT) {
    if (!fragment.has(name)) continue;
    if (canSay(name, fragment.get(name))) state[name] = fragment.get(name);
    else odd.push(name);
  }
  state.mtp = fragment.get("mtp") === "1";
  if (fragment.has("draft")) state.draft = await unpacked(fragment.get("draft"));
  return { state, odd: odd.map((name) => `${name}=${fragment.get(name)}`) };
}

export const stateOf = (example) => (example ? { ...example.settings, example: example.name, config: example.text } : {});

function canSay(name, value) {
  if (name === "strategy") return [...document.querySelectorAll('input[name="strategy"]')].some((radio) => radio.value === value);
  if (name === "kv_dtype") return [...byId(name).options].some((option) => option.value === value);
  return value.trim() !== "" && Number.isFinite(Number(value));
}

async function packed(text) {
  const stream = new Blob([text]).stream().pipeThrough(new CompressionStream("deflate-raw"));
  const data = new Uint8Array(await new Response(stream).arrayBuffer());
  const binary = Array.from(data, (byte) => String.fromCharCode(byte)).join("");
  return btoa(binary).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

async function unpacked(word) {
  const binary = atob(word.replaceAll("-", "+").replaceAll("_", "/"));
  const data = Uint8Array.from(binary, (character) => character.charCodeAt(0));
  const stream = new Blob([data]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Response(stream).text();
}
