#!/usr/bin/env bash
# What tools/setup.sh finds, says and goes on without, on a machine whose apt-get fails and whose libraries
# are pretended away.
#
#   setup_test.sh SOURCE_DIR SCRATCH_DIR
set -Eeuo pipefail
source=$1 scratch=$2
rm -rf "$scratch"
mkdir -p "$scratch/bin" "$scratch/tree/tools"
cp "$source"/tools/{setup.sh,requirements*} "$scratch/tree/tools/"

# bin: compilers that lack one library, an apt-get that fails, a sudo that asks for nothing.
for compiler in cc c++; do
  real=$(command -v $compiler)
  cat >"$scratch/bin/$compiler" <<EOT
#!/bin/sh
for a; do
  if [ "\$a" = "\$LACKS" ]; then echo "cannot find \$a" >&2; exit 1; fi
done
exec "$real" "\$@"
EOT
done
cat >"$scratch/bin/apt-get" <<EOT
#!/bin/sh
echo "apt-get: no network" >&2
echo "\$@" >>"$scratch/apt.calls"
exit 100
EOT
printf '#!/bin/sh\n[ "$*" != "-n true" ] || exit "${SUDO_FAILS:-0}"\nshift\nexec "$@"\n' >"$scratch/bin/sudo"
chmod +x "$scratch"/bin/*
export PATH=$scratch/bin:$PATH LACKS=

failed=0
expect() { # expect WHAT TEXT PATTERN
  if ! grep -qE -- "$3" <<<"$2"; then
    printf 'FAILED: %s: no %s in:\n%s\n' "$1" "$3" "$2"
    failed=1
  fi
}
# sh LACKS COMMANDS: in a shell that has sourced setup.sh; output and exit code.
in_setup() {
  LACKS=$1 bash -c 'source "$0/tools/setup.sh"; eval "$1"' "$scratch/tree" "$2" 2>&1 &&
    echo "code 0" || echo "code $?"
}

boost='missing_packages boost-context:=libboost-context-dev'
expect "headers of Boost without its library" "$(in_setup -lboost_context "$boost")" '^libboost-context-dev$'
if printf '#include <boost/context/fiber.hpp>\n' | c++ -x c++ -fsyntax-only - 2>/dev/null; then
  expect "Boost as it is here" "$(in_setup '' "$boost; echo end")" '^end$'
fi
expect "a .pc file without its library" "$(in_setup -ljansson 'missing_packages pc:jansson=libjansson-dev')" \
  '^libjansson-dev$'

text=$(in_setup -lpopt 'want_packages pc:popt=libpopt-dev; tell_left_out')
expect "going on" "$text" 'goes on without libpopt-dev: apt-get could not install'
expect "going on" "$text" '^left out, because .*: libpopt-dev$'
expect "going on" "$text" '^code 0$'
text=$(in_setup -lpopt 'need_packages pc:popt=libpopt-dev; echo not reached')
expect "not going on" "$text" 'needs libpopt-dev, and apt-get could not install .*use_without_network.md'
expect "not going on" "$text" '^code 2$'
text=$(in_setup '' 'need_packages c:=libc6-dev; want_packages cxx:=g++; tell_left_out; echo end')
expect "nothing missing" "$text" '^end$'
if grep -qE 'installing|left out' <<<"$text"; then echo "FAILED: $text"; failed=1; fi

text=$(in_setup -lpopt 'announce pc:popt=libpopt-dev c:=libc6-dev -- requirements')
expect "announcing" "$text" 'with apt-get, and what they need: libpopt-dev$'
expect "announcing" "$text" 'into .venv, and what they need: .*matplotlib==.*pytest=='
calls=$(grep -c . "$scratch/apt.calls")
in_setup -lpopt 'announce pc:popt=libpopt-dev -- requirements' >/dev/null
[ "$(grep -c . "$scratch/apt.calls")" = "$calls" ] || { echo "FAILED: announcing installs"; failed=1; }

if [ "$(id -u)" != 0 ]; then
  text=$(SUDO_FAILS=1 in_setup -lpopt 'need_packages pc:popt=libpopt-dev')
  expect "no root" "$text" 'needs root; run: sudo apt-get install libpopt-dev'
fi
[ "$failed" = 0 ] && echo "setup says what it does"
exit $failed
