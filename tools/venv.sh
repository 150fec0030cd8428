#!/bin/sh
# Make or update a virtual environment with Pippin in it.
#
#     tools/venv.sh FOLDER [EXTRA,...]
#
# What the machine lacks is said in one line, with the command that installs it.
# $PYTHON: the interpreter to use. $CUDA=1: take torch with CUDA (3 GB) instead of the CPU build.
set -eu
venv=$1
extras=${2:+[$2]}

say() {
    echo "pippin: $*" >&2
}

install_command() { # Debian's package name; the name elsewhere, where it differs; Homebrew's, where that differs too
    if command -v apt-get >/dev/null 2>&1; then
        echo "sudo apt-get install -y $1"
    elif command -v dnf >/dev/null 2>&1; then
        echo "sudo dnf install -y ${2:-$1}"
    elif command -v brew >/dev/null 2>&1; then
        echo "brew install ${3:-${2:-$1}}"
    else
        echo "your package manager (package ${2:-$1})"
    fi
}

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

choose_python() {
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    found=$(${PYTHON:-python3} --version 2>&1 | tail -n 1) || found="no ${PYTHON:-python3}"
    say "Python 3.11 or newer is needed, found: $found. Install it with: $(install_command python3.11 python@3.12)"
    exit 1
}

if [ ! -x "$venv/bin/python" ] || ! new_enough "$venv/bin/python"; then
    python=$(choose_python)
    if ! "$python" -c 'import venv, ensurepip' >/dev/null 2>&1; then
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        say "Python $version lacks its venv module. Install it with: $(install_command "python$version-venv" python3)"
        exit 1
    fi
    say "making $venv"
    "$python" -m venv --clear "$venv"
fi
for compiler in ${CXX:-c++ g++ clang++} ""; do
    command -v "${compiler:-none}" >/dev/null 2>&1 && break
done
[ -n "$compiler" ] ||
    say "note: no C++ compiler, so torch will do the work of the native kernels, at a fraction of their speed." \
        "Install one with: $(install_command g++ gcc-c++ gcc), then run this again"

constraint=
[ -n "${CUDA:-}" ] || constraint="--constraint tools/cpu-only.txt"
say "installing Pippin into $venv (the first time downloads about 250 MB, with all extras 500 MB)"
# shellcheck disable=SC2086  # the constraint is two words
if ! "$venv/bin/python" -m pip install -qq --disable-pip-version-check $constraint --editable ".$extras"; then
    say "the installation failed; the lines above say why. If they name an nvidia package, your package index has torch" \
        "only with CUDA: add PyTorch's CPU index (the 'CPU' line on pytorch.org/get-started) or run: make CUDA=1"
    exit 1
fi
case ",${2:-}," in
*,test,*) # without their dependencies: one of them is a build of torchvision that does not fit the CPU build of torch
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-deps --requirement tools/peers.txt ||
        say "note: laplace-torch could not be installed; the tests that compare with it will be skipped"
    ;;
esac
[ ! -f src/pippin/_native.log ] ||
    say "note: the native kernels could not be compiled (src/pippin/_native.log says why); torch will do their work"
