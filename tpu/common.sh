# shellcheck shell=bash
# Settings, flags, errors and the one way to call gcloud; sourced by the scripts of this folder.
#
# A script sets USAGE (its help), calls `parse "$@"`, and then finds the settings as variables and what followed -- in ARGS.
# In a dry run every command is printed, ready for a shell, and none is run: what is known only from an answer (the state of the
# slice, of the run) then plays the usual course.

TPU_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
REPO=$(dirname "$TPU_DIR")
SCRIPT="tpu/$(basename "$0")"

# Every setting: a line KEY=VALUE of the env file, or the flag --key=VALUE, which wins.
SETTINGS="PROJECT ZONE NAME ACCELERATOR SLICES WORKERS RUNTIME SPOT RESERVED VALID_UNTIL NETWORK SUBNETWORK SERVICE_ACCOUNT"
SETTINGS="$SETTINGS IAP NFS EXTRAS RUN_ENV LOGS POLL_SECONDS"
PROJECT="" ZONE="" NAME="" NETWORK="" SUBNETWORK="" SERVICE_ACCOUNT="" VALID_UNTIL=""
DRY_RUN=false
ARGS=()
QUICK_SECONDS=${QUICK_SECONDS:-600} # a run that ends sooner than this after its launch counts as one that can't start
MAX_TRIES=${MAX_TRIES:-5}           # failures of one kind in a row before a script gives up
MAX_SILENCE=${MAX_SILENCE:-30}       # polls in a row without an answer before a script gives up
STATE=""                            # of the queued resource, set by queue_state
export JOB=""                       # of the run, set by job_state
ANSWERS=""                          # lines "coevo-worker HOST ..." of the workers, set by ask_workers

# ------------------------------------------------------------------------------------------------------------- messages

fail() { # WHAT WHERE EXPECTED: bad input
  printf 'error: %s\n  where:    %s\n  expected: %s\n' "$1" "$2" "$3" >&2
  exit 2
}

give_up() { # WHAT: the world refused, not the input
  printf 'error: %s\n' "$1" >&2
  exit 1
}

note() { # a remark; a comment of the shell, so that what a dry run prints can be run
  printf '# %s\n' "$*"
}

quoted() { # WORD: as any POSIX shell reads it back
  local escaped="'\\''"
  case $1 in
    '' | *[!A-Za-z0-9_./:=,@%+-]*) printf "'%s'" "${1//\'/$escaped}" ;;
    *) printf '%s' "$1" ;;
  esac
}

show() { # the command, quoted for a shell
  local word space=""
  for word in "$@"; do
    printf '%s' "$space"
    quoted "$word"
    space=" "
  done
  printf '\n'
}

# ------------------------------------------------------------------------------------------------------------- settings

is_setting() {
  case " $SETTINGS " in *" $1 "*) return 0 ;; esac
  return 1
}

read_env() { # FILE: lines KEY=VALUE; nothing in it is executed
  local line key value number=0
  [ -f "$1" ] || fail "the settings file does not exist" "--env=$1" "a copy of tpu/example.env"
  while IFS= read -r line || [ -n "$line" ]; do
    number=$((number + 1))
    line=${line%$'\r'}
    case $line in '' | '#'*) continue ;; esac
    key=${line%%=*}
    value=${line#*=}
    [ "$key" != "$line" ] || fail "not a setting: $line" "$1, line $number" "KEY=VALUE"
    is_setting "$key" || fail "unknown setting $key" "$1, line $number" "one of $SETTINGS"
    case $value in \"*\" | \'*\') value=${value:1:${#value}-2} ;; esac
    printf -v "$key" '%s' "$value"
  done <"$1"
}

parse() { # the script's words; a script's own flags are named in OWN_FLAGS (without a value) and OWN_VALUES (with one)
  local word name file="" values=()
  for name in $SETTINGS; do printf -v "$name" '%s' ""; done
  while [ $# -gt 0 ]; do
    word=$1
    shift
    name=${word%%=*}
    name=${name#--}
    case $word in
      --help | -h) printf '%s\n' "$USAGE" && exit 0 ;;
      --dry_run) DRY_RUN=true ;;
      --env=*) file=${word#*=} ;;
      --) ARGS=("$@") && break ;;
      --*=*) values+=("$word") ;;
      --*)
        case " ${OWN_FLAGS:-} " in *" $name "*) ;; *) unknown_flag "$word" ;; esac
        printf -v "$(upper "$name")" '%s' true
        ;;
      *) fail "unknown argument '$word'" "$SCRIPT" "flags, and after -- those of run.py" ;;
    esac
  done
  if [ -n "$file" ]; then read_env "$file"; fi
  for word in ${values[@]+"${values[@]}"}; do set_value "$word"; done
  [ "${TAKES_ARGS:-false}" = true ] || [ ${#ARGS[@]} -eq 0 ] || fail "$SCRIPT takes no words after --" "$SCRIPT" "flags only"
  defaults
}

set_value() { # --key=VALUE
  local name=${1%%=*}
  name=${name#--}
  case " ${OWN_VALUES:-} $(lower "$SETTINGS") " in *" $name "*) ;; *) unknown_flag "$1" ;; esac
  printf -v "$(upper "$name")" '%s' "${1#*=}"
}

unknown_flag() {
  fail "unknown flag '$1'" "$SCRIPT" "--env=FILE --dry_run --help, a setting as --zone=..., or one that --help lists"
}

upper() { printf '%s' "$1" | tr '[:lower:]' '[:upper:]'; }
lower() { printf '%s' "$1" | tr '[:upper:]' '[:lower:]'; }

check() { # KEY PATTERN EXPECTED: the setting, as a whole, is of this form (an extended regular expression)
  [[ ${!1} =~ ^($2)$ ]] || fail "$1 is '${!1}'" "$SCRIPT (the env file, or --$(lower "$1")=)" "$3"
}

defaults() {
  SLICES=${SLICES:-1}
  SPOT=${SPOT:-true}
  RESERVED=${RESERVED:-false}
  IAP=${IAP:-false}
  EXTRAS=${EXTRAS:-tpu}
  POLL_SECONDS=${POLL_SECONDS:-60}
  check PROJECT '[a-z][-a-z0-9.:]{4,}[a-z0-9]' "a Google Cloud project id"
  check ZONE '[a-z]+-[a-z]+[0-9]+-[a-z]' "a zone, such as us-central2-b"
  check NAME '[a-z]([-a-z0-9]{0,60}[a-z0-9])?' "lower case letters, digits and hyphens, a letter first"
  check ACCELERATOR 'v[0-9]+[a-z]*-[0-9]+' "an accelerator type: v4-32, v5p-16, v5litepod-64, v6e-16"
  check SLICES '[1-9][0-9]*' "a number of slices, 1 or more"
  check SPOT 'true|false' "true or false"
  check RESERVED 'true|false' "true or false"
  check IAP 'true|false' "true or false"
  check EXTRAS '[a-z]+(,[a-z]+)*' "extras of setup.py, such as tpu or tpu,guided"
  check POLL_SECONDS '[0-9]+' "a number of seconds"
  check NFS '([A-Za-z0-9.-]+:/[^: ]+:/[^: ]+)?' "HOST:/EXPORT:/MOUNT_POINT, or nothing"
  check LOGS '(/.*)?' "an absolute folder on the workers, or nothing"
  [ "$SPOT" = false ] || [ "$RESERVED" = false ] || fail "SPOT and RESERVED are both true" "$SCRIPT" "one of them at most"
  [ -z "$RUN_ENV" ] || [ -f "$RUN_ENV" ] || fail "RUN_ENV does not exist" "$RUN_ENV" "a file of lines KEY=VALUE"
  RUNTIME=${RUNTIME:-$(runtime_of "$ACCELERATOR")}
  WORKERS=${WORKERS:-$(workers_of "$ACCELERATOR" "$SLICES")}
  check RUNTIME '[a-z0-9.-]+' "a TPU software version (none is known for this accelerator)"
  check WORKERS '[1-9][0-9]*' "the number of hosts of all slices (it is not known for this accelerator)"
}

runtime_of() { # ACCELERATOR: the TPU software version for JAX
  case $1 in
    v2-* | v3-* | v4-*) echo tpu-ubuntu2204-base ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
  esac
}

workers_of() { # ACCELERATOR SLICES: hosts; v2 to v5p count TensorCores (two a chip), v5e and v6e chips; 4 chips a host
  local size=${1##*-} hosts
  hosts=$(((size + 7) / 8))
  case $1 in
    v2-* | v3-* | v4-* | v5p-*) echo $((hosts * $2)) ;;
    v5litepod-* | v6e-*) if [ "$size" -le 8 ]; then echo "$2"; else echo $((hosts * 2 * $2)); fi ;;
  esac
}

# ------------------------------------------------------------------------------------------------------------- gcloud

cloud() { # every call of gcloud
  if [ "$DRY_RUN" = true ]; then show gcloud "$@" "--project=$PROJECT" --quiet; else gcloud "$@" "--project=$PROJECT" --quiet; fi
}

queue() { # VERB FLAG...: of the queued resource
  local verb=$1
  shift
  cloud compute tpus queued-resources "$verb" "$NAME" "--zone=$ZONE" "$@"
}

reach() { # the flags that ssh and scp need; every worker of every slice unless told
  [ "$IAP" = false ] || echo --tunnel-through-iap
}

on_workers() { # COMMAND: run on every worker of every slice
  # shellcheck disable=SC2046 # a flag, or nothing
  queue ssh --node=all --worker=all $(reach) "--command=$1"
}

to_workers() { # FILE PATH: copied to every worker
  # shellcheck disable=SC2046
  cloud compute tpus queued-resources scp "$1" "$NAME:$2" "--zone=$ZONE" --node=all --worker=all $(reach)
}

ask_workers() { # COMMAND: ANSWERS gets one line of each worker. Fails when the command failed somewhere or a worker is silent:
  # gcloud leaves out a node that it can't reach and still reports success.
  local rc=0 found
  if [ "$DRY_RUN" = true ]; then on_workers "$1" && return 0; fi
  ANSWERS=$(on_workers "$1" </dev/null) || rc=$?
  ANSWERS=$(printf '%s\n' "$ANSWERS" | grep '^coevo-worker ' || true)
  found=$(printf '%s' "$ANSWERS" | grep -c '' || true)
  [ $rc -eq 0 ] || return $rc
  [ "$found" -eq "$WORKERS" ] || { note "$found of $WORKERS workers answered" && return 9; }
}

nap() {
  if [ "$DRY_RUN" = true ]; then show sleep "$POLL_SECONDS"; else sleep "$POLL_SECONDS"; fi
}

# ------------------------------------------------------------------------------------------------------------- the slice

DRY_STATES=""

queue_state() { # STATE: as the service says (ACTIVE, ...), absent, or unknown when it did not say
  local errors rc=0
  if [ "$DRY_RUN" = true ]; then
    queue describe '--format=value(state.state)'
    STATE=${DRY_STATES%% *}
    DRY_STATES=${DRY_STATES#* }
    note "assuming the answer $STATE"
    return 0
  fi
  errors=$(mktemp)
  STATE=$(queue describe '--format=value(state.state)' 2>"$errors") || rc=$?
  if [ $rc -ne 0 ] && grep -q NOT_FOUND "$errors"; then
    STATE=absent
  elif [ $rc -ne 0 ]; then
    STATE=unknown
    cat "$errors" >&2
  fi
  rm -f "$errors"
}

create_slice() { # ask for the slice and return at once; it waits in the queue
  local flags=("--accelerator-type=$ACCELERATOR" "--runtime-version=$RUNTIME")
  if [ "$SLICES" -gt 1 ]; then
    flags+=("--node-count=$SLICES" "--node-prefix=$NAME")
  else
    flags+=("--node-id=$NAME")
  fi
  [ "$SPOT" = false ] || flags+=(--spot)
  [ "$RESERVED" = false ] || flags+=(--reserved)
  [ -z "$VALID_UNTIL" ] || flags+=("--valid-until-duration=$VALID_UNTIL")
  [ -z "$NETWORK" ] || flags+=("--network=$NETWORK")
  [ -z "$SUBNETWORK" ] || flags+=("--subnetwork=$SUBNETWORK")
  [ -z "$SERVICE_ACCOUNT" ] || flags+=("--service-account=$SERVICE_ACCOUNT" --scopes=cloud-platform)
  [ "$IAP" = false ] || flags+=(--internal-ips)
  queue create "${flags[@]}" --async
}

delete_slice() { # the queued resource and its nodes; returns when both are gone
  local tries=0
  queue delete --force --async || return 1
  [ "$DRY_RUN" = false ] || return 0
  while queue_state && [ "$STATE" != absent ]; do
    if [ "$STATE" = unknown ]; then tries=$((tries + 1)); else tries=0; fi
    [ $tries -lt "$MAX_TRIES" ] || return 1
    nap
  done
}

wait_active() { # until the slice is there; fails when it never will be
  local silent=0
  while :; do
    queue_state
    case $STATE in
      ACTIVE) return 0 ;;
      SUSPENDED | FAILED) give_up "the queued resource $NAME is $STATE; delete it (tpu/delete.sh), or let tpu/resume.sh do it" ;;
      absent | unknown) # just after the request the service may not know it yet
        silent=$((silent + 1))
        [ $silent -lt "$MAX_TRIES" ] || give_up "the queued resource $NAME is $STATE"
        ;;
      *) silent=0 ;;
    esac
    note "$NAME is $STATE"
    nap
  done
}

# ------------------------------------------------------------------------------------------------------------- the project

ARCHIVE=""

pack() { # ARCHIVE: the project's files as they are here: tracked ones, and new ones that git does not ignore
  local file
  ARCHIVE=$(mktemp -d)/coevo.tar.gz
  if [ "$DRY_RUN" = true ]; then
    rm -rf "$(dirname "$ARCHIVE")"
    ARCHIVE=/tmp/coevo.tar.gz
    printf '%s | %s\n' "$(show git -C "$REPO" ls-files -z --cached --others --exclude-standard)" \
      "$(show tar -C "$REPO" --null -T - -czf "$ARCHIVE")"
    return 0
  fi
  # shellcheck disable=SC2064 # the path of now
  trap "rm -rf $(quoted "$(dirname "$ARCHIVE")")" EXIT
  git -C "$REPO" rev-parse --git-dir >/dev/null 2>&1 || fail "the project is not a git checkout" "$REPO" "a clone of the repository"
  git -C "$REPO" ls-files -z --cached --others --exclude-standard |
    while IFS= read -r -d '' file; do if [ -e "$REPO/$file" ]; then printf '%s\0' "$file"; fi; done |
    tar -C "$REPO" --null -T - -czf "$ARCHIVE"
  [ "$(wc -c <"$ARCHIVE")" -le 100000000 ] || fail "the project's files take over 100 MB" "$REPO" "data and weights elsewhere, or in .gitignore"
}

setup_workers() { # install ARCHIVE on every worker; a worker that has it installed does nothing
  local lock="$TPU_DIR/$NAME.lock" sum=SUM kinds
  if [ "$DRY_RUN" = false ]; then sum=$(cksum <"$ARCHIVE" | tr ' ' '-'); fi
  on_workers 'mkdir -p -m 700 coevo' || return 1
  to_workers "$ARCHIVE" coevo/coevo.tar.gz || return 1
  to_workers "$TPU_DIR/worker.sh" coevo/worker.new || return 1
  if [ -f "$lock" ]; then to_workers "$lock" coevo/constraints.txt || return 1; fi
  if [ -n "$RUN_ENV" ]; then to_workers "$RUN_ENV" coevo/run.env || return 1; fi
  # mv: the old file may be running
  ask_workers "mv coevo/worker.new coevo/worker.sh && $(show bash coevo/worker.sh install "$sum" "$EXTRAS" "$NFS")" || return 1
  # shellcheck disable=SC2046
  if [ ! -f "$lock" ]; then
    if [ "$DRY_RUN" = true ]; then
      printf '%s > %s\n' "$(queue ssh --node=0 --worker=0 $(reach) '--command=cat coevo/installed.txt')" "$(quoted "$lock")"
    else
      queue ssh --node=0 --worker=0 $(reach) '--command=cat coevo/installed.txt' </dev/null >"$lock.part" || return 1
      mv "$lock.part" "$lock"
    fi
  fi
  kinds=$(printf '%s\n' "$ANSWERS" | cut -d' ' -f3- | sort -u)
  [ "$(printf '%s\n' "$kinds" | grep -c '')" -eq 1 ] ||
    give_up "the workers did not install the same packages (lines: worker, host, python, hash):"$'\n'"$ANSWERS"
}

start_run() { # ARG...: run.py with these flags on every worker; jax.distributed finds the others by itself
  local word join=--processes=auto
  for word in "$@"; do case $word in --processes | --processes=*) join="" ;; esac done
  ask_workers "$(show bash coevo/worker.sh start "$LOGS" python run.py ${join:+"$join"} "$@")"
}

job_state() { # JOB: none, running, finished, bad_input, ended (not all run and not all are done), or silent
  local states
  # shellcheck disable=SC2016 # for the worker's shell
  ask_workers 'bash coevo/worker.sh state 2>/dev/null || echo "coevo-worker $(hostname) none"' || { JOB=silent && return 0; }
  if [ "$DRY_RUN" = true ]; then return 0; fi
  states=$(printf '%s\n' "$ANSWERS" | cut -d' ' -f3- | sort -u)
  case $states in
    none) JOB=none ;;
    running) JOB=running ;;
    'exited 0') JOB=finished ;;
    *'exited 2'*) JOB=bad_input ;;
    *) JOB=ended ;;
  esac
}

stop_run() { # TERM: the run finishes its update, saves and ends; KILL: it ends now
  ask_workers "bash coevo/worker.sh stop $1"
}
