// Elements and numbers. Text from the daemon is set as text, never as markup.

export function h(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, act] of Object.entries(value)) made.addEventListener(event, act);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((one) => one != null));
  return made;
}

export function s(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export const byId = (id) => document.getElementById(id);

export function replace(id, ...children) { byId(id).replaceChildren(...children.flat()); }

// A table; columns are [title, row -> content, is it a number, class].
export function table(caption, columns, rows, none) {
  if (!rows.length) return h("p", { class: "quiet" }, none);
  const kind = ([, , isNumber, name]) => name ?? (isNumber ? "num" : null);
  return h("table", { "aria-label": caption },
    h("thead", {}, h("tr", {}, columns.map((one) => h("th", { scope: "col", class: kind(one) }, one[0])))),
    h("tbody", {}, rows.map((row) => h("tr", { class: row.isChosen ? "chosen" : null },
      columns.map((one) => h("td", { class: kind(one) }, one[1](row) ?? "–"))))));
}

// A bar of parts [share of 1, class].
export function bar(label, ...parts) {
  const made = h("div", { class: "bar", role: "img", "aria-label": label });
  for (const [share, name] of parts) {
    const part = h("i", { class: name });
    part.style.width = `${Math.min(100, Math.max(0, 100 * share))}%`;
    made.append(part);
  }
  return made;
}

export function gauge(title, value, share, name) {
  return h("div", { class: "gauge" }, h("p", {}, h("span", {}, title), h("span", { class: "quiet" }, value)),
    bar(`${title}: ${value}`, [share, name]));
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
export const count = (value) => (value == null ? null : whole.format(value));
export const rate = (value) => (value >= 100 ? whole.format(value) : value.toFixed(1));

export function ms(value) {
  if (value == null) return null;
  if (value >= 60_000) return age(value / 1000);
  if (value >= 10_000) return `${(value / 1000).toFixed(1)} s`;
  return value >= 100 ? `${whole.format(value)} ms` : `${value.toFixed(1)} ms`;
}

export function age(seconds) {
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60]])
    if (seconds >= length) return `${Math.floor(seconds / length)} ${unit}`;
  return `${Math.max(0, Math.floor(seconds))} s`;
}

export function bytes(value) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024) return `${unit === "B" ? whole.format(value) : value.toFixed(1)} ${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(1)} TiB`;
}

export function short(id) { return id.length > 14 ? `${id.slice(0, 13)}…` : id; }
