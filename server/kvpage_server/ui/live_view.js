// The live view: asks every second while it is shown, and says what it was told. Nothing here changes anything.
import { askJson, later, Problem } from "./api.js";
import { byId, say } from "./dom.js";
import { plural } from "./format.js";
import { HeatMap, mapPath } from "./heat_map.js";
import { History, shareOf } from "./history.js";
import { showDevices, showPool, showPools } from "./pool_view.js";
import { keepToken, token } from "./token.js";

const EVERY_MS = 1000;
const MAX_POOLS = 32; // each is asked about every second
const history = new History();
let heat = null;
let chosen = null; // id of the pool that is shown in full
let looking = null;
let isPaused = false;

export function showLive() {
  heat ||= started();
  if (looking && !looking.signal.aborted) return;
  looking = new AbortController();
  look(looking.signal);
}

export function hideLive() {
  looking?.abort();
}

function started() {
  byId("pause").addEventListener("click", () => {
    isPaused = !isPaused;
    byId("pause").setAttribute("aria-pressed", String(isPaused));
    if (isPaused) say(byId("live-status"), "Paused.");
  });
  byId("forget").addEventListener("click", () => useToken(""));
  byId("token-form").addEventListener("submit", (event) => {
    event.preventDefault();
    useToken(byId("token").value.trim());
    byId("token").value = "";
  });
  return new HeatMap();
}

function useToken(value) {
  keepToken(value);
  hideLive();
  showLive();
}

async function look(signal) {
  while (!signal.aborted) {
    try {
      if (!isPaused && !document.hidden) await lookOnce(signal);
      await later(EVERY_MS, signal);
    } catch (error) {
      if (signal.aborted) return;
      if (!(error instanceof Problem)) throw error;
      refused(error);
      await later(EVERY_MS, signal).catch(() => {});
    }
  }
}

async function lookOnce(signal) {
  const [{ devices }, { pools }] = await Promise.all([askJson("v1/devices", { signal }), askJson("v1/pools", { signal })]);
  const known = pools.slice(0, MAX_POOLS);
  const found = (await Promise.all(known.map((pool) => poolOrNull(pool.id, signal)))).filter(Boolean);
  const now = performance.now() / 1000;
  for (const pool of found) if (pool.blocks) history.add(pool.id, now, shareOf(pool.blocks));
  history.keepOnly(new Set(found.map(({ id }) => id)));
  if (!found.some(({ id }) => id === chosen)) chosen = found[0]?.id ?? null;
  const pool = found.find(({ id }) => id === chosen);
  const map = pool?.blocks ? await askOr404(mapPath(pool.id), signal) : null;
  signal.throwIfAborted();
  connected(pools.length);
  showDevices(devices);
  showPools(found, history, chosen, (id) => {
    chosen = id;
    hideLive();
    showLive();
  });
  say(byId("pools-left-out"), pools.length > MAX_POOLS ? `The first ${MAX_POOLS} of ${plural(pools.length, "pool")}.` : "");
  showPool(pool, history);
  byId("heat").closest("section").hidden = !map;
  if (map) heat.show(map);
}

const poolOrNull = (id, signal) => askOr404(`v1/pools/${id}`, signal);

/** Null for a pool that has gone, or stopped being ready, since it was listed. */
async function askOr404(path, signal) {
  try {
    return await askJson(path, { signal });
  } catch (error) {
    if (error instanceof Problem && [404, 409, 410, 422].includes(error.status)) return null;
    throw error;
  }
}

function connected(numPools) {
  byId("token-form").hidden = true;
  byId("live-body").hidden = false;
  byId("forget").hidden = !token();
  say(byId("live-status"), `Connected: ${plural(numPools, "pool")}.`);
  say(byId("live-time"), `As of ${new Date().toLocaleTimeString()}`);
}

function refused(problem) {
  if (problem.status === 401 || problem.status === 403) {
    byId("live-body").hidden = true;
    byId("token-form").hidden = false;
    byId("forget").hidden = !token();
    say(byId("token-why"), problem.message);
    say(byId("live-status"), "A token is needed.");
    looking.abort(); // until there is another token, nothing changes
  } else {
    say(byId("live-status"), `Not connected: ${problem.message} Trying again.`);
  }
}
