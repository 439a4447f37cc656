// The bearer token of this tab. It lies in the session's storage, which no other tab sees and which goes with the tab.

const NAME = "kvpage-token";

export const token = () => sessionStorage.getItem(NAME) || "";

export function keepToken(value) {
  if (value) sessionStorage.setItem(NAME, value);
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
