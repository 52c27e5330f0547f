#!/usr/bin/env bash
set -euo pipefail
USAGE="tpu/setup.sh --env=FILE [--dry_run] [--SETTING=VALUE ...]

Copies this checkout to every worker and installs it there, with the shared folder NFS mounted. The packages that worker 0 got are
kept in tpu/NAME.lock and are those of every later installation; remove the file to take newer ones."
# shellcheck source=tpu/common.sh
. "$(dirname "$0")/common.sh"
parse "$@"

pack
setup_workers || give_up "the project could not be installed on every worker of $NAME"
note "installed on $WORKERS workers"
