"""The control plane: which tensors are ready on every rank, and in which order they go.

It knows names, shapes, dtypes, byte counts and ranks. It imports neither torch
nor `fusion`, so that the whole protocol runs with no tensor in sight.
"""
