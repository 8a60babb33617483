#!/usr/bin/env bash
# Builds, checks and times everything on a CUDA machine; it is meant to take under six minutes. No network is needed when torch and
# transformers are installed and MODEL names a folder with a causal language model (default: the demo model).
#
#   benchmarks/gpu.sh [QUESTIONS.jsonl]    results go to $OUT (default: build/gpu)
#
# A step that fails stops no other; they are named at the end, and the script then fails too. Its last line is one JSON document:
# seconds and exit status of every step. ALL=1 adds the grid of compiled passes, which takes minutes to compile. To try the script
# itself without a GPU: DEVICE=cpu SHAPE=tiny.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-build/gpu} DEVICE=${DEVICE:-cuda} SHAPE=${SHAPE:-8b}
mkdir -p "$OUT"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

steps=() failed=()
# Runs a command; what it says goes to $OUT/NAME.txt too.
step() {
    local name=$1 start=$SECONDS status
    shift
    echo "== $name"
    "$@" 2>&1 | tee "$OUT/$name.txt"
    status=${PIPESTATUS[0]}
    [ "$status" -eq 0 ] || failed+=("$name")
    steps+=("\"$name\": {\"seconds\": $((SECONDS - start)), \"status\": $status}")
}

tests=(-m gpu)
[ "$DEVICE" = cuda ] || tests=(tests/test_on_device.py -m "not gpu")
step tests python -m pytest "${tests[@]}" -o addopts="-q --strict-markers -ra"
# A random-weight target of the shape of an 8B Llama: what judging costs at a large vocabulary, and what a round costs beside its pass.
step rules python benchmarks/rules.py --device "$DEVICE" --shape "$SHAPE" --output "$OUT/rules.json"
step overhead python benchmarks/overhead.py --device "$DEVICE" --shape "$SHAPE" --repeats 1 --output "$OUT/overhead.json"
compiled=(--rows 1,8 --draft-tokens 4 --acceptance 0.8)
[ -z "${ALL:-}" ] || compiled=(--rows 1,8,32 --draft-tokens 4,8 --acceptance 0.6,0.8)
step overhead-compiled python benchmarks/overhead.py --device "$DEVICE" --shape "$SHAPE" --repeats 1 --compiled "${compiled[@]}" \
    --output "$OUT/overhead-compiled.json"
if [ $# -ge 1 ]; then
    model=${MODEL:-$(python -c 'from hf_specdec.demo_model import demo_model_path; print(demo_model_path(progress=False))')}
    step bench python -m hf_specdec.cli bench --target "$model" --device "$DEVICE" --dtype bfloat16 --questions "$1" \
        --limit 1 --max-new-tokens 128 --variants plain,host-prompt-lookup,prompt-lookup,auto --output "$OUT/bench.json"
    step compiled python benchmarks/compiled.py --target "$model" --max-new-tokens 64 --output "$OUT/compiled.json"
fi

[ ${#failed[@]} -eq 0 ] || echo "Failed: ${failed[*]}" >&2
echo "{\"folder\": \"$OUT\", \"device\": \"$DEVICE\", \"steps\": {$(IFS=,; echo "${steps[*]}")}}" | tee "$OUT/steps.json"
[ ${#failed[@]} -eq 0 ]
