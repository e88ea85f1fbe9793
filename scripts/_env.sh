# Sourced by the other scripts: makes the virtual environment ready and exports its variables.
#
#   source scripts/_env.sh && vtoken_setup run|dev
#
# The environment is .venv in the repository, or $VTOKEN_VENV. A stamp holds the hash of all that
# decides its content, so a second start costs milliseconds. A lock file lets one process install
# while others wait. An interrupted installation is recognised by its marker and started over.
#
#   VTOKEN_PYTHON   the Python (3.11 to 3.13) to make the environment with
#   VTOKEN_TORCH    another requirement for PyTorch than torch==2.13.0+cpu
#   VTOKEN_NO_IOMP  set to 1 to leave Intel's OpenMP runtime out

VTOKEN_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VTOKEN_VENV="${VTOKEN_VENV:-$VTOKEN_ROOT/.venv}"
VTOKEN_TORCH="${VTOKEN_TORCH:-torch==2.13.0+cpu}"
VTOKEN_NEEDED_MB=5000 # 3700 for the environment, the rest while pip unpacks
vtoken_log="$VTOKEN_VENV.setup.log"
vtoken_marker="$VTOKEN_VENV/.vtoken-installing"

vtoken_say() { printf '%s\n' "$*" >&2; }

vtoken_fail() {
    vtoken_say "vtoken-serve: $*"
    exit 1
}

# Prints the first usable Python: new enough for us, old enough for the pinned packages.
vtoken_python() {
    local candidate
    for candidate in ${VTOKEN_PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
            >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    vtoken_fail "needs Python 3.11, 3.12 or 3.13, found $(python3 --version 2>&1 || true):" \
        "install one of them, or name it in VTOKEN_PYTHON."
}

vtoken_requirement_files() {
    printf '%s\n' "$VTOKEN_ROOT/requirements/cpu.txt" "$VTOKEN_ROOT/requirements/model.txt"
    if [ "$1" = dev ]; then printf '%s\n' "$VTOKEN_ROOT/requirements/dev.txt"; fi
}

# Hash of what decides the environment's content: pins, project metadata, package folders, place.
vtoken_hash() {
    {
        vtoken_requirement_files "$1" | xargs -d '\n' cat "$VTOKEN_ROOT/pyproject.toml"
        (cd "$VTOKEN_ROOT" && ls -d vtoken service loadtest 2>/dev/null || true)
        printf '%s\n' "$VTOKEN_ROOT" "$VTOKEN_VENV" "$VTOKEN_TORCH"
    } | sha256sum | cut -d ' ' -f 1
}

# A dev environment also serves: its stamp counts for `run` where the hash is the right one.
vtoken_is_ready() {
    local stamp="$VTOKEN_VENV/.vtoken-$1"
    [ -x "$VTOKEN_VENV/bin/python" ] && [ ! -e "$vtoken_marker" ] \
        && [ "$(cat "$stamp" 2>/dev/null)" = "$(vtoken_hash "$1")" ]
}

# Checks the disk unless the bulk, PyTorch, is there already.
vtoken_check_disk() {
    local parent free_mb
    if [ ! -e "$vtoken_marker" ] && compgen -G "$VTOKEN_VENV/lib/python3*/site-packages/torch" \
        >/dev/null; then
        return
    fi
    parent="$(dirname "$VTOKEN_VENV")"
    free_mb="$(df -Pm "$parent" | awk 'NR == 2 { print $4 }')"
    if [ "$free_mb" -lt "$VTOKEN_NEEDED_MB" ]; then
        vtoken_fail "the disk of $parent has $free_mb MB free, the environment needs" \
            "$VTOKEN_NEEDED_MB MB: free some, or set VTOKEN_VENV to a folder on another disk."
    fi
}

# vtoken_pip_install WHAT ARGUMENTS...: quiet; on failure says why in one sentence. Only a full disk
# leaves the marker, since pip then leaves half a package; other failures need no start from zero.
vtoken_pip_install() {
    local what="$1"
    shift
    vtoken_say "  installing $what"
    if "$VTOKEN_VENV/bin/python" -m pip install -qq --no-input --disable-pip-version-check \
        --no-deps "$@" >>"$vtoken_log" 2>&1 </dev/null; then
        return
    fi
    if grep -qi 'no space left' "$vtoken_log"; then
        vtoken_fail "the disk became full while installing $what: free $VTOKEN_NEEDED_MB MB," \
            "or set VTOKEN_VENV (and TMPDIR) to folders on another disk."
    fi
    rm -f "$vtoken_marker"
    if [ "$what" = PyTorch ]; then
        vtoken_fail "pip finds no $VTOKEN_TORCH, PyTorch's build for CPUs: set PIP_EXTRA_INDEX_URL" \
            "to PyTorch's own CPU package index, or PIP_FIND_LINKS to a folder with the wheel," \
            "and run this again (details: $vtoken_log)."
    fi
    vtoken_fail "installing $what failed: $(grep -i error "$vtoken_log" | tail -n 1)" \
        "(details: $vtoken_log)."
}

vtoken_create_venv() {
    local python
    python="$(vtoken_python)" || exit 1
    vtoken_say "Setting up $VTOKEN_VENV with $("$python" --version) (once, takes a few minutes)"
    if ! "$python" -m venv --clear "$VTOKEN_VENV" >>"$vtoken_log" 2>&1; then
        vtoken_fail "$python cannot make a virtual environment: install the venv module of that" \
            "Python (on Debian and Ubuntu: apt install python3-venv; details: $vtoken_log)."
    fi
}

vtoken_install() {
    local level="$1" arguments=() file
    : >"$vtoken_log"
    vtoken_check_disk
    if [ ! -x "$VTOKEN_VENV/bin/python" ] || [ -e "$vtoken_marker" ]; then
        vtoken_create_venv
    else
        vtoken_say "Updating $VTOKEN_VENV"
    fi
    : >"$vtoken_marker"
    while read -r file; do arguments+=(-r "$file"); done < <(vtoken_requirement_files "$level")
    vtoken_pip_install PyTorch "$VTOKEN_TORCH"
    vtoken_pip_install "the pinned packages" "${arguments[@]}"
    vtoken_pip_install vtoken-serve --no-build-isolation --editable "$VTOKEN_ROOT"
    if [ "$level" = dev ]; then vtoken_hash run >"$VTOKEN_VENV/.vtoken-run"; fi
    vtoken_hash "$level" >"$VTOKEN_VENV/.vtoken-$level"
    rm -f "$vtoken_marker"
    vtoken_say "Environment ready after $SECONDS s"
}

vtoken_export() {
    local iomp="$VTOKEN_VENV/lib/libiomp5.so"
    export VIRTUAL_ENV="$VTOKEN_VENV" PATH="$VTOKEN_VENV/bin:$PATH"
    export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}" VLLM_NO_USAGE_STATS="${VLLM_NO_USAGE_STATS:-1}"
    if [ "${VTOKEN_NO_IOMP:-0}" != 1 ] && [ -e "$iomp" ]; then
        case "${LD_PRELOAD:-}" in
            *libiomp5*) ;;
            *) export LD_PRELOAD="$iomp${LD_PRELOAD:+:$LD_PRELOAD}" ;;
        esac
    fi
}

# True where PyTorch's compiler will work: it needs a C++ compiler and Python's headers.
vtoken_can_compile() {
    local headers
    headers="$("$VTOKEN_VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')"
    printf '#include <Python.h>\n' \
        | "${CXX:-g++}" -x c++ -fsyntax-only -I "$headers" - >/dev/null 2>&1
}

# vtoken_setup run|dev: installs what is missing, then exports the environment's variables.
vtoken_setup() {
    if ! vtoken_is_ready "$1"; then
        command -v flock >/dev/null || vtoken_fail "needs the command flock (package util-linux)."
        mkdir -p "$(dirname "$VTOKEN_VENV")" \
            || vtoken_fail "cannot create $(dirname "$VTOKEN_VENV"): set VTOKEN_VENV elsewhere."
        (
            flock -n 9 || {
                vtoken_say "Waiting for another process that sets up $VTOKEN_VENV"
                flock 9
            }
            vtoken_is_ready "$1" || vtoken_install "$1"
        ) 9>"$VTOKEN_VENV.lock" || exit 1
    fi
    vtoken_export
}
