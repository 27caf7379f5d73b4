#!/bin/bash
# install_build_tools.sh VENV: an environment beside the image's own packages with what builds the
# wheel and compiles the kernels. Only the build stage has it.
source "$(dirname "$0")/lib.sh"
venv="$1"
"$PYTHON" -m venv --system-site-packages "$venv"
"$venv/bin/python" -m pip install --no-cache-dir --no-deps \
    "build==$(version BUILD_VERSION)" \
    "pyproject_hooks>=1.2" \
    "packaging>=24" \
    "setuptools==$(version SETUPTOOLS_VERSION)" \
    "flydsl==$(version FLYDSL_VERSION)" \
    "msgpack==$(version MSGPACK_VERSION)"
