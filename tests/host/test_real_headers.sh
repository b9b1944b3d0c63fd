#!/bin/sh
# The same sources compile against the real headers, where a toolkit and NCCL >= 2.27 are installed.
#   test_real_headers.sh CC CXX TESTS_HOST CUDA_INCLUDE [NCCL_INCLUDE]
cuda=$4 nccl=$5
if [ ! -f "$cuda/cuda_runtime.h" ]; then
  echo "skipped: no CUDA toolkit at $cuda"
  exit 77
fi
if ! grep -q 'define CUDART_VERSION *1[3-9]' "$cuda/cuda_runtime_api.h"; then
  echo "skipped: the toolkit at $cuda is older than CUDA 13"
  exit 77
fi
cc=$1 cxx=$2 here=$3
paths="-I$cuda ${nccl:+-I$nccl} -I$here -I$here/.. -I$here/../../host"
facts() { # COMPILER LANGUAGE STANDARD [OPTION]
  echo '#include "abi_facts.h"' | $1 -x "$2" -std="$3" $4 -fsyntax-only $paths -
}
facts "$cc" c c11 -DFACTS_WITHOUT_NCCL || exit 1
facts "$cxx" c++ c++11 -DFACTS_WITHOUT_NCCL || exit 1
if ! echo '#include <nccl.h>' | $cc -fsyntax-only $paths -x c - 2>/dev/null; then
  echo "ok for CUDA; no NCCL header was found"
  exit 0
fi
facts "$cxx" c++ c++17 || exit 1
for language in c c++; do
  $cc -fsyntax-only $paths -x "$language" "$here/host_user_program.c" || exit 1
done
for name in capture pool graph query per_thread; do
  $cc -fsyntax-only -Wno-deprecated-declarations $paths -D_GNU_SOURCE "$here/test_host_$name.c" || exit 1
done
echo "ok: CUDA and NCCL headers of $cuda"
