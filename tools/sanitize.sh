#!/bin/sh
# Build the native kernels with native/sanitize/check.cpp under AddressSanitizer with UndefinedBehaviorSanitizer, then
# under ThreadSanitizer, and run it. Usage: tools/sanitize.sh [folder for the builds] [address|thread] [instruction sets]
# Without instruction sets: all that compiler and machine know; that takes minutes, most of them for the generic kernels.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-$(mktemp -d)}
wanted=${3:-}
cxx=${CXX:-c++}
common="-std=c++17 -O1 -g -pthread -fno-math-errno -ffp-contract=off -fno-omit-frame-pointer -Wall -Wextra"
avx2="-mavx2 -mfma -mf16c"
avx512="$avx2 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni"

variant() { # name, its flag in /proc/cpuinfo, flags of the compiler: compiled if compiler and machine know them
    name=$1 upper=$(echo "$1" | tr a-z A-Z) needs=$2
    shift 2
    # what this machine cannot run would be compiled for nothing, for minutes
    [ -z "$needs" ] || [ ! -r /proc/cpuinfo ] || grep -qw "$needs" /proc/cpuinfo || return 0
    checks=$sanitizer
    case " ${wanted:-$name} generic " in
    *" $name "*) ;;
    *) return 0 ;;
    esac
    # the library asks for the generic kernels in any case; unless they are wanted, without checks
    [ -z "$wanted" ] || [ "$name" != generic ] || case " $wanted " in *" generic "*) ;; *) checks= ;; esac
    $cxx $* -fsyntax-only -x c++ /dev/null 2>/dev/null || return 0
    $cxx $common $checks $* -DPIPPIN_ISA_$upper=1 -c "$root/native/kernels.cpp" -o "$work/kernels_$name.o"
    have="$have -DPIPPIN_HAVE_$upper=1"
}

for kind in ${2:-address thread}; do
    work=$folder/$kind
    mkdir -p "$work"
    sanitizer="-fsanitize=$kind"
    # a finding ends the run; shifts and conversions that the standard leaves open are findings too
    [ "$kind" = address ] && sanitizer="-fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all"
    have=""
    case $(uname -m) in
    x86_64)
        variant avx512bf16 avx512_bf16 $avx512 -mavx512bf16
        variant avx512vnni avx512_vnni $avx512
        variant avx2 avx2 $avx2
        ;;
    aarch64 | arm64) variant neon asimddp -march=armv8.2-a+dotprod+fp16 ;;
    esac
    variant generic ''
    for source in "$root"/native/*.cpp "$root/native/sanitize/check.cpp"; do
        name=$(basename "$source" .cpp)
        [ "$name" = kernels ] || $cxx $common $sanitizer $have -c "$source" -o "$work/$name.o"
    done
    $cxx $sanitizer -pthread "$work"/*.o -o "$work/check"
    echo "$kind:"
    TSAN_OPTIONS=halt_on_error=1 UBSAN_OPTIONS=print_stacktrace=1 "$work/check" $(echo $wanted | tr ' ' ,)
done
