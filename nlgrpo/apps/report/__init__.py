"""``nlgrpo report``, ``compare``, ``watch`` and ``push``: pages and pictures of runs, and the Hub.

`report` builds the page from the folders that `run_loader` reads, `compare` draws one picture of several runs,
`live_report` serves the page while a run trains, and `hub` uploads a model with its card. `commands` has their options.
`page` has what the files in `templates` show, and `configurations` what differs between runs. `result_tables` makes the
tables of reward models, value models and searches, for the terminal too, and `recorded_tables` reads their files. Read
`report.py` first. Guide: ``docs/guides/reports.md``.
"""
