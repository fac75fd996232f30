"""What is here: GPU, driver, versions. Prints one line of JSON."""

from __future__ import annotations

import json

import cupy
import torch
from cupy.cuda import nccl

from fusion.cuda.present import missing
from fusion.cuda.reach import version_text

if __name__ == "__main__":
    lacking = missing()
    if lacking is not None:
        print(json.dumps({"failed": lacking}))
    else:
        print(
            json.dumps(
                {
                    "device": torch.cuda.get_device_name(0),
                    "torch": torch.__version__,
                    "cupy": cupy.__version__,
                    "driver": cupy.cuda.runtime.driverGetVersion(),
                    "nccl": version_text(nccl.get_version()),
                }
            )
        )
