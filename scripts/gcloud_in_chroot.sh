#!/usr/bin/env bash
# Stands in for gcloud, so that launch/tpu_vm.sh runs without a cloud: a root file
# system of debootstrap is the slice's only host.
#
#   debootstrap --variant=minbase --components=main,universe \
#     --include=python3,sudo,ca-certificates jammy /tmp/root
#   install -D scripts/gcloud_in_chroot.sh /tmp/bin/gcloud
#   PATH=/tmp/bin:$PATH GCLOUD_ROOT=/tmp/root launch/tpu_vm.sh --name first \
#     --zone none --type none -- steps=2
#
# scp copies into the root, ssh runs its command there as the user `me`, who may
# use sudo; create and delete do nothing. Needs root and util-linux. JAX computes
# on the CPU, and processes.coordinator=auto finds no TPU's metadata, so it is
# left out of the command.
set -euo pipefail
root=${GCLOUD_ROOT:?the directory of a base system}

echo "$ gcloud ${*:4:2} ..." >&2
case $4 in
  create | delete) ;;
  scp) cp "$5" "$root/${6#*:}" ;;
  ssh)
    while [[ $1 != --command ]]; do shift; done
    command=${2/ processes.coordinator=auto/}
    # shellcheck disable=SC2016 # Expanded by the inner shell.
    exec unshare --mount --propagation private bash -c '
      mount -t proc proc "$0/proc"; mount --rbind /dev "$0/dev"
      cp /etc/resolv.conf "$0/etc/resolv.conf"
      if ! grep -q ^me: "$0/etc/passwd"; then
        chroot "$0" useradd --create-home me
        echo "me ALL=(ALL) NOPASSWD:ALL" >"$0/etc/sudoers.d/me"
      fi
      exec chroot "$0" su me -s /bin/bash -c \
        "cd && export JAX_PLATFORMS=cpu LC_ALL=C.UTF-8 && $1"
    ' "$root" "$command"
    ;;
  *) echo "error: gcloud $*: no such command here" >&2; exit 2 ;;
esac
