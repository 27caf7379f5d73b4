#!/bin/bash
# serve_stage.sh WHEELS: the wheel into the image, a check of the result, the user that serves.
source "$(dirname "$0")/lib.sh"
"$DOCKER_DIR/install.sh" "$1"
"$DOCKER_DIR/self_test.sh"
"$DOCKER_DIR/make_user.sh"
