"""Prompts of the recipes on stories: openings of stories, generated from templates."""

from __future__ import annotations

import random

NAMES = [
    ("Lily", "girl", "her"), ("Sue", "girl", "her"), ("Mia", "girl", "her"), ("Anna", "girl", "her"),
    ("Lucy", "girl", "her"), ("Sara", "girl", "her"), ("Amy", "girl", "her"), ("Jane", "girl", "her"),
    ("Tom", "boy", "his"), ("Ben", "boy", "his"), ("Max", "boy", "his"), ("Tim", "boy", "his"),
    ("Sam", "boy", "his"), ("Jack", "boy", "his"), ("John", "boy", "his"), ("Bob", "boy", "his"),
]  # fmt: skip
WORDS = {
    "animal": ["dog", "cat", "bird", "frog", "bear", "rabbit", "fish", "mouse", "duck", "horse", "bunny", "pig"],
    "kind": ["little", "big", "happy", "brave", "small", "funny", "kind", "sad", "shy", "brown"],
    "place": ["park", "garden", "forest", "beach", "farm", "pond", "zoo", "lake", "store", "hill"],
    "thing": [
        "ball",
        "kite",
        "box",
        "toy car",
        "hat",
        "book",
        "doll",
        "cake",
        "drum",
        "boat",
        "red leaf",
        "shiny rock",
    ],
    "parent": ["mom", "dad", "friend", "grandma", "brother", "sister"],
    "weather": ["sunny", "rainy", "cold", "hot", "nice"],
}
TEMPLATES = [
    "Once upon a time there was a {kind} {animal}",
    "Once upon a time, a {kind} {animal} lived",
    "Once there was a {kind} {animal} named {name}",
    "One day, a {child} called {name}",
    "One day, {name} and {his} {parent}",
    "{name} and {his} {parent} went to the {place}",
    "{name} had a {kind} {animal}",
    "{name} liked to play with {his} {thing}",
    "One {weather} day, {name} found a {thing}",
    "The {kind} {animal} lived near the {place}",
    "{name} was a {kind} {child} who",
    "A {kind} {animal} walked to the {place}",
    "It was a {weather} day and {name}",
    "{name} saw a {kind} {animal} near the {place}",
]


def make_prompts(train: int, held_out: int, seed: int) -> tuple[list[str], list[str]]:
    """Generate ``train`` and ``held_out`` openings, all different."""
    rng = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < train + held_out:
        name, child, his = rng.choice(NAMES)
        words = {slot: rng.choice(choices) for slot, choices in WORDS.items()}
        found[rng.choice(TEMPLATES).format(name=name, child=child, his=his, **words)] = None
    prompts = list(found)
    return prompts[:train], prompts[train:]
