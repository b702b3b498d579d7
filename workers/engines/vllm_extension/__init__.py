"""The folder that a vLLM server gets as its PYTHONPATH: README.md. This file only makes it part of the distribution."""
