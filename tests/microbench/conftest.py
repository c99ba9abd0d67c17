"""The GPU suite's modules live beside its script and import each other by name, as the script does."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
