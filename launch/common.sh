# shellcheck shell=bash disable=SC2034 # some of these are read by the scripts only
# What the launch scripts share; sourced, never run. Needs bash 4.4, Linux, coreutils, util-linux.
#
# Everything that is started here has a process group of its own. Whatever ends the script (the end,
# an error, Ctrl-C, TERM) ends those groups: TERM to each main process, so that it can drain, and
# KILL to what is left of its group. Not sessions: where the kernel schedules by session
# (sched_autogroup_enabled), an engine that spins keeps all others from running for seconds.
# Progress goes to stderr; stdout is left to results.

set -euo pipefail
shopt -s inherit_errexit

REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
SCRIPT=${0##*/}
SHM=/dev/shm

# --- talking -------------------------------------------------------------------------------------

# What is said goes here, because 2 is closed at times: bash reports each child that was killed.
exec {ERR}>&2

if [[ -t 2 && -z ${NO_COLOR:-} && ${TERM:-dumb} != dumb ]]; then
    BOLD=$'\e[1m' DIM=$'\e[2m' RED=$'\e[31m' GREEN=$'\e[32m' PLAIN=$'\e[0m' LIVE=yes
else
    BOLD="" DIM="" RED="" GREEN="" PLAIN="" LIVE=""
fi

say() {
    _clear_line
    printf '%s\n' "$*" >&"$ERR"
}

# A line that the next one replaces; shown on terminals only.
say_for_now() {
    [[ -n $LIVE ]] || return 0
    printf '\r\e[K%s%s%s' "$DIM" "$*" "$PLAIN" >&"$ERR"
    _LINE_OPEN=yes
}

_LINE_OPEN=""
_clear_line() {
    [[ -n $_LINE_OPEN ]] || return 0
    printf '\r\e[K' >&"$ERR"
    _LINE_OPEN=""
}

# fail MESSAGE [LINE...]: the message, then what to do about it, then exit 1.
fail() {
    _clear_line
    printf '%s%s: %s%s\n' "$RED" "$SCRIPT" "$1" "$PLAIN" >&"$ERR"
    shift
    (($# == 0)) || printf '    %s\n' "$@" >&"$ERR"
    exit 1
}

# banner TITLE [NAME VALUE]...
banner() {
    local rule="------------------------------------------------------------------------"
    say "$DIM$rule$PLAIN"
    say " $BOLD$1$PLAIN"
    shift
    while (($#)); do
        printf '   %-11s %s\n' "$1" "$2" >&"$ERR"
        shift 2
    done
    say "$DIM$rule$PLAIN"
}

seconds_text() { if (($1 < 60)); then echo "$1 s"; else echo "$(($1 / 60)) min $(($1 % 60)) s"; fi; }

# number FLAG VALUE LOWEST [HIGHEST]: fails unless VALUE is a whole number in that range.
number() {
    if ! [[ $2 =~ ^(0|[1-9][0-9]{0,8})$ ]] || (($2 < $3 || $2 > ${4:-999999999})); then
        fail "$1 is '$2'; it must be a whole number from $3${4:+ to $4}"
    fi
}

# --- the environment of what is started ----------------------------------------------------------

# Keep Dynamo's planes and vLLM's sockets on loopback and discovery in folder $1. What the caller's
# environment says comes first.
export_loopback_environment() {
    export DYN_DISCOVERY_BACKEND=${DYN_DISCOVERY_BACKEND:-file}
    export DYN_FILE_KV=$1
    export DYN_REQUEST_PLANE=${DYN_REQUEST_PLANE:-tcp}
    export DYN_EVENT_PLANE=${DYN_EVENT_PLANE:-zmq}
    export DYN_TCP_RPC_HOST=${DYN_TCP_RPC_HOST:-127.0.0.1}
    export DYN_TCP_RESPONSE_STREAM_HOST=${DYN_TCP_RESPONSE_STREAM_HOST:-127.0.0.1}
    export DYN_EVENT_PLANE_HOST=${DYN_EVENT_PLANE_HOST:-127.0.0.1}
    export DYN_SYSTEM_HOST=${DYN_SYSTEM_HOST:-127.0.0.1}
    export UCX_NET_DEVICES=${UCX_NET_DEVICES:-lo}
    export VLLM_HOST_IP=${VLLM_HOST_IP:-127.0.0.1}
    export VLLM_NO_USAGE_STATS=${VLLM_NO_USAGE_STATS:-1}
    # The frontends see a worker leave at once here; Dynamo's 5 s are for those on other machines.
    export DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS=${DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS:-1}
    export DYN_SDK_DISABLE_ANSI_LOGGING=1 NO_COLOR=1
}

# Engines leave sockets and files in the temporary directory; give them one that goes with us, but
# keep the compile cache where it would have been.
export_private_tmp() {
    export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-${TMPDIR:-/tmp}/torchinductor_$(id -un)}
    export TMPDIR=$RUN_DIR/tmp
    mkdir -p "$TMPDIR"
}

# Whether there is a GPU that can be used.
has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }

# use_tiny_model ENGINE: make what is missing of the environment and of a tiny random model. Sets
# TINY_MODEL, and TINY_ARGS: the engine's arguments for it on a CPU.
use_tiny_model() {
    local family=qwen2_5_vl python=${DWE_PYTHON:-${DWE_VENV_DIR:-$REPO/.venv}/vllm/bin/python}
    case $1 in
    vllm)
        TINY_ARGS=(--dtype float32 --enforce-eager --max-model-len 8192 --block-size 32 --seed 0
            --skip-mm-profiling --limit-mm-per-prompt '{"image":2,"video":0}')
        # The model in the engine core's process, as on one GPU, and not in one more that spins.
        export VLLM_ENABLE_V1_MULTIPROCESSING=${VLLM_ENABLE_V1_MULTIPROCESSING:-0}
        export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
        ;;
    sglang)
        TINY_ARGS=(--dtype float32 --context-length 8192 --page-size 32 --random-seed 0
            --max-total-tokens 32768 --limit-mm-data-per-request '{"image":2,"video":0}')
        [[ -n ${DWE_SGLANG_PYTHON:-} ]] || "$REPO/launch/setup.sh" sglang >&2
        ;;
    *) fail "--engine $1: there are tiny models for vllm and sglang" ;;
    esac
    [[ -n ${DWE_PYTHON:-} ]] || "$REPO/launch/setup.sh" vllm >&2
    export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
    TINY_MODEL=$REPO/models/tiny-$family
    if [[ ! -f $TINY_MODEL/config.json || -n $(find "$REPO/dynamo_worker_ext/tinyvlm" -name '*.py' -newer "$TINY_MODEL/config.json") ]]; then
        say "making a tiny $family in ${TINY_MODEL#"$REPO"/}"
        mkdir -p "$REPO/models"
        "$python" -m dynamo_worker_ext.tinyvlm --family "$family" --out "$TINY_MODEL" >&2
    fi
}

# cores_of I N: the share of the I-th of N workers of the CPUs that this process may use, as vLLM
# takes it. Engines that spin on the same cores starve each other.
cores_of() {
    local list part cpu all=() first last
    list=$(sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' /proc/self/status)
    for part in ${list//,/ }; do
        for ((cpu = ${part%-*}; cpu <= ${part#*-}; cpu++)); do all+=("$cpu"); done
    done
    if ((${#all[@]} < $2)); then
        echo "${all[$1 % ${#all[@]}]}"
        return
    fi
    first=$(($1 * ${#all[@]} / $2)) last=$((($1 + 1) * ${#all[@]} / $2 - 1))
    (IFS=,; echo "${all[*]:first:last - first + 1}")
}

# free_ports N: N free TCP ports on loopback. Below 32768, because Dynamo (1.6.1) reads its system
# port as a signed 16-bit number, and there they cannot meet the kernel's ephemeral ports either.
free_ports() {
    "$PYTHON" - "$1" <<'PORTS'
import random, socket, sys

held = []
while len(held) < int(sys.argv[1]):
    probe = socket.socket()
    try:
        probe.bind(("127.0.0.1", random.randrange(20_000, 32_000)))
    except OSError:
        probe.close()
    else:
        held.append(probe)
print(*(probe.getsockname()[1] for probe in held))
PORTS
}

# port_is_free HOST PORT
port_is_free() {
    "$PYTHON" - "$1" "$2" <<'PORT'
import socket, sys

host, port = sys.argv[1], int(sys.argv[2])
with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind((host, port))
    except OSError as error:
        sys.exit(f"{error.strerror}")
PORT
}

# --- processes -----------------------------------------------------------------------------------

PROC_NAME=() PROC_PID=() PROC_LOG=() PROC_PROBE=() # by number, in the order of their start
RUN_DIR=""                                         # gone at the end; discovery and temporary files
READY_FILE=""                                      # gone at the end
DRAIN_S=60                                         # what each process gets after TERM
STATUS_WHEN_SIGNALLED=""                           # empty while starting: 128 + the signal

_SHM_BEFORE="" _SEGMENTS="" _HURRY=""

# prepare_run: from here on whatever ends the script ends what it started.
prepare_run() {
    local parent=${TMPDIR:-/tmp}
    ((${#parent} <= 48)) || parent=/tmp # unix sockets go below it; their paths are short
    _SHM_BEFORE=" $(_names_in "$SHM") "
    RUN_DIR=$(mktemp -d "$parent/dwe.XXXXXX")
    trap _on_exit EXIT
    trap '_on_signal INT 130' INT
    trap '_on_signal TERM 143' TERM
    trap '_on_signal HUP 129' HUP
}

# start NAME LOG PROBE [VAR=VALUE]... COMMAND...: in a process group of its own, output to LOG. PROBE
# is the command that succeeds when it is ready; see wait_ready.
start() {
    local name=$1 log=$2 probe=$3
    shift 3
    # Job control makes a child the leader of a group.
    set -m
    env "$@" </dev/null >"$log" 2>&1 {ERR}>&- &
    set +m
    PROC_NAME+=("$name") PROC_PID+=("$!") PROC_LOG+=("$log") PROC_PROBE+=("$probe")
}

# alive I: whether process number I has not ended.
alive() { kill -0 "${PROC_PID[$1]}" 2>/dev/null; }

# http_get HOST PORT PATH: sets HTTP_STATUS (0 where nobody answers) and HTTP_BODY.
http_get() {
    local raw
    raw=$(
        {
            exec 3<>"/dev/tcp/$1/$2"
            printf 'GET %s HTTP/1.0\r\nHost: %s\r\n\r\n' "$3" "$1" >&3
            timeout 5 cat <&3
        } 2>/dev/null
    ) || true
    HTTP_STATUS=0 HTTP_BODY=""
    [[ $raw == HTTP/* ]] || return 0
    HTTP_STATUS=${raw#* } HTTP_STATUS=${HTTP_STATUS%% *}
    HTTP_BODY=${raw#*$'\r\n\r\n'}
}

# wait_ready SECONDS: until every probe has succeeded. Fails with the end of the log of one that
# ends before, or that is late.
wait_ready() { _wait_ready "$@" 2>/dev/null; }

_wait_ready() {
    local begin=$SECONDS waiting=() still i quiet=$SECONDS
    for i in "${!PROC_PID[@]}"; do waiting+=("$i"); done
    while ((${#waiting[@]})); do
        still=()
        for i in "${waiting[@]}"; do
            if ! alive "$i"; then
                _show_log "$i"
                _status "$i"
                fail "${PROC_NAME[$i]} ended while starting, with status $ENDED_STATUS" \
                    "Its last lines are above; all of it is in ${PROC_LOG[$i]}"
            elif ${PROC_PROBE[$i]}; then
                say "  ${GREEN}ready${PLAIN}  ${PROC_NAME[$i]} (after $(seconds_text $((SECONDS - begin))))"
                quiet=$SECONDS
            else
                still+=("$i")
            fi
        done
        waiting=("${still[@]}")
        ((${#waiting[@]})) || break
        if ((SECONDS - begin > $1)); then
            _show_log "${waiting[0]}"
            fail "$(_names "${waiting[@]}") not ready after $(seconds_text "$1")" \
                "The last lines of ${PROC_NAME[${waiting[0]}]} are above; all of it is in ${PROC_LOG[${waiting[0]}]}"
        fi
        say_for_now "  waiting for $(_names "${waiting[@]}"), $(seconds_text $((SECONDS - begin)))"
        if [[ -z $LIVE ]] && ((SECONDS - quiet >= 15)); then
            say "  ...    waiting for $(_names "${waiting[@]}") ($(seconds_text $((SECONDS - begin))))"
            quiet=$SECONDS
        fi
        sleep 0.5
    done
    _clear_line
}

_names() {
    local i text=""
    for i in "$@"; do text+=${text:+, }${PROC_NAME[$i]}; done
    echo "$text"
}

_show_log() {
    say "$DIM--- the end of ${PROC_LOG[$1]}$PLAIN"
    tail -n 25 -- "${PROC_LOG[$1]}" 2>/dev/null | cut -c 1-400 | sed 's/^/  | /' >&"$ERR" || true
}

# Sets ENDED_STATUS; a subshell could not wait for our children.
_status() {
    ENDED_STATUS=0
    wait "${PROC_PID[$1]}" 2>/dev/null || ENDED_STATUS=$?
}

# watch HOOK: every second, report each process that has ended by itself, end what it left, and call
# HOOK with its number; call HOOK with nothing when there was none. Never returns.
watch() { _watch "$@" 2>/dev/null; }

_watch() {
    local i ended
    while true; do
        sleep 1
        ended=""
        for i in "${!PROC_PID[@]}"; do
            if alive "$i"; then continue; fi
            ended=yes
            _reap "$i"
            "$1" "$i"
        done
        [[ -n $ended ]] || "$1"
    done
}

_reap() {
    local i=$1 pid=${PROC_PID[$1]}
    _status "$i"
    say "$RED${PROC_NAME[$i]} ended with status $ENDED_STATUS$PLAIN; its log is ${PROC_LOG[$i]}"
    _note_segments
    _end_groups "$pid"
    unset "PROC_PID[$i]"
}

# --- the end -------------------------------------------------------------------------------------

_on_signal() {
    say "$SCRIPT: stopping (SIG$1)"
    exit "${STATUS_WHEN_SIGNALLED:-$2}"
}

_on_exit() {
    local status=$?
    trap - EXIT
    # A second Ctrl-C means now.
    trap '_HURRY=yes' INT TERM HUP
    set +e
    _stop_all 2>/dev/null
    [[ -z $READY_FILE ]] || rm -f -- "$READY_FILE"
    [[ -z $RUN_DIR ]] || rm -rf -- "$RUN_DIR"
    exit "$status"
}

_stop_all() {
    local pid pids=() i deadline begin=$SECONDS
    # Also one that was started but not yet noted when a signal came.
    for pid in $(jobs -p); do pids+=("$pid"); done
    ((${#pids[@]} || ${#PROC_PID[@]})) || { _remove_segments; return; }
    _note_segments
    # Workers first: the frontends, which are listed last, bring the answers out meanwhile.
    deadline=$((SECONDS + DRAIN_S + 30))
    for i in "${!PROC_PID[@]}"; do
        [[ ${PROC_NAME[$i]} == frontend* ]] || kill -TERM "${PROC_PID[$i]}" 2>/dev/null
    done
    for i in "${!PROC_PID[@]}"; do [[ ${PROC_NAME[$i]} == frontend* ]] || _await_end "$i" "$deadline"; done
    for i in "${!PROC_PID[@]}"; do
        [[ ${PROC_NAME[$i]} != frontend* ]] || kill -TERM "${PROC_PID[$i]}" 2>/dev/null
    done
    for i in "${!PROC_PID[@]}"; do [[ ${PROC_NAME[$i]} != frontend* ]] || _await_end "$i" $((SECONDS + 15)); done
    _note_segments
    _end_groups "${pids[@]}" "${PROC_PID[@]}"
    _remove_segments
    ((${#PROC_PID[@]} == 0)) || say "$SCRIPT: everything is stopped (after $(seconds_text $((SECONDS - begin))))"
}

_await_end() {
    while alive "$1" && [[ -z $_HURRY ]]; do
        if ((SECONDS >= $2)); then
            say "$SCRIPT: ${PROC_NAME[$1]} did not stop in time; killing it"
            return
        fi
        say_for_now "  stopping ${PROC_NAME[$1]}; Ctrl-C again to kill"
        sleep 0.2
    done
    _clear_line
}

# _members PID...: every process in the groups that these lead or led.
_members() {
    local file line fields
    for file in /proc/[0-9]*/stat; do
        { read -r line <"$file"; } 2>/dev/null || continue
        read -ra fields <<<"${line##*) }" # state, parent, group, session, ...
        [[ ${fields[0]} != [ZX] && " $* " == *" ${fields[2]} "* ]] && echo "${line%% *}"
    done
    return 0
}

# A main process that has ended may have helpers that are tidying up (Python's resource tracker);
# they get three seconds.
_end_groups() {
    local pid left tries
    for pid in "$@"; do # not yet in a group of its own, or too late to be asked
        kill -KILL "$pid" 2>/dev/null || true
    done
    for ((tries = 0; tries < 50; tries++)); do
        left=$(_members "$@")
        [[ -n $left ]] || break
        if ((tries >= 15)) || [[ -n $_HURRY ]]; then
            # shellcheck disable=SC2086 # a list of numbers
            kill -KILL $left 2>/dev/null || true
        fi
        sleep 0.2
    done
    for pid in "$@"; do wait "$pid" 2>/dev/null || true; done
}

# --- segments ------------------------------------------------------------------------------------

_names_in() { ls "$1" 2>/dev/null | tr "\n" " " || true; }

# Remember what shared memory our processes use: only that may be removed, whoever else runs here.
_note_segments() {
    local pid
    for pid in $(_members "${PROC_PID[@]}"); do
        _SEGMENTS+=" $(grep -ohs "$SHM/[^ ]*" "/proc/$pid/maps" | sort -u | tr '\n' ' ' || true)"
    done
}

# Orderly processes leave none. Those that were killed may.
_remove_segments() {
    local path
    for path in $(tr ' ' '\n' <<<"$_SEGMENTS" | sort -u); do
        [[ -e $path && $_SHM_BEFORE != *" ${path##*/} "* ]] || continue
        grep -qs -- "$path" /proc/[0-9]*/maps || rm -f -- "$path"
    done
}
