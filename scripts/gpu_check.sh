#!/usr/bin/env bash
# Runs all that needs a GPU, in under 25 minutes: the tests marked gpu, then the benchmark, which writes docs/results/gpu.md.
#
#   scripts/gpu_check.sh [DIRECTORY]     DIRECTORY: on the NVMe drive; a temporary one by default
#   DRY_RUN=1 scripts/gpu_check.sh       on the CPU, tiny models: tries this script and nothing else; writes no results
#
# The machine needs Python 3.10 or newer with torch (CUDA build) and triton. Without a network bring these wheels, and name
# their folder in WHEELS (pip download -d DIR PACKAGE... on a machine with the same Python and platform):
#   pydantic, pydantic-core, annotated-types, typing-inspection, typing-extensions, PyYAML, rich, markdown-it-py, mdurl, pygments,
#   psutil, numpy, pytest, pytest-timeout, iniconfig, packaging, pluggy
# and a C compiler for the I/O engine; without one the Python engine runs, and its figures are lower.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
if [ -n "${WHEELS:-}" ]; then
  "$python" -m pip install -q --no-index --find-links "$WHEELS" pydantic PyYAML rich psutil numpy pytest pytest-timeout
fi
for package in torch pydantic yaml rich psutil pytest pytest_timeout; do
  "$python" -c "import $package" || { echo "$package is missing: see the list of wheels in $0"; exit 1; }
done
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" SSDTRAIN_POISON=1
if [ -n "${DRY_RUN:-}" ]; then
  SSDTRAIN_GPU_DRY_RUN=1 "$python" -m pytest -q -m gpu tests/gpu
  exec "$python" -m benchmarks.gpu --device cpu --dry-run
fi
"$python" -c "import torch; assert torch.cuda.is_available(), 'no CUDA device: DRY_RUN=1 tries this script without one'"
"$python" setup.py -q build_ext --inplace || echo "the C extensions were not built: the Python engine runs"
# At most 8 minutes of tests and 14 of the benchmark, which begins no new row after 12.
failed=0
timeout 480 "$python" -m pytest -q -m gpu --timeout=240 tests/gpu tests/codecs/test_kernels.py tests/storage || failed=1
unset SSDTRAIN_POISON
timeout 900 "$python" -m benchmarks.gpu --json --minutes 12 ${1:+--directory "$1"} --write docs/results/gpu.md || failed=1
exit $failed
