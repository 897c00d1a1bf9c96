"""Fault injection into real commands: ``make chaos``; see `chaos.__main__`."""
