#!/usr/bin/env bash
# Makes .venv with everything in requirements.txt, once. Sourced by the other scripts.
#
# PYTHON   interpreter to use (default python3.11)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
stamp=$root/.venv/.installed
if ! cmp -s "$root/requirements.txt" "$stamp" 2>/dev/null; then
  echo "setting up $root/.venv (once; a few minutes)"
  "${PYTHON:-python3.11}" -m venv "$root/.venv"
  "$root/.venv/bin/pip" install --quiet --disable-pip-version-check -r "$root/requirements.txt"
  cp "$root/requirements.txt" "$stamp"
fi
export PATH=$root/.venv/bin:$PATH
