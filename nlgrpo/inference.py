"""Responses through best-of-N, soft best-of-N, voting, rewind-and-repeat and guided search.

The public names of `nlgrpo.engine.inference`.
"""

from nlgrpo.engine.inference import (
    Chooser,
    Procedure,
    Responder,
    Response,
    Scored,
    majority,
)

__all__ = ["Chooser", "Procedure", "Responder", "Response", "Scored", "majority"]
