#!/usr/bin/env bash
set -euo pipefail
USAGE="tpu/resume.sh --env=FILE [--delete_when_done] [--dry_run] [--SETTING=VALUE ...] -- FLAGS OF run.py

Keeps a run going until it is finished: creates the slice, installs the project, starts run.py with these flags, and does so again
after a preemption or a crash; the run goes on from its last checkpoint. Started beside a run that is under way, it watches that one.
It gives up (exit code 1) when something fails 5 times in a row, and stops (2) when the run refuses its input twice. Ending this
script ends neither the run nor the slice."
DELETE_WHEN_DONE=false OWN_FLAGS="delete_when_done" TAKES_ARGS=true
# shellcheck source=tpu/common.sh
. "$(dirname "$0")/common.sh"
parse "$@"
[ ${#ARGS[@]} -gt 0 ] || fail "no flags for run.py" "$SCRIPT" "-- --config=configs/NAME.py --workdir=/mnt/shared/runs/NAME ..."

trouble=0  # failures in a row, of whatever kind
silence=0  # polls in a row without an answer
refused=0  # ends with code 2 in a row
launched=0 # when this script last started the run, in seconds of the epoch
DRY_STATES="absent WAITING_FOR_RESOURCES ACTIVE SUSPENDED ACTIVE ACTIVE"
DRY_JOBS="none none finished"

failed() { # WHAT
  trouble=$((trouble + 1))
  [ $trouble -lt "$MAX_TRIES" ] || give_up "$1; $trouble failures in a row"
  note "$1 (failure $trouble of $MAX_TRIES); trying again"
  nap
}

silent() { # WHAT: an answer may come later; to delete a slice for want of one could cost a run that is well
  silence=$((silence + 1))
  [ $silence -lt "$MAX_SILENCE" ] || give_up "$1; $silence times in a row"
  note "$1"
  nap
}

show_end() { # the end of the output, from worker 0
  # shellcheck disable=SC2046
  queue ssh --node=0 --worker=0 $(reach) '--command=tail -n 30 coevo/job/log' </dev/null >&2 || true
}

recreate() {
  delete_slice || { failed "$NAME could not be deleted" && return; }
  create
}

create() {
  if create_slice; then note "asked for $ACCELERATOR x $SLICES in $ZONE"; else failed "$NAME could not be created"; fi
}

start() {
  setup_workers || { failed "the project could not be installed" && return; }
  start_run "${ARGS[@]}" || {
    stop_run KILL || true
    failed "the run did not start on every worker"
    return
  }
  launched=$(date +%s)
  note "started on $WORKERS workers"
}

restart() { # after an end that was none of success
  show_end
  if [ "$launched" -gt 0 ] && [ $(($(date +%s) - launched)) -lt "$QUICK_SECONDS" ]; then
    failed "the run ended within $QUICK_SECONDS s"
  else
    trouble=0
    refused=0
  fi
  stop_rest
  start
}

refuse() { # once it may be that the workers did not find each other in time
  refused=$((refused + 1))
  if [ $refused -lt 2 ]; then restart; else show_end && fail "the run refuses its input" "$NAME" "flags and files that run.py accepts"; fi
}

some_run() { case $ANSWERS in *running*) return 0 ;; *) return 1 ;; esac; }

stop_rest() { # what still runs on other workers belongs to the run that ended
  local tries=0
  some_run || return 0
  stop_run TERM || return 0
  while [ $tries -lt 10 ] && some_run; do
    tries=$((tries + 1))
    nap
    job_state
  done
  if some_run; then stop_run KILL || true; fi
}

tend() { # the slice is there
  job_state
  if [ "$DRY_RUN" = true ]; then JOB=${DRY_JOBS%% *} DRY_JOBS=${DRY_JOBS#* } && note "assuming that the run is: $JOB"; fi
  if [ "$JOB" != silent ]; then silence=0; fi
  case $JOB in
    none) start ;;
    running) trouble=0 && nap ;;
    silent) silent "a worker does not answer" ;;
    ended) restart ;;
    bad_input) refuse ;;
    finished)
      note "the run is finished"
      if [ "$DELETE_WHEN_DONE" = true ]; then delete_slice || give_up "$NAME was not deleted"; fi
      exit 0
      ;;
  esac
}

pack
while :; do
  queue_state
  case $STATE in
    ACTIVE) tend ;;
    absent) create ;;
    SUSPENDED) note "$NAME was preempted" && recreate ;;
    FAILED) failed "the request for $NAME failed" && recreate ;;
    unknown) silent "the state of $NAME is unknown" ;;
    *) silence=0 && note "$NAME is $STATE" && nap ;;
  esac
done
