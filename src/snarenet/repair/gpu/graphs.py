"""`Recorder`: a function of tensors as CUDA graphs, one for each kind of call, replayed instead of launched anew.

On a GPU most of a small repair is the launching of kernels. A graph launches them all at once; in return the number of
steps is fixed when it is recorded.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from snarenet.constraints.compiled import at_once

_MOST = 8  # graphs that are kept; each keeps the memory of its call
_WARM_UP = 3  # calls before a recording: what is made once must be there


class _Graph(NamedTuple):
    call: Callable[..., tuple[Tensor, ...]]
    calls: list[int]  # one number: how often it was replayed


class Recorder:
    """Replays functions whose arguments are pytrees of tensors and whose result is a tuple of tensors.

    Gradients flow to the arguments that need one, and to nothing else: a function that has other tensors which need one
    is not recorded. They belong to the last call of a kind: the graph has one place for
    what the backward pass needs, so a backward pass through an earlier call raises an error.
    """

    def __init__(self) -> None:
        self._graphs: dict[Any, _Graph | None] = {}

    def __deepcopy__(self, memo: Any) -> Recorder:
        return Recorder()  # a copy records for itself

    def __call__(
        self, function: Callable[..., tuple[Tensor, ...]], *arguments: Any, key: Any
    ) -> tuple[Tensor, ...] | None:
        """The result of the function for these arguments; None if it cannot be recorded.

        Args:
            function: it must not look at values while it is recorded.
            arguments: its arguments.
            key: tells apart functions, and calls that differ in something else than the arguments.
        """
        leaves, structure = tree_flatten(arguments)
        differentiated = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)
        kind = (key, str(structure), differentiated, *((leaf.shape, leaf.dtype, leaf.requires_grad) for leaf in leaves))
        if kind not in self._graphs:
            if len(self._graphs) == _MOST:
                self._graphs.pop(next(iter(self._graphs)))
            self._graphs[kind] = _record(function, leaves, structure, differentiated)
        graph = self._graphs[kind]
        if graph is None:
            return None
        graph.calls[0] += 1
        found = tuple(tensor.clone() for tensor in graph.call(*leaves))  # the next replay overwrites its result
        for tensor in found:
            if tensor.requires_grad:
                tensor.register_hook(partial(_check_last, graph.calls, graph.calls[0]))
        return found


def _check_last(calls: list[int], number: int, _: Tensor) -> None:
    """Refuse to go back through a call that is not the last one."""
    if calls[0] != number:
        raise RuntimeError(
            "a recorded layer was called again before the backward pass of an earlier call, whose record is gone; "
            "call backward after each call, or build the layer with record=0"
        )


def _record(
    function: Callable[..., tuple[Tensor, ...]], leaves: list[Tensor], structure: Any, differentiated: bool
) -> _Graph | None:
    needed = [leaf.requires_grad and differentiated for leaf in leaves]
    samples = tuple(leaf.detach().clone().requires_grad_(need) for leaf, need in zip(leaves, needed, strict=True))

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        return function(*tree_unflatten(list(tensors), structure))

    if differentiated and any(tensor.requires_grad for tensor in call(*(leaf.detach() for leaf in leaves))):
        return None
    if differentiated:
        _warm_up_backward(leaves[0].device)
    with torch.set_grad_enabled(differentiated), keeping_graphs(), at_once():
        return _Graph(torch.cuda.make_graphed_callables(call, samples), [0])  # pyright: ignore


class _Factor(torch.autograd.Function):
    """The identity, whose backward pass makes a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        torch.linalg.cholesky_ex(torch.eye(2, dtype=torch.float64, device=gradients[0].device))
        return gradients[0]


def _warm_up_backward(device: torch.device) -> None:
    """Let the thread of backward passes open its linear algebra library, which it cannot while it is recorded.

    The calls that warm a recording up may keep all factors, where the recording itself has to make some again.
    """
    found: Any = _Factor.apply(torch.ones(1, device=device, requires_grad=True))
    found.backward()


class Replayed:
    """A function that works on tensors in place and returns nothing: a CUDA graph from its fourth call on, on a GPU.

    Args:
        function: its arguments have the same shapes in all calls; if it looks at values it is not recorded.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.function, self.calls, self.arguments = function, 0, tuple[Tensor, ...]()
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *arguments: Tensor) -> None:
        """What the function does with these."""
        if self.calls == _WARM_UP and arguments[0].is_cuda:
            self._record(arguments)
        self.calls += 1
        if self.graph is not None:
            for mine, given in zip(self.arguments, arguments, strict=True):
                mine.copy_(given)
            self.graph.replay()
        elif arguments[0].is_cuda:
            with beside():
                self.function(*arguments)
        else:
            self.function(*arguments)

    def _record(self, arguments: tuple[Tensor, ...]) -> None:
        graph, self.arguments = torch.cuda.CUDAGraph(), tuple(argument.clone() for argument in arguments)
        with suppress(RuntimeError), at_once():
            with recording_into(graph):
                self.function(*self.arguments)
            self.graph = graph


@contextmanager
def beside() -> Iterator[None]:
    """Work on a stream of its own, as a recording does; before and after it the current stream has the turn."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


@contextmanager
def recording_into(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Record what is done in the block; what other threads do meanwhile, a compiler's for instance, spoils nothing."""
    with keeping_graphs(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        yield


@contextmanager
def keeping_graphs() -> Iterator[None]:
    """For recording: no graph that is garbage is freed in the meantime, which would spoil the one being recorded."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
