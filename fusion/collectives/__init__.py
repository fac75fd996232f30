"""How data moves between ranks: one algorithm a file, with its cost in the docstring.

Everything here runs on the cycle thread. `chooser.py` says which algorithm runs,
`job.py` what an algorithm is given. Adding one touches its own file, the
chooser, and the table in `fusion/executor.py`.
"""
