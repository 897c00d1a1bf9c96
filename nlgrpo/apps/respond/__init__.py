"""``nlgrpo generate`` and ``serve``: responses through an inference-time procedure.

`procedures` names the procedures and their rules, `choosing` scores candidates and applies the rule, and `responder`
draws candidates for a batch of prompts and returns a response to each; their public names are in `nlgrpo.inference`.
`options` are the options of both commands, and `loading` builds the responder from them. The HTTP server speaks
OpenAI's protocol: `batching` has the bounded queue and the thread that runs the model, `requests` and `answers` are the
two directions, `app` has the routes, limits and errors, and `server` the life of the process. FastAPI and uvicorn, the
extra ``nlgrpo[serve]``, are imported by `app` and `server` only. Read `responder.py` first. Guide:
``docs/guides/inference.md``.
"""
