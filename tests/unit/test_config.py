from __future__ import annotations

from pathlib import Path

import pytest

from pingmesh.config import ConfigError, Settings, load
from pingmesh.config_load import dump

ROOT = Path(__file__).parents[2]

BAD_FILES = {
    "unknown key": ("broker:\n  prot: 1883\n", ":2: broker.prot: unknown key; did you mean broker.port?"),
    "unknown section": ("brokr:\n  port: 1\n", ":1: brokr: unknown key; did you mean broker?"),
    "unknown key with no neighbour": ("zzzzzz: 1\n", "allowed: cluster, topology, log_level, broker"),
    "wrong type": ("broker:\n  tls: maybe\n", ":2: broker.tls: 'maybe' is not allowed; allowed: true or false."),
    "number as text": ("broker:\n  port: '1883'\n", "'1883' is not allowed; allowed: an integer from 1 to 65535."),
    "too large": ("broker:\n  port: 99999\n", ":2: broker.port: 99999 is not allowed"),
    "zero rate": ("agent:\n  max_rate: 0\n", ":2: agent.max_rate: 0 is not allowed; allowed: a number above 0"),
    "share above one": ("controller:\n  rotation_share: 1.5\n", "allowed: a number from 0 to 1."),
    "not one of": ("log_level: loud\n", "allowed: debug, info, warning, error."),
    "cluster with a slash": ("cluster: a/b\n", "cluster: 'a/b' is not allowed; allowed: letters, digits"),
    "a scalar for a section": ("agent: fast\n", ":1: agent: expected a mapping of host, devices"),
    "a scalar for a list": ("agent:\n  devices: eth1\n", "allowed: a list of names or nothing (null)."),
    "a list for the file": ("- a\n", ":1: the file: expected a mapping"),
    "given twice": ("cluster: a\ncluster: b\n", ":2: cluster: is given twice"),
    "class without dscp": ("controller:\n  classes:\n    - {name: big}\n", ":3: controller.classes.0: needs dscp."),
    "class with a typo": (
        "controller:\n  classes:\n    - {name: big, dscp: 1, siez: 9}\n",
        ":3: controller.classes.0.siez: unknown key; did you mean controller.classes.0.size?",
    ),
    "class out of range": (
        "controller:\n  classes:\n    - {name: big, dscp: 64}\n",
        ":3: controller.classes.0.dscp: 64",
    ),
    "class is no mapping": (
        "controller:\n  classes: [big]\n",
        ":2: controller.classes.0: expected a mapping of name, dscp",
    ),
    "shares above one": (
        "controller:\n  classes:\n    - {name: a, dscp: 1, share: 0.6}\n    - {name: b, dscp: 2, share: 0.6}\n",
        "controller.classes: the shares add up to more than 1",
    ),
    "overdue after timeout": ("agent:\n  overdue_ms: 500\n", "agent.overdue_ms: 500 must be below agent.timeout_ms"),
    "certificate without key": ("broker:\n  tls: true\n  cert_file: a.pem\n", "give both or neither"),
    "CA without TLS": ("broker:\n  ca_file: a.pem\n", "have no effect without broker.tls: true"),
    "no YAML": ("a: [\n", "is not valid YAML"),
    "no date": ("cluster: 2024-13-45\n", ":1: cluster: cannot be read"),
    "no timestamp": ("cluster: !!timestamp x\n", ":1: cluster: cannot be read"),
    "no truth": ("broker: {tls: !!bool x}\n", ":1: broker.tls: cannot be read"),
    "endless number": (f"broker: {{port: {'9' * 5000}}}\n", ":1: broker.port: cannot be read"),
    "half a character": ('cluster: a\nbroker:\n  host: "\\ud800"\n', r":3: broker.host: '\ud800' is not allowed"),
    "unknown tag": ("cluster: !!python/object:os.system x\n", ":1: cluster: cannot be read"),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "pingmesh.yaml"


@pytest.mark.parametrize("name", BAD_FILES)
def test_each_mistake_names_place_and_remedy(name: str, file: Path) -> None:
    text, message = BAD_FILES[name]
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(str(file), environ={})
    assert message in str(caught.value)
    assert len(caught.value.problems) == 1


def test_all_mistakes_are_told_at_once(file: Path) -> None:
    file.write_text("cluster: a\nbroker:\n  port: 0\nagent:\n  hots: x\n")
    with pytest.raises(ConfigError) as caught:
        load(str(file), environ={"PINGMESH_LOG_LEVEL": "loud"})
    assert [p.partition(": ")[0] for p in caught.value.problems] == [
        f"{file}:3",
        f"{file}:5",
        "environment variable PINGMESH_LOG_LEVEL",
    ]


def test_file_below_environment_below_flags(file: Path) -> None:
    file.write_text("cluster: file\nbroker:\n  host: file\n  port: 1\nagent:\n  devices: [file]\n")
    s = load(
        str(file),
        {"agent.devices": "flag1,flag2", "log_level": None, "agent.host": "h1"},
        {"PINGMESH_BROKER__PORT": "2", "PINGMESH_AGENT__DEVICES": "env", "PINGMESH_BROKER__TLS": "true"},
    )
    assert (s.cluster, s.broker.host, s.broker.port, s.broker.tls) == ("file", "file", 2, True)
    assert (s.agent.devices, s.agent.host, s.log_level) == (["flag1", "flag2"], "h1", "info")


def test_flat_variables_are_those_of_settings_only() -> None:
    environ = {
        "PINGMESH_CLUSTER": "east",
        "PINGMESH_BROKER": "[fd00::1]:1884",
        # What Kubernetes sets for a service, and the command's own.
        "PINGMESH_CONTROLLER_PORT": "tcp://10.0.0.1:80",
        "PINGMESH_AGENT": "x",
        "PINGMESH_CONTROLLER": "unix:/x",
        "PINGMESH_LAB_DIR": "/x",
    }
    s = load(environ=environ)
    assert (s.cluster, s.broker.host, s.broker.port) == ("east", "fd00::1", 1884)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("PINGMESH_BROKER__PROT", "1", "PINGMESH_BROKER__PROT: broker.prot: unknown key; did you mean broker.port?"),
        ("PINGMESH_AGENT__MAX_RATE", "fast", "agent.max_rate: 'fast' is not allowed"),
        ("PINGMESH_BROKER", "nowhere", "broker: 'nowhere' is not HOST:PORT."),
        ("PINGMESH_CONTROLLER__CLASSES", "[{name: a, dscp: 1, foo: 2}]", "controller.classes.0.foo: unknown key"),
        ("PINGMESH_CLUSTER__X", "1", "cluster.x: unknown key"),
        ("PINGMESH_CONTROLLER__CLASSES", "[", "is not valid YAML"),
        ("PINGMESH_CONTROLLER__CLASSES", "[{name: !!bool x, dscp: 1}]", "controller.classes.0.name: cannot be read"),
        ("PINGMESH_LOG_LEVEL", "\udcff", r"log_level: '\udcff' is not allowed"),
        ("PINGMESH_TOPOLOGY", "/\udcff", r"topology: '/\udcff' is not allowed"),
        ("PINGMESH_CONFIG", "\0", "is no name of a file"),
        ("PINGMESH_CONFIG", "\ud800", "is no name of a file"),
    ],
)
def test_mistakes_in_the_environment(variable: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(environ={variable: value})
    assert message in str(caught.value)


def test_a_flag_that_names_a_section_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"agent is a section; name one of its keys: host, devices"):
        load(flags={"agent": "x"}, environ={})


def test_an_empty_list_from_the_environment() -> None:
    s = load(environ={"PINGMESH_CONTROLLER__CLASSES": "[]", "PINGMESH_AGENT__DEVICES": " [] "})
    assert s.controller.classes == []
    assert s.agent.devices == []
    with pytest.raises(ConfigError, match=r"agent.timeout_ms: '\[\]' is not allowed"):
        load(environ={"PINGMESH_AGENT__TIMEOUT_MS": "[]"})


def test_classes_come_from_the_environment_too() -> None:
    s = load(environ={"PINGMESH_CONTROLLER__CLASSES": "[{name: big, dscp: 26, size: 4000}]"})
    assert s.controller.classes == [{"name": "big", "dscp": 26, "size": 4000}]


def test_missing_file_and_file_from_the_environment(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: No such file or directory"):
        load(str(file), environ={})
    file.write_text("cluster: x\n")
    assert load(environ={"PINGMESH_CONFIG": str(file)}).cluster == "x"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        load(str(file), environ={})


def test_empty_file_and_empty_section_mean_defaults(file: Path) -> None:
    file.write_text("# nothing\n")
    assert load(str(file), environ={}) == Settings()
    file.write_text("broker:\nagent:\n")
    assert load(str(file), environ={}) == Settings()


def test_dump_is_a_file_that_loads_to_the_same(file: Path) -> None:
    flags = {"agent.devices": "a,b", "controller.link_rate": 12.5, "topology": "ä\x85\u2028b"}
    settings = load(flags=flags, environ={})
    file.write_text(dump(settings))
    assert load(str(file), environ={}) == settings


def test_the_shipped_example_loads() -> None:
    settings = load(str(ROOT / "deploy/pingmesh.yaml"), environ={})
    assert settings.agent.devices == ["eth1", "eth2"]
    assert [c["name"] for c in settings.controller.classes] == ["cnp"]
