"""What a newcomer does: installs the wheel into an empty environment and follows the quickstart.

python tools/newcomer.py [FOLDER]     FOLDER, empty or absent, gets the environment

Every block of docs/quickstart.md runs in order, in one program, far from this repository. Fails
where a block, a command or the installation does.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else scratch).absolute()
        python, clean = folder / "venv" / "bin" / "python", {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}

        def run(*command: object) -> None:
            print("$", *command, flush=True)
            subprocess.run(list(map(str, command)), cwd=folder, env=clean, check=True)

        folder.mkdir(parents=True, exist_ok=True)
        run(sys.executable, "-m", "pip", "--quiet", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, ROOT)
        (wheel,) = folder.glob("tilewright-*.whl")
        run(sys.executable, "-m", "venv", folder / "venv")
        run(python, "-m", "pip", "--quiet", "install", "-c", ROOT / "constraints.txt", f"{wheel}[cuda]")
        program = folder / "quickstart.py"
        program.write_text("\n\n".join(re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "quickstart.md").read_text(), re.DOTALL | re.MULTILINE)))
        run(python, program)
        run(python, "-m", "tilewright", "--version")
        run(folder / "venv" / "bin" / "tilewright", "doctor")
    return 0


if __name__ == "__main__":
    sys.exit(main())
