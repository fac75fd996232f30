"""One GPU as the data plane uses it: memory, streams, events and kernels, through CuPy.

`device.py` is the only module of the package that touches CuPy or `torch.cuda`.
Importing any of these modules needs neither; `present.py` says what is missing.
The collectives that use them are in `fusion/collectives`, the executor is
`fusion/cuda_executor.py`.
"""
