"""Measurements of the engine's parts: each is a command, prints a table, and ends with JSON."""
