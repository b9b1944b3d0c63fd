#!/bin/sh
# Programs that nvcc compiled, with the legacy default stream and with one per thread, run on the host
# runtime: kernel_program.cu.
#   test_nvcc_programs.sh LIBTREFOIL_HOST TESTS_HOST [NVCC LIBCUDART]
host=$1 source=$2/kernel_program.cu nvcc=$3 runtime=$4
if [ -z "$runtime" ]; then
  echo "skipped: no nvcc with a shared CUDA runtime"
  exit 77
fi
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
folder=$(dirname "$runtime")
export LD_LIBRARY_PATH="$folder:$LD_LIBRARY_PATH"
# nvcc takes no name that ends in .so.13 (PyPI's wheels have no other); the linker does.
build() { # NAME [OPTION...]
  name=$1
  shift
  "$nvcc" -arch=sm_90 -O0 -cudart none "$@" -o "$dir/$name" "$source" -Xlinker "$runtime" || exit 1
}
build legacy &
build per_thread --default-stream per-thread &
wait
for name in legacy per_thread; do
  for launcher in plain launcher; do
    LD_PRELOAD=$host "$dir/$name" $launcher || {
      echo "failed: the program built as '$name', run with '$launcher'"
      exit 1
    }
  done
done
echo "ok: $nvcc"
