#!/usr/bin/env bash
set -euo pipefail
USAGE="tpu/status.sh --env=FILE [--dry_run] [--SETTING=VALUE ...]

Prints the state of the queued resource and of the run on every worker."
# shellcheck source=tpu/common.sh
. "$(dirname "$0")/common.sh"
parse "$@"

DRY_STATES="ACTIVE"
queue_state
note "$NAME is $STATE"
if [ "$STATE" = ACTIVE ]; then
  job_state
  if [ -n "$ANSWERS" ]; then printf '%s\n' "$ANSWERS"; fi
  if [ -n "$JOB" ]; then note "the run: $JOB"; fi
fi
