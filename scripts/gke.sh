#!/usr/bin/env bash
# Trains on TPUs of a GKE cluster: makes a JobSet from a config and applies it. Pods
# that are preempted or fail are started again and go on from the last checkpoint; a
# mistake of the user (exit code 2) is not tried again. It asks before it spends.
#
# The cluster needs the JobSet controller (0.6 or newer), a node pool with the
# accelerator and topology, and the GCS FUSE CSI driver for --bucket. Make that bucket
# with a hierarchical namespace: there the program's renames of folders are atomic, as
# it expects. The folder must be there.
#
# Usage: scripts/gke.sh OPTION ... [-- --config.SECTION.FIELD=VALUE ...]
#   --name=NAME         of the JobSet
#   --image=IMAGE       such as the one that scripts/Dockerfile makes
#   --accelerator=NAME  the node pool's cloud.google.com/gke-tpu-accelerator,
#                       such as tpu-v5-lite-podslice
#   --topology=AxB      the node pool's, such as 2x4; AxBxC on v4 and v5p
#   --chips-per-host=N  default: what the node pools of the topology have
#   --bucket=gs://BUCKET[/FOLDER]   where the run is kept, or
#   --pvc=CLAIM         a volume claim that all pods may write to (Filestore)
#   --config=FILE       config in the last commit, such as configs/base.py
#   --service-account=NAME   Kubernetes account that may write to the bucket;
#                       default: default
#   --namespace=NAME    default: kubectl's
#   --restarts=N        how often all pods are started again; default 20
#   --spot              on spot nodes: cheaper, may be preempted
#   --yes               do not ask
#   --dry-run           print the manifest and the command, and call nothing
#
# Example: scripts/gke.sh --name=base --image=us-docker.pkg.dev/me/images/base \
#   --accelerator=tpu-v5-lite-podslice --topology=2x4 --bucket=gs://my-bucket/base \
#   --config=configs/base.py -- --config.train.seed=1
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/env.sh
source scripts/env.sh
# shellcheck source=scripts/launch.sh
source scripts/launch.sh

name="" image="" accelerator="" topology="" chips_per_host="" bucket="" pvc="" config=""
service_account=default namespace="" restarts=20 spot="" yes="" dry_run="" help=""

check_options() {
  local label='[a-z]([-a-z0-9]{0,38}[a-z0-9])?'
  local words="a name of at most 40 small letters, digits and hyphens"
  [[ -z $help ]] || { usage && exit 0; }
  require name "$name" "$label" "$words"
  require image "$image" '[A-Za-z0-9][A-Za-z0-9._/:@-]*' "the name of an image"
  require accelerator "$accelerator" 'tpu[-a-z0-9]+' "such as tpu-v5-lite-podslice"
  require topology "$topology" '[1-9][0-9]*(x[1-9][0-9]*){1,2}' "such as 2x4 or 2x2x2"
  [[ -z $bucket || -z $pvc ]] || mistake "--bucket and --pvc: give one of them"
  if [[ -n $pvc ]]; then
    require pvc "$pvc" '[a-z0-9]([-.a-z0-9]*[a-z0-9])?' "the name of a volume claim"
  else
    require bucket "$bucket" 'gs://[a-z0-9][a-z0-9._-]+(/[A-Za-z0-9._=-]+)*' \
      "a bucket or a folder in it such as gs://my-bucket/base"
  fi
  require_config "$config"
  require service-account "$service_account" "$label" "$words"
  require namespace "${namespace:-x}" "$label" "$words"
  require restarts "$restarts" '[0-9]{1,4}' "a whole number"
  chips=$((${topology//x/*}))
  [[ -n $chips_per_host ]] || chips_per_host=$(chips_of_a_host)
  require chips-per-host "$chips_per_host" '1|2|4|8' "1, 2, 4 or 8"
  ((chips % chips_per_host == 0)) || mistake \
    "--topology=$topology has $chips chips, which --chips-per-host=$chips_per_host" \
    "does not divide"
  hosts=$((chips / chips_per_host))
}

# Up to 8 chips in two dimensions are one machine; all others have 4 a machine.
chips_of_a_host() {
  if [[ $topology != *x*x* ]] && ((chips <= 8)); then
    echo "$chips"
  else
    echo 4
  fi
}

# Prints $1 as a string of YAML in double quotes.
yaml() {
  local text=$1 out="" char i
  for ((i = 0; i < ${#text}; i++)); do
    char=${text:i:1}
    case $char in
      '"' | \\) out+="\\$char" ;;
      [[:cntrl:]]) out+=$(printf '\\x%02x' "'$char") ;;
      *) out+=$char ;;
    esac
  done
  printf '"%s"' "$out"
}

# Prints the program's arguments as a YAML list. Kubernetes would put variables in the
# place of $(NAME); $$ is a plain $.
arguments() {
  local argument
  local given=(train --config="$config" --workdir=/run/workdir)
  ((hosts == 1)) || given+=(--distributed=auto)
  for argument in "${given[@]}" ${overrides[@]+"${overrides[@]}"}; do
    printf '              - %s\n' "$(yaml "${argument//\$/\$\$}")"
  done
}

# Prints the names of the pods, which JAX reads; GKE would set the same.
host_names() {
  local host names=""
  for ((host = 0; host < hosts; host++)); do
    names+=,$name-worker-0-$host.$name
  done
  yaml "${names#,}"
}

volume() {
  if [[ -n $pvc ]]; then
    cat <<END
              persistentVolumeClaim:
                claimName: $(yaml "$pvc")
END
    return
  fi
  local path=${bucket#gs://}
  local options=implicit-dirs,rename-dir-limit=100000
  [[ $path != */* ]] || options+=,only-dir:${path#*/}
  # Token ids are read here and there: whole files come once and stay on the node.
  options+=,file-cache:max-size-mb:-1,file-cache:cache-file-for-range-read:true
  cat <<END
              csi:
                driver: gcsfuse.csi.storage.gke.io
                volumeAttributes:
                  bucketName: $(yaml "${path%%/*}")
                  mountOptions: $(yaml "$options")
END
}

manifest() {
  local index=batch.kubernetes.io/job-completion-index
  cat <<END
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $(yaml "$name")
END
  # All machines of a topology of several are one node pool, which the job fills.
  ((hosts == 1)) || cat <<END
  annotations:
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
END
  cat <<END
spec:
  network:
    enableDNSHostnames: true
    publishNotReadyAddresses: true
  failurePolicy:
    maxRestarts: $restarts
    rules:
    - action: FailJobSet
      onJobFailureReasons:
      - PodFailurePolicy
  replicatedJobs:
  - name: worker
    replicas: 1
    template:
      spec:
        parallelism: $hosts
        completions: $hosts
        completionMode: Indexed
        backoffLimit: 0
        podFailurePolicy:
          rules:
          - action: FailJob
            onExitCodes:
              containerName: train
              operator: In
              values: [2]
        template:
END
  [[ -z $bucket ]] || cat <<END
          metadata:
            annotations:
              gke-gcsfuse/volumes: "true"
END
  cat <<END
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: 120
            serviceAccountName: $(yaml "$service_account")
            nodeSelector:
              cloud.google.com/gke-tpu-accelerator: $(yaml "$accelerator")
              cloud.google.com/gke-tpu-topology: $(yaml "$topology")
END
  [[ -z $spot ]] || echo '              cloud.google.com/gke-spot: "true"'
  cat <<END
            containers:
            - name: train
              image: $(yaml "$image")
              args:
$(arguments)
              ports:
              - containerPort: 8471
              - containerPort: 8482
              env:
              - name: TPU_WORKER_HOSTNAMES
                value: $(host_names)
              - name: TPU_WORKER_ID
                valueFrom:
                  fieldRef:
                    fieldPath: metadata.annotations['$index']
              resources:
                requests:
                  google.com/tpu: $chips_per_host
                limits:
                  google.com/tpu: $chips_per_host
              volumeMounts:
              - name: workdir
                mountPath: /run/workdir
            volumes:
            - name: workdir
$(volume)
END
}

main() {
  local kubectl=(kubectl)
  parse_options "name image accelerator topology chips-per-host bucket pvc config \
service-account namespace restarts" "spot yes dry-run help" "$@"
  check_options
  [[ -z $namespace ]] || kubectl+=("--namespace=$namespace")
  if [[ -n $dry_run ]]; then
    manifest
    quoted "${kubectl[@]}" apply --filename=- >&2
    return
  fi
  command -v kubectl >/dev/null ||
    mistake "kubectl is missing; see https://kubernetes.io/docs/tasks/tools"
  cat >&2 <<END
JobSet    $name, $hosts x $chips_per_host chips${spot:+, spot}, $accelerator $topology
training  $(quoted "$config" ${overrides[@]+"${overrides[@]}"})
kept in   ${pvc:-$bucket}
The nodes cost money until training ends; at most $restarts restarts.
END
  confirm
  manifest | "${kubectl[@]}" apply --filename=- ||
    die "kubectl could not apply it (see above)"
  cat >&2 <<END
== next
$(quoted "${kubectl[@]}" get "jobset/$name" --watch)
$(quoted "${kubectl[@]}" logs --follow "job/$name-worker-0")
$(quoted "${kubectl[@]}" delete "jobset/$name")
END
}

main "$@"
