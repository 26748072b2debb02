#!/bin/sh
# Makes a virtual environment: venv.sh DIRECTORY
#
# Uses $PYTHON, or the first Python >= 3.11 found. Needs python3-venv, or a pip
# of that Python's own; says so where both are missing. Does nothing when the
# environment is already complete. A new one gets pip 26.3: the pip that comes
# with Python 3.11 takes twice as long to install the packages.
set -eu
dir=$1
minimum="3, 11"

fail() {
  printf 'error: %s\n' "$@" >&2
  exit 1
}

new_enough() {
  "$1" -c "import sys; sys.exit(sys.version_info < ($minimum))" 2>/dev/null
}

if [ -x "$dir/bin/python" ] && new_enough "$dir/bin/python" &&
  "$dir/bin/python" -m pip --version >/dev/null 2>&1; then
  exit 0
fi

python=${PYTHON:-}
if [ -n "$python" ]; then
  command -v "$python" >/dev/null 2>&1 || fail "PYTHON=$python is not a command"
  new_enough "$python" ||
    fail "PYTHON=$python is $("$python" -V 2>&1); Python 3.11 or newer is needed"
else
  for candidate in python3 python3.11 python3.12 python3.13 python3.14 python; do
    if command -v "$candidate" >/dev/null 2>&1 && new_enough "$candidate"; then
      python=$candidate
      break
    fi
  done
fi
if [ -z "$python" ]; then
  found=$(python3 -V 2>&1 || echo "no python3")
  fail "Python 3.11 or newer is needed, found: $found" \
    "install one (Debian 12: apt-get install python3 python3-venv), or name" \
    "one: make PYTHON=/path/to/python3.11 ..."
fi

echo "making $dir with $("$python" -V 2>&1)"
if "$python" -c "import ensurepip, venv" 2>/dev/null; then
  "$python" -m venv "$dir"
elif "$python" -c "import venv" 2>/dev/null &&
  "$python" -m pip --python "$python" --version >/dev/null 2>&1; then
  # Debian splits ensurepip off; a pip outside can fill the environment.
  "$python" -m venv --without-pip "$dir"
  "$python" -m pip --python "$dir/bin/python" install -qq pip
elif command -v virtualenv >/dev/null 2>&1; then
  virtualenv --quiet --python "$python" "$dir"
else
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  fail "$python cannot make virtual environments (no ensurepip)" \
    "as root: apt-get install python$version-venv   (or python3-venv)" \
    "or activate an environment of your own and run make again"
fi

"$dir/bin/python" -m pip install -qq --disable-pip-version-check --no-compile \
  pip==26.3 ||
  echo "note: pip 26.3 could not be installed; using $("$dir/bin/python" -m pip --version)"
