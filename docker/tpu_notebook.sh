#!/usr/bin/env bash
# Colab's notebook runtime in a container on a TPU VM, with a project of the host
# mounted: an edit on the host, as by VS Code over Remote-SSH, is there at once.
#
#   docker/tpu_notebook.sh ~/tunix
#   docker/tpu_notebook.sh --workdir /workspace/tunix ~/tunix
#   docker/tpu_notebook.sh --no-host-network --port 9000 ~/tunix
#
# Stops an older container of the same name, then runs a new one in the
# foreground until Ctrl-C. PROJECT is mounted at /workspace/tunix.
#
#   --workdir DIR       where the container starts (/workspace); image: as the
#                       image has it
#   --name NAME         of the container (colab)
#   --image IMAGE       (us-docker.pkg.dev/colab-images/public/runtime)
#   --no-host-network   a network of its own: port 8080 of the container is
#                       --port of the host's loopback interface. Without this
#                       option the runtime is at the host's own port 8080.
#   --port PORT         of the host, with --no-host-network (9000)
#   --cpu               a machine without a TPU: no devices, not privileged
#   --gpu               the same with its NVIDIA GPUs
#   --mount SRC:DST     one more directory; may be repeated
#   --env NAME=VALUE    one more variable; may be repeated
#   --ssh-host NAME     of this machine, as your own machine reaches it; for the
#                       tunnel that is printed (its host name)
#   --dry-run           prints one command a line, quoted for a shell; runs none
set -euo pipefail

name=colab workdir=/workspace port=9000 project='' dry=false hostnet=true
tpu=true gpu=false ported=false ssh_host=$(hostname 2>/dev/null || echo tpu-vm)
image=us-docker.pkg.dev/colab-images/public/runtime
mounts=() variables=()
inside=8080 # Where the image's server listens.

usage() {
  sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "$0"
}

refuse() {
  echo "error: $*" >&2
  exit 2
}

while (($#)); do
  case $1 in
    --workdir | --name | --image | --port | --mount | --env | --ssh-host)
      (($# > 1)) || refuse "$1 needs a value"
      case $1 in
        --mount) mounts+=("$2") ;;
        --env) variables+=("$2") ;;
        --ssh-host) ssh_host=$2 ;;
        --port) port=$2 ported=true ;;
        *) printf -v "${1#--}" '%s' "$2" ;;
      esac
      shift 2
      ;;
    --no-host-network) hostnet=false; shift ;;
    --cpu) tpu=false; shift ;;
    --gpu) tpu=false gpu=true; shift ;;
    --dry-run) dry=true; shift ;;
    -h | --help) usage; exit 0 ;;
    -*) refuse "$1 is no option; --help lists them" ;;
    *)
      [[ -z $project ]] || refuse "two projects, $project and $1; give one"
      project=$1
      shift
      ;;
  esac
done

[[ -n $project ]] || refuse 'no project; give the directory to mount, e.g. ~/tunix'
[[ -d $project ]] || refuse "$project is no directory; give the one to mount"
project=$(cd -- "$project" && pwd) # Docker takes an absolute path only.
[[ $project != *:* ]] || refuse "$project holds a colon, which docker cannot mount"
[[ $name =~ ^[A-Za-z0-9][A-Za-z0-9_.-]*$ ]] ||
  refuse "--name=$name: letters, digits, _ . and -, a letter or digit first"
[[ $workdir == image || $workdir == /* ]] ||
  refuse "--workdir=$workdir: give an absolute path in the container, or image"
if ! [[ $port =~ ^[1-9][0-9]{0,4}$ ]] || ((port > 65535)); then
  refuse "--port=$port: give a port, 1 to 65535"
fi
for mount in "${mounts[@]}"; do
  [[ $mount == /*:/* ]] || refuse "--mount=$mount: give /source:/target"
done
for variable in "${variables[@]}"; do
  [[ $variable =~ ^[A-Za-z_][A-Za-z0-9_]*= ]] ||
    refuse "--env=$variable: give NAME=VALUE"
done
if $hostnet && $ported; then
  echo "note: --port=$port is ignored: with the host's network the runtime" \
    "listens on port $inside; give --no-host-network to map it" >&2
fi
$dry || command -v docker >/dev/null ||
  refuse 'no docker on PATH; on a TPU VM: sudo apt-get install docker.io'

show() {
  printf '%q ' "$@" | sed 's/ $/\n/'
}

command=(docker run --rm)
if $tpu; then
  command+=(--privileged)
fi
if $gpu; then
  command+=(--gpus=all)
fi
if $hostnet; then
  command+=(--net=host)
  local_port=$inside
else
  command+=(-p "127.0.0.1:$port:$inside")
  local_port=$port
fi
if $tpu; then
  command+=(-v /dev:/dev -v /run:/run -v /var/lib/cloud:/var/lib/cloud
    -e TPU_NAME=local)
fi
command+=(-v "$project:/workspace/tunix")
for mount in "${mounts[@]}"; do
  command+=(-v "$mount")
done
for variable in "${variables[@]}"; do
  command+=(-e "$variable")
done
command+=(--name "$name")
if [[ $workdir != image ]]; then
  command+=(-w "$workdir")
fi
command+=("$image")

# No container of that name is no error; a docker that does not answer is one
# that `docker run` reports. --rm frees the name a moment after the stop.
stop=(docker stop "$name")
if $dry; then
  show "${stop[@]}"
  show "${command[@]}"
else
  "${stop[@]}" >/dev/null 2>&1 || true
  for ((tries = 0; tries < 20; tries++)); do
    docker container inspect "$name" >/dev/null 2>&1 || break
    sleep 0.5
  done
  ((tries < 20)) || refuse "a stopped container still has the name $name and may" \
    "hold files of yours; docker rm $name, or choose another --name"
fi

{
  echo 'the runtime prints a URL with a token; whatever port that URL names:'
  echo "  on your own machine:" \
    "ssh -N -L $local_port:127.0.0.1:$local_port $ssh_host"
  echo "  in Colab, Connect to a local runtime:" \
    "http://127.0.0.1:$local_port/?token=TOKEN"
  if grep -qs '^name = "tunix-multi-turn"' "$project/pyproject.toml"; then
    device=
    if $tpu; then device=tpu,; fi
    if $gpu; then device=gpu,; fi
    echo "  in a notebook of your own, once a container:" \
      "%pip install -q -e '/workspace/tunix[${device}client,serve]'" \
      "/workspace/tunix/packages/*"
  fi
  echo '  first cell: %load_ext autoreload, and on the next line %autoreload 2'
} >&2
$dry || exec "${command[@]}"
