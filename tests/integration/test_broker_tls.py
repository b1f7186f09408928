"""The broker's TLS settings end to end: a certificate of one's own, a client's certificate, and what is refused."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from shutil import which

import pytest
from test_broker import command, free_port, running

from pingmesh import topics
from pingmesh.broker import find_mosquitto
from pingmesh.bus import Bus
from pingmesh.config import BrokerSettings

pytestmark = [
    pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed"),
    pytest.mark.skipif(which("openssl") is None, reason="openssl, which makes the certificates, is not installed"),
]
TOPIC = topics.Topic("lab", "h1", topics.STATE)


def openssl(*argv: str | Path) -> None:
    subprocess.run(["openssl", *argv], check=True, capture_output=True, timeout=60)


def authority(place: Path, name: str) -> tuple[Path, Path]:
    """(certificate, key) of a certificate authority."""
    cert, key = place / f"{name}.crt", place / f"{name}.key"
    new = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    openssl(
        "req", *new, "-subj", f"/CN={name}", "-addext", "keyUsage=critical,keyCertSign", "-keyout", key, "-out", cert
    )
    return cert, key


def certificate(place: Path, name: str, ca: tuple[Path, Path]) -> tuple[Path, Path]:
    """(certificate, key) for `name` at 127.0.0.1, signed by the authority."""
    cert, key, asked, more = (place / f"{name}.{end}" for end in ("crt", "key", "csr", "ext"))
    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl("req", *new, "-subj", f"/CN={name}", "-keyout", key, "-out", asked)
    more.write_text("subjectAltName=IP:127.0.0.1\nauthorityKeyIdentifier=keyid\n")
    signed = ["-CA", ca[0], "-CAkey", ca[1], "-CAcreateserial", "-days", "2", "-extfile", more]
    openssl("x509", "-req", "-in", asked, *signed, "-out", cert)
    return cert, key


class Site:
    """A broker that asks for certificates, and the files of those who may come."""

    def __init__(self, place: Path) -> None:
        self.port = free_port()
        self.ca = authority(place, "ca")
        self.stranger = authority(place, "stranger")
        self.server = certificate(place, "broker", self.ca)
        self.client = certificate(place, "h1", self.ca)
        self.intruder = certificate(place, "intruder", self.stranger)
        self.conf = place / "mosquitto.conf"
        lines = [
            f"listener {self.port} 127.0.0.1",
            f"cafile {self.ca[0]}",
            f"certfile {self.server[0]}",
            f"keyfile {self.server[1]}",
            "require_certificate true",
            "allow_anonymous true",
            *(["user root"] if os.geteuid() == 0 else []),  # the tests' directory is closed to the user mosquitto
        ]
        self.conf.write_text("\n".join(lines) + "\n")

    def settings(self, ca: tuple[Path, Path] | None, client: tuple[Path, Path] | None) -> BrokerSettings:
        return BrokerSettings(
            host="127.0.0.1",
            port=self.port,
            tls=ca is not None,
            ca_file=str(ca[0]) if ca else None,
            cert_file=str(client[0]) if client else None,
            key_file=str(client[1]) if client else None,
            reconnect_max_s=0.2,
        )


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    made = await asyncio.to_thread(Site, tmp_path)
    mosquitto = find_mosquitto()
    assert mosquitto is not None
    async with running([mosquitto, "-c", str(made.conf)], made.port):
        yield made


async def comes_through(settings: BrokerSettings, seconds: float) -> bool:
    """Whether a message that a bus publishes comes back to it."""
    heard = asyncio.Event()
    bus = Bus(settings, "h1", [str(TOPIC)], lambda topic, payload: heard.set() if payload == b"hello" else None)
    task = asyncio.create_task(bus.run())
    try:
        async with asyncio.timeout(seconds):
            await bus.connected.wait()
            await bus.publish(TOPIC, b"hello", qos=1)
            await heard.wait()
    except TimeoutError:
        return False
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    return True


async def test_messages_pass_with_the_right_certificates(site: Site) -> None:
    assert await comes_through(site.settings(site.ca, site.client), 20)


@pytest.mark.parametrize("is_tls", [True, False])
async def test_messages_that_come_together_are_all_handled_in_their_order(
    is_tls: bool, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all sizes, also of more than is read ahead."""
    sent = [bytes([i % 256]) * (i * i * 7 % 90_000 if i % 50 == 0 else i % 300) for i in range(600)]
    heard: list[bytes] = []
    done = asyncio.Event()

    def handler(topic: topics.Topic, payload: bytes) -> None:
        heard.append(payload)
        if len(heard) == len(sent):
            done.set()

    async with AsyncExitStack() as stack:
        settings = site.settings(site.ca, site.client)
        if not is_tls:
            port = free_port()
            await stack.enter_async_context(running(command("mosquitto", port, tmp_path / "open", monkeypatch), port))
            settings = BrokerSettings(host="127.0.0.1", port=port)
        buses = [Bus(settings, "h1", [str(TOPIC)], handler), Bus(settings, "h2", [], lambda topic, payload: None)]
        tasks = [asyncio.create_task(bus.run()) for bus in buses]
        try:
            async with asyncio.timeout(60):
                for bus in buses:
                    await bus.connected.wait()
                for payload in sent:
                    await buses[1].publish(TOPIC, payload, qos=1)
                await done.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    assert heard == sent
    assert not buses[0].rejected


# paho leaves the socket of a failed handshake to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("who", ["no client certificate", "another authority's client", "another broker", "no TLS"])
async def test_others_are_refused(site: Site, who: str) -> None:
    settings = {
        "no client certificate": site.settings(site.ca, None),
        "another authority's client": site.settings(site.ca, site.intruder),
        "another broker": site.settings(site.stranger, site.client),
        "no TLS": site.settings(None, None),
    }[who]
    assert not await comes_through(settings, 1.5)
    # Whoever was refused has done no harm: the right one still gets in.
    assert await comes_through(site.settings(site.ca, site.client), 20)
