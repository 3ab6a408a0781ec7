"""Prompts to tokens, and tokens to text as they come."""

import random
import types

import pytest
import tokenizers

from jaxformer.data import ByteTokenizer, load_tokenizer
from jaxformer.training.sampling import TextStream, prompt_tokens

WORDS = ["naïve", "日本語", "🙂🙃", "plain", "two words", "\n", "Übergröße", "\N{REPLACEMENT CHARACTER}", "don't", "."]


def word_pieces(folder):
    """A tokenizer whose tokens are single characters, those inside of a word marked as WordPiece does."""
    characters = sorted(set("".join(WORDS)) - {"\n"})
    names = ["[UNK]", *characters, *(f"##{character}" for character in characters)]
    vocabulary = {name: index for index, name in enumerate(dict.fromkeys(names))}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.decoder = tokenizers.decoders.WordPiece()
    backend.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


def byte_level(folder):
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        WORDS, tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    backend.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


@pytest.fixture(params=["bytes", "byte level", "word pieces"])
def tokenizer(request, tmp_path):
    if request.param == "bytes":
        return ByteTokenizer()
    return byte_level(tmp_path) if request.param == "byte level" else word_pieces(tmp_path)


def stream_text(tokenizer, tokens):
    stream = TextStream(tokenizer)
    pieces = [stream.add(token) for token in tokens]
    pieces.append(stream.finish())
    assert "".join(pieces) == stream.text
    return stream.text


def test_streamed_text_is_that_of_decoding_everything(tokenizer):
    draw = random.Random(0)
    for _ in range(20):
        tokens = tokenizer.encode(" ".join(draw.choices(WORDS, k=30)))
        assert stream_text(tokenizer, tokens) == tokenizer.decode(tokens)


def test_streamed_noise_is_that_of_decoding_everything():
    draw = random.Random(0)
    tokenizer = ByteTokenizer()
    ids = [index for index in range(tokenizer.vocab_size) if index != tokenizer.eos_id]
    for _ in range(20):
        tokens = draw.choices(ids, k=200)
        assert stream_text(tokenizer, tokens) == tokenizer.decode(tokens)


def test_work_is_proportional_to_the_output(tokenizer):
    decoded = []

    class Counting:
        eos_id = tokenizer.eos_id

        def decode(self, ids):
            decoded.append(len(ids))
            return tokenizer.decode(ids)

    tokens = tokenizer.encode(" ".join(WORDS * 60))
    assert stream_text(Counting(), tokens) == tokenizer.decode(tokens)
    assert len(tokens) > 1000
    assert sum(decoded) < 60 * len(tokens)


def test_nothing_follows_the_end_of_the_document():
    tokenizer = ByteTokenizer()
    assert stream_text(tokenizer, [*tokenizer.encode("end"), tokenizer.eos_id, *tokenizer.encode("more")]) == "end"


def test_empty_prompt_starts_a_document_with_what_the_tokenizer_has():
    def make(bos_id, eos_id):
        return types.SimpleNamespace(bos_id=bos_id, eos_id=eos_id, name="words", encode=None)

    assert prompt_tokens(make(3, 5), "") == [3]
    assert prompt_tokens(make(0, 5), "") == [0]
    assert prompt_tokens(make(None, 5), "") == [5]
    with pytest.raises(ValueError, match="tokenizer words has no token that starts or ends a document"):
        prompt_tokens(make(None, None), "")
