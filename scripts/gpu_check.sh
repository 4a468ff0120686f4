#!/usr/bin/env bash
# Runs all that needs a GPU, in under 25 minutes: the tests marked gpu, then the benchmark, which writes docs/results/gpu.md.
#
#   scripts/gpu_check.sh [DIRECTORY]     DIRECTORY: on the NVMe drive; a temporary one by default
#   scripts/gpu_check.sh --dry-run       every step on the CPU with tiny models: tries this script, says nothing about a GPU; the
#                                        results go to a temporary file. DRY_RUN=1 is the same
#
# The machine needs Python 3.10 or newer with torch (CUDA build) and triton. Without a network bring these wheels (under 40 MiB
# together), and name their folder in WHEELS (pip download -d DIR PACKAGE... on a machine with the same Python and platform):
#   pydantic, pydantic-core, annotated-types, typing-inspection, typing-extensions, PyYAML, rich, markdown-it-py, mdurl, pygments,
#   psutil, numpy, pytest, pytest-timeout, iniconfig, packaging, pluggy
# and a C compiler for the I/O engine; without one the Python engine runs, and its figures are lower.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" = --dry-run ]; then
  DRY_RUN=1
  shift
fi
python=${PYTHON:-python3}
most=$((64 << 20)) # bytes of wheels that such machines take
if [ -n "${WHEELS:-}" ]; then
  bytes=$(du -sb "$WHEELS" | cut -f1)
  [ "$bytes" -le "$most" ] || { echo "the wheels in $WHEELS have $bytes bytes: at most $most"; exit 1; }
  "$python" -m pip install -q --no-index --find-links "$WHEELS" pydantic PyYAML rich psutil numpy pytest pytest-timeout
fi
for package in torch triton pydantic yaml rich psutil numpy pytest pytest_timeout; do
  [ -n "${DRY_RUN:-}" ] && [ "$package" = triton ] && continue # of CUDA builds alone
  "$python" -c "import $package" || { echo "$package is missing: see the list of wheels in $0"; exit 1; }
done
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" SSDTRAIN_POISON=1
if [ -n "${DRY_RUN:-}" ]; then
  export SSDTRAIN_GPU_DRY_RUN=1
  results=$(mktemp)
  benchmark=(--device cpu --dry-run)
else
  "$python" -c "import torch; assert torch.cuda.is_available(), 'no CUDA device: --dry-run tries this script without one'"
  results=docs/results/gpu.md
  benchmark=()
fi
began=$SECONDS
"$python" setup.py -q build_ext --inplace || echo "the C extensions were not built: the Python engine runs"
"$python" -m ssdtrain.cli doctor ${1:+"$1"} || echo "doctor found what does not work here: see above"
# At most 8 minutes of tests and 15 of the benchmark, which begins no new row after 12.
failed=0
timeout 480 "$python" -m pytest -q -m gpu --timeout=240 tests/gpu tests/test_device.py tests/codecs/test_kernels.py || failed=1
unset SSDTRAIN_POISON
timeout 900 "$python" -m benchmarks.gpu --json --minutes 12 "${benchmark[@]}" ${1:+--directory "$1"} --write "$results" || failed=1
# Of the benchmark, in its third line: "2026-11-22, NVIDIA H100, torch 2.11.0: ..."
grep -Eq "^[0-9]{4}-[0-9]{2}-[0-9]{2}, .+, torch " "$results" || { echo "$results has no line with date and hardware"; failed=1; }
if [ -n "${DRY_RUN:-}" ]; then rm -f "$results"; fi
echo "gpu_check: $((SECONDS - began)) s, $([ $failed = 0 ] && echo "all well" || echo "SOMETHING FAILED: see above")"
exit $failed
