#!/bin/sh
# run_fuzz.sh SOURCE_DIR WORK_DIR TARGET SECONDS: builds tests/fuzz/fuzz_TARGET.c with clang's
# libFuzzer, ASan and UBSan, and runs it on the corpus for so long. Exit 77: no libFuzzer here.
set -eu
source=$1 work=$2 target=$3 seconds=$4
mkdir -p "$work"
cd "$work"
skip() {
  echo "skipped: $1"
  exit 77
}
clang=$(command -v clang || command -v clang-14 || true)
[ -n "$clang" ] || skip "clang is not installed"
flags="-g -O1 -std=gnu11 -D_GNU_SOURCE -DTREFOIL_HAVE_TRACE_FILES -DTREFOIL_HAVE_JSON"
sanitize="-fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all"
echo 'int LLVMFuzzerTestOneInput(const char *d, unsigned long n) { return d && n > 9 ? 0 : 0; }' > probe.c
$clang $sanitize probe.c -o probe 2> probe.err || skip "clang has no libFuzzer runtime (libclang-rt-dev)"
libs=$(pkg-config --cflags --libs libzip jansson popt) || skip "libzip, jansson or popt is missing"

cmake -DOUT="$work/presets_embedded.c" -DDIR="$source/models" -DKINDS=Clusters,Moe,Costs \
  -P "$source/models/embed.cmake"
plan="error regular_file shape routing npy trace trace_generate trace_describe trace_import"
plan="$plan trace_file trace_save"
files="$source/tests/fuzz/fuzz_$target.c presets_embedded.c"
for f in preset preset_text hf_config cost_record; do files="$files $source/models/$f.c"; done
for f in $plan; do files="$files $source/plan/$f.c"; done
if [ "$target" = hang ]; then
  flags="$flags -DTREFOIL_VERSION=\"fuzz\""
  for f in hang cli_args cli_output cli_signals; do files="$files $source/cli/$f.c"; done
fi
# shellcheck disable=SC2086
$clang $flags $sanitize -I"$source" -I"$source/include" $files -o "fuzz_$target" $libs -lm

mkdir -p "corpus_$target" "found_$target"
"./fuzz_$target" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -max_len=16384 \
  -print_final_stats=1 -artifact_prefix="found_$target/" \
  "corpus_$target" "$source/tests/fuzz/corpus/$target" > log 2>&1 || {
  tail -40 log
  exit 1
}
grep -E "^stat::(number_of_executed_units|peak_rss_mb)|^#.*DONE" log
