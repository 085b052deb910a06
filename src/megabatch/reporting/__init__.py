"""One `Report` that every verb fills, and its renderers for the terminal, HTML, Markdown and JSON."""
