#!/usr/bin/env bash
# Every check of this repository; see --help.
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'HELP'
usage: launch/test.sh [--fast] [-- PYTEST-ARGUMENT...]

Brings .venv/vllm and .venv/sglang up to date (launch/setup.sh all), then runs ruff,
ruff format --check, shellcheck if it is installed, mypy and pytest, all of them even if one fails,
and looks for processes and shared-memory segments that were left behind. Benchmarks (marker bench)
are left out. The last line is pytest's summary.

options:
  --fast       leave out the tests that start an engine (marker engine), and .venv/sglang
  --           what follows goes to pytest, for example: launch/test.sh -- -x tests/unit
  -h, --help   this text

environment: DWE_VENV_DIR, DWE_PYTHON, DWE_SGLANG_PYTHON as for launch/agg_multimodal_router.sh;
with DWE_PYTHON nothing is set up.

exit status: 0 all is well; 1 something is not, which is said; 2 wrong usage
HELP
}

MARKERS="not bench" SETUP=all
PYTEST=()
while (($#)); do
    case $1 in
    -h | --help) usage; exit 0 ;;
    --fast) MARKERS="not bench and not engine" SETUP=vllm ;;
    --) shift; PYTEST=("$@"); break ;;
    *) say "$SCRIPT: unknown argument: $1 (pytest's go after --; --help lists what there is)"; exit 2 ;;
    esac
    shift
done

exec 2>&1 {ERR}>&1 # one stream, in order
cd "$REPO"
PYTHON=${DWE_PYTHON:-${DWE_VENV_DIR:-$REPO/.venv}/vllm/bin/python}
export DWE_SGLANG_PYTHON=${DWE_SGLANG_PYTHON:-${DWE_VENV_DIR:-$REPO/.venv}/sglang/bin/python}
SUMMARY="0 passed, 1 failed"
FAILED=()
OUTPUT=$(mktemp "${TMPDIR:-/tmp}/dwe-test.XXXXXX")
# Everything started below carries this, however it is reparented or renamed.
export DWE_TEST_RUN=$$-$RANDOM
export SPT_NOENV=1 # engines rename themselves; this keeps their environment readable
trap 'rm -f -- "$OUTPUT"' EXIT

# section TITLE COMMAND...: run it, and remember if it fails.
section() {
    local title=$1 begin=$SECONDS
    shift
    say
    say "$BOLD== $title$PLAIN"
    if "$@"; then
        say "${GREEN}ok$PLAIN ($(seconds_text $((SECONDS - begin))))"
    else
        say "${RED}FAILED$PLAIN ($(seconds_text $((SECONDS - begin))))"
        FAILED+=("$title")
    fi
}

finish() {
    say
    if ((${#FAILED[@]})); then
        local list
        list=$(printf ', %s' "${FAILED[@]}")
        say "${RED}failed: ${list:2}$PLAIN"
    else
        say "${GREEN}all is well$PLAIN"
    fi
    printf '%s\n' "$SUMMARY"
    exit $((${#FAILED[@]} ? 1 : 0))
}

# SC1087 takes pip's NAME[EXTRA] after a variable for an array.
run_shellcheck() { shellcheck -x -S warning -e SC1087 launch/*.sh .ci/run; }

run_pytest() {
    local status=0 colour=no
    [[ -z $LIVE ]] || colour=yes
    "$PYTHON" -m pytest --color="$colour" -m "$MARKERS" "${PYTEST[@]}" | tee "$OUTPUT" || status=$?
    SUMMARY=$(sed 's/\x1b\[[0-9;]*m//g' "$OUTPUT" | grep -E '[0-9]+ (passed|failed|error|skipped|deselected)' |
        tail -n 1) || SUMMARY="0 passed, 1 failed"
    return "$status"
}

marked_processes() {
    local file pid
    for file in /proc/[0-9]*/environ; do
        pid=${file//[!0-9]/}
        [[ $pid != "$$" && $pid != "$BASHPID" ]] || continue
        if grep -qsz "^DWE_TEST_RUN=$DWE_TEST_RUN\$" "$file"; then echo "$pid"; fi
    done
}

# Segments that came since $SHM_BEFORE and that no living process has mapped.
stray_segments() {
    local name
    for name in $(_names_in "$SHM"); do
        [[ $SHM_BEFORE != *" $name "* ]] || continue
        # The semaphore of a process that a test killed; no segment, and no one can map it late.
        [[ $name != sem.mp-* ]] || continue
        grep -qs -- "$SHM/$name" /proc/[0-9]*/maps || echo "$name"
    done
}

# What is going away gets ten seconds.
nothing_is_left() {
    local tries running="" segments="" pid name
    for ((tries = 0; tries < 20; tries++)); do
        # The subshells that look are marked too, and are gone when they have looked.
        running="" segments=$(stray_segments)
        for pid in $(marked_processes); do [[ ! -d /proc/$pid ]] || running+=" $pid"; done
        [[ -n $running$segments ]] || return 0
        sleep 0.5
    done
    for pid in $running; do say "process $pid is left: $(tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline" | cut -c 1-120)"; done
    for name in $segments; do say "segment $SHM/$name is left"; done
    return 1
}

SHM_BEFORE=" $(_names_in "$SHM") "
if [[ -z ${DWE_PYTHON:-} ]]; then
    section "environment" "$REPO/launch/setup.sh" "$SETUP"
    ((${#FAILED[@]} == 0)) || finish
fi
section "ruff" "$PYTHON" -m ruff check .
section "ruff format" "$PYTHON" -m ruff format --check .
if command -v shellcheck >/dev/null 2>&1; then
    section "shellcheck" run_shellcheck
else
    say && say "$BOLD== shellcheck$PLAIN" && say "not installed; left out"
fi
section "mypy" "$PYTHON" -m mypy
section "pytest -m '$MARKERS'${PYTEST[*]:+ ${PYTEST[*]}}" run_pytest
section "nothing is left behind" nothing_is_left
finish
