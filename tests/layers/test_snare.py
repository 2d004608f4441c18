"""The layer, the model and what surrounds them."""

from __future__ import annotations

import os
import pickle
import warnings

import pytest
import torch
from torch import nn

import snarenet as sn
from snarenet.testing import draw

A, C = draw(3, 6, seed=1), draw(2, 6, seed=2)


def constraints() -> sn.Constraints:
    return sn.Linear(A.clone(), upper=0.5) & sn.Linear(C.clone(), equals=lambda x: x)


def empty_set() -> sn.Constraints:
    return sn.Box(torch.zeros(2), torch.ones(2)) & sn.Linear(torch.ones(1, 2), equals=5.0)


class TestLayer:
    def test_forward_and_solve(self) -> None:
        layer, y, x = sn.SnareLayer(constraints()), draw(7, 6, seed=3, scale=2), draw(7, 2, seed=4)
        solution = layer.solve(y, x)
        assert torch.equal(layer(y, x), solution.value)
        assert torch.equal(solution.raw, y)
        assert solution.converged.all()
        assert solution.violation.max() <= 1e-8
        assert (solution.steps > 0).any()
        assert solution.describe() == "all 7 samples converged."

    def test_failures_warn(self) -> None:
        with pytest.warns(sn.RepairWarning, match="3 of 3 samples.*STALLED.*max_steps=100") as caught:
            sn.SnareLayer(empty_set())(draw(3, 2))
        assert caught[0].filename == __file__  # points at the caller

    def test_failures_raise(self) -> None:
        layer = sn.SnareLayer(empty_set(), on_failure="raise")
        with pytest.raises(sn.RepairError, match=r"worst violation 1.*larger tolerance") as caught:
            layer(draw(3, 2))
        assert len(caught.value.solution.status) == 3

    def test_failures_are_ignored(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            solution = sn.SnareLayer(empty_set(), on_failure="ignore").solve(draw(3, 2))
        assert (solution.status == sn.Status.STALLED).all()

    def test_hooks_see_every_solution(self) -> None:
        layer, y, x = sn.SnareLayer(constraints(), on_failure="ignore"), draw(7, 6, seed=3, scale=2), draw(7, 2, seed=4)
        seen: list[sn.Solution] = []
        handle = layer.register_solution_hook(seen.append)
        value, solution = layer(y, x), layer.solve(y[:3], x[:3])
        assert [len(found.status) for found in seen] == [7, 3]
        assert seen[0].value is value
        assert seen[1] is solution
        handle.remove()
        layer(y, x)
        assert len(seen) == 2

    def test_hooks_come_before_errors(self) -> None:
        layer, seen = sn.SnareLayer(empty_set(), on_failure="raise"), []
        layer.register_solution_hook(seen.append)
        with pytest.raises(sn.RepairError):
            layer(draw(3, 2))
        assert (seen[0].status == sn.Status.STALLED).all()

    def test_relaxation_counts_in_training_only(self) -> None:
        layer, y, x = sn.SnareLayer(constraints()), draw(7, 6, seed=3, scale=2), draw(7, 2, seed=4)
        true, relaxed = layer(y, x), layer(y, x, relax=0.5)
        violation = layer.constraints.violation(relaxed, x)
        assert 0.4 < violation.max() <= 0.5 + 1e-8
        assert torch.equal(layer.eval()(y, x, relax=0.5), true)
        assert torch.equal(layer.solve(y, x, relax=torch.full((5,), 0.5)).value, true)

    def test_relaxation_by_row_and_by_sample(self) -> None:
        layer, y, x = sn.SnareLayer(constraints()), draw(7, 6, seed=3, scale=2), draw(7, 2, seed=4)
        rows = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
        residual = layer.constraints.residual(layer(y, x, relax=rows), x).abs()
        assert (residual <= rows + 1e-8).all()
        samples = torch.linspace(0, 1, 7, dtype=torch.float64).unsqueeze(1).expand(7, 5)
        residual = layer.constraints.residual(layer(y, x, relax=samples), x).abs()
        assert (residual <= samples + 1e-8).all()

    def test_a_moved_layer_repairs_as_before(self) -> None:
        layer, y = sn.SnareLayer(sn.Linear(A, upper=0.5)), draw(7, 6, seed=3, scale=2)
        true = layer(y)
        moved = layer.float().double()  # rounds A on the way
        torch.testing.assert_close(moved(y), true, rtol=1e-5, atol=1e-5)
        assert sn.Linear(A.float(), upper=0.5).violation(moved(y)).max() <= 1e-8

    def test_repr_says_how_it_is_set(self) -> None:
        assert "tol=1e-06" in repr(sn.SnareLayer(constraints(), tol=1e-6))

    def test_whole_layers_can_be_pickled_by_users(self) -> None:
        layer = sn.SnareLayer(sn.Linear(A, upper=0.5))
        y = draw(3, 6)
        assert torch.equal(pickle.loads(pickle.dumps(layer))(y), layer(y))

    def test_parameters_of_a_learned_set_are_the_layers(self) -> None:
        layer = sn.SnareLayer(sn.Linear(nn.Parameter(A.clone()), upper=0.5))
        assert [p.shape for p in layer.parameters()] == [(3, 6)]


class TestModel:
    x = draw(9, 2, seed=5)

    def model(self, dtype: torch.dtype = torch.float64) -> sn.ConstrainedModel:
        torch.manual_seed(0)
        return sn.ConstrainedModel(sn.MLP(2, 6, width=16).to(dtype), sn.SnareLayer(constraints()))

    def test_forward_solve_raw(self) -> None:
        model = self.model()
        assert torch.equal(model.raw(self.x), model.net(self.x))
        assert torch.equal(model(self.x), model.solve(self.x).value)
        assert model.layer.constraints.violation(model(self.x), self.x).max() <= 1e-8

    def test_a_float32_network_gives_float64_outputs_for_float64_inputs(self) -> None:
        model = self.model(torch.float32)
        y = model(self.x)
        assert y.dtype == torch.float64
        assert model.layer.constraints.violation(y, self.x).max() <= 1e-8
        y.sum().backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.net.parameters())

    def test_float32_throughout(self) -> None:
        with pytest.warns(sn.PrecisionWarning, match="float32 cannot hold the tolerance 1e-08"):
            y = self.model(torch.float32)(self.x.float())
        assert y.dtype == torch.float32

    def test_pytree_inputs(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(2, 6)

            def forward(self, x):
                return self.inner(x["state"])

        layer = sn.SnareLayer(sn.Linear(A, upper=lambda x: x["limit"]) & sn.Linear(C, equals=lambda x: x["state"]))
        model = sn.ConstrainedModel(Net(), layer)
        x = {"state": self.x, "limit": torch.ones(9, 3), "time": torch.arange(9)}
        y = model(x)
        assert y.dtype == torch.float64
        assert layer.constraints.violation(y, x).max() <= 1e-8

    def test_a_network_without_parameters(self) -> None:
        class Constant(nn.Module):
            def forward(self, x):
                return torch.ones(len(x), 6, dtype=x.dtype)

        assert sn.ConstrainedModel(Constant(), sn.SnareLayer(constraints()))(self.x).shape == (9, 6)

    def test_it_learns(self) -> None:
        """A few steps of Adam through the repair lower the loss, and every output stays feasible."""
        model = self.model()
        target = model.layer(draw(9, 6, seed=6), self.x)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(60):
            y = model(self.x)
            assert model.layer.constraints.violation(y, self.x).max() <= 1e-8
            loss = (y - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.6 * losses[0]

    def test_state_dict_round_trip(self) -> None:
        model, twin = self.model(), self.model()
        for tensor in twin.state_dict().values():
            tensor.add_(0.1)
        twin.load_state_dict(model.state_dict())
        assert torch.equal(twin(self.x), model(self.x))

    @pytest.mark.parametrize(("depth", "layers"), [(0, 1), (1, 3), (3, 7)])
    def test_mlp(self, depth: int, layers: int) -> None:
        net = sn.MLP(4, 2, width=8, depth=depth)
        assert len(net) == layers
        assert net(torch.zeros(3, 4)).shape == (3, 2)

    def test_mlp_options(self) -> None:
        net = sn.MLP(4, 2, width=8, activation=nn.ReLU, dropout=0.2, batch_norm=True)
        assert [type(layer) for layer in net] == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Dropout] * 2 + [nn.Linear]


class TestUnits:
    def test_of_data(self) -> None:
        x = torch.tensor([[1.0, 5.0, 0.1], [3.0, 5.0, 0.1]], dtype=torch.float64)
        units = sn.Units.of(x, torch.tensor([[2.0, 7.0], [8.0, 7.0]], dtype=torch.float64))
        assert units.into(x).tolist() == [[-1.0, 5.0, 0.1], [1.0, 5.0, 0.1]]  # constants are left alone
        assert units.back(torch.ones(1, 2, dtype=torch.float64)).tolist() == [[8.0, 8.0]]
        series = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(0))  # histories: (B, time, d)
        seen = sn.Units.of(series, x).into(series)
        assert seen.mean().abs() < 1e-6
        assert not list(units.parameters())

    def test_in_a_model(self) -> None:
        """Inputs that differ by little and outputs about a large one keep their digits in a float32 network."""
        x = 1e6 + torch.linspace(-1, 1, 50, dtype=torch.float64).unsqueeze(1) * 1e-3
        y = 1e4 + torch.linspace(-1, 1, 50, dtype=torch.float64).unsqueeze(1) * 1e-4
        net = torch.nn.Linear(1, 1)
        torch.nn.init.ones_(net.weight)
        torch.nn.init.zeros_(net.bias)
        model = sn.ConstrainedModel(net, sn.SnareLayer(sn.Box(0.0, 2e4)), sn.Units.of(x, y))
        torch.testing.assert_close(model(x), y, rtol=0, atol=1e-9)
        assert model(x).dtype == torch.float64
        again = sn.ConstrainedModel(torch.nn.Linear(1, 1), model.layer, sn.Units.of(y, x))
        again.load_state_dict(model.state_dict())
        assert torch.equal(again(x), model(x))


def _worker(rank: int, store: str, results: str) -> None:
    """One of two processes of data-parallel training: its half of the batch, and the averaged gradients."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = TestModel().model()
    parallel = nn.parallel.DistributedDataParallel(model)
    x = draw(8, 2, seed=7)[rank::2]
    parallel(x).square().mean().backward()
    if rank == 0:
        torch.save([p.grad for p in model.parameters()], results)
    torch.distributed.barrier()
    os._exit(0)  # torch's DDP leaves threads behind that now and then abort a process which ends as usual


def test_data_parallel_training(tmp_path) -> None:
    torch.multiprocessing.spawn(_worker, (str(tmp_path / "store"), str(tmp_path / "grads")), nprocs=2)
    model = TestModel().model()
    model(draw(8, 2, seed=7)).square().mean().backward()
    for mine, theirs in zip(model.parameters(), torch.load(tmp_path / "grads"), strict=True):
        torch.testing.assert_close(mine.grad, theirs, rtol=1e-8, atol=1e-10)
