"""``nlgrpo report``, ``compare``, ``watch`` and ``push``: pages and pictures of runs, and the Hub.

`report` builds the page from the folders that `run_loader` reads, `compare` draws one picture of several runs, `watch`
serves the page while a run trains, and `push` uploads a model with its card. `seeds` joins runs that differ in the seed
only. Read `report.py` first. Guide: ``docs/guides/reports.md``.
"""
