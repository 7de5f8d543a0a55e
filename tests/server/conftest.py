"""These tests need vLLM in the environment (`make test-vllm`): TRL's client refuses to work without it."""

import importlib.util


collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
