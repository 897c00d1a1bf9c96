#!/usr/bin/env bash
# Check and measure nlgrpo on a GPU machine that may have no network and no installation of nlgrpo.
#
#   scripts/gpu.sh prepare     where there is a network: download and unpack the wheels that GPU machines lack
#   scripts/gpu.sh check       does everything work? at most 5 minutes
#   scripts/gpu.sh speed       how fast is everything? at most 5 minutes
#   scripts/gpu.sh all         both
#
# Options: --rehearse (every step on a CPU at tiny sizes), --only STEP,.., --out FOLDER, --commit NAME, --list. The
# variable PYTHON names the Python.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; fi
fi
PYTHONPATH="scripts${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" -m gpu_kit "$@"
