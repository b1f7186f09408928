#!/bin/bash
# setup.sh VENV [PYTHON]: the Debian packages that are missing (as root), then VENV with the locked dependencies and pingmesh.
set -euo pipefail
venv=$1
python=${2:-}
export PATH="$PATH:/usr/sbin:/sbin"

can_make_venv() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
  local candidate
  for candidate in ${python:-/usr/bin/python3 python3.13 python3.12 python3.11 python3}; do
    if command -v "$candidate" >/dev/null && can_make_venv "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
}

# What must be there, and what only makes things better: without mosquitto amqtt is the broker, tshark is for tests.
needed=() wanted=()
command -v nft >/dev/null || needed+=(nftables)
command -v ip >/dev/null || needed+=(iproute2)
command -v ps >/dev/null || needed+=(procps)
command -v unshare >/dev/null || needed+=(util-linux)
command -v mosquitto >/dev/null || wanted+=(mosquitto)
command -v tshark >/dev/null || wanted+=(tshark)
[ -e /etc/ssl/certs/ca-certificates.crt ] || wanted+=(ca-certificates)
[ -n "$(find_python)" ] || needed+=(python3-venv)

packages=("${needed[@]}" "${wanted[@]}")
if [ ${#packages[@]} -gt 0 ]; then
  install="apt-get install --yes --no-install-recommends ${packages[*]}"
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "setup: installing ${packages[*]} (apt, a minute or so)"
    export DEBIAN_FRONTEND=noninteractive
    log=$(mktemp)
    if ! { apt-get update --quiet && $install; } </dev/null >"$log" 2>&1; then
      tail -n 20 "$log" >&2
      rm -f "$log"
      echo "setup: \`$install\` failed; install these packages, then run make setup again." >&2
      exit 2
    fi
    rm -f "$log"
    # pingmesh starts a broker of its own; the service that came with the package would only hold port 1883.
    case " ${wanted[*]} " in
      *" mosquitto "*) systemctl disable --now mosquitto >/dev/null 2>&1 || true ;;
    esac
  elif [ ${#needed[@]} -gt 0 ]; then
    echo "setup: not root and without ${needed[*]}: run \`$install\` as root, then make setup again." >&2
    exit 2
  else
    echo "setup: going on without ${wanted[*]} (as root: $install)" >&2
  fi
fi

found=$(find_python)
if [ -z "$found" ]; then
  echo "setup: no Python >= 3.11 that can make a virtual environment; install one and name it: make setup PYTHON=python3.12" >&2
  exit 2
fi

if ! "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "setup: making $venv with $found"
  rm -rf "$venv"
  "$found" -m venv "$venv"
fi
echo "setup: installing the locked dependencies into $venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check --no-input --quiet)
"${pip[@]}" install --require-hashes --requirement requirements.lock
"${pip[@]}" install --no-deps --no-build-isolation --editable .
echo "setup: done; try $venv/bin/pingmesh --help"
