#!/bin/bash
# build_stage.sh SOURCE OUT [OPTIONS of compile_kernels.sh]: kernels, then the wheel with them.
source "$(dirname "$0")/lib.sh"
source_dir="$1" out="$2"
shift 2
"$DOCKER_DIR/compile_kernels.sh" "$source_dir" "$@"
"$DOCKER_DIR/build_wheel.sh" "$source_dir" "$out"
