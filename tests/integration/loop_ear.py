"""Writes down what a broker carries: `python loop_ear.py HOST PORT TOPIC...`, one JSON line a message.

A line is [topic, whether it was retained, payload in hexadecimal]; the first line is "ready". It comes back to a
broker that was restarted, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys

import aiomqtt


async def listen(host: str, port: int, topics: list[str]) -> None:
    async with aiomqtt.Client(host, port) as client:
        for topic in topics:
            await client.subscribe(topic, qos=1)
        print(json.dumps("ready"), flush=True)
        async for message in client.messages:
            assert isinstance(message.payload, bytes)
            print(json.dumps([str(message.topic), bool(message.retain), message.payload.hex()]), flush=True)


async def main(host: str, port: str, *topics: str) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), task.cancel)
    while True:
        with contextlib.suppress(aiomqtt.MqttError):
            await listen(host, int(port), list(topics))
        await asyncio.sleep(0.2)


if __name__ == "__main__":
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(main(*sys.argv[1:]))
