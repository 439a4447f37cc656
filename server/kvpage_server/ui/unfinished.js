// What is typed and has no plan yet. The address says only what has one, and a reload must not lose the rest: it is kept
// in this tab, for the address that it was typed at.
const KEY = "kvpage.unfinished";

export function keepUnfinished(state) {
  try {
    sessionStorage.setItem(KEY, JSON.stringify({ address: location.hash, state }));
  } catch {
    // too much for the browser, or not allowed: then a reload loses it
  }
}

export function forgetUnfinished() {
  sessionStorage.removeItem(KEY);
}

/** Null where nothing was typed at this address, or all of it was planned. */
export function unfinished() {
  const kept = JSON.parse(sessionStorage.getItem(KEY) || "null");
  return kept && kept.address === location.hash ? kept.state : null;
}
