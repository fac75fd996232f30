"""What a step will cost before it is run: `fusion plan`.

| module | its one job |
|---|---|
| `workload.py` | the tensors of a step and when each is ready |
| `sets.py`, `traces.py`, `models.py` | where a workload comes from: a built-in set, a file, a torch module |
| `costs.py` | what a reduction costs, fitted to measurements |
| `measure.py` | the measurements, on the ranks |
| `merging.py` | which neighbours to merge: the exact optimum |
| `prediction.py` | the step, as the runtime would run it |
| `report.py` | all thresholds beside the optimum |
| `ranks.py` | the program of a rank that measures |

Only `models.py`, `measure.py` and `ranks.py` load torch, and only the last two MPI.
"""
