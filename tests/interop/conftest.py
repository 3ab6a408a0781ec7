"""The models and batches of these tests are shared by the test files of this folder."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
