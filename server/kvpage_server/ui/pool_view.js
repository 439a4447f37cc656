// Tables of devices and pools, and everything about one pool.
import { bar, byId, fillTable, make, makeSvg, say } from "./dom.js";
import { bytes, number, percent, plural, seconds } from "./format.js";
import { chart, shareOf, spark } from "./history.js";

const shown = new Map();

/** Fills the table only when what it shows has changed: selections and the place of the screen reader stay. */
function fill(id, columns, rows) {
  const key = JSON.stringify(rows.map((cells) => cells.map((cell) => (cell instanceof Node ? cell.outerHTML : cell))));
  if (shown.get(id) === key) return false;
  shown.set(id, key);
  fillTable(byId(id), columns, rows);
  return true;
}

const numeric = (text) => ({ text, number: true });

export function showDevices(devices) {
  const rows = devices.map((device) => {
    const limit = device.memory_limit_bytes;
    const reserved = device.reserved_bytes ?? 0;
    const name = device.device_name ? `${device.device} (${device.device_name})` : device.device;
    return [name, device.detail ? `${device.state}: ${device.detail}` : device.state, limit ? bar([["used", reserved / limit]]) : "",
      limit === null ? "–" : make("td", { class: "number" }, `${bytes(reserved)} of ${bytes(limit)}`), number(device.num_pools), device.worker_pid === null ? "–" : String(device.worker_pid)];
  });
  fill("devices", ["Device", "State", { text: "As a bar", quiet: true }, numeric("Budget"), numeric("Pools"), numeric("Worker pid")], rows);
}

export function showPools(pools, history, chosen, choose) {
  byId("no-pools").hidden = pools.length > 0;
  byId("pools").hidden = !pools.length;
  const focused = document.activeElement?.dataset?.pool;
  const rows = pools.map((pool) => {
    const button = make("button", { type: "button", class: "link", "data-pool": pool.id, "aria-pressed": String(pool.id === chosen), onclick: () => choose(pool.id) }, pool.name);
    const share = pool.blocks ? shareOf(pool.blocks) : null;
    const samples = history.of(pool.id);
    return [button, pool.device, pool.state, bytes(pool.buffer_size_bytes),
      share ? bar([["used", share.used], ["cached", share.cached]]) : "", share ? percent(share.used) : "–", share ? percent(share.cached) : "–",
      pool.blocks ? number(pool.blocks.num_leases) : "–", number(pool.num_holders), samples.length > 1 ? spark(samples) : ""];
  });
  const columns = ["Pool", "Device", "State", numeric("Size"), "Blocks", numeric("Used"), numeric("Cached"), numeric("Leases"), numeric("Holders"), "Lately"];
  if (fill("pools", columns, rows) && focused) byId("pools").querySelector(`[data-pool="${focused}"]`)?.focus();
}

export function showPool(pool, history) {
  byId("pool").hidden = !pool;
  if (!pool) return;
  say(byId("pool-name"), pool.name);
  const fault = pool.error ? ` ${pool.error.code}: ${pool.error.message}` : "";
  say(byId("pool-facts"), `${pool.id} on ${pool.device}, ${pool.state}, ${number(pool.committed_bytes)} of ${number(pool.buffer_size_bytes)} bytes committed. Plan ${pool.plan_id}.${fault}`);
  for (const id of ["history", "groups", "leases", "tenants"]) byId(id).closest("section").hidden = !pool.blocks;
  fill("holders", [numeric("Pid"), "Name", numeric("Uid")], pool.holders.map(({ pid, client_name, uid }) => [pid ? String(pid) : "not seen", client_name, String(uid)]));
  if (!pool.blocks) return;
  const samples = history.of(pool.id);
  byId("history").replaceChildren(chart(samples));
  legend(byId("history-legend"), [["used", "used"], ["cached", "cached, nobody holds it"], ["free", "free"]]);
  showGroups(pool.blocks);
  showLeases(pool.blocks);
  showTenants(pool.blocks);
}

function legend(place, entries) {
  if (place.childElementCount) return;
  place.replaceChildren(...entries.map(([kind, text]) =>
    make("span", {}, makeSvg("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, makeSvg("rect", { class: `swatch ${kind}`, width: 10, height: 10 })), text)));
}

function showGroups({ groups }) {
  const rows = groups.map((group, place) => [String(place), number(group.block_bytes), number(group.used), number(group.cached), number(group.free), number(group.available), number(group.slabs)]);
  fill("groups", [numeric("Table"), numeric("Bytes a block"), numeric("Used"), numeric("Cached"), numeric("Free"), numeric("Available"), numeric("Slabs")], rows);
}

function showLeases({ leases, num_leases: count }) {
  say(byId("leases-left-out"), leases.length < count ? `The first ${leases.length} of ${plural(count, "lease")}.` : "");
  const byProcess = [...leases].sort((one, other) => one.pid - other.pid || (one.name < other.name ? -1 : 1));
  const rows = byProcess.map((lease) => [
    lease.pid ? String(lease.pid) : "not seen", lease.client_name, lease.name, lease.tenant, lease.state,
    lease.owner_age_s === null || lease.owner_age_s === undefined ? "–" : seconds(lease.owner_age_s),
    lease.expires_in_s === null ? "–" : seconds(lease.expires_in_s), lease.blocks.map(number).join(" + "), lease.reserved.some((blocks) => blocks) ? lease.reserved.map(number).join(" + ") : "0",
  ]);
  fill("leases", [numeric("Pid"), "Process", "Lease", "Tenant", "State", numeric("Process age"), numeric("Ends in"), numeric("Blocks by table"), numeric("Reserved")], rows);
}

function showTenants({ tenants }) {
  const rows = tenants.map((tenant) => [
    tenant.name || "(none named)", bytes(tenant.used_bytes), tenant.quota_bytes === null ? "no limit" : bytes(tenant.quota_bytes),
    tenant.quota_bytes ? bar([["used", tenant.used_bytes / tenant.quota_bytes]]) : "", String(tenant.priority), String(tenant.weight), number(tenant.num_leases), number(tenant.num_waiting),
  ]);
  fill("tenants", ["Tenant", numeric("Uses"), numeric("Quota"), { text: "As a bar", quiet: true }, numeric("Priority"), numeric("Weight"), numeric("Leases"), numeric("Waiting")], rows);
}
