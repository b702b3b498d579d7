"""Imports DeepSpeed so that it starts no compiler and prints no warnings: import it from here."""

from __future__ import annotations

import os
import warnings

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed warns when it has to find out by itself

import deepspeed
import deepspeed.ops
import deepspeed.utils

# DeepSpeed compiles this op at every initialize if it calls itself compatible: minutes, a C++ compiler, and a lock
# file that makes all later starts hang if the compiling process is killed. Only its inference code uses the op.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

# It gathers and scatters by the former names of two functions of torch.
warnings.filterwarnings("ignore", r"`torch.distributed.\w+` is deprecated", FutureWarning)

__all__ = ["deepspeed"]
