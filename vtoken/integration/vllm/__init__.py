"""vLLM 0.32: scheduler, worker and attention classes that carry the token layer."""
