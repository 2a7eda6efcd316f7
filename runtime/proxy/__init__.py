"""The proxy: HTTP APIs in front, ranks behind, text and supervision between."""
