#!/usr/bin/env bash
# Trains on a Cloud TPU VM: makes the VM or takes the one of that name, installs the
# last commit on all its workers, trains, shows the log, prints the scores, and deletes
# the VM, also when something fails or Ctrl-C ends it. A VM that is preempted is made
# anew and training goes on from what is in the bucket. It asks before it spends.
#
# Usage: scripts/tpu_vm.sh OPTION ... [-- --config.SECTION.FIELD=VALUE ...]
#   --name=NAME         of the TPU VM; one that is ready is used as it is
#   --zone=ZONE         such as us-west4-a
#   --type=TYPE         such as v5litepod-8
#   --bucket=gs://BUCKET/FOLDER   where the run is kept; the folder is the run's alone
#   --config=FILE       config in the last commit, such as configs/base.py
#   --project=PROJECT   default: gcloud's
#   --version=VERSION   of the VM's software; default: the one for JAX on the type
#   --spot              a spot VM: cheaper, may be preempted
#   --restarts=N        how often training is started again; default 20
#   --evaluate=WHICH    score average, best or last at the end, or none; default average
#   --last=N            checkpoints to average; default 5
#   --copy-every=S      seconds between copies to the bucket; default 300
#   --poll=S            seconds between looks at the VM; default 15
#   --keep              do not delete the VM, neither at the end nor on Ctrl-C
#   --yes               do not ask
#   --dry-run           print the commands and call nothing
#
# Exit code: 0 done, 2 a mistake in the options, 130 Ctrl-C, else training's own, or 1.
# More than one worker: run `ssh-add ~/.ssh/google_compute_engine` first.
#
# Example: scripts/tpu_vm.sh --name=base --zone=us-west4-a --type=v5litepod-8 --spot \
#   --bucket=gs://my-bucket/base --config=configs/base.py -- --config.train.seed=1
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/env.sh
source scripts/env.sh
# shellcheck source=scripts/launch.sh
source scripts/launch.sh

name="" zone="" type="" bucket="" config="" project="" version="" spot="" keep="" yes=""
restarts=20 evaluate=average last=5 copy_every=300 poll=15 dry_run="" help=""

check_options() {
  [[ -z $help ]] || { usage && exit 0; }
  require name "$name" '[a-z]([-a-z0-9]{0,60}[a-z0-9])?' \
    "a name of small letters, digits and hyphens"
  require zone "$zone" '[a-z]+-[a-z]+[0-9]+-[a-z]' "a zone such as us-west4-a"
  require type "$type" '[a-z0-9]+-[0-9]+' "a type of TPU such as v5litepod-8"
  require bucket "$bucket" 'gs://[a-z0-9][a-z0-9._-]+(/[A-Za-z0-9._=-]+)+' \
    "a folder in a bucket such as gs://my-bucket/base"
  require_config "$config"
  require project "${project:-x}" '[a-z0-9:.-]+' "a project's id"
  [[ -n $version ]] || version=$(software_of "$type")
  require version "$version" '[a-z0-9.-]+' "a software version of TPU VMs"
  require restarts "$restarts" '[0-9]{1,4}' "a whole number"
  require evaluate "$evaluate" 'average|best|last|none' "average, best, last or none"
  require last "$last" '[1-9][0-9]{0,3}' "a whole number above 0"
  require copy-every "$copy_every" '[1-9][0-9]{0,4}' "a whole number of seconds above 0"
  require poll "$poll" '[0-9]{1,4}' "a whole number of seconds"
}

# Prints the software that JAX wants on a type.
software_of() {
  case $1 in
    v2-* | v3-* | v4-*) echo tpu-ubuntu2204-base ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
    *) mistake "--type=$1 is new here; name its software with --version=VERSION" ;;
  esac
}

# --- Commands ---------------------------------------------------------------------

# Runs a command in its own process group, so that a signal to this script, which ends
# `wait` at once, leaves the script in charge of what becomes of the command.
child=""
attend() {
  local code=0
  set -m
  (set +m && "$@") </dev/null &
  child=$!
  set +m
  wait "$child" || code=$?
  child=""
  return "$code"
}

# tpu VERB ARGUMENT ...: gcloud on this TPU VM.
tpu() {
  local verb=$1 where=(--zone="$zone")
  shift
  [[ -z $project ]] || where+=(--project="$project")
  set -- gcloud compute tpus tpu-vm "$verb" "$@" "${where[@]}" --quiet
  if [[ -n $dry_run ]]; then quoted "$@"; else "$@"; fi
}

# Runs a verb of scripts/tpu_worker.sh on worker $1, a number or all. The login shell
# there reads the words back as they are here.
remote() {
  local worker=$1
  shift
  tpu ssh "$name" --worker="$worker" \
    --command="$(quoted bash transformer_jax/scripts/tpu_worker.sh "$@")"
}

# --- The VM -----------------------------------------------------------------------

# Sets state (ABSENT where there is no such VM), found_type and hosts; fails where
# nothing can be known.
look() {
  state=ABSENT found_type="" hosts=1
  if attend tpu describe "$name" \
    "--format=value(state,acceleratorType,networkEndpoints.len())" \
    >"$scratch/state" 2>"$scratch/errors"; then
    [[ -z $dry_run ]] || { cat "$scratch/state" && return; }
    IFS=$'\t' read -r state found_type hosts <"$scratch/state"
  elif ! grep -q NOT_FOUND "$scratch/errors"; then
    cat "$scratch/errors" >&2
    return 1
  fi
}

# Makes the VM ready: uses it, waits for it, or makes it. Sets `reused`.
acquire() {
  reused=yes
  look || return 1
  while [[ $state != READY ]]; do
    reused=""
    case $state in
      ABSENT) make_vm || return 1 ;;
      PREEMPTED | TERMINATED)
        say "$name was preempted; deleting what is left of it"
        delete_vm || return 1
        make_vm || return 1
        ;;
      CREATING | STARTING | RESTARTING | REPAIRING)
        say "$name is $state; waiting"
        attend sleep "$poll"
        ;;
      *) mistake "$name is $state; start it or delete it, or give another --name" ;;
    esac
    look || return 1
    [[ -z $dry_run ]] || return 0
  done
  [[ -z $found_type || $found_type == "$type" ]] || mistake \
    "$name is a $found_type; give --type=$found_type, or another --name"
  owned=yes
  [[ -z $reused ]] || say "$name is there and ready; using it"
}

make_vm() {
  say "making $name"
  owned=yes # even a failed try may leave something
  attend tpu create "$name" --accelerator-type="$type" --version="$version" \
    ${spot:+--spot} --scopes=https://www.googleapis.com/auth/cloud-platform
}

delete_vm() {
  local try
  for try in 1 2 3; do
    if attend tpu delete "$name" 2>"$scratch/errors" ||
      grep -q NOT_FOUND "$scratch/errors"; then
      return 0
    fi
    echo "try $try of 3: $(<"$scratch/errors")" >&2
    attend sleep "$poll"
  done
  return 1
}

# --- Training ---------------------------------------------------------------------

# Makes everything ready and starts training, unless it is running already.
launch() {
  local command=(.venv/bin/transformer-jax train --config="$config")
  local unpack="rm -rf transformer_jax/transformer_jax && mkdir -p transformer_jax"
  unpack+=" && tar -xzf transformer_jax.tar.gz -C transformer_jax"
  acquire || return 1
  if [[ -n $reused ]] && worker_result && [[ $result == running ]]; then
    say "training is running there already; this is its log"
    started=yes
    return
  fi
  say "installing on all workers"
  attend tpu scp "$scratch/code.tar.gz" "$name:transformer_jax.tar.gz" --worker=all ||
    return 1
  attend tpu ssh "$name" --worker=all --command="$unpack" || return 1
  attend remote all install "$bucket" || return 1
  attend remote all fetch "$bucket" || return 1
  # The worker, which knows its home, adds --workdir.
  ((hosts == 1)) || command+=(--distributed=auto)
  command+=(${overrides[@]+"${overrides[@]}"})
  say "training"
  started=yes
  attend remote all start "$bucket" "$copy_every" "${command[@]}"
}

# Sets `result` to what worker 0 says of the training; fails where it does not answer.
worker_result() {
  attend remote 0 result "$bucket" >"$scratch/result" || return 1
  result=$(<"$scratch/result")
  [[ -z $dry_run ]] || { echo "$result" && result=0; }
}

stream() {
  remote 0 follow "$bucket" "$1" | tee -a "$scratch/log"
}

# Shows the log until training ends. Sets `result` to its exit code, absent or unsaved,
# or lost where the VM is gone.
watch() {
  local silent=0
  : >"$scratch/log"
  while :; do
    attend stream "$(wc -c <"$scratch/log" | tr -d ' ')" || true
    if worker_result; then
      [[ $result == running ]] || return 0
      silent=0
    else
      result=lost
      if ! look || ((++silent > 20)) || [[ $state != READY ]]; then return 0; fi
    fi
    attend sleep "$poll"
  done
}

# Trains to the end, over preemptions; ends the script where that cannot be.
train() {
  local restart
  for ((restart = 0; ; restart++)); do
    if launch; then
      watch
    else
      result=lost
      if ! look || [[ $state == READY ]] ||
        { ((restart == 0)) && [[ $state != PREEMPTED ]]; }; then
        die "cannot set up $name (see above)"
      fi
    fi
    case $result in
      0) return ;;
      lost | absent | 143) say "training was stopped from outside ($result)" ;;
      unsaved)
        keep=yes
        die "training has ended, but its last state could not be copied to $bucket;" \
          "it is on $name, in ~/runs/${bucket#gs://}"
        ;;
      *)
        echo "error: training failed with exit code $result (see above)" >&2
        exit "$result"
        ;;
    esac
    ((restart < restarts)) || die "stopped $((restarts + 1)) times; what was saved is" \
      "in $bucket, and the same command goes on from there"
    say "restart $((restart + 1)) of $restarts in $((4 * poll)) s"
    attend sleep "$((4 * poll))"
  done
}

score() {
  local platform=()
  [[ $evaluate != none ]] || return 0
  # Of several workers, one alone cannot use the TPU.
  ((hosts == 1)) || platform=(cpu)
  say "evaluating"
  attend remote 0 evaluate "$bucket" "$evaluate" "$last" \
    ${platform[@]+"${platform[@]}"} ||
    die "evaluation failed (see above); the run is in $bucket"
}

# --- The end ----------------------------------------------------------------------

# However the script ends: nothing that costs money is left, unless it is to be kept.
finish() {
  local code=$?
  trap - EXIT
  trap '' INT TERM HUP
  [[ -z $child ]] || kill -TERM -- "-$child" 2>/dev/null || true
  if [[ -n $owned && -n $keep ]]; then
    say "$name is kept and costs money until you delete it:"
    dry_run=yes tpu delete "$name" >&2
  elif [[ -n $owned ]]; then
    if [[ -n $started && $code -gt 128 ]]; then
      say "having training save"
      attend remote all stop "$bucket" >/dev/null || true
    fi
    say "deleting $name"
    if ! delete_vm; then
      echo "error: $name was NOT deleted and costs money; delete it yourself:" >&2
      dry_run=yes tpu delete "$name" >&2
      ((code != 0)) || code=1
    fi
  fi
  rm -rf "$scratch"
  exit "$code"
}

main() {
  parse_options "name zone type bucket config project version restarts evaluate last \
copy-every poll" "spot keep yes dry-run help" "$@"
  check_options
  [[ -n $dry_run ]] || command -v gcloud >/dev/null ||
    mistake "gcloud is missing; see https://cloud.google.com/sdk/docs/install"
  cat >&2 <<END
TPU VM    $name, $type, ${spot:+spot, }$version, in $zone${project:+ of $project}
training  $(quoted "$config" ${overrides[@]+"${overrides[@]}"})
kept in   $bucket
The VM costs money until it is deleted; $(
    [[ -n $keep ]] && echo "it is kept (--keep)" || echo "it is deleted at the end"
  ), also if it is there already.
END
  [[ -n $dry_run ]] || confirm
  scratch=$(mktemp -d) owned="" started=""
  trap finish EXIT
  trap 'exit 129' HUP
  trap 'exit 130' INT
  trap 'exit 143' TERM
  [[ -z $(git status --porcelain) ]] || say "what is not committed stays here"
  git archive --format=tar.gz --output="$scratch/code.tar.gz" HEAD
  train
  score
}

main "$@"
