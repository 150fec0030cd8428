#!/bin/sh
# Run the tests of the native kernels over a library that was built under AddressSanitizer and
# UndefinedBehaviorSanitizer: a finding ends them. The package's own library is not touched.
# Usage: [PYTHON=python] tools/sanitize_tests.sh [arguments of pytest; default: tests/native and the packed weights]
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
folder=$root/build/sanitized
export CXX="${CXX:-g++}"
checks="-fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all -fno-omit-frame-pointer -g -O1"
mkdir -p "$folder"
rm -rf "$folder/pippin"
cp -r "$root/src/pippin" "$folder/pippin"
rm -f "$folder/pippin/_native.so" "$folder/pippin/_native.log"
(cd "$root" && CXXFLAGS="$checks" "$python" setup.py -q build_ext --build-lib "$folder")
[ -f "$folder/pippin/_native.so" ] || {
    cat "$folder/pippin/_native.log" >&2
    exit 1
}
cd "$root"
[ $# -gt 0 ] || set -- tests/native tests/nn/quantization/test_packed.py
# Python itself is not instrumented, so the run-time library must come first; what Python leaks is not asked for.
# Left out: tests that build a library or a program of their own, and those that bound the address space, of which the
# sanitizer takes terabytes.
LD_PRELOAD="$($CXX -print-file-name=libasan.so) $($CXX -print-file-name=libubsan.so) $($CXX -print-file-name=libstdc++.so)" \
    ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc \
    PYTHONPATH="$folder:$root/tools" \
    "$python" -m pytest -p no:cacheprovider -n 0 -q --capture=sys \
    --ignore tests/native/test_build.py --ignore tests/native/test_check.py --ignore tests/native/test_simd.py \
    --deselect tests/native/test_threads.py::test_too_few_threads_in_the_system_is_an_error_and_leaves_one \
    --deselect tests/native/test_threads.py::test_a_bandwidth_of_threads_that_do_not_start_is_an_error "$@"
