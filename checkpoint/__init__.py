"""The on-disk form: safetensors containers, index, manifest, digests, atomic directories, encodings, layouts, sources."""
