"""Tokens to text: joined pieces are the whole text, stops never leak, the sandbox holds."""

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from flare_cli.text.chat_template import load_chat_template
from flare_cli.text.detokenizer import open_detokenizer
from flare_cli.text.generation_config import load_generation_defaults
from flare_cli.text.stop_strings import StopMatcher
from flare_cli.text.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer
from flare_core.errors import CheckpointError, RequestError, UnsupportedModel


def byte_level(num_special: int = 1) -> FileTokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the cat and the dog \u00e4\u00f6\u00fc \U0001f600\U0001f601 the then"], trainer)
    tokenizer.add_special_tokens([AddedToken(f"<s{i}>", special=True) for i in range(num_special)])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return FileTokenizer(tokenizer, byte_level=True)


def byte_fallback() -> FileTokenizer:
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    vocab |= {"\u2581the": 257, "\u2581": 258, "cat": 259, "\u00e4": 260}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return FileTokenizer(tokenizer, byte_level=False)


BYTE_LEVEL = byte_level()
BYTE_FALLBACK = byte_fallback()


def decoded(tokenizer, ids, **options) -> str:
    detokenizer = open_detokenizer(tokenizer, **options)
    return "".join([*(detokenizer.push(i) for i in ids), detokenizer.flush()])


@given(st.lists(st.integers(0, BYTE_LEVEL.num_ids + 2), max_size=60), st.booleans())
def test_byte_level_pieces_join_to_the_librarys_own_decoding(ids, skip):
    expected = BYTE_LEVEL._tokenizer.decode([i for i in ids if i < BYTE_LEVEL.num_ids], skip_special_tokens=skip)
    assert decoded(BYTE_LEVEL, ids, skip_special_tokens=skip) == expected
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=skip) == expected


@given(st.text(max_size=60))
def test_every_text_comes_back_character_by_character(text):
    for tokenizer in (BYTE_LEVEL, ByteTokenizer(259, first_byte=3), BYTE_FALLBACK):
        if tokenizer is BYTE_FALLBACK:
            ids = [byte + 1 for byte in text.encode()]
            text = text.removeprefix(" ")  # the decoder strips one leading space
        else:
            ids = tokenizer.encode(text, add_special_tokens=False)
        assert decoded(tokenizer, ids) == tokenizer.decode(ids)
        detokenizer = open_detokenizer(tokenizer)
        if "\ufffd" not in text:
            assert all("\ufffd" not in detokenizer.push(i) for i in ids)


PIECES = [[257], [258], [259], [260], *([byte + 1 for byte in text.encode()] for text in ("\u20ac", "\u00e4"))]


@given(st.lists(st.sampled_from(PIECES), max_size=20).map(lambda pieces: [i for piece in pieces for i in piece]))
def test_spaces_and_fallback_bytes_join_to_the_librarys_own_decoding(ids):
    assert decoded(BYTE_FALLBACK, ids) == BYTE_FALLBACK._tokenizer.decode(ids)


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_a_stop_string_ends_the_text_wherever_pieces_are_cut(text, stops, data):
    matcher = StopMatcher(stops)
    out = ""
    at = 0
    while at < len(text) and matcher.matched is None:
        size = data.draw(st.integers(1, 5))
        out += matcher.push(text[at : at + size])
        at += size
    out += matcher.flush()
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert (out, matcher.matched) == (text, None)
        return
    assert matcher.matched in stops
    assert text.startswith(out + matcher.matched)
    assert not any(stop in out for stop in stops)


def test_text_before_the_minimum_length_is_not_searched():
    matcher = StopMatcher(["ab"])
    assert matcher.push("a") + matcher.skip("b") + matcher.push("xa") + matcher.flush() == "abxa"


def test_a_tokenizer_file_is_read(tmp_path):
    BYTE_LEVEL._tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    ids = loaded.encode("the cat <s0>", add_special_tokens=False)
    assert loaded.byte_exact
    assert loaded.decode(ids) == "the cat "
    assert loaded.decode(ids, skip_special_tokens=False) == "the cat <s0>"


def test_a_missing_or_damaged_tokenizer_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.model"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        load_tokenizer(tmp_path)


def template_of(tmp_path, source: str):
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": source, "eos_token": {"content": "</s>"}, "bos_token": "<s>"})
    )
    return load_chat_template(tmp_path)


def render(template, content: str = "x", **settings) -> str:
    messages = [{"role": "user", "content": content}]
    return template.render(messages, max_chars=10_000, add_generation_prompt=True, settings=settings)


def test_a_template_sees_messages_and_special_tokens(tmp_path):
    source = "{{ bos_token }}{% for m in messages %}{{ m['content'] | trim }}{% endfor %}\n{{ eos_token }}"
    assert render(template_of(tmp_path, source), " hi ") == "<s>hi</s>"


def test_a_template_file_goes_before_the_one_in_the_configuration(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("from file")
    assert render(template_of(tmp_path, "from configuration")) == "from file"


def test_a_templates_own_refusal_is_the_requests_error(tmp_path):
    with pytest.raises(RequestError, match="roles must alternate"):
        render(template_of(tmp_path, "{{ raise_exception('roles must alternate') }}"))


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(99999) %}xxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}",
        "{{ nothing.at.all }}",
    ],
)
def test_a_template_that_leaves_its_bounds_is_the_requests_error(tmp_path, source):
    with pytest.raises(RequestError):
        render(template_of(tmp_path, source))


def test_a_template_that_cannot_be_compiled_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be compiled"):
        template_of(tmp_path, "{% if %}")


def test_content_is_never_taken_for_template_source(tmp_path):
    assert render(template_of(tmp_path, "{{ messages[0].content }}"), "{{ 7 * 7 }}") == "{{ 7 * 7 }}"


def test_all_end_tokens_and_defaults_come_from_the_generation_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2, "max_position_embeddings": 99}))
    assert load_generation_defaults(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [7, 8], "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05})
    )
    defaults = load_generation_defaults(tmp_path)
    assert defaults.eos_token_ids == (7, 8)
    assert (defaults.temperature, defaults.top_p, defaults.top_k, defaults.repetition_penalty) == (0.6, 0.9, 20, 1.05)
    assert defaults.max_position_embeddings == 99
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": "hot"}))
    with pytest.raises(CheckpointError, match="temperature"):
        load_generation_defaults(tmp_path)


def test_the_tokenizers_library_is_the_oracle_for_token_bytes():
    for token_id in range(BYTE_LEVEL.num_ids):
        text = BYTE_LEVEL._tokenizer.decode([token_id], skip_special_tokens=False)
        assert BYTE_LEVEL.token_bytes(token_id).decode("utf-8", "replace") == text
    assert tokenizers.__version__
