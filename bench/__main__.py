"""``python -m bench``."""

import sys

try:
    from bench.cli import main
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] == "bench":
        raise
    sys.exit(
        f"bench: {sys.executable} lacks the Python package {error.name}: run 'make provision' and use its runtime, or "
        "name a Python that has what requirements/host.in lists (make gpu-check GPU_PYTHON=...)"
    )

main()
