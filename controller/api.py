"""The HTTP API: JSON over a unix socket or TCP. Reading only; times RFC 3339 UTC, ratios 0..1."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from controller import views
from controller.diagnose import diagnose
from controller.metrics import exposition

if TYPE_CHECKING:
    from controller.service import Controller


class ListenError(ValueError):
    """The address to listen on cannot be used."""

    def __init__(self, listen: str, reason: object) -> None:
        self.listen = listen
        super().__init__(f"cannot listen on {listen} ({reason}): give unix:PATH or HOST:PORT in controller.listen")


class Json(Response):
    """JSON; numbers that JSON does not have (NaN, infinity) become null, as bytes become text."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        """The body."""
        return msgspec.json.encode(content)


def build(controller: Controller) -> Starlette:
    """The application; every route answers from memory or one SQLite query."""

    async def status(request: Request) -> Response:
        return Json(views.status(controller))

    async def incidents(request: Request) -> Response:
        state = request.query_params.get("state")
        if state not in (None, "", "all", "open", "closed"):
            raise HTTPException(400, f"state is {state!r}: give open, closed or all")
        wanted = None if state in (None, "", "all") else state
        return Json([i.public() for i in controller.store.incidents(wanted, _since(request))])

    async def findings(request: Request) -> Response:
        return Json([f.public() for f in controller.store.findings()])

    async def coverage(request: Request) -> Response:
        return Json(views.coverage(controller))

    async def rnics(request: Request) -> Response:
        names = {n.strip() for n in request.query_params.get("name", "").split(",") if n.strip()}
        return Json(views.rnics(controller, names))

    async def topology(request: Request) -> Response:
        return Json(views.topology(controller.topology))

    async def diagnosis(request: Request) -> Response:
        hosts = [h.strip() for h in request.query_params.get("hosts", "").split(",") if h.strip()]
        if not hosts:
            raise HTTPException(400, "no hosts: give ?hosts=H1,H2")
        unknown = [h for h in hosts if h not in controller.topology.hosts]
        if unknown:
            raise HTTPException(404, f"no host {', '.join(unknown)} in the topology")
        return Json(diagnose(controller, hosts, _since(request)))

    async def healthy(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def ready(request: Request) -> Response:
        up = controller.bus.connected.is_set()
        return PlainTextResponse("ready\n" if up else "no connection to the broker\n", 200 if up else 503)

    async def metrics(request: Request) -> Response:
        body, content_type = exposition(controller)
        return Response(body, media_type=content_type)

    async def failed(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return Json({"error": error.detail}, status_code=error.status_code)

    return Starlette(
        routes=[
            Route("/status", status),
            Route("/incidents", incidents),
            Route("/findings", findings),
            Route("/coverage", coverage),
            Route("/rnics", rnics),
            Route("/topology", topology),
            Route("/diagnose", diagnosis),
            Route("/metrics", metrics),
            Route("/-/healthy", healthy),
            Route("/-/ready", ready),
        ],
        exception_handlers={HTTPException: failed},
    )


def _since(request: Request) -> int:
    text = request.query_params.get("since", "")
    try:
        return views.parse_since(text)
    except ValueError as error:
        raise HTTPException(400, str(error)) from None


class _Server(uvicorn.Server):
    """Signals belong to the process, which cancels us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def bind(listen: str) -> socket.socket:
    """The listening socket for `unix:PATH` or `HOST:PORT`; raises ListenError. A stale socket file is replaced."""
    try:
        if listen.startswith("unix:"):
            path = Path(listen.removeprefix("unix:"))
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_socket():
                path.unlink()
            unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            unix.bind(str(path))
            path.chmod(0o660)
            unix.listen(128)
            return unix
        host, _, port = listen.rpartition(":")
        return socket.create_server(
            (host.strip("[]"), int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128
        )
    except (OSError, ValueError) as error:
        raise ListenError(listen, error) from None


async def serve(controller: Controller, listening: socket.socket) -> None:
    """Serve the API until cancelled."""
    config = uvicorn.Config(
        build(controller),
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=1,
    )
    server = _Server(config)
    try:
        await server.serve(sockets=[listening])
    finally:
        if server.started:
            await server.shutdown(sockets=[listening])  # cancelled: it has not closed its sockets itself
        listening.close()
