"""The checks of Host, Origin and the type of a body, as tables of headers."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from batchengine import errors
from batchengine.core import BatchEngineError
from service.http.access import OriginPolicy, check_content
from tests.support.fake_engine import fake_config

POLICY = OriginPolicy(
    fake_config(allowed_hosts=("be.example",), allowed_origins=("https://App.example/",))
)
OWN = ("Host", "127.0.0.1:7717")
APP, EVIL = ("Origin", "https://app.example"), ("Origin", "https://evil.example")
HEADERS: tuple[tuple[str, tuple[tuple[str, str], ...], errors.Problem | None], ...] = (
    ("loopback", (OWN,), None),
    ("a name in other letters, with a dot", (("Host", "LocalHost.:7717"),), None),
    ("IPv6", (("Host", "[::1]:7717"),), None),
    ("a host of the configuration", (("Host", "be.example"),), None),
    ("another host", (("Host", "evil.example:7717"),), errors.WRONG_HOST),
    ("an allowed host with more than a port", (("Host", "127.0.0.1:123456"),), errors.WRONG_HOST),
    ("an allowed host behind a name", (("Host", "x@127.0.0.1"),), errors.WRONG_HOST),
    ("no host", (), errors.MALFORMED_HTTP),
    ("an empty host", (("Host", ""),), errors.MALFORMED_HTTP),
    ("two hosts", (OWN, OWN), errors.MALFORMED_HTTP),
    ("the daemon's own page", (OWN, ("Origin", "http://127.0.0.1:7717")), None),
    ("its page behind a TLS proxy", (OWN, ("Origin", "https://127.0.0.1:7717")), None),
    ("a page on another port", (OWN, ("Origin", "http://127.0.0.1:80")), errors.WRONG_ORIGIN),
    ("an origin of the configuration", (OWN, APP), None),
    ("another origin", (OWN, EVIL), errors.WRONG_ORIGIN),
    ("a file or a sandboxed frame", (OWN, ("Origin", "null")), errors.WRONG_ORIGIN),
    ("an allowed origin and another one", (OWN, APP, EVIL), errors.WRONG_ORIGIN),
    ("an image of another site", (OWN, ("Sec-Fetch-Site", "cross-site")), errors.WRONG_ORIGIN),
    ("an image of a neighbour", (OWN, ("Sec-Fetch-Site", "Same-Site")), errors.WRONG_ORIGIN),
    ("an address that was typed", (OWN, ("Sec-Fetch-Site", "none")), None),
    ("an allowed page, as its browser says", (OWN, APP, ("Sec-Fetch-Site", "cross-site")), None),
)


@pytest.mark.parametrize(
    ("headers", "row"), [case[1:] for case in HEADERS], ids=[case[0] for case in HEADERS]
)
def test_hosts_and_origins(
    headers: tuple[tuple[str, str], ...], row: errors.Problem | None
) -> None:
    sent = CIMultiDictProxy(CIMultiDict(headers))
    if row is None:
        POLICY.check(sent)
        return
    with pytest.raises(BatchEngineError) as caught:
        POLICY.check(sent)
    assert caught.value.code == row.code


def test_only_pages_of_allowed_origins_may_read_answers() -> None:
    for header, names in ((APP, "https://app.example"), (EVIL, None)):
        found = POLICY.consent(CIMultiDictProxy(CIMultiDict([header])))
        assert found.get("Access-Control-Allow-Origin") == names
    assert POLICY.consent(CIMultiDictProxy(CIMultiDict())) == {}


JSON = "application/json"


@pytest.mark.parametrize(
    ("encoding", "content_type", "charset", "row"),
    [
        ("", JSON, None, None),
        ("identity", JSON, "UTF-8", None),
        ("", JSON, "utf8", None),
        ("gzip", JSON, None, errors.CONTENT_ENCODED),
        ("", JSON, "latin-1", errors.WRONG_CONTENT_TYPE),
        ("", "text/plain", None, errors.WRONG_CONTENT_TYPE),
        ("", "text/plain", "utf-8", errors.WRONG_CONTENT_TYPE),
        ("", "", None, errors.WRONG_CONTENT_TYPE),
    ],
)
def test_bodies_are_plain_json_in_utf8(
    encoding: str, content_type: str, charset: str | None, row: errors.Problem | None
) -> None:
    headers = {"Content-Encoding": encoding} if encoding else {}
    if content_type:
        headers["Content-Type"] = content_type
    if row is None:
        check_content(headers, content_type, charset)
        return
    with pytest.raises(BatchEngineError) as caught:
        check_content(headers, content_type, charset)
    assert caught.value.code == row.code
