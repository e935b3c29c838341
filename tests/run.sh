#!/usr/bin/env bash
# The whole check: an environment of its own, lint, format, types, tests.
# Further arguments go to pytest, for instance -k gating.
. "$(dirname "${BASH_SOURCE[0]}")/../.ci/environment.sh" data,corpus,test,tpu-plan
ruff check .
ruff format --check .
mypy
# One process for each core; the tests of a file share what they compile.
exec python -m pytest -n auto --dist loadfile "$@"
