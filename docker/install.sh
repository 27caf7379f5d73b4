#!/bin/bash
# install.sh FOLDER: the wheel of rocm-msa in it, into the image's Python. Its requirements are the
# image's own packages and are not touched: one that is missing or too old ends the build.
source "$(dirname "$0")/lib.sh"
"$PYTHON" -m pip install --no-cache-dir --no-deps --no-index "$1"/rocm_msa-*.whl
"$PYTHON" "$DOCKER_DIR/check_requirements.py" rocm-msa
