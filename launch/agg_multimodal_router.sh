#!/usr/bin/env bash
# Aggregated multimodal workers behind Dynamo's frontend with KV-aware routing; see --help.
# shellcheck source=launch/common.sh disable=SC2034 # what topology.sh reads
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

TITLE="aggregated, multimodal, KV-aware routing"
ROLES=(agg)
declare -A COUNT=([agg]=1) COUNT_FLAG=([agg]=--workers)
TO_ENCODER="" FRONTEND=vllm ENGINES_KNOWN="vllm sglang both"

usage() {
    cat <<'HELP'
usage: launch/agg_multimodal_router.sh --model MODEL [options] [-- ENGINE-ARGUMENT...]

Starts N workers of this package and Dynamo's frontend with its KV router in front of
them, all at the same time, waits until all are ready, and keeps watch until it is stopped.
Discovery is a folder and every socket is on loopback: neither etcd nor NATS is needed.

what to serve:
  --model MODEL             a folder, or the name of a model on the hub (required)
  --tiny                    or a tiny random Qwen2.5-VL on the CPU, which is made if it is not there,
                            as is the environment
  --served-model-name NAME  what clients call it (default: the folder's name, or MODEL)
  --engine NAME             vllm, sglang, or both: N workers of each, as the models NAME-vllm and
                            NAME-sglang behind one frontend (default: vllm)
  --workers N               how many (default: 1)
  -- ARGUMENT...            everything after -- goes to each worker as it is: the engine's own
                            arguments and this package's, such as --mm-max-item-mb 512; the whole
                            list: python -m dynamo_worker_ext.vllm --help, or .sglang. With both,
                            what follows a second -- goes to SGLang, and the rest to vLLM.

HELP
    help_of_topology
}

# shellcheck source=launch/topology.sh
source "$(dirname "${BASH_SOURCE[0]}")/topology.sh"
