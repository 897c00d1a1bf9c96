"""Mazes as text: generating, reading and solving them, and the sets of mazes of the recipe ``maze``.

A maze of n x n rooms is a grid of 2 n + 1 rows and columns. Rooms have odd coordinates, and walls between them are
open or closed such that there is exactly one path between any two rooms (a spanning tree, by Prim's algorithm). As
text it is one word for each square and NEWLINE after each row; an answer is a walk from START to GOAL:

    WALL WALL WALL NEWLINE WALL START WALL NEWLINE ...     ->     DOWN DOWN RIGHT DONE

Sets never share the walls of a maze: a hash of them decides whether a maze is for training, validation or test.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Literal

from nlgrpo.errors import UserError

WALL = "WALL"
PATH = "PATH"
START = "START"
GOAL = "GOAL"
NEWLINE = "NEWLINE"
DONE = "DONE"
MOVES = {"UP": (-1, 0), "DOWN": (1, 0), "LEFT": (0, -1), "RIGHT": (0, 1)}
WORDS = (WALL, PATH, START, GOAL, NEWLINE, *MOVES, DONE)

Place = tuple[int, int]  # row and column
Split = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Maze:
    """A grid with a start and a goal. ``open`` has the squares that are no wall."""

    height: int
    width: int
    open: frozenset[Place]
    start: Place
    goal: Place

    def text(self) -> str:
        """Return the words of all squares, row by row."""
        words: list[str] = []
        for row in range(self.height):
            words += [self._word((row, column)) for column in range(self.width)]
            words.append(NEWLINE)
        return " ".join(words)

    def _word(self, place: Place) -> str:
        if place == self.start:
            return START
        if place == self.goal:
            return GOAL
        return PATH if place in self.open else WALL

    def follow(self, words: Sequence[str]) -> list[Place]:
        """Return the squares that moves visit, from the start, up to the first wall or word that is no move."""
        places = [self.start]
        for word in words:
            down, right = MOVES.get(word, (0, 0))
            row, column = places[-1]
            place = (row + down, column + right)
            if place == places[-1] or place not in self.open:
                break
            places.append(place)
        return places

    def solved_by(self, answer: str) -> bool:
        """Whether an answer is right: moves through no wall that end at the goal, and then DONE."""
        *moves, last = answer.split() or [""]
        if last != DONE:
            return False
        places = self.follow(moves)
        return len(places) == len(moves) + 1 and places[-1] == self.goal

    def shortest(self) -> list[str] | None:
        """Return the moves of a shortest path from the start to the goal, by breadth-first search; None without one."""
        came: dict[Place, tuple[Place, str]] = {}
        queue = deque([self.start])
        while queue:
            place = queue.popleft()
            if place == self.goal:
                break
            for word, (down, right) in MOVES.items():
                neighbour = (place[0] + down, place[1] + right)
                if neighbour in self.open and neighbour not in came and neighbour != self.start:
                    came[neighbour] = (place, word)
                    queue.append(neighbour)
        else:
            return None
        moves: list[str] = []
        place = self.goal
        while place != self.start:
            place, word = came[place]
            moves.append(word)
        return moves[::-1]


# --- reading ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def parse(text: str) -> Maze:
    """Read a maze. Raises UserError, which says what is wrong with it."""
    rows: list[list[str]] = [[]]
    for word in text.split():
        if word == NEWLINE:
            rows.append([])
        elif word in (WALL, PATH, START, GOAL):
            rows[-1].append(word)
        else:
            raise UserError(f"{word!r} is no square of a maze; expected {WALL}, {PATH}, {START}, {GOAL} or {NEWLINE}")
    if rows[-1]:
        raise UserError(f"the last row does not end with {NEWLINE}")
    rows.pop()
    if not rows:
        raise UserError("it has no rows")
    for number, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise UserError(f"row {number} has {len(row)} squares, and row 0 has {len(rows[0])}")
    found: dict[str, list[Place]] = {word: [] for word in (WALL, PATH, START, GOAL)}
    for i, row in enumerate(rows):
        for j, word in enumerate(row):
            found[word].append((i, j))
    for word in (START, GOAL):
        if len(found[word]) != 1:
            raise UserError(f"expected one {word}, got {len(found[word])}")
    open_squares = frozenset(found[PATH] + found[START] + found[GOAL])
    return Maze(len(rows), len(rows[0]), open_squares, found[START][0], found[GOAL][0])


# --- generating -------------------------------------------------------------------------------------------------------


def generate(rooms: int, rng: random.Random) -> Maze:
    """Draw a maze of ``rooms`` x ``rooms`` rooms by Prim's algorithm, with different rooms as start and goal.

    Prim's algorithm in a random order: of all walls between a room in the tree and one outside, a random one is opened,
    until all rooms are in the tree. Raises UserError for fewer than 2 x 2 rooms.
    """
    if rooms < 2:
        raise UserError(f"a maze has at least 2 x 2 rooms, got {rooms}")
    size = 2 * rooms + 1
    first = (2 * rng.randrange(rooms) + 1, 2 * rng.randrange(rooms) + 1)
    reached = {first}
    open_squares = {first}
    walls = _walls_around(first, size)
    while walls:
        number = rng.randrange(len(walls))
        walls[number], walls[-1] = walls[-1], walls[number]
        wall, room = walls.pop()
        if room not in reached:
            reached.add(room)
            open_squares |= {wall, room}
            walls += _walls_around(room, size)
    start, goal = rng.sample(sorted(reached), 2)
    return Maze(size, size, frozenset(open_squares), start, goal)


def _walls_around(room: Place, size: int) -> list[tuple[Place, Place]]:
    """The walls of a room, each with the room behind it."""
    found = []
    for down, right in MOVES.values():
        row = room[0] + 2 * down
        column = room[1] + 2 * right
        if 0 < row < size and 0 < column < size:
            found.append(((room[0] + down, room[1] + right), (row, column)))
    return found


def split_of(maze: Maze) -> Split:
    """Return the split to which a maze's walls belong, wherever its start and goal are: 1/16 each are held out."""
    squares = repr((maze.height, maze.width, sorted(maze.open)))
    number = hashlib.sha256(squares.encode()).digest()[0] % 16
    if number == 0:
        return "test"
    return "validation" if number == 1 else "train"


def draw(rooms: int, seed: int, split: Split, shortest: int = 4, longest: int | None = None) -> Iterator[Maze]:
    """Draw mazes of one split without end.

    Start and goal are drawn among the pairs of rooms whose shortest path has ``shortest`` to ``longest`` moves; mazes
    without such a pair are left out.
    """
    rng = random.Random(seed)
    while True:
        maze = generate(rooms, rng)
        if split_of(maze) != split:
            continue
        pairs = [
            (start, goal)
            for start, goal, moves in distances(maze)
            if moves >= shortest and (longest is None or moves <= longest)
        ]
        if pairs:
            start, goal = rng.choice(pairs)
            yield replace(maze, start=start, goal=goal)


def distances(maze: Maze) -> list[tuple[Place, Place, int]]:
    """Return all pairs of different rooms with the number of moves of the shortest path, in a fixed order."""
    found = []
    rooms = sorted(place for place in maze.open if place[0] % 2 and place[1] % 2)
    for start in rooms:
        away = {start: 0}
        queue = deque([start])
        while queue:
            row, column = place = queue.popleft()
            for down, right in MOVES.values():
                neighbour = (row + down, column + right)
                if neighbour in maze.open and neighbour not in away:
                    away[neighbour] = away[place] + 1
                    queue.append(neighbour)
        found += [(start, goal, away[goal]) for goal in rooms if goal != start and goal in away]
    return found


# --- the sets of the recipe -------------------------------------------------------------------------------------------

ROOMS = 4
USUAL = 14  # moves of the longest shortest path in the usual sets; longer ones are a set of their own


@dataclass(frozen=True)
class MazeSet:
    """``count`` different mazes of one split."""

    count: int
    split: Split
    seed: int
    rooms: int = ROOMS
    shortest: int = 4
    longest: int | None = USUAL

    def rows(self) -> Iterator[dict[str, str | int]]:
        """Yield the mazes as rows of a data set; ``shortest`` is the number of moves of the shortest path."""
        for text, shortest in _drawn(self):
            yield {"prompt": text, "shortest": shortest}


@cache
def _drawn(one: MazeSet) -> list[tuple[str, int]]:
    """Texts and shortest paths of a set. Drawing thousands takes seconds, and an evaluation reads them per model."""
    found: dict[str, int] = {}
    for maze in draw(one.rooms, one.seed, one.split, one.shortest, one.longest):
        found.setdefault(maze.text(), len(maze.shortest() or ()))
        if len(found) == one.count:
            break
    return list(found.items())


SETS = {
    "maze-train": MazeSet(4800, "train", seed=1),
    "maze-validation": MazeSet(128, "validation", seed=2),
    "maze-test": MazeSet(128, "test", seed=3),
    "maze-long": MazeSet(128, "test", seed=4, shortest=USUAL + 1, longest=None),
    "maze-large": MazeSet(128, "test", seed=5, rooms=5),
}
