"""One row per HTTP route: the application serves it, and the OpenAPI document describes it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web
from msgspec import Struct

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Expect = Callable[[web.Request], Awaitable[web.StreamResponse | None]]


@dataclass(frozen=True, slots=True)
class Route:
    """A route. `query` holds (name, meaning) of its parameters behind the question mark."""

    method: str
    path: str
    handler: Handler
    summary: str
    tag: str
    body: type[Struct] | None = None
    query: tuple[tuple[str, str], ...] = ()
    content: tuple[str, ...] = ("application/json",)  # types of its answer
    head: bool = True  # a GET also answers HEAD
    needs_key: bool = True  # where keys exist


def add(app: web.Application, route: Route, expect: Expect) -> None:
    """Serves `route`; `expect` answers the Expect header."""
    if route.method == "GET":
        app.router.add_get(route.path, route.handler, allow_head=route.head, expect_handler=expect)
    else:
        app.router.add_route(route.method, route.path, route.handler, expect_handler=expect)
