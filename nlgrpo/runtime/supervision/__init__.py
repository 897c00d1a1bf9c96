"""Processes that end: signals that stop a run, and a watchdog that finds a rank that hangs.

`stop_signal` finishes and saves the step after SIGTERM or Ctrl-C, and ends the process if that takes too long;
`time_limit` interrupts a function that takes too long, and `terminator` is the process that does both from outside;
`watchdog` ends all ranks if one is silent or none makes progress, `phases` is what the main thread is doing, and
`rendezvous` the store where ranks meet; `threads` hides no end of a thread. Imports no other room. Read `watchdog.py`
first.
"""
