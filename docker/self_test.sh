#!/bin/bash
# self_test.sh [PROGRAM OPTIONS]: what can be known of an image without a GPU, when it is built.
source "$(dirname "$0")/lib.sh"
cd /
"$PYTHON" "$DOCKER_DIR/self_test.py" "$@"
