// One card per lane with its sessions. A session that moves to another lane is seen to move.

import { h, byId, count, rate, ms, short, bar } from "./dom.js";

const CHIPS_MAX = 60;
const RESTING = "at rest";
const chips = new Map(); // session -> its button
const still = matchMedia("(prefers-reduced-motion: reduce)");

const label = (session) => session.name || short(session.session_id);

function place(session, request) {
  const lane = request?.lane || session.lane;
  return lane || RESTING;
}

function describe(session, request) {
  const what = request ? request.state : session.state;
  return `${label(session)}, ${session.class ?? ""} ${what}, ${count(session.tokens)} tokens`;
}

export function draw(snapshot, rates, select, selected) {
  const requests = new Map(snapshot.requests.filter((one) => one.session_id).map((one) => [one.session_id, one]));
  const places = new Map(snapshot.lanes.map((lane) => [lane.name, []]));
  const rank = (one) => (requests.has(one.session_id) ? 0 : 1);
  for (const one of [...snapshot.sessions].reverse().sort((a, b) => rank(a) - rank(b))) {
    const where = place(one, requests.get(one.session_id));
    if (!places.has(where)) places.set(where, []);
    places.get(where).push(one);
  }
  const before = new Map();
  for (const [id, chip] of chips) before.set(id, { at: chip.getBoundingClientRect(), lane: chip.dataset.lane });
  const focused = document.activeElement;
  const seen = new Set();
  const cards = [...places].map(([name, sessions]) => card(
    snapshot.lanes.find((lane) => lane.name === name), name, rates.get(name),
    sessions.slice(0, CHIPS_MAX).map((one) => {
      seen.add(one.session_id);
      return chipOf(one, requests.get(one.session_id), name, select, selected);
    }), sessions.length));
  for (const id of chips.keys()) if (!seen.has(id)) chips.delete(id);
  byId("lanes").replaceChildren(...cards);
  if (focused?.classList.contains("chip") && focused.isConnected) focused.focus({ preventScroll: true });
  for (const [id, chip] of chips) animate(chip, before.get(id));
}

function animate(chip, before) {
  if (!before || before.lane === chip.dataset.lane || still.matches) return;
  const now = chip.getBoundingClientRect();
  chip.animate([
    { transform: `translate(${before.at.x - now.x}px, ${before.at.y - now.y}px) scale(1.15)`, zIndex: 5 },
    { transform: "none" },
  ], { duration: 700, easing: "ease-in-out" });
}

function chipOf(session, request, lane, select, selected) {
  const id = session.session_id;
  let chip = chips.get(id);
  if (!chip) {
    chip = h("button", { type: "button", on: { click: () => select(id), keydown: arrows } });
    chips.set(id, chip);
  }
  const waits = request && request.position != null;
  chip.className = `chip ${waits ? "waits" : request ? "busy" : ""}`;
  chip.dataset.lane = lane;
  chip.dataset.session = id;
  chip.title = describe(session, request);
  chip.setAttribute("aria-label", chip.title);
  chip.setAttribute("aria-pressed", String(id === selected));
  chip.replaceChildren(label(session), " ", h("small", {}, count(session.tokens)));
  return chip;
}

function arrows(event) {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (!step) return;
  const all = [...document.querySelectorAll(".chip")];
  all[(all.indexOf(event.currentTarget) + step + all.length) % all.length].focus();
  event.preventDefault();
}

function card(lane, name, speed, shown, total) {
  const more = total > shown.length ? h("span", { class: "quiet" }, `and ${total - shown.length} more`) : null;
  if (!lane) {
    const title = name === RESTING ? "At rest, on no lane" : `Peer ${name}`;
    return h("article", { class: "lane" }, h("header", {}, h("h3", {}, title)), h("div", { class: "chips" }, shown, more));
  }
  const bad = lane.state !== "ready";
  const kind = [lane.kind, lane.tier && lane.tier !== "any" ? lane.tier : null].filter(Boolean).join(", ");
  const facts = [
    `${count(lane.running ?? 0)}${lane.seats ? ` of ${count(lane.seats)}` : ""} running`, `${count(lane.waiting ?? 0)} waiting`,
    lane.step_ms ? `step ${ms(lane.step_ms)}` : null,
  ].filter(Boolean).join(" · ");
  const used = lane.pages ? 1 - lane.pages_free / lane.pages : 0;
  return h("article", { class: "lane", "data-name": name },
    h("header", {}, h("h3", {}, `${name} `, h("span", { class: "quiet" }, kind)),
      h("span", { class: "speed" }, `${rate(speed ?? 0)} tok/s`)),
    bad ? h("p", { class: "bad" }, `${lane.state}${lane.why ? `: ${lane.why}` : ""}`) : null,
    h("p", { class: "quiet" }, facts),
    lane.pages ? bar(`KV in memory ${Math.round(100 * used)} %`, [used, used > 0.9 ? "warn" : ""]) : null,
    h("div", { class: "chips" }, shown, more));
}
