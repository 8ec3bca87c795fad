#!/usr/bin/env bash
# Aggregated multimodal workers behind Dynamo's frontend with KV-aware routing; see --help.
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'HELP'
usage: launch/agg_multimodal_router.sh --model MODEL [options] [-- ENGINE-ARGUMENT...]

Starts N workers of this package and Dynamo's frontend with its KV router in front of
them, all at the same time, waits until all are ready, and keeps watch until it is stopped.
Discovery is a folder and every socket is on loopback: neither etcd nor NATS is needed.

what to serve:
  --model MODEL             a folder, or the name of a model on the hub (required)
  --served-model-name NAME  what clients call it (default: the folder's name, or MODEL)
  --engine NAME             vllm; others are not built yet (default: vllm)
  --workers N               how many (default: 1)
  -- ARGUMENT...            everything after -- goes to each worker as it is: vLLM's engine
                            arguments and this package's own, such as --mm-max-item-mb 512; the
                            whole list: python -m dynamo_worker_ext.vllm --help

where it runs:
  --cpu, --gpu              default: GPUs if nvidia-smi lists one and vLLM is not a CPU build.
                            On CPUs the cores are shared out among the workers, and each keeps
                            VLLM_CPU_KVCACHE_SPACE GB (default here: 4) for its KV cache. On GPUs
                            worker I gets CUDA_VISIBLE_DEVICES=I. GPUs were not tested here.
  --gpus-per-worker K       worker I gets the GPUs I*K to I*K+K-1 (default: 1). Where the
                            environment has CUDA_VISIBLE_DEVICES, they are taken from that list.

the frontend:
  --frontend vllm|rust      who makes chats into tokens: vLLM's own processor, which also
                            pre-processes images and passes them on, or Dynamo's built-in one,
                            which leaves images to the workers (default: vllm)
  --mm-transfer HOW         how the vllm frontend passes pre-processed images on: auto (by what each
                            worker's card says that it can read), arena, shm, nixl or off
                            (default: auto with --frontend vllm, off with --frontend rust)
  --host HOST               where the frontend listens (default: 127.0.0.1)
  --http-port PORT          and on which port; 0 for a free one (default: 8000)

while it runs:
  --metrics-port PORT       worker I serves /metrics, /health and /live on loopback at PORT+I;
                            below 32768 (default: free ports)
  --discovery DIR           folder for discovery, which other workers and frontends may share and
                            which is kept (default: a private one, removed at the end)
  --log-dir DIR             one log a process (default: logs/DATE-TIME in this repository)
  --ready-file PATH         when all are ready, write their URLs, pids and logs here as JSON, in
                            one step; removed at the end
  --start-timeout SECONDS   to be ready (default: 600)
  --drain-timeout SECONDS   for requests in flight after TERM or Ctrl-C (default: 60)
  --stop-with PID           stop when that process is gone
  -h, --help                this text

environment:
  DWE_VENV_DIR   where launch/setup.sh made the environments, instead of .venv
  DWE_PYTHON     a Python that has this package, Dynamo and the engine, instead of those
  DYN_*, VLLM_*, HF_*  go through to all processes and win over what is set here: for example
                 DYN_MIGRATION_LIMIT=2 lets the frontend try a failed request on another worker,
                 and DYN_MM_ALLOW_INTERNAL=1 allows image URLs with private addresses.

When a worker dies, that is said and the others go on; when none is left, or the frontend dies,
everything is stopped. TERM and Ctrl-C drain, stop everything and leave no process and no
shared-memory segment; a second one does not drain.

exit status: 0 stopped as asked; 1 something failed; 2 wrong usage; 128+N signal N while starting
HELP
}

wrong() {
    say "$SCRIPT: $1" "(--help lists what there is)"
    exit 2
}

# --- the command line ----------------------------------------------------------------------------

ENGINE=vllm MODEL="" SERVED="" WORKERS=1 DEVICE=auto GPUS_PER_WORKER=1
FRONTEND=vllm TRANSFER="" HOST=127.0.0.1 HTTP_PORT=8000
METRICS_PORT="" DISCOVERY="" LOG_DIR="" READY_PATH="" START_S=600 DRAIN=60 STOP_WITH=""
ENGINE_ARGS=()

while (($#)); do
    case $1 in
    -h | --help) usage; exit 0 ;;
    --) shift; ENGINE_ARGS=("$@"); break ;;
    --cpu) DEVICE=cpu; shift; continue ;;
    --gpu) DEVICE=gpu; shift; continue ;;
    --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
    esac
    case $1 in
    --engine | --model | --served-model-name | --workers | --gpus-per-worker | --frontend | \
        --mm-transfer | --host | --http-port | --metrics-port | --discovery | --log-dir | \
        --ready-file | --start-timeout | --drain-timeout | --stop-with)
        (($# > 1)) || wrong "$1 needs a value"
        ;;
    *) wrong "unknown argument: $1 (engine arguments go after --)" ;;
    esac
    case $1 in
    --engine) ENGINE=$2 ;;
    --model) MODEL=$2 ;;
    --served-model-name) SERVED=$2 ;;
    --workers) WORKERS=$2 ;;
    --gpus-per-worker) GPUS_PER_WORKER=$2 ;;
    --frontend) FRONTEND=$2 ;;
    --mm-transfer) TRANSFER=$2 ;;
    --host) HOST=$2 ;;
    --http-port) HTTP_PORT=$2 ;;
    --metrics-port) METRICS_PORT=$2 ;;
    --discovery) DISCOVERY=$2 ;;
    --log-dir) LOG_DIR=$2 ;;
    --ready-file) READY_PATH=$2 ;;
    --start-timeout) START_S=$2 ;;
    --drain-timeout) DRAIN=$2 ;;
    --stop-with) STOP_WITH=$2 ;;
    esac
    shift 2
done

[[ -n $MODEL ]] || wrong "--model is missing"
number --workers "$WORKERS" 1 64
number --gpus-per-worker "$GPUS_PER_WORKER" 1 64
number --http-port "$HTTP_PORT" 0 65535
number --start-timeout "$START_S" 1
number --drain-timeout "$DRAIN" 0
[[ -z $STOP_WITH ]] || number --stop-with "$STOP_WITH" 1
[[ -z $METRICS_PORT ]] || number --metrics-port "$METRICS_PORT" 1 $((32768 - WORKERS))

[[ $ENGINE == vllm ]] || fail "--engine $ENGINE: only vllm is built in this version"
case $FRONTEND in
vllm) TRANSFER=${TRANSFER:-auto} ;;
rust)
    [[ ${TRANSFER:-off} == off ]] || fail "--mm-transfer $TRANSFER needs --frontend vllm" \
        "Dynamo's built-in processor does not pre-process images; its workers load them."
    TRANSFER=off
    ;;
*) fail "--frontend $FRONTEND: there is vllm and rust" ;;
esac
for argument in "${ENGINE_ARGS[@]}"; do
    case ${argument%%=*} in
    --model | --served-model-name | --drain-timeout)
        fail "${argument%%=*} after --: give it before --, the frontend or this script needs it too"
        ;;
    esac
done

# A name like org/model may be on the hub; anything else is a folder.
if [[ -d $MODEL ]]; then
    MODEL=$(cd "$MODEL" && pwd -P)
    [[ -f $MODEL/config.json ]] || fail "--model $MODEL: there is no config.json in that folder"
    SERVED=${SERVED:-${MODEL##*/}}
    # Nothing is to be looked up: all there is to know is in the folder.
    export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} TRANSFORMERS_OFFLINE=${TRANSFORMERS_OFFLINE:-1}
elif [[ ! $MODEL =~ ^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9._-]+$ ]]; then
    fail "--model $MODEL: there is no such folder" \
        "Give a folder with config.json in it, or a name of the form ORGANISATION/MODEL."
fi
SERVED=${SERVED:-$MODEL}

# --- the environment -----------------------------------------------------------------------------

VENVS=${DWE_VENV_DIR:-$REPO/.venv}
PYTHON=${DWE_PYTHON:-$VENVS/$ENGINE/bin/python}
command -v "$PYTHON" >/dev/null 2>&1 || fail "there is no $PYTHON" \
    "Make the environment with launch/setup.sh $ENGINE, or name a Python in DWE_PYTHON."
facts=$("$PYTHON" - <<'FACTS'
from importlib.metadata import version

from dynamo_worker_ext import transfer

print(version("vllm"), version("ai-dynamo"), version("dynamo-worker-ext"))
print(*transfer.usable())
FACTS
) || fail "$PYTHON lacks this package, Dynamo or vLLM; see above" \
    "launch/setup.sh $ENGINE makes an environment that has them."
{ read -r VLLM_VERSION DYNAMO_VERSION VERSION; read -r RECEIVABLE; } <<<"$facts"
if [[ " auto off $RECEIVABLE " != *" $TRANSFER "* ]]; then
    fail "--mm-transfer $TRANSFER: the workers of this version can receive: ${RECEIVABLE:-nothing}" \
        "Images sent another way would be lost."
fi

if [[ $DEVICE == auto ]]; then
    DEVICE=cpu
    if [[ $VLLM_VERSION != *+cpu* ]] && has_gpu; then DEVICE=gpu; fi
elif [[ $DEVICE == gpu ]]; then
    [[ $VLLM_VERSION != *+cpu* ]] || fail "--gpu, but $PYTHON has vLLM $VLLM_VERSION, a CPU build" \
        "Make another environment: DWE_VENV_DIR=DIR launch/setup.sh $ENGINE --gpu" \
        "and use it: DWE_VENV_DIR=DIR launch/$SCRIPT ..."
    has_gpu || fail "--gpu, but nvidia-smi lists no GPU"
fi
if [[ $DEVICE == cpu ]]; then export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-4}; fi

if [[ $DEVICE == gpu ]]; then
    IFS=, read -ra GPUS <<<"${CUDA_VISIBLE_DEVICES:-$(seq -s , 0 $(($(nvidia-smi -L | grep -c '^GPU') - 1)))}"
    ((${#GPUS[@]} >= WORKERS * GPUS_PER_WORKER)) ||
        fail "$WORKERS worker(s) with $GPUS_PER_WORKER GPU(s) each, but there are ${#GPUS[@]}"
fi

if ((HTTP_PORT != 0)); then
    why=$(port_is_free "$HOST" "$HTTP_PORT" 2>&1) || fail "$HOST:$HTTP_PORT cannot be had: $why" \
        "Choose another with --http-port; 0 takes a free one."
fi

prepare_run
DRAIN_S=$DRAIN
# Free ports beside the fixed ones; the last is for the frontend.
read -ra PORTS <<<"$(free_ports $((WORKERS + 1)))"
((HTTP_PORT != 0)) || HTTP_PORT=${PORTS[WORKERS]}
if [[ -n $METRICS_PORT ]]; then
    for ((i = 0; i < WORKERS; i++)); do
        PORTS[i]=$((METRICS_PORT + i))
        why=$(port_is_free "${DYN_SYSTEM_HOST:-127.0.0.1}" "${PORTS[i]}" 2>&1) ||
            fail "port ${PORTS[i]} for worker$i cannot be had: $why" "Choose others with --metrics-port."
    done
fi

LOG_DIR=${LOG_DIR:-$REPO/logs/$(date +%Y%m%d-%H%M%S)-$$}
mkdir -p -- "$LOG_DIR"
LOG_DIR=$(cd "$LOG_DIR" && pwd -P)
DISCOVERY=${DISCOVERY:-$RUN_DIR/discovery}
mkdir -p -- "$DISCOVERY"
DISCOVERY=$(cd "$DISCOVERY" && pwd -P)
export_loopback_environment "$DISCOVERY"
export_private_tmp

# --- start ---------------------------------------------------------------------------------------

# Where this script and its user reach the frontend.
reach() {
    case $HOST in
    0.0.0.0 | localhost) echo 127.0.0.1 ;;
    ::) echo ::1 ;;
    *) echo "$HOST" ;;
    esac
}
REACH=$(reach)
if [[ $REACH == *:* ]]; then URL=http://[$REACH]:$HTTP_PORT; else URL=http://$REACH:$HTTP_PORT; fi
SYSTEM_HOST=$DYN_SYSTEM_HOST
[[ $SYSTEM_HOST != 0.0.0.0 ]] || SYSTEM_HOST=127.0.0.1

worker_is_ready() {
    http_get "$SYSTEM_HOST" "$1" /health
    [[ $HTTP_STATUS == 200 ]]
}

# The frontend lists the model and sees as many workers as there are.
frontend_is_ready() {
    http_get "$REACH" "$HTTP_PORT" /v1/models
    [[ $HTTP_STATUS == 200 && $HTTP_BODY == *"\"$SERVED\""* ]] || return 1
    http_get "$REACH" "$HTTP_PORT" /health
    local seen
    seen=$(grep -o '"instance_id":[0-9]*' <<<"$HTTP_BODY" | sort -u | wc -l || true)
    ((seen >= WORKERS))
}

start_worker() {
    local i=$1 settings=("DYN_SYSTEM_PORT=${PORTS[$1]}")
    # Its status server logs an error for each probe that finds it not ready yet.
    settings+=("DYN_LOG=${DYN_LOG:-info,tower_http::trace::on_failure=off}")
    if [[ $DEVICE == gpu ]]; then
        local mine=("${GPUS[@]:i * GPUS_PER_WORKER:GPUS_PER_WORKER}")
        settings+=("CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${mine[*]}")")
    elif ((WORKERS > 1)) && [[ -z ${VLLM_CPU_OMP_THREADS_BIND:-} && " ${ENGINE_ARGS[*]} " != *tensor-parallel* ]]; then
        settings+=("VLLM_CPU_OMP_THREADS_BIND=$(cores_of "$i" "$WORKERS")")
    fi
    start "worker$i" "$LOG_DIR/worker$i.log" "worker_is_ready ${PORTS[$i]}" "${settings[@]}" \
        "$PYTHON" -m dynamo_worker_ext.vllm --model "$MODEL" --served-model-name "$SERVED" \
        --drain-timeout "$DRAIN" "${ENGINE_ARGS[@]}"
}

start_frontend() {
    local settings=() arguments=(--http-host "$HOST" --http-port "$HTTP_PORT" --router-mode kv)
    [[ $FRONTEND == rust ]] || arguments+=(--dyn-chat-processor vllm)
    settings+=("DYNAMO_MM_TRANSFER=$TRANSFER")
    # Its own system server would take the workers' port from the environment.
    start frontend "$LOG_DIR/frontend.log" frontend_is_ready -u DYN_SYSTEM_PORT "${settings[@]}" \
        "$PYTHON" -m dynamo_worker_ext.frontend "${arguments[@]}"
}

how_images_travel() {
    case $TRANSFER in
    off) echo "images left to the workers" ;;
    auto) echo "pre-processed images as each worker can take them" ;;
    *) echo "pre-processed images over $TRANSFER" ;;
    esac
}

banner "dynamo-worker-ext $VERSION: aggregated, multimodal, KV-aware routing" \
    model "$SERVED ($MODEL)" \
    workers "$WORKERS x vLLM $VLLM_VERSION on ${DEVICE^^}$([[ $DEVICE == cpu ]] || echo ' (not tested here)')" \
    frontend "Dynamo $DYNAMO_VERSION, $FRONTEND chat processor, $(how_images_travel)" \
    address "$URL" \
    discovery "$DYN_DISCOVERY_BACKEND$([[ $DYN_DISCOVERY_BACKEND != file ]] || echo ", $DISCOVERY")" \
    logs "$LOG_DIR"

for ((i = 0; i < WORKERS; i++)); do start_worker "$i"; done
start_frontend
wait_ready "$START_S"
STATUS_WHEN_SIGNALLED=0

# --- ready ---------------------------------------------------------------------------------------

write_ready_file() {
    local i where records=()
    for i in "${!PROC_PID[@]}"; do
        if ((i < WORKERS)); then where=http://$SYSTEM_HOST:${PORTS[i]}; else where=$URL; fi
        records+=("${PROC_NAME[$i]}" "${PROC_PID[$i]}" "$where" "${PROC_LOG[$i]}")
    done
    READY_FILE=$READY_PATH
    "$PYTHON" - "$READY_PATH" "$$" "$SERVED" "$FRONTEND" "$TRANSFER" "$DISCOVERY" "$LOG_DIR" "${records[@]}" <<'READY'
import json, os, sys

path, pid, model, processor, transfer, discovery, log_dir, *rest = sys.argv[1:]
keys = ("name", "pid", "url", "log")
processes = [dict(zip(keys, rest[i : i + 4], strict=True)) for i in range(0, len(rest), 4)]
for process in processes:
    process["pid"] = int(process["pid"])
frontend = processes.pop()
ready = {
    "url": frontend["url"], "model": model, "pid": int(pid), "frontend": frontend,
    "workers": processes, "chat_processor": processor, "mm_transfer": transfer,
    "discovery": discovery, "log_dir": log_dir,
}
with open(f"{path}.{pid}", "w") as file:
    json.dump(ready, file, indent=2)
    file.write("\n")
os.replace(file.name, path)
READY
}
[[ -z $READY_PATH ]] || write_ready_file

say "$BOLD$SERVED is served at $URL/v1/chat/completions$PLAIN"
for ((i = 0; i < WORKERS; i++)); do say "  worker$i's metrics: http://$SYSTEM_HOST:${PORTS[i]}/metrics"; done
[[ -n $STOP_WITH ]] || say "  Ctrl-C or TERM to $$ stops everything"

LEFT=$WORKERS
on_change() {
    if (($# == 0)); then
        [[ -n $STOP_WITH ]] && ! kill -0 "$STOP_WITH" || return 0
        say "$SCRIPT: process $STOP_WITH is gone; stopping"
        exit 0
    fi
    (($1 < WORKERS)) || fail "the frontend is gone; stopping everything"
    LEFT=$((LEFT - 1))
    ((LEFT > 0)) || fail "no worker is left; stopping everything"
    say "  $LEFT of $WORKERS workers go on"
}
watch on_change
