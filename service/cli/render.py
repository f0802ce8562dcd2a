"""Decisions, differences and moves as a person reads them: plain data in, lines out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Facts = Mapping[str, Any]
BYTES_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
TEXT_CHARS = 100
AGE_UNITS = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))


def move_line(move: Facts) -> str:
    """One move, from the report of promote and demote or from a decision's log."""
    source, target = move.get("source", move.get("from")), move.get("target", move.get("to"))
    result = str(move["result"])
    why = f" ({move['reason']})" if move.get("reason") else ""
    if result == "already there":
        return f"is on {target} already{why}"
    if result != "moved":
        return f"stays on {source}: {result.removeprefix('aborted: ')}"
    line = (
        f"{source} -> {target}: {move['tokens']:,} tokens, {move['pages_shared']:,} pages by"
        f" reference, {move['rows_copied']:,} rows copied"
    )
    if move["rows_recomputed"]:
        line += f", {move['rows_recomputed']:,} computed again"
    gap = f", {ms(move['gap_ms'])} between two tokens" if move["gap_ms"] else ""
    return f"{line}{gap}, {ms(move['total_ms'])} in all{why}"


def why_lines(found: Facts) -> list[str]:
    """The token at which the last prompt left the history of its session, and the cost."""
    last, edit = found.get("last"), found.get("edit")
    if last is None:
        return ["the session has had no turn"]
    lines = _broke(last) if last["is_edit"] else [_continued(last)]
    if edit is not None and edit != last:
        lines += ["before that:", *(f"  {line}" for line in _broke(edit))]
    return lines


def _continued(last: Facts) -> str:
    reused, prompt = last["tokens_reused"], last["prompt_tokens"]
    if not last["timeline_tokens"]:
        return f"the session has had one prompt, of {prompt:,} tokens: {reused:,} of them had KV"
    line = f"the last prompt continued its history: {reused:,} of {prompt:,} tokens had KV"
    return f"{line} ({last['reason']})" if last["reason"] else line


def _broke(edit: Facts) -> list[str]:
    inside = f", inside {edit['inside']}" if edit.get("inside") else ""
    before = edit.get("text_before", "")
    lines = [
        f"cache broke at token {edit['first_difference']:,}{inside}, text:"
        f" {_quoted(before + edit['new_text'])}",
        f"  it was      {_quoted(before + edit['old_text'])}",
        f"  history     {edit['timeline_tokens']:,} tokens, of which the prompt of"
        f" {edit['prompt_tokens']:,} shares the first {edit['common_prefix_tokens']:,}",
        f"  reused      {edit['tokens_reused']:,} tokens ({edit['pages_kept']:,} whole pages)",
        f"  computed    {edit['tokens_computed']:,} tokens",
    ]
    if edit["reason"]:
        lines.append(f"  reason      {edit['reason']}")
    return lines


def _quoted(text: str) -> str:
    cut = text if len(text) <= TEXT_CHARS else text[:TEXT_CHARS] + "…"
    return repr(cut)


def explain_lines(found: Facts) -> list[str]:
    """A request's decision, or a session's: the latest in full, earlier ones as a line each."""
    if found["kind"] == "request":
        return _decision(found)
    lines = [f"session   {found['session_id']}" + _of_key(found)]
    if found.get("state"):
        lines.append(
            f"now       {found['state']}"
            + (f" on lane {found['lane']}" if found.get("lane") else "")
            + f", {found.get('tokens', 0):,} tokens"
            + (", it moves now" if found.get("moving") else "")
        )
        lines += [f"{title:<9} {text}" for title, text in held_lines(found).items()]
    decisions: Sequence[Facts] = found["decisions"]
    if not decisions:
        return [*lines, "decisions none is remembered: this daemon has not computed for it"]
    lines += ["", *_decision(decisions[-1])]
    if len(decisions) > 1:
        lines += ["", "earlier"]
        for one in reversed(decisions[:-1]):
            happened = one.get("happened")
            ttft = f"  {_times({'ttft_ms': happened['ttft_ms']})}" if happened else ""
            lines.append(f"  {one['request_id']}  {one['lane']}  {one['reason']}{ttft}")
    return lines


def _of_key(found: Facts) -> str:
    return f"  (key {found['tenant']})" if found.get("tenant") else ""


def _decision(one: Facts) -> list[str]:
    asked = one["request"]
    lines = [
        f"request   {one['request_id']}  class {one['class']}, decided {one['age_s']:,.1f} s ago",
        f"session   {one['session_id']}" + _of_key(one),
        f"decision  {_where(one)}: {one['reason']}",
        f"asked     {asked['prompt_tokens']:,} prompt tokens, about {asked['tokens_out']:,} to"
        f" come{_promises(asked)}" + (", promotion wanted" if asked.get("promote") else ""),
        f"KV        {_kv(one.get('session'), asked.get('stored_tokens', 0))}",
    ]
    lines += _candidates(one["candidates"], one["lane"])
    lines += _outlooks(one.get("outlooks", ()))
    lines.append(f"predicted {_times(one['predicted'])}")
    happened = one["happened"]
    if happened is None:
        lines.append("happened  it is not over yet")
    else:
        cached = happened["cached_tokens"]
        shared = cached - (one["session"] or {"reused_tokens": 0})["reused_tokens"]
        stored = f" ({shared:,} of them in pages of the store)" if shared > 0 else ""
        lines.append(
            f"happened  {_times(happened)}; {happened['tokens']:,} tokens on {happened['lane']},"
            f" {cached:,} of the prompt had KV{stored}, ended with {happened['finish']}"
        )
    if one["restore"] is not None:
        lines.append(f"restore   {_restore(one['restore'])}")
    lines += [f"moved     {move_line(m)} ({m['cause']})" for m in one["moves"]]
    lines += [f"note      {note}" for note in one["notes"]]
    return lines


def _promises(asked: Facts) -> str:
    names = (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("ttlt_ms", "all"))
    found = [f"{label} within {ms(asked[n])}" for n, label in names if asked.get(n) is not None]
    return "; " + ", ".join(found) if found else ""


def _kv(session: Facts | None, stored: int) -> str:
    if session is None:
        return "the session had none" + (f", the store {stored:,} tokens" if stored else "")
    rows = f", {session['open_rows']:,} rows in its open page" if session["open_rows"] else ""
    reused = f"{session['reused_tokens']:,} tokens of the prompt"
    return f"the session had {reused} on {session['lane']}{rows}"


def _candidates(rows: Sequence[Facts], chosen: str) -> list[str]:
    lines: list[str] = []
    for row in rows:
        mark = "*" if row["lane"] == chosen else " "
        if row.get("excluded"):
            outlook = f"not considered: {row['excluded']}"
        else:
            outlook = f"{_times(row)}, SLA ratio {row['sla_ratio']:.2f}"
        seats = f"{row.get('seated', 0)} of {row.get('seats', 0)} seats"
        load = f"({seats}, {row.get('waiting', 0)} waiting)"
        lines.append(f"        {mark} {row['lane']:<10} {outlook} {load}")
    return lines


def _where(one: Facts) -> str:
    """The lane, with the strategy and its peers if it has any."""
    lane, strategy = f"lane {one['lane'] or 'none'}", one["strategy"]
    if not strategy.get("peers"):
        return lane
    return f"{lane}, {_layout(strategy)}"


def _layout(found: Facts) -> str:
    """A strategy over peers, and their names."""
    peers = found["peers"]
    if found["decode"] == "remote":
        return f"lane of peer {peers[0]}" if peers else "lane of a peer"
    parts = [f"{found[name]} {name}" for name in ("prefill", "decode") if found[name] != "local"]
    return " and ".join(parts) + (f" with {', '.join(peers)}" if peers else "")


def _outlooks(rows: Sequence[Facts]) -> list[str]:
    """Strategies over peers with their numbers, and why they were not chosen."""
    lines: list[str] = []
    for row in rows:
        mark = " " if row["rejected"] else "*"
        numbers = f": {_times(row)}, SLA ratio {row['sla_ratio']:.2f}" if row["ttft_ms"] else ""
        why = f" (not chosen: {row['rejected']})" if row["rejected"] else ""
        lines.append(f"        {mark} {_layout(row)}{numbers}{why}")
    return lines


def _times(found: Facts | None) -> str:
    """TTFT and TPOT, with their ratio to the prediction where that is known."""
    if found is None:
        return "nothing"
    parts: list[str] = []
    for name, label in (("ttft", "TTFT"), ("tpot", "TPOT")):
        value, ratio = found.get(f"{name}_ms"), found.get(f"{name}_ratio")
        if value is not None:
            parts.append(f"{label} {ms(value)}" + (f" ({ratio:.2f} x)" if ratio else ""))
    return ", ".join(parts) or "no token came"


def _restore(plan: Facts) -> str:
    line = f"{plan['choice']}: {plan['tokens']:,} tokens"
    if plan.get("load_ms") is not None:
        line += f"; reading them was predicted to take {ms(plan['load_ms'])}"
    if plan.get("recompute_ms") is not None:
        line += f", computing them {ms(plan['recompute_ms'])}"
    if plan.get("actual_ms") is not None:
        line += f"; it took {ms(plan['actual_ms'])}"
    return line


def held_lines(found: Facts) -> dict[str, str]:
    """Where the pages of a session are and what it waits for, if peers have any: title -> text."""
    lines: dict[str, str] = {}
    if route := found.get("route"):
        lines["pages with"] = ", ".join(f"{_peer(one['peer'])} {one['pages']:,}" for one in route)
    if waits := found.get("waits_for"):
        lines["waits for"] = "; ".join(f"{peer}: {why}" for peer, why in waits.items())
    if slow := found.get("slow"):
        lines["leaves"] = "; ".join(f"{peer}: {why}" for peer, why in slow.items())
    if lost := found.get("pages_lost"):
        lines["computes"] = f"{lost:,} pages again, which were lost with a peer"
    if move := found.get("page_move"):
        last = move["first"] + move["pages"] - 1
        lines["moving"] = (
            f"pages {move['first']:,} to {last:,}, {_peer(move['source'])} ->"
            f" {_peer(move['target'])}"
        )
    return lines


def _peer(name: str) -> str:
    return name or "here"


def parked(row: Facts, now_s: float) -> str | None:
    """Since when a parked session waits, and for what; None = it is not parked."""
    if row.get("state") != "parked":
        return None
    since, call = row.get("parked_since"), row.get("tool_call_id")
    parts = [age(now_s - since)] if since else []
    parts += [f"for {call}"] if call else []
    return ", ".join(parts) or "-"


def age(seconds: float) -> str:
    """A duration in the largest unit that fits."""
    for unit, length_s in AGE_UNITS:
        if seconds >= length_s:
            return f"{seconds // length_s:,.0f} {unit}"
    return "now"


def ago(seconds: float) -> str:
    """How long something has been over."""
    text = age(max(0.0, seconds))
    return text if text == "now" else f"{text} ago"


def plain(text: str) -> str:
    """Text of a model or a client without characters that would control the terminal."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def message_lines(messages: Sequence[Facts]) -> list[str]:
    """The history of a session: a line for each message that has text, and one for each call."""
    lines: list[str] = []
    for message in messages:
        name = f" {plain(message['name'])}" if message.get("name") else ""
        calls: Sequence[Facts] = message.get("tool_calls", ())
        if message["content"] or not calls:
            lines.append(f"{message['role']}{name}: {plain(message['content'])}")
        for call in calls:
            function: Facts = call["function"]
            written = f"{function['name']}({function['arguments']})"
            lines.append(f"{message['role']} calls {plain(written)}")
    return lines


def ms(value: float | None) -> str:
    """A time in ms as text, in seconds from ten on; None = no limit."""
    if value is None:
        return "no limit"
    if value >= 10_000:
        return f"{value / 1000:,.1f} s"
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms"


def size(count: float) -> str:
    """Bytes with a unit."""
    for unit in BYTES_UNITS[:-1]:
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} {BYTES_UNITS[-1]}"
