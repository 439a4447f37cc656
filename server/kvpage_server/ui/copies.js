// What a person takes away: the request, the commands that give the same plan, its id, and a link to this page.
import { byId, make, say } from "./dom.js";
import { GIB } from "./format.js";
import { memoryBytes } from "./plan_request.js";

let fileUrl = null;

export function showCopies(state, request, plan, fragment, isOfModel) {
  const link = `${location.origin}${location.pathname}#${fragment}`;
  if (fileUrl) URL.revokeObjectURL(fileUrl);
  fileUrl = URL.createObjectURL(new Blob([request], { type: "application/json" }));
  const save = make("a", { href: fileUrl, download: "request.json" }, "Save request.json");
  byId("copies").replaceChildren(
    one("Plan id", "plan-id", plan.plan_id),
    one("Command", "command", isOfModel ? command(state) : "kvpage plan request.json", isOfModel ? "With the files beside you; no server is needed." : "With the request as request.json."),
    one("curl", "curl", `curl -sS ${location.origin}/v1/plans -H 'Content-Type: application/json' --data-binary @request.json`),
    one("Request", "request", request, save),
    one("Link to this", "link", link),
  );
}

function one(title, id, text, more = null) {
  const label = make("h3", { id: `copy-${id}-label` }, title);
  const code = make("pre", { id: `copy-${id}`, tabindex: "0", role: "region", "aria-labelledby": `copy-${id}-label` }, text);
  const button = make("button", { type: "button", "aria-label": `Copy: ${title}`, onclick: () => copy(title, code) }, "Copy");
  return make("div", { class: "copy" }, make("div", { class: "copy-head" }, label, button), code, more && make("p", { class: "hint" }, more));
}

async function copy(title, code) {
  try {
    await navigator.clipboard.writeText(code.textContent);
    say(byId("copy-status"), `${title} copied.`);
  } catch { // not over plain HTTP from afar, or not allowed
    getSelection().selectAllChildren(code);
    say(byId("copy-status"), `${title} is selected; copy it with the keyboard.`);
  }
}

/** `kvpage plan` with what differs from its own defaults. */
export function command(state) {
  const options = [["--model", "config.json"]];
  if (state.draft.trim()) options.push(["--draft", "draft.json"]);
  options.push(["--memory", memory(memoryBytes(state))], ["--strategy", state.strategy]);
  if (state.tp !== "" && state.tp !== "1") options.push(["--tp", plain(state.tp)]);
  if (state.kv_dtype !== "auto") options.push(["--kv-dtype", state.kv_dtype]);
  for (const name of ["max_model_len", "block_size", "max_num_batched_tokens"]) {
    if (state[name] !== "") options.push([`--${name.replaceAll("_", "-")}`, plain(state[name])]);
  }
  if (state.mtp) options.push(["--mtp"]);
  return `kvpage plan ${options.flat().join(" ")}`;
}

const plain = (text) => String(Number(text)); // "1e3" is a number to a browser only
const memory = (size) => (size % GIB === 0 ? `${size / GIB}GiB` : String(size));
