"""How many functions, modules and calls a save, a load or a verify passes: `python -m integration_tests.call_paths`.

A profile hook counts on rank 0 of two ranks. A reader of the code meets each function once, so distinct functions are
what matters; how often they run is for benchmarks.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "docs"))  # docs_site knows which names are documented
