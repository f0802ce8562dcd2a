// Totals, requests, targets, KV tiers and peers.

import { h, replace, byId, table, bar, gauge, count, rate, ms, age, bytes, short } from "./dom.js";

const CLASSES = ["interactive", "standard", "background", "batch"];
const OUTCOMES = [["met", "met"], ["ttft_miss", "TTFT late"], ["tpot_miss", "TPOT slow"], ["ttlt_miss", "end late"]];

export function tiles(snapshot, rates) {
  const { stats } = snapshot;
  const speed = [...rates.values()].reduce((sum, one) => sum + one, 0);
  const { met, all } = totals(stats.outcomes ?? {});
  const rows = [
    [rate(speed), "tokens/s"],
    [count(stats.requests_running), "running"],
    [count(stats.requests_waiting), "waiting"],
    [count(stats.sessions), "sessions in memory"],
    [all ? `${((100 * met) / all).toFixed(1)} %` : "–", "targets met"],
    [stats.uptime_s == null ? "–" : age(stats.uptime_s), "uptime"],
  ];
  replace("tiles", rows.map(([value, name]) => h("div", { class: "tile" }, h("b", {}, value ?? "–"), h("span", {}, name))));
}

function totals(outcomes) {
  let met = 0, all = 0;
  for (const of of Object.values(outcomes))
    for (const [name, n] of Object.entries(of)) { all += n; if (name === "met") met += n; }
  return { met, all };
}

function progress(one) {
  const total = one.prompt_tokens || 1;
  const found = (one.cached_tokens ?? 0) / total;
  const done = one.completion_tokens ? 1 : one.to_compute ? Math.max(found, 1 - one.to_compute / total) : found;
  const text = `${Math.round(100 * done)} % of the prompt, ${Math.round(100 * found)} % found`;
  return bar(text, [found, "found"], [done - found, ""]);
}

// A name that a long one does not make wider; the pointer shows the whole of it.
const called = (name) => h("span", { title: name }, name);

export function requests(snapshot) {
  replace("requests", table("Requests", [
    ["session", (one) => called(one.name || short(one.session_id || one.request_id)), false, "name"],
    ["class", (one) => one.class],
    ["state", (one) => one.state],
    ["lane", (one) => one.lane || null],
    ["place", (one) => count(one.position), true],
    ["ETA", (one) => ms(one.eta_ms), true],
    ["prompt", (one) => count(one.prompt_tokens), true],
    ["prefill", progress],
    ["answer", (one) => count(one.completion_tokens), true],
    ["TTFT", (one) => ms(one.ttft_ms), true],
    ["per token", (one) => ms(one.tpot_ms), true],
    ["age", (one) => (one.age_ms == null ? null : age(one.age_ms / 1000)), true],
  ], snapshot.requests, `No request is computed or waits. Clients of OpenAI and Anthropic use ${location.origin}/v1.`));
  const hidden = snapshot.n_requests - snapshot.requests.length;
  if (hidden > 0) byId("requests").append(h("p", { class: "quiet" }, `and ${count(hidden)} more`));
}

export function targets(snapshot) {
  const outcomes = snapshot.stats.outcomes ?? {};
  const names = [...CLASSES, ...Object.keys(outcomes).filter((name) => !CLASSES.includes(name))];
  const rows = names.filter((name) => outcomes[name]).map((name) => {
    const of = outcomes[name];
    const all = Object.values(of).reduce((sum, n) => sum + n, 0);
    return { name, of, all, met: (of.met ?? 0) / Math.max(1, all) };
  });
  replace("sla", table("Targets met and missed", [
    ["class", (row) => row.name],
    ["", (row) => bar(`${Math.round(100 * row.met)} % met`, [row.met, "good"], [row.all ? 1 - row.met : 0, "bad"])],
    ...OUTCOMES.map(([key, title]) => [title, (row) => count(row.of[key] ?? 0), true]),
  ], rows, "No request has finished yet."));
}

export function tiers(snapshot) {
  const { lanes, stats } = snapshot;
  const store = stats.store ?? {};
  const made = lanes.filter((lane) => lane.pages).map((lane) => {
    const used = lane.pages - lane.pages_free;
    return gauge(`memory of ${lane.name}`, `${count(used)} of ${count(lane.pages)} open pages`, used / lane.pages, "");
  });
  if (store.budget_bytes) {
    const share = store.used_bytes / store.budget_bytes;
    made.push(gauge("disk", `${bytes(store.used_bytes)} of ${bytes(store.budget_bytes)}`, share, share > 0.95 ? "warn" : ""));
  }
  const facts = [
    ["prompt tokens found instead of computed", count(stats.prefix_hit_tokens)],
    ["pages on disk", count(store.pages_published ?? store.pages_total)],
    ["sessions on disk", count(store.sessions)],
    ["state", stats.kv_tier],
  ].filter(([, value]) => value != null);
  replace("kv", made, table("KV", [["", (row) => row[0], false, "text"], ["", (row) => row[1], true]], facts, ""));
}

export function peers(snapshot) {
  byId("peers-section").hidden = !snapshot.peers.length;
  replace("peers", table("Peers", [
    ["peer", (one) => one.name],
    ["state", (one) => h("span", { class: one.state === "up" ? "good" : "bad" }, one.state)],
    ["round trip", (one) => ms(one.rtt_ms), true],
    ["running", (one) => count(one.requests_running), true],
    ["waiting", (one) => count(one.requests_waiting), true],
    ["our pages there", (one) => count(one.pages_taken), true],
    ["its pages here", (one) => count(one.pages_given), true],
    ["KV free", (one) => (one.kv_free_bytes == null ? null : bytes(one.kv_free_bytes)), true],
    ["why", (one) => one.why || null, false, "text"],
  ], snapshot.peers, ""));
}
