"""Engines that vToken plugs into."""
