#!/usr/bin/env bash
set -euo pipefail
USAGE="tpu/stop.sh --env=FILE [--wait] [--dry_run] [--SETTING=VALUE ...]

Sends SIGTERM to the run on every worker: it finishes its update, saves and ends. --wait returns when it has ended. A tpu/resume.sh
that runs elsewhere starts it again: end that first."
WAIT=false OWN_FLAGS="wait"
# shellcheck source=tpu/common.sh
. "$(dirname "$0")/common.sh"
parse "$@"

stop_run TERM || give_up "the signal did not reach every worker of $NAME"
while [ "$WAIT" = true ]; do
  job_state
  case $JOB in
    silent) give_up "a worker of $NAME does not answer" ;;
    none | finished | bad_input) break ;;
    ended) case $ANSWERS in *running*) ;; *) break ;; esac ;;
  esac
  if [ "$DRY_RUN" = true ]; then break; fi
  nap
done
note "stopped"
