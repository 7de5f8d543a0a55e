"""Sampling: selection of prompts (stream, queue), strategies, and generation of rollouts in rounds or through a vLLM server."""
