#!/usr/bin/env bash
set -euo pipefail
USAGE="tpu/logs.sh --env=FILE [--slice=0] [--worker=0|all] [--lines=50] [--dry_run] [--SETTING=VALUE ...]

Follows the output of the run on a worker of a slice; Ctrl-C ends the following, not the run."
SLICE=0 WORKER=0 LINES=50 OWN_VALUES="slice worker lines"
# shellcheck source=tpu/common.sh
. "$(dirname "$0")/common.sh"
parse "$@"
check SLICE '[0-9]+|all' "the index of a slice, or all"
check WORKER '[0-9]+|all' "the index of a worker, or all"
check LINES '[0-9]+' "a number of lines"

# shellcheck disable=SC2046 # a flag, or nothing
queue ssh "--node=$SLICE" "--worker=$WORKER" $(reach) "--command=$(show bash coevo/worker.sh log "$LINES")"
