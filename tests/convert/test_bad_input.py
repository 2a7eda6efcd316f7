"""Bad sources, recipes and places: one message that names the fault, the right exit code, and nothing half-written."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from duovolt.checkpoint.directory import INDEX, MANIFEST

from .conftest import FIXTURE, rewrite, shard_of

Command = Callable[..., subprocess.CompletedProcess[str]]
Damage = Callable[[Path], object]

DOWN = "model.language_model.layers.1.mlp.down_proj.weight"


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def set_config(key: str, value: object, section: str | None = None) -> Damage:
    def change(directory: Path) -> None:
        edit_json(directory / "config.json", lambda c: (c[section] if section else c).__setitem__(key, value))

    return change


def cut_bytes(count: int) -> Damage:
    def change(directory: Path) -> None:
        path = shard_of(directory, DOWN)
        os.truncate(path, path.stat().st_size - count if count > 0 else -count)

    return change


def append_bytes(directory: Path) -> None:
    with shard_of(directory, DOWN).open("ab") as handle:
        handle.write(bytes(8))


def put_value(bits: int) -> Damage:
    def change(directory: Path) -> None:
        def poke(words: np.ndarray) -> np.ndarray:
            words[3, 5] = bits
            return words

        rewrite(directory, DOWN, poke)

    return change


def drop_from_index(directory: Path) -> None:
    edit_json(directory / INDEX, lambda index: index["weight_map"].pop(DOWN))


def rename_in_headers(directory: Path, old: str, new: str) -> None:
    """Rename tensors in every header and in the index; header lengths follow."""
    for path in directory.glob("*.safetensors"):
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = raw[8 : 8 + length].replace(old.encode(), new.encode()).rstrip(b" ")
        header += b" " * (-len(header) % 8)
        path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])
    (directory / INDEX).write_text((directory / INDEX).read_text().replace(old, new))


def dangling_link(directory: Path) -> None:
    path = shard_of(directory, DOWN)
    path.unlink()
    path.symlink_to("../blobs/abc")


def recipe_text(role: str, encoding: str) -> str:
    return (
        'name = "x"\nlayout = "v100"\nmax_shard_bytes = 9\n'
        f'[[rules]]\ngroup = "text"\nroles = ["{role}"]\nencoding = "{encoding}"'
    )


CASES: dict[str, tuple[Damage, list[str]]] = {
    "missing shard": (lambda d: shard_of(d, DOWN).unlink(), ["missing", ".safetensors", "download"]),
    "dangling link": (dangling_link, ["dangling link", "../blobs/abc"]),
    "cut by a byte": (cut_bytes(1), [".safetensors", "the file has"]),
    "cut inside the header": (cut_bytes(-100), [".safetensors", "exceeds"]),
    "empty shard": (lambda d: shard_of(d, DOWN).write_bytes(b""), ["too short"]),
    "bytes too many": (append_bytes, ["8 too many"]),
    "html page": (lambda d: shard_of(d, DOWN).write_text("<!DOCTYPE html><html></html>"), ["HTML page"]),
    "lfs pointer": (
        lambda d: shard_of(d, DOWN).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"),
        ["git-lfs pointer"],
    ),
    "pickle": (lambda d: shard_of(d, DOWN).write_bytes(b"\x80\x04\x95" + bytes(50)), ["pickle"]),
    "huge header length": (
        lambda d: shard_of(d, DOWN).write_bytes((1 << 40).to_bytes(8, "little") + b"{}"),
        ["header length"],
    ),
    "index without a tensor": (drop_from_index, [DOWN]),
    "index with a path": (
        lambda d: edit_json(d / INDEX, lambda i: i["weight_map"].__setitem__(DOWN, "../outside.safetensors")),
        ["not a plain file name"],
    ),
    "index is no json": (lambda d: (d / INDEX).write_text("{"), [INDEX, "not valid JSON"]),
    "index is a list": (lambda d: (d / INDEX).write_text("[]"), ["no weight_map"]),
    "pipe as a side file": (lambda d: os.mkfifo(d / "notes.txt"), ["notes.txt", "not a regular file"]),
    "device as a side file": (lambda d: (d / "notes.txt").symlink_to("/dev/zero"), ["notes.txt", "not a regular file"]),
    "name that is no text": (
        lambda d: Path(os.fsdecode(os.fsencode(d) + b"/bad\xff.txt")).write_text("x"),
        ["no text"],
    ),
    "architectures is a number": (set_config("architectures", -1), ["architectures is -1"]),
    "unfinished download": (lambda d: (d / ".model.safetensors.part").write_bytes(b"x"), ["unfinished download"]),
    "no config": (lambda d: (d / "config.json").unlink(), ["config.json", "no such file"]),
    "other architecture": (set_config("model_type", "llama"), ["'llama'", "not supported"]),
    "no text_config": (set_config("text_config", None), ["text_config"]),
    "hostile size": (set_config("num_hidden_layers", 10**9, "text_config"), ["num_hidden_layers"]),
    "negative size": (set_config("hidden_size", -64, "text_config"), ["hidden_size is -64"]),
    "size is text": (set_config("head_dim", "32", "text_config"), ["head_dim is '32'"]),
    "other shape than config": (set_config("intermediate_size", 160, "text_config"), ["of another shape", "mlp"]),
    "declared quantised": (
        set_config("quantization_config", {"quant_method": "fp8"}),
        ["declared (fp8) is not what is stored", "is stored plain, but declared quantised"],
    ),
    "nan": (put_value(0x7FC0), [DOWN, "nan", "[3, 5]"]),
    "infinity": (put_value(0xFF80), [DOWN, "-inf", "[3, 5]"]),
    "other prefix": (
        lambda d: rename_in_headers(d, "model.language_model.", "model.language_model.language_model."),
        ["of 92 tensors of the family matched", "language_model.language_model"],
    ),
    "fused projection": (
        lambda d: rename_in_headers(d, "in_proj_qkv.weight", "in_proj_qkvz.weight"),
        ["in_proj_qkvz", "interleaved"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_source_is_refused_before_anything_is_written(
    name: str, source: Path, tmp_path: Path, command: Command
) -> None:
    """Q03: NaN and infinity, by file, tensor and index, among them."""
    damage, words = CASES[name]
    damage(source)
    result = command("convert", source, tmp_path / "converted")
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("duovolt: ") and result.stderr.count("\n") == 1
    assert all(word in result.stderr for word in words), result.stderr
    assert not (tmp_path / "converted").exists()


RECIPES = {
    "unknown name": ("v200", ["no recipe 'v200'", "v100"]),
    "missing file": ("absent.toml", ["absent.toml", "No such file"]),
    "no toml": ("= [", ["recipe.toml"]),
    "unknown key": ('name = "x"\nlayout = "v100"\nmax_shard_bytes = 1\nrules = []\ncolour = 1', ["colour"]),
    "unknown encoding": (recipe_text("lm_head", "int3"), ["int3"]),
    "rule without a tensor": (recipe_text("mlp.side_proj", "nvfp4"), ["mlp.side_proj", "matches no tensor"]),
    "vector": (recipe_text("input_layernorm", "nvfp4"), ["input_layernorm", "matrices only"]),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_bad_recipe_is_refused(name: str, source: Path, tmp_path: Path, command: Command) -> None:
    text, words = RECIPES[name]
    recipe = text
    if "=" in text:
        recipe = "recipe.toml"
        (tmp_path / recipe).write_text(text)
    result = command("convert", source, tmp_path / "converted", "--recipe", recipe)
    assert result.returncode == 2 and result.stderr.count("\n") == 1, result.stderr
    assert all(word in result.stderr for word in words), result.stderr
    assert not (tmp_path / "converted").exists()


def test_places_that_would_hurt_the_source_are_refused(source: Path, tmp_path: Path, command: Command) -> None:
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    link = tmp_path / "link"
    link.symlink_to(source)
    for target in (source, link, source / "inside", tmp_path):
        result = command("convert", source, target)
        assert result.returncode == 2 and "source" in result.stderr, result.stderr
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before


def test_a_directory_with_other_content_is_refused(source: Path, tmp_path: Path, command: Command) -> None:
    target = tmp_path / "full"
    target.mkdir()
    (target / "thesis.tex").write_text("years of work")
    result = command("convert", source, target)
    assert result.returncode == 2 and "not empty (thesis.tex)" in result.stderr
    assert (target / "thesis.tex").read_text() == "years of work"


def test_two_conversions_never_mix(source: Path, tmp_path: Path, command: Command) -> None:
    target = tmp_path / "converted"
    assert command("convert", source, target, DUOVOLT_STOP_AT_WRITE="20").returncode == -9
    rewrite(source, "lm_head.weight", lambda words: words ^ 1)
    result = command("convert", source, target)
    assert result.returncode == 2 and "interrupted run of something else" in result.stderr
    shutil.rmtree(target)
    assert command("convert", source, target).returncode == 0
    rewrite(source, "lm_head.weight", lambda words: words ^ 1)
    result = command("convert", source, target)
    assert result.returncode == 2 and "already holds" in result.stderr


def test_a_converted_directory_is_no_source(source: Path, tmp_path: Path, command: Command) -> None:
    """Q11: the stage fed its own output."""
    assert command("convert", source, tmp_path / "converted").returncode == 0
    result = command("convert", tmp_path / "converted", tmp_path / "twice")
    assert result.returncode == 2 and "already converted" in result.stderr


def test_a_second_run_at_the_same_time_stops_and_a_dead_ones_lock_is_taken_over(
    source: Path, tmp_path: Path, command: Command
) -> None:
    from duovolt.checkpoint.lock import LOCK, DirectoryLock

    target = tmp_path / "converted"
    target.mkdir()
    with DirectoryLock(target):
        result = command("convert", source, target)
        assert result.returncode == 2 and f"process {os.getpid()} is writing here" in result.stderr
    (target / LOCK).write_text("1 0\n")  # left by a process that was killed: nobody holds it
    assert command("convert", source, target).returncode == 0


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="mounting a small disk needs root")
def test_a_full_disk_costs_nothing(tmp_path: Path, command: Command) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", disk], capture_output=True)
    if made.returncode:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        result = command("convert", FIXTURE, disk / "converted")
        assert result.returncode == 3 and "GB free" in result.stderr and not (disk / "converted").exists()
        # Past the check at the start, the disk fills in mid-write: the message says so and no file is half there.
        subprocess.run(["mount", "-o", "remount,size=2000k", disk], check=True)
        (disk / "converted").mkdir()
        (disk / "ballast").write_bytes(bytes(1_700_000))
        assert "GB free" in command("convert", FIXTURE, disk / "converted").stderr
        unchecked = (
            "import sys\n"
            "from duovolt.convert import pipeline\n"
            "pipeline.require_space = lambda *a: None\n"
            "from duovolt.cli.main import main\n"
            "sys.exit(main(sys.argv[1:]))\n"
        )
        arguments = ["convert", FIXTURE, disk / "converted"]
        result = subprocess.run([sys.executable, "-c", unchecked, *arguments], capture_output=True, text=True)
        assert result.returncode == 3 and "disk is full" in result.stderr, result.stderr
        assert not [p.name for p in (disk / "converted").iterdir() if not p.name.startswith(".")]
        assert not (disk / "converted" / MANIFEST).exists()
        (disk / "ballast").unlink()
        assert command("convert", FIXTURE, disk / "converted").returncode == 0
    finally:
        subprocess.run(["umount", disk], check=True)


def test_interrupt_gives_130_and_keeps_no_half_file(source: Path, tmp_path: Path) -> None:
    import signal

    # SIGINT at the first read of the second pass: from inside, so that it always comes in mid-work.
    program = (
        "import os, signal, sys\n"
        "from duovolt.convert import converter\n"
        "real = converter.ShardWriter\n"
        "def stop(*a, **k):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    return real(*a, **k)\n"
        "converter.ShardWriter = stop\n"
        "from duovolt.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, "convert", source, tmp_path / "converted"], capture_output=True, text=True
    )
    assert result.returncode == 130 and result.stderr == "duovolt: interrupted.\n"
    assert signal.SIGINT and not list((tmp_path / "converted").glob("*.safetensors"))
