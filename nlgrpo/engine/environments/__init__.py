"""Environments: conversations of several turns, in which something else than the policy writes some of the messages.

`verifiers_environment` runs environments of the library `verifiers`, and is the only file that imports it. `rendering`
turns their messages into tokens and back, `dialogue` has the tokens of a conversation, and `rounds` answers concurrent
conversations together with one engine. Imports `backends` and `generation` of the engine, and the rooms below. Read
`dialogue.py` first.
"""

from nlgrpo.engine.environments.base import Environment

__all__ = ["Environment"]
