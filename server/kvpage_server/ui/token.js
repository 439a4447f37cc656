// The bearer token of this tab. It lies in the session's storage, which no other tab sees and which goes with the tab.

const NAME = "kvpage-token";

export const token = () => sessionStorage.getItem(NAME) || "";

/** Printable ASCII without spaces: others no server takes. */
export const mayBeToken = (text) => /^[!-~]+$/.test(text);

/** Without what is around it: an end of line comes along when a line is copied. */
export function keepToken(value) {
  const text = value.trim();
  if (text) sessionStorage.setItem(NAME, text);
  else sessionStorage.removeItem(NAME);
}

/** Takes a token out of the address at once: what stands there lands in histories and pictures of screens. */
export function takeTokenFromAddress() {
  const fragment = new URLSearchParams(location.hash.slice(1));
  const given = fragment.get("token");
  if (given === null) return;
  keepToken(given);
  fragment.delete("token");
  const rest = fragment.toString();
  history.replaceState(null, "", location.pathname + (rest ? `#${rest}` : ""));
}
