// Which of the two views is shown. The fragment of the address says it, and for a plan what is planned.
import { byId } from "./dom.js";
import { showLive, hideLive } from "./live_view.js";
import { openPlan, startPlan } from "./plan_view.js";
import { takeTokenFromAddress } from "./token.js";

function show() {
  takeTokenFromAddress();
  const fragment = new URLSearchParams(location.hash.slice(1));
  const isLive = fragment.get("view") === "live";
  byId("plan-view").hidden = isLive;
  byId("live-view").hidden = !isLive;
  mark(byId("to-plan"), !isLive);
  mark(byId("to-live"), isLive);
  document.title = isLive ? "Pools – kvpage" : "Plan – kvpage";
  if (isLive) showLive();
  else {
    hideLive();
    openPlan(fragment);
  }
}

function mark(link, isHere) {
  if (isHere) link.setAttribute("aria-current", "page");
  else link.removeAttribute("aria-current");
}

byId("skip").addEventListener("click", (event) => {
  event.preventDefault(); // its address is no state of the page
  byId("main").focus();
});
await startPlan();
window.addEventListener("hashchange", show);
show();
