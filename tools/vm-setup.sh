#!/bin/bash
# vm-setup.sh VENV: what a virtual machine with Soft-RoCE needs: QEMU, a static busybox, pyverbs, RDMA tools and tshark (by apt, as
# root), virtme-ng in VENV/vm, and the distribution's kernel, unpacked below VENV/vm and not installed. Ends with 3 and one
# sentence without.
# PINGMESH_VM_KERNEL=/path/to/vmlinuz takes another kernel, whose modules are in lib/modules beside its directory.
set -euo pipefail
venv=$1
place=$venv/vm
export PATH="$PATH:/usr/sbin:/sbin"

unavailable() {
  echo "vm: $1" >&2
  exit 3
}

[ "$(uname -m)" = x86_64 ] || unavailable "the virtual machine is made for x86_64, and this is $(uname -m)."

packages=()
command -v qemu-system-x86_64 >/dev/null || packages+=(qemu-system-x86)
# virtme-ng boots by one that needs no library.
[[ "$(ldd "$(command -v busybox)" 2>&1)" == *"not a dynamic"* ]] || packages+=(busybox-static)
command -v depmod >/dev/null || packages+=(kmod)
command -v rdma >/dev/null || packages+=(iproute2)
command -v ibv_devices >/dev/null || packages+=(ibverbs-utils)
command -v ib_send_lat >/dev/null || packages+=(perftest)
command -v tshark >/dev/null || packages+=(tshark)
[ -d /etc/libibverbs.d ] || packages+=(ibverbs-providers)
[ -d /usr/lib/python3/dist-packages/pyverbs ] || packages+=(python3-pyverbs)
if [ ${#packages[@]} -gt 0 ]; then
  install="apt-get install -o DPkg::Lock::Timeout=300 --yes --no-install-recommends ${packages[*]}"
  command -v apt-get >/dev/null || unavailable "no ${packages[0]} and no apt-get to install it with: install ${packages[*]} by hand."
  [ "$(id -u)" = 0 ] || unavailable "not root and without ${packages[*]}: run \`$install\` as root."
  echo "vm: installing ${packages[*]} (apt, a minute or so)"
  log=$(mktemp)
  trap 'rm -f "$log"' EXIT
  export DEBIAN_FRONTEND=noninteractive
  if ! { apt-get update --quiet && $install; } </dev/null >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    unavailable "\`$install\` failed."
  fi
fi

if ! cmp -s tools/vm-requirements.txt "$place/requirements.txt"; then
  echo "vm: installing virtme-ng into $place"
  rm -rf "$place/bin" "$place/lib" "$place/lib64" "$place/include"
  "$venv/bin/python" -m venv "$place"
  "$place/bin/python" -m pip --disable-pip-version-check --no-input --quiet install \
    --require-hashes --only-binary :all: --requirement tools/vm-requirements.txt ||
    unavailable "virtme-ng cannot be installed from the package index."
  cp tools/vm-requirements.txt "$place/requirements.txt"
fi

# The machine would ask this one about every file at every look. It may keep what it has seen: it is several times as fast then.
sed -i 's/access=any,msize=524288 \/dev/access=any,msize=524288,cache=loose \/dev/' "$place"/lib/python3*/site-packages/virtme/mkinitramfs.py

if [ -n "${PINGMESH_VM_KERNEL:-}" ]; then
  [ -r "$PINGMESH_VM_KERNEL" ] || unavailable "PINGMESH_VM_KERNEL: $PINGMESH_VM_KERNEL cannot be read."
  ln -sfn "$PINGMESH_VM_KERNEL" "$place/vmlinuz"
  exit 0
fi
[ -r "$place/vmlinuz" ] && exit 0

# The package is unpacked: no boot loader, initramfs or /lib/modules of this machine changes.
hint="set PINGMESH_VM_KERNEL to a kernel image that has the module rdma_rxe."
command -v apt-get >/dev/null || unavailable "no apt-get to fetch a kernel with: $hint"
find_package() {
  apt-cache depends linux-image-amd64 2>/dev/null | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)/\1/p' | head -n 1
}
package=$(find_package)
if [ -z "$package" ] && [ "$(id -u)" = 0 ]; then
  apt-get update --quiet </dev/null >/dev/null 2>&1 || true
  package=$(find_package)
fi
[ -n "$package" ] || unavailable "apt knows no linux-image-amd64: run \`apt-get update\` as root, or $hint"
echo "vm: fetching and unpacking $package (70 MB)"
work=$(mktemp -d "$place/kernel.XXXXXX")
trap 'rm -rf "$work" "${log:-}"' EXIT
chmod 755 "$work"
(cd "$work" && apt-get download --quiet "$package" </dev/null >log 2>&1) || {
  tail -n 3 "$work/log" >&2
  unavailable "\`apt-get download $package\` failed: run \`apt-get update\` as root, or $hint"
}
version=${package#linux-image-}
# Without the drivers of what no virtual machine has: a quarter of the size.
dpkg --fsys-tarfile "$work"/*.deb | tar -x -C "$work" --wildcards \
  --exclude='*/drivers/gpu/*' --exclude='*/drivers/media/*' --exclude='*/drivers/net/ethernet/*' \
  --exclude='*/drivers/net/wireless/*' --exclude='*/drivers/scsi/*' --exclude='*/drivers/iio/*' --exclude='*/drivers/staging/*' \
  --exclude='*/sound/*' ./boot ./lib
rm -f "$work"/*.deb "$work/log"
depmod -b "$work" "$version"
rm -rf "$place/kernel"
mv "$work" "$place/kernel"
ln -sfn "kernel/boot/vmlinuz-$version" "$place/vmlinuz"
