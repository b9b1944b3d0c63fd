#!/usr/bin/env bash
# Installs the build into a scratch prefix, moves it, and builds and runs two consumers from there,
# with CMake (shared and static libraries) and with pkg-config.
#
#   install_test.sh BUILD_DIR SCRATCH_DIR HAS_EP(0|1)
set -Eeuo pipefail
build=$1 scratch=$2 has_ep=$3
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
rm -rf "$scratch"
mkdir -p "$scratch"
unset LD_LIBRARY_PATH PKG_CONFIG_PATH CMAKE_PREFIX_PATH

trap 'tail -n 30 "$scratch"/*.log' ERR
cmake --install "$build" --prefix "$scratch/first" >"$scratch/install.log"
mv "$scratch/first" "$scratch/prefix"
prefix=$scratch/prefix
libs=$(dirname "$(find "$prefix" -name libtrefoil.so.0)")

consumers=(layout)
[ "$has_ep" = 0 ] || consumers+=(step)
echo "-- CMake package"
cmake -S "$here/consumer_cmake" -B "$scratch/cmake" -DCMAKE_PREFIX_PATH="$prefix" >"$scratch/cmake.log" 2>&1
for c in "${consumers[@]}"; do
  for kind in "" _static; do
    cmake --build "$scratch/cmake" --target "$c$kind" >>"$scratch/cmake.log" 2>&1
    "$scratch/cmake/$c$kind"
  done
done

echo "-- pkg-config"
export PKG_CONFIG_PATH=$libs/pkgconfig
link() { # link NAME MODULE: shared (found by its rpath) and static (no libtrefoil*.so left in it)
  # shellcheck disable=SC2046
  cc -std=c11 "$here/$1_consumer.c" -o "$scratch/$1" $(pkg-config --cflags --libs "$2") "-Wl,-rpath,$libs"
  "$scratch/$1"
}
link layout trefoil
[ "$has_ep" = 0 ] || link step nccl_ep_cpu

echo "-- the installed command"
if [ -x "$prefix/bin/trefoil" ]; then
  "$prefix/bin/trefoil" --version
  "$prefix/bin/trefoil" --help >"$scratch/help.txt"
  grep -q check "$scratch/help.txt"
fi
[ -f "$libs/libnccl-rma-trefoil.so" ] # the network (docs/net.md)
# NCCL is the user's own.
if ldd "$libs"/*.so.0 "$libs"/libnccl-rma-trefoil.so | grep 'not found' | grep -v 'libnccl\.so'; then
  echo "an installed library does not find what it needs"
  exit 1
fi
echo "installed and used from $prefix"
