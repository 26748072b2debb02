#!/usr/bin/env bash
# What is true on a GPU: correctness, a run, the learner, the engine, in at most
# BUDGET seconds (480).
#
#   benchmarks/gpu/run.sh OUT                 on a GPU, Qwen3-VL-2B's shape
#   benchmarks/gpu/run.sh OUT --tiny          the same program on a CPU
#
# Each part has a deadline and writes OUT/PART.json before the next begins; a part
# whose file is there is not repeated, nor OUT/cpu.npz, which any machine makes
# (benchmarks/gpu/correctness.py). OUT/PART.log holds its output. At the end
# `python benchmarks/gpu/page.py OUT` writes OUT/gpu.json and OUT/gpu.md; copy the
# page to docs/gpu.md. Packages that the machine lacks: benchmarks/gpu/wheels.sh.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:?the folder for results}
size=2b dtype=bfloat16 length=8192 images=8 width=1280 height=704
budget=${BUDGET:-480} patience=1 rounds=3 batches="64 1 16 128" prompt=1024
sampled=64 context=2048 steps=50
if [ "${2:-}" = --tiny ]; then
  export JAX_PLATFORMS=cpu TUNIX_BENCH_CPU=1
  patience=6  # Two loaded cores.
  size=tiny dtype=float32 length=256 images=2 width=96 height=64
  rounds=1 batches="2" prompt=64 sampled=8 context=128 steps=1
fi
mkdir -p "$out"
out=$(cd "$out" && pwd)
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export XLA_PYTHON_CLIENT_MEM_FRACTION=.9 JAX_COMPILATION_CACHE_DIR=$out/cache
python=${PYTHON:-python3}

part() { # part NAME SECONDS COMMAND...
  local name=$1 limit=$(($2 * patience)) begun=$SECONDS
  local left=$(($budget * patience - SECONDS))
  shift 2
  [ ! -s "$out/$name.json" ] || return 0
  if [ "$left" -lt 10 ]; then
    echo "$name: no time left"
    return 0
  fi
  timeout -k 5 $((limit < left ? limit : left)) "$@" >"$out/$name.log" 2>&1
  local status=$?
  echo "$name: status $status, $((SECONDS - begun)) s"
  [ "$status" = 0 ] || tail -n 5 "$out/$name.log"
}

trap '"$python" benchmarks/gpu/page.py "$out"' EXIT
part device 60 "$python" benchmarks/gpu/page.py --device "$out/device.json"

# (a) Correctness, and a run that learns: at once, since neither is timed, and
# without XLA's autotuner, which takes minutes for that many programs.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
if [ ! -s "$out/cpu.npz" ]; then
  JAX_PLATFORMS=cpu timeout $((200 * patience)) "$python" \
    benchmarks/gpu/correctness.py "$out/cpu.npz" >"$out/cpu.log" 2>&1 &
fi
[ "${JAX_PLATFORMS:-}" = cpu ] ||
  export XLA_FLAGS="--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
if [ ! -s "$out/correctness.json" ]; then
  part arrays 150 "$python" benchmarks/gpu/correctness.py "$out/device.npz" &
fi
if [ ! -s "$out/quickstart.json" ]; then
  rm -rf "$out/run"
  part quickstart 150 "$python" -m tunix.rl.multi_turn.train run.dir="$out/run" \
    run.name=quickstart steps="$steps" eval.episodes_per_task=10
  summary=$out/run/quickstart/summary.json
  ! grep -qs '"status": "completed"' "$summary" ||
    cp "$summary" "$out/quickstart.json"
fi
wait
part correctness 30 "$python" benchmarks/gpu/correctness.py \
  "$out/device.npz" --beside "$out/cpu.npz" --json "$out/correctness.json"
unset XLA_PYTHON_CLIENT_PREALLOCATE XLA_FLAGS

profile() { # profile NAME: the longest kernels of the part NAME.
  [ ! -d "$out/trace_$1" ] ||
    part "kernels_$1" 60 "$python" benchmarks/gpu/kernels.py "$out/trace_$1" \
      --json "$out/kernels_$1.json"
}

# (b) The learner beside torch, one at a time: a GPU holds one of them.
for side in ours torch; do
  part "learner_$side" 200 "$python" benchmarks/bench_learner.py --beside torch \
    --size "$size" --dtype "$dtype" --rows 4 --row-length "$length" \
    --images "$images" --width "$width" --height "$height" --rounds "$rounds" \
    --remat block --only "$side" --handover "$out/handover" \
    --profile "$out/trace_learner" --json "$out/learner_$side.json"
done
profile learner

# (c) The engine beside its bounds.
for batch in $batches; do
  part "engine_$batch" 90 "$python" benchmarks/bench_decode_bound.py \
    --brief --size "$size" --dtype "$dtype" --batch "$batch" --prompt "$prompt" \
    --sampled "$sampled" --context "$context" --rounds "$rounds" \
    --profile "$out/trace_engine_$batch" --json "$out/engine_$batch.json"
  profile "engine_$batch"
done
