"""Files of the cache folder that another program made: ignored, or one error that names them."""

import gzip
import json
import multiprocessing
import os
import resource

import pytest

from tilewright.compile import Compiled, Resources, ResultCache
from tilewright.engine import modes
from tilewright.launch import table
from tilewright.tune import raw

RESULT = Compiled(Resources(8, 0, 0, 1024, {}))
DEEP = b'{"x":' + b"[" * 500_000


@pytest.mark.parametrize("content", [DEEP, b"{", b"\xff", b"3", b'{"mode": "mega"}', b'{"mode": "mega", "keys": "a", "time_us": null}', b"[]"])
def test_a_broken_table_of_modes_is_one_warning(content, monkeypatch, tmp_path):
    """Every engine on a GPU failed for it."""
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    modes.own_table().write_bytes(content)
    with pytest.warns(UserWarning, match=r"modes\.jsonl must be a file of measured modes"):
        assert modes.own_rows() == []
    modes.own_table().unlink()
    assert modes.own_rows() == []


def test_raw_times_that_are_no_rows_are_named(tmp_path):
    log = raw.Log(tmp_path, "H200", "rms_norm").path
    log.parent.mkdir(parents=True)
    log.write_bytes(DEEP + b"\n")
    with pytest.raises(ValueError, match=r"rms_norm\.jsonl:1 must be a row of raw times"):
        raw.read(tmp_path, "H200", "rms_norm")
    log.unlink()
    packed = log.with_suffix(".jsonl.gz")
    for content in (gzip.compress(b"{}" * 1000)[:-12], b"", b"no gzip", gzip.compress(b"{}")[:10] + b"\xff" * 20):
        packed.write_bytes(content)
        if content:
            with pytest.raises(ValueError, match=r"rms_norm\.jsonl\.gz must be a whole gzip file"):
                raw.read(tmp_path, "H200", "rms_norm")


@pytest.mark.parametrize("field", ["time_us", "default_us", "runner_up_us"])
@pytest.mark.parametrize("time", [0.0, -5.0])
def test_times_that_are_none_are_named(field, time, tmp_path):
    """`tune --show` divided by zero from then on, or took the logarithm of a negative ratio."""
    row = {**json.loads((table.SHIPPED / "H200.json").read_bytes())[0], field: time}
    (tmp_path / "edited.json").write_text(json.dumps([row]))
    with pytest.raises(ValueError, match=rf"edited\.json must hold a JSON list of tuned problems, .* > 0.0 - at `\$\[0\]\.{field}`"):
        table.read_rows(tmp_path / "edited.json")
    log = raw.Log(tmp_path, "H200", "rms_norm").path
    log.parent.mkdir(parents=True)
    log.write_text(json.dumps({"p": {}, "c": {}, "k": "", "v": "", "t": time}) + "\n")
    with pytest.raises(ValueError, match=r"rms_norm\.jsonl:1 must be a row of raw times, got one that does not decode: .* > 0\.0"):
        raw.read(tmp_path, "H200", "rms_norm")


def _compiles_on_a_full_disk(cache, job) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
    cache.put(job, RESULT)


def test_a_result_is_written_through_no_link_and_a_full_disk_keeps_no_part(monkeypatch, tmp_path):
    cache, path = ResultCache(tmp_path / "cache"), tmp_path / "cache" / "x.json"
    monkeypatch.setattr(cache, "_path", lambda job: path)
    part, precious = path.with_suffix(f".{os.getpid()}.part"), tmp_path / "precious"
    path.parent.mkdir()
    precious.write_bytes(b"mine")
    for make in (lambda: part.symlink_to(precious), lambda: os.mkfifo(part)):
        make()
        cache.put(None, RESULT)
        assert (cache.get(None).resources, precious.read_bytes()) == (RESULT.resources, b"mine")
    path.write_bytes(DEEP)
    assert cache.get(None) is None
    path.unlink()
    child = multiprocessing.get_context("fork").Process(target=_compiles_on_a_full_disk, args=(cache, None))
    child.start()
    child.join(20)
    assert child.exitcode == 0
    assert list(path.parent.iterdir()) == []
