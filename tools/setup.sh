# Sourced by tools/test and tools/tour: brings a bare Debian or Ubuntu machine to where Trefoil builds.
#
# Each need is tested by what it provides (a command, a pkg-config module, a Python module), so a
# machine that has everything is left alone and nothing touches the network. What is missing comes
# from apt-get (as root or with sudo) and, for Python, from PyPI into the private environment .venv.

set -Eeuo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
started=$SECONDS
jobs=$(nproc 2>/dev/null || echo 2)
results=$root/build/results

say() { printf '\n== [%d:%02d] %s\n' $(((SECONDS - started) / 60)) $(((SECONDS - started) % 60)) "$*"; }
die() { printf '%s: %s\n' "${0##*/}" "$*" >&2; exit 2; }

# have KIND:NAME: whether the machine provides it.
have() {
  case $1 in
    cmd:*) command -v "${1#cmd:}" >/dev/null 2>&1 ;;
    pc:*) command -v pkg-config >/dev/null 2>&1 && pkg-config --exists "${1#pc:}" ;;
    venv:*) command -v python3 >/dev/null 2>&1 && python3 -c 'import venv, ensurepip' 2>/dev/null ;;
    file:*) compgen -G "${1#file:}" >/dev/null ;;
    *) return 1 ;;
  esac
}

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

# need_packages "KIND:NAME=package" ...: installs the packages whose need is not met.
need_packages() {
  local need missing=()
  for need in "$@"; do
    have "${need%%=*}" || missing+=("${need#*=}")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  say "installing with apt-get: ${missing[*]}"
  command -v apt-get >/dev/null || die "needs ${missing[*]}, and this machine has no apt-get"
  [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null ||
    die "needs root to install; run: sudo apt-get install ${missing[*]}"
  mkdir -p "$results"
  local log=$results/apt.log
  if ! { as_root apt-get update &&
         as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
           "${missing[@]}"; } >"$log" 2>&1 </dev/null; then
    tail -n 15 "$log" >&2
    die "apt-get could not install ${missing[*]} (all of its output: $log)"
  fi
}

build_needs=(
  cmd:cc=gcc cmd:c++=g++ file:/usr/include/stdio.h=libc6-dev cmd:cmake=cmake cmd:ninja=ninja-build
  cmd:pkg-config=pkg-config pc:popt=libpopt-dev pc:jansson=libjansson-dev pc:libzip=libzip-dev
  pc:libxxhash=libxxhash-dev pc:simgrid=libsimgrid-dev cmd:python3=python3 venv:=python3-venv cmd:git=git)
test_needs=(
  file:/usr/include/boost/context/fiber.hpp=libboost-context-dev
  cmd:mpirun=openmpi-bin cmd:mpicc=libopenmpi-dev cmd:clang=clang)

# libFuzzer and the sanitizers' runtimes of clang are a package of their own on newer releases.
need_fuzzer() {
  local major
  major=$(clang --version 2>/dev/null | sed -n 's/.*version \([0-9]*\)\..*/\1/p' | head -n 1)
  [ -n "$major" ] || return 0
  have "file:$(clang -print-resource-dir)/lib/*/libclang_rt.fuzzer*.a" && return 0
  apt-cache show "libclang-rt-$major-dev" >/dev/null 2>&1 || return 0
  need_packages "file:/nowhere=libclang-rt-$major-dev"
}

# need_python FILE: the private environment .venv with the pinned requirements of tools/FILE.
need_python() {
  local file=$root/tools/$1 stamp
  [ -x .venv/bin/python ] && .venv/bin/python -c '' 2>/dev/null ||
    { say "making the private Python environment .venv"; python3 -m venv --clear .venv; }
  export VIRTUAL_ENV=$root/.venv PATH=$root/.venv/bin:$PATH
  stamp=$(cat tools/requirements*.txt | cksum | tr -d ' ')
  [ -e ".venv/.has-$1-$stamp" ] && return 0
  say "installing into .venv:" \
    "$(grep -hE '^[a-z]' "$file" tools/requirements-report.txt | sort -u | tr '\n' ' ')"
  python -m pip install --quiet --disable-pip-version-check -r "$file" </dev/null ||
    die "pip could not install tools/$1 into .venv"
  touch ".venv/.has-$1-$stamp" ".venv/.has-requirements-report.txt-$stamp" # every list includes it
}

# need_nvcc: what compiles the kernels, no GPU needed: the system's CUDA toolkit and NCCL, else NVIDIA's
# wheels in .venv. Without either the kernels are left out, and $results/kernels.skipped says why.
need_nvcc() {
  local want=. file=$root/tools/requirements-cuda.txt log=$results/pip-cuda.log stamp wheel
  if have cmd:nvcc || have file:/usr/local/cuda/bin/nvcc; then
    have file:/usr/include/nccl_device.h && return 0
    want=nccl
  fi
  stamp=.venv/.has-cuda-$want-$(cksum <"$file" | tr -d ' ')
  if [ ! -e "$stamp" ]; then
    say "installing into .venv: $(grep "^nvidia.*$want" "$file" | cut -d= -f1 | tr '\n' ' ')"
    mkdir -p "$results"
    if ! grep "^nvidia.*$want" "$file" | python -m pip install --disable-pip-version-check \
           -r /dev/stdin >"$log" 2>&1; then
      echo "the kernels: no nvcc or NCCL here, and pip could not install them: $(tail -n 1 "$log")" \
        >"$results/kernels.skipped"
      return 0
    fi
    touch "$stamp"
  fi
  # What compilers expect of a toolkit and the wheels lack.
  wheel=$(python -c 'import nvidia.cu13 as n; print(list(n.__path__)[0])' 2>/dev/null) || return 0
  [ -e "$wheel/lib64" ] || ln -s lib "$wheel/lib64"
  [ -e "$wheel/lib/libcudart.so" ] || ln -s libcudart.so.13 "$wheel/lib/libcudart.so"
}

# The presets need CMake 3.25; Ubuntu 22.04 has 3.22: then CMake comes from PyPI.
need_cmake() {
  local version
  version=$(cmake --version 2>/dev/null | sed -n '1s/[^0-9]*\([0-9.]*\).*/\1/p')
  [ "$(printf '%s\n' 3.25 "${version:-0}" | sort -V | head -n 1)" = 3.25 ] && return 0
  say "installing into .venv: cmake (the presets need 3.25, this machine has ${version:-none})"
  python -m pip install --quiet --disable-pip-version-check cmake==3.31.10 </dev/null ||
    die "pip could not install cmake into .venv"
  hash -r
}

# build PRESET [TARGET...]: configures and builds; quiet where nobody watches, the log on failure.
build() {
  local preset=$1 log=$results/build-$1.log
  shift
  mkdir -p "$results"
  if command -v ccache >/dev/null; then
    export CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache
  fi
  if ! cmake --preset "$preset" >"$log" 2>&1; then
    tail -n 30 "$log"
    return 1
  fi
  grep 'Trefoil:' "$log" || true
  local command=(cmake --build "build/$preset" -j "$jobs" ${1:+--target "$@"})
  if [ -t 1 ]; then "${command[@]}"; return; fi
  if ! "${command[@]}" >>"$log" 2>&1; then
    grep -E -B1 -A12 'FAILED|error:' "$log" | head -n 80 || tail -n 40 "$log"
    return 1
  fi
}
