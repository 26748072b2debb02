#!/usr/bin/env bash
# A run on a TPU slice by plain gcloud: creates the slice, installs this checkout
# on every host, starts the same command on all, and deletes the slice.
#
#   launch/tpu_vm.sh --name first --zone us-west4-a --type v5litepod-16 \
#       -- config.yaml mesh.fsdp=16 learner.rows=16 run.dir=/mnt/runs/first
#
# What follows -- are arguments of tunix.rl.multi_turn.train; files that they
# name lie on a directory that all hosts see. --keep leaves the slice, --dry-run
# prints one command a line, each word quoted for a shell, and runs none.
#
# Each host gets ~/tunix-multi-turn with an environment in .venv. The package
# needs Python 3.11: Ubuntu 22.04, the default --version, has 3.10, so a host
# without a newer one installs Ubuntu's python3.11 (python3-venv elsewhere).
set -euo pipefail

name='' zone='' type='' version='tpu-ubuntu2204-base'
keep=false dry=false spot=false

usage() {
  sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "$0"
}

refuse() {
  echo "error: $1" >&2
  exit 2
}

while (($#)); do
  case $1 in
    --name | --zone | --type | --version)
      (($# > 1)) || refuse "$1 needs a value"
      printf -v "${1#--}" '%s' "$2"
      shift 2
      ;;
    --spot) spot=true; shift ;;
    --keep) keep=true; shift ;;
    --dry-run) dry=true; shift ;;
    -h | --help) usage; exit 0 ;;
    --) shift; break ;;
    *) refuse "$1 is no option; arguments of train come after --" ;;
  esac
done
for option in name zone type; do
  [[ -n ${!option} ]] || refuse "--$option is missing"
done
(($#)) || refuse "no arguments of train after --"

run() {
  if $dry; then
    printf '%q ' "$@" | sed 's/ $/\n/'
  else
    "$@"
  fi
}

on_all() {
  run gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker all \
    --command "$1"
}

# Packed first: a checkout that cannot be read costs no slice.
checkout=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
archive=${TMPDIR:-/tmp}/tunix-multi-turn-$name.tar.gz
run tar -czf "$archive" --exclude=__pycache__ -C "$checkout" pyproject.toml \
  constraints.txt LICENSE MANIFEST.in README.md scripts/venv.sh packages tunix \
  tunix_multi_turn
delete=(gcloud compute tpus tpu-vm delete "$name" --zone "$zone" --quiet)
end() {
  rm -f "$archive"
  if $created && ! $keep; then "${delete[@]}"; fi
}
created=false
$dry || trap end EXIT

create=(gcloud compute tpus tpu-vm create "$name" --zone "$zone"
  --accelerator-type "$type" --version "$version")
if $spot; then create+=(--spot); fi
run "${create[@]}"
created=true
run gcloud compute tpus tpu-vm scp "$archive" \
  "$name:/tmp/tunix-multi-turn.tar.gz" --zone "$zone" --worker all
on_all "set -e; mkdir -p tunix-multi-turn; cd tunix-multi-turn; \
tar -xzf /tmp/tunix-multi-turn.tar.gz; \
sh scripts/venv.sh .venv 2>/dev/null || { \
case \$(. /etc/os-release; echo \"\$VERSION_ID\") in \
22.04) packages='python3.11 python3.11-venv' ;; \
*) packages=python3-venv ;; \
esac; \
sudo apt-get -qq -o DPkg::Lock::Timeout=600 update; \
sudo env DEBIAN_FRONTEND=noninteractive apt-get -qq -y \
-o DPkg::Lock::Timeout=600 install \$packages; \
sh scripts/venv.sh .venv; }; \
.venv/bin/python -m pip install -q -c constraints.txt '.[tpu,client,serve]' ./packages/*"
on_all "tunix-multi-turn/.venv/bin/python -m tunix.rl.multi_turn.train processes.coordinator=auto$(printf ' %q' "$@")"
if ! $keep && $dry; then
  run "${delete[@]}"
fi
