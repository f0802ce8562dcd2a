"""Links between two daemons on real sockets: greeting, messages, loss, restart, configuration."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from batchengine import errors
from batchengine.core import BatchEngineError
from batchengine.peers import connection, features
from batchengine.peers.identity import PEERS
from batchengine.peers.peers import LocalFacts
from batchengine.peers.transitions import LinkState
from batchengine.wire import peer as wire
from batchengine.wire.frames import LinkSchema
from batchengine.wire.peer import (
    PEER_LINK,
    REPLY,
    REQUEST,
    Bulk,
    BulkReceived,
    Declined,
    Heartbeat,
    Hello,
    PeerLoad,
)
from tests.peers.scene import (
    FACTS,
    ScriptedListener,
    certify,
    dial,
    identity,
    node,
    pair,
    until,
)

UP, DOWN, REFUSED, GREETING = (
    LinkState.UP, LinkState.DOWN, LinkState.REFUSED, LinkState.GREETING,
)  # fmt: skip


@contextlib.contextmanager
def raises(row: errors.Problem, match: str | None = None) -> Iterator[None]:
    with pytest.raises(BatchEngineError, match=match) as caught:
        yield
    assert caught.value.code == row.code


@pytest.mark.parametrize("tls", [True, False])
async def test_two_daemons_see_each_other(tmp_path: Path, tls: bool) -> None:
    async with pair(tmp_path, tls=tls) as (a, b):
        await until(lambda: a.link("b").rtt_us is not None and b.link("a").rtt_us is not None)
        rtt_us = a.link("b").rtt_us
        assert rtt_us is not None
        assert 0 <= rtt_us < 20_000_000
        row = a.peers.status()["peers"][0]
        assert (row["name"], row["state"], row["why"]) == ("b", "up", "")
        assert row["differs"] == []
        assert row["model"] == "pocket"
        assert row["incarnation"] == f"{2:016x}"
        assert row["pages_held"] == 0
        assert a.states[-1] == ("b", GREETING, UP)


async def test_load_travels_with_heartbeats(tmp_path: Path) -> None:
    certify(tmp_path, "a", "b")
    load = PeerLoad(1, 2, 300, 200, 0, 5000, 9)
    async with node(tmp_path, "a", load=load) as a, node(tmp_path, "b") as b:
        await a.know(b)
        await b.know(a)
        link = await b.until("a", UP)
        await until(lambda: link.load == load)
        assert link.row()["kv_free_bytes"] == 200


async def test_requests_replies_and_deadlines(tmp_path: Path) -> None:
    async with pair(tmp_path) as (a, b):
        frame = await a.link("b").request(Bulk(), b"12345", timeout_s=5)
        assert frame.message == BulkReceived(5)
        await asyncio.gather(
            *(a.link("b").request(Bulk(), bytes(100), timeout_s=5) for _ in range(50)),
            *(b.link("a").request(Bulk(), bytes(100), timeout_s=5) for _ in range(50)),
        )
        # a message that only the engine would answer: nothing does here
        with raises(errors.PEER_SLOW, "within 0.3 s"):
            await a.link("b").request(BulkReceived(1), b"question", timeout_s=0.3)
        link, asked = b.messages[-1]
        assert (asked.attempt, bytes(asked.payload)) == (REQUEST, b"question")
        link.reply(asked, BulkReceived(9))  # too late: dropped
        answer = asyncio.ensure_future(a.link("b").request(BulkReceived(2), b"again", timeout_s=5))
        await until(lambda: b.messages[-1][1].payload == b"again")
        link.reply(b.messages[-1][1], BulkReceived(3), b"payload")
        got = await answer
        assert (got.message, bytes(got.payload), got.attempt) == (
            BulkReceived(3), b"payload", REPLY,
        )  # fmt: skip


async def test_a_lost_link_fails_what_waits_for_it_at_once(tmp_path: Path) -> None:
    async with pair(tmp_path) as (a, b):
        waiting = asyncio.ensure_future(a.link("b").request(BulkReceived(1), timeout_s=30))
        await until(lambda: bool(b.messages))
        began = time.monotonic()
        await b.stop()
        with raises(errors.PEER_DOWN, "closed the connection"):
            await waiting
        assert time.monotonic() - began < 15
        await a.until("b", DOWN)
        with raises(errors.PEER_DOWN):
            a.link("b").send(Bulk())
        with raises(errors.PEER_DOWN):
            await a.link("b").request(Bulk(), timeout_s=1)
        lost = [s for s in a.states if s[1].is_open and not s[2].is_open]
        assert len(lost) == 1, "a loss is reported once"


async def test_a_restart_at_once_on_the_same_address(tmp_path: Path) -> None:
    certify(tmp_path, "a", "b")
    async with contextlib.AsyncExitStack() as stack:
        a = await stack.enter_async_context(node(tmp_path, "a", incarnation=1))
        b = await stack.enter_async_context(node(tmp_path, "b", incarnation=10))
        await a.know(b)
        await b.know(a)
        port = b.peers.port
        for life in range(11, 16):
            link = await a.until("b", UP)
            asked = asyncio.ensure_future(link.request(BulkReceived(1), timeout_s=30))
            await until(lambda: bool(b.messages))  # noqa: B023
            old = b.messages[-1][1]
            await b.stop()
            b = await stack.enter_async_context(node(tmp_path, "b", incarnation=life, port=port))
            with raises(errors.PEER_DOWN):
                await asked
            await until(lambda: link.incarnation == life and link.state is UP, 15)  # noqa: B023
            other = await b.until("a", UP)
            other.reply(old, BulkReceived(2))  # of an earlier life of `a`'s request: harmless
            assert (await link.request(Bulk(), b"1", timeout_s=5)).message == BulkReceived(1)


async def test_a_half_open_link_is_replaced_by_its_peers_next_life(tmp_path: Path) -> None:
    """The peer restarts while its old connection still looks alive here."""
    certify(tmp_path, "a", "b")
    async with node(tmp_path, "b") as b:
        await b.add("a")
        first = await dial(identity(tmp_path, "a"), "b", b.peers.port)
        await first.greet("a")
        link = await b.until("a", UP)
        asked = asyncio.ensure_future(link.request(BulkReceived(1), timeout_s=30))
        second = await dial(identity(tmp_path, "a"), "b", b.peers.port)
        second.incarnation = 78
        await second.greet("a")
        await until(lambda: link.incarnation == 78 and link.state is UP)
        with raises(errors.PEER_DOWN):
            await asked
        while (frame := await first.receive()) is not None:
            assert not isinstance(frame.message, Declined)
        assert ("a", UP, GREETING) in b.states
        first.close()
        second.close()


OTHERS = {
    "model": LocalFacts("other", "ab" * 32, FACTS.arith_id, FACTS.repr_id),
    "arith_id": LocalFacts("pocket", FACTS.model_hash, "ba" * 32, FACTS.repr_id),
    "repr_id": LocalFacts("pocket", FACTS.model_hash, FACTS.arith_id, "ca" * 32),
}


@pytest.mark.parametrize("what", OTHERS)
async def test_a_daemon_that_computes_something_else_is_refused(tmp_path: Path, what: str) -> None:
    certify(tmp_path, "a", "b")
    other = OTHERS[what]
    async with node(tmp_path, "a") as a, node(tmp_path, "b", other) as b:
        await a.know(b)
        await b.know(a)
        for here, there in ((a, "b"), (b, "a")):
            link = await here.until(there, REFUSED)
            row = link.row()
            assert row["differs"] == [what]
            values = [
                getattr(f, "model_hash" if what == "model" else what)[:16] for f in (FACTS, other)
            ]
            assert all(value in link.why for value in values), link.why
            fix = "serve the same file" if what == "model" else "install the same version"
            assert f"; {fix}" in link.why
            with raises(errors.PEER_DOWN, "differs"):
                link.send(Bulk())
        await asyncio.sleep(0.5)
        assert a.link("b").state is REFUSED
        assert not any(state.is_open for _, *both in a.states for state in both)


KV = wire.KvFormat("{}", 4)


async def test_daemons_of_two_models_keep_pages_for_each_other(tmp_path: Path) -> None:
    """And nothing else."""
    certify(tmp_path, "a", "b")
    other = replace(OTHERS["model"], repr_id="ca" * 32, kv=KV)
    async with node(tmp_path, "a", replace(FACTS, kv=KV)) as a, node(tmp_path, "b", other) as b:
        await a.know(b)
        await b.know(a)
        for here, there in ((a, "b"), (b, "a")):
            link = await here.until(there, UP)
            assert link.is_of_other_model
            assert [link.offers(one) for one in features.FEATURES] == [
                one in features.OF_OTHER_MODELS for one in features.FEATURES
            ]
            row = link.row()
            assert (row["differs"], row["why"]) == (["model", "repr_id"], "")


OTHER_MODELS = {
    "arith_id": replace(OTHERS["model"], arith_id="ba" * 32, kv=KV),
    "model": replace(OTHERS["model"], kv=None),
    "repr_id": replace(OTHERS["repr_id"], kv=KV),  # the same model
}


@pytest.mark.parametrize("what", OTHER_MODELS)
async def test_pages_of_other_arithmetic_are_not_kept(tmp_path: Path, what: str) -> None:
    certify(tmp_path, "a", "b")
    ours, theirs = replace(FACTS, kv=KV), OTHER_MODELS[what]
    async with node(tmp_path, "a", ours) as a, node(tmp_path, "b", theirs) as b:
        await a.know(b)
        await b.know(a)
        assert f"{what} differs" in (await a.until("b", REFUSED)).why


@pytest.mark.parametrize("dials", [True, False])
async def test_another_version_is_refused_on_both_sides(tmp_path: Path, dials: bool) -> None:
    """The daemon under test has the current version; the scripted one another."""
    certify(tmp_path, "a", "b", "c")
    other = LinkSchema(wire.VERSION + 1, Hello, Heartbeat)
    hello = other.encode(Hello("x", "", "", "", "", (), PeerLoad()), incarnation=5)
    async with node(tmp_path, "b") as b:
        if dials:
            listener = ScriptedListener(identity(tmp_path, "c"))
            adding = asyncio.ensure_future(b.add("c", listener.port))
            scripted = await listener.accept()
            await adding
            listener.close()
            name = "c"
        else:
            await b.add("a")
            scripted = await dial(identity(tmp_path, "a"), "b", b.peers.port)
            name = "a"
        await scripted.send_bytes(hello)
        link = await b.until(name, REFUSED)
        assert f"version {wire.VERSION + 1}" in link.why
        assert f"has {wire.VERSION}" in link.why
        first = await scripted.receive()
        assert first is not None, "the other side learns this daemon's version"
        assert isinstance(first.message, Hello)
        assert await scripted.receive() is None
        scripted.close()


async def test_a_connection_in_the_wrong_direction_is_declined(tmp_path: Path) -> None:
    certify(tmp_path, "a", "b")
    async with node(tmp_path, "a") as a:
        await a.add("b")
        scripted = await dial(identity(tmp_path, "b"), "a", a.peers.port)
        frame = await scripted.receive()
        assert frame is not None
        assert isinstance(frame.message, Declined)
        assert "sorts behind" in frame.message.why
        assert await scripted.receive() is None
        scripted.close()


async def test_both_sides_may_dial_at_once_and_one_link_results(tmp_path: Path) -> None:
    async with pair(tmp_path) as (a, b):
        for _ in range(20):
            scripted = await dial(identity(tmp_path, "b"), "a", a.peers.port)
            await scripted.receive()
            scripted.close()
        assert a.link("b").state is UP
        assert b.link("a").state is UP
        assert (await a.link("b").request(Bulk(), timeout_s=5)).message == BulkReceived(0)


async def test_a_daemon_that_is_no_peer_is_declined_with_the_command_to_add_it(
    tmp_path: Path,
) -> None:
    certify(tmp_path, "a", "b")
    async with node(tmp_path, "a") as a, node(tmp_path, "b") as b:
        await a.know(b)
        link = await a.until("b", DOWN)
        await until(lambda: "peers add a" in link.why)
        await b.know(a)  # and now it comes up by itself
        await a.until("b", UP)


async def test_peers_come_and_go_with_their_files(tmp_path: Path) -> None:
    async with pair(tmp_path) as (a, b):
        file = a.folder / PEERS / "b.toml"
        (a.folder / PEERS / "broken.toml").write_text("address = 5\n")
        await until(lambda: len(a.peers.status()["peers"]) == 2)
        broken = a.peers.status()["peers"][1]
        assert broken["state"] == "broken"
        assert "broken.toml line 1" in broken["why"]
        assert a.link("b").state is UP
        link = a.link("b")
        asked = asyncio.ensure_future(link.request(BulkReceived(1), timeout_s=30))
        await asyncio.sleep(0.05)
        file.unlink()
        await until(lambda: not a.peers.links)
        with raises(errors.PEER_DOWN, "removed from the configuration"):
            await asked
        await b.until("a", DOWN)
        (a.folder / PEERS / "broken.toml").unlink()
        await a.know(b)
        await a.until("b", UP)
        assert len(a.peers.status()["peers"]) == 1
        file.write_text('address = "127.0.0.1:1"\n')  # another address: another link
        await until(lambda: "b" in a.peers.links and a.link("b").peer.address == "127.0.0.1:1")
        await until(lambda: "connection refused" in a.link("b").why)


async def test_certificates_may_come_after_the_start(tmp_path: Path) -> None:
    async with node(tmp_path, "a") as a:
        await until(lambda: "BE2501" in a.peers.status()["trouble"])
        certify(tmp_path, "a", "b")
        async with node(tmp_path, "b") as b:
            await a.know(b)
            await b.know(a)
            await a.until("b", UP)
            assert a.peers.status()["trouble"] == ""


async def test_a_frame_of_another_life_ends_the_connection(tmp_path: Path) -> None:
    certify(tmp_path, "a", "b")
    async with node(tmp_path, "b") as b:
        await b.add("a")
        scripted = await dial(identity(tmp_path, "a"), "b", b.peers.port)
        await scripted.greet("a")
        link = await b.until("a", UP)
        await scripted.send(Bulk(), incarnation=scripted.incarnation + 1)
        await b.until("a", DOWN)
        assert "incarnation" in link.why
        assert not b.messages
        scripted.close()


@pytest.mark.parametrize(
    "said",
    [
        Heartbeat(1, 0, 0, PeerLoad()),
        Bulk(),
        Hello("c", "pocket", FACTS.model_hash, FACTS.arith_id, FACTS.repr_id, (), PeerLoad()),
    ],
)
async def test_a_first_frame_that_is_not_the_peers_hello_ends_it(
    tmp_path: Path, said: wire.PeerMessage
) -> None:
    certify(tmp_path, "a", "b")
    async with node(tmp_path, "b") as b:
        await b.add("a")
        scripted = await dial(identity(tmp_path, "a"), "b", b.peers.port)
        await scripted.send(said)
        await until(lambda: "it began with" in b.link("a").why)
        assert b.link("a").state is DOWN
        assert not any(after is UP for _, _, after in b.states)
        scripted.close()


async def test_a_peer_that_never_reads_loses_its_link_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on sending heartbeats, so it is not silent."""
    monkeypatch.setattr(connection, "QUEUE_BYTES_MAX", 6 << 20)
    certify(tmp_path, "a", "b", "c")
    async with node(tmp_path, "b") as b, node(tmp_path, "c") as c:
        await b.know(c)
        await c.know(b)
        await b.add("a")
        await b.until("c", UP)
        scripted = await dial(identity(tmp_path, "a"), "b", b.peers.port)
        await scripted.greet("a")
        link = await b.until("a", UP)
        sent = 0
        while link.state is UP and sent < 100:
            await scripted.send(Heartbeat(sent + 1, 0, 0, PeerLoad()))
            link.send(Bulk(), bytes(1 << 20))
            sent += 1
            await b.link("c").request(Bulk(), timeout_s=10)
        assert link.state is DOWN
        assert "does not read" in link.why
        assert sent < 40
        assert b.link("c").state is UP
        scripted.close()


async def test_senders_that_wait_for_room_never_overflow(tmp_path: Path) -> None:
    async with pair(tmp_path) as (a, b):
        link = a.link("b")
        most = 0
        for _ in range(64):
            await link.room()
            link.send(Bulk(), bytes(1 << 20))
            most = max(most, link.queued_bytes)
        frame = await link.request(Bulk(), timeout_s=20)
        assert frame.message == BulkReceived(64 << 20)
        assert most <= connection.ROOM_BYTES + (2 << 20)
        await a.peers.measure()
        rate = link.row()["bandwidth_bytes_per_s"]
        assert rate is not None
        assert rate > 1 << 20
        assert b.link("a").state is UP


async def test_a_frame_that_cannot_be_queued_is_a_defect_of_the_caller(tmp_path: Path) -> None:
    async with pair(tmp_path) as (a, _):
        with pytest.raises(ValueError, match="never be queued"):
            a.link("b").send(Bulk(), bytes(connection.QUEUE_BYTES_MAX))
        assert a.link("b").state is UP


async def test_an_error_of_a_subscriber_ends_that_link_only(tmp_path: Path) -> None:
    async with pair(tmp_path) as (a, b):

        def fails(*_: object) -> None:
            raise ZeroDivisionError

        b.peers.subscribe(fails, fails)
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)
        a.link("b").send(BulkReceived(1))
        await until(lambda: ("a", UP, DOWN) in b.states)
        await a.until("b", UP)
        assert not b.task.done()


def test_the_link_encodes_what_this_package_sends() -> None:
    assert PEER_LINK.version == wire.VERSION
