# Sourced: makes .venv at the root of the checkout with the given extras, or reuses it.
# usage: . .ci/environment.sh data,corpus
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
export PIP_DISABLE_PIP_VERSION_CHECK=1

# The first Python that is new enough; PYTHON=... chooses another for a new .venv.
python=
for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "error: Python 3.11 or later is needed and none was found. Set PYTHON=/path/to/it." >&2
    exit 2
fi

# One line for each extra that is installed, with the setup.py that it was installed from.
missing=
for extra in ${1//,/ }; do
    grep -qsx "$extra $(cksum < setup.py)" .venv/installed || missing=yes
done
if [ -n "$missing" ]; then
    if ! .venv/bin/python -m pip --version > /dev/null 2>&1; then
        rm -rf .venv
        if ! "$python" -m venv .venv; then
            rm -rf .venv
            echo "error: $python cannot make a virtual environment (Debian: python3-venv)." >&2
            exit 2
        fi
    fi
    echo "installing gshard_exp[$1] into .venv (once) ..."
    .venv/bin/python -m pip install -qq --use-pep517 --editable ".[$1]"
    case ",$1," in *,corpus,*)
        # Catalogs are all that is read of these (gin/tasks/m4_more.gin): without dependencies.
        .venv/bin/python -m pip install -qq --no-deps deluge wagtail horizon ;;
    esac
    for extra in ${1//,/ }; do
        echo "$extra $(cksum < setup.py)" >> .venv/installed
    done
fi
export PATH="$root/.venv/bin:$PATH"
