"""The semantic oracle: prompts whose greedy answer every correct runtime must give.

Owns `oracle.json`: chats of the pocket language with the reference answer of llama.cpp, kept only
where that answer is right and no step on the way was close (the two best logits at least 1
apart). If KV is lost, mixed up or stale, recall breaks, and one of these answers changes.

    python -m pocket.oracle        builds the file again from the shipped model
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pocket import generate
from pocket.generate import Item, Turn, render
from pocket.tools import TOOLS

PATH = Path(__file__).parent / "oracle.json"
GAP_MIN = 1.0
# task -> how many prompts; recall by distance below
_WANTED = {"small_talk": 6, "copy": 4, "reverse": 3, "count": 4, "arithmetic": 2, "story_qa": 5}
_WANTED |= {"tool_call": 6, "tool_result": 4}
_RECALL = {64: 5, 256: 5, 512: 4, 1024: 5, 2048: 5, 4096: 4}


@dataclass(frozen=True)
class Case:
    """One oracle prompt: OpenAI-style messages and tools, and the exact answer."""

    name: str
    messages: tuple[dict[str, str], ...]
    tools: tuple[dict[str, Any], ...]
    prompt: str  # what the model's template makes of messages and tools
    prompt_tokens: int
    answer: str
    answer_tokens: tuple[int, ...]  # without the end of turn
    gap_min: float
    distance: int  # tokens between fact and question; 0 = no recall


def load(path: Path = PATH) -> list[Case]:
    """All cases, in the file's order (short prompts first within a task)."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    return [
        Case(
            **{**row, "messages": tuple(row["messages"]), "tools": tuple(row["tools"])}
            | {"answer_tokens": tuple(row["answer_tokens"]), "prompt": prompt_text(row)}
        )
        for row in rows
    ]


def prompt_text(row: dict[str, Any]) -> str:
    """The prompt as the shipped template renders it, without running the template."""
    turns = [(message["role"], message["content"]) for message in row["messages"]]
    if row["tools"]:
        listed = "".join(json.dumps(tool) + "\n" for tool in row["tools"])
        lead = turns.pop(0)[1] + "\n" if turns[0][0] == "system" else ""
        turns.insert(0, ("system", f"{lead}You can call these tools:\n{listed}"))
    return render([Turn(*turn) for turn in turns])


def _split_tools(turns: tuple[Turn, ...]) -> tuple[list[dict[str, str]], list[dict[str, object]]]:
    """Messages and tools of a generated chat, whose system turn lists the tools as text."""
    messages = [{"role": turn.role, "content": turn.text} for turn in turns]
    if messages[0]["role"] != "system" or "You can call" not in messages[0]["content"]:
        return messages, []
    lead, listed = messages[0]["content"].split("You can call these tools:\n")
    names = [json.loads(line)["function"]["name"] for line in listed.splitlines()]
    system = [{"role": "system", "content": lead.rstrip("\n")}] if lead else []
    return system + messages[1:], [TOOLS[name].schema() for name in names]


def main() -> None:
    """Build the file with the shipped model under llama.cpp."""
    from pocket.evaluate import SHIPPED
    from pocket.reference import Reference

    reference = Reference(SHIPPED)
    rng = random.Random("pocket oracle 1")
    rows: list[dict[str, object]] = []

    def keep(name: str, item: Item) -> bool:
        prompt = reference.encode(render(item.turns))
        greedy = reference.greedy(prompt)
        if greedy.text != item.answer or greedy.gap_min < GAP_MIN or not greedy.ended:
            return False
        messages, tools = _split_tools(item.turns)
        if any(row["messages"] == messages for row in rows):
            return False
        rows.append(
            {
                "name": name,
                "messages": messages,
                "tools": tools,
                "prompt_tokens": len(prompt),
                "answer": greedy.text,
                "answer_tokens": list(greedy.tokens),
                "gap_min": round(greedy.gap_min, 2),
                "distance": item.distance,
            }
        )
        return True

    for task, wanted in _WANTED.items():
        found = 0
        while found < wanted:
            found += keep(f"{task}-{found}", generate.task_item(rng, task))
    for distance, wanted in _RECALL.items():
        found = 0
        while found < wanted:
            kind = "code" if found % 2 == 0 else None
            item = generate.recall_item(rng, distance, reference.measure, kind)
            found += keep(f"recall-{distance}-{found}", item)
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    PATH.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(f"{len(rows)} cases, {PATH.stat().st_size} bytes")


if __name__ == "__main__":
    main()
