"""Rows for operators about pages that lie with peers, pages that are kept for them, pipelines.

Reads page tables, holds and links, and changes nothing.
"""

from __future__ import annotations

from typing import Any

from batchengine.engine.linked.lane_links import LaneLinks
from batchengine.engine.linked.pages import LinkedPages
from batchengine.engine.linked.pipelines import Pipelines
from batchengine.peers.peers import Peers
from batchengine.session import Session
from batchengine.session_kv import SELF

NO_ANSWER = "it does not answer in time"


class LinkedRows:
    """Facts about the pages of sessions and of peers. A peer "" is this daemon."""

    def __init__(
        self, pages: LinkedPages, links: LaneLinks, peers: Peers, pipelines: Pipelines
    ) -> None:
        self._pages = pages
        self._pipelines = pipelines
        self._links = links
        self._peers = peers

    def of_session(self, session: Session) -> dict[str, Any]:
        """Where the pages of a session are, in order, and what it waits for; {} for one whose
        pages are all here.

        `route`: (peer, pages) in the order of the tokens. `pages_lost`: that are computed again.
        `slow`: holders from which pages are moved away, and why.
        """
        kv, move = session.kv, self._pages.keeper.moves.get(session)
        if not (kv.held or kv.later or move):
            return {}
        route: list[dict[str, Any]] = []
        places = [(segment.peer, segment.n_pages) for segment in kv.held]
        for peer, n_pages in [*places, (SELF, len(kv.codes) - kv.n_held)]:
            if route and route[-1]["peer"] == peer:
                route[-1]["pages"] += n_pages
            elif n_pages:
                route.append({"peer": peer, "pages": n_pages})
        found: dict[str, Any] = {"route": route}
        if kv.cut_off:
            holders = {segment.peer: None for segment in kv.held if segment.peer != SELF}
            silent = [peer for peer in holders if self._links.number(peer) is None]
            found["waits_for"] = {peer: self._why(peer) for peer in silent or holders}
        slow = {segment.peer: self._pages.keeper.why_slow(segment.peer) for segment in kv.held}
        if slow := {peer: why for peer, why in slow.items() if why}:
            found["slow"] = slow
        if kv.later:
            found["pages_lost"] = kv.later[0].first - len(kv.codes) - len(kv.pending)
        if move:
            moved = {"source": move.source, "target": move.target}
            found["page_move"] = {**moved, "first": move.first, "pages": move.n_pages}
        return found

    def _why(self, peer: str) -> str:
        link = self._peers.links.get(peer)
        why = "" if link is None else link.why
        return why or self._links.row(peer).get("data_why", "") or NO_ANSWER

    def of_peer(self, name: str) -> dict[str, Any]:
        """The data link to a peer, and the pages that each of the two keeps for the other."""
        return {
            **self._links.row(name),
            "pages_taken": self._pages.taken.pages_with(name),
            "pages_given": self._pages.given.pages_of(name),
        }

    def numbers(self) -> dict[str, int]:
        """Counts of /health and of the status command."""
        return {
            "data_links_up": len(self._links.up),
            "pages_taken": self._pages.taken.n_pages,
            "pages_given": self._pages.given.n_pages,
            "page_moves": len(self._pages.keeper.moves),
            "pipelines": len(self._pipelines.rows()),
        }

    def pipelines(self) -> list[dict[str, Any]]:
        """One row per pipeline under way: of this daemon's prompts, and stages for peers."""
        return self._pipelines.rows()

    def given(self) -> list[dict[str, Any]]:
        """One row per peer for whose sessions pages are kept, with what it says of itself."""
        rows: list[dict[str, Any]] = []
        for peer in sorted({name.peer for name in self._pages.given}):
            link = self._peers.links.get(peer)
            rows.append(
                {
                    "peer": peer,
                    "pages": self._pages.given.pages_of(peer),
                    "state": "down" if link is None else link.state.value,
                    "kv_free_bytes": 0 if link is None else link.load.kv_free_bytes,
                    "requests_running": 0 if link is None else link.load.requests_running,
                }
            )
        return rows
