#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Is this GPU machine in order? GPU tests, a short profile, a short preset; needs no network.
#   usage: scripts/gpu_check.sh [SITE] [tests] [profile] [preset]
# SITE: folder with vLLM 0.32.0 and its packages, where they are not installed ("-" for none).
# Without names all three run. Results go to $OUT (default: gpu-check). Environment: PYTHON.
# The last line is JSON; the exit code is 0 if everything that ran was right.
set -uo pipefail
cd "$(dirname "$0")/.."
SITE=${1:--}
[ $# -gt 0 ] && shift
PARTS=${*:-tests profile preset}
PYTHON=${PYTHON:-python3}
OUT=${OUT:-gpu-check}
mkdir -p "$OUT"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
[ "$SITE" != - ] && PYTHONPATH="$(cd "$SITE" && pwd):$PYTHONPATH"
"$PYTHON" -c "import flashinfer" 2>/dev/null || export VLLM_USE_FLASHINFER_SAMPLER=0

DEVICES=$("$PYTHON" -c "from spexis.bench.machine import num_gpus; print(num_gpus())") || exit 1
echo "devices: $DEVICES"
if [ "$DEVICES" -eq 0 ]; then
  echo '{"name": "gpu-check", "ok": false, "devices": 0, "failed": ["no CUDA device here"]}'
  exit 1
fi
"$PYTHON" -c "import torch, vllm; print('torch', torch.__version__, 'vllm', vllm.__version__)" ||
  exit 1
FAILED=

part() { # NAME COMMAND...
  local name=$1
  shift
  echo "== $name: $*"
  "$@" || FAILED="$FAILED\"$name\", "
}

for name in $PARTS; do
  case $name in
    tests) part tests "$PYTHON" -m pytest tests/gpu -q ;;
    profile)
      part profile "$PYTHON" -m spexis.cli profile l8 --layers 4 --batches 1 16 --contexts 128 \
        --capture-sizes 1 16 --output "$OUT/profile-l8-4.json"
      ;;
    preset)
      if [ "$DEVICES" -ge 2 ]; then
        part preset "$PYTHON" -m spexis.cli bench --preset gpu2 --dims tiny --p2p on \
          --batches 1 16 --p 0.785 --capture-sizes 1 2 4 8 16 --output "$OUT/gpu2-tiny.json"
        "$PYTHON" -c "import json, sys; sys.exit(not json.load(open(sys.argv[1]))['complete'])" \
          "$OUT/gpu2-tiny.json" || FAILED="$FAILED\"preset incomplete\", "
      else
        echo "== preset: left out, it needs two devices"
      fi
      ;;
    *)
      echo "no part $name: tests, profile, preset" >&2
      exit 2
      ;;
  esac
done
[ -z "$FAILED" ] && OK=true || OK=false
echo "{\"name\": \"gpu-check\", \"ok\": $OK, \"devices\": $DEVICES, \"failed\": [${FAILED%, }]}"
$OK
