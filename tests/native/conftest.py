"""Makes the oracle of this folder importable; MULTIHEAD_NATIVE names another build of the module to test."""

import importlib.util
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

if path := os.environ.get("MULTIHEAD_NATIVE"):
    import multihead

    spec = importlib.util.spec_from_file_location("multihead._native", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["multihead._native"] = multihead._native = module
    spec.loader.exec_module(module)
