#!/bin/bash
# build_wheel.sh SOURCE OUT: the wheel of rocm-msa, with the code objects that lie in SOURCE.
source "$(dirname "$0")/lib.sh"
"$PYTHON" -m build --wheel --no-isolation --outdir "$2" "$1"
