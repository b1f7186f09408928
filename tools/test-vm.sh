#!/bin/bash
# test-vm.sh VENV [PYTEST ARGUMENTS]: the tests of tests/vm inside one virtual machine. Where there can be no such machine,
# a failure if CI=true and a skip otherwise; the reason is said.
set -euo pipefail
venv=$1
shift
if ! tools/vm-setup.sh "$venv"; then
  if [ "${CI:-}" = true ]; then
    echo "test-vm: FAILED: no virtual machine, see above" >&2
    exit 1
  fi
  echo "test-vm: skipped: no virtual machine, see above" >&2
  exit 0
fi
[ $# -gt 0 ] || set -- tests/vm
exec "$venv/bin/python" tools/vm.py --venv "$venv" -- python -m pytest -p no:cacheprovider -p no:hypothesispytest -v "$@"
