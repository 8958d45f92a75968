"""Models of the Hugging Face hub by name, `org/name`: downloaded once, then from the cache."""

import re
import sys
from pathlib import Path

from ..launch import argument_error

NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")  # of the hub: an owner and a model
FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
CODE = "*.py"  # only where the caller trusts it


def is_name(source: str | Path) -> bool:
    """Whether it can be a name on the hub. One of a folder that is there is none."""
    return isinstance(source, str) and NAME.fullmatch(source) is not None and not Path(source).expanduser().exists()


def folder_of(name: str, *, trust_remote_code: bool = False) -> Path:
    """The folder of a model in the hub's cache, with what it lacks downloaded.

    On a terminal bars show how far it is. HF_TOKEN, HF_HOME and HF_HUB_OFFLINE count as everywhere.
    Raises: ValueError for a name that the hub gives to no model; OSError in one line: no such
        model, no right to it, or no network and not in the cache.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shown = not are_progress_bars_disabled()
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return Path(snapshot_download(name, allow_patterns=[*FILES, *([CODE] if trust_remote_code else [])]))
    except HFValidationError as error:
        raise argument_error("model", "org/name of the Hugging Face hub, which allows letters, digits and single - _ .", repr(name)) from error
    except GatedRepoError:
        why = f"model {name} must be one that you may read: accept its terms on its page on the hub, then export HF_TOKEN=... of that account"
    except RepositoryNotFoundError:
        why = f"model must be the name of one on the hub, or HF_TOKEN that of an account that may read it, got {name!r}"
    except LocalEntryNotFoundError:
        why = (
            f"model {name} must be in the hub's cache where there is no network (or HF_HUB_OFFLINE is set): give a folder, or run once with a network"
        )
    except (HfHubHTTPError, OSError) as error:
        why = f"model {name} could not be downloaded: {' '.join(str(error).split())[:200]}"
    finally:
        if shown:
            enable_progress_bars()
    raise OSError(why)
