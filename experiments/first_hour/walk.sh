#!/usr/bin/env bash
# Follow the documentation of one extra in a fresh clone and a fresh environment, and time each command.
#   bash experiments/first_hour/walk.sh trl|trackers|serve|notebooks|vllm FOLDER
# FOLDER must not be there yet. Prints each command, its last lines and its seconds; ends at the first command that fails.
set -euo pipefail
extra=$1
folder=$2
repository=$(git -C "$(dirname "$0")" rev-parse --show-toplevel)
began=$SECONDS
case $extra in
trl | trackers | serve | notebooks | vllm) ;;
*)
    echo "unknown: $extra" >&2
    exit 2
    ;;
esac

step() {  # COMMAND: run it in a shell, show its last lines, and say how long it took
    echo "\$ $1"
    local start=$SECONDS
    local status=0
    bash -c "$1" > "$folder/step.log" 2>&1 || status=$?
    tail -n "${2:-4}" "$folder/step.log" | cut -c 1-200 | sed 's/^/    /'
    echo "    [status $status, $((SECONDS - start)) s]"
    [ "$status" = 0 ] || exit "$status"
}

install() {  # EXTRAS: as in docs/get-started.md
    step "python3 -m venv .venv" 1
    step ".venv/bin/pip install -q -c constraints.txt setuptools torch" 1
    step ".venv/bin/pip install -q -c constraints.txt --no-build-isolation '.[$1]'" 1
}

mkdir "$folder"
folder=$(realpath "$folder")
git clone -q "$repository" "$folder/nlgrpo"
cd "$folder/nlgrpo"
export PATH="$PWD/.venv/bin:$PATH"
few="--train.steps 3 --evaluation.prompts 8 --evaluation.samples 8 --evaluation.ns 1 8"

case $extra in
trl)  # docs/migrating-from-trl.md
    install trl
    step "python examples/trl_best_of_n.py"
    step "python examples/trl_best_of_n.py --two"
    printf 'model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct\ndataset_name: openai/gsm8k\nnum_generations: 8\n' > grpo.yaml
    step "nlgrpo from-trl grpo.yaml --out my.toml"
    step "head -12 my.toml" 12
    ;;
trackers)  # docs/guides/tracking.md
    install wandb,trackio,mlflow,comet,tensorboard
    export WANDB_MODE=offline COMET_MODE=offline TRACKIO_DIR="$folder/trackio"
    step "nlgrpo train maze $few --train.track wandb trackio mlflow comet tensorboard" 6
    step "ls -d runs/maze/wandb/offline-run-* runs/maze/comet/* runs/maze/tensorboard/* mlflow.db $folder/trackio/*" 8
    ;;
serve)  # docs/guides/inference.md
    install serve
    step "nlgrpo generate 'Once upon a time' --procedure bon:4 --choose 'length(target=25, scale=128)'"
    nlgrpo serve --procedure bon:4 --choose "length(target=25, scale=128)" --port 8017 > serve.log 2>&1 &
    server=$!
    trap 'kill $server || true' EXIT
    step "for i in \$(seq 60); do curl -sf http://127.0.0.1:8017/health && exit 0; sleep 1; done; exit 1"
    step "curl -sf http://127.0.0.1:8017/v1/completions -H 'Content-Type: application/json' \
-d '{\"model\": \"story-lm\", \"prompt\": \"Once upon a time\", \"candidates\": true}'"
    ;;
notebooks)  # docs/get-started.md
    install notebooks,trl
    for notebook in examples/notebooks/*.ipynb; do
        step "jupyter execute --inplace $notebook"
    done
    ;;
vllm)  # docs/guides/vllm.md; vLLM's CPU build pins other versions, as `make test-vllm` does
    step "make .venv-vllm/installed" 1
    export PATH="$PWD/.venv-vllm/bin:$PATH"
    step "nlgrpo train maze $few --rollout.engine vllm --loss.correction tis:2" 6
    step "nlgrpo generate --model maze-lm --source maze-test --limit 1 --engine vllm --procedure bon:8 --choose 'maze()'"
    ;;
esac
echo "$extra: $(((SECONDS - began + 30) / 60)) minutes ($((SECONDS - began)) s)"
