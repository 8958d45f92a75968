"""What is shipped and what is installed: archives that are the same bytes when built again, data
with a source, locks that match pyproject.toml.
"""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src/tilewright"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
LOCKS = sorted((ROOT / "requirements").glob("*.lock"))
LOCKED = {"demo": ("cuda", "models"), "test": ("cuda", "models", "serve", "bench", "dev")}


def shipped() -> list[str]:
    """The files of the package, relative to src."""
    files = [path.relative_to(ROOT / "src").as_posix() for path in PACKAGE.rglob("*") if path.is_file()]
    return sorted(name for name in files if "__pycache__" not in name)


def built(source: Path, out: Path) -> tuple[Path, Path]:
    """The sdist and the wheel of a folder."""
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(out)], cwd=source, check=True, capture_output=True)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """Built from here, and once more from the first sdist: another folder, other times, no git."""
    folder = tmp_path_factory.mktemp("package")
    first = built(ROOT, folder / "first")
    with tarfile.open(first[0]) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # Python 3.11.2 has none
    (source,) = folder.glob("tilewright-*")
    for path in source.rglob("*"):
        path.touch()
    return first, built(source, folder / "second")


def test_building_again_gives_the_same_bytes(archives):
    for one, two in zip(*archives, strict=True):
        assert one.name == two.name
        assert sha256(one.read_bytes()).hexdigest() == sha256(two.read_bytes()).hexdigest(), f"{one.name} differs when it is built again"


def test_the_wheel_holds_the_package_with_its_data_and_nothing_else(archives):
    with zipfile.ZipFile(archives[0][1]) as wheel:
        names = [name for name in wheel.namelist() if ".dist-info/" not in name]
        licenses = {Path(name).name for name in wheel.namelist() if ".dist-info/licenses/" in name}
    assert sorted(names) == shipped()
    assert licenses == {"LICENSE", "NOTICE"}


def test_the_sdist_holds_docs_tests_locks_and_tools(archives):
    with tarfile.open(archives[0][0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    for pattern in ("docs/*.md", "tests/**/*.py", "requirements/*.lock", "tools/*.py", "benchmarks/results/*", "NOTICE", "Makefile"):
        wanted = {path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern)}
        assert wanted, pattern
        assert wanted <= names, f"missing: {sorted(wanted - names)[:5]}"
    assert {f"src/{name}" for name in shipped()} <= names


def test_every_shipped_datum_has_a_source_in_the_notice():
    patterns = re.findall(r"^  (\S+/\S+)", (ROOT / "NOTICE").read_text(), re.MULTILINE)
    for pattern in patterns:
        assert list(ROOT.glob(pattern)), f"NOTICE names {pattern}, which is not there"
    named = {path for pattern in patterns for path in ROOT.glob(pattern)}
    data = {ROOT / "src" / name for name in shipped() if not name.endswith((".py", "py.typed"))}
    assert data - named == set()


def pins(lock: Path) -> dict[str, str]:
    """The versions of a lock by name; the last one, of a name with several."""
    return dict(re.findall(r"^([\w.-]+)==([\w.+-]+)", lock.read_text(), re.MULTILINE))


@pytest.mark.parametrize("lock", LOCKS, ids=lambda p: p.stem)
def test_every_pin_of_a_lock_has_a_hash(lock):
    blocks = re.split(r"\n(?=\S)", lock.read_text().strip())[1:]
    assert blocks
    for block in blocks:
        assert re.search(r"==\S+.*\\\n    --hash=sha256:[0-9a-f]{64}\b", block), block.splitlines()[0]


@pytest.mark.parametrize("which", LOCKED)
def test_locks_meet_what_the_project_asks_for(which):
    project = PYPROJECT["project"]
    asked = [*project["dependencies"], *PYPROJECT["build-system"]["requires"], *(one for extra in LOCKED[which] for one in EXTRAS[extra])]
    found = pins(ROOT / f"requirements/{which}.lock") | pins(ROOT / "requirements/torch.lock")
    for requirement in map(Requirement, asked):
        version = found.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement} is not in {which}.lock: python tools/lock.py"
        assert requirement.specifier.contains(version), f"{which}.lock has {version}, pyproject.toml asks for {requirement}: python tools/lock.py"


def test_the_constraints_of_users_are_the_versions_of_the_locks():
    users = pins(ROOT / "constraints.txt")
    for lock in LOCKS:
        for name, version in pins(lock).items():
            if name in users and lock.stem != "torch-cpu":
                assert users[name] == version, f"{name}: constraints.txt has {users[name]}, {lock.name} {version}"
    missing = set(pins(ROOT / "requirements/test.lock")) - set(users)
    assert not missing


def test_the_image_is_made_of_files_and_extras_that_there_are():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert copied
    assert all((ROOT / name).exists() for name in copied)
    assert {"pyproject.toml", "src", "constraints.txt"} <= set(copied)
    (asked,) = re.findall(r"'\.\[([\w,]+)\]'", "\n".join(lines))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(asked.split(",")) <= set(extras)
