"""Sampling: prompt sources (data loader, prompt queue), and samplers (synchronous rounds, asynchronous vLLM)."""
