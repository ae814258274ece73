"""Stands in for vLLM, whose kernels SGLang calls on a CPU without AMX."""
