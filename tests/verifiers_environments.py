"""Environments of `verifiers` for the tests; each is also the module of an environment, by its name."""

from __future__ import annotations

import asyncio
import time

import verifiers as vf
from datasets import Dataset


def questions(count: int = 12) -> Dataset:
    return Dataset.from_list([{"question": f"Question {i}?", "answer": str(i)} for i in range(count)])


def answer_length(completion, **kwargs):
    return sum(len(m.content or "") for m in completion if m.role == "assistant") / 100


def spaces(completion, **kwargs):
    return float(sum((m.content or "").count(" ") for m in completion if m.role == "assistant"))


class Turns(vf.MultiTurnEnv):
    """Answers each message with its number; ``fault`` names what goes wrong after the first answer."""

    fault = ""

    async def env_response(self, messages, state, **kwargs):
        turn = len(state["trajectory"])
        if self.fault == "tool error" and int(state["answer"]) % 2:
            raise vf.ToolCallError("no tool")
        if self.fault == "always":
            raise vf.ToolCallError("no tool")
        if self.fault == "raises":
            raise RuntimeError("broken")
        if self.fault == "exits":
            raise SystemExit(3)
        if self.fault == "hangs":
            await asyncio.sleep(1000)
        if self.fault == "slow" and int(state["answer"]) % 2:
            await asyncio.sleep(0.4)
        if self.fault == "speaks":
            return [vf.AssistantMessage(content="I am the model.")]
        return [vf.UserMessage(content=f"Turn {turn}: say more.")]

    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        if self.fault == "rewrites" and state["trajectory"]:
            return [vf.UserMessage(content="Forget it."), *messages[1:]]
        return messages


class Random(Turns):
    """Begins each conversation with another number."""

    async def setup_state(self, state):
        state["prompt"] = [*state["prompt"], vf.UserMessage(content=f"Number {len(state['trajectory_id'])}")]
        state["prompt"][-1] = vf.UserMessage(content=f"Number {state['trajectory_id'][:3]}")
        return state


def load_environment(turns=2, count=12, fault="", kind="turns", evaluation=0, **options):
    rubric = vf.Rubric(funcs=[answer_length, spaces], weights=[1.0, 0.5])
    if kind == "group":
        rubric = vf.Rubric(funcs=[above_median], weights=[1.0])
    if kind == "tools":
        return vf.ToolEnv(
            tools=[add], dataset=questions(count), rubric=vf.Rubric(funcs=[last_tool_result]), max_turns=turns
        )
    if kind == "single":
        return vf.SingleTurnEnv(dataset=questions(count), rubric=rubric, **options)
    kinds = {"turns": Turns, "group": Turns, "random": Random}
    more = {"eval_dataset": questions(evaluation)} if evaluation else {}
    made = kinds[kind](
        dataset=questions(count), system_prompt="Be good.", rubric=rubric, max_turns=turns, **more, **options
    )
    made.fault = fault
    if fault == "load":
        raise RuntimeError("no key")
    return made


def above_median(completions, **kwargs) -> list[float]:
    lengths = [answer_length(completion) for completion in completions]
    return [float(x >= sorted(lengths)[len(lengths) // 2]) for x in lengths]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    time.sleep(0.01)
    return a + b


def last_tool_result(completion, **kwargs):
    return float(next((m.content for m in reversed(completion) if m.role == "tool"), -1))
