#!/usr/bin/env bash
# Semantic search with purevk, from nothing: sets up what is missing, exports the model once, searches.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh --demo
exec .venv/bin/python examples/semantic_search/run.py "$@"
