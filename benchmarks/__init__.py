"""Measurements that need no model; those that drive a served engine are in ``loadtest``."""
