#!/usr/bin/env bash
set -euo pipefail
USAGE="tpu/delete.sh --env=FILE [--dry_run] [--SETTING=VALUE ...]

Deletes the queued resource and its nodes, with whatever runs on them and their disks. Nothing to delete is no error."
# shellcheck source=tpu/common.sh
. "$(dirname "$0")/common.sh"
parse "$@"

DRY_STATES="ACTIVE"
queue_state
case $STATE in
  absent) note "$NAME does not exist; nothing to delete" ;;
  unknown) give_up "the state of $NAME is unknown" ;;
  *) delete_slice || give_up "$NAME was not deleted" ;;
esac
