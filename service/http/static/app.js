// Follows the daemon: one stream of snapshots, drawn as they come.

import { byId, count } from "./dom.js";
import * as api from "./api.js";
import * as chart from "./chart.js";
import * as lanes from "./lanes.js";
import * as session from "./session.js";
import * as tables from "./tables.js";

const RETRY_MS_MAX = 10_000;
const SESSION_EVERY = 2; // snapshots, for an open session
let selected = "";
let before = null;
let seen = 0;

function show(text, kind) {
  const badge = byId("state");
  if (badge.textContent !== text) badge.textContent = text;
  badge.className = `badge ${kind}`;
}

const rates = new Map();
function measure(snapshot) {
  rates.clear();
  for (const lane of snapshot.lanes) {
    const old = before?.lanes.find((one) => one.name === lane.name);
    const made = old ? Math.max(0, (lane.tokens_generated ?? 0) - (old.tokens_generated ?? 0)) : 0;
    rates.set(lane.name, old ? made / Math.max(0.2, snapshot.at - before.at) : 0);
  }
}

function take(snapshot) {
  const { state } = snapshot;
  if (!snapshot.lanes) {
    show(`loading ${Math.round(100 * snapshot.progress)} %`, "warn");
    return;
  }
  show(state, state === "ready" ? "good" : "warn");
  byId("model").textContent = `${snapshot.model} · context ${count(snapshot.context_tokens)} · ${snapshot.version}` +
    (snapshot.key ? ` · key ${snapshot.key}` : "");
  const troubles = snapshot.stats.troubles ?? [];
  byId("trouble").hidden = !troubles.length;
  byId("trouble").textContent = troubles.join("\n");
  measure(snapshot);
  if (before) chart.add(snapshot.at, rates);
  before = snapshot;
  tables.tiles(snapshot, rates);
  session.name(snapshot.lanes.map((lane) => lane.name));
  lanes.draw(snapshot, rates, select, selected);
  tables.requests(snapshot);
  tables.targets(snapshot);
  tables.tiers(snapshot);
  tables.peers(snapshot);
  seen += 1;
  if (seen % SESSION_EVERY === 0) session.refresh();
}

function select(id) {
  if (selected === id) { session.close(); return; }
  selected = id;
  mark();
  session.open(id, () => {
    const chip = document.querySelector(`.chip[data-session="${CSS.escape(selected)}"]`);
    selected = "";
    mark();
    chip?.focus();
  });
}

function mark() {
  for (const chip of document.querySelectorAll(".chip"))
    chip.setAttribute("aria-pressed", String(chip.dataset.session === selected));
}

addEventListener("keydown", (event) => {
  if (event.key === "Escape" && selected && !byId("key-dialog").open) session.close();
});

function askForKey(isWrong) {
  const dialog = byId("key-dialog");
  byId("key-wrong").hidden = !isWrong;
  byId("key").value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(byId("key").value), { once: true });
  });
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  byId("key-dialog").close();
});

async function follow() {
  let waitMs = 500, hasAsked = false;
  for (;;) {
    try {
      await api.events("/api/live", (snapshot) => { waitMs = 500; hasAsked = false; take(snapshot); });
      show("the daemon stopped", "bad");
    } catch (error) {
      if (error instanceof api.Refused && error.status === 401) {
        show("needs a key", "warn");
        api.useKey(await askForKey(hasAsked));
        hasAsked = true;
        continue;
      }
      if (error instanceof TypeError || error instanceof api.Refused) show(error.status ? error.message : "no answer", "bad");
      else { show("the page failed", "bad"); console.error(error); }
    }
    before = null;
    await new Promise((resolve) => setTimeout(resolve, waitMs));
    waitMs = Math.min(RETRY_MS_MAX, 2 * waitMs);
  }
}

follow();
