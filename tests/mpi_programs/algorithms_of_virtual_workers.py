"""What `algorithms.py` gives with virtual workers. Argument: how many."""

from __future__ import annotations

import json
import sys

from algorithms import results

print(json.dumps(results(int(sys.argv[1]), transport="local")))
