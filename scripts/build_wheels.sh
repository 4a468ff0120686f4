#!/usr/bin/env bash
# Builds the source archive and, from it, the wheel; then loads the wheel's C extensions with each Python that is there.
#
#   scripts/build_wheels.sh [DIRECTORY]      default: dist
#   ARCH=aarch64 compiles for another machine by ARCH-linux-gnu-gcc; nothing is loaded then
#   PYTHON=...   builds; needs setuptools and pip      PYTHONS="python3.10 python3.13"   check; default: 3.10 to 3.13
#
# A wheel for a package index has to be built where glibc is old, in an image such as quay.io/pypa/manylinux_2_28_x86_64, and
# passed through `auditwheel repair`. One wheel serves all Python versions, since the extensions use the limited API.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "${1:-dist}" && cd "${1:-dist}" && pwd)
python=${PYTHON:-python3}

"$python" -c "import sys, setuptools.build_meta as build; build.build_sdist(sys.argv[1])" "$out" >"$out/sdist.log" 2>&1 ||
    { cat "$out/sdist.log"; exit 1; }
archive=$(ls -t "$out"/ssdtrain-*.tar.gz | head -1)
if [ -n "${ARCH:-}" ]; then
    # The headers are those of this machine's Python: the limited API is the same on every 64-bit Linux.
    export CC="$ARCH-linux-gnu-gcc" LDSHARED="$ARCH-linux-gnu-gcc -shared" _PYTHON_HOST_PLATFORM="linux-$ARCH"
    PYTHONS=" "
fi
"$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$out" "$archive"
wheel=$(ls -t "$out"/ssdtrain-*.whl | head -1)
rm "$out/sdist.log"

unpacked=$(mktemp -d)
trap 'rm -r "$unpacked"' EXIT
"$python" -m zipfile -e "$wheel" "$unpacked"
extensions=$(find "$unpacked" -name '*.so' | sort)
[ -n "$extensions" ] || echo "no extension was built (no C compiler?): the wheel has the Python implementations only"
[ -z "${ARCH:-}" ] || for file in $extensions; do
    readelf -h "$file" | grep -qi "machine:.*$ARCH" || { echo "$file is not for $ARCH"; exit 1; }
done
for each in ${PYTHONS:-python3.10 python3.11 python3.12 python3.13}; do
    "$each" -c "" 2>/dev/null || { echo "$each: not here"; continue; }
    for file in $extensions; do
        "$each" -c "import ctypes, os, sys; ctypes.PyDLL(sys.argv[1], os.RTLD_NOW)" "$file"  # finds every symbol
    done
    [ -z "$extensions" ] || echo "$each: $(echo "$extensions" | wc -l) extensions load"
done
echo "$archive"
echo "$wheel"
