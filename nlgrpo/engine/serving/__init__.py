"""An OpenAI-compatible HTTP server that responds through an inference-time procedure.

`batching` has the bounded queue and the thread that runs the model, `requests` and `answers` are the two directions of
the protocol, `app` has the routes, limits and errors, and `server` the life of the process. FastAPI and uvicorn, the
extra ``nlgrpo[serve]``, are imported by `app` and `server` only. Read `app.py` first.
"""
