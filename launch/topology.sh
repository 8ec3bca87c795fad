# shellcheck shell=bash disable=SC2034 # some of these are read by the scripts only
# What the topology scripts share: they say which workers there are, and this starts and watches
# them. Sourced after common.sh, never run.

# A script sets these before it sources this file.
#   TITLE          of the banner
#   ROLES          what --disaggregation-mode says of workers, in the order in which they are listed
#   COUNT          of each role, how many workers an engine has by default
#   COUNT_FLAG     of each role, the flag that says it
#   TO_ENCODER     the role whose media encode workers encode, if there is one
#   FRONTEND       the processor by default
#   ENGINES_KNOWN  what --engine may say
# It has a function `usage`, and sources this file last, which then runs until it is stopped.

# help_of_topology: what --help says besides the script's own lines about what to serve.
help_of_topology() {
    cat <<'HELP'
where it runs:
  --cpu, --gpu              default: GPUs if nvidia-smi lists one and the engine is not a CPU
                            build. On CPUs the cores are shared out among vLLM's workers, and each
                            keeps VLLM_CPU_KVCACHE_SPACE GB (default here: 4) for its KV cache;
                            SGLang's get the arguments without which it does not run there. On GPUs
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
  DWE_PYTHON     a Python that has this package, Dynamo and vLLM, instead of those
  DWE_SGLANG_PYTHON  the same for SGLang. The frontend runs with the first, if it is there: vLLM's
                 processor needs it, also in front of SGLang's workers.
  DYN_*, VLLM_*, HF_*  go through to all processes and win over what is set here: for example
                 DYN_MIGRATION_LIMIT=2 lets the frontend try a failed request on another worker,
                 and DYN_MM_ALLOW_INTERNAL=1 allows image URLs with private addresses.

When a worker dies, that is said and the others go on; when none of its kind is left, or the
frontend dies, everything is stopped. TERM and Ctrl-C drain, stop everything and leave no process
and no shared-memory segment; a second one does not drain.

exit status: 0 stopped as asked; 1 something failed; 2 wrong usage; 128+N signal N while starting
HELP
}

wrong() {
    say "$SCRIPT: $1" "(--help lists what there is)"
    exit 2
}

# --- the command line ----------------------------------------------------------------------------

ENGINE=vllm MODEL="" TINY="" SERVED="" DEVICE=auto GPUS_PER_WORKER=1
TRANSFER="" HOST=127.0.0.1 HTTP_PORT=8000
METRICS_PORT="" DISCOVERY="" LOG_DIR="" READY_PATH="" START_S=600 DRAIN=60 STOP_WITH=""
ENGINE_ARGS=()

# The role that flag $1 counts workers of.
role_of_flag() {
    local role
    for role in "${ROLES[@]}"; do
        if [[ ${COUNT_FLAG[$role]} == "$1" ]]; then echo "$role"; fi
    done
}

while (($#)); do
    case $1 in
    -h | --help) usage; exit 0 ;;
    --) shift; ENGINE_ARGS=("$@"); break ;;
    --tiny) TINY=yes DEVICE=cpu; shift; continue ;;
    --cpu) DEVICE=cpu; shift; continue ;;
    --gpu) DEVICE=gpu; shift; continue ;;
    --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
    esac
    COUNTED=$(role_of_flag "$1")
    case ${COUNTED:-$1} in
    "$COUNTED" | --engine | --model | --served-model-name | --gpus-per-worker | --frontend | \
        --mm-transfer | --host | --http-port | --metrics-port | --discovery | --log-dir | \
        --ready-file | --start-timeout | --drain-timeout | --stop-with)
        (($# > 1)) || wrong "$1 needs a value"
        ;;
    *) wrong "unknown argument: $1 (engine arguments go after --)" ;;
    esac
    case ${COUNTED:-$1} in
    "$COUNTED") number "$1" "$2" 1 64 && COUNT[$COUNTED]=$2 ;;
    --engine) ENGINE=$2 ;;
    --model) MODEL=$2 ;;
    --served-model-name) SERVED=$2 ;;
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

if [[ -n $TINY ]]; then
    [[ -z $MODEL ]] || wrong "--tiny serves a model of its own; leave --model out"
    [[ $DEVICE == cpu ]] || wrong "--tiny serves on the CPU; leave --gpu out"
    use_tiny_model "$ENGINE"
    MODEL=$TINY_MODEL SERVED=${SERVED:-tiny} ENGINE_ARGS=("${TINY_ARGS[@]}" "${ENGINE_ARGS[@]}")
fi
[[ -n $MODEL ]] || wrong "--model is missing, or --tiny"
number --gpus-per-worker "$GPUS_PER_WORKER" 1 64
number --http-port "$HTTP_PORT" 0 65535
number --start-timeout "$START_S" 1
number --drain-timeout "$DRAIN" 0
[[ -z $STOP_WITH ]] || number --stop-with "$STOP_WITH" 1

[[ " $ENGINES_KNOWN " == *" $ENGINE "* ]] || fail "--engine $ENGINE: there is ${ENGINES_KNOWN// /, }"
ENGINES=("$ENGINE")
if [[ $ENGINE == both ]]; then ENGINES=(vllm sglang); fi
# By number, in the order of their start.
WORKER_NAME=() WORKER_ENGINE=() WORKER_ROLE=()
declare -A NUMBERED=() # how many of a role have a name
for engine in "${ENGINES[@]}"; do
    for role in "${ROLES[@]}"; do
        for ((i = 0; i < COUNT[$role]; i++)); do
            WORKER_NAME+=("${role/#agg/worker}${NUMBERED[$role]:-0}")
            NUMBERED[$role]=$((${NUMBERED[$role]:-0} + 1))
            WORKER_ENGINE+=("$engine") WORKER_ROLE+=("$role")
        done
    done
done
TOTAL=${#WORKER_NAME[@]}
[[ -z $METRICS_PORT ]] || number --metrics-port "$METRICS_PORT" 1 $((32768 - TOTAL))
case $FRONTEND in
vllm) TRANSFER=${TRANSFER:-auto} ;;
rust)
    [[ ${TRANSFER:-off} == off ]] || fail "--mm-transfer $TRANSFER needs --frontend vllm" \
        "Dynamo's built-in processor does not pre-process images; its workers load them."
    TRANSFER=off
    ;;
*) fail "--frontend $FRONTEND: there is vllm and rust" ;;
esac
VLLM_ARGS=() SGLANG_ARGS=() SECOND=""
for argument in "${ENGINE_ARGS[@]}"; do
    if [[ $argument == -- && $ENGINE == both && -z $SECOND ]]; then
        SECOND=yes
        continue
    fi
    if [[ $ENGINE == sglang || -n $SECOND ]]; then SGLANG_ARGS+=("$argument"); else VLLM_ARGS+=("$argument"); fi
    case ${argument%%=*} in
    --model | --model-path | --served-model-name | --drain-timeout)
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
declare -A PYTHONS=(
    [vllm]=${DWE_PYTHON:-$VENVS/vllm/bin/python}
    [sglang]=${DWE_SGLANG_PYTHON:-$VENVS/sglang/bin/python}
)
declare -A VERSIONS=()
PYTHON=${PYTHONS[${ENGINES[0]}]} # of this script's own little programs
CPU_BUILD=""
for engine in "${ENGINES[@]}"; do
    command -v "${PYTHONS[$engine]}" >/dev/null 2>&1 || fail "there is no ${PYTHONS[$engine]}" \
        "Make the environment with launch/setup.sh $engine, or name a Python in" \
        "$([[ $engine == vllm ]] || echo DWE_SGLANG_PYTHON, not )DWE_PYTHON."
    facts=$("${PYTHONS[$engine]}" - "$engine" <<'FACTS'
import sys
from importlib.metadata import version

from dynamo_worker_ext import transfer

print(version(sys.argv[1]), version("torch"), version("ai-dynamo"), version("dynamo-worker-ext"))
print(*transfer.usable())
FACTS
    ) || fail "${PYTHONS[$engine]} lacks this package, Dynamo or $engine; see above" \
        "launch/setup.sh $engine makes an environment that has them."
    { read -r ENGINE_VERSION TORCH_VERSION DYNAMO_VERSION VERSION; read -r RECEIVABLE; } <<<"$facts"
    VERSIONS[$engine]=$ENGINE_VERSION
    if [[ $ENGINE_VERSION$TORCH_VERSION == *+cpu* ]]; then CPU_BUILD=$engine; fi
    if [[ " auto off $RECEIVABLE " != *" $TRANSFER "* ]]; then
        fail "--mm-transfer $TRANSFER: the workers of this version can receive: ${RECEIVABLE:-nothing}" \
            "Images sent another way would be lost."
    fi
done
FRONTEND_PYTHON=${PYTHONS[vllm]}
if ! command -v "$FRONTEND_PYTHON" >/dev/null 2>&1; then
    [[ $FRONTEND == rust ]] || fail "--frontend vllm needs vLLM's processor, and there is no $FRONTEND_PYTHON" \
        "Make its environment with launch/setup.sh vllm, or use --frontend rust."
    FRONTEND_PYTHON=$PYTHON
fi

if [[ $DEVICE == auto ]]; then
    DEVICE=cpu
    if [[ -z $CPU_BUILD ]] && has_gpu; then DEVICE=gpu; fi
elif [[ $DEVICE == gpu ]]; then
    [[ -z $CPU_BUILD ]] || fail "--gpu, but ${PYTHONS[$CPU_BUILD]} has a CPU build of $CPU_BUILD ${VERSIONS[$CPU_BUILD]}" \
        "Make another environment: DWE_VENV_DIR=DIR launch/setup.sh $CPU_BUILD --gpu" \
        "and use it: DWE_VENV_DIR=DIR launch/$SCRIPT ..."
    has_gpu || fail "--gpu, but nvidia-smi lists no GPU"
fi
if [[ $DEVICE == cpu ]]; then export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-4}; fi

if [[ $DEVICE == gpu ]]; then
    IFS=, read -ra GPUS <<<"${CUDA_VISIBLE_DEVICES:-$(seq -s , 0 $(($(nvidia-smi -L | grep -c '^GPU') - 1)))}"
    ((${#GPUS[@]} >= TOTAL * GPUS_PER_WORKER)) ||
        fail "$TOTAL worker(s) with $GPUS_PER_WORKER GPU(s) each, but there are ${#GPUS[@]}"
fi

if ((HTTP_PORT != 0)); then
    why=$(port_is_free "$HOST" "$HTTP_PORT" 2>&1) || fail "$HOST:$HTTP_PORT cannot be had: $why" \
        "Choose another with --http-port; 0 takes a free one."
fi

prepare_run
DRAIN_S=$DRAIN
# Free ports beside the fixed ones; the last is for the frontend.
read -ra PORTS <<<"$(free_ports $((2 * TOTAL + 1)))"
((HTTP_PORT != 0)) || HTTP_PORT=${PORTS[2 * TOTAL]}
BOOTSTRAP_PORTS=("${PORTS[@]:TOTAL:TOTAL}") # where SGLang's decode workers meet its prefill workers
if [[ -n $METRICS_PORT ]]; then
    for ((i = 0; i < TOTAL; i++)); do
        PORTS[i]=$((METRICS_PORT + i))
        why=$(port_is_free "${DYN_SYSTEM_HOST:-127.0.0.1}" "${PORTS[i]}" 2>&1) ||
            fail "port ${PORTS[i]} for ${WORKER_NAME[i]} cannot be had: $why" "Choose others with --metrics-port."
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
    local engine seen
    [[ $HTTP_STATUS == 200 ]] || return 1
    for engine in "${ENGINES[@]}"; do
        [[ $HTTP_BODY == *"\"$(served_by "$engine")\""* ]] || return 1
    done
    http_get "$REACH" "$HTTP_PORT" /health
    seen=$(grep -o '"instance_id":[0-9]*' <<<"$HTTP_BODY" | sort -u | wc -l || true)
    ((seen >= TOTAL))
}

# What clients call the model of engine $1.
served_by() { if [[ $ENGINE == both ]]; then echo "$SERVED-$1"; else echo "$SERVED"; fi; }

# start_worker I
start_worker() {
    local i=$1 engine=${WORKER_ENGINE[$1]} role=${WORKER_ROLE[$1]} settings=("DYN_SYSTEM_PORT=${PORTS[$1]}") arguments
    # Its status server logs an error for each probe that finds it not ready yet.
    settings+=("DYN_LOG=${DYN_LOG:-info,tower_http::trace::on_failure=off}")
    if [[ $DEVICE == gpu ]]; then
        local mine=("${GPUS[@]:i * GPUS_PER_WORKER:GPUS_PER_WORKER}")
        settings+=("CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${mine[*]}")")
    elif [[ $engine == sglang ]]; then
        settings+=(SGLANG_USE_CPU_ENGINE=1 TORCHDYNAMO_DISABLE=1 TRITON_INTERPRET=1)
    elif ((TOTAL > 1)) && [[ -z ${VLLM_CPU_OMP_THREADS_BIND:-} && " ${VLLM_ARGS[*]} " != *tensor-parallel* ]]; then
        settings+=("VLLM_CPU_OMP_THREADS_BIND=$(cores_of "$i" "$TOTAL")")
    fi
    if [[ $engine == vllm ]]; then
        arguments=(--model "$MODEL" "${VLLM_ARGS[@]}")
    else
        arguments=(--model-path "$MODEL")
        if [[ $DEVICE == cpu ]]; then arguments+=("${SGLANG_ON_CPU[@]}"); fi
        if [[ $role == prefill ]]; then arguments+=(--disaggregation-bootstrap-port "${BOOTSTRAP_PORTS[i]}"); fi
        if [[ $DEVICE == cpu && $role == prefill ]]; then arguments+=("${SGLANG_PREFILL_ON_CPU[@]}"); fi
        if [[ $DEVICE == cpu && $role == decode ]]; then arguments+=("${SGLANG_DECODE_ON_CPU[@]}"); fi
        arguments+=("${SGLANG_ARGS[@]}")
    fi
    # Models of one component would share its workers.
    if [[ $ENGINE == both ]]; then arguments+=(--endpoint "dyn://${DYN_NAMESPACE:-dynamo}.$engine.generate"); fi
    if [[ $role != agg ]]; then arguments+=(--disaggregation-mode "$role"); fi
    if [[ $role == "$TO_ENCODER" ]]; then arguments+=(--route-to-encoder); fi
    start "${WORKER_NAME[i]}" "$LOG_DIR/${WORKER_NAME[i]}.log" "worker_is_ready ${PORTS[$i]}" "${settings[@]}" \
        "${PYTHONS[$engine]}" -m "dynamo_worker_ext.$engine" --served-model-name "$(served_by "$engine")" \
        --drain-timeout "$DRAIN" "${arguments[@]}"
}

# SGLang has no kernels for CPUs without AMX: what remains is PyTorch's own.
SGLANG_ON_CPU=(
    --device cpu --attention-backend torch_native --mm-attention-backend sdpa --disable-cuda-graph
    --disable-overlap-schedule --skip-server-warmup --grammar-backend none --sleep-on-idle
)

SGLANG_PREFILL_ON_CPU=(--disaggregation-transfer-backend nixl)
SGLANG_DECODE_ON_CPU=("${SGLANG_PREFILL_ON_CPU[@]}" --disaggregation-decode-retraction-backup cpu_tensor)

start_frontend() {
    local settings=() arguments=(--http-host "$HOST" --http-port "$HTTP_PORT" --router-mode kv)
    [[ $FRONTEND == rust ]] || arguments+=(--dyn-chat-processor vllm)
    settings+=("DYNAMO_MM_TRANSFER=$TRANSFER")
    # Its own system server would take the workers' port from the environment.
    start frontend "$LOG_DIR/frontend.log" frontend_is_ready -u DYN_SYSTEM_PORT "${settings[@]}" \
        "$FRONTEND_PYTHON" -m dynamo_worker_ext.frontend "${arguments[@]}"
}

how_images_travel() {
    case $TRANSFER in
    off) echo "images left to the workers" ;;
    auto) echo "pre-processed images as each worker can take them" ;;
    *) echo "pre-processed images over $TRANSFER" ;;
    esac
}

workers_text() {
    local engine role text=""
    for engine in "${ENGINES[@]}"; do
        for role in "${ROLES[@]}"; do
            text+="${text:+, }${COUNT[$role]} x $engine ${VERSIONS[$engine]}"
            if [[ $role != agg ]]; then text+=" $role"; fi
        done
    done
    echo "$text"
}

banner "dynamo-worker-ext $VERSION: $TITLE" \
    model "$SERVED ($MODEL)" \
    workers "$(workers_text) on ${DEVICE^^}$([[ $DEVICE == cpu ]] || echo ' (not tested here)')" \
    frontend "Dynamo $DYNAMO_VERSION, $FRONTEND chat processor, $(how_images_travel)" \
    address "$URL" \
    discovery "$DYN_DISCOVERY_BACKEND$([[ $DYN_DISCOVERY_BACKEND != file ]] || echo ", $DISCOVERY")" \
    logs "$LOG_DIR"

for ((i = 0; i < TOTAL; i++)); do start_worker "$i"; done
start_frontend
wait_ready "$START_S"
STATUS_WHEN_SIGNALLED=0

# --- ready ---------------------------------------------------------------------------------------

write_ready_file() {
    local i where records=()
    for i in "${!PROC_PID[@]}"; do
        if ((i < TOTAL)); then where=http://$SYSTEM_HOST:${PORTS[i]}; else where=$URL; fi
        records+=("${PROC_NAME[$i]}" "${PROC_PID[$i]}" "$where" "${PROC_LOG[$i]}")
    done
    READY_FILE=$READY_PATH
    "$PYTHON" - "$READY_PATH" "$$" "$(served_by "${ENGINES[0]}")" "$FRONTEND" "$TRANSFER" "$DISCOVERY" "$LOG_DIR" "${records[@]}" <<'READY'
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

say "$BOLD$(for engine in "${ENGINES[@]}"; do echo -n "$(served_by "$engine") "; done)is served at $URL/v1/chat/completions$PLAIN"
for ((i = 0; i < TOTAL; i++)); do say "  ${WORKER_NAME[i]}'s metrics: http://$SYSTEM_HOST:${PORTS[i]}/metrics"; done
[[ -n $STOP_WITH ]] || say "  Ctrl-C or TERM to $$ stops everything"

declare -A LEFT=() # living workers by engine and role
for ((i = 0; i < TOTAL; i++)); do
    LEFT[${WORKER_ENGINE[i]} ${WORKER_ROLE[i]}]=$((${LEFT[${WORKER_ENGINE[i]} ${WORKER_ROLE[i]}]:-0} + 1))
done
on_change() {
    if (($# == 0)); then
        [[ -n $STOP_WITH ]] && ! kill -0 "$STOP_WITH" || return 0
        say "$SCRIPT: process $STOP_WITH is gone; stopping"
        exit 0
    fi
    (($1 < TOTAL)) || fail "the frontend is gone; stopping everything"
    local kind="${WORKER_ENGINE[$1]} ${WORKER_ROLE[$1]}"
    LEFT[$kind]=$((LEFT[$kind] - 1))
    ((LEFT[$kind] > 0)) || fail "no ${kind/ agg/} worker is left; stopping everything"
    say "  ${LEFT[$kind]} ${kind/ agg/} worker(s) go on"
}
watch on_change
