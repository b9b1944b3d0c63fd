#!/bin/bash
# check_doctor.sh TREFOIL FOLDER: what doctor says of other drivers, CUDA runtimes and NCCLs, which lie in
# FOLDER (other_cuda.c), and what check says where one of them answers first.
trefoil=$1 made=$2
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
failed=0
expect() { # WHAT PATTERN TEXT
  grep -Eq -- "$2" <<<"$3" || { echo "$1: expected /$2/ in:"; echo "$3"; failed=1; }
}

mkdir "$work"/{old,new}
ln -s "$made/libother_driver.so" "$work/old/libcuda.so.1"
ln -s "$made/libother_runtime12.so" "$work/old/libcudart.so.13"
ln -s "$made/libother_nccl_old.so" "$work/old/libnccl.so.2"
ln -s "$made/libother_driver13.so" "$work/new/libcuda.so.1"
ln -s "$made/libother_runtime13.so" "$work/new/libcudart.so.13"
ln -s "$made/libother_nccl_new.so" "$work/new/libnccl.so.2"

old=$(LD_LIBRARY_PATH=$work/old $trefoil doctor)
expect 'an old driver' '^ +absent +driver .*up to 12\.8; for GPUs, a driver that runs CUDA 13\.0' "$old"
if ! $trefoil doctor | grep -Eq '^ +ok +cuda runtime'; then # else the rule finds that one
  expect 'an old runtime' '^ +absent +cuda runtime +12\.8 .*; for GPUs, CUDA 13' "$old"
fi
expect 'an old NCCL' '^ +(absent +nccl +2\.28\.9 .*; for GPUs, 2\.30\.7|ok +nccl +2\.3)' "$old"
expect '/dev/shm' '/dev/shm .*used where groups on GPUs meet' "$old"

new=$(LD_LIBRARY_PATH=$work/new $trefoil doctor)
expect 'a new driver' '^ +ok +driver .*runs CUDA up to 13\.0' "$new"
expect 'a new runtime' '^ +ok +cuda runtime +13\.0 \(.*(other_runtime13|libcudart)' "$new"
expect 'a new NCCL' '^ +ok +nccl +2\.32\.3' "$new"

# check --gpu takes what doctor names
json=$(LD_LIBRARY_PATH=$work/new $trefoil check --gpu --library /nonexistent.so --cases 1 2>&1)
expect 'the same rule' 'cannot load /nonexistent.so' "$json"

# a framework's runtime answers first
first=$(LD_PRELOAD=$made/libother_runtime12.so $trefoil check --cases 1 2>&1)
expect 'another runtime' 'cudaLaunchHostFunc is answered by .*other_runtime12.so, which' "$first"
exit $failed
