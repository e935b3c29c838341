#!/usr/bin/env bash
# The whole check: an environment of its own, lint, format, types, tests.
# Further arguments go to pytest, for instance -k gating.
. "$(dirname "${BASH_SOURCE[0]}")/../.ci/environment.sh" data,corpus,test
ruff check .
ruff format --check .
mypy
exec python -m pytest "$@"
