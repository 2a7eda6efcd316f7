"""duovolt: Qwen3.5-family models on two Tesla V100s, from a Hugging Face repository to a chat endpoint.

The rooms of the house are described in docs/architecture.md; `duovolt --help` lists the commands.
"""

__version__ = "0.1.0"
