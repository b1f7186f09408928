"""vm.py [--cpus N] [--memory SIZE] [--limit SECONDS] -- COMMAND...: run a command in a virtual machine with Soft-RoCE.

The machine boots the distribution's kernel under virtme-ng and QEMU (see vm-setup.sh) and sees this machine's file
system, read-only but for $PINGMESH_VM_SHARE, a directory that is gone afterwards unless --share names one. The command
runs as root in the repository's directory; its output is shown as it comes, and its exit code is ours (124: out of
time, 125: no boot). PINGMESH_VM_CPUS sets the processors; PINGMESH_VM_KVM=1 uses /dev/kvm, which is faster where it
works with stock kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GOODBYE_S = 5.0
OUT_OF_TIME, NO_BOOT = 124, 125

_GUEST = """\
#!/bin/bash
cd {root} || exit 125
echo "vm: Linux $(uname -r) is up" >&2
export PATH="{path}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
export LANG=C.UTF-8 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PINGMESH_VM=1 PINGMESH_VM_SHARE={share}
{exports}
ip link set lo up
modprobe -a rdma_rxe ib_uverbs rdma_ucm veth
ulimit -l unlimited
{command} </dev/null
code=$?
echo $code >{share}/.code
exit $code
"""


def environment() -> str:
    """Settings of ours that the command shall see too."""
    names = sorted(n for n in os.environ if n.startswith("PINGMESH_") and not n.startswith("PINGMESH_VM"))
    return "\n".join(
        f"export {n}={shlex.quote(os.environ[n])}" for n in (*names, *(["CI"] if "CI" in os.environ else []))
    )


def vng_command(venv: Path, share: Path, cpus: int, memory: str) -> list[str]:
    """The command line that boots the machine and runs the script in the share."""
    kernel = (venv / "vm/vmlinuz").resolve()
    kvm = [] if os.environ.get("PINGMESH_VM_KVM") == "1" else ["--disable-kvm"]
    fixed = ["--disable-microvm", "--force-9p", "--user", "root", f"--rwdir={share}"]
    size = ["--cpus", str(cpus), "--memory", memory]
    # Reading the default clock leaves the emulated processor, and event loops read clocks all the time.
    boot = [w for option in ("tsc=reliable", "mitigations=off") for w in ("--append", option)]
    return [
        str(venv / "vm/bin/vng"),
        *fixed,
        *kvm,
        *size,
        *boot,
        "-r",
        str(kernel),
        "--",
        "bash",
        str(share / ".run.sh"),
    ]


def compile_sources(python: str) -> None:
    """Byte code for what runs there: the machine could not write it, and its processor is emulated."""
    places = [str(ROOT / p) for p in ("pingmesh", "agent", "controller", "topology")]
    subprocess.run([python, "-m", "compileall", "-q", *places], check=False)


def end(child: subprocess.Popen[str]) -> None:
    """End QEMU and all around it; they have a session of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        try:
            child.wait(GOODBYE_S)
        except subprocess.TimeoutExpired:
            continue
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def show(child: subprocess.Popen[str]) -> None:
    """Pass on what the machine prints until it is off; without what would clear the terminal."""
    assert child.stdout is not None
    for line in child.stdout:
        print(line.rstrip("\r\n").replace("\x1b[", "<ESC>["), flush=True)
    child.wait()


def run(args: argparse.Namespace, share: Path) -> int:
    """Boot, run, return the command's exit code."""
    venv = Path(args.venv).resolve()
    script = _GUEST.format(
        root=shlex.quote(str(ROOT)),
        path=venv / "bin",
        share=shlex.quote(str(share)),
        exports=environment(),
        command=shlex.join(args.command),
    )
    (share / ".run.sh").write_text(script)
    code_file = share / ".code"
    code_file.unlink(missing_ok=True)
    compile_sources(str(venv / "bin/python"))

    def out_of_time(*_: object) -> None:
        raise TimeoutError

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, out_of_time)
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGHUP, interrupt)
    began = time.monotonic()
    argv = vng_command(venv, share, args.cpus, args.memory)
    print(f"vm: booting with {args.cpus} CPUs, at most {args.limit} s", flush=True)
    child = subprocess.Popen(
        argv,
        env=os.environ | {"PATH": f"{venv / 'vm/bin'}:{os.environ['PATH']}:/usr/sbin:/sbin"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        signal.alarm(args.limit)
        show(child)
    except TimeoutError:
        print(f"vm: ended after {args.limit} s, the time allowed (--limit)", file=sys.stderr)
        return OUT_OF_TIME
    except KeyboardInterrupt:
        print("vm: interrupted", file=sys.stderr)
        return 130
    finally:
        signal.alarm(0)
        end(child)
    if not code_file.exists():
        print("vm: the machine ended before the command did; what it printed is above", file=sys.stderr)
        return NO_BOOT
    print(f"vm: off after {time.monotonic() - began:.0f} s", flush=True)
    return int(code_file.read_text())


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", default=str(ROOT / ".venv"))
    cpus = int(os.environ.get("PINGMESH_VM_CPUS") or min(2, os.cpu_count() or 1))
    parser.add_argument("--cpus", type=int, default=cpus)
    parser.add_argument("--memory", default="2G")
    parser.add_argument("--limit", type=int, default=1800, metavar="SECONDS")
    parser.add_argument("--share", type=Path, metavar="DIRECTORY", help="keep what the command writes there")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    share = args.share.resolve() if args.share else Path(tempfile.mkdtemp(prefix="pingmesh-vm-"))
    try:
        return run(args, share)
    finally:
        if args.share:
            for name in (".run.sh", ".code"):
                (share / name).unlink(missing_ok=True)
        else:
            shutil.rmtree(share, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
