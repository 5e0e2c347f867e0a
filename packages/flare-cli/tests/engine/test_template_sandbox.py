"""What a chat template, which a model brings along, cannot do; and that a client's words are never a template."""

from __future__ import annotations

import json
import time

import pytest

from flare_cli.text.chat_template import MAX_TEMPLATE_BYTES, RENDER_SECONDS, load_chat_template
from flare_core.errors import CheckpointError, RequestError

MESSAGES = [{"role": "user", "content": "{{ 7 * 7 }}{% set x = 1 %}"}]


def load(tmp_path, source: str):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source, "bos_token": "<s>"}))
    return load_chat_template(tmp_path)


def render(tmp_path, source: str, **settings) -> str:
    return load(tmp_path, source).render(MESSAGES, max_chars=1 << 20, add_generation_prompt=True, settings=settings)


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'].system('id') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['datetime'] }}",
    "{{ strftime_now.__code__.co_consts }}",
    "{{ self.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ ''|attr('__class__')|attr('__mro__') }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ '%s'|format(messages.__class__) }}",
    "{{ messages.append(1) }}",
    "{{ messages.clear() }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{{ messages[0].pop('role') }}",
    "{{ (1).__class__ }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_reaches_no_object_of_the_server_and_changes_none(tmp_path, source):
    before = json.dumps(MESSAGES)
    try:
        text = render(tmp_path, source)
    except RequestError:
        text = ""
    # An attribute that is refused is an error or renders as nothing.
    assert text in {"", "None"}
    assert json.dumps(MESSAGES) == before


@pytest.mark.parametrize(
    "source",
    ["{% include '/etc/passwd' %}", "{% import '/etc/passwd' as p %}", "{% extends '/etc/passwd' %}"],
)
def test_a_template_reads_no_file(tmp_path, source):
    with pytest.raises((RequestError, CheckpointError)):
        render(tmp_path, source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**12) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_runs_away_is_the_requests_error_in_bounded_time(tmp_path, source):
    template = load(tmp_path, source)
    began = time.monotonic()
    with pytest.raises(RequestError, match=r"limit|refuses"):
        template.render(MESSAGES, max_chars=1 << 20, add_generation_prompt=True, settings={})
    assert time.monotonic() - began < 30 * RENDER_SECONDS


def test_a_clients_words_and_settings_are_never_a_template(tmp_path):
    text = render(tmp_path, "{{ messages[0].content }}|{{ persona }}", persona="{{ 7 * 7 }}{% include 'x' %}")
    assert text == "{{ 7 * 7 }}{% set x = 1 %}|{{ 7 * 7 }}{% include 'x' %}"


@pytest.mark.parametrize("name", ["messages", "tools", "bos_token", "raise_exception", "strftime_now"])
def test_a_client_cannot_set_what_the_server_sets(tmp_path, name):
    with pytest.raises(RequestError, match="not the client's to set"):
        render(tmp_path, "x", **{name: "y"})


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_a_template_is_read_up_to_its_bound(tmp_path, offset):
    source = "x" * (MAX_TEMPLATE_BYTES + offset)
    if offset > 0:
        with pytest.raises(CheckpointError, match="larger than"):
            load(tmp_path, source)
    else:
        assert load(tmp_path, source) is not None
