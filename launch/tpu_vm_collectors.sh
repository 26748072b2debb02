#!/usr/bin/env bash
# Collectors on the hosts of a TPU slice, whose CPUs the learner leaves idle: on
# every host some for the learner's process there (docs/fleet.md).
#
#   launch/tpu_vm_collectors.sh --name first --zone us-west4-a --each 8 \
#       -- /mnt/runs/first
#
# What follows -- is the run's directory, which all hosts see, and settings of
# the collectors. The slice, its environment and the run are those of
# launch/tpu_vm.sh with fleet=join. Collectors join when the learner is there and
# end with it; --stop ends them before. --dry-run prints one command a line and
# runs none.
set -euo pipefail

name='' zone='' each=4 dry=false stop=false

usage() {
  sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "$0"
}

refuse() {
  echo "error: $1" >&2
  exit 2
}

while (($#)); do
  case $1 in
    --name | --zone | --each)
      (($# > 1)) || refuse "$1 needs a value"
      printf -v "${1#--}" '%s' "$2"
      shift 2
      ;;
    --stop) stop=true; shift ;;
    --dry-run) dry=true; shift ;;
    -h | --help) usage; exit 0 ;;
    --) shift; break ;;
    *) refuse "$1 is no option; the run's directory comes after --" ;;
  esac
done
for option in name zone; do
  [[ -n ${!option} ]] || refuse "--$option is missing"
done
[[ $each =~ ^[1-9][0-9]*$ ]] || refuse "--each $each is no number above 0"
(($#)) || refuse "no directory of a run after --"
run=${1%/}
shift

on_all() {
  local command=(gcloud compute tpus tpu-vm ssh "$name" --zone "$zone"
    --worker all --command "$1")
  if $dry; then
    printf '%q ' "${command[@]}" | sed 's/ $/\n/'
  else
    "${command[@]}"
  fi
}

# One unit a collector, by which they end, also after the session here has;
# each host's number is in its metadata.
if $stop; then
  on_all "systemctl --user stop 'tunix-collector-*'"
  exit
fi
directory=$(printf %q "$run")
arguments=$(printf ' %q' "$@")
(($#)) || arguments=''
on_all "host=\$(curl -sf -H 'Metadata-Flavor: Google' \
http://metadata.google.internal/computeMetadata/v1/instance/attributes/agent-worker-number); \
own=$directory; [ \"\$host\" = 0 ] || own=$directory/processes/\$host; \
sudo loginctl enable-linger \"\$USER\"; \
for i in \$(seq $each); do systemd-run --user --unit tunix-collector-\$i --collect \
\"\$HOME/tunix-multi-turn/.venv/bin/python\" -m tunix_multi_turn commands.collect \"\$own\"$arguments; done"
