"""Data-parallel training under `torchrun`: each process takes its share of every batch, and gradients are added up."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


class Group:
    """The processes that train together; one process alone is a group of one, and every operation does nothing."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @classmethod
    def join(cls, device: torch.device) -> Group:
        """The group that `torchrun` announces in the environment, if any."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1 or not dist.is_available():
            return cls()
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
            atexit.register(_leave)
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def leads(self) -> bool:
        """Is this the process that writes files?"""
        return self.rank == 0

    def share(self, batch: Tensor) -> Tensor:
        """This process's part of a batch."""
        return batch.tensor_split(self.size)[self.rank]

    def add_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Add up the gradients of all processes."""
        if self.size == 1:
            return
        for parameter in parameters:
            if parameter.grad is None:  # of a process whose share was empty
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)

    def total(self, values: Tensor, largest: bool = False) -> Tensor:
        """The sum, or the maximum, over the processes."""
        if self.size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
        return values

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give all processes the leader's tensors."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def told(self, answer: bool) -> bool:
        """The leader's answer, whatever the others'."""
        answers = [answer]
        if self.size > 1:
            dist.broadcast_object_list(answers, 0)
        return answers[0]

    def wait(self) -> None:
        """Wait for the others."""
        if self.size > 1:
            dist.barrier()


def _leave() -> None:
    """End the group that `join` began, before the interpreter goes: its threads must not outlive that."""
    if dist.is_initialized():
        dist.destroy_process_group()
