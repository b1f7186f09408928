"""What is left out of imports, and that it is there for others."""

from __future__ import annotations

import json
import subprocess
import sys

MODULES = ("urllib.request", "http.client", "aiomqtt", "paho.mqtt.client")


def loaded(*lines: str, modules: tuple[str, ...] = MODULES) -> list[bool]:
    """Which of some modules are there after these lines, in a process of their own."""
    code = "\n".join(["import json, sys", *lines, f"print(json.dumps([m in sys.modules for m in {modules}]))"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_an_agent_has_no_http() -> None:
    assert loaded("import agent.main") == [False, False, True, True]


def test_an_agent_has_no_typing_extensions_but_others_may() -> None:
    modules = ("typing_extensions", "msgspec")
    assert loaded("import agent.main", modules=modules) == [False, True]
    real = "from typing_extensions import Self"
    assert loaded("import agent.main", real, modules=modules) == [True, True]


def test_who_imports_it_later_has_the_real_one() -> None:
    real = "assert urllib.request.urlopen and urllib.request.getproxies() is not None"
    assert loaded("import pingmesh.bus", "import urllib.request", real) == [True, True, True, True]


def test_who_imported_it_before_keeps_it() -> None:
    same = "assert sys.modules['urllib.request'] is urllib.request and urllib.request.urlopen"
    assert loaded("import urllib.request", "import pingmesh.bus", same) == [True, True, True, True]


def test_with_pysocks_paho_may_look_for_a_proxy() -> None:
    finds = "importlib.util.find_spec = lambda name: real('json' if name == 'socks' else name)"
    assert loaded("import importlib.util", "real = importlib.util.find_spec", finds, "import pingmesh.bus")[0]
