// One session: its timeline over lanes with its moves, and why each request ran where it ran.

import { h, s, byId, table, count, ms, age } from "./dom.js";
import { get, post } from "./api.js";

const DECISIONS_MAX = 16;
const GAP_S = 4; // a longer pause is drawn as long as this
const ROW = 26, LEFT = 70;
let shown = "";
let chosen = ""; // request whose decision is open
let said = ""; // what came of the last move that was asked for
let onClose = () => {};
let known = []; // names of all lanes: they have their colours from their places

export function name(lanes) { known = lanes; }

export function open(id, closed) {
  [shown, chosen, said, onClose] = [id, "", "", closed];
  byId("session").hidden = false;
  byId("session").replaceChildren(h("p", { class: "quiet" }, "loading"));
  return refresh(true);
}

export function close() {
  if (!shown) return;
  shown = "";
  byId("session").hidden = true;
  onClose();
}

export async function refresh(take = false) {
  if (!shown) return;
  const id = shown;
  const place = byId("session");
  try {
    const path = encodeURIComponent(id);
    const [detail, found] = await Promise.all([
      get(`/v1/sessions/${path}`).catch(() => ({})), get(`/v1/explain/${path}`),
    ]);
    if (id !== shown) return;
    const focus = place.contains(document.activeElement) ? document.activeElement.dataset.focus : null;
    place.replaceChildren(...parts(id, detail, found.decisions ?? [], found));
    if (take) { place.focus({ preventScroll: true }); place.scrollIntoView({ block: "nearest" }); }
    else if (focus) place.querySelector(`[data-focus="${CSS.escape(focus)}"]`)?.focus({ preventScroll: true });
  } catch (error) {
    if (id === shown) place.replaceChildren(header(id, {}), h("p", { class: "bad" }, error.message));
  }
}

function header(id, detail) {
  const note = h("span", { class: "quiet", role: "status" }, said);
  const act = (what) => async () => {
    let text;
    try {
      const found = await post(`/v1/sessions/${encodeURIComponent(id)}/${what}`);
      text = `${found.source} → ${found.target}: ${found.result}`;
    } catch (error) { text = error.message; }
    if (id !== shown) return;
    said = text;
    await refresh();
  };
  const button = (name, on) => h("button", { type: "button", "data-focus": name, on: { click: on } }, name);
  const facts = [detail.state, detail.tokens == null ? null : `${count(detail.tokens)} tokens`,
    detail.pages == null ? null : `${count(detail.pages)} pages`, detail.turns ? `${count(detail.turns.length)} turn${detail.turns.length === 1 ? "" : "s"}` : null];
  return h("header", {}, h("div", {}, h("h3", { id: "session-title" }, detail.name || id),
    h("span", { class: "quiet" }, facts.filter(Boolean).join(" · ")), " ", note),
  h("div", { class: "actions" }, button("Promote", act("promote")), button("Demote", act("demote")), button("Close", close)));
}

// Where the pages of a session are and what it waits for, if peers have any.
function held({ route, waits_for: waits = {}, slow = {}, page_move: move, pages_lost: lost }) {
  const name = (peer) => peer || "here";
  const lines = [
    route?.some((one) => one.peer) ? `pages: ${route.map((one) => `${name(one.peer)} ${count(one.pages)}`).join(", ")}` : null,
    ...Object.entries(waits).map(([peer, why]) => `waits for ${peer}: ${why}`),
    ...Object.entries(slow).map(([peer, why]) => `leaves ${peer}: ${why}`),
    lost ? `${count(lost)} pages are computed again: they were lost with a peer` : null,
    move ? `moving ${count(move.pages)} pages, ${name(move.source)} → ${name(move.target)}` : null,
  ].filter(Boolean);
  return lines.length ? h("ul", {}, lines.map((line) => h("li", {}, line))) : null;
}

function parts(id, detail, decisions, found) {
  const facts = { ...found, ...detail };
  const made = [header(id, facts), held(facts)].filter(Boolean);
  if (!decisions.length) return [...made, h("p", { class: "quiet" }, "This daemon has decided nothing about it yet.")];
  const latest = decisions.slice(-DECISIONS_MAX);
  made.push(timeline(latest), listing(latest));
  const one = latest.find((row) => row.request_id === chosen) ?? latest.at(-1);
  return [...made, decision(one)];
}

// Stretches [lane, start, end, is it prefill] in seconds before now, and the moves between them.
function stretches(one) {
  const start = -one.age_s;
  const done = one.happened;
  const ttft = done?.ttft_ms ?? null;
  const last = done ? ((ttft ?? 0) + (done.tpot_ms ?? 0) * Math.max(0, done.tokens - 1)) / 1000 : one.age_s;
  const moves = one.moves.filter((move) => move.result === "moved").map((move) => ({ ...move, at: (move.after_ms ?? 0) / 1000 }));
  const end = start + Math.max(last, 0.001, ...moves.map((move) => move.at));
  const made = [], jumps = [];
  let lane = moves[0] && moves[0].from !== "none" ? moves[0].from : one.lane || "none";
  let at = start;
  const push = (until) => {
    const first = ttft == null ? (done ? until : null) : start + ttft / 1000;
    if (first != null && first > at && first < until) made.push([lane, at, first, true], [lane, first, until, false]);
    else made.push([lane, at, until, first != null && first >= until]);
  };
  for (const move of moves) {
    push(start + move.at);
    jumps.push([move.from === "none" ? move.to : move.from, move.to, start + move.at, move]);
    [lane, at] = [move.to, start + move.at];
  }
  push(end);
  return { made, jumps, start, end };
}

function timeline(decisions) {
  const all = decisions.map(stretches);
  const used = new Set(all.flatMap((one) => [...one.made.map((row) => row[0]), ...one.jumps.map((row) => row[1])]));
  const lanes = [...known.filter((lane) => used.has(lane)), ...[...used].filter((lane) => !known.includes(lane))];
  const color = (lane) => (known.includes(lane) ? known.indexOf(lane) : known.length + lanes.indexOf(lane)) % 6;
  const width = Math.max(300, byId("session").clientWidth - 30);
  const height = ROW * lanes.length + 22;
  // Pauses between turns are cut to GAP_S.
  const marks = [];
  let drawnTo = 0, until = all[0].start;
  for (const one of all) {
    const pause = Math.max(0, one.start - until);
    const kept = Math.min(pause, GAP_S);
    if (pause > GAP_S) marks.push([drawnTo, drawnTo + kept, pause]);
    one.shift = drawnTo + kept - one.start + Math.min(0, one.start - until);
    drawnTo = Math.max(drawnTo, one.end + one.shift);
    until = Math.max(until, one.end);
  }
  const scale = (width - LEFT - 8) / Math.max(drawnTo, 0.001);
  const x = (seconds, shift = 0) => LEFT + (seconds + shift) * scale;
  const y = (lane) => lanes.indexOf(lane) * ROW + ROW / 2 + 2;
  const view = s("svg", { class: "timeline", viewBox: `0 0 ${width} ${height}`, role: "img", height, "aria-label": spoken(all) });
  for (const [from, to, pause] of marks) {
    view.append(s("rect", { class: "gap", x: x(from), y: 0, width: (to - from) * scale, height: height - 18 }));
    const label = s("text", { x: x((from + to) / 2), y: height - 4, "text-anchor": "middle" });
    label.textContent = `⋯ ${age(pause)}`;
    if ((to - from) * scale > 40) view.append(label);
  }
  lanes.forEach((lane) => {
    const name = s("text", { x: 0, y: y(lane) + 4 });
    name.textContent = lane.length > 10 ? `${lane.slice(0, 9)}…` : lane;
    view.append(s("line", { class: "track", x1: LEFT, x2: width - 8, y1: y(lane), y2: y(lane) }), name);
  });
  for (const one of all) {
    for (const [lane, from, to, isPrefill] of one.made) {
      const rect = s("rect", {
        class: `c${color(lane)}${isPrefill ? " prefill" : ""}`, rx: 2,
        x: x(from, one.shift), y: y(lane) - 7, width: Math.max(2, (to - from) * scale), height: 14,
      });
      const title = s("title");
      title.textContent = `${lane}: ${ms((to - from) * 1000)}${isPrefill ? " until the first token" : ""}`;
      rect.append(title);
      view.append(rect);
    }
    for (const [from, to, at, move] of one.jumps) {
      const title = s("title");
      title.textContent = `${from} → ${to}, ${move.cause}: ${ms(move.gap_ms)} between two tokens`;
      view.append(s("path", { class: "move", d: `M${x(at, one.shift)} ${y(from)}V${y(to)}` }),
        s("circle", { class: "dot", cx: x(at, one.shift), cy: y(to), r: 4 }, title));
    }
  }
  const end = s("text", { x: width - 8, y: height - 4, "text-anchor": "end" });
  end.textContent = `${age(Math.max(0, -all.at(-1).end))} ago`;
  if (-all.at(-1).end > 1) view.append(end);
  return view;
}

function spoken(all) {
  const moves = all.flatMap((one) => one.jumps).map(([from, to]) => `${from} to ${to}`);
  return `Timeline of ${all.length} requests; moves: ${moves.join(", ") || "none"}`;
}

function listing(decisions) {
  const rows = [...decisions].reverse().map((one) => ({ ...one, isChosen: one.request_id === chosen }));
  const pick = (one) => h("button", {
    type: "button", "data-focus": one.request_id, on: { click: () => { chosen = one.request_id; refresh(); } },
  }, `${age(one.age_s)} ago`);
  return h("div", { class: "scroll short", tabindex: 0, role: "region", "aria-label": "Requests of this session" }, table("Requests of this session", [
    ["decided", pick], ["class", (one) => one.class], ["lane", (one) => one.lane],
    ["because", (one) => one.reason, false, "text"],
    ["TTFT", (one) => ms(one.happened?.ttft_ms), true],
    ["predicted", (one) => ms(one.predicted?.ttft_ms), true],
    ["tokens", (one) => count(one.happened?.tokens), true],
    ["moves", (one) => one.moves.map((move) => `${move.from} → ${move.to} (${move.cause})`).join("; ") || null, false, "text"],
  ], rows, ""));
}

function decision(one) {
  const asked = one.request;
  const rows = one.candidates.map((row) => ({ ...row, isChosen: row.lane === one.lane }));
  const notes = [...one.notes, ...(one.outlooks ?? []).filter((row) => row.rejected)
    .map((row) => `${row.name ?? row.decode}${row.peers.length ? ` with ${row.peers.join(", ")}` : ""}: ${row.rejected}`)];
  return h("div", {}, h("h3", {}, `Why ${one.lane || "no lane"}: ${one.reason}`),
    h("p", { class: "quiet" }, `${one.request_id}, ${count(asked.prompt_tokens)} prompt tokens, about ${count(asked.tokens_out)} to come; ` +
      `${count(one.session?.reused_tokens ?? 0)} had KV`),
    h("div", { class: "scroll" }, table("Lanes that were compared", [
      ["lane", (row) => (row.isChosen ? `${row.lane} ✓` : row.lane)],
      ["TTFT", (row) => ms(row.ttft_ms), true], ["per token", (row) => ms(row.tpot_ms), true],
      ["SLA ratio", (row) => row.sla_ratio?.toFixed(2), true],
      ["seats", (row) => `${count(row.seated ?? 0)} of ${count(row.seats ?? 0)}`, true],
      ["waiting", (row) => count(row.waiting), true],
      ["not considered", (row) => row.excluded || null, false, "text"],
    ], rows, "")),
    notes.length ? h("ul", {}, notes.map((note) => h("li", {}, note))) : null);
}
