"""What `make test-vm` does where there can be no virtual machine."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
NEEDED = ("bash", "uname", "id", "grep", "cmp", "rm", "ldd", "cat")


@pytest.mark.parametrize(
    ("ci", "code", "said"),
    [("true", 1, "test-vm: FAILED: no virtual machine"), ("", 0, "test-vm: skipped: no virtual machine")],
)
def test_without_a_machine_ci_fails_and_others_skip(tmp_path: Path, ci: str, code: int, said: str) -> None:
    (tmp_path / "tools").mkdir()
    shutil.copy(TOOLS / "test-vm.sh", tmp_path / "tools")
    setup = tmp_path / "tools/vm-setup.sh"
    setup.write_text("#!/bin/bash\necho 'vm: no QEMU for a reason' >&2\nexit 3\n")
    setup.chmod(0o755)
    env = {"PATH": "/usr/bin:/bin", "CI": ci}
    done = subprocess.run(
        ["tools/test-vm.sh", ".venv"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert "vm: no QEMU for a reason" in done.stderr
    assert said in done.stderr


def test_setup_says_what_is_missing_and_how_to_get_it(tmp_path: Path) -> None:
    """On a machine without QEMU and without apt."""
    if subprocess.run(["uname", "-m"], capture_output=True, text=True, check=True).stdout.strip() != "x86_64":
        pytest.skip("the virtual machine is made for x86_64: another sentence is said here")
    for tool in NEEDED:
        found = shutil.which(tool)
        assert found
        (tmp_path / tool).symlink_to(found)
    env = {"PATH": str(tmp_path)}
    setup = [str(TOOLS / "vm-setup.sh"), str(tmp_path / ".venv")]
    done = subprocess.run(["/bin/bash", *setup], cwd=TOOLS.parent, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr.startswith("vm: no qemu-system-x86 and no apt-get to install it with: install qemu-system-x86 ")
