// The HTTP API, asked with the token of this tab. Answers of 400 or more are thrown as `Problem`.
import { mayBeToken, token } from "./token.js";

const TRIES_WHEN_BUSY = 5;
const NO_TOKEN = "What was given is no token: it has a space in it, or a character that no token has. Give another under Live.";

export class Problem extends Error {
  constructor(status, code, detail, errors, details = {}) {
    super(detail);
    this.status = status;
    this.code = code;
    this.errors = errors;
    this.details = details;
  }
}

export async function ask(path, { method = "GET", body = null, signal = null } = {}) {
  const headers = { Accept: "*/*" };
  if (body !== null) headers["Content-Type"] = "application/json";
  if (token()) {
    // `fetch` throws for what no header can carry, as it does where nobody answers.
    if (!mayBeToken(token())) throw new Problem(401, "unauthorized", NO_TOKEN, []);
    headers.Authorization = `Bearer ${token()}`;
  }
  for (let tries = 1; ; tries += 1) {
    const response = await sent(path, { method, body, signal, headers, cache: "no-store", credentials: "omit" });
    if (response.ok) return response;
    const problem = await asProblem(response);
    if (problem.code !== "rate-limited" || tries === TRIES_WHEN_BUSY) throw problem;
    await later(200 * tries, signal);
  }
}

export const askJson = async (path, options) => (await ask(path, options)).json();

async function sent(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "unreachable", "The server does not answer.", []);
  }
}

async function asProblem(response) {
  let told = {};
  try {
    told = await response.json();
  } catch {
    // not one of ours: the status has to do
  }
  const detail = told.detail || `The server answered with status ${response.status}.`;
  return new Problem(response.status, told.code || "unknown", detail, told.errors || [], told.details || {});
}

export function later(milliseconds, signal = null) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(new DOMException("stopped", "AbortError"));
    }, { once: true });
  });
}
