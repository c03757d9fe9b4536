#!/usr/bin/env bash
# Makes .venv with this package and all that it and its tests need, once. Sourced by the other scripts.
#
# PYTHON   Python to make it with, 3.10 to 3.13 (default: python3.11, or python3 without that)
# VENV     an environment of your own, used as it is; nothing is installed
#
# pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, ...) apply.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -n ${VENV:-} ]]; then
  venv=$(cd "$VENV" && pwd)
else
  venv=$root/.venv
  # What was installed, kept once all of it is there.
  stamp=$venv/.installed
  wanted=("$root/requirements.txt" "$root/requirements-test.txt" "$root/pyproject.toml")
  if ! cmp -s <(cat "${wanted[@]}") "$stamp"; then
    python=${PYTHON:-$(command -v python3.11 || echo python3)}
    if ! "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' \
      2>/dev/null; then
      echo "error: '$python' is no Python 3.10 to 3.13; name one with PYTHON=..." >&2
      exit 2
    fi
    echo "setting up $venv (once; a few minutes)"
    rm -f "$stamp"
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
      --editable "$root[test]"
    cat "${wanted[@]}" >"$stamp"
  fi
fi
export PATH=$venv/bin:$PATH
