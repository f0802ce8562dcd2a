"""Turns of this daemon at peers, and of peers here: the parts, and who gets which message."""

from __future__ import annotations

from typing import Any

from batchengine.engine.linked.holds import Misfit
from batchengine.engine.remote.away import AwayTurns
from batchengine.engine.remote.exchange import misplaced
from batchengine.engine.remote.served import ServedTurns
from batchengine.peers.link import PeerLink
from batchengine.peers.peers import Peers
from batchengine.peers.transitions import LinkState
from batchengine.session import Session
from batchengine.wire.peer import (
    ONE_WAY,
    REQUEST,
    TEXT_CHARS_MAX,
    PeerFrame,
    RunTurn,
    TurnAccepted,
    TurnEnded,
    TurnGo,
    TurnTokens,
)


class RemoteTurns:
    """Turns that this daemon and its peers compute for each other."""

    def __init__(self, away: AwayTurns, served: ServedTurns, peers: Peers) -> None:
        self.away, self.served = away, served
        peers.subscribe(self._on_message, self._on_state)

    def __repr__(self) -> str:
        return f"<RemoteTurns {self.away!r} {self.served!r}>"

    def facts(self, session: Session) -> dict[str, Any]:
        """For operators: who else computes the session's turn, or for whom it is; or {}."""
        return {**self.away.facts(session), **self.served.facts(session)}

    def _on_message(self, link: PeerLink, frame: PeerFrame) -> None:
        """Take a message of a peer; one that does not fit ends the link."""
        message = frame.message
        try:
            match message:
                case RunTurn():
                    misplaced(frame, REQUEST)
                    why = self.served.ask(link, message)
                    link.reply(frame, TurnAccepted(why[:TEXT_CHARS_MAX]))
                case TurnTokens():
                    misplaced(frame, ONE_WAY)
                    taker = self.served if message.is_of_owner else self.away
                    taker.take(link, message, bytes(frame.payload))
                case TurnGo():
                    self.served.allow(link, message)
                case TurnEnded():
                    if message.is_of_owner:
                        self.served.end(link, message.run)
                    else:
                        self.away.end(link, message.run, message.why)
                case TurnAccepted():
                    raise Misfit("TurnAccepted, which was not asked for")
                case _:
                    return  # about pages, pipelines or data links: others take it
        except Misfit as error:
            link.abort(str(error))

    def _on_state(self, link: PeerLink, before: LinkState) -> None:
        if before.is_open and not link.state.is_open:
            self.served.lost(link)
            self.away.lost(link)
