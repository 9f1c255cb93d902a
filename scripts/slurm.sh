#!/usr/bin/env bash
# Trains on GPUs of a Slurm cluster: writes WORKDIR/job.sbatch and submits it. Before
# its time is over the job saves, ends and queues itself again; one that is preempted or
# whose node fails is queued again by Slurm. It asks before it submits.
#
# The repository and WORKDIR must be in a folder that all nodes see.
#
# Usage: scripts/slurm.sh OPTION ... [-- --config.SECTION.FIELD=VALUE ...]
#   --workdir=FOLDER    where the run is kept
#   --config=FILE       config in the last commit, such as configs/base.py
#   --nodes=N           default 1
#   --gpus-per-node=N   default 1
#   --cpus-per-gpu=N    default 8
#   --time=TIME         of one go, such as 12:00:00
#   --partition=NAME    --account=NAME  --qos=NAME   default: the cluster's
#   --name=NAME         of the job; default transformer-jax
#   --requeues=N        how often the job queues itself again; default 100
#   --program=FILE      transformer-jax of an environment that is there already;
#                       default: .venv, made here and now where it is missing
#   --yes               do not ask
#   --dry-run           print the job and the command, and write and call nothing
#
# Example: scripts/slurm.sh --workdir=runs/base --config=configs/base.py --nodes=2 \
#   --gpus-per-node=4 --time=12:00:00 --partition=gpu -- --config.train.seed=1
set -euo pipefail

from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/env.sh
source scripts/env.sh
# shellcheck source=scripts/launch.sh
source scripts/launch.sh

workdir="" config="" nodes=1 gpus_per_node=1 cpus_per_gpu=8 time="" partition=""
account="" qos="" name=transformer-jax requeues=100 program="" yes="" dry_run="" help=""

check_options() {
  local number='[1-9][0-9]{0,3}' word='[A-Za-z0-9_][A-Za-z0-9_.,@-]*'
  [[ -z $help ]] || { usage && exit 0; }
  [[ -n $workdir ]] || mistake "--workdir is missing; it is a folder that all nodes see"
  [[ ! $workdir =~ [[:cntrl:]%\\] ]] || mistake \
    "--workdir=$(printf %q "$workdir") has %, \\ or a control character; name another"
  [[ $workdir == /* ]] || workdir=$from/$workdir # as the caller meant it
  require_config "$config"
  require nodes "$nodes" "$number" "a whole number above 0"
  require gpus-per-node "$gpus_per_node" "$number" "a whole number above 0"
  require cpus-per-gpu "$cpus_per_gpu" "$number" "a whole number above 0"
  require time "$time" '([0-9]+-)?[0-9]+(:[0-9]+){0,2}' "a time such as 12:00:00"
  require partition "${partition:-x}" "$word" "a name"
  require account "${account:-x}" "$word" "a name"
  require qos "${qos:-x}" "$word" "a name"
  require name "$name" "$word" "a name"
  require requeues "$requeues" '[0-9]{1,4}' "a whole number"
  [[ -z $program || $program == /* ]] || program=$from/$program
  [[ -z $program || -x $program ]] || mistake \
    "--program=$(printf %q "$program") cannot be run; name an installed transformer-jax"
}

# Prints the job. One process a GPU, since JAX on Slurm gives process N of a node its
# GPU N; so each must see all of the node's GPUs, hence no binding.
job() {
  local command=(srun "--ntasks-per-node=$gpus_per_node")
  command+=("--cpus-per-task=$cpus_per_gpu")
  # When one process has failed the others, which may be saving, have some time left.
  command+=(--gpu-bind=none --kill-on-bad-exit=0 --wait=100)
  command+=("${program:-.venv/bin/transformer-jax}" train)
  command+=("--config=$config" "--workdir=$workdir")
  ((nodes * gpus_per_node == 1)) || command+=(--distributed=auto)
  command+=(${overrides[@]+"${overrides[@]}"})
  cat <<END
#!/usr/bin/env bash
#SBATCH --job-name=$name
#SBATCH --nodes=$nodes
#SBATCH --ntasks-per-node=$gpus_per_node
#SBATCH --gpus-per-node=$gpus_per_node
#SBATCH --cpus-per-task=$cpus_per_gpu
#SBATCH --time=$time
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@120
END
  [[ -z $partition ]] || echo "#SBATCH --partition=$partition"
  [[ -z $account ]] || echo "#SBATCH --account=$account"
  [[ -z $qos ]] || echo "#SBATCH --qos=$qos"
  printf 'requeues=%s\ncommand=(%s)\n' "$requeues" "$(quoted "${command[@]}")"
  cat <<'END'

# 120 s before the time is over this shell alone gets SIGTERM and passes it on. Where
# the job is cancelled or preempted the program gets it from Slurm, too, and must not
# get it twice. So only a job that Slurm lets run passes it on, and queues itself.
let_run() {
  [[ $(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) == RUNNING ]]
}

stop() {
  stopping=yes
  trap 'stopping=yes' TERM
  ! let_run || scancel --signal=TERM "$SLURM_JOB_ID"
}

trap stop TERM
"${command[@]}" &
stopping=yes
while [[ -n $stopping ]]; do # a signal ends `wait`, but not the program
  stopping="" code=0
  wait $! || code=$?
done
if ((code == 143)) && let_run; then
  if ((${SLURM_RESTART_COUNT:-0} < requeues)); then
    echo "stopped and saved; queued again"
    scontrol requeue "$SLURM_JOB_ID"
  else
    echo "stopped and saved; not queued again, after $requeues times" >&2
  fi
fi
exit "$code"
END
}

main() {
  local submit
  parse_options "workdir config nodes gpus-per-node cpus-per-gpu time partition \
account qos name requeues program" "yes dry-run help" "$@"
  check_options
  submit=(sbatch "--chdir=$PWD" "--output=$workdir/slurm-%j.log" "$workdir/job.sbatch")
  if [[ -n $dry_run ]]; then
    job
    quoted "${submit[@]}" >&2
    return
  fi
  command -v sbatch >/dev/null || mistake "sbatch is missing; run this on a login node"
  cat >&2 <<END
job       $name, $nodes x $gpus_per_node GPUs for $time, at most $((requeues + 1)) times
training  $(quoted "$config" ${overrides[@]+"${overrides[@]}"})
kept in   $workdir
END
  confirm
  [[ -n $program ]] || ensure_env gpu >&2
  mkdir -p "$workdir"
  job >"$workdir/job.sbatch"
  "${submit[@]}" || die "sbatch did not take $workdir/job.sbatch (see above)"
}

main "$@"
