"""The embedded broker, both kinds: an open one that keeps wills, retained messages and quality of service 1."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiomqtt
import pytest

from pingmesh import broker


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


@asynccontextmanager
async def running(argv: list[str], port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(*argv)
    try:
        for _ in range(200):
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                break
            except OSError:
                await asyncio.sleep(0.05)
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(10):
            await process.wait()


def command(kind: str, port: int, directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    if kind == "mosquitto" and broker.find_mosquitto() is None:
        pytest.skip("mosquitto is not installed")
    if kind == "amqtt":
        monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    argv = broker.broker_command("127.0.0.1", port, directory)
    assert (Path(argv[0]).name == "mosquitto") == (kind == "mosquitto")
    return argv


@pytest.mark.parametrize("kind", ["mosquitto", "amqtt"])
async def test_what_pingmesh_needs_of_a_broker(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    argv = command(kind, port, tmp_path / "new", monkeypatch)
    async with running(argv, port) as process:
        async with aiomqtt.Client("127.0.0.1", port) as client:
            await client.publish("a/list", b"kept", qos=1, retain=True)
        async with aiomqtt.Client("127.0.0.1", port) as client:
            await client.subscribe("a/#", qos=1)
            async with asyncio.timeout(5):
                message = await anext(client.messages)
            assert (str(message.topic), message.payload) == ("a/list", b"kept")
            will = aiomqtt.Will("a/state", b"died", qos=1)
            dying = aiomqtt.Client("127.0.0.1", port, will=will)
            await dying.__aenter__()
            sock = dying._client.socket()
            assert isinstance(sock, socket.socket)
            sock.shutdown(socket.SHUT_RDWR)
            async with asyncio.timeout(10):
                message = await anext(client.messages)
            assert (str(message.topic), message.payload) == ("a/state", b"died")
            with suppress(aiomqtt.MqttError):
                await dying.__aexit__(None, None, None)
        assert process.returncode is None
    assert process.returncode == 0
