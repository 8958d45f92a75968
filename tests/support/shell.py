"""The command line in this process, and the smallest model that it loads."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilewright.cli import app
from tilewright.models import random_model

TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def run(*arguments: object):
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    random_model(TINY).save_pretrained(path)
    return path
