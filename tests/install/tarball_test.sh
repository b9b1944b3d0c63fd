#!/usr/bin/env bash
# Packs the build, unpacks it in another folder, and runs the command there with an empty environment.
#
#   tarball_test.sh SOURCE_DIR BUILD_DIR SCRATCH_DIR
set -Eeuo pipefail
source=$1 build=$2 scratch=$3
rm -rf "$scratch"
mkdir -p "$scratch/packed" "$scratch/moved/to a place"
cmake -DBUILD="$build" -DNAME=trefoil -DOUT="$scratch/packed" -P "$source/tools/cmake/tarball.cmake"
cd "$scratch/moved/to a place"
tar xzf "$scratch/packed/trefoil.tar.gz"
rm -r "$scratch/packed"
here=$PWD/trefoil
libs=$(dirname "$(find "$here" -name libtrefoil.so.0)")

cd /
env -i "$here/bin/trefoil" check --cases 100 | tee "$scratch/check.txt"
grep -q '100 cases agree' "$scratch/check.txt"

# All that is not the C library's or the compiler's comes from the folder, whoever needs it.
for file in "$here/bin/trefoil" "$libs"/*.so.0; do
  elsewhere=$(env -i /usr/bin/ldd "$file" | grep -F '=>' | grep -vF "$here" |
    grep -vE '^\s*lib(c|m|dl|rt|pthread|resolv|stdc\+\+|gcc_s|nccl)\.so' || true)
  if [ -n "$elsewhere" ]; then
    printf '%s takes from elsewhere:\n%s\n' "$file" "$elsewhere"
    exit 1
  fi
done
[ -n "$(find "$here" -name 'libjansson.so.*')" ] || { echo "libjansson was not packed"; exit 1; }
echo "unpacked and used in $here"
