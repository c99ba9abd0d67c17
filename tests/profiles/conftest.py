"""Tests here import the script ``scripts/gpu_profile.py``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
