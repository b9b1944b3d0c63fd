#!/bin/sh
# Ranks of several NVLink domains meet without a shared file: /dev/shm can only be read here. Ranks of one
# domain say that they cannot. Seed 6: cases of at most 2 tokens. Arguments: trefoil, the library, the host
# runtime.
set -eu
if [ "${1:-}" != inside ]; then
  unshare -m true 2> /dev/null || { echo "skipped: needs root, to mount a file system"; exit 77; }
  exec unshare -m "$0" inside "$@"
fi
shift
mount -t tmpfs -o ro none /dev/shm
run() {
  "$1" check --gpu-cases --modes ll --ranks 2 --ranks-per-node "$4" --cases 2 --seed 6 \
    --library "$2" --nccl "$3" --cuda "$3" 2>&1
}
run "$@" 1 | grep "2 cases agree"
if near=$(run "$@" 2); then
  echo "one domain did not need /dev/shm: $near"
  exit 1
fi
echo "$near" | grep "/dev/shm/nccl_ep"
