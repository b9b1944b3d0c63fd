#!/bin/bash
# [LAUNCHER=slurm] launched.sh TREFOIL RANKS ARGUMENTS...: as many processes, told who they are by RANK and
# WORLD_SIZE, or as srun tells its tasks; the exit code is rank 0's.
program=$1 ranks=$2
shift 2
if [ "$LAUNCHER" = slurm ]; then
  export SLURM_JOB_ID=$$ SLURM_STEP_ID=0 SLURM_NTASKS=$ranks SLURM_STEP_NUM_TASKS=$ranks SLURM_NNODES=1
  export SLURM_NODEID=0 SLURM_TASKS_PER_NODE=$ranks
  start() { SLURM_PROCID=$1 SLURM_LOCALID=$1 PMIX_RANK=$1 "${@:2}"; }
else
  export WORLD_SIZE=$ranks MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + $$ % 20000))
  start() { RANK=$1 "${@:2}"; }
fi
for ((r = 1; r < ranks; r++)); do
  start "$r" "$program" "$@" &
done
start 0 "$program" "$@"
code=$?
wait
exit $code
