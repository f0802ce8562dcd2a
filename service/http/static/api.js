// The daemon's routes. The key is in this module's memory only.

let key = "";
export function useKey(given) { key = given.trim(); }

function headers() { return key ? { Authorization: `Bearer ${key}` } : {}; }

export class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

async function refusal(reply) {
  let message = `${reply.status} ${reply.statusText}`;
  try { message = (await reply.json()).error.message; } catch { /* no JSON */ }
  return new Refused(reply.status, message);
}

export async function get(path) {
  const reply = await fetch(path, { headers: headers() });
  if (!reply.ok) throw await refusal(reply);
  return reply.json();
}

export async function post(path, body = {}) {
  const reply = await fetch(path, {
    method: "POST", headers: { ...headers(), "Content-Type": "application/json" }, body: JSON.stringify(body),
  });
  if (!reply.ok) throw await refusal(reply);
  return reply.json();
}

// Calls `take` with each event of a stream; returns when it ends.
export async function events(path, take) {
  const reply = await fetch(path, { headers: headers() });
  if (!reply.ok) throw await refusal(reply);
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (held + value).split("\n\n");
    held = blocks.pop();
    for (const block of blocks)
      for (const line of block.split("\n")) if (line.startsWith("data: ")) take(JSON.parse(line.slice(6)));
  }
}
