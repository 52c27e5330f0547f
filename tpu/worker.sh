#!/usr/bin/env bash
# What the other scripts run on a worker (a TPU VM), from the home folder. Its answers are lines "coevo-worker HOST ...".
#
#   worker.sh install SUM EXTRAS NFS    unpack coevo/coevo.tar.gz and install it; nothing when SUM is installed already
#   worker.sh start LOGS COMMAND...     start COMMAND in the project's folder and environment, in the background
#   worker.sh state                     none | running | exited CODE | lost (killed, or the machine started anew)
#   worker.sh stop SIGNAL               TERM or KILL to the command
#   worker.sh log LINES                 the end of its output, then what is added
set -euo pipefail
cd "$HOME/coevo"

answer() { printf 'coevo-worker %s %s\n' "$(hostname)" "$*"; }

problem() { # WHAT: to the caller's terminal, with the host's name
  printf '%s: %s\n' "$(hostname)" "$1" >&2
  exit 1
}

# ------------------------------------------------------------------------------------------------------------- install

make_environment() { # Python 3.11 or newer: the machine's, else one that uv fetches (the TPU images have 3.10)
  local python
  rm -rf venv
  for python in python3.13 python3.12 python3.11 python3; do
    if "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      "$python" -m venv venv
      return
    fi
  done
  python3 -m pip install --quiet --user uv
  python3 -m uv venv --quiet --seed --python 3.12 venv
}

mount_nfs() { # HOST:/EXPORT:/MOUNT_POINT. nolock: locks stay on this host, so those of a preempted worker can't outlive it
  local point=${1##*:}
  if mountpoint -q "$point"; then return; fi
  command -v mount.nfs >/dev/null || { sudo apt-get -qq update && sudo apt-get -qq install -y nfs-common; } >/dev/null
  sudo mkdir -p "$point"
  sudo mount -t nfs -o hard,nolock "${1%:*}" "$point"
  sudo chmod a+rwx "$point"
}

install_project() { # SUM EXTRAS NFS
  local constraints=()
  chmod 600 run.env 2>/dev/null || true
  if [ -n "$3" ]; then mount_nfs "$3"; fi
  if [ "$(cat ready 2>/dev/null)" != "$1 $2" ]; then
    [ "$(state)" != running ] || problem "a run is under way (tpu/stop.sh); its files can't be replaced"
    rm -rf ready unpacked
    mkdir unpacked
    tar -C unpacked -xzf coevo.tar.gz
    [ -x venv/bin/python ] || make_environment
    rm -rf repo
    mv unpacked repo
    if [ -f constraints.txt ]; then constraints=(-c constraints.txt); fi
    venv/bin/python -m pip install --quiet --disable-pip-version-check -e "repo[$2]" ${constraints[@]+"${constraints[@]}"} >&2
    venv/bin/python -m pip --disable-pip-version-check freeze --exclude-editable >installed.txt
    printf '%s\n' "$1 $2" >ready
  fi
  answer "$(venv/bin/python -c 'import platform; print(platform.python_version())') $(cksum <installed.txt | tr ' ' '-')"
}

# ------------------------------------------------------------------------------------------------------------- the run

read_environment() { # KEY=VALUE lines of run.env; nothing in them is executed
  local line
  [ -f run.env ] || return 0
  while IFS= read -r line || [ -n "$line" ]; do
    case $line in '' | '#'*) ;; [A-Za-z_]*=*) export "${line?}" ;; *) problem "run.env has a line that is not KEY=VALUE" ;; esac
  done <run.env
}

state() {
  # The lock is held by the command and what watches over it: no stale process id can be taken for a run.
  if [ ! -f job/lock ]; then
    echo none
  elif ! flock -n -s job/lock true; then
    echo running
  elif [ -s job/code ]; then
    echo "exited $(cat job/code)"
  else
    echo lost
  fi
}

watch() { # LOG COMMAND...: run it and keep its exit code
  local child code=0
  exec 9>>job/lock >>"$1" 2>&1 </dev/null
  flock -w 5 9 || exit 1
  shift
  printf '=== %s: %s\n' "$(date -u +%FT%TZ)" "$(printf '%q ' "$@")"
  trap '' TERM # a machine that shuts down sends it to all; the command is to end and its exit code to be written
  (cd repo && PYTHONUNBUFFERED=1 PATH="$HOME/coevo/venv/bin:$PATH" exec env --default-signal=TERM,INT "$@") &
  child=$!
  echo "$child" >job/pid
  wait "$child" || code=$?
  echo "$code" >job/code.part
  mv job/code.part job/code
}

start() { # LOGS COMMAND...
  local logs=${1:-$HOME/coevo/job} log tries
  shift
  [ -f ready ] || problem "the project is not installed (tpu/setup.sh)"
  [ "$(state)" != running ] || problem "a run is under way (tpu/status.sh, tpu/stop.sh)"
  read_environment
  mkdir -p job "$logs"
  log="$logs/$(hostname).log"
  ln -sfn "$log" job/log
  rm -f job/pid job/code
  nohup setsid bash "$HOME/coevo/worker.sh" watch "$log" "$@" >/dev/null 2>&1 </dev/null &
  for tries in 1 2 3 4 5 6 7 8 9 10; do
    if [ -s job/pid ]; then answer started && return; fi
    sleep "0.$tries"
  done
  problem "the command did not start"
}

stop() { # SIGNAL
  local pid
  pid=$(cat job/pid 2>/dev/null || true)
  if [ "$(state)" = running ] && [ -n "$pid" ]; then kill "-$1" "$pid" 2>/dev/null || true; fi
  answer "$(state)"
}

case ${1:-} in
  install) install_project "$2" "$3" "$4" ;;
  start) shift && start "$@" ;;
  watch) shift && watch "$@" ;;
  state) answer "$(state)" ;;
  stop) stop "$2" ;;
  log) exec tail -n "$2" -F job/log ;;
  *) problem "worker.sh: unknown command '${1:-}'" ;;
esac
