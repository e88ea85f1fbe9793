"""vToken: token-level virtualisation of a paged KV cache (arXiv 2608.13263)."""
