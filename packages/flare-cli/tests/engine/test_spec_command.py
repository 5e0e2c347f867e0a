"""``flare spec``: mistakes in its options are named before anything is loaded, and a tiny model is trained for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from click.testing import CliRunner
from tokenizers import decoders, models, pre_tokenizers

from flare_cli.command_tree import flare
from flare_core.testing.checkpoints import make_tiny_checkpoint


def invoke(*arguments: str):
    return CliRunner().invoke(flare, ["spec", *arguments], standalone_mode=False)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--share", "2/2"], "no share"),
        (["--share", "half"], "no share"),
        (["--taps", "1,x"], "no list of layer numbers"),
        ([], "no model directory"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, options: list[str], named: str) -> None:
    result = invoke("train", str(tmp_path / "nowhere"), "-o", str(tmp_path / "out"), *options)
    assert named in str(result.exception)


@pytest.fixture
def chatting_model(tmp_path: Path) -> Path:
    """A tiny model with a tokenizer of one id a byte and a chat template."""
    model = make_tiny_checkpoint(tmp_path / "model", "llama")
    vocabulary = {each: at for at, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(model / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return model


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    names = [a + b for a in "abcdef" for b in "ghijkl"]
    sentence = "Nobody reads it with much care: this paragraph about {0} says that {0} is what it is about, "
    sentence += "and it goes on until it is long enough."
    (folder / "prose.md").write_text("\n\n".join(f"{name} {sentence.format(name)}" for name in names))
    head = "def about_{0}(first, second):\n    total = first + second\n"
    function = head + "    for each in range(total):\n        print(each)\n"
    (folder / "code.py").write_text("\n".join(function.format(name) for name in names))
    return folder


def test_a_drafter_is_trained_and_measured_and_training_again_changes_nothing(
    chatting_model: Path, texts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "draft"
    options = [
        "train", str(chatting_model), "-o", str(out), "--texts", str(texts), "--no-packages", "--prompts", "6",
        "--held-out", "2", "--answer-tokens", "12", "--sequences", "4", "--batch", "3", "--anchors", "4",
        "--taps", "0", "--markov-rank", "4", "--gamma", "3",
    ]  # fmt: skip
    for share in ("0/2", "1/2"):
        assert invoke(*options, "--steps", "0", "--share", share).exception is None
    assert invoke(*options, "--steps", "3").exception is None
    weights = (out / "model.safetensors").read_bytes()
    assert invoke(*options, "--steps", "3").exception is None
    assert (out / "model.safetensors").read_bytes() == weights
    assert "other settings" in str(invoke(*options, "--steps", "4").exception)
    options[options.index("6")] = "7"
    assert "give the same options" in str(invoke(*options, "--steps", "3").exception)

    figures = tmp_path / "figures.json"
    result = invoke("eval", str(chatting_model), "--draft", str(out), "--json", str(figures))
    assert result.exception is None
    report = json.loads(figures.read_bytes())
    assert set(report["gains"]) == {"greedy: without Markov", "expected: without Markov"}
    assert report["summaries"]["greedy: drafter"]["length"]["value"] >= 1.0
    assert "no answers to held-out prompts" in str(
        invoke("eval", str(chatting_model), "--draft", str(out), "--answers", str(tmp_path)).exception
    )
