"""Published figures of papers beside what `ssdtrain plan` computes for the same settings.

`published` holds the figures and their settings, `measures` what is computed for them; `python -m benchmarks.papers` shows both.
No constant of the planner is fitted to a row.
"""
