#!/bin/bash
# What the scripts share: strict mode, versions, the Python to use. Sourced, not run.
set -euo pipefail
DOCKER_DIR="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# version NAME: its value in versions.env.
version() {
    local line
    line="$(grep -E "^$1=" "$DOCKER_DIR/versions.env")" || {
        echo "versions.env: no $1" >&2
        return 1
    }
    echo "${line#*=}"
}

# The image's Python, or the one that a caller names.
PYTHON="${PYTHON:-python3}"
