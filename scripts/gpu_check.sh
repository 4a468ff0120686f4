#!/usr/bin/env bash
# Runs all that needs a GPU, in steps of which each has a time limit, writes what it found when it ends, and fails alone:
#
#   scripts/gpu_check.sh [--dry-run] [STEP...]
#
# Steps, in this order: install, doctor, streams, training, kernels (tests marked gpu), frameworks (their own code on one rank, of
# those that are installed; MEGATRON_LM_DIR: a checkout of Megatron-LM, for its pretrain_gpt.py), model_state (its times; beside
# ZeRO-Offload where DeepSpeed is installed), bench (the table of docs/results/gpu.md).
# Without a name: all. One call takes at most LIMIT seconds (540) and begins no step that has ended, unless it is named; call it
# again for the rest: `bench` goes on with the rows that are missing. About 20 minutes in all.
#
#   DIRECTORY   for spill files, on the NVMe drive; by default a temporary one
#   OUT         gets log.txt, status.txt, gpu.md and rows.jsonl, some MiB together; by default out/gpu_check (of a dry run: -dry)
#   STATE       what calls hand on to later ones; by default build/gpu_check (of a dry run: -dry). With other sources, on another GPU
#               or after a dry run it begins again; delete it to do so with the same
#   WHEELS      a folder of wheels, where there is no network (at most 64 MiB); only what is missing is taken from it
#   --dry-run   every step on the CPU with tiny models: tries this script, says nothing about a GPU. DRY_RUN=1 is the same
#
# Exit status: 75 while a step of this call is left for the next one; else 1 if any step, of this call or an earlier one, has failed;
# else 0. "all well" is said only if every step there is has ended well.
#
# The machine needs Python 3.10 or newer with torch (CUDA build) and triton. Wheels (pip download -d DIR PACKAGE... on a machine with
# the same Python and platform), under 40 MiB together:
#   pydantic, pydantic-core, annotated-types, typing-inspection, typing-extensions, PyYAML, rich, markdown-it-py, mdurl, pygments,
#   psutil, numpy, pytest, pytest-timeout, iniconfig, packaging, pluggy, sortedcontainers, hypothesis, setuptools
# The C extensions are built unless they are here (ssdtrain/*/*.abi3.so of any Python from 3.10 on x86 Linux serve); without them and
# without a C compiler the Python engine runs, and its figures are lower.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
if [ "${1:-}" = --dry-run ]; then
  DRY_RUN=1
  shift
fi
python=${PYTHON:-python3}
out=${OUT:-out/gpu_check${DRY_RUN:+-dry}}
state=${STATE:-build/gpu_check${DRY_RUN:+-dry}}
limit=${LIMIT:-540}
mkdir -p "$out" "$state"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}:$PWD/build/gpu_site"
export CUBLAS_WORKSPACE_CONFIG=:4096:8 # the same run twice has the same bits
benchmark=()
if [ -n "${DRY_RUN:-}" ]; then
  export SSDTRAIN_GPU_DRY_RUN=1
  benchmark=(--device cpu --dry-run)
fi

needed="typing_extensions:typing-extensions annotated_types:annotated-types pydantic_core:pydantic-core \
typing_inspection:typing-inspection pydantic:pydantic yaml:PyYAML mdurl:mdurl markdown_it:markdown-it-py pygments:pygments rich:rich \
psutil:psutil numpy:numpy iniconfig:iniconfig packaging:packaging pluggy:pluggy pytest:pytest pytest_timeout:pytest-timeout \
sortedcontainers:sortedcontainers hypothesis:hypothesis setuptools:setuptools"

install() {
  local bytes missing=()
  for pair in $needed; do "$python" -c "import ${pair%%:*}" 2>/dev/null || missing+=("${pair##*:}"); done
  if [ ${#missing[@]} -gt 0 ]; then
    [ -n "${WHEELS:-}" ] || { echo "missing: ${missing[*]}; set WHEELS to a folder of wheels"; return 1; }
    bytes=$(du -sb "$WHEELS" | cut -f1)
    [ "$bytes" -le $((64 << 20)) ] || { echo "the wheels in $WHEELS have $bytes bytes: at most 64 MiB"; return 1; }
    # In a folder of its own: a system's Python refuses packages, and torch keeps those that it came with.
    "$python" -m pip install -q --no-index --no-deps --find-links "$WHEELS" --target build/gpu_site "${missing[@]}" || return 1
  fi
  "$python" -c "import ssdtrain.storage._iopool, ssdtrain.storage._records, ssdtrain.device._streams, ssdtrain.codecs._native" 2>/dev/null ||
    "$python" setup.py -q build_ext --inplace || echo "the C extensions were not built: the Python engine runs"
  [ -n "${DRY_RUN:-}" ] || "$python" -c "import torch, triton; assert torch.cuda.is_available(), 'no CUDA device: see --dry-run'
print(torch.__version__, triton.__version__, torch.cuda.get_device_name(0))"
}

doctor() { "$python" -m ssdtrain doctor ${DIRECTORY:+"$DIRECTORY"}; }

tests() { SSDTRAIN_POISON=1 "$python" -m pytest -q -m gpu -p no:cacheprovider --timeout="${TEST_LIMIT:-120}" "$@"; }
streams() { tests tests/gpu/test_streams.py tests/gpu/test_exact.py tests/test_device.py; }
training() { tests tests/gpu/test_training.py tests/gpu/test_features.py; }
kernels() { TEST_LIMIT=240 tests tests/codecs/test_kernels.py; }

frameworks() {
  local rows=()
  there() { "$python" -c "import $1" 2>/dev/null; }
  if there transformers && there accelerate; then rows+=(tests/gpu/test_hf_trainer.py); fi
  if there transformers && there lightning; then rows+=(tests/gpu/test_other_trainers.py); fi
  if [ -z "${DRY_RUN:-}" ]; then # on a CPU these are tests like others
    if there deepspeed; then rows+=(tests/deepspeed/test_matrix.py); fi
    if there megatron.core; then rows+=(tests/megatron/test_matrix.py tests/megatron/test_pretrain_on_device.py); fi
  fi
  [ ${#rows[@]} = 0 ] || SSDTRAIN_TEST_DEVICE=cuda SSDTRAIN_POISON=1 "$python" -m pytest -q -p no:cacheprovider -m "not long" "${rows[@]}"
}

model_state() {
  local parts=state,plan sizes="--device cuda --layers 12 --hidden 2048 --heads 16 --sequence 1024 --batch 8 --pairs 4 --burst 4"
  if [ -n "${DRY_RUN:-}" ]; then
    parts=state sizes="--pairs 1"
  elif "$python" -c "import deepspeed" 2>/dev/null; then
    parts=zero,$parts
  fi
  # shellcheck disable=SC2086
  "$python" -m benchmarks.protrain $sizes --parts $parts
}

bench() {
  "$python" -m benchmarks.gpu --rows "$state/rows.jsonl" --seconds "$1" "${benchmark[@]}" ${DIRECTORY:+--directory "$DIRECTORY"} \
    --write "$state/gpu.md"
}

# A step that is ended by its own limit has failed; one that the end of the call cuts off is not done.
declare -A most=([install]=150 [doctor]=60 [streams]=180 [training]=420 [kernels]=270 [frameworks]=300 [model_state]=240 [bench]=480)
if [ "${1:-}" = --step ]; then # by this script, below `timeout`
  "$2" "${3:-}"
  exit
fi

steps=(install doctor streams training kernels frameworks model_state bench)
asked=("${@:-${steps[@]}}")
for step in "${asked[@]}"; do
  [ -n "${most[$step]:-}" ] || { echo "no step is called $step: ${steps[*]}"; exit 2; }
done

# What ended with other sources, on another GPU or without one says nothing here. Rows of the benchmark know what they are of.
sources=$("$python" benchmarks/gpu/sources.py) && [ -n "$sources" ] || { echo "$python does not run: set PYTHON"; exit 1; }
subject="$sources ${DRY_RUN:+dry run }$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1)"
if [ "$(cat "$state/subject" 2>/dev/null)" != "$subject" ]; then
  rm -f "$state"/*.status "$state"/*.log "$state/steps.txt" "$state/gpu.md"
  echo "$subject" >"$state/subject"
fi
for step in "$@"; do rm -f "$state/$step.status"; done # what is named runs again

began=$SECONDS
for step in "${asked[@]}"; do
  [ ! -e "$state/$step.status" ] || continue
  left=$((limit - (SECONDS - began)))
  own=$((most[$step] < ${MOST:-600} ? most[$step] : ${MOST:-600})) # MOST: to try this script
  seconds=$((own < left ? own : left))
  [ "$seconds" -ge $((own < 60 ? own : 60)) ] || continue
  first=$SECONDS
  timeout -k 10 "$seconds" bash "$PWD/scripts/gpu_check.sh" ${DRY_RUN:+--dry-run} --step "$step" $((seconds - 10)) >>"$state/$step.log" 2>&1
  status=$?
  echo "$step: status $status, $((SECONDS - first)) s" | tee -a "$state/steps.txt"
  tail -n 15 "$state/$step.log" | cut -c1-200
  # It has more to do, or the end of the call has cut it off: it has not ended.
  if [ "$status" = 75 ] || { [ "$status" = 124 ] && [ "$seconds" -lt "$own" ]; }; then continue; fi
  echo "$status" >"$state/$step.status"
done

failed=() left_over=() never=()
for step in "${steps[@]}"; do
  if [ -e "$state/$step.status" ]; then
    [ "$(cat "$state/$step.status")" = 0 ] || failed+=("$step")
  elif [[ " ${asked[*]} " == *" $step "* ]]; then
    left_over+=("$step")
  else
    never+=("$step")
  fi
done

cp -f "$state/steps.txt" "$out/status.txt" 2>/dev/null
for log in "$state"/*.log; do
  [ -e "$log" ] && printf '\n==== %s\n' "$(basename "$log")" && tail -c 2000000 "$log"
done >"$out/log.txt"
rm -f "$out/gpu.md"
for file in gpu.md rows.jsonl; do if [ -e "$state/$file" ]; then tail -c 15000000 "$state/$file" >"$out/$file"; fi; done
verdict="all well"
[ $((${#left_over[@]} + ${#never[@]})) = 0 ] || verdict="no step has failed so far"
[ ${#failed[@]} = 0 ] || verdict="SOMETHING FAILED (${failed[*]}): see $out/log.txt"
echo "gpu_check: $((SECONDS - began)) s, $verdict"
[ ${#never[@]} = 0 ] || echo "not run: ${never[*]}"
if [ ${#left_over[@]} -gt 0 ]; then
  echo "left for the next call: ${left_over[*]}"
  exit 75
fi
exit $((${#failed[@]} > 0))
