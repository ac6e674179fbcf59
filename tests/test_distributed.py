"""Data parallelism: two real processes on one machine."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import psutil
import pytest
import ranks
from helpers import ones
from mindspore import nn, ops

import lazycell
from lazycell import _mindspore
from lazycell.distributed import sync_touched

RANKS = Path(ranks.__file__)
LIMIT = 280  # seconds

# What takes its way to the end; what doesn't has a run of its own.
PEACEFUL = (
    "trained_with_adam", "trained_in_groups", "trained_inside", "trained_in_graph_mode", "trained_by_mindspore",
    "trained_under_the_patch", "accumulated", "readme", "other_seeds", "loaded", "added_later", "assigned_later",
    "repeated", "resting", "shared", "frozen", "broadcast", "statistics", "unsynced", "unequal_nets", "without_sizes",
    "elsewhere", "not_in_data_parallel",
)  # fmt: skip

Results = dict[str, list[Any]]


def processes_of(folder: Path) -> list[psutil.Process]:
    """The processes that were started with a folder for their results."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(folder) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def run_ranks(folder: Path, *names: str, join: bool = True, **environment: str) -> tuple[int, str]:
    """Run functions of ranks.py in two processes; the exit code of ``msrun``, and what the processes wrote."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    binaries = Path(sys.executable).parent
    environment["PATH"] = f"{binaries}{os.pathsep}{os.environ['PATH']}"  # msrun starts what is called python
    environment["PYTHONPATH"] = f"{Path(lazycell.__file__).parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    command = [binaries / "msrun", "--worker_num=2", "--local_worker_num=2", "--master_addr=127.0.0.1"]
    command += [f"--master_port={port}", f"--join={join}", "--cluster_time_out=120", f"--log_dir={folder}"]
    command += [RANKS, folder, *names]
    until = time.monotonic() + LIMIT
    try:
        done = subprocess.run(
            command, env=os.environ | environment, cwd=folder, capture_output=True, text=True, timeout=LIMIT
        )
        while not join and processes_of(folder) and time.monotonic() < until:
            time.sleep(0.5)
        assert not processes_of(folder)
    finally:
        for process in processes_of(folder):
            process.kill()
    logs = (log.read_text(encoding="utf-8", errors="replace") for log in sorted(folder.glob("*.log")))
    return done.returncode, "\n".join([done.stdout, done.stderr, *logs])


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each function of ranks.py has returned on each rank; starting takes long, so all run in one go."""
    folder = tmp_path_factory.mktemp("ranks")
    code, written = run_ranks(folder, *PEACEFUL)
    assert code == 0, written
    return {
        name: [json.loads((folder / f"{name}.{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)]
        for name in PEACEFUL
    }


def same(results: Results, name: str) -> Any:
    """What both ranks have returned, in the same order."""
    one, other = results[name]
    assert "failed" not in one and "failed" not in other, f"{one}\n{other}"
    assert json.dumps(one) == json.dumps(other)
    return one


# ---------------------------------------------------------------------------------------------
# Training

ALONE: dict[str, Callable[[None], Any]] = {
    "trained_with_adam": lambda rank: ranks.train(rank, ranks.adam),
    "trained_in_groups": lambda rank: ranks.train(rank, ranks.grouped),
    "trained_inside": lambda rank: ranks.train(rank, ranks.adam),
    "trained_in_graph_mode": ranks.train_graph,
}


@pytest.mark.filterwarnings("ignore::lazycell.UnusedLayerWarning")
@pytest.mark.parametrize("name", ALONE)
def test_training_equals_a_single_process(results: Results, name: str) -> None:
    """After 20 steps weights and moments are the same bits on both ranks, and those of a run on the joint batch."""
    both = same(results, name)
    assert len(set(both["active"])) > 1 and both["deferred"] == ["dead.weight", "dead.bias"]
    alone = ALONE[name](None)
    assert list(alone["values"]) == list(both["values"]) and alone["active"] == both["active"]
    for key, value in alone["values"].items():
        np.testing.assert_allclose(both["values"][key], value, rtol=0, atol=1e-5, err_msg=key)


def test_mindspores_own_gradients(results: Results) -> None:
    """Synchronized inside the function, they are of the same parameters on all ranks."""
    both = same(results, "trained_by_mindspore")
    assert both["counts"] == [6] + [12] * 9 + [14] * 2 and both["deferred"] == ["dead.weight", "dead.bias"]


def test_under_the_patch(results: Results) -> None:
    """A script for plain MindSpore trains alike on both ranks, and holds no dead layer."""
    both = same(results, "trained_under_the_patch")
    assert len(both["bits"]) == 4 and both["deferred"] == ["0.dead.weight", "0.dead.bias"]


def test_accumulated_gradients(results: Results) -> None:
    """Steps that differ from rank to rank add up alike."""
    assert same(results, "accumulated")["deferred"] == ["dead.weight", "dead.bias"]


def test_the_loop_of_the_readme(results: Results) -> None:
    """It trains alike on both ranks."""
    both = same(results, "readme")
    assert "right.0.weight" in both["bits"] and "moment1.left.weight" in both["bits"]
    assert both["deferred"] == ["late.weight", "late.bias", "dead.weight", "dead.bias"]


def test_what_rests(results: Results) -> None:
    """What no rank reaches in a step keeps its value and its moments; what one rank reaches moves on all."""
    first, second, third = same(results, "resting")["states"]
    assert len(first) == 6 and first == second
    assert not set(second.items()) & set(third.items())


# ---------------------------------------------------------------------------------------------
# Values


@pytest.mark.filterwarnings("ignore::lazycell.UnusedLayerWarning")
def test_other_seeds(results: Results) -> None:
    """Values are those of rank 0, of what was touched before as of what comes later, from a seed or not."""
    both = same(results, "other_seeds")
    assert len(both["early"]) == 12 and len(both["deferred"]) == 6
    assert both["names"] == [name for name in both["early"] if name not in both["deferred"]]
    ranks.seed(0)
    assert ranks.bits(ranks.Recurrent().get_parameters()) == both["all"]
    assert both["late"] == both["bits"]


def test_loaded_values(results: Results) -> None:
    """What only rank 0 has loaded, all get; nothing is allocated for it before it is used."""
    one, other = results["loaded"]
    assert one["late"] == other["late"] == 7.0 and one["bits"] == other["bits"]
    assert "late.weight" in other["deferred"]


def test_layers_that_come_later(results: Results) -> None:
    """Gradients at values that ranks have drawn for themselves are refused, unless the values are the same."""
    both = same(results, "added_later")
    assert both["alike"] == "no error" and both["joined"] == ["stem.weight", "stem.bias"]
    assert "differ from rank to rank: those of stem.weight," in both["other"]
    assert both["sizes"][0] == "no error" and "those of left.weight," in both["sizes"][1]


def test_values_that_are_assigned_later(results: Results) -> None:
    """At their first use they are those of rank 0; what one rank replaces is new on all."""
    both = same(results, "assigned_later")
    assert both["names"] == ["late.weight", "late.bias"] and both["replaced"] == ["head.weight", "head.bias"]


def test_mindspores_own_broadcast(results: Results) -> None:
    """Under ``parameter_broadcast`` no dead layer is allocated, and all values are those of rank 0, later ones too."""
    both = same(results, "broadcast")
    assert both["deferred"] == ["late.weight", "late.bias", "dead.weight", "dead.bias"]
    ranks.seed(0)
    assert ranks.bits(ranks.Switched().get_parameters()) == both["bits"]


def test_moving_statistics(results: Results) -> None:
    """They stay each rank's own."""
    one, other = results["statistics"]
    assert one["trained"] == other["trained"] and one["before"] != other["before"]
    assert one["before"] == one["after"] and other["before"] == other["after"]


# ---------------------------------------------------------------------------------------------
# Synchronizing


def test_what_a_call_returns_and_costs(results: Results) -> None:
    """The names that are new, in order, on all ranks; and one AllReduce of 97 numbers where nothing is."""
    both = same(results, "repeated")
    used = [name for name in both["names"] if "late" not in name]
    assert both["returned"] == [[], used, [], ["late.weight", "late.bias"], []]
    assert both["costs"][2] == both["costs"][4] == [97]
    assert "late" in both["used"] and "left" in both["used"] and "dead" not in both["used"]


def test_shared_parameters_and_copies(results: Results) -> None:
    """Ties hold, and a copy is a net of its own."""
    both = same(results, "shared")
    assert both["tied"] == [True, True] and both["names"][0] == both["names"][1]
    assert len(both["names"][0]) == 12 and both["bits"][0] == both["bits"][1]


def test_frozen_layers(results: Results) -> None:
    """What all ranks have frozen has no gradient; what only one has is an error."""
    both = same(results, "frozen")
    assert "stem.weight" not in both["names"] and len(both["names"]) == 10
    for error in both["errors"]:
        assert "rank 0 has head.weight (2, 5) Float32, " in error
        assert "rank 1 has head.weight (2, 5) Float32 frozen" in error


def test_one_process() -> None:
    """Without communication it does nothing, but refuse what it can't take."""
    net = ranks.Net()
    assert sync_touched(net) == () == sync_touched(nn.SequentialCell(net))
    assert len(ranks.deferred(net)) == 16
    with pytest.raises(TypeError):
        sync_touched(1)
    with pytest.raises(lazycell.LazyCellError, match="isn't tracked"):
        sync_touched(nn.Dense(2, 2))


def test_inside_a_graph() -> None:
    """It can't be compiled, and says so."""
    net = ranks.Switched()

    @ms.jit
    def function(x: Any) -> Any:
        y = net(x)
        sync_touched(net)
        return y

    with pytest.raises(RuntimeError, match="can't be compiled into a graph"):
        function(ones(8, 6))


# ---------------------------------------------------------------------------------------------
# Errors


def test_differing_sets(results: Results) -> None:
    """Without sync_touched(), or in a list, they are an error on all ranks before anything is reduced, or updated."""
    by_list, given, alike, unchanged = same(results, "unsynced")
    assert "rank 0 has no left.weight, left.bias; rank 1 has no right.0.weight, right.0.bias" in by_list
    assert "sync_touched(net)" in by_list
    assert "rank 0 has no left.weight." in given
    assert "rank 0 has no left.weight, left.bias; rank 1 has no right.weight, right.bias" in alike and unchanged


def test_unequal_nets(results: Results) -> None:
    """They are an error on all ranks, which names what differs."""
    shapes, layers = same(results, "unequal_nets")
    assert "rank 0 has stem.weight (5, 6) Float32" in shapes and "rank 1 has stem.weight (6, 6) Float32" in shapes
    assert "rank 0 has no more.weight, more.bias" in layers


def test_layers_without_sizes(results: Results) -> None:
    """Sized on one rank only, they are an error on all; sized by a dry run on all, they have the values of rank 0."""
    both = same(results, "without_sizes")
    assert both["first"] == [] and len(both["names"]) == 4
    assert "rank 0 has left.weight (5, 6) Float32" in both["error"]
    assert "rank 1 has left.weight ? Float32" in both["error"] and "lazycell.dry_run(layer" in both["error"]
    ranks.seed(0)
    net = ranks.Unsized()
    for layer in (net.left, net.right):
        lazycell.dry_run(layer, lazycell.spec(8, 6))
    assert ranks.bits(net.get_parameters()) == both["bits"]


def test_ranks_that_are_elsewhere(results: Results) -> None:
    """One that has caught an exception, and synchronizes while the other one computes gradients, is told so."""
    assert "rank 0: computing gradients; rank 1: sync_touched()" in same(results, "elsewhere")


def test_outside_data_parallelism(results: Results) -> None:
    """Gradients wait for no other rank."""
    assert [len(names) for names in results["not_in_data_parallel"]] == [0, 6]


# ---------------------------------------------------------------------------------------------
# Ends


@pytest.mark.parametrize("name", ["killed", "raised"])
def test_a_rank_that_ends(tmp_path: Path, name: str) -> None:
    """The whole run ends with an error, and leaves no process behind."""
    code, written = run_ranks(tmp_path, name, MS_NODE_TIMEOUT="10")
    assert code != 0 and "Distributed job exited with exception" in written


def test_a_rank_that_ends_unwatched(tmp_path: Path) -> None:
    """Where ``msrun`` doesn't watch the processes, MindSpore ends the others once it has waited long enough."""
    _, written = run_ranks(tmp_path, "killed", join=False, MS_NODE_TIMEOUT="10")
    assert "worker 1 is the first one timed out" in written or "rank 0 has waited for the other ranks" in written


def test_waiting_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """What MindSpore raises where another rank doesn't come says so; an error from elsewhere stays what it was."""

    def failing(text: str) -> Callable[[], Callable[[Any], Any]]:
        def collective(tensor: Any) -> Any:
            raise RuntimeError(text)

        return lambda: collective

    monkeypatch.setattr(ops, "AllReduce", failing("Launch kernel failed, name:Default/AllReduce-op0"))
    with pytest.raises(lazycell.LazyCellError, match="rank 0 has waited for the other ranks in vain"):
        _mindspore.sum_over_ranks(np.zeros(1))
    monkeypatch.setattr(ops, "AllReduce", failing("Launch kernel failed, name:Default/MatMul-op0"))
    with pytest.raises(RuntimeError, match="MatMul"):
        _mindspore.sum_over_ranks(np.zeros(1))
