"""Calls that SeamlessFlow adds to vLLM's workers. Needs torch and safetensors, nothing else of this project."""

from .extension import WorkerExtension as WorkerExtension
