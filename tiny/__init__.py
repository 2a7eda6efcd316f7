"""The bundled tiny model: a Qwen3.5-family checkpoint that speaks, with the scripts that made it (see README.md)."""
