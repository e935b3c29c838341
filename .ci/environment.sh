# Sourced: makes .venv at the root of the checkout with the given extras, or reuses it.
# usage: . .ci/environment.sh data,corpus
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
export PIP_DISABLE_PIP_VERSION_CHECK=1

# The first Python that is new enough; PYTHON=... chooses another.
find_python() {
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: Python 3.11 or later is needed and none was found. Set PYTHON=/path/to/python." >&2
    exit 2
}

wanted="$1 $(cksum < setup.py)"
if [ "$(cat .venv/installed 2>/dev/null)" != "$wanted" ]; then
    [ -x .venv/bin/python ] || "$(find_python)" -m venv .venv
    echo "installing gshard_exp[$1] into .venv (once) ..."
    .venv/bin/python -m pip install -qq --use-pep517 --editable ".[$1]"
    case ",$1," in *,corpus,*)
        # Catalogs are all that is read of these (gin/tasks/m4_more.gin): without dependencies.
        .venv/bin/python -m pip install -qq --no-deps deluge wagtail horizon ;;
    esac
    echo "$wanted" > .venv/installed
fi
export PATH="$root/.venv/bin:$PATH"
