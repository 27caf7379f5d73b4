#!/bin/bash
# make_user.sh: the user that serves, with a home for caches and in the groups that own the GPUs'
# device files. Their numbers differ from host to host: compose adds the host's own (group_add).
source "$(dirname "$0")/lib.sh"
user="$(version RUN_USER)"
for group in video render; do
    getent group "$group" > /dev/null || groupadd --system "$group"
done
useradd --create-home --uid "$(version RUN_UID)" --groups video,render "$user"
mkdir -p "/home/$user/.cache" /models
chown -R "$user" "/home/$user/.cache"
