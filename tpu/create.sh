#!/usr/bin/env bash
set -euo pipefail
USAGE="tpu/create.sh --env=FILE [--wait] [--dry_run] [--SETTING=VALUE ...]

Asks for the slice (or SLICES of them) through a queued resource. --wait returns when it is there. What exists already is left."
WAIT=false OWN_FLAGS="wait"
# shellcheck source=tpu/common.sh
. "$(dirname "$0")/common.sh"
parse "$@"

DRY_STATES="absent WAITING_FOR_RESOURCES ACTIVE"
queue_state
case $STATE in
  absent) create_slice ;;
  unknown) give_up "the state of $NAME is unknown" ;;
  *) note "$NAME exists already and is $STATE" ;;
esac
if [ "$WAIT" = true ]; then wait_active; fi
