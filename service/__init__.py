"""The OpenAI-compatible service around the vToken engine: command line, HTTP routes, metrics."""
