#!/usr/bin/env bash
# Checks and times everything on a CUDA machine in under six minutes. No network is needed when torch and transformers are installed
# and MODEL names a folder with a causal language model (default: the demo model).
#
#   benchmarks/gpu.sh [QUESTIONS.jsonl]
#
# A step that fails or takes too long stops no other; the last line is one JSON document with what each step said, and the exit code is
# 1 if one failed. Logs and that document (results.json) are in $OUT. To try it elsewhere: DEVICE=cpu SHAPE=tiny MODEL=DIR.
set -uo pipefail
questions=$([ $# -eq 0 ] || realpath -- "$1") || exit 2
cd "$(dirname "$0")/.." || exit 2
PYTHON=${PYTHON:-python} OUT=${OUT:-build/gpu} DEVICE=${DEVICE:-cuda} SHAPE=${SHAPE:-8b} DTYPE=${DTYPE:-bfloat16} BUDGET=${BUDGET:-350}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$OUT" || exit 2
rm -f "$OUT"/*.log "$OUT/steps.tsv"
failed=0

# step NAME SECONDS COMMAND...: runs a command with what is left of the budget, at most so long, and writes down how it ended.
step() {
    local name=$1 limit=$2 start=$SECONDS left=$((BUDGET - SECONDS)) status=124
    shift 2
    echo "== $name: $*"
    if [ "$left" -gt 0 ]; then
        timeout -k 10 "$((limit < left ? limit : left))" "$@" 2>&1 | tee "$OUT/$name.log"
        status=${PIPESTATUS[0]}
    fi
    printf '%s\t%s\t%s\n' "$name" "$status" "$((SECONDS - start))" >>"$OUT/steps.tsv"
    [ "$status" -eq 0 ] || { echo "== $name failed ($status)"; failed=1; }
}

step device 60 "$PYTHON" -c "import torch; torch.ones(1, device='$DEVICE').sum().item(); print('$DEVICE', torch.__version__)"
step tests 170 "$PYTHON" -m pytest -m gpu -o addopts="-q -rs --strict-markers"
# A random-weight target of the shape of an 8B Llama: what judging costs at a large vocabulary, and what a round costs beside its pass.
target=(--shape "$SHAPE" --device "$DEVICE" --dtype "$DTYPE" --repeats 1)
step rules 60 "$PYTHON" benchmarks/rules.py "${target[@]}"
step overhead 120 "$PYTHON" benchmarks/overhead.py "${target[@]}" --max-new-tokens "${TOKENS:-64}"
model=(${MODEL:+--target "$MODEL"} --device "$DEVICE" --dtype "$DTYPE")
if [ -n "$questions" ]; then
    step bench 60 "$PYTHON" -m hf_specdec.cli bench "${model[@]}" --questions "$questions" --limit 1 --max-new-tokens 64 \
        --variants plain,host-prompt-lookup,prompt-lookup,auto
fi
# Compiling takes longest: single passes and whole answers of the small model, then rounds of the large one.
step compiled 90 "$PYTHON" benchmarks/compiled.py "${model[@]}" --rows 1,8 --widths 1,5 --max-new-tokens "${TOKENS:-64}" --num-draft-tokens 4
step overhead-compiled 120 "$PYTHON" benchmarks/overhead.py "${target[@]}" --rows 1 --draft-tokens 4 --acceptance 0.8 \
    --max-new-tokens "${TOKENS:-64}" --compiled

"$PYTHON" - "$OUT" <<'GATHER' || failed=1
import json, pathlib, sys

out = pathlib.Path(sys.argv[1])
document = {"failed": [], "steps": {}}
for line in (out / "steps.tsv").read_text().splitlines():
    name, status, seconds = line.split("\t")
    log = out / f"{name}.log"
    last = (log.read_text(errors="replace").splitlines() if log.exists() else [])[-1:] or ["there was no time left"]
    try:
        said = json.loads(last[0])
    except ValueError:
        said = last[0]
    document["steps"][name] = {"status": int(status), "seconds": int(seconds), "said": said}
    if int(status):
        document["failed"].append(name)
(out / "results.json").write_text(json.dumps(document, indent=1) + "\n")
print(json.dumps(document))
GATHER
exit "$failed"
