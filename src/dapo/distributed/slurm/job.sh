
log() { echo "dapo submit: $*"; }

fail() {
    log "$*" >&2
    touch "$state/$SLURM_JOB_ID-failed"
    exit 1
}

newest_checkpoint() { find "$run_dir/checkpoints" -maxdepth 1 -name 'step_*' 2>/dev/null | sort | tail -n 1; }

# ---- signals: both save and end the run; after USR1, sent before the time limit, the job is requeued

is_stopping='' wants_requeue='' was_interrupted='' dapo='' head='' workers='' ray_tmp=''

stop_dapo() {
    is_stopping=yes
    was_interrupted=yes
    [ -z "$dapo" ] || kill -TERM "$dapo" 2>/dev/null
}

trap 'wants_requeue=yes; stop_dapo' USR1
trap stop_dapo TERM
trap stop_ray EXIT

wait_for() { # the exit code of a child, also if a signal interrupts the wait
    local code
    while :; do
        was_interrupted=''
        wait "$1"
        code=$?
        [ -n "$was_interrupted" ] || return "$code"
    done
}

is_alive() { kill -0 "$1" 2>/dev/null; }

terminate() { # a child: a signal (default TERM), then KILL if it is still alive after 30 s
    [ -n "$1" ] || return 0
    kill -"${2:-TERM}" "$1" 2>/dev/null
    for _ in $(seq 150); do
        is_alive "$1" || break
        sleep 0.2
    done
    kill -KILL "$1" 2>/dev/null
    wait "$1" 2>/dev/null
}

# ---- Ray: the head on this node, a worker on each other node. Other jobs may share a node, so ports are free ones, and
# `ray stop`, which would end their Ray as well, is not used

ray_start() {
    exec "$python" -P -m ray.scripts.scripts start "$@" --block --min-worker-port=0 --max-worker-port=0 \
        --dashboard-agent-listen-port=0 --num-cpus="$SLURM_CPUS_ON_NODE" --num-gpus="${SLURM_GPUS_ON_NODE:-0}"
}

ray_worker() { # until USR1, which srun forwards to its tasks; after TERM it would kill them
    trap '' USR1 # for Ray itself
    ray_start --address="$address" >>"$state/$SLURM_JOB_ID-ray-$SLURMD_NODENAME.log" 2>&1 &
    local ray=$!
    trap 'kill -TERM "$ray" 2>/dev/null' USR1
    wait "$ray"
    wait "$ray"
    keep_ray_logs
    rm -rf "$ray_tmp"
}

keep_ray_logs() { # if the run has failed: they are on each node's own disk
    [ ! -e "$state/$SLURM_JOB_ID-failed" ] ||
        cp -r "$ray_tmp/session_latest/logs" "$state/$SLURM_JOB_ID-ray-logs-$SLURMD_NODENAME" 2>/dev/null
}

start_ray() {
    local deadline=$((SECONDS + start_timeout_s)) node_wait
    unset RAY_ADDRESS RAY_AUTH_TOKEN # the user's would override ours
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$state/$SLURM_JOB_ID-token" RAY_USAGE_STATS_ENABLED=0
    rm -f "$RAY_AUTH_TOKEN_PATH"
    (umask 077 && "$python" -P -c 'import secrets; print(secrets.token_hex(32), end="")' >"$RAY_AUTH_TOKEN_PATH") ||
        fail "$RAY_AUTH_TOKEN_PATH cannot be written"
    ray_tmp=$(mktemp -d /tmp/dapo-ray-XXXXXX) || fail "/tmp of $SLURMD_NODENAME cannot be written to"

    log "starting Ray on $SLURM_JOB_NUM_NODES nodes: $SLURM_JOB_NODELIST"
    ray_start --head --port=0 --include-dashboard=false --temp-dir="$ray_tmp" ${head_ip:+--node-ip-address="$head_ip"} \
        >>"$state/$SLURM_JOB_ID-ray-$SLURMD_NODENAME.log" 2>&1 &
    head=$!
    until [ -s "$ray_tmp/ray_current_cluster" ]; do
        [ -z "$is_stopping" ] || return 0
        is_alive "$head" || fail "Ray did not start; see $state/$SLURM_JOB_ID-ray-$SLURMD_NODENAME.log"
        [ "$SECONDS" -lt "$deadline" ] || fail "Ray was not ready after $start_timeout_s s"
        sleep 0.2
    done
    address=$(cat "$ray_tmp/ray_current_cluster")

    if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
        export python state address ray_tmp
        # a lost worker must not end the others, whatever the cluster's configuration says: Ray handles it
        srun --relative=1 --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --ntasks-per-node=1 \
            --cpu-bind=none --kill-on-bad-exit=0 --export=ALL \
            bash -c "$(declare -f ray_start ray_worker keep_ray_logs); ray_worker" &
        workers=$!
    fi
    "$python" -P -m dapo.distributed.slurm.wait_for_nodes "$address" "$SLURM_JOB_NUM_NODES" $((deadline - SECONDS)) &
    node_wait=$!
    while is_alive "$node_wait"; do
        if [ -n "$is_stopping" ] || { [ -n "$workers" ] && ! is_alive "$workers"; }; then
            terminate "$node_wait"
            [ -n "$is_stopping" ] || fail "a worker of Ray has ended; see $state/$SLURM_JOB_ID-ray-*.log"
            return 0
        fi
        sleep 0.2
    done
    wait_for "$node_wait" || fail "Ray is not ready on all nodes; see $state/$SLURM_JOB_ID-ray-*.log"
    overrides+=("launcher=ray:$address")
}

stop_ray() {
    terminate "$workers" USR1
    terminate "$head"
    [ -z "$ray_tmp" ] || keep_ray_logs
    [ -z "$ray_tmp" ] || rm -rf "$ray_tmp"
    rm -f "$state/$SLURM_JOB_ID-token" "$state/$SLURM_JOB_ID-failed"
    workers='' head='' ray_tmp=''
}

# ---- the run

before=$(newest_checkpoint)
[ -z "$use_ray" ] || start_ray
if [ -e "$run_dir/config.yaml" ]; then
    command=(resume "$run_dir")
else
    command=(train "$config" --run-dir "$run_dir")
fi
code=143
if [ -z "$is_stopping" ]; then
    "$python" -P -m dapo "${command[@]}" "${overrides[@]}" &
    dapo=$!
    [ -z "$is_stopping" ] || kill -TERM "$dapo" 2>/dev/null # the signal came before dapo had a process id
    wait_for "$dapo"
    code=$?
    dapo=''
fi
case $code in 0 | 130 | 143) ;; *) touch "$state/$SLURM_JOB_ID-failed" ;; esac
stop_ray

if [ -n "$wants_requeue" ] && [ "$code" -eq 143 ]; then
    if [ "$(newest_checkpoint)" = "$before" ]; then
        log "no step was finished within the time limit, so the job is not requeued: raise it with --time" >&2
    else
        log "the time limit is near: the run is saved, and the job is requeued to continue it"
        scontrol requeue "$SLURM_JOB_ID" || log "requeueing failed; continue with: sbatch $state/job.sh" >&2
    fi
fi
exit "$code"
