"""Responses of a model through an inference-time procedure: best-of-N and its relatives, guided search, voting.

`procedures` names the procedures and their rules, `choosing` scores candidates and applies the rule. `guides` loads the
value models of a guided search, `implicit_reward` the two models of an implicit one. `responder` draws candidates for a
batch of prompts and returns a response to each. `options` are the options of the commands `generate` and `serve`, and
`as_trained` is what the training of a model assumed, which they continue. The public name of the room is
`nlgrpo.inference`. Read `responder.py` first.
"""

from nlgrpo.engine.inference.choosing import Chooser, majority
from nlgrpo.engine.inference.procedures import Procedure
from nlgrpo.engine.inference.responder import Responder, Response, Scored

__all__ = ["Chooser", "Procedure", "Responder", "Response", "Scored", "majority"]
