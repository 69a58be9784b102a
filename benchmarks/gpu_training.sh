#!/usr/bin/env bash
# The runs of a recipe on one GPU that is lent for minutes and has no network. A process for each model shares the GPU.
#
#   bash benchmarks/gpu_training.sh prepare [FILE]      here: .gpu_training, with what the machine lacks; FILE came back before
#   bash benchmarks/gpu_training.sh RECIPE TIME RUNS... there: a process for each pattern of names, each stopped after so long, such as 9m
#
# Results and trials of rates come back as $OUT/results.tar.gz, each minute. Checkpoints stay: a second call on the same
# machine goes on at the step where the first one stopped, and one on another machine makes begun runs anew.
# docs/record/experiments.md has the call of the tool `run`, and what fits into it.
set -u
cd "$(dirname "$0")/.."
carried=$PWD/.gpu_training

if [ "$1" = prepare ]; then
    set -e
    exclude=$(git rev-parse --git-path info/exclude)
    grep -qsx /.gpu_training/ "$exclude" || echo /.gpu_training/ >> "$exclude"
    rm -rf "$carried"
    mkdir "$carried"
    python -m pip download -q --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 \
        -d "$carried" platformdirs pydantic typer # and what these need
    cp -r --no-preserve=mode "${GPT2:-../shared/data/gpt2-bpe}" "$carried/gpt2-bpe"
    [ $# -lt 2 ] || cp "$2" "$carried/results.tar.gz"
    du -sh "$carried"
    exit
fi

recipe=$1 time=$2 work=${WORK:-/tmp/gpu_training} out=${OUT:-gpu-results}
shift 2
if [ ! -d "$work/out" ]; then
    mkdir -p "$work/site" "$work/out" "$out"
    for wheel in "$carried"/*.whl; do python3 -m zipfile -e "$wheel" "$work/site"; done
    [ ! -f "$carried/results.tar.gz" ] || tar -xzf "$carried/results.tar.gz" -C "$work/out"
fi
sed "s|tokenizer: gpt2\$|tokenizer: gpt2:$carried/gpt2-bpe|" "$recipe" > "$work/recipe.yaml"
export PYTHONPATH="$work/site:$PWD/src" RFA_CACHE="$work/cache" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=4

pack() { # what is finished; a run folder without its checkpoints cannot go on. A file a shell: two may write at the end
    local packed=$work/$BASHPID.tar.gz
    (cd "$work/out" && tar -czf "$packed" recipe.json results \
        $(grep -lsE '"finished": true|"diverged"' runs/*/run.json)) 2> /dev/null
    cp "$packed" "$out/results.tar.gz"
}

started=()
for runs in "$@"; do
    timeout "$time" python3 -m rfa_lab experiment "$work/recipe.yaml" --out "$work/out" --only "$runs" --other-version &
    started+=($!)
done
(while sleep 60; do pack; done) > /dev/null 2>&1 & # or a pipe behind this script would wait for `sleep`
packing=$!
failed=0
for each in "${started[@]}"; do wait "$each" || [ $? = 124 ] || failed=$((failed + 1)); done
kill $packing
pack
ls "$work/out/results"
exit $failed
