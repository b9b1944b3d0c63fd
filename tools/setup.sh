# Sourced by tools/test and others: brings a bare Debian or Ubuntu machine to where Trefoil builds.
#
# Each need is tested by what the build does with it (a command, a program that compiles and links, a Python
# module), so a machine that has everything is left alone and nothing touches the network. What is missing
# comes from apt-get (as root or with sudo) and, for Python, from PyPI into the private environment .venv,
# with pinned hashes. need_... ends the script where that fails; want_... goes on, and left_out says without
# what.

set -Eeuo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
started=$SECONDS
jobs=$(nproc 2>/dev/null || echo 2)
results=$root/build/results

say() { printf '\n== [%d:%02d] %s\n' $(((SECONDS - started) / 60)) $(((SECONDS - started) % 60)) "$*"; }
die() { printf '%s: %s\n' "${0##*/}" "$*" >&2; exit 2; }

left_out=()
configure_options=() # for every preset

# compiles LANGUAGE SOURCE FLAGS...: whether such a program compiles and links.
compiles() {
  local language=$1 source=$2 compiler=cc
  shift 2
  [ "$language" = c ] || compiler=c++
  printf '%s\n' "$source" | "$compiler" -x "$language" - -o /dev/null "$@" >/dev/null 2>&1
}

# have KIND:NAME: whether the machine provides it.
have() {
  local name=${1#*:}
  case $1 in
    cmd:*) command -v "$name" >/dev/null 2>&1 ;;
    # shellcheck disable=SC2046
    pc:*) command -v pkg-config >/dev/null 2>&1 && pkg-config --exists "$name" &&
      compiles c 'int main(void) { return 0; }' $(pkg-config --cflags --libs "$name") ;;
    c:) compiles c '#include <stdio.h>
int main(void) { return puts("") < 0; }' ;;
    cxx:) compiles c++ '#include <vector>
int main() { return (int)std::vector<int>().size(); }' ;;
    boost-context:) compiles c++ '#include <boost/context/fiber.hpp>
#include <utility>
int main() {
  boost::context::fiber f([](boost::context::fiber &&back) { return std::move(back); });
  f = std::move(f).resume();
}' -lboost_context -pthread ;;
    mpi:) printf '#include <mpi.h>\nint main(void) { return MPI_Init(0, 0); }\n' |
      mpicc -x c - -o /dev/null >/dev/null 2>&1 ;;
    python-headers:*) compiles c '#include <Python.h>
int main(void) { return 0; }' -I "$(python3 -c 'import sysconfig as s; print(s.get_path("include"))' 2>&1)" ;;
    venv:*) command -v python3 >/dev/null 2>&1 && python3 -c 'import venv, ensurepip' 2>/dev/null ;;
    *) return 1 ;;
  esac
}

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

# missing_packages "KIND:NAME=package" ...: the packages whose need is not met.
missing_packages() {
  local need
  for need in "$@"; do
    have "${need%%=*}" || printf '%s\n' "${need#*=}"
  done | awk '!seen[$0]++'
}

# install_packages PACKAGE...: false, and why, where that does not work.
install_packages() {
  local log=$results/apt.log
  if ! command -v apt-get >/dev/null; then why="this machine has no apt-get"; return 1; fi
  if [ "$(id -u)" != 0 ] && ! sudo -n true 2>/dev/null; then
    why="installing needs root; run: sudo apt-get install $*"
    return 1
  fi
  say "installing with apt-get: $*"
  mkdir -p "$results"
  { as_root apt-get update && as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y \
      --no-install-recommends "$@"; } >"$log" 2>&1 </dev/null && return 0
  tail -n 5 "$log" >&2
  why="apt-get could not install $* (all of its output: $log)"
  return 1
}

# need_packages NEED...: installs the packages whose need is not met; the end where that fails.
need_packages() {
  local missing
  mapfile -t missing < <(missing_packages "$@")
  [ ${#missing[@]} -gt 0 ] || return 0
  install_packages "${missing[@]}" || die "needs ${missing[*]}, and $why. $without_help"
  mapfile -t missing < <(missing_packages "$@")
  [ ${#missing[@]} = 0 ] || die "${missing[*]}: installed, but no program that uses it compiles and links"
}

# want_packages NEED...: the same, and what cannot be installed is left out.
want_packages() {
  local missing package
  mapfile -t missing < <(missing_packages "$@")
  [ ${#missing[@]} -gt 0 ] || return 0
  install_packages "${missing[@]}" ||
    printf 'tools/%s: goes on without %s: %s\n' "${0##*/}" "${missing[*]}" "$why"
  while read -r package; do
    left_out+=("$package")
  done < <(missing_packages "$@")
}

without_help="docs/use_without_network.md says how to do without root, apt or network."
compiler_needs=(cmd:cc=gcc cmd:c++=g++ c:=libc6-dev cxx:=g++)
cli_needs=(cmd:pkg-config=pkg-config pc:popt=libpopt-dev pc:jansson=libjansson-dev)
more_needs=(cmd:git=git cmd:python3=python3 venv:=python3-venv cmd:cmake=cmake cmd:ninja=ninja-build
  python-headers:=python3-dev pc:libzip=libzip-dev pc:libxxhash=libxxhash-dev pc:simgrid=libsimgrid-dev)
test_needs=(boost-context:=libboost-context-dev cmd:mpirun=openmpi-bin mpi:=libopenmpi-dev cmd:clang=clang
  cmd:doxygen=doxygen)

# clang_runtime: the package with libFuzzer and the sanitizers' runtimes of clang, where it is one of its own.
clang_runtime() {
  local major
  major=$(clang --version 2>/dev/null | sed -n 's/.*version \([0-9]*\)\..*/\1/p' | head -n 1)
  [ -n "$major" ] || return 0
  printf 'int LLVMFuzzerTestOneInput(const char *d, unsigned long n) { return d && n > 9 ? 0 : 0; }' |
    clang -x c - -fsanitize=fuzzer,address,undefined -o /dev/null 2>/dev/null && return 0
  apt-cache show "libclang-rt-$major-dev" >/dev/null 2>&1 && echo "libclang-rt-$major-dev"
}

need_fuzzer() {
  local package
  package=$(clang_runtime) || true
  [ -z "$package" ] || install_packages "$package" || die "needs $package, and $why"
}

# names_of LIST...: the packages that tools/LIST.in names, and those of the lists that it includes.
names_of() {
  local files=("${@/#/tools/}")
  files=("${files[@]/%/.in}")
  mapfile -t -O ${#files[@]} files < <(sed -n 's/^-r /tools\//p' "${files[@]}")
  sed -n 's/^\([a-z][^ ;]*\).*/\1/p' "${files[@]}" | sort -u | tr '\n' ' '
}

# stamp_of LIST: the file that says that .venv has what tools/LIST.txt pins.
stamp_of() { echo ".venv/.has-$1-$(cksum <"tools/$1.txt" | tr -d ' ')"; }

have_venv() { [ -x .venv/bin/python ] && .venv/bin/python -c '' 2>/dev/null; }

# install_python LIST: tools/LIST.txt into .venv; false, and why, where that does not work.
install_python() {
  local stamp log=$results/pip-$1.log
  mkdir -p "$results"
  if ! have_venv; then
    say "making the private Python environment .venv"
    if ! python3 -m venv --clear .venv >"$log" 2>&1; then
      rm -rf .venv
      why="python3 cannot make a virtual environment: $(tail -n 1 "$log")"
      return 1
    fi
  fi
  export VIRTUAL_ENV=$root/.venv PATH=$root/.venv/bin:$PATH
  stamp=$(stamp_of "$1")
  [ ! -e "$stamp" ] || return 0
  say "installing into .venv: $(names_of "$1")"
  if ! python -m pip install --disable-pip-version-check --require-hashes --only-binary :all: \
         -r "tools/$1.txt" >"$log" 2>&1 </dev/null; then
    why="pip could not install tools/$1.txt: $(grep ERROR "$log" | tail -n 1) (all of its output: $log)"
    return 1
  fi
  touch "$stamp"
}

# need_python LIST: the private environment .venv with what tools/LIST.txt pins.
need_python() { install_python "$1" || die "$why. $without_help"; }

# want_python LIST MODULE...: the same, else the system's python3 if it has the modules; sets python_works.
want_python() {
  local list=$1 module modules=""
  shift
  python_works=1
  install_python "$list" && return 0
  for module in "$@"; do modules="$modules${modules:+, }$module"; done
  python3 -c "import $modules" 2>/dev/null && return 0
  python_works=0
  printf 'tools/%s: goes on without Python packages: %s\n' "${0##*/}" "$why"
  left_out+=("Python packages (${modules})")
}

# system_nvcc: the path of an nvcc of CUDA 13 or newer that is not .venv's.
system_nvcc() {
  local nvcc
  for nvcc in "${CUDACXX:-}" "$(command -v nvcc || true)" /usr/local/cuda/bin/nvcc; do
    [ -x "$nvcc" ] || continue
    "$nvcc" --version 2>/dev/null | grep -qE 'release (1[3-9]|[2-9][0-9])\.' && { echo "$nvcc"; return 0; }
  done
  return 1
}

# system_nccl: NCCL's headers of 2.30.7 or newer and a library to link with, outside of .venv.
system_nccl() {
  local prefix
  for prefix in ${NCCL_ROOT:-} ${NCCL_HOME:-} /usr /usr/local; do
    grep -hE '^#define NCCL_VERSION_CODE' "$prefix/include/nccl.h" 2>/dev/null |
      awk '$3 >= 23007 { new = 1 } END { exit !new }' || continue
    ! compiles c 'int main(void) { return 0; }' "-L$prefix/lib" -lnccl || return 0
  done
  return 1
}

# What compiles the kernels, no GPU needed, where the system has none: NVIDIA's wheels in .venv.
need_nvcc() {
  local wheel
  if ! CUDACXX=$(system_nvcc); then
    need_python requirements-cuda
    wheel=$(python -c 'import nvidia.cu13 as n; print(list(n.__path__)[0])')
    [ -e "$wheel/lib64" ] || ln -s lib "$wheel/lib64" # where nvcc looks, and the wheel has lib
    CUDACXX=$wheel/bin/nvcc
  fi
  export CUDACXX
  system_nccl || need_python requirements-nccl
}

# too_old COMMAND VERSION: whether the command is missing or older.
too_old() {
  local version
  version=$("$1" --version 2>/dev/null | sed -n '1s/[^0-9]*\([0-9.]*\).*/\1/p')
  [ "$(printf '%s\n' "$2" "${version:-0}" | sort -V | head -n 1)" != "$2" ]
}

# CMake for the presets (3.25; Ubuntu 22.04 has 3.22), and ninja: where the system's do not do, PyPI's; make
# does for ninja, too.
need_cmake() {
  if too_old cmake 3.25; then
    need_python requirements-build
  elif ! have cmd:ninja; then
    install_python requirements-build || have cmd:make || die "needs ninja or make: $why. $without_help"
  fi
  hash -r
}

# announce NEED... -- LIST...: what will be installed, before anything is.
announce() {
  local needs=() list packages python=()
  while [ $# -gt 0 ] && [ "$1" != -- ]; do needs+=("$1"); shift; done
  shift
  mapfile -t packages < <(missing_packages "${needs[@]}"; clang_runtime || true)
  for list in "$@"; do
    [ -e "$(stamp_of "$list")" ] || python+=("$list")
  done
  [ ${#packages[@]} -gt 0 ] || [ ${#python[@]} -gt 0 ] || { echo "nothing is to be installed"; return 0; }
  echo "will be installed, because this machine lacks it:"
  [ ${#packages[@]} = 0 ] || printf '  with apt-get, and what they need: %s\n' "${packages[*]}"
  [ ${#python[@]} = 0 ] || echo "  from PyPI into .venv, and what they need: $(names_of "${python[@]}")"
  if printf '%s\n' "${packages[@]}" | grep -qxE 'clang|cmake'; then
    echo "  then, depending on the versions: clang's runtime for libFuzzer; cmake and ninja from PyPI"
  fi
}

# tell_left_out: one line, last, where something is.
tell_left_out() {
  local IFS=,
  [ ${#left_out[@]} = 0 ] || echo "left out, because it is not here and cannot be installed: ${left_out[*]}"
}

# build PRESET [TARGET...]: configures and builds; quiet where nobody watches, the log on failure.
build() {
  local preset=$1 log=$results/build-$1.log
  shift
  mkdir -p "$results"
  if command -v ccache >/dev/null; then
    export CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache
  fi
  local generator=()
  have cmd:ninja || generator=(-G "Unix Makefiles")
  if ! cmake --preset "$preset" "${generator[@]}" "${configure_options[@]}" >"$log" 2>&1; then
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
