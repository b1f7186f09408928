"""The supervisor's socket: one JSON object a line each way, one request a connection or many."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from pingmesh.lab.faults.errors import FaultError
from pingmesh.lab.namespaces import LabError

log = logging.getLogger(__name__)

Request = dict[str, Any]
Handler = Callable[[Request], Awaitable[object]]
_LINE_LIMIT = 4 << 20


class LabNotRunningError(LabError):
    """Nobody answers on the lab's socket."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(f"no lab runs in {path.parent}: start one with `pingmesh lab up`")


def ask(path: Path, request: Mapping[str, object], patience: float = 60.0) -> Any:
    """Send one request and return the answer.

    Raises LabNotRunningError when nobody listens, LabError with what the lab answered when it refuses.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
        s.settimeout(patience)
        try:
            s.connect(str(path))
            s.sendall(json.dumps(request).encode() + b"\n")
            with s.makefile("rb") as stream:
                line = stream.readline()
        except TimeoutError:
            raise LabError(f"the lab did not answer within {patience:.0f} s: see its logs in {path.parent}") from None
        except OSError:
            raise LabNotRunningError(path) from None
    if not line:
        raise LabError("the lab ended while it was asked")
    answer = json.loads(line)
    if "error" in answer:
        raise LabError(answer["error"])
    return answer["ok"]


async def serve(path: Path, handler: Handler) -> asyncio.Server:
    """Listen; `handler` gets each request and returns what JSON can hold. A LabError becomes an error answer."""

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                writer.write(json.dumps(await _answer(line, handler)).encode() + b"\n")
                await writer.drain()
        except (ConnectionError, ValueError) as error:
            log.info("control connection ended: %s", error)
        finally:
            writer.close()

    return await asyncio.start_unix_server(converse, str(path), limit=_LINE_LIMIT)


async def _answer(line: bytes, handler: Handler) -> dict[str, object]:
    try:
        request = json.loads(line)
        if not isinstance(request, dict) or not isinstance(request.get("cmd"), str):
            return {"error": 'a request is a JSON object with a string "cmd"'}
        return {"ok": await handler(request)}
    except (LabError, FaultError) as error:
        return {"error": str(error)}
    except ValueError as error:
        return {"error": f"the request is not understood: {error}"}
    except Exception as error:
        log.exception("request failed")
        return {"error": f"internal error of the lab: {error!r}; see its supervisor.log"}
