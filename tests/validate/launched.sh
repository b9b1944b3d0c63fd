#!/bin/bash
# launched.sh TREFOIL RANKS ARGUMENTS...: as many processes, told by RANK and WORLD_SIZE who they are; the
# exit code is rank 0's.
program=$1 ranks=$2
shift 2
export WORLD_SIZE=$ranks MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + $$ % 20000))
for ((r = 1; r < ranks; r++)); do
  RANK=$r "$program" "$@" &
done
RANK=0 "$program" "$@"
code=$?
wait
exit $code
