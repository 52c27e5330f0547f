#!/usr/bin/env bash
set -euo pipefail
USAGE="tpu/launch.sh --env=FILE [--dry_run] [--SETTING=VALUE ...] -- FLAGS OF run.py

Starts 'python run.py --processes=auto FLAGS' in the background on every worker."
TAKES_ARGS=true
# shellcheck source=tpu/common.sh
. "$(dirname "$0")/common.sh"
parse "$@"
[ ${#ARGS[@]} -gt 0 ] || fail "no flags for run.py" "$SCRIPT" "-- --config=configs/NAME.py --workdir=/mnt/shared/runs/NAME ..."

start_run "${ARGS[@]}" || give_up "the run did not start on every worker of $NAME; tpu/stop.sh ends it where it did"
note "started on $WORKERS workers; tpu/logs.sh follows it"
