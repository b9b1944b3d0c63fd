#!/bin/sh
# Programs that nvcc compiled, with the legacy default stream and with one per thread, run on the host
# runtime: kernel_program.cu.
#   test_nvcc_programs.sh LIBTREFOIL_HOST TESTS_HOST
for nvcc in "$CUDACXX" "$CUDA_HOME/bin/nvcc" "$(command -v nvcc)" /usr/local/cuda/bin/nvcc; do
  [ -n "$nvcc" ] && [ -x "$nvcc" ] && break
  nvcc=
done
if [ -z "$nvcc" ]; then
  echo "skipped: no nvcc"
  exit 77
fi
host=$1 source=$2/kernel_program.cu
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
toolkit=$(dirname "$(dirname "$nvcc")")
export LD_LIBRARY_PATH="$toolkit/lib64:$toolkit/lib:$LD_LIBRARY_PATH"
echo 'int main() { return 0; }' > "$dir/empty.cu"
if ! "$nvcc" -cudart shared -o "$dir/empty" "$dir/empty.cu" || ! "$dir/empty"; then
  echo "skipped: $nvcc has no shared CUDA runtime"
  exit 77
fi
build() { # NAME [OPTION...]
  name=$1
  shift
  "$nvcc" -arch=sm_90 -O0 -cudart shared "$@" -o "$dir/$name" "$source" || exit 1
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
