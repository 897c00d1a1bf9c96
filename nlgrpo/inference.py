"""Responses through best-of-N, soft best-of-N, voting, rewind-and-repeat and guided search.

The code is in `nlgrpo.apps.respond`.
"""

from nlgrpo.apps.respond.choosing import Chooser, majority
from nlgrpo.apps.respond.procedures import Procedure
from nlgrpo.apps.respond.responder import Responder, Response, Scored

__all__ = ["Chooser", "Procedure", "Responder", "Response", "Scored", "majority"]
