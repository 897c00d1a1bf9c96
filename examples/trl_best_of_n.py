"""Best-of-4 training in TRL: GRPOTrainer with reward functions wrapped by `linearized` or `aggregated`.

pip install "nlgrpo[trl]"
python examples/trl_best_of_n.py                       # nlgrpo's embedded model on a CPU, half a minute
python examples/trl_best_of_n.py --two                 # two rewards at once, their smooth minimum
python examples/trl_best_of_n.py --model Qwen/Qwen3-0.6B --prompts prompts.jsonl --max-length 256
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from nlgrpo.integrations.trl import aggregated, linearized
from nlgrpo.model.hf_weights import locate

PROMPTS = locate("story-lm").parent / "prompts.jsonl"
SAMPLES = 8  # completions per prompt, TRL's num_generations


def short_sentence(completions: list[str], **_: Any) -> list[float]:
    """0 for a first sentence of 8 words, lower for any other length."""
    words = [len(text.split(".")[0].split()) for text in completions]
    return [-abs(n - 8) / 8 for n in words]


def varied_words(completions: list[str], **_: Any) -> list[float]:
    """Share of different words, 0 to 1."""
    each = [text.lower().split() for text in completions]
    return [len(set(words)) / max(1, len(words)) for words in each]


class Progress(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        logs = others["logs"]
        for name in ("short_sentence", "varied_words"):
            if f"objective/{name}" in logs:
                mean, best = logs[f"rewards/{name}/mean"], logs[f"objective/{name}"]
                print(f"step {state.global_step:3}   {name}: mean {mean:7.3f}   best of 4 {best:7.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="story-lm", help="Hugging Face directory or hub name")
    parser.add_argument("--prompts", default=PROMPTS, type=Path, help='file with lines {"prompt": ...}')
    parser.add_argument("--two", action="store_true", help="train for varied words too")
    parser.add_argument("--steps", default=20, type=int)
    parser.add_argument("--max-length", default=32, type=int, help="maximum tokens per completion")
    parser.add_argument("--lr", default=1e-3, type=float)
    options = parser.parse_args()
    if options.two:
        reward = aggregated([short_sentence, varied_words], "bon:4", SAMPLES, "smooth_min:4")
    else:
        reward = linearized(short_sentence, "bon:4", SAMPLES)
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(), max_steps=options.steps, learning_rate=options.lr,
        num_generations=SAMPLES, per_device_train_batch_size=8 * SAMPLES, max_completion_length=options.max_length,
        scale_rewards="none", loss_type="dr_grpo",  # so that the gradient is the objective's
        bf16=False, gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to="none",
        disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        str(locate(options.model)), reward, args,
        train_dataset=Dataset.from_list([json.loads(line) for line in options.prompts.read_text("utf-8").splitlines()]),
        callbacks=[Progress()],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()


if __name__ == "__main__":
    main()
