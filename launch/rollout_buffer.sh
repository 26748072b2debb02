#!/usr/bin/env bash
# A run that trains on what a rollout buffer's generator plays, on this machine:
# fetches the model, gives the tasks their ids, serves the buffer, trains.
#
#   launch/rollout_buffer.sh --model Qwen/Qwen3-0.6B --tasks tasks.jsonl \
#       --task-type math -- environment.name=gsm8k learner.steps=100
#
# --model is a directory, or a repository that hf downloads into --dir (default:
# rollout); checkpoints are read as they are, without a conversion. --tasks are
# lines of JSON as the generator of --task-type (default: math) takes them.
# What follows -- are arguments of tunix.rl.multi_turn.train. --port (default:
# 8889) is the buffer's. --dry-run prints one command a line, each word quoted
# for a shell, and runs none.
set -euo pipefail

model='' tasks='' type=math dir=rollout port=8889 dry=false
python=${PYTHON:-python3}
room=tunix.rl.multi_turn.trajectory_collector

usage() {
  sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "$0"
}

refuse() {
  echo "error: $1" >&2
  exit 2
}

while (($#)); do
  case $1 in
    --model | --tasks | --task-type | --dir | --port)
      (($# > 1)) || refuse "$1 needs a value"
      option=${1#--}
      printf -v "${option#task-}" '%s' "$2"
      shift 2
      ;;
    --dry-run) dry=true; shift ;;
    -h | --help) usage; exit 0 ;;
    --) shift; break ;;
    *) refuse "$1 is no option; arguments of train come after --" ;;
  esac
done
for option in model tasks; do
  [[ -n ${!option} ]] || refuse "--$option is missing"
done
[[ -f $tasks ]] || refuse "--tasks $tasks: no such file"

run() {
  if $dry; then
    printf '%q ' "$@" | sed 's/ $/\n/'
  else
    "$@"
  fi
}

run mkdir -p "$dir"
if [[ ! -d $model ]]; then
  run hf download "$model" --local-dir "$dir/${model##*/}"
  model=$dir/${model##*/}
fi
run "$python" -m "$room.agent_rollout.assign_instance_id" \
  --input_path "$tasks" --task_type "$type" --output_path "$dir/tasks.jsonl"

buffer=("$python" -m "$room.buffer_service"
  --dir "$dir/buffer" --port "$port" --input-roots "$dir,$model")
if $dry; then
  run "${buffer[@]}"
else
  # Its first line says that clients can connect.
  exec 3< <(exec "${buffer[@]}")
  service=$!
  trap 'kill "$service" 2>/dev/null' EXIT
  read -r line <&3 || refuse "the rollout buffer did not start"
  echo "$line"
fi
run "$python" -m tunix.rl.multi_turn.train rollout.via=buffer \
  "buffer.url=http://127.0.0.1:$port" "buffer.task_type=$type" \
  "buffer.input_file=$dir/tasks.jsonl" "policy=$model" "$@"
