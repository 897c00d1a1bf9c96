"""Where the metrics of a run go: files of its folder, trackers such as W&B, and the progress that a terminal shows.

`logger` is what a training loop calls. `trackers` is the interface of trackers; each library has one file here, which
is imported only if ``train.track`` names it. May import what `training` may. Read `logger.MetricsLogger` first.
"""
