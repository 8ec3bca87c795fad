#!/usr/bin/env bash
# A demonstration on any Linux machine, without a GPU; see --help.
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'HELP'
usage: launch/demo.sh [options]

Makes the environment if it is not there (launch/setup.sh), makes a tiny random Qwen2.5-VL,
starts two workers behind Dynamo's frontend with KV-aware routing, sends text and images, each
twice, shows what became of them, checks that it is as it must be, and stops everything. On two
cores that takes about a minute once the environment is there. It needs neither a GPU nor a network
then, and every socket is on loopback.

options:
  --engine vllm|sglang  whose workers (default: vllm); in front of SGLang's the frontend still runs
                        in vLLM's environment, so that both are made
  --frontend vllm|rust  who pre-processes images: the frontend with vLLM's processor, or the
                        workers (default: vllm)
  --serve               stay after that, and print a curl command to try; Ctrl-C stops
  --json                the table as JSON on stdout, and nothing else there
  --http-port PORT      of the frontend, on 127.0.0.1 (default: 0, a free one)
  -h, --help            this text

environment: as for launch/agg_multimodal_router.sh (DWE_VENV_DIR, DWE_PYTHON). The model is made
in models/, the logs are in logs/.

exit status: 0 all is as it must be; 1 something is not, and it says what; 2 wrong usage; 128+N
stopped by signal N before that was known
HELP
}

ENGINE=vllm FRONTEND=vllm SERVE="" HTTP_PORT=0 CLIENT=(--block-size 32)
while (($#)); do
    case $1 in
    --engine=* | --frontend=* | --http-port=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
    esac
    case $1 in
    -h | --help) usage; exit 0 ;;
    --serve) SERVE=yes ;;
    --json) CLIENT+=(--json) ;;
    --engine | --frontend | --http-port)
        (($# > 1)) || { say "$SCRIPT: $1 needs a value (--help)"; exit 2; }
        case $1 in
        --engine) ENGINE=$2 ;;
        --frontend) FRONTEND=$2 ;;
        *) HTTP_PORT=$2 ;;
        esac
        shift
        ;;
    *) say "$SCRIPT: unknown argument: $1 (--help lists what there is)"; exit 2 ;;
    esac
    shift
done

[[ -z $SERVE ]] || CLIENT+=(--curl)

STACK="" AGAIN=""
on_signal() {
    # A second one hurries the stack, which handles that itself.
    if [[ -n $AGAIN ]]; then
        [[ -z $STACK ]] || kill -TERM "$STACK" 2>/dev/null || true
        return
    fi
    exit "${STATUS_WHEN_SIGNALLED:-$1}"
}
on_exit() {
    local status=$?
    AGAIN=yes
    trap - EXIT
    set +e
    if [[ -n $STACK ]]; then
        kill -TERM "$STACK" 2>/dev/null
        # A signal ends a wait; only the end of the stack ends this.
        while kill -0 "$STACK" 2>/dev/null; do wait "$STACK" 2>/dev/null; done
    fi
    exit "$status"
}
trap on_exit EXIT
trap 'on_signal 130' INT
trap 'on_signal 143' TERM
trap 'on_signal 129' HUP

PYTHON=${DWE_PYTHON:-${DWE_VENV_DIR:-$REPO/.venv}/vllm/bin/python}
[[ -n ${DWE_PYTHON:-} ]] || "$REPO/launch/setup.sh" vllm >&2

LOG_DIR=$REPO/logs/demo-$(date +%Y%m%d-%H%M%S)-$$
READY=$LOG_DIR/ready.json
mkdir -p "$LOG_DIR"
# In the background it does not see Ctrl-C; it is told by on_exit.
"$REPO/launch/agg_multimodal_router.sh" \
    --tiny --engine "$ENGINE" --workers 2 --frontend "$FRONTEND" \
    --http-port "$HTTP_PORT" --log-dir "$LOG_DIR" --ready-file "$READY" \
    --start-timeout 300 --drain-timeout 5 --stop-with $$ </dev/null >&2 {ERR}>&- &
STACK=$!

until [[ -f $READY ]]; do
    if ! kill -0 "$STACK" 2>/dev/null; then
        status=0
        wait "$STACK" || status=$?
        STACK=""
        exit $((status ? status : 1))
    fi
    sleep 0.2
done

"$PYTHON" "$REPO/launch/demo_client.py" --ready "$READY" "${CLIENT[@]}"

if [[ -n $SERVE ]]; then
    STATUS_WHEN_SIGNALLED=0
    say "${BOLD}It goes on until Ctrl-C.$PLAIN"
    wait "$STACK"
    STACK=""
    exit 1
fi
