"""The model card of the default model. All of its numbers come from the run that created the model."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerFast

CARD = """\
---
license: mit
language: en
library_name: transformers
pipeline_tag: text-generation
datasets: [roneneldan/TinyStories]
---
# story-lm

The default model of nlgrpo: a toy that tells simple English stories of any length up to {limit} tokens, small enough
to train with reinforcement learning on two CPU cores in minutes. GPT-2 architecture, {parameters:,} parameters in
float32 ({layers} layers of width {width}, {heads} heads, tied embeddings, learned positions that began
as sinusoids), byte-level BPE of {vocabulary} tokens, context {context} tokens. The tokenizer puts `<s>` before a text;
the model ends it with `</s>`.

## Training

{steps} steps of AdamW (cosine decay from {lr:g}), {batch} documents a step, dropout {dropout:g}, seed {seed}, on
{stories:,} stories ({tokens:,} tokens; one story in twenty is held out) of TinyStories (Eldan and Li, 2023;
CDLA-Sharing-1.0); then {retold_steps} steps (from half that rate) on {retold:,} texts that the model wrote itself at
temperature {temperature:g} (sequence-level distillation; Kim and Rush, 2016), for which it spells better when sampled
at temperature 1:

    python scripts/make_story_model.py TINYSTORIES.txt --out nlgrpo/data/assets \\
        --steps {steps} --retold {retold} --retold-steps {retold_steps} --temperature {temperature:g} \\
        --batch {batch} --lr {lr:g} --dropout {dropout:g} --seed {seed} --heads {heads} --threads {threads}

A document is a part of a text, cut between two words after a uniformly drawn number of tokens, so that completions
have about uniform lengths, as the reference model of the length-reward experiment in "Inference-Aware Meta-Alignment of
LLMs via Non-Linear GRPO" (Takakura et al., appendix J.2) has.

## Measured

Perplexity per token: {on_stories:.2f} on held-out stories after the first part, {on_own:.2f} on held-out texts of its
own after the second. Lengths of {samples} completions at temperature 1, in tokens with the end token.
{length_table}

Samples at temperature 1, not selected (prompt in bold):

{completions}

## Limits

A toy for testing training methods. It knows a few hundred words, loses the thread after a sentence or two, and stops
anywhere in a sentence because it was taught to. Names and events are made up. Do not use it for anything else.

The weights are under the licence of nlgrpo (MIT). No part of the data is in this folder.
"""


def model_card(prompts: list[str], completions: list[list[int]], tokenizer: PreTrainedTokenizerFast, **facts) -> str:
    """Fill in ``CARD``; ``facts`` are its numbers by name."""
    shown = (
        f"- **{prompt}**{tokenizer.decode(ids, skip_special_tokens=True)}"
        for prompt, ids in zip(prompts[:12], completions[:12], strict=True)
    )
    table = length_table([len(ids) for ids in completions], facts["limit"], facts.pop("cut"))
    return CARD.format(completions="\n".join(shown), length_table=table, samples=len(completions), **facts)


def length_table(lengths: list[int], limit: int, cut: int) -> str:
    """Deciles and an eight-column histogram of ``lengths``; ``cut`` of them reached the limit without an end token."""
    found, width = torch.tensor(lengths, dtype=torch.float64), limit // 8
    deciles = ", ".join(f"{found.quantile(q / 10).item():.0f}" for q in range(11))
    bars = (torch.histc(found, 8, 0.5, limit + 0.5) / len(found)).tolist()
    heads = " | ".join(f"{i * width + 1}-{(i + 1) * width}" for i in range(8))
    rows = [f"| {heads} |", "|" + " --- |" * 8, f"| {' | '.join(f'{bar:.1%}' for bar in bars)} |"]
    return "\n".join([f"Deciles, 0 to 100%: {deciles}; {cut / len(found):.1%} were cut.", "", *rows])
