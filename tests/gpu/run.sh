#!/usr/bin/env bash
# Checks the flashinfer and torch backends on a GPU and measures them; the table comes last.
# Prepared, and not run on a GPU yet. docs/flashinfer.md says which wheels to bring where there is no network.
#
#   KVPROOF_WHEELS=wheels tests/gpu/run.sh             # install these first, into a folder of their own
#   tests/gpu/run.sh --double                          # rehearse on a CPU: the double, and small sizes
set -euo pipefail
cd "$(dirname "$0")/../.."

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if [[ -n "${KVPROOF_WHEELS:-}" ]]; then
    python3 -m pip install --quiet --no-index --no-deps --target "$site" "$KVPROOF_WHEELS"/*.whl
fi
# kvproof from this folder, under the names it is installed as.
mkdir "$site/kvproof"
for layer in allocator attention backend fuzz; do
    ln -s "$PWD/$layer" "$site/kvproof/$layer"
done
PYTHONPATH="$site" FLASHINFER_WORKSPACE_BASE="${FLASHINFER_WORKSPACE_BASE:-$site}" python3 tests/gpu/check.py "$@"
