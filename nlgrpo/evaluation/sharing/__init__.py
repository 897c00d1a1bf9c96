"""Runs outside their folder: the report in a browser while they train (`live_report`), and models on the Hub (`hub`).

May import what `evaluation` may. Read `hub.push` first.
"""
