#!/usr/bin/env bash
# Makes the Python environments that this project runs in; see --help.
set -euo pipefail

REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
VENVS=${DWE_VENV_DIR:-$REPO/.venv}
REQUIREMENTS=$REPO/launch/requirements
HELPERS=$REPO/launch/cpu
NEEDED_GB_NEW=6
NEEDED_GB_UPDATE=2

usage() {
    cat <<'HELP'
usage: launch/setup.sh [vllm|sglang|all] [options]     (default: vllm)

Makes .venv/vllm or .venv/sglang (two environments, because the engines' pins conflict) from the
complete lists in launch/requirements, with the CPU helpers of launch/cpu, and installs this
package into it, editable. Safe to run again: an environment that is up to date is left alone in
less than two seconds, one that is not is brought up to date, one half made is finished.
Takes one and a half to five minutes and 6 GB an engine.

options:
  --torch-find-links X   a directory or page with PyTorch's CPU wheels, for pip's --find-links
  --gpu                  for a machine with GPUs: let pip resolve this package's extras
                         [ENGINE,nixl,dev] instead of the CPU lists, without the CPU helpers.
                         Not tested by this project's own checks, which run on CPUs.
  --patch                also apply this package's patches to the engine, all of them or none (as
                         "python -m dynamo_worker_ext.patching apply"); "revert" takes them back
  --force                install again even if everything is up to date
  -h, --help             this text

environment:
  PYTHON                 the interpreter to use, 3.11 to 3.13 (otherwise the first of python3.11,
                         python3, python3.12, python3.13 for which pip finds PyTorch's CPU wheel)
  DWE_VENV_DIR           where the environments go, instead of .venv
  PIP_*                  as pip reads them, such as PIP_FIND_LINKS and PIP_EXTRA_INDEX_URL
HELP
}

say() { printf '%s\n' "$*"; }
warn() { printf '%s\n' "$*" >&2; }
die() {
    warn "setup: $1"
    shift
    local line
    for line in "$@"; do warn "       $line"; done
    exit 1
}

# --- the interpreter -----------------------------------------------------------------------------

# Prints what is wrong with interpreter $1, nothing if it will do.
python_fault() {
    command -v "$1" >/dev/null 2>&1 || { echo "not found"; return; }
    local version
    version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
        { echo "does not start"; return; }
    case $version in
    3.11 | 3.12 | 3.13) ;;
    *) echo "is Python $version"; return ;;
    esac
    "$1" -c 'import ensurepip, venv' 2>/dev/null ||
        echo "is Python $version without its venv module (Debian, Ubuntu: python$version-venv)"
}

# Whether the pip of environment $1 can find the torch that list $2 pins.
finds_torch() {
    local pin
    pin=$(sed -n 's/^torch==//p' "$2")
    "$1/bin/python" -m pip index versions torch "${PIP_OPTIONS[@]}" 2>"$1/pip-index.log" |
        tr ', ' '\n\n' | grep -Fxq -- "$pin"
}

# Makes environment $1, for the list $2 (empty: any torch), with the first interpreter that will do.
make_venv() {
    local venv=$1 list=$2 candidates=(python3.11 python3 python3.12 python3.13)
    local candidate fault report=() usable=() pip_said=""
    [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        fault=$(python_fault "$candidate")
        if [[ -n $fault ]]; then
            report+=("$candidate: $fault")
            continue
        fi
        say "  making $venv with $candidate"
        rm -rf -- "$venv"
        "$candidate" -m venv "$venv" || { report+=("$candidate: python -m venv failed"); continue; }
        if [[ -z $list ]] || finds_torch "$venv" "$list"; then
            return
        fi
        pip_said=$(grep -E '^ERROR' "$venv/pip-index.log" | tail -n 1 || true)
        usable+=("$candidate")
        rm -rf -- "$venv"
    done
    if ((${#usable[@]})); then
        die "pip finds no CPU build of PyTorch, torch==$(sed -n 's/^torch==//p' "$list")" \
            "tried with: ${usable[*]}${pip_said:+; pip says: $pip_said}" \
            "The wheel is on PyTorch's own CPU wheel index. Name that index in PIP_EXTRA_INDEX_URL," \
            "or a directory that holds the wheel in PIP_FIND_LINKS or with --torch-find-links DIR."
    fi
    die "no usable Python; 3.11, 3.12 or 3.13 with its venv module is needed" "${report[@]}" \
        "Install one, or name it: PYTHON=/path/to/python launch/setup.sh"
}

# --- installing ----------------------------------------------------------------------------------

need_disk() {
    local directory=$1 needed=$2 free
    while [[ ! -d $directory ]]; do directory=$(dirname "$directory"); done
    free=$(($(df -Pk "$directory" | awk 'NR == 2 { print $4 }') / 1024 / 1024))
    ((free >= needed)) || die "$directory has $free GB free; this needs $needed GB" \
        "Free some, or put the environments elsewhere: DWE_VENV_DIR=DIR launch/setup.sh"
}

# Runs pip in environment $1, showing "$2" and how far it is; the whole output goes to the log.
run_pip() {
    local venv=$1 what=$2 log=$1/setup.log started=$SECONDS
    shift 2
    say "  $what"
    printf '\n$ pip %s\n' "$*" >>"$log"
    if ! "$venv/bin/python" -m pip "$@" 2>&1 | tee -a "$log" | show_progress; then
        warn "setup: pip failed; the end of $log:"
        tail -n 15 "$log" | sed 's/^/       /' >&2
        local hint=()
        # ai-dynamo 1.6.1 requires it; nothing that runs here imports it, and the CPU lists omit it.
        if [[ $MODE == gpu ]] && grep -q aisimulate "$log"; then
            hint=("ai-dynamo needs aisimulate, whose build downloads from NVIDIA's own package index:"
                "name that index in PIP_EXTRA_INDEX_URL.")
        fi
        die "the environment is incomplete; run this again to continue where it stopped" "${hint[@]}"
    fi
    say "    $((SECONDS - started)) s"
}

show_progress() {
    awk '
        /^(Collecting|Processing|Obtaining|Requirement already satisfied)/ {
            if (++seen % 25 == 0) { print "    " seen " packages looked up"; fflush() }
        }
        /^Installing collected packages/ { print "    installing (the longest part)"; fflush() }
    '
}

# What an environment was made from. Any change of it makes the environment out of date.
fingerprint() {
    local engine=$1
    {
        say "$engine $MODE $REPO"
        cd "$REPO"
        { echo pyproject.toml; echo launch/setup.sh; echo launch/requirements/dev.lock
          echo "launch/requirements/$engine-cpu.lock"
          find launch/cpu -type f ! -path '*/__pycache__/*' ! -name '*.pyc'
        } | LC_ALL=C sort | xargs sha256sum
    } | sha256sum | cut -d ' ' -f 1
}

helpers_of() {
    echo "$HELPERS/torchvision_shim"
    case $1 in
    vllm) printf "%s\n" "$HELPERS/vllm_metadata" "$HELPERS/amx_permission" ;;
    sglang) printf "%s\n" "$HELPERS/sgl_kernel_stand_in" "$HELPERS/nixl_dram" ;;
    esac
}

install_cpu() {
    local engine=$1 venv=$2 list=$REQUIREMENTS/$1-cpu.lock helpers
    mapfile -t helpers < <(helpers_of "$engine")
    run_pip "$venv" "installing $(grep -c '==' "$list") packages of $engine-cpu.lock, and dev.lock" \
        install --no-deps "${PIP_OPTIONS[@]}" -r "$list" -r "$REQUIREMENTS/dev.lock"
    run_pip "$venv" "installing the CPU helpers and this package" \
        install --no-deps --no-build-isolation "${PIP_OPTIONS[@]}" "${helpers[@]}" -e "$REPO"
}

install_gpu() {
    local engine=$1 venv=$2
    run_pip "$venv" "installing this package with [$engine,nixl,dev] (not tested here)" \
        install "${PIP_OPTIONS[@]}" -e "$REPO[$engine,nixl,dev]"
}

# Whether what was installed is what was asked for, and can be imported.
check() {
    local engine=$1 venv=$2
    "$venv/bin/python" - "$engine" "$MODE" <<'CHECK' || die "$venv does not work; see above"
import sys
from importlib import metadata

engine, mode = sys.argv[1:]
names = [engine, "ai-dynamo", "nixl", "torch", "torchvision", "dynamo-worker-ext"]
print("  " + ", ".join(f"{name} {metadata.version(name)}" for name in names))
if mode == "cpu":
    pinned = "0.31.0+cpu" if engine == "vllm" else None
    if pinned and metadata.version("vllm") != pinned:
        sys.exit(f"vllm should be {pinned} for its CPU platform")
    if engine == "sglang":
        import sgl_kernel
import torchvision.transforms.v2.functional
CHECK
}

set_up() {
    local engine=$1 venv=$VENVS/$1 stamp=$VENVS/$1/.dwe-setup wanted
    wanted=$(fingerprint "$engine")
    if [[ -z $FORCE && -x $venv/bin/python && -f $stamp && $(<"$stamp") == "$MODE $wanted" ]]; then
        say "$engine: up to date ($venv)"
        return
    fi
    say "$engine: setting up $venv"
    if [[ -x $venv/bin/python && -n $(compgen -G "$venv/lib/python3.*/site-packages/pip") ]]; then
        need_disk "$venv" "$NEEDED_GB_UPDATE"
        refuse_other_mode "$venv" "$stamp"
        [[ -z $(python_fault "$venv/bin/python") ]] ||
            die "$venv $(python_fault "$venv/bin/python")" "Remove that directory and run this again."
        rm -f -- "$stamp"
        if [[ $MODE == cpu ]] && ! has_torch "$venv" && ! finds_torch "$venv" "$REQUIREMENTS/$engine-cpu.lock"; then
            make_venv "$venv" "$REQUIREMENTS/$engine-cpu.lock"
        fi
    else
        need_disk "$venv" "$NEEDED_GB_NEW"
        mkdir -p "$VENVS"
        if [[ $MODE == cpu ]]; then make_venv "$venv" "$REQUIREMENTS/$engine-cpu.lock"; else make_venv "$venv" ""; fi
    fi
    : >"$venv/setup.log"
    "install_$MODE" "$engine" "$venv"
    check "$engine" "$venv"
    printf '%s\n' "$MODE $wanted" >"$stamp"
    say "$engine: ready; start with: source $venv/bin/activate"
}

has_torch() { [[ -n $(compgen -G "$1/lib/python3.*/site-packages/torch-*.dist-info") ]]; }

# A CPU environment is never turned into a GPU one, or back: wheels and helpers would be mixed.
refuse_other_mode() {
    local venv=$1 found=""
    [[ -z $(compgen -G "$venv/lib/python3.*/site-packages/dwe_torchvision_shim.pth") ]] || found=cpu
    [[ ! -f $2 ]] || found=$(cut -d ' ' -f 1 "$2")
    [[ -z $found || $found == "$MODE" ]] ||
        die "$venv was made for $found, not for $MODE" \
            "Remove that directory, or use another with DWE_VENV_DIR=DIR."
}

# --- the command line ----------------------------------------------------------------------------

ENGINES=()
MODE=cpu
FORCE=""
PATCH=""
PIP_OPTIONS=(--disable-pip-version-check --no-input)
while (($#)); do
    case $1 in
    vllm | sglang) ENGINES+=("$1") ;;
    all) ENGINES+=(vllm sglang) ;;
    --gpu) MODE=gpu ;;
    --force) FORCE=yes ;;
    --patch) PATCH=yes ;;
    --torch-find-links)
        (($# > 1)) || die "--torch-find-links needs a directory or page"
        PIP_OPTIONS+=(--find-links "$2")
        shift
        ;;
    --torch-find-links=*) PIP_OPTIONS+=(--find-links "${1#*=}") ;;
    -h | --help)
        usage
        exit
        ;;
    *) die "unknown argument: $1" "launch/setup.sh --help lists what there is." ;;
    esac
    shift
done
((${#ENGINES[@]})) || ENGINES=(vllm)

[[ $(uname -s) == Linux ]] || die "this needs Linux (it found $(uname -s))"
command -v flock >/dev/null || die "flock is missing (package util-linux)"
mkdir -p "$VENVS"
VENVS=$(cd "$VENVS" && pwd -P)
exec 9>"$VENVS/.setup.lock"
if ! flock -n 9; then
    say "another launch/setup.sh is at work in $VENVS; waiting for it"
    flock 9
fi
for engine in "${ENGINES[@]}"; do
    set_up "$engine"
    [[ -z $PATCH ]] || "$VENVS/$engine/bin/python" -m dynamo_worker_ext.patching apply --engine "$engine"
done
