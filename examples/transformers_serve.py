"""`transformers serve` with our kernels in each model that it loads. Runs on a CPU too.

python examples/transformers_serve.py FOLDER [--port 8000] [--continuous-batching]

The options are those of `transformers serve`, whose own server this is; it needs transformers'
extra `serving` and accelerate. `tilewright serve` is ours (docs/serving.md).
"""

import sys
from typing import Any

from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.transformers import app

import tilewright


def main() -> None:
    theirs = ModelManager._load_model

    def load_and_patch(self: ModelManager, *args: Any, **more: Any) -> Any:
        model = theirs(self, *args, **more)
        print(tilewright.patch(model), file=sys.stderr)
        return model

    ModelManager._load_model = load_and_patch
    try:
        app(["serve", *sys.argv[1:]])
    except ImportError as missing:  # of transformers' extra
        sys.exit(str(missing))


if __name__ == "__main__":
    main()
