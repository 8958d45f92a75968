"""The text of a server's answers while their tokens arrive."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tilewright.models.server.text import Text


def test_a_text_arrives_whole_however_its_tokens_are_cut():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    holder = type("T", (), {"backend_tokenizer": words})
    said = "h\u00e9 \U0001f600! e"
    tokens = words.encode(said).ids
    text = Text(holder, [])
    assert "".join(text.add([token]) for token in tokens) + text.end() == said
    text = Text(holder, [])
    assert text.add(tokens[:2]) + text.end() == "h\ufffd"  # a character that never was complete
    text = Text(holder, ["\U0001f600!", "zz"])
    assert "".join(text.add([token]) for token in tokens) + text.end() == "h\u00e9 "
    assert text.stopped


def test_bytes_that_one_more_makes_no_character_are_held_back():
    """As Llama-2's tokenizer and others decode them: a whole run, or none of it."""
    words = Tokenizer(models.BPE({**{f"<0x{i:02X}>": i for i in range(256)}, "a": 256}, []))
    words.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    words.add_special_tokens(["<s>"])
    holder, start = type("T", (), {"backend_tokenizer": words}), words.token_to_id("<s>")
    for end, parts in (([256], ["", "", "", "\u00e9a"]), ([0xFF, 256], ["", "", "", "", "\ufffd\ufffd\ufffda"]), ([], ["", "", ""])):
        tokens, text = [0xC3, 0xA9, start, *end], Text(holder, [])
        assert [text.add([token]) for token in tokens] == parts
        assert "".join(parts) + text.end() == words.decode(tokens)
