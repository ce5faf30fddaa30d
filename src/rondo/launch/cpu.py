"""CPUs that advertise instructions which they cannot execute.

Some virtual machines show AMX to the library behind torch's bfloat16 products and then die of SIGILL in the first one.
A child process tries; if it dies, children of the run get the setting that avoids the instruction.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

CAP = "ONEDNN_MAX_CPU_ISA"
WITHOUT_AMX = "AVX512_CORE_FP16"
PROBE = "import torch; square = torch.ones(64, 64, dtype=torch.bfloat16); square @ square"


def environment_for(*dtypes: str) -> dict[str, str]:
    """What the children's environment needs, so that these dtypes work on this CPU."""
    if "bfloat16" not in dtypes or CAP in os.environ:
        return {}
    tried = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, check=False)
    return {CAP: WITHOUT_AMX} if tried.returncode == -signal.SIGILL else {}
