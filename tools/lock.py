"""Makes requirements/*.lock and constraints.txt: `pip install uv && python tools/lock.py`.

The locks pin everything that `make` installs, for any platform, with the hash of each file.
Versions stay as they are where pyproject.toml still allows them; `--upgrade` takes the newest ones.

torch comes as several builds and has two locks of its own: PyPI's build with the packages of CUDA
that only it asks for, and the CPU build that the suite runs with. PyPI does not have the latter.
"""

import argparse
import re
import subprocess
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "requirements"
CONSTRAINTS = ROOT / "constraints.txt"
EXTRAS = {"demo": ("cuda", "models"), "test": ("cuda", "models", "serve", "bench", "dev")}
# torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl. Another version of torch needs its file's
# hash here.
CPU_TORCH = "torch==2.13.0+cpu", "sha256:6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"
HEADER = "# Made by tools/lock.py. "
SAYS = {
    "demo": "What `make demo` installs beside torch.",
    "test": "What `make test` installs beside torch.",
    "site": "What `make site` installs beside what `make test` does.",
    "torch": "PyPI's build of torch, and what it needs beside the packages of the other locks.",
    "torch-cpu": "The CPU build of torch that the suite runs with.",
}


def compiled(requirements: list[str], *options: str, known: str = "") -> dict[str, str]:
    """What uv chooses: name -> its lines in a lock. known: versions to prefer."""
    with tempfile.TemporaryDirectory() as folder:
        asked, out = Path(folder, "asked.in"), Path(folder, "out.lock")
        asked.write_text("\n".join(requirements))
        out.write_text(known)
        command = ["uv", "pip", "compile", "--universal", "--python-version=3.11", "--generate-hashes", "--no-annotate", "--no-header", "--quiet"]
        subprocess.run([*command, *options, str(asked), "-o", str(out)], check=True)
        blocks: dict[str, str] = {}
        for block in re.split(r"\n(?=\S)", out.read_text().strip()):
            name = block.partition("==")[0]
            blocks[name] = f"{blocks[name]}\n{block}" if name in blocks else block  # networkx has a version for each Python
    return blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that pyproject.toml allows")
    upgrade = parser.parse_args().upgrade
    known = "" if upgrade or not CONSTRAINTS.exists() else CONSTRAINTS.read_text()
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, build = pyproject["project"], pyproject["build-system"]["requires"]
    extras = project["optional-dependencies"]

    def wanted(which: str) -> list[str]:
        return [*project["dependencies"], *build, *(one for extra in EXTRAS[which] for one in extras[extra])]

    everything = compiled(wanted("test"), known=known)
    pins = [line.rstrip(" \\") for block in everything.values() for line in block.splitlines() if "==" in line and not line.startswith(" ")]
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    if CPU_TORCH[0] != f"{torch}+cpu":
        raise ValueError(f"CPU_TORCH in tools/lock.py must be {torch}+cpu with its hash, got {CPU_TORCH[0]}")
    with_torch = compiled([torch], known="\n".join(pins))
    without = compiled([one for one in wanted("test") if not one.startswith("torch")], known="\n".join(pins))
    of_cuda = {name for name in with_torch if re.match("nvidia-|cuda-|triton", name)} - set(without)
    demo = compiled(wanted("demo"), known="\n".join(pins))
    model = compiled(extras["demo"], "--no-deps")
    beside = compiled(extras["site"], known="\n".join(pins))
    locks = {
        "demo": {name: everything[name] for name in demo if name not in of_cuda | {"torch"}} | model,
        "test": {name: block for name, block in everything.items() if name not in of_cuda | {"torch"}},
        "site": {name: block for name, block in beside.items() if everything.get(name) != block},  # one that the others ask for on Windows only
        "torch": {name: everything[name] for name in of_cuda | {"torch"}},
        "torch-cpu": {"torch": " \\\n    --hash=".join(CPU_TORCH)},
    }
    FOLDER.mkdir(exist_ok=True)
    for name, blocks in locks.items():
        (FOLDER / f"{name}.lock").write_text("\n".join([HEADER + SAYS[name], *(blocks[one] for one in sorted(blocks))]) + "\n")
    users = [pin for pin in pins if pin.partition("==")[0] not in of_cuda]
    CONSTRAINTS.write_text("\n".join([f"{HEADER}Versions the suite was last green with: pip install -c constraints.txt ...", *users]) + "\n")


if __name__ == "__main__":
    main()
