"""Texts of configurations (TOML, JSON, YAML, command lines, Python): read into tables, and edited in place.

Each file has a function that reads a text into a table and one that sets values in the text, by "section.key", and leaves the rest
as it was. Nothing that a file says is executed.
"""
