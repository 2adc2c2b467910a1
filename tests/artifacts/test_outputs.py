"""Every file that a run writes has a name of its own, and may be written."""

from dataclasses import replace
from pathlib import Path

import pytest

from ltx2_cli.artifacts.files import Output
from ltx2_cli.artifacts.outputs import (
    Product,
    check_outputs,
    latents_paths,
    output_paths,
    outputs,
    read_files,
    run_file,
    slug,
    with_free_names,
)
from ltx2_cli.errors import UsageError
from ltx2_cli.request.profiles import read_spec
from ltx2_cli.request.spec import RunSpec


def check(spec: RunSpec, force: bool) -> None:
    check_outputs([*outputs(spec), run_file(spec)], read_files(spec), force)


def spec(**keys: object) -> RunSpec:
    return read_spec({"prompt": "rain", "model": "demo", "seed": 7, **keys})


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ({}, ["out/rain-demo-s7.mp4"]),
        ({"model_name": None}, ["out/rain-s7.mp4"]),
        ({"model_name": None, "base_output_directory": "a/b"}, ["a/b/rain-s7.mp4"]),
        ({"base_output_directory": None}, ["rain-demo-s7.mp4"]),
        ({"num_videos": 2, "width": 64}, ["out/rain-demo-s7.mp4", "out/rain-demo-s8.mp4"]),
        ({"output": "a/clip.mp4"}, ["a/clip.mp4"]),
        ({"output": "a/clip.mp4", "num_videos": 2}, ["a/clip-s7.mp4", "a/clip-s8.mp4"]),
        ({"output": "a/clip.mp4", "seed": None}, ["a/clip.mp4"]),
        ({"model_name": "..a b ltx2.3"}, ["out/rain-a-b-ltx2.3-s7.mp4"]),
        ({"prompt": "雨", "model_name": None}, ["out/雨-s7.mp4"]),
    ],
)
def test_video_names(keys: dict, names: list[str]):
    assert list(map(str, output_paths(spec(**keys)))) == names


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        ("A fox yawns at dawn in tall grass, birdsong, a distant train", "a-fox-yawns-at-dawn-in-tall-grass"),
        ("a fox's Café/../..\\\0\n: *?", "a-foxs-café"),
        ("../../etc/passwd", "etc-passwd"),
        ("-rf ~ $(ls)", "rf-ls"),
        ("x" * 1000, "x" * 40),
        ("y " * 10**6, "-".join("y" * 20)),
        ("一只狐狸", "一只狐狸"),
        ("Größer als ein Straußenei 🦊", "größer-als-ein-straußenei-fox-face"),
        ("🦊🦊", "fox-face-fox-face"),
        ("雨" * 100, "雨" * 40),
        ("… !", ""),
    ],
)
def test_a_slug_is_a_valid_name_on_any_file_system(prompt: str, name: str):
    assert slug(prompt) == name


def test_taken_automatic_names_get_a_number(tmp_path: Path):
    asked = spec(base_output_directory=str(tmp_path))
    names = ["rain-demo-s7.mp4", "rain-demo-s7-2.mp4", "rain-demo-s7-3.mp4", "rain-demo-s7-4.mp4"]
    for name in names:
        (path,) = output_paths(with_free_names(asked, Product.clips))
        assert path == tmp_path / name
        (path.with_suffix(".yaml") if name.endswith("2.mp4") else path).touch()
    several = with_free_names(replace(asked, seed=(6, 7)), Product.clips)
    assert [path.name for path in output_paths(several)] == ["rain-demo-2-s6.mp4", "rain-demo-2-s7.mp4"]
    assert with_free_names(asked, Product.drafts) is asked
    assert with_free_names(replace(asked, output="a.mp4"), Product.clips).output == "a.mp4"


def test_the_automatic_name_of_an_unfinished_run_is_refused(tmp_path: Path):
    asked = spec(base_output_directory=str(tmp_path))
    for name in ("rain-demo-s7.run", "rain-demo-s7.mp4"):
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match=r"rain-demo-s7.run is an unfinished run"):
        check(with_free_names(asked, Product.clips), force=False)


@pytest.mark.parametrize(
    ("product", "names"),
    [
        (Product.clips, ["c-s1.mp4", "c-s1.yaml", "c-s2.mp4", "c-s2.yaml", "l-s1.st", "l-s2.st"]),
        (Product.latents, ["l-s1.st", "l-s2.st"]),
        (Product.drafts, ["l-s1.st", "l-s2.st", "l.png"]),
    ],
)
def test_outputs_lists_all_files_of_a_run(product: Product, names: list[str]):
    asked = spec(output="c.mp4", save_latents="l.st", seed=[1, 2])
    assert [str(path) for path, _ in outputs(asked, product)] == names


def test_latents_names():
    assert latents_paths(spec()) == []
    assert latents_paths(spec(save_latents="a/l.safetensors")) == [Path("a/l.safetensors")]
    several = latents_paths(spec(save_latents="a/l.safetensors", num_videos=2))
    assert several == [Path("a/l-s7.safetensors"), Path("a/l-s8.safetensors")]


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({}, "out/rain-demo-s7.run"),
        ({"output": "a/c.mp4", "save_latents": "l.st"}, "a/c.run"),
        ({"save_latents": "a/l.st", "seed": [7, 9]}, "a/l-s7.run"),
    ],
)
def test_run_file_names(keys: dict, name: str):
    assert str(run_file(spec(**keys)).path) == name


def test_an_unfinished_run_is_restarted_only_with_force(tmp_path: Path):
    asked = spec(output=str(tmp_path / "clip.mp4"))
    (tmp_path / "clip.run").touch()
    with pytest.raises(UsageError, match=r"clip.run is an unfinished run") as refused:
        check(asked, force=False)
    assert "ltx2 resume" in refused.value.hint
    check(asked, force=True)


@pytest.mark.parametrize("taken", ["clip.mp4", "clip.yaml", "latents.safetensors"])
def test_existing_files_are_overwritten_only_with_force(taken: str, tmp_path: Path):
    asked = spec(output=str(tmp_path / "clip.mp4"), save_latents=str(tmp_path / "latents.safetensors"))
    check(asked, force=False)
    (tmp_path / taken).write_text("mine")
    with pytest.raises(UsageError, match=f"{taken} exists"):
        check(asked, force=False)
    check(asked, force=True)


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("file/clip.mp4", "cannot write {}: Not a directory"),
        ("file/new/clip.mp4", "cannot write {}: Not a directory"),
        ("folder.mp4", "{} is a folder"),
        ("a" * 300 + ".mp4", "cannot write {}: File name too long"),
        ("new/" + "a" * 300 + ".mp4", "cannot write {}: File name too long"),
        ("a" * 300 + "/clip.mp4", "cannot write {}: File name too long"),
        ("nowhere/clip.mp4", "cannot write {}: No such file or directory"),
    ],
)
@pytest.mark.parametrize(("key", "option"), [("output", "-o FILE"), ("save_latents", "--save-latents FILE")])
def test_unwritable_paths_are_refused(place: str, reason: str, key: str, option: str, tmp_path: Path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.mp4").mkdir()
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UsageError) as caught:
        check(spec(**{"output": str(tmp_path / "a.mp4"), key: str(tmp_path / place)}), force=True)
    assert str(caught.value) == reason.format(tmp_path / place)
    assert option in caught.value.hint
    assert sorted(tmp_path.iterdir()) == before


def test_input_files_are_never_overwritten(tmp_path: Path):
    (tmp_path / "c.yaml").write_text("prompt: mine")
    (tmp_path / "link").symlink_to(tmp_path)
    asked = spec(output=str(tmp_path / "link" / "c.mp4"))
    with pytest.raises(UsageError, match=r"link/c.yaml is read, and would be overwritten") as refused:
        check_outputs(outputs(asked), [tmp_path / "c.yaml"], force=True)
    assert refused.value.hint == "name another: -o FILE"


def test_a_link_to_itself_is_there(tmp_path: Path):
    (tmp_path / "l.mp4").symlink_to(tmp_path / "l.mp4")
    with pytest.raises(UsageError, match=r"l\.mp4 exists"):
        check_outputs([Output(tmp_path / "l.mp4", "-o")])


def test_a_file_and_a_folder_of_one_name_are_refused(tmp_path: Path):
    files = [Output(tmp_path / "a.mp4", "-o")]
    with pytest.raises(UsageError, match=r"a.mp4 is named for two things"):
        check_outputs(files, folders=[Output(tmp_path / "a.mp4", "--profile")])


def test_checking_outputs_creates_no_folders(tmp_path: Path):
    check(spec(output=str(tmp_path / "new" / "a.mp4"), save_latents=str(tmp_path / "b" / "l")), force=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "keys",
    [
        {"output": "c.mp4", "save_latents": "c.mp4"},
        {"output": "c.mp4", "save_latents": "c.yaml"},
        {"output": "c.mp4", "save_latents": "there/../c.mp4"},
        {"output": "c.mp4", "save_latents": "link/c.yaml"},
        {"output": "c.mp4", "save_latents": "c.mp4", "num_videos": 2},
        {"output": "c.mp4", "save_latents": "c.run"},
        {"save_latents": "out/rain-demo-s7.yaml"},
    ],
    ids=str,
)
def test_outputs_of_a_run_may_not_overwrite_each_other(keys: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("noise", "noise.yaml"):
        (tmp_path / name).write_text("")
    with pytest.raises(UsageError, match="is named for two things"):
        check(spec(**keys), force=True)


@pytest.mark.parametrize(
    "keys",
    [
        {"initial_noise": "noise", "save_latents": "noise"},
        {"initial_noise": "~/noise", "save_latents": "noise"},
        {"output": "noise.mp4", "initial_noise": "noise.yaml"},
        {"output": "noise.mp4", "sharding": "./noise.yaml"},
    ],
    ids=str,
)
def test_outputs_of_a_run_may_not_overwrite_its_inputs(keys: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "noise").write_text("")
    (tmp_path / "noise.yaml").write_text("extends: single")
    with pytest.raises(UsageError, match="is read, and would be overwritten"):
        check(spec(**{"output": "c.mp4", **keys}), force=True)
