"""Tensor Fusion Runtime: fused, negotiated all-reduce for `mpirun`-launched training jobs.

Most programs want a face: `import fusion.torch as hvd`.
"""
