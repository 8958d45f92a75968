"""The app, and options that several verbs have."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from .command_line import command, state

app = typer.Typer(
    help="Kernels for language models in cuTile Python: compiled on a GPU, interpreted on a CPU.",
    epilog="Exit codes: 0 fine; 1 something is wrong; 2 it cannot run; 130 stopped by Ctrl-C; 141 whoever read its output has gone.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def option(name: str, told: str, **more: Any) -> Any:
    """An option whose help says its default, if it has one."""
    return typer.Option(name, help=told, show_default=False, **more)


Ops = Annotated[list[str] | None, typer.Argument(metavar="OP", help="Names of ops. Default: all.", show_default=False)]
Json = Annotated[Path | None, option("--json", "Also write the results as JSON; - is stdout, with the text on stderr.", metavar="FILE")]
DeviceName = Annotated[str, option("--device", "cpu, cuda or cuda:N. Default: a GPU if there is one.", metavar="DEVICE")]
Gpu = Annotated[str, typer.Option("--device", metavar="DEVICE", help="cuda or cuda:N.")]
Jobs = Annotated[int | None, option("--jobs", "Compilers to run at once. Default: one per core.", min=1)]
Dtype = Annotated[str, option("--dtype", "float32, bfloat16 or float16. Default: float32 on a CPU, else bfloat16.")]
Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code from the model's folder, which can do anything that you can. Read it first.")
]

Weights = Annotated[
    str | None,
    option(
        "--weights",
        "First quantise a 16-bit model: int4-128, or with its head int4-128,head=int8 (see `quantize`). gguf: keep a .gguf file's own.",
        metavar="FORMAT",
    ),
]

SUITES = ("playbook", "llm", "seeds", "decode")
ENGINES = ("auto", "mega", "graph", "eager", "transformers")


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        from . import __version__

        typer.echo(f"tilewright {__version__}, cuda-tile {version('cuda-tile')}, torch {version('torch')}")
        raise typer.Exit


@app.callback()
def options(
    traceback: Annotated[bool, typer.Option("--traceback", help="On an error, show the whole Python traceback.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the versions.")] = False,
) -> None:
    state["traceback"] = traceback


def verb(function: Callable[..., int]) -> Callable[..., None]:
    told = "\n\n".join(" ".join(part.split()) for part in (function.__doc__ or "").split("\n\n"))  # lines break where the terminal ends
    return app.command(name=function.__name__, help=told)(command(function))
