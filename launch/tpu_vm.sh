#!/usr/bin/env bash
# A run on a TPU slice by plain gcloud: creates the slice, installs the package
# on every host, starts the same command on all, and deletes the slice.
#
#   launch/tpu_vm.sh --name first --zone us-west4-a --type v5litepod-16 \
#       --package gs://bucket/tunix_multi_turn-0.1-py3-none-any.whl \
#       -- config.yaml mesh.fsdp=16 learner.rows=16 run.dir=/mnt/runs/first
#
# What follows -- are arguments of tunix.rl.multi_turn.train; files that they
# name lie on a directory that all hosts see. --keep leaves the slice, --dry-run
# prints one command a line, each word quoted for a shell, and runs none.
set -euo pipefail

name='' zone='' type='' package='tunix-multi-turn[tpu]'
version='tpu-ubuntu2204-base' keep=false dry=false spot=false

usage() {
  sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "$0"
}

refuse() {
  echo "error: $1" >&2
  exit 2
}

while (($#)); do
  case $1 in
    --name | --zone | --type | --package | --version)
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

create=(gcloud compute tpus tpu-vm create "$name" --zone "$zone"
  --accelerator-type "$type" --version "$version")
if $spot; then create+=(--spot); fi
run "${create[@]}"
if ! $keep && ! $dry; then
  trap 'gcloud compute tpus tpu-vm delete "$name" --zone "$zone" --quiet' EXIT
fi
case $package in
  gs://*)
    on_all "gcloud storage cp $(printf %q "$package") /tmp/ && python3 -m pip install --user /tmp/$(printf %q "${package##*/}")'[tpu]'"
    ;;
  *) on_all "python3 -m pip install --user $(printf %q "$package")" ;;
esac
on_all "python3 -m tunix.rl.multi_turn.train processes.coordinator=auto$(printf ' %q' "$@")"
if ! $keep && $dry; then
  run gcloud compute tpus tpu-vm delete "$name" --zone "$zone" --quiet
fi
