"""Grafana dashboards of vtoken-serve, generated from plain Python: see ``build.py``."""
