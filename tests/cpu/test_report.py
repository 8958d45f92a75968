"""The page of `tilewright report`: complete, self-contained, right numbers, drawn in light and
dark.
"""

import json
import os
import re
import shutil
import subprocess
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from tilewright.bench import figures, results
from tilewright.bench.page import report_command

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))
CEILINGS = {"copy_gbs": 4200.0, "read_gbs": 4600.0, "tflops": 780.0, "launch_us": 1.0}


def row(case="rows=1 cols=2 bfloat16", time_us=10.0, **changes):
    plain = {
        "op": "rms_norm", "case": case, "problem": {"rows": 1, "cols": 2, "dtype": "bfloat16"}, "dtype": "bfloat16", "gpu": "H200",
        "time_us": time_us, "spread_us": 0.1, "gbs": 100.0, "tflops": 1.0, "roof_pct": 50.0, "bound": "memory",
        "peers": {"torch.eager": 2.0}, "absent": {}, "ceilings": CEILINGS, "versions": {"torch": "2.11"}, "date": "2026-11-21",
        "source": "default", "clocks": "1980 MHz",
    }  # fmt: skip
    return plain | changes


def written(path: Path, *rows) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


class Balance(HTMLParser):
    """Fails on a wrongly nested tag. Keeps the names of tags and attributes that load something."""

    VOID = ("meta", "br", "hr", "img", "link", "input")

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.loads = [], set(), []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href", "xlink:href", "data") and not (value or "").startswith("#")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    start = time.process_time()
    report_command(COMMITTED, out=folder)
    return folder, time.process_time() - start


def test_the_committed_results_make_a_page_in_less_than_20_seconds(committed):
    folder, seconds = committed
    assert seconds < 20
    names = {path.name for path in folder.iterdir()}
    assert {"index.html", "roofline.png", "peers.png", "attention.png", "decode.png", "sizes.png", "platforms.png"} <= names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.glob("*.png"))


def test_the_page_is_well_formed_self_contained_and_has_no_script(committed):
    text = (committed[0] / "index.html").read_text()
    parser = Balance()
    parser.feed(text)
    assert parser.open == []
    assert "script" not in parser.tags
    assert parser.loads == []
    assert "url(http" not in text
    assert "#0a0b0" not in text, "placeholders of the drawings' inks must be the page's colours"
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids)), "two drawings share an id"
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(ids)
    assert '<meta name="viewport"' in text
    assert "prefers-color-scheme: dark" in text
    for part in ("Roofline", "Platforms", "DGX Spark", "B300", ">published<", ">measured<", "torch.compile", "not measured yet"):
        assert part in text


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The page of a few rows of two ops and of a model."""
    folder = tmp_path_factory.mktemp("small")
    new = [row("a", peers={"torch.eager": 4.0}), row("b", 20.0, peers={"torch.eager": 1.0}, warm_us=7.7), row("<c&>", clocks="1755..1980 MHz, 612 W")]
    shares = [row(case, roof_pct=share, op="rope") for case, share in zip("abcd", (10.0, 30.0, 51.0, 90.0), strict=True)]
    model = {
        "op": "generate", "case": "Qwen2-7B batch=16 prompt=32 new=50 mode=graph", "problem": {}, "gpu": "H200", "date": "2026-11-21",
        "tokens_per_s": 2500.0, "ttft_ms": 11.0, "tpot_ms": 6.4, "floor_pct": 49.0, "memory_gb": 17.5, "time_us": 6400.0,
        "peers": {"transformers": 1.2},
    }  # fmt: skip
    report_command([written(folder / "r.jsonl", *new, *shares, model)], out=folder / "out", console=Console(quiet=True))
    return (folder / "out" / "index.html").read_text()


def test_numbers_on_the_page_are_those_of_the_rows(small):
    text = small
    assert 'torch.eager <span class="good">2.00x</span>' in text  # geomean of 4, 1, 2
    for part in ("7.7", "1755..1980 MHz, 612 W", "&lt;c&amp;&gt;"):
        assert part in text
    assert "<c&>" not in text


def test_the_median_of_an_even_count_is_the_mean_of_the_middle_two(small):
    assert "<td>40 %" in re.sub(r"<td[^>]*>", "<td>", small)


def test_changes_fall_into_three_zones_by_time_and_spread():
    new = [row("a", 10.0), row("b", 10.0), row("c", 10.0), row("d", 10.0, spread_us=1.0), row("e", 10.0)]
    old = [row("a", 11.0), row("b", 10.2), row("c", 9.0), row("d", 11.0, spread_us=1.0), row("x", 1.0)]
    keyed = [[r | {"key": (r["op"], r["case"], r["gpu"])} for r in rows] for rows in (new, old)]
    zones = {change.row["case"]: change.zone for change in results.changes(*keyed)}
    assert zones == {"a": "faster", "b": "same", "c": "slower", "d": "same"}
    assert next(iter(zones)) == "c", "slowest first"


def test_a_newer_file_is_compared_with_what_it_replaces_or_with_the_file_named(tmp_path, monkeypatch):
    old, new = written(tmp_path / "1.jsonl", row("a", 20.0), row("b", 10.0)), written(tmp_path / "2.jsonl", row("a", 10.0), row("b", 10.1))
    for options in ({"paths": [old, new]}, {"paths": [new], "against": [old]}):
        report_command(out=tmp_path / "out", console=Console(quiet=True), **options)
        text = (tmp_path / "out" / "index.html").read_text()
        assert "0 slower, 1 same, 1 faster" in text
        assert (tmp_path / "out" / "regression.png").exists()
        assert '<span class="good">2.00x</span>' in text
        monkeypatch.setattr(figures, "png", lambda drawing: b"")  # they are the same again


def test_whole_models_have_their_own_table(small):
    assert "Whole models" in small
    assert "2,500.0" in small
    for figure in ("257.3 tokens/s", "51,151 ms", "13.9x", ">0.125<"):
        assert figure in small, "the published figure stands beside it"


@pytest.mark.parametrize("content", ["", "{}\n", "[\n", "[" * 100_000, '{"op": "x", "case": "y"}\n'], ids=range(5))
def test_a_file_that_holds_no_rows_is_an_error(tmp_path, content):
    file = tmp_path / "r.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"r\.jsonl:1 must be a result row|must hold at least one row"):
        report_command([file], out=tmp_path / "out")


def test_cases_too_small_for_the_roofline_have_a_page(tmp_path):
    """One token of argmax was `Data cannot be log-scaled because all values are <= 0`."""
    assert report_command([written(tmp_path / "r.jsonl", row(op="argmax", gbs=154.7, tflops=0.04))], out=tmp_path / "out") == 0
    assert "argmax" in (tmp_path / "out" / "index.html").read_text()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"problem": None}, "object`, got `null` - at `$.problem`"),
        ({"time_us": float("nan")}, "float` > 0.0 - at `$.time_us`"),
        ({"gbs": "fast"}, "Expected `float`, got `str` - at `$.gbs`"),
        ({"tflops": float("inf")}, "at `$.tflops`"),
        ({"op": {}}, "Expected `str`, got `object` - at `$.op`"),
        ({"gpu": -1}, "Expected `str`, got `int` - at `$.gpu`"),
        ({"versions": 2.5}, "Expected `object`, got `float` - at `$.versions`"),
        ({"date": None}, "Expected `str`, got `null` - at `$.date`"),
        ({"peers": {"torch.eager": 0}}, "at `$.peers[...]`"),
        ({"ceilings": {"tflops": 780.0}}, "missing required field `copy_gbs` - at `$.ceilings`"),
    ],
)
def test_a_field_that_is_no_field_of_a_row_is_named(change, named, tmp_path):
    """`error: problem` named none, `unhashable type` no line, and versions that are a number were a
    traceback.
    """
    file = written(tmp_path / "r.jsonl", row(), row(**change))
    with pytest.raises(ValueError, match=rf"r\.jsonl:2 must be a result row with op, case and gpu: .*{re.escape(named)}"):
        report_command([file], out=tmp_path / "out")


def test_a_file_without_an_end_is_refused(tmp_path):
    """A device took all memory, and a FIFO waited for ever."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "bytes").write_bytes(b"\xff")
    for path, error in ((Path("/dev/zero"), "got a device"), (tmp_path / "fifo", "got a FIFO"), (tmp_path / "bytes", "bytes:1 must be a result row")):
        with pytest.raises((OSError, ValueError), match=error):
            report_command([path], out=tmp_path / "out")


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 1200), ("light", 500)])
def test_a_browser_draws_the_page(committed, tmp_path, scheme, width):
    from matplotlib.image import imread

    shot = tmp_path / "shot.png"
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    options += [f"--window-size={width},1600", f"--screenshot={shot}"] + (["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else [])
    done = subprocess.run([BROWSER, *options, f"file://{committed[0] / 'index.html'}"], capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    pixels = imread(shot)[..., :3]
    assert (pixels.mean() < 0.4) == (scheme == "dark")
    assert pixels.std() > 0.05, "a blank page"
    coloured = (pixels.max(-1) - pixels.min(-1) > 0.3).sum()
    assert coloured > 2000, "no drawing"


def test_a_ladder_is_drawn_step_by_step_beside_its_best_peer():
    steps = (("naive", 100.0, 0.25), ("8 warps", 400.0, 1.0))
    rows = [
        {
            "case": f"m=8 step={step}",
            "tflops": rate,
            "peers": {"cublas": ratio, "slow": 4 * ratio, "ops.matmul": ratio / 2},
            "gpu": "H200",
            "date": "now",
        }
        for step, rate, ratio in steps
    ]
    text = figures.svg(figures.ladder_bars(rows), "ladder")
    for shown in ("naive", "8 warps", "cublas, 400", "TFLOP/s on H200, now"):
        assert shown in text
    assert "ops.matmul" not in text


def test_legends_of_many_names_are_whole():
    rows = results.kernels(results.newest(results.read(COMMITTED)))
    for draw in (figures.roofline, figures.decode_curves, figures.size_curves):
        drawing = draw(rows)
        drawing.canvas.draw()
        (legend,) = drawing.legends
        assert legend.get_window_extent().y0 >= 0, draw.__name__


def test_a_run_without_the_fastest_library_replaces_no_row():
    def row(us, op="mla_decode", **peers):
        return {"key": (op, "case", "H200"), "op": op, "time_us": us, "peers": peers, "absent": {}}

    with_library, without, refused = row(3, flashinfer=0.7, cublas=2.0), row(2, cublas=3.0), {**row(1, cublas=4.0), "absent": {"flashinfer": "no"}}
    assert results.newest([with_library, without]) == [with_library]
    assert results.replaced([with_library, without]) == []
    assert results.replaced([with_library, without, refused]) == [with_library]
    assert results.newest([with_library, without, refused]) == [refused]
    assert results.newest([row(3, "generate", eager=2.0), row(2, "generate")]) == [row(2, "generate")]
