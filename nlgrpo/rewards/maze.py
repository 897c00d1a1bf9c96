"""The reward of an answer to a maze."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nlgrpo.data import mazes
from nlgrpo.data.conversations import text_of


class Maze:
    """1 for an answer that solves the maze, else 0; any right path counts, not only a shortest one.

    An answer is moves (UP, DOWN, LEFT, RIGHT) that go from START to GOAL through no wall, and then DONE. Any other word
    gives 0, and so does an answer that was cut off before DONE. The maze is the prompt, or the column ``maze`` for
    prompts that say more. See `nlgrpo.data.mazes` for the words of a maze.

    Raises UserError for a text that is not a maze: before a run for prompts in memory, whose row it names.
    """

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], maze: Sequence[str] | None = None, **_: Any
    ) -> list[float]:
        texts = prompts if maze is None else maze
        return [
            float(mazes.parse(text_of(text)).solved_by(text_of(answer)))
            for text, answer in zip(texts, completions, strict=True)
        ]

    def check_row(self, prompt: Any, maze: str | None = None, **_: Any) -> None:
        """Raise UserError if an example of the data has no maze."""
        mazes.parse(text_of(prompt if maze is None else maze))
