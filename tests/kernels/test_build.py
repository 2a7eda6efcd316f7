"""Compilation without a GPU: both targets, the cache, prebuilt directories, and what is said when something lacks."""

import json
import re
import shutil
import types

import pytest

from duovolt.checkpoint.errors import EnvironmentFault, InputError
from duovolt.cli import kernels as command
from duovolt.cli.main import main
from duovolt.kernels import build as builder
from duovolt.kernels import module
from duovolt.kernels import nvrtc as compilers

KERNELS = {f"linear_{kind}_8" for kind in ("nvfp4", "fp8", "fp8_blocks", "half", "any")}
FORBIDDEN = {  # what sm_70 lacks, what it does slowly, and what would make a sum depend on timing
    "asynchronous copies": r"\bcp\.async",
    "ldmatrix": r"\bldmatrix",
    "later tensor-core shapes": r"\bw?mma\S*\.m(?!8n8k4)\d+n\d+k\d+",
    "bf16, fp8 and fp4 types": r"\.(bf16|e4m3|e5m2|e2m1)",
    "integer to fp16": r"\bcvt\.\S*f16\.[us]\d",
    "atomic sums": r"\b(atom|red)\.\S*\.f(16|32|64)",
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(builder.PREBUILT_VARIABLE, raising=False)


@pytest.fixture
def one_source(monkeypatch):
    """The command builds one source alone: all of them take half a minute."""
    monkeypatch.setattr(command, "sources", lambda: ["read.cu"])


@pytest.fixture
def nvrtc():
    try:
        return compilers.load()
    except EnvironmentFault as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("source", ["linear_8.cu", "linear_24.cu"])
def test_arguments_are_read_as_arguments(nvrtc, source):
    """Through a pointer that may be null too they are read from memory, where a launch's arguments are cold."""
    assert "cvta.param" not in builder.build(source, "compute_90").image.decode()


def test_ptx_is_for_sm_70_and_holds_nothing_that_volta_lacks(nvrtc):
    assert {"linear_8.cu", "linear_16.cu", "linear_24.cu", "dequantise.cu", "read.cu"} <= set(builder.sources())
    ptx = builder.build("linear_8.cu", "compute_70").image.decode()
    assert re.search(r"^\.target sm_70$", ptx, re.M)
    assert set(re.findall(r"\.visible \.entry (\w+)", ptx)) == KERNELS
    assert "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32" in ptx
    assert {what: found[0] for what, found in ((w, re.search(p, ptx)) for w, p in FORBIDDEN.items()) if found} == {}


def test_activations_do_not_come_through_the_read_only_cache_where_launches_overlap(nvrtc):
    """It is for what nobody writes while a kernel lives; the launch before may write them after this one has begun."""
    ptx = builder.build("linear_8.cu", "compute_90").image.decode()
    kernels = re.split(r"\.visible \.entry ", ptx)[1:]
    assert len(kernels) >= len(KERNELS)
    for text in kernels:
        waited = text[text.index("griddepcontrol.wait") :]
        assert set(re.findall(r"ld\.global\.nc[.\w]*", waited)) <= {"ld.global.nc.f32"}  # scales of weights
        assert "ld.global.v4.u32" in waited


def test_forbidden_patterns_do_find_what_they_name():
    examples = [
        "cp.async.ca.shared.global",
        "ldmatrix.sync.aligned.m8n8.x4",
        "mma.sync.aligned.m16n8k16.row.col",
        "fma.rn.bf16x2",
        "cvt.rn.f16.s32",
        "red.global.add.f32",
    ]
    assert all(re.search(pattern, text) for pattern, text in zip(FORBIDDEN.values(), examples, strict=True))


def test_machine_code_for_a_v100(nvrtc):
    image = builder.build("linear_8.cu", "sm_70").image
    assert image[:4] == b"\x7fELF"
    assert int.from_bytes(image[18:20], "little") == 190  # EM_CUDA
    assert image[48] == 70  # e_flags: the architecture
    assert all(name.encode() in image for name in KERNELS)


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])  # KeyError: as in a container with --user
    with pytest.raises(EnvironmentFault, match="XDG_CACHE_HOME"):
        builder.cache_directory()


def test_second_build_comes_from_the_cache_and_a_damaged_one_does_not(nvrtc):
    first = builder.build("read.cu", "compute_70")
    second = builder.build("read.cu", "compute_70")
    assert (first.cached, second.cached) == (False, True)
    assert second.image == first.image
    assert first.path.is_relative_to(builder.cache_directory())
    content = bytearray(first.path.read_bytes())
    content[len(content) // 2] ^= 1
    first.path.write_bytes(content)
    third = builder.build("read.cu", "compute_70")
    assert not third.cached and third.image == first.image
    assert builder.build("read.cu", "compute_70").cached


@pytest.mark.parametrize("changed", ["read.cu", "decode.cuh"])
def test_a_changed_source_or_header_misses(nvrtc, monkeypatch, tmp_path, changed):
    copy = tmp_path / "csrc"
    shutil.copytree(builder.CSRC, copy)
    monkeypatch.setattr(builder, "CSRC", copy)
    before = builder.build("read.cu", "compute_70")
    name = builder.file_name("read.cu", "compute_70")
    with (copy / changed).open("a") as file:
        file.write("// another byte\n")
    after = builder.build("read.cu", "compute_70")
    assert not after.cached and after.path != before.path
    assert builder.file_name("read.cu", "compute_70") != name


def test_architectures_and_definitions_do_not_share_an_entry(nvrtc):
    plain = builder.build("read.cu", "compute_70")
    assert not builder.build("read.cu", "sm_70").cached
    defined = builder.build("read.cu", "compute_70", ("UNUSED=1",))
    assert not defined.cached and defined.path != plain.path and defined.image == plain.image
    names = {builder.file_name("read.cu", "compute_70", defines) for defines in ((), ("UNUSED=1",))}
    assert len(names) == 2


def test_native_code_is_preferred_and_ptx_is_what_remains(nvrtc, monkeypatch):
    built = []

    def image_for(source, arch, defines):
        built.append(arch)
        return builder.build(source, arch, defines).image

    monkeypatch.setattr(module, "image_for", image_for)
    assert module._first_image("read.cu", ["sm_80", "compute_70"], ())[0] == "sm_80"
    arch, image = module._first_image("read.cu", ["sm_199", "compute_70"], ())
    assert arch == "compute_70" and b".target sm_70" in image
    assert built == ["sm_80", "sm_199", "compute_70"]
    with pytest.raises(EnvironmentFault, match=r"sm_199.*unknown"):
        module._first_image("read.cu", ["sm_199"], ())


@pytest.mark.parametrize("arch", ["", "70", "sm_7", "sm_61", "compute_60", "v100", "sm_70;rm", "sm_70 "])
def test_misspelt_and_older_architectures_are_refused(arch):
    with pytest.raises(InputError, match="a V100 is sm_70"):
        builder.build("read.cu", arch)


def test_an_architecture_nobody_made_is_refused(nvrtc):
    with pytest.raises(InputError, match=r"'sm_77' is unknown to NVRTC 12\.\d+, which knows 70, "):
        builder.build("read.cu", "sm_77")


def test_a_source_that_does_not_compile_shows_the_compilers_words(nvrtc, monkeypatch, tmp_path):
    (tmp_path / "read.cu").write_text("int broken = undeclared;\n")
    monkeypatch.setattr(builder, "CSRC", tmp_path)
    with pytest.raises(EnvironmentFault, match=r'(?s)read\.cu does not compile for sm_70:.*"undeclared" is undefined'):
        builder.build("read.cu", "sm_70")


def test_a_compiler_of_cuda_13_is_refused_for_volta_by_name(monkeypatch):
    compiler = types.SimpleNamespace(version=(13, 0), architectures=[75, 80, 90, 120])
    monkeypatch.setattr(compilers, "load", lambda: compiler)
    with pytest.raises(EnvironmentFault, match=r"NVRTC 13\.0 cannot compile for sm_70: CUDA 13 dropped Volta"):
        builder.build("read.cu", "sm_70")


def test_another_compiler_has_entries_of_its_own(nvrtc, monkeypatch):
    first = builder.build("read.cu", "compute_70")
    monkeypatch.setattr(nvrtc, "version", (12, 4))
    other = builder.build("read.cu", "compute_70")
    assert not other.cached and other.path != first.path
    assert other.path.parent == first.path.parent


def test_a_cache_that_cannot_be_written_is_named(nvrtc, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(EnvironmentFault, match=r"file/duovolt/kernels: Not a directory; .*XDG_CACHE_HOME"):
        builder.build("read.cu", "compute_70")


def test_prebuilt_directory_replaces_the_compiler(nvrtc, one_source, monkeypatch, tmp_path, capsys):
    out = tmp_path / "prebuilt"
    assert main(["kernels", "build", "--arch", "compute_70", "--out", str(out)]) == 0
    (file,) = out.iterdir()
    assert str(file) in capsys.readouterr().out
    monkeypatch.setenv(builder.PREBUILT_VARIABLE, str(out))

    def missing():
        raise EnvironmentFault("NVRTC is missing.")

    monkeypatch.setattr(compilers, "load", missing)
    assert builder.image_for("read.cu", "compute_70") == file.read_bytes()
    with pytest.raises(EnvironmentFault, match=r"build --arch sm_70 --out .*prebuilt\. .*NVRTC is missing"):
        builder.image_for("read.cu", "sm_70")


def test_command_prints_a_line_a_kernel_and_says_when_it_is_cached(nvrtc, one_source, capsys):
    arguments = ["kernels", "build", "--arch", "sm_70", "--arch", "compute_70"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    pattern = r"\w+\.cu  (sm_70|compute_70)  [\d,]+ bytes  \d+\.\d\d s  (compiled|cached)  /\S+"
    assert [re.fullmatch(pattern, line).groups() for line in lines] == [
        ("sm_70", "compiled"),
        ("compute_70", "compiled"),
    ]
    assert main([*arguments, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [(f["source"], f["arch"], f["cached"]) for f in facts] == [
        ("read.cu", "sm_70", True),
        ("read.cu", "compute_70", True),
    ]
    assert all(f["bytes"] > 1_000 for f in facts)
    assert main([*arguments, "--quiet"]) == 0
    assert capsys.readouterr().out == ""


def test_command_refuses_a_bad_architecture(capsys):
    assert main(["kernels", "build", "--arch", "volta"]) == 2
    assert capsys.readouterr().err.startswith("duovolt: architecture 'volta'")
