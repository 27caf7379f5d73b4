#!/bin/bash
# compile_kernels.sh SOURCE [OPTIONS]: gfx950 code objects into the source tree, where the wheel
# takes them from. OPTIONS go to `rocm-msa compile`; without them versions.env says what to compile.
source "$(dirname "$0")/lib.sh"
source_dir="$1"
shift
if [ $# -eq 0 ]; then
    for tp in $(version KERNEL_TP); do set -- "$@" --tp "$tp"; done
    for dtype in $(version KERNEL_KV_CACHE_DTYPES); do set -- "$@" --kv-cache-dtype "$dtype"; done
    for dtype in $(version KERNEL_INDEXER_DTYPES); do set -- "$@" --indexer-kv-dtype "$dtype"; done
    for layout in $(version KERNEL_MONO); do set -- "$@" --mono "$layout"; done
fi
cd "$source_dir"
"$PYTHON" -c "from rocm_msa.cli import main; main()" compile --arch gfx950 \
    -o rocm_msa/code_objects/gfx950 "$@"
