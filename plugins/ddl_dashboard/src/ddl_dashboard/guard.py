"""Protect the live page: a middleware that answers a request only if the request's host name and token are right."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
# Browsers may run only scripts that come from this server. The library of the charts needs inline styles.
HEADERS: Mapping[str, str] = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class Guard:
    """An ASGI middleware that refuses requests from browsers that must not read the page.

    If ``token`` is empty, the page is served on this host only. Then the middleware refuses a request whose host name
    is not localhost, 127.0.0.1 or [::1]. The reason is DNS rebinding: a web site could let its own host name resolve to
    127.0.0.1, and its scripts could read the page. If ``token`` is not empty, the middleware refuses every request
    without the token. A browser sends the token once in the address of the page, and later in a cookie that scripts
    cannot read.
    """

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app = app
        self._token = token.encode()
        self._cookie = f"ddl-dashboard-{port}"  # browsers send cookies to all ports of a host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = HTTPConnection(scope)
        answer = self._refusal(scope["method"], request)
        await (answer or self._app)(scope, receive, _with_headers(send))

    def _refusal(self, method: str, request: HTTPConnection) -> Response | None:
        """Return the response to a request that is refused or redirected, or None if the request is allowed."""
        if method not in ("GET", "HEAD"):
            return PlainTextResponse("This page can only be read.\n", 405, {"allow": "GET, HEAD"})
        if not self._token:
            name = request.headers.get("host", "")
            known = name.rpartition(":")[0] if name.rpartition(":")[2].isdecimal() else name
            if known.lower() not in _LOCAL_NAMES:
                return PlainTextResponse("This page is served under the name localhost only.\n", 421)
            return None
        if self._is_token(_cookies(request.headers.get("cookie", "")).get(self._cookie, "")):
            return None
        given = parse_qs(request.scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if self._is_token(given):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(self._cookie, given, httponly=True, samesite="lax")
            return answer
        return PlainTextResponse("Open the address that the launcher has printed: it contains a token.\n", 401)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._token)


def _cookies(text: str) -> dict[str, str]:
    try:
        return {name: morsel.value for name, morsel in SimpleCookie(text).items()}
    except CookieError:
        return {}


def _with_headers(send: Send) -> Callable[[Message], Awaitable[None]]:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            known = {name.lower() for name, _ in message.get("headers", [])}
            if b"cache-control" not in known:
                own.append((b"cache-control", b"no-store"))
            message = {**message, "headers": [*message.get("headers", []), *own]}
        await send(message)

    return sending
