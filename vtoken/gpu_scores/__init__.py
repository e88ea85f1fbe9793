"""Scores on GPUs: attention mass of observed queries, read from a paged cache."""
