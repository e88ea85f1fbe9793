"""Eviction policies: which tokens of a request may go. One method per file."""
