#!/bin/sh
# The conversions of our cuda_fp16.h, cuda_bf16.h and cuda_fp8.h are those of CUDA's headers, bit by bit.
#   test_small_floats.sh CC CXX TESTS_HOST CUDA_INCLUDE
cuda=$4
if ! [ -f "$cuda/cuda_fp8.h" ] ||
  ! grep -q 'define CUDART_VERSION *1[3-9]' "$cuda/cuda_runtime_api.h"; then
  echo "skipped: no CUDA toolkit of version 13 at $cuda"
  exit 77
fi
cc=$1 cxx=$2 here=$3
scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
dump() { # NAME INCLUDE...
  name=$1
  shift
  "$cxx" -std=c++17 -O1 -ffp-contract=off "$@" -I"$here" \
    "$here/small_floats_dump.cpp" -o "$scratch/$name" &&
    "$scratch/$name" > "$scratch/$name.txt"
}
dump ours -I"$here/../../host/include" || exit 1
if ! echo '#include <cuda_fp16.h>' |
  "$cxx" -x c++ -fsyntax-only -I"$cuda" -I"$cuda/cccl" - 2> "$scratch/log"; then
  echo "skipped: the toolkit's cuda_fp16.h does not compile for the host: $(head -1 "$scratch/log")"
  exit 77
fi
dump theirs -I"$cuda" -I"$cuda/cccl" || exit 1
diff "$scratch/ours.txt" "$scratch/theirs.txt" || exit 1
for include in "$here/../../host/include" "$cuda"; do # what C has of them, with either
  "$cc" -std=c99 -fsyntax-only -I"$include" -x c - << 'END' || exit 1
#include <cuda_fp8.h>
__half_raw h;
__nv_bfloat16_raw b;
__half2_raw h2;
__nv_bfloat162_raw b2;
int narrow(float x);
int narrow(float x) {
  h = __nv_cvt_fp8_to_halfraw(__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3), __NV_E4M3);
  return h.x + b.x + h2.y + b2.y;
}
END
done
echo "ok: $(wc -l < "$scratch/ours.txt") conversions are those of $cuda"
