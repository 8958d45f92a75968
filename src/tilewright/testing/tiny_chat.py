"""A tiny random model that can chat, for tests of servers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def tokenizer() -> Any:
    """Each character of a few is a token; a chat is its messages one behind the other."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<pad>", "<s>", "</s>", *map(chr, range(32, 125))]
    words = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="<pad>"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="<pad>")
    made.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return made


TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SMALL = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}


def write(folder: Path, seed: int = 0, sizes: Mapping[str, Any] = TINY) -> None:
    """Saves a Llama with random weights, whose answers tell prompts apart: of some thousand
    parameters, or SMALL, of 138 million.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    words = tokenizer()
    spread: Any = {"initializer_range": 0.5 * (TINY["hidden_size"] / sizes["hidden_size"]) ** 0.5}
    config = LlamaConfig(**sizes, **spread, vocab_size=len(words), max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    LlamaForCausalLM(config).save_pretrained(folder)
    words.save_pretrained(folder)
