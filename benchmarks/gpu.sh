#!/usr/bin/env bash
# Builds, checks and times everything on a CUDA machine; it is meant to take under six minutes. No network is needed when torch and
# transformers are installed and MODEL names a folder with a causal language model (default: the demo model).
#
#   benchmarks/gpu.sh [QUESTIONS.jsonl]    results go to $OUT (default: build/gpu)
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-build/gpu}
mkdir -p "$OUT"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

python -m pytest -m gpu -o addopts="-q --strict-markers" | tee "$OUT/tests.txt"
# A random-weight target of the shape of an 8B Llama: what judging costs at a large vocabulary, and what a round costs beside its pass.
python benchmarks/rules.py --device cuda --output "$OUT/rules.json"
python benchmarks/overhead.py --device cuda --repeats 1 --output "$OUT/overhead.json"
python benchmarks/overhead.py --device cuda --repeats 1 --rows 1,8 --draft-tokens 4 --acceptance 0.8 --compiled \
    --output "$OUT/overhead-compiled.json"
if [ $# -ge 1 ]; then
    model=${MODEL:-$(python -c 'from hf_specdec.demo_model import demo_model_path; print(demo_model_path(progress=False))')}
    python -m hf_specdec.cli bench --target "$model" --device cuda --dtype bfloat16 --questions "$1" \
        --limit 1 --max-new-tokens 128 --variants plain,host-prompt-lookup,prompt-lookup,auto --output "$OUT/bench.json"
    python benchmarks/compiled.py --target "$model" --max-new-tokens 64 --output "$OUT/compiled.json"
fi
