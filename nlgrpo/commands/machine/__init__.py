"""Commands about machines: ``nlgrpo plan`` before one is rented, ``nlgrpo doctor`` on a new one.

Imports what the other commands import. Read `plan.py` first.
"""
