#!/usr/bin/env bash
# A component whose need is not there stops the configuration where it was asked for, and is named where it
# was not.
#
#   components_test.sh SOURCE_DIR SCRATCH_DIR
set -Eeuo pipefail
source=$1 scratch=$2
rm -rf "$scratch"
mkdir -p "$scratch"
lack=(-DCMAKE_DISABLE_FIND_PACKAGE_Boost=ON -DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON)
configure() { # configure NAME OPTIONS...: leaves NAME.log
  local name=$1
  shift
  rm -rf "$scratch/build"
  cmake -S "$source" -B "$scratch/build" -DTREFOIL_WITH_KERNELS=OFF "${lack[@]}" "$@" \
    >"$scratch/$name.log" 2>&1
}

configure auto
left_out='EMULATOR \(needs libboost-context-dev\).*MPI_TESTS \(needs'
grep -E "^-- Trefoil: left out: .*$left_out" "$scratch/auto.log"
grep -E '^-- Trefoil: built with: ' "$scratch/auto.log"
if grep -E '^-- Trefoil: (nothing is left out|built with: .*EMULATOR)' "$scratch/auto.log"; then exit 1; fi
for component in EMULATOR MPI_TESTS; do
  if configure on -DTREFOIL_WITH_$component=ON; then
    echo "TREFOIL_WITH_$component=ON is configured without it"
    exit 1
  fi
  grep "TREFOIL_WITH_$component is ON but" "$scratch/on.log"
done
# The presets that tests run in ask for everything that they test.
for component in CLI JSON TRACE_FILES SIMGRID EMULATOR MPI_TESTS PROTOCOL_TESTS PYTHON_TESTS KERNELS NCCL; do
  cmake --preset ci -N -S "$source" | grep -q "TREFOIL_WITH_$component=\"ON\"" ||
    { echo "the preset ci does not ask for $component"; exit 1; }
done
