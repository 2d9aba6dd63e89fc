#!/bin/sh
# Makes or updates the controller's environment: controller-venv.sh FOLDER STAMP
#
# Everything is installed by hash from requirements/: uv by pip, the rest by uv. STAMP is written
# last, so an interrupted run is never taken for a whole environment. FOLDER is kept when its Python
# still works, and only brought up to date.
set -u

folder=$1
stamp=$2
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
log=$(mktemp "${TMPDIR:-/tmp}/controller-venv.XXXXXX") || exit 1
trap 'rm -f "$log"' EXIT
trap 'exit 130' INT TERM

# Sites with a certificate authority of their own have it in the system's store, where pip looks but uv does not.
for store in /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt; do
    [ -s "$store" ] && export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-true}"
done

die() {
    [ -s "$log" ] && tail -n 5 "$log" | sed 's/^/    /' >&2
    printf '%s: %s\n' "$folder" "$1" >&2
    exit 1
}

python_is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    for name in ${PYTHON:-} python3.13 python3.12 python3.11 python3; do
        if python_is_new_enough "$name"; then
            # The real interpreter: a wrapper such as pyenv's answers by folder and may change its mind.
            "$name" -c 'import os, sys; print(os.path.realpath(sys.executable))'
            return 0
        fi
    done
    return 1
}

whole() {
    python_is_new_enough "$folder/bin/python" && "$folder/bin/uv" --version >/dev/null 2>&1
}

rm -f "$stamp"
if ! whole; then
    python=$(find_python) || die "needs Python 3.11 or newer; found $(python3 --version 2>&1 || echo 'no python3'). Install python3.11 or newer, or name one: make PYTHON=/path/to/python3"
    "$python" -c 'import venv, ensurepip' >"$log" 2>&1 ||
        die "$python has no venv module. On Debian and Ubuntu: apt-get install $("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    echo "making $folder with $python"
    rm -rf "$folder"
    "$python" -m venv "$folder" >"$log" 2>&1 || die "$python -m venv failed (above); is the disk full, or the folder not writable?"
    "$folder/bin/python" -m pip install --quiet --retries 2 --require-hashes -r "$here/uv.txt" >"$log" 2>&1 ||
        die "pip cannot install uv (above). No network? Set pip's index (pip config set global.index-url ...) or proxy, then run make again"
fi
"$folder/bin/uv" pip install --quiet --python "$folder/bin/python" --require-hashes --no-deps \
    -r "$here/uv.txt" -r "$here/controller.txt" -r "$here/dev.txt" >"$log" 2>&1 ||
    die "uv cannot install the pinned packages (above). No network? Set UV_DEFAULT_INDEX or the proxy, then run make again"
"$folder/bin/uv" pip install --quiet --python "$folder/bin/python" --no-deps --no-build-isolation --editable "$here/.." >"$log" 2>&1 ||
    die "bench cannot be installed from $here/.. (above)"
: >"$stamp"
