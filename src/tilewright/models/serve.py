"""`tilewright serve`: transformers' OpenAI server in front of one model on our kernels."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..launch import argument_error
from .load import Loaded
from .patch import patch


@contextmanager
def serving(
    loaded: Loaded,
    *,
    host: str = "localhost",
    port: int = 8000,
    max_batch_tokens: int | None = None,
    cache_pages: int | None = None,
) -> Iterator[Any]:
    """Patches a model and serves it while the block runs; its end undoes both.

    Args:
        loaded: a model with its tokenizer. Requests name it as `served_name(loaded)`.
        host, port: where to listen; port 0 takes a free one.
        max_batch_tokens: tokens of a step, over all requests; default 8192.
        cache_pages: pages of 256 tokens for all requests together; default: what the memory allows.
    Returns: transformers' `Serve`; its `server` is uvicorn's.
    Raises: ImportError: the packages of a server are missing. ValueError: the model has no
        tokenizer, or is none that `patch` knows.
    """
    if loaded.tokenizer is None:
        raise argument_error("model", "one with a tokenizer", loaded.source)
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise ImportError("a server needs fastapi, uvicorn and openai: pip install 'tilewright[serve]'")
    from transformers.cli.serve import Serve
    from transformers.cli.serving import model_manager

    room: Any = model_manager

    class OneModel(model_manager.ModelManager):
        """Returns the model that is already loaded."""

        def _load_model(self, *args: Any, **options: Any) -> Any:
            return loaded.model

        def _load_processor(self, *args: Any, **options: Any) -> Any:
            return loaded.tokenizer

        def get_gen_models(self) -> list[dict[str, Any]]:  # type: ignore[override]
            return [{"id": served_name(loaded), "object": "model", "created": 0, "owned_by": "tilewright"}]

    limits: dict[str, Any] = {"cb_max_batch_tokens": max_batch_tokens, "cb_num_blocks": cache_pages}
    stock = room.ModelManager
    with patch(loaded.model):
        room.ModelManager = OneModel  # Serve looks its class up when it is made, and takes none as an argument
        try:
            running = Serve(served_name(loaded), continuous_batching=True, host=host, port=port, non_blocking=True, **limits)
        finally:
            room.ModelManager = stock
        try:
            while not running.server.started:
                running._thread.join(0.05)
                if not running._thread.is_alive():
                    raise argument_error("host and port", "free to listen on", f"{host}:{port}")
            yield running
        finally:
            running.kill_server()


def served_name(loaded: Loaded) -> str:
    """What requests call the model: the name of its folder or file."""
    return Path(loaded.source).name


def serve_command(loaded: Loaded, **options: Any) -> int:
    """Serves until Ctrl-C. options: those of `serving`."""
    with serving(loaded, **options) as running:
        host, port = running.server.servers[0].sockets[0].getsockname()[:2]
        print(f'model "{served_name(loaded)}" at http://{host}:{port}/v1, until Ctrl-C', flush=True)
        try:
            while running._thread.is_alive():
                running._thread.join(1.0)
        except KeyboardInterrupt:
            print("stopping", flush=True)
    return 0
