"""Automatic tuning: finds better settings while the program trains, and never changes a result.

`space.py` says which settings may be tried here, `steps.py` how long a training step
takes, `search.py` which settings to try next, `tuner.py` puts the three together on
rank 0, and `record.py` writes what was found. How all ranks change their settings
at the same point is the control plane's business, see `coordinator.tuning`.
"""
