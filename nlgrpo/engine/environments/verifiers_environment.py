"""Environments of the library `verifiers`, with the policy of an engine as their model."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Literal, overload

import datasets
from transformers import PreTrainedTokenizerBase

from nlgrpo.config.schema import EnvironmentConfig
from nlgrpo.data.conversations import without_none
from nlgrpo.data.prompt_dataset import Batch, PromptSet
from nlgrpo.engine.backends.base import Engine, EngineError
from nlgrpo.engine.environments.dialogue import Dialogue, Turn, to_rollout
from nlgrpo.engine.environments.rendering import Rendering, wire
from nlgrpo.engine.environments.rounds import Job, Rounds
from nlgrpo.engine.generation import Conversation, ModelLimits, Rollout, RolloutRequest
from nlgrpo.engine.sampling import Sampling
from nlgrpo.errors import UserCodeError, UserError
from nlgrpo.runtime import host_memory
from nlgrpo.runtime.distributed import Ranks

try:
    import verifiers as vf
    from verifiers.types import AssistantMessage, Response, ResponseMessage, ToolCall, Usage
except ImportError as error:
    raise UserError("environment.id needs the library verifiers: run pip install nlgrpo[verifiers]") from error

SUPPORTED = "0.2"
ANSWER = ("content", "reasoning_content", "tool_calls")
TURNS = 1 << 12  # the noise of turn t of prompt i is that of prompt i * TURNS + t


@dataclass(frozen=True)
class Request:
    """What the policy has to continue."""

    prompt: int
    """Position of the prompt in the batch."""
    sample: int
    turn: int
    ids: list[int]


@dataclass(frozen=True)
class Answer:
    """What the policy sampled."""

    tokens: list[int]
    logprobs: list[float]
    finished: bool
    version: int | None


Ask = Callable[[Request], Awaitable[Answer]]


@dataclass
class _Talk:
    """A conversation in progress: its tokens, and the messages that they stand for."""

    sample: int
    dialogue: Dialogue = field(default_factory=Dialogue)
    messages: list[dict[str, Any]] = field(default_factory=list)


class VerifiersEnvironment:
    """An environment that `verifiers` loads by its name.

    All conversations of a batch run at the same time; the policy answers those that wait in one call of the engine.
    The tokens of a conversation are kept: later turns extend them and never tokenize an answer again.

    Raises UserError if the library or the environment cannot be loaded.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        tokenizer: PreTrainedTokenizerBase,
        model: str,
        limits: ModelLimits,
        template_kwargs: Mapping[str, Any],
        ranks: Ranks,
        *,
        together: bool = True,
    ) -> None:
        version = importlib.metadata.version("verifiers")
        if not version.startswith(f"{SUPPORTED}."):
            raise UserError(
                f"environment.id needs verifiers {SUPPORTED}, which has `verifiers.Environment`, but {version} is "
                "installed: run pip install nlgrpo[verifiers]"
            )
        if "VF_LOG_LEVEL" not in os.environ:
            logging.getLogger("verifiers").setLevel(logging.WARNING)
        self.config = config
        self.tokenizer = tokenizer
        self.ranks = ranks
        self.rendering = Rendering(tokenizer, model, config.renderer, template_kwargs)
        self.longest = min(limits.context, config.max_tokens or limits.context)
        self.rounds = Rounds(ranks, config.timeout)
        self.together = together
        try:
            datasets.disable_progress_bars()
            with _own_signal_handlers():
                self.environment = vf.load_environment(config.id, **config.args)
        except (ValueError, RuntimeError) as error:
            raise UserError(f"environment.id = {config.id!r}: {error}") from error
        except Exception as error:  # the environment is code of the user
            what = f"it cannot be loaded, {type(error).__name__}: {error}"
            raise UserCodeError(f"environment.id = {config.id!r}: {what}") from error

    @property
    def description(self) -> str:
        functions = ", ".join(self.environment.rubric._get_reward_func_names())
        return (
            f"{self.config.id} of verifiers {importlib.metadata.version('verifiers')}, conversations of up to "
            f"{self.longest:,} tokens, {self.rendering.description}\nmetrics: {functions}"
        )

    @overload
    def prompts(
        self, *, max_new_tokens: int, seed: int = 0, shuffle: bool = True, limit: int | None = None
    ) -> PromptSet: ...

    @overload
    def prompts(self, *, evaluation: Literal[True], max_new_tokens: int) -> PromptSet | None: ...

    def prompts(
        self,
        *,
        evaluation: bool = False,
        max_new_tokens: int,
        seed: int = 0,
        shuffle: bool = True,
        limit: int | None = None,
    ) -> PromptSet | None:
        """See `Environment.prompts`. Raises UserError if all prompts are too long."""
        if evaluation and self.environment.eval_dataset is None and self.environment.eval_dataset_source is None:
            return None
        data = self.environment.get_eval_dataset() if evaluation else self.environment.get_dataset()
        rows = [without_none(row) for row in islice(data, limit)]
        ids = [self._begin(row, number) for number, row in enumerate(rows, 1)]
        fits = [i for i, prompt in enumerate(ids) if len(prompt) + max_new_tokens <= self.longest]
        if not fits:
            raise UserError(
                f"environment.id = {self.config.id!r}: all {len(rows):,} prompts are too long: the shortest has "
                f"{min(map(len, ids), default=0):,} tokens, the model's context or environment.max_tokens "
                f"{self.longest:,}, of which rollout.max_new_tokens needs {max_new_tokens:,}"
            )
        return PromptSet(
            [ids[i] for i in fits],
            [_plain(rows[i]["prompt"]) for i in fits],
            [rows[i] for i in fits],
            seed=seed,
            shuffle=shuffle,
            dropped=len(rows) - len(fits),
        )

    def _begin(self, row: Mapping[str, Any], number: int) -> list[int]:
        try:
            return self.rendering.begin(_plain(row["prompt"]), self._tools(row))
        except ValueError as error:
            raise UserError(f"environment.id = {self.config.id!r}, example {number}: {error}") from error

    def draw(
        self, engine: Engine, batch: Batch, samples: int, sampling: Sampling, *, seed: int, max_rows: int | None
    ) -> Rollout:
        """See `Environment.draw`. ``sampling.max_new_tokens`` limits each answer."""
        sampling = replace(sampling, stop_ids=tuple(dict.fromkeys((*sampling.stop_ids, *self.rendering.stop_ids()))))
        rows = [
            {name: values[i] for name, values in batch.columns.items() if values[i] is not None}
            | {"prompt": batch.prompts[i]}
            for i in range(len(batch.ids))
        ]
        grouped = self.environment.requires_group_rollouts
        parts = [range(samples)] if grouped else [range(j, j + 1) for j in range(samples)]
        models = [_Policy(self, i, part, sampling) for i in range(len(rows)) for part in parts]
        jobs = [Job(partial(self._converse, model, rows[model.prompt]), len(model.samples)) for model in models]

        def answer(requests: list[Request]) -> list[Answer]:
            return self._answer(requests, engine, batch, samples, sampling, seed=seed, max_rows=max_rows)

        outputs = self.rounds.run(jobs, answer, together=self.together)
        pairs = [(model, output) for model, own in zip(models, outputs, strict=True) for output in own]
        dialogues = [model.dialogue(output["trajectory_id"]) for model, output in pairs]
        conversations = [_conversation(output) for _, output in pairs]
        self._check([conversation.outcome["error"] for conversation in conversations])
        return to_rollout(dialogues, conversations, batch.ids, samples, self.ranks.device)

    def _check(self, errors: Sequence[str | None]) -> None:
        """Raise EngineError if all conversations, of all ranks, ended with an error."""
        fine = any(error is None for error in errors)
        drawn = bool(errors)
        if self.together:
            fine = self.ranks.any(fine)
            drawn = self.ranks.any(drawn)
        if drawn and not fine:
            first = f"; the first: {errors[0]}" if errors else ""
            raise EngineError(f"all conversations of the environment ended with an error{first}")

    async def _converse(self, model: _Policy, row: dict[str, Any], ask: Ask) -> list[Any]:
        """Have the conversations of ``model``, and return the outputs of the environment."""
        model.ask = ask
        options: dict[str, Any] = {
            "client": model, "model": "policy", "sampling_args": {}, "max_retries": self.config.retries,
            "state_columns": ["trajectory_id"],
        }  # fmt: skip
        if self.environment.requires_group_rollouts:
            return list(await self.environment.run_group([row for _ in model.samples], **options))
        return [await self.environment.run_rollout(row, **options)]

    def _answer(
        self,
        requests: Sequence[Request],
        engine: Engine,
        batch: Batch,
        samples: int,
        sampling: Sampling,
        *,
        seed: int,
        max_rows: int | None,
    ) -> list[Answer]:
        """Sample an answer to each request. The prompts of whole groups are read once, if there is nothing else."""
        order = sorted(range(len(requests)), key=lambda k: (requests[k].prompt, requests[k].sample))
        ordered = [requests[k] for k in order]
        groups = [ordered[k : k + samples] for k in range(0, len(ordered), samples)]
        whole = all(
            [request.sample for request in group] == list(range(samples))
            and all((request.ids, request.turn) == (group[0].ids, group[0].turn) for request in group)
            for group in groups
        )
        if self.together:
            whole = not self.ranks.any(not whole)  # a sharded model samples on all ranks together
        asked = [group[0] for group in groups] if whole else ordered
        of_engine = RolloutRequest(
            [request.ids for request in asked],
            samples if whole else 1,
            sampling,
            seed=seed,
            index=[batch.index[request.prompt] * TURNS + request.turn for request in asked],
            max_rows=max_rows,
            first_sample=[request.sample for request in asked],
        )
        rollout = engine.generate(of_engine)
        host_memory.release()  # the KV cache and gathered parameters
        logprobs = rollout.logprobs.flatten(0, 1).tolist()
        finished = rollout.finished.flatten().tolist()
        found: list[Answer | None] = [None] * len(requests)
        for k, tokens, row, ended in zip(order, rollout.completion_ids(), logprobs, finished, strict=True):
            found[k] = Answer(tokens, row[: len(tokens)], ended, rollout.version)
        return [one for one in found if one is not None]

    def _tools(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Tools of an example: its own, or those of the environment."""
        info = row.get("info")
        info = json.loads(info) if isinstance(info, str) else info or {}
        return _tools_of(info.get("tool_defs", self.environment.tool_defs))

    def close(self) -> None:
        """End the thread in which conversations run."""
        self.rounds.close()


class _Policy(vf.Client):
    """The policy as a client of `verifiers`, for the conversations ``samples`` of one prompt."""

    def __init__(self, environment: VerifiersEnvironment, prompt: int, samples: range, sampling: Sampling) -> None:
        super().__init__(None)
        self.environment = environment
        self.prompt = prompt
        self.samples = samples
        self.sampling = sampling
        self.talks: dict[str, _Talk] = {}
        self.ask: Ask | None = None

    def dialogue(self, trajectory: str) -> Dialogue:
        """Return the tokens of a conversation; none if it ended before the policy was asked."""
        return self.talks[trajectory].dialogue if trajectory in self.talks else Dialogue()

    async def get_response(
        self,
        prompt: Any,
        model: str,
        sampling_args: Any,
        tools: Sequence[Any] | None = None,
        **options: Any,
    ) -> Response:
        """Sample the next answer of a conversation. The run's own sampling options are used."""
        assert self.ask is not None
        trajectory = options["state"]["trajectory_id"]
        schemas = _tools_of(tools)
        if trajectory not in self.talks:  # conversations that are repeated get the same numbers again
            self.talks[trajectory] = _Talk(self.samples[len(self.talks) % len(self.samples)])
        talk = self.talks[trajectory]
        messages = _plain(prompt)
        inserted = self._inserted(talk, messages, schemas)
        ids = [*talk.dialogue.ids(), *inserted]
        if len(ids) + self.sampling.max_new_tokens > self.environment.longest:
            raise vf.OverlongPromptError
        turn = len(talk.dialogue.turns)
        if turn >= TURNS:
            raise EngineError(f"a conversation has more than {TURNS} turns; limit them in environment.args")
        answer = await self.ask(Request(self.prompt, talk.sample, turn, ids))
        talk.dialogue.add(Turn(inserted, answer.tokens, answer.logprobs, answer.finished), answer.version)
        response = self._response(answer, ids, schemas)
        talk.messages = [*messages, _dump(AssistantMessage(**{k: response.message[k] for k in ANSWER}))]
        return response

    def _inserted(self, talk: _Talk, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        """Return the tokens between the last answer and the next one."""
        rendering = self.environment.rendering
        turns = talk.dialogue.turns
        known = talk.messages
        if not turns:
            return rendering.begin(messages, tools)
        if len(messages) <= len(known) or not all(map(_same, known, messages)):
            raise EngineError(
                "the environment changed earlier messages of a conversation, or asked again without a new one; only "
                "conversations that grow by messages at their end can be trained on"
            )
        answer = turns[-1].tokens
        ids = talk.dialogue.ids()
        return rendering.extend(ids[: len(ids) - len(answer)], answer, messages, len(messages) - len(known), tools)

    def _response(self, answer: Answer, prompt: list[int], tools: list[dict[str, Any]]) -> Response:
        parsed = self.environment.rendering.parse(answer.tokens, prompt, tools)
        calls = [
            ToolCall(
                id=call.id or f"call_{i}",
                name=call.name,
                arguments=call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments or {}),
            )
            for i, call in enumerate(parsed.tool_calls)
            if call.name and call.status == "ok"
        ]
        reason = "tool_calls" if calls else "stop" if answer.finished else "length"
        message = ResponseMessage(
            content=parsed.content,
            reasoning_content=parsed.reasoning_content,
            tool_calls=calls or None,
            finish_reason=reason,
            is_truncated=not answer.finished,
        )
        total = len(prompt) + len(answer.tokens)
        usage = Usage(
            prompt_tokens=len(prompt), reasoning_tokens=0, completion_tokens=len(answer.tokens), total_tokens=total
        )
        return Response(id="policy", created=0, model="policy", usage=usage, message=message)

    # `get_response` replaces the conversions for the protocols of other models.

    def setup_client(self, config: Any) -> None:
        raise NotImplementedError

    async def to_native_tool(self, tool: Any) -> Any:
        raise NotImplementedError

    async def to_native_prompt(self, messages: Any) -> Any:
        raise NotImplementedError

    async def get_native_response(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError

    async def raise_from_native_response(self, response: Any) -> None:
        raise NotImplementedError

    async def from_native_response(self, response: Any) -> Any:
        raise NotImplementedError

    async def close(self) -> None:
        """Nothing has to be closed."""


def _conversation(output: Mapping[str, Any]) -> Conversation:
    error = output.get("error")
    if error is not None:
        error = str(error.get("error_chain_str") or error.get("message")) if isinstance(error, Mapping) else str(error)
    metrics = {name: float(value) for name, value in (output.get("metrics") or {}).items()}
    reward = None if output["reward"] is None else float(output["reward"])
    outcome = {"reward": reward, "metrics": metrics, "error": error}
    return Conversation(wire(_plain(output.get("completion") or [])), outcome)


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two messages say the same. Environments may leave the reasoning of an answer out."""
    return all((one.get(key) or None) == (other.get(key) or None) for key in ("role", "content", "tool_calls"))


def _plain(messages: Any) -> list[dict[str, Any]]:
    """Return messages as dicts without empty fields."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    return [_dump(message) for message in messages]


def _dump(value: Any) -> dict[str, Any]:
    plain = value.model_dump() if hasattr(value, "model_dump") else dict(value)
    return {key: without_none(part) for key, part in plain.items() if part is not None}


def _tools_of(tools: Sequence[Any] | None) -> list[dict[str, Any]]:
    return [{name: tool[name] for name in ("name", "description", "parameters")} for tool in map(_dump, tools or ())]


@contextlib.contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Keep the handlers of SIGINT and SIGTERM, which environments of `verifiers` replace."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
