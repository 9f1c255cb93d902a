#!/usr/bin/env bash
# Runs on each worker of a TPU VM; scripts/tpu_vm.sh copies it there and calls it.
#
# The run lies on the worker's own disk, since the program renames whole folders and
# maps files into memory, and neither is safe on a mounted bucket. Worker 0 copies it to
# the bucket as training goes; every worker copies it back before training starts.
#
# Usage: scripts/tpu_worker.sh VERB gs://BUCKET/FOLDER [ARGUMENT ...]
#   install                 make the environment
#   fetch                   bring what the bucket has of the run
#   start EVERY COMMAND...  train in the background, copying every so many seconds
#   follow BYTES            show the log from there on, until training has ended
#   result                  print training's exit code, running, absent, or unsaved
#   stop                    have training save and end
#   evaluate CHECKPOINT LAST PLATFORM
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/env.sh
source scripts/env.sh

verb=$1 bucket=$2
shift 2
workdir=$HOME/runs/${bucket#gs://}
control=$workdir.control # log, exit code and lock of the training
program=.venv/bin/transformer-jax

# Succeeds on the worker that writes, as JAX numbers them.
is_first() {
  local key=instance/attributes/agent-worker-number
  [[ $(curl --silent --fail --header "Metadata-Flavor: Google" \
    "http://metadata.google.internal/computeMetadata/v1/$key") == 0 ]]
}

# The images have a Python that is too old, or one that cannot make environments.
install() {
  local python
  if ! python=$(find_python 2>/dev/null) || ! "$python" -c 'import ensurepip'; then
    PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --user uv
    python3 -m uv python install 3.12
    python=$(python3 -m uv python find 3.12)
  fi
  PYTHON=$python ensure_env tpu
}

# Copies to the bucket; only then does it delete there what the run has deleted.
push() {
  local unfinished='.*orbax-checkpoint-tmp.*|.*\.partial$'
  local copy=(gcloud storage rsync "$workdir" "$bucket" --recursive)
  copy+=("--exclude=$unfinished")
  (
    flock 8
    "${copy[@]}" && "${copy[@]}" --delete-unmatched-destination-objects
  ) 8>"$control/push" >"$control/push.log" 2>&1 && return
  echo "warning: copying to $bucket failed: $(tail -n 1 "$control/push.log")" >&2
  return 1
}

fetch() {
  mkdir -p "$control"
  # What lies on worker 0 is at least as new as what it has copied.
  if ! is_first || [[ ! -d $workdir ]]; then
    mkdir -p "$workdir"
    if gcloud storage ls "$bucket/" >/dev/null 2>"$control/ls.log"; then
      gcloud storage rsync "$bucket" "$workdir" --recursive \
        --delete-unmatched-destination-objects
    elif ! grep -q "matched no objects" "$control/ls.log"; then
      die "cannot read $bucket: $(tail -n 1 "$control/ls.log")"
    fi
  fi
  if is_first; then
    date >"$workdir/launched.txt" # so that there is something to try the bucket with
    push || die "cannot write to $bucket; give the TPU's service account the role" \
      "storage.objectAdmin on it"
  fi
}

start() {
  mkdir -p "$control"
  rm -f "$control/code" "$control/program"
  setsid nohup bash scripts/tpu_worker.sh supervise "$bucket" "$@" \
    >"$control/log" 2>&1 </dev/null &
  for _ in {1..100}; do
    [[ ! -s $control/program ]] || return 0
    sleep 0.1
  done
  die "training does not start: $(tail -n 1 "$control/log")"
}

# Copies what a finished training left, and does not give up at once.
push_at_last() {
  local pause
  for pause in 5 15 60; do
    push && return
    sleep "$pause"
  done
  push
}

# Trains, and outlives a shutdown's SIGTERM, which the program gets, too: a second one
# from here would keep it from saving.
supervise() {
  local every=$1 code=0 copier=""
  shift
  trap : TERM INT HUP
  exec 9>"$control/lock"
  flock --nonblock 9 || die "this run is already training on this worker"
  echo $$ >"$control/supervisor"
  if is_first; then
    while sleep "$every"; do push || true; done 9>&- &
    copier=$!
  fi
  bash -c 'echo $$ >"$1"; shift; exec "$@"' bash "$control/program" "$@" \
    --workdir="$workdir" 9>&- || code=$?
  if [[ -n $copier ]]; then
    kill "$copier"
    push_at_last || code=unsaved
  fi
  echo "$code" >"$control/code.partial"
  mv "$control/code.partial" "$control/code"
}

follow() {
  tail --bytes="+$(($1 + 1))" --pid="$(<"$control/supervisor")" --follow "$control/log"
}

result() {
  if [[ -s $control/code ]]; then
    cat "$control/code"
  elif [[ -e $control/lock ]] && ! flock --nonblock "$control/lock" true; then
    echo running
  else
    echo absent
  fi
}

stop() {
  [[ $(result) == running ]] || return 0
  kill -TERM "$(<"$control/program")" || true
  for _ in {1..150}; do
    [[ $(result) == running ]] || return 0
    sleep 1
  done
}

# Prints the scores; $3 names the platform where this worker alone cannot use the TPU.
evaluate() {
  [[ -z ${3:-} ]] || export JAX_PLATFORMS=$3
  if [[ $1 == average ]]; then
    "$program" average --workdir="$workdir" --last="$2"
  fi
  "$program" evaluate --workdir="$workdir" --checkpoint="$1" --paper
  push_at_last
}

case $verb in
  install | fetch | start | supervise | follow | result | stop | evaluate)
    "$verb" "$@"
    ;;
  *) die "unknown verb $verb" ;;
esac
