"""Ask a controller: used by the command line, the demo and benchmarks."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx


class ControllerUnreachableError(ConnectionError):
    """No controller answers there, or it answers with an error."""

    def __init__(self, listen: str, reason: object) -> None:
        self.listen = listen
        super().__init__(
            f"the controller at {listen} cannot be reached ({reason}): is it running? "
            "Start it with `pingmesh controller`, `pingmesh up` or `pingmesh lab up`, or name another with --controller"
        )


class BadRequestError(ValueError):
    """The controller understood, and says what is wrong with the question."""


def get(listen: str, path: str, *, timeout: float = 10.0, **params: str | int | float | None) -> object:
    """The JSON at `path` of the controller at `unix:PATH`, `HOST:PORT` or `http(s)://HOST[:PORT]`.

    Parameters that are None are left out. Raises ControllerUnreachableError, or BadRequestError (with the controller's
    own sentence) for a question it cannot answer.
    """
    if listen.startswith("unix:"):
        path_of_socket = listen.removeprefix("unix:")
        _check_socket(listen, path_of_socket, timeout)
        transport, base = httpx.HTTPTransport(uds=path_of_socket), "http://controller"
    else:
        transport, base = None, listen if listen.startswith(("http://", "https://")) else f"http://{listen}"
    query = {k: v for k, v in params.items() if v is not None}
    try:
        with httpx.Client(transport=transport, base_url=base, timeout=timeout, trust_env=False) as client:
            answer = client.get(path, params=query)
            if answer.status_code in (400, 404):
                raise BadRequestError(_sentence(answer))
            answer.raise_for_status()
            result: object = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise ControllerUnreachableError(listen, error) from error
    except ValueError as error:
        if isinstance(error, BadRequestError):
            raise
        raise ControllerUnreachableError(listen, f"its answer is no JSON: {error}") from error
    return result


def _check_socket(listen: str, path: str, timeout: float) -> None:
    """Raise ControllerUnreachableError where nobody listens. httpx would, too, but it leaves the socket open then."""
    if not Path(path).is_socket():
        raise ControllerUnreachableError(listen, "no such socket")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
            s.settimeout(timeout)
            s.connect(path)
    except OSError as error:
        raise ControllerUnreachableError(listen, error) from error


def _sentence(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code} for {answer.url.path}"
