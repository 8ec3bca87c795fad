#!/usr/bin/env bash
# Encode, prefill and decode workers behind Dynamo's frontend (E/P/D); see --help.
# shellcheck source=launch/common.sh disable=SC2034 # what topology.sh reads
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

TITLE="encode, prefill and decode; KV-aware routing"
ROLES=(encode prefill decode)
declare -A COUNT=([encode]=1 [prefill]=1 [decode]=1)
declare -A COUNT_FLAG=([encode]=--encode-workers [prefill]=--prefill-workers [decode]=--decode-workers)
TO_ENCODER="prefill" FRONTEND=rust ENGINES_KNOWN="vllm sglang"

usage() {
    cat <<'HELP'
usage: launch/multimodal_disagg.sh --model MODEL [options] [-- ENGINE-ARGUMENT...]

E/P/D: encode workers turn images into embeddings, prefill workers take those over and compute a
prompt's KV cache, decode workers take that over and write the answer. All start at the same time,
with Dynamo's frontend and its KV router in front of them. Discovery is a folder and every socket is
on loopback: neither etcd nor NATS is needed.

what to serve:
  --model MODEL             a folder, or the name of a model on the hub (required)
  --tiny                    or a tiny random Qwen2.5-VL on the CPU, which is made if it is not there,
                            as is the environment
  --served-model-name NAME  what clients call it (default: the folder's name, or MODEL)
  --engine NAME             vllm or sglang (default: vllm)
  --encode-workers N        how many (default: 1)
  --prefill-workers N       how many (default: 1)
  --decode-workers N        how many (default: 1)
  -- ARGUMENT...            everything after -- goes to each worker as it is; the whole list:
                            python -m dynamo_worker_ext.vllm --help, or .sglang

HELP
    help_of_topology
}

# shellcheck source=launch/topology.sh
source "$(dirname "${BASH_SOURCE[0]}")/topology.sh"
