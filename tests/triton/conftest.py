"""Kernels in Triton, interpreted on the CPU: collected only where TRITON_INTERPRET=1 was set before Python started.

TRITON_INTERPRET=1 python -m pytest tests/triton
"""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
