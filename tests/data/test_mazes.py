"""Mazes: what the generator draws, what the sets have in common, reading, and which answers are right."""

import json
import random
import re
from itertools import islice

import pytest

from nlgrpo import cli, train
from nlgrpo.data import mazes, sources
from nlgrpo.data.mazes import MOVES, SETS, Maze
from nlgrpo.rewards import specs

pytestmark = pytest.mark.usefixtures("one_thread", "no_figures")

SMALL = (
    "WALL WALL WALL WALL WALL NEWLINE WALL START WALL GOAL WALL NEWLINE WALL PATH PATH PATH WALL NEWLINE "
    "WALL WALL WALL WALL WALL NEWLINE"
)


def simple_paths(maze: Maze, start, goal, seen=()) -> int:
    """Number of paths from start to goal that visit no square twice, by trying all."""
    if start == goal:
        return 1
    row, column = start
    around = {(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)}
    return sum(simple_paths(maze, step, goal, (*seen, start)) for step in (around & maze.open) - {*seen})


def shortest_length(maze: Maze) -> int:
    """Length of the shortest path, by growing the set of squares that n moves reach."""
    reached, moves = {maze.start}, 0
    while maze.goal not in reached:
        reached |= {(r + d, c + e) for r, c in reached for d, e in MOVES.values()} & maze.open
        moves += 1
    return moves


@pytest.mark.parametrize("rooms", [2, 3, 4, 5])
def test_there_is_exactly_one_path_between_any_two_rooms(rooms):
    for seed in range(20):
        maze = mazes.generate(rooms, random.Random(seed))
        assert maze.height == maze.width == 2 * rooms + 1
        places = [(2 * i + 1, 2 * j + 1) for i in range(rooms) for j in range(rooms)]
        assert set(places) <= maze.open
        assert all(0 < row < maze.height - 1 and 0 < column < maze.width - 1 for row, column in maze.open)
        assert {maze.start, maze.goal} <= set(places)
        assert maze.start != maze.goal
        for place in places:
            assert simple_paths(maze, places[0], place) == 1
        assert len(maze.shortest()) == shortest_length(maze)
        assert maze.follow(maze.shortest())[-1] == maze.goal


def test_distances_are_those_of_each_pair():
    maze = mazes.generate(3, random.Random(0))
    found = mazes.distances(maze)
    assert len(found) == 9 * 8
    for start, goal, moves in found:
        assert moves == shortest_length(Maze(7, 7, maze.open, start, goal))


def test_all_walls_are_drawn_about_equally_often():
    """The 2 x 2 rooms have 4 spanning trees. Prim's algorithm draws them with probability 1/4 each, by symmetry."""
    rng = random.Random(0)
    counts: dict[frozenset, int] = {}
    for _ in range(4000):
        walls = mazes.generate(2, rng).open
        counts[walls] = counts.get(walls, 0) + 1
    assert len(counts) == 4
    assert all(abs(count - 1000) < 4 * (4000 * 0.25 * 0.75) ** 0.5 for count in counts.values())


# --- sets -------------------------------------------------------------------------------------------------------------


def walls_of(name: str) -> set[frozenset]:
    return {mazes.parse(row["prompt"]).open for row in SETS[name].rows()}


def test_sets_never_share_walls_across_splits():
    trained = walls_of("maze-train")
    trained |= {maze.open for maze in islice(mazes.draw(mazes.ROOMS, 1000, "train", longest=mazes.USUAL), 1000)}
    test = walls_of("maze-test") | walls_of("maze-long")
    validation = walls_of("maze-validation")
    assert not trained & test
    assert not trained & validation
    assert not test & validation
    assert len({one.seed for one in SETS.values()}) == len(SETS)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SETS)
def test_a_set_is_the_same_each_time_and_has_what_it_says(name):
    one = SETS[name]
    rows = list(one.rows())
    assert rows == list(one.rows())
    assert len({row["prompt"] for row in rows}) == len(rows) == one.count
    for row in rows:
        maze = mazes.parse(row["prompt"])
        assert maze.text() == row["prompt"]
        assert mazes.split_of(maze) == one.split
        assert row["shortest"] == shortest_length(maze)
        assert one.shortest <= row["shortest"] <= (one.longest or 100)
        assert maze.height == 2 * one.rooms + 1


def test_sets_are_sources_of_prompts():
    assert list(sources.read_rows("maze-test")) == list(SETS["maze-test"].rows())
    assert sources.is_file("maze-test")
    assert list(islice(sources.stream("maze-test", limit=3), 5)) == list(islice(SETS["maze-test"].rows(), 3))
    with pytest.raises(ValueError, match=r"'maze-test' has no splits\. The sets: maze-train, maze-validation"):
        sources.read_rows("maze-test", split="test")
    with pytest.raises(ValueError, match="separator = 'x' is for the documents of a text file"):
        sources.read_rows("maze-test", separator="x")


def test_a_maze_has_at_least_two_by_two_rooms():
    with pytest.raises(ValueError, match="at least 2 x 2 rooms, got 1"):
        mazes.generate(1, random.Random(0))


# --- reading and answers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it has no rows"),
        ("WALL HOLE NEWLINE", "'HOLE' is no square of a maze; expected WALL, PATH, START, GOAL or NEWLINE"),
        ("WALL START GOAL", "the last row does not end with NEWLINE"),
        ("START PATH GOAL NEWLINE WALL NEWLINE", "row 1 has 1 squares, and row 0 has 3"),
        ("START START GOAL NEWLINE", "expected one START, got 2"),
        ("PATH GOAL NEWLINE", "expected one START, got 0"),
        ("START GOAL GOAL NEWLINE", "expected one GOAL, got 2"),
        ("START PATH NEWLINE", "expected one GOAL, got 0"),
    ],
)
def test_what_is_no_maze_is_refused(text, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        mazes.parse(text)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("DOWN RIGHT RIGHT UP DONE", 1),
        ("DOWN UP DOWN RIGHT LEFT RIGHT RIGHT UP DONE", 1),  # it wanders
        ("DOWN RIGHT RIGHT UP DOWN UP DONE", 1),  # over the goal and back to it
        ("DOWN RIGHT RIGHT UP", 0),  # cut off
        ("DOWN RIGHT RIGHT UP DOWN DONE", 0),  # past the goal
        ("DOWN RIGHT RIGHT DONE", 0),
        ("RIGHT RIGHT DONE", 0),  # through a wall
        ("UP UP DONE", 0),  # out of the maze
        ("DOWN RIGHT WALL RIGHT UP DONE", 0),
        ("DOWN RIGHT JUMP RIGHT UP DONE", 0),
        ("DOWN RIGHT RIGHT UP DONE DONE", 0),
        ("down right right up done", 0),
        ("DONE", 0),
        ("", 0),
    ],
)
def test_answers(answer, reward):
    maze = specs.function_of("maze()")
    assert maze(prompts=[SMALL], completions=[answer]) == [reward]
    talked = [{"role": "assistant", "content": answer}]
    asked = [{"role": "user", "content": "Which way?"}]
    assert maze(prompts=[asked], completions=[talked], maze=[SMALL]) == [reward]


def test_a_maze_at_the_border_is_not_left():
    """Squares outside of the grid are walls, also on the other side of it."""
    maze = mazes.parse("START PATH GOAL NEWLINE")
    assert maze.solved_by("RIGHT RIGHT DONE")
    assert not maze.solved_by("LEFT DONE")
    assert mazes.parse("START WALL GOAL NEWLINE").shortest() is None


# --- runs -------------------------------------------------------------------------------------------------------------


def prompts(path, *texts):
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


@pytest.mark.parametrize("key", ["data.source", "data.evaluation"])
def test_a_run_with_a_broken_maze_does_not_start(key, tmp_path, capsys):
    broken = prompts(tmp_path / "mazes.jsonl", SMALL, SMALL.replace("GOAL", "PATH"))
    assert train.main(["maze", f"--{key}", str(broken), "--train.out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert said == "error: reward 'solved' cannot score example 1 of the data: expected one GOAL, got 0\n"
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_rollouts_of_a_broken_maze_are_not_sampled(tmp_path, capsys):
    broken = prompts(tmp_path / "mazes.jsonl", SMALL.replace("WALL NEWLINE", "NEWLINE", 1))
    arguments = ["rollout", "maze", "--data.source", str(broken), "--samples", "2", "--out", str(tmp_path / "out")]
    assert cli.main(arguments) == 2
    said = "cannot score example 0 of the data: row 1 has 5 squares, and row 0 has 4"
    assert said in capsys.readouterr().err
