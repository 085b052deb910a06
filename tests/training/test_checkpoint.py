"""Checkpoints are exact, written completely or not at all, load on any number of ranks, and execute no code."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shutil
import signal
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megabatch.training import checkpoint
from megabatch.training.checkpoint import storage

FILE = "rank-00000.safetensors"


def state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {"weight": torch.randn(7, 3, generator=generator), "bias": torch.randn(5, generator=generator).bfloat16()},
        "optimizer": {
            0: {"step": torch.tensor(2**40 + seed), "average": torch.randn(2, 3, 4, generator=generator).permute(2, 0, 1)}
        },
        "rng": generator.get_state(),
        "odd": torch.tensor([float("nan"), -0.0, float("inf")]),
        "empty": torch.empty(0, 4),
        "mask": torch.tensor([True, False]),
    }


def blank(tensors: dict[str, Any]) -> dict[str, Any]:
    return {key: blank(value) if isinstance(value, dict) else torch.full_like(value, 1) for key, value in tensors.items()}


def assert_same_bits(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    for (name, a), (other, b) in zip(checkpoint.flat(actual).items(), checkpoint.flat(expected).items(), strict=True):
        assert (name, a.dtype, a.shape) == (other, b.dtype, b.shape)
        assert bytes(storage.bytes_of(a.contiguous())) == bytes(storage.bytes_of(b.contiguous())), name


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite the manifest with a matching checksum, as an attacker who knows the format would."""
    table = json.loads((path / "checkpoint.json").read_text())
    change(table["content"])
    table["crc32"] = zlib.crc32(json.dumps(table["content"], sort_keys=True).encode())
    (path / "checkpoint.json").write_text(json.dumps(table))


def test_every_bit_comes_back(tmp_path):
    saved, facts = state(), {"position": 12345678901, "rate": 0.1, "run": {"name": "é"}}
    path = checkpoint.save(tmp_path / "new" / "checkpoints", 200, saved, facts, keep=2)
    assert path.name == "step-00000200"
    loaded = blank(saved)
    expected = {**facts, "step": 200, "ranks": 1, "torch": torch.__version__}
    assert checkpoint.load(path, loaded) == checkpoint.read_metadata(path) == expected
    assert_same_bits(loaded, saved)


def test_parameters_are_filled_where_they_are(tmp_path):
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    path = checkpoint.save(tmp_path, 1, model.state_dict(), {}, keep=1)
    before = other.weight.data_ptr()
    checkpoint.load(path, dict(other.named_parameters()))
    assert other.weight.data_ptr() == before
    assert other.weight.requires_grad
    assert torch.equal(other.weight, model.weight)


def test_other_programs_read_the_tensors_as_safetensors(tmp_path):
    from safetensors.torch import load_file

    path = checkpoint.save(tmp_path, 1, state(), {}, keep=1)
    tensors = load_file(path / FILE)
    assert_same_bits({name: tensors[name] for name in checkpoint.flat(state())}, checkpoint.flat(state()))


def test_a_part_can_be_loaded_by_itself(tmp_path):
    saved = state()
    path = checkpoint.save(tmp_path, 1, saved, {}, keep=1)
    part = {"model": blank(saved["model"])}
    checkpoint.load(path, part, whole=False)
    assert_same_bits(part, {"model": saved["model"]})
    with pytest.raises(ValueError, match="only in the checkpoint"):
        checkpoint.load(path, part)


def test_the_newest_stay(tmp_path):
    assert checkpoint.available(tmp_path / "none") == []
    assert checkpoint.newest(tmp_path) is None
    for step in (5, 100, 20, 300):
        checkpoint.save(tmp_path, step, state(step), {}, keep=2)
        assert checkpoint.read_metadata(tmp_path / f"step-{step:08d}")["step"] == step
    assert [path.name for path in checkpoint.available(tmp_path)] == ["step-00000100", "step-00000300"]
    assert len(list(tmp_path.iterdir())) == 2
    assert checkpoint.newest(tmp_path) == tmp_path / "step-00000300"


def test_the_one_just_written_stays_even_where_later_steps_exist(tmp_path):
    checkpoint.save(tmp_path, 100, state(), {}, keep=1)
    path = checkpoint.save(tmp_path, 50, state(1), {}, keep=1)
    assert checkpoint.available(tmp_path) == [path]


def test_a_second_save_of_a_step_replaces_the_first(tmp_path):
    checkpoint.save(tmp_path, 7, state(0), {"turn": 1}, keep=1)
    path = checkpoint.save(tmp_path, 7, state(1), {"turn": 2}, keep=1)
    loaded = blank(state())
    assert checkpoint.load(path, loaded)["turn"] == 2
    assert_same_bits(loaded, state(1))
    assert list(tmp_path.iterdir()) == [path]


def save_until(folder: Path, step: int, moment: int) -> None:
    """Save, and be killed just before the folder is touched for the moment-th time."""
    seen = 0

    def count(event: str, args: Any) -> None:
        nonlocal seen
        # Files are removed by names relative to an open folder.
        if event in ("os.remove", "os.rmdir") or (event.startswith(("open", "os.")) and args and str(folder) in str(args[0])):
            seen += 1
            if seen == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    checkpoint.save(folder, step, {"w": torch.full((1000,), float(moment))}, {"moment": moment}, keep=1)


def forked(work: Callable[[], None]) -> int | None:
    """Return the exit status of a child process; None if it hangs, because a thread of the parent held a lock during the fork."""
    pid = os.fork()
    if pid == 0:
        # The child must end here: it is not a worker of pytest.
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    for _ in range(1000):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def crash(rank: int, size: int, parent: Path, step: int) -> list[bool]:
    """Kill a child process at each moment of a save; return for each whether the new checkpoint existed afterwards."""
    dist.destroy_process_group()
    taken: list[bool] = []
    while True:
        moment = len(taken) + 1
        folder = parent / str(moment)
        checkpoint.save(folder, 1, {"w": torch.zeros(1000)}, {"moment": 0}, keep=1)
        status = forked(lambda folder=folder, moment=moment: save_until(folder, step, moment))
        if status is None:
            shutil.rmtree(folder)
            continue
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            return taken
        left = checkpoint.available(folder)
        assert left, moment
        for path in left:
            tensors = {"w": torch.full((1000,), -1.0)}
            facts = checkpoint.load(path, tensors)
            assert tensors["w"].eq(facts["moment"]).all(), (moment, facts)
        taken.append(facts["moment"] == moment)
        path = checkpoint.save(folder, step, {"w": torch.zeros(1000)}, {}, keep=1)
        assert list(folder.iterdir()) == [path]


@pytest.mark.parametrize("step", [1, 2])
def test_killed_at_any_moment_complete_checkpoints_are_left(world, tmp_path, step):
    [taken] = world.run(1, crash, tmp_path, step)
    # Kills before and after the rename were seen.
    assert taken == sorted(taken)
    assert taken.count(False) > 4
    assert taken.count(True) > 2


def test_a_full_disk_leaves_those_before_and_says_what_was_needed(tmp_path, monkeypatch):
    before = checkpoint.save(tmp_path, 1, state(), {}, keep=1)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(storage.os, "fsync", lambda descriptor: (_ for _ in ()).throw(full))
    with pytest.raises(OSError, match="No space left") as caught:
        checkpoint.save(tmp_path, 2, {"w": torch.zeros(250, 1000)}, {}, keep=1)
    assert caught.value.errno == errno.ENOSPC
    for part in ("step-00000002 could not be written", "take 1,000,000 bytes", f"{before}, is intact"):
        assert part in str(caught.value)
    assert list(tmp_path.iterdir()) == [before]
    monkeypatch.undo()
    checkpoint.load(before, blank(state()))
    checkpoint.save(tmp_path, 2, state(), {}, keep=1)


def test_damage_is_named_and_the_one_before_is_offered(tmp_path):
    before = checkpoint.save(tmp_path, 1, state(), {}, keep=9)

    def refusal(damage: Callable[[Path], Any]) -> str:
        path = checkpoint.save(tmp_path, 2, state(), {}, keep=9)
        damage(path)
        loaded = blank(state())
        with pytest.raises(ValueError) as caught:
            checkpoint.load(path, loaded)
        assert_same_bits(loaded, blank(state()))
        assert str(path) in str(caught.value)
        assert f"the previous one, {before}" in str(caught.value)
        return str(caught.value)

    def flip(path: Path) -> None:
        data = bytearray((path / FILE).read_bytes())
        data[-1] ^= 1
        (path / FILE).write_bytes(data)

    written = (before / FILE).stat().st_size
    assert f"is truncated: file {FILE} has 100 bytes, and {written} were written" in refusal(lambda p: os.truncate(p / FILE, 100))
    assert f"is truncated: file {FILE} is missing" in refusal(lambda p: (p / FILE).unlink())
    assert f"is altered: file {FILE} has the checksum" in refusal(flip)
    assert "not a checkpoint of megabatch: it has no file" in refusal(lambda p: (p / "checkpoint.json").unlink())
    assert "cannot be read" in refusal(lambda p: os.truncate(p / "checkpoint.json", 300))
    assert "cannot be read" in refusal(lambda p: (p / "checkpoint.json").write_text("[" * 100_000))
    text = (before / "checkpoint.json").read_text()
    assert "checksum differs" in refusal(lambda p: (p / "checkpoint.json").write_text(text.replace('"step": 1', '"step": 3')))
    future = text.replace('"format": 1', '"format": 2')
    assert "has format 2, and this megabatch reads format 1" in refusal(lambda p: (p / "checkpoint.json").write_text(future))


def test_what_is_offered_is_itself_complete(tmp_path):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, state(), {}, keep=9)
    for step in (2, 3):
        os.truncate(tmp_path / f"step-0000000{step}" / FILE, 10)
    with pytest.raises(ValueError, match=r"the previous one, .*step-00000001"):
        checkpoint.load(tmp_path / "step-00000003", state())
    os.truncate(tmp_path / "step-00000001" / FILE, 10)
    with pytest.raises(ValueError, match="there is no complete earlier one"):
        checkpoint.load(tmp_path / "step-00000003", state())


def test_another_model_is_refused_before_anything_is_filled(tmp_path):
    path = checkpoint.save(tmp_path, 1, state(), {}, keep=1)
    other = blank(state())
    other["model"] = {"weight": torch.zeros(3, 7), "bias": torch.zeros(5), "gain": torch.zeros(1)}
    del other["mask"]
    with pytest.raises(ValueError) as caught:
        checkpoint.load(path, other)
    assert "model.gain is missing in the checkpoint; mask is only in the checkpoint" in str(caught.value)
    assert "model.weight is float32 [7, 3] in the checkpoint and float32 [3, 7] in the run" in str(caught.value)
    assert "model.bias is bfloat16 [5] in the checkpoint and float32 [5] in the run" in str(caught.value)
    assert other["odd"].eq(1).all()


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


def as_dcp_has_it(path: Path) -> None:
    (path / "checkpoint.json").unlink()
    (path / ".metadata").write_bytes(pickle.dumps(Evil()))


def as_manifest(path: Path) -> None:
    (path / "checkpoint.json").write_bytes(pickle.dumps(Evil()))


def as_tensors(path: Path) -> None:
    """Pickled code in place of numbers, with matching sizes and checksums."""
    torch.save(Evil(), path / FILE)
    data = (path / FILE).read_bytes()
    rewrite(path, lambda content: content["files"].update({FILE: {"bytes": len(data), "crc32": zlib.crc32(data)}}))


def as_bytes_entry(path: Path) -> None:
    data = (path / FILE).read_bytes() + pickle.dumps(Evil())
    (path / FILE).write_bytes(data)

    def change(content: dict[str, Any]) -> None:
        content["files"][FILE] = {"bytes": len(data), "crc32": zlib.crc32(data)}
        content["tensors"]["odd"]["dtype"] = "bytes"

    rewrite(path, change)


def elsewhere(path: Path) -> None:
    secret = bytes(12)
    (path.parent / "secret").write_bytes(secret)

    def change(content: dict[str, Any]) -> None:
        content["files"]["../secret"] = {"bytes": len(secret), "crc32": zlib.crc32(secret)}
        content["tensors"]["odd"]["boxes"][0].update(file="../secret", at=0)

    rewrite(path, change)


def linked(path: Path) -> None:
    (path / FILE).rename(path.parent / FILE)
    (path / FILE).symlink_to(path.parent / FILE)


def outside_of_its_file(path: Path) -> None:
    rewrite(path, lambda content: content["tensors"]["odd"]["boxes"][0].update(at=10**9))


def outside_of_its_tensor(path: Path) -> None:
    rewrite(path, lambda content: content["tensors"]["odd"]["boxes"][0].update(offsets=[1]))


def not_filled(path: Path) -> None:
    rewrite(path, lambda content: content["tensors"]["odd"]["boxes"].clear())


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        (as_dcp_has_it, "it has no file checkpoint.json"),
        (as_manifest, "checkpoint.json cannot be read"),
        (as_tensors, "is outside of its tensor or its file"),
        (as_bytes_entry, "'odd' is 'bytes', not a tensor of numbers"),
        (elsewhere, "file '../secret' does not belong to a checkpoint"),
        (linked, "is not a regular file"),
        (outside_of_its_file, "is outside of its tensor or its file"),
        (outside_of_its_tensor, "is outside of its tensor or its file"),
        (not_filled, "the boxes of 'odd' do not fill it"),
    ],
)
def test_nothing_in_a_checkpoint_is_executed_or_leads_out_of_it(tmp_path, monkeypatch, attack, reason):
    monkeypatch.chdir(tmp_path)
    path = checkpoint.save(tmp_path, 1, state(), {}, keep=1)
    attack(path)
    loaded = blank(state())
    with pytest.raises(ValueError, match=re.escape(reason)):
        checkpoint.load(path, loaded)
    assert_same_bits(loaded, blank(state()))
    assert not (tmp_path / "executed").exists()
    # The attack works if the file is unpickled.
    pickle.loads(pickle.dumps(Evil()))
    assert (tmp_path / "executed").exists()


def test_pickles_are_not_even_imported_to_read():
    for name in ("__init__", "folder", "manifest", "storage"):
        text = (Path(checkpoint.__file__).parent / f"{name}.py").read_text()
        assert not any(word in text for word in ("import pickle", "torch.load", "FileSystemReader"))


def test_what_cannot_be_saved_is_refused_by_name(tmp_path):
    for tensors, facts, complaint in [
        ({"optimizer": {"lr": 0.1}}, {}, r"optimizer\.lr is 0\.1: a checkpoint stores tensors"),
        ({"z": torch.zeros(2, dtype=torch.complex64)}, {}, "z is a torch.strided tensor of torch.complex64"),
        ({"s": torch.eye(2).to_sparse()}, {}, "s is a torch.sparse_coo tensor"),
        ({"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1)}, {}, "a.b names two tensors"),
        ({}, {"x": torch.zeros(1)}, "values that JSON has"),
        ({}, {"x": float("nan")}, "values that JSON has"),
    ]:
        with pytest.raises(ValueError, match=complaint):
            checkpoint.save(tmp_path, 1, tensors, facts, keep=1)
    with pytest.raises(ValueError, match="keep is 0"):
        checkpoint.save(tmp_path, 1, {}, {}, keep=0)
    assert list(tmp_path.iterdir()) == []


def whole_state() -> dict[str, Tensor]:
    """Tensors with rows that do not divide by the ranks, fewer rows than ranks, split columns, and a copy on every rank."""
    generator = torch.Generator().manual_seed(3)
    sizes = {"rows": (7, 3), "few": (2, 5), "columns": (4, 5), "copied": (3,), "plain": (6,), "one": ()}
    return {name: torch.randn(size, generator=generator) for name, size in sizes.items()}


def split_state(size: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (size,))
    places = {"rows": Shard(0), "few": Shard(0), "columns": Shard(1), "copied": Replicate()}
    return {n: distribute_tensor(t.clone(), mesh, [places[n]]) if n in places else t.clone() for n, t in tensors.items()}


def save_split(rank: int, size: int, folder: Path) -> str:
    own = {f"rank {rank}": torch.tensor([rank])}
    return str(checkpoint.save(folder, size, split_state(size, whole_state()) | own, {"position": 1}, keep=9))


def load_split(rank: int, size: int, path: Path) -> tuple[dict[str, Tensor], int]:
    tensors = split_state(size, {name: torch.zeros_like(t) for name, t in whole_state().items()})
    facts = checkpoint.load(path, tensors, whole=False)
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}, facts["ranks"]


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_split_tensors_come_back_on_another_number_of_ranks(world, tmp_path, before, after):
    path = world.run(before, save_split, tmp_path)[0]
    for tensors, ranks in world.run(after, load_split, path):
        assert ranks == before
        assert_same_bits(tensors, whole_state())
    alone = {name: torch.zeros_like(t) for name, t in whole_state().items()}
    checkpoint.load(path, alone, whole=False)
    assert_same_bits(alone, whole_state())


def train(size: int, steps: range, path: str | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model after these steps, from the checkpoint if there is one; with FSDP2 on several ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    if size > 1:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if path is not None:
        # A step creates the optimizer's state, which is then loaded.
        advance(model, optimizer, range(1))
        checkpoint.load(path, training_state(model, optimizer))
    advance(model, optimizer, steps)
    return model, optimizer


def advance(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(torch.full((2, 3), 1.0 + step)).square().sum().backward()
        optimizer.step()


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": dict(model.named_parameters()), "optimizer": optimizer.state_dict()["state"]}


def train_and_save(rank: int, size: int, folder: Path) -> str:
    return str(checkpoint.save(folder, 2, training_state(*train(size, range(2))), {}, keep=1))


def state_after(rank: int, size: int, steps: range, path: str | None = None) -> dict[str, Tensor]:
    tensors = checkpoint.flat(training_state(*train(size, steps, path)))
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach() for name, t in tensors.items()}


def test_fsdp2_takes_up_the_state_of_one_process_and_one_process_that_of_fsdp2(world, tmp_path):
    from_one = train_and_save(0, 1, tmp_path / "from-one")
    from_two = world.run(2, train_and_save, tmp_path / "from-two")[0]
    for state in world.run(2, state_after, range(0), from_one):
        assert_same_bits(state, state_after(0, 1, range(2)))
    for straight, resumed in zip(
        world.run(2, state_after, range(4)), world.run(2, state_after, range(2, 4), from_two), strict=True
    ):
        assert_same_bits(resumed, straight)
    assert_same_bits(state_after(0, 1, range(0), from_two), world.run(2, state_after, range(2))[0])


def fail_on_one(rank: int, size: int, folder: Path) -> list[tuple[str, str]]:
    """Return the error messages of every rank when only the last one fails: full disk, no tensor, no file."""
    messages = []

    def trouble(work: Callable[[], Any]) -> None:
        try:
            work()
        except (OSError, ValueError, RuntimeError) as error:
            messages.append((type(error).__name__, str(error)))

    last, original = rank == size - 1, storage.write_bytes

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    good = {"w": torch.zeros(9), f"own {rank}": torch.zeros(4)}
    path = checkpoint.save(folder, 1, good, {}, keep=3)
    storage.write_bytes = full if last else original
    trouble(lambda: checkpoint.save(folder, 2, good, {}, keep=3))
    storage.write_bytes = original
    trouble(lambda: checkpoint.save(folder, 2, {"w": 3.0 if last else torch.zeros(9)}, {}, keep=3))
    trouble(lambda: checkpoint.load(path, good | ({"v": torch.zeros(1)} if last else {})))
    dist.barrier()
    if last:
        os.truncate(path / f"rank-0000{rank}.safetensors", 5)
    dist.barrier()
    trouble(lambda: checkpoint.load(path, good))
    return messages


def test_trouble_on_one_rank_is_the_same_error_on_all(world, tmp_path):
    first, second = world.run(2, fail_on_one, tmp_path)
    assert first == second
    kinds = ["OSError", "ValueError", "ValueError", "ValueError"]
    parts = ["No space left on device", "w is 3.0", "v is missing", "is truncated: file rank-00001"]
    for (kind, message), wanted, part in zip(first, kinds, parts, strict=True):
        assert kind == wanted
        assert part in message
    assert "step-00000001, is intact" in first[0][1]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
