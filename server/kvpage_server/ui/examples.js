// Public configs that come with the page.
import { askJson } from "./api.js";
import { GIB } from "./format.js";

/** With the text that stands in the field, and the settings that it brings along. */
export async function loadExamples() {
  const listed = await askJson("ui/examples.json");
  return listed.map(({ name, title, config, request }) => ({
    name,
    title,
    text: JSON.stringify(config || request, null, 2),
    settings: request ? settingsOf(request) : {},
  }));
}

/** What a plan request says that controls say too. */
export function settingsOf(request) {
  const settings = {};
  if (typeof request.strategy === "string") settings.strategy = request.strategy;
  if (Number.isFinite(request.memory_bytes)) settings.memory = String(request.memory_bytes / GIB);
  for (const name of ["max_model_len", "max_num_batched_tokens"]) {
    if (Number.isFinite(request[name])) settings[name] = String(request[name]);
  }
  return settings;
}
