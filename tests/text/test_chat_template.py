"""Rendered chats are those of transformers; bad templates and messages get one clear sentence."""

import itertools
import json
import re
from pathlib import Path

import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer

from minillm.errors import InvalidRequestError
from minillm.text import chat_template
from minillm.text.chat_template import ChatTemplate
from minillm.text.tokenizer import Tokenizer
from tests.text.build import byte_level, write_folder

# Written for these tests, in the manner of the families they are named after.
CHATML = """{% for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
        {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

LLAMA3 = """{{ bos_token }}{% if tools is not none %}{{ tools | tojson }}{% endif %}
{% if messages[0].role == "system" %}{% set system = messages[0].content | trim %}
{% set messages = messages[1:] %}{% else %}{% set system = "None given." %}{% endif %}
<|head|>system<|/head|>

Today: {{ strftime_now("%%d") if strftime_now is defined else "?" }}
{{ system }}<|eot|>
{% for m in messages %}
<|head|>{{ m.role }}<|/head|>

{{ m.content | trim }}<|eot|>{% endfor %}
    {% if add_generation_prompt %}<|head|>assistant<|/head|>

{% endif %}"""

MISTRAL = """{{ bos_token }}{% for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant/user/assistant/...!') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}
    {%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{%- endfor %}"""

NAMESPACE = """{% macro turn(role, text) %}[{{ role }}:{{ text }}]{% endmacro %}
{%- set ns = namespace(system='', turns=0, last='none') -%}
{%- for m in messages -%}
  {%- if m['role'] == 'system' -%}{%- set ns.system = m['content'] -%}{%- continue -%}{%- endif -%}
  {%- set ns.turns = ns.turns + 1 -%}
  {%- set ns.last = loop.previtem['role'] if loop.previtem is defined else 'none' -%}
  {%- if ns.turns > 3 -%}{%- break -%}{%- endif -%}
  {%- if m.role == 'assistant' -%}
    {% generation %}{{ turn(m.role, m.content | replace('\\n', ' ')) }}{% endgeneration %}
  {%- else -%}{{ turn(m.role, m.content.strip()) }}{%- endif -%}
  {%- if loop.last %} last={{ loop.length }}/{{ ns.last }}{% endif -%}
{%- endfor %}
{%- set options = dict(a=1, b=[true, none]) %}
{{ {'html': '<b>&"é', 'options': options} | tojson }} {{ options | tojson(indent=2) }}
{{ messages | tojson }}
{{ ns.system | upper }} {{ messages | length }} {{ messages | map(attribute='role') | join(',') }}
{{- unknown_variable }} {{ messages | selectattr('role', 'equalto', 'user') | list | length }}"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "namespace": NAMESPACE}

CHATS = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "user", "content": " two\nlines <b>&'\" "}, {"role": "assistant", "content": "Yes."}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "日本 🙂 {{ x }}"}],
    [{"role": ("user", "assistant")[i % 2], "content": f"turn {i}"} for i in range(5)],
    [{"content": "", "name": "ann", "tool_calls": None, "role": "user"}],
]


def folder_with(tmp_path: Path, template: object) -> Path:
    names = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    return write_folder(tmp_path, byte_level(with_bos=True), chat_template=template, **names)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, TEMPLATES[name])
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
    for chat, prompt in itertools.product(CHATS, (True, False)):
        if name == "mistral" and chat[0]["role"] == "system":
            with pytest.raises(TemplateError) as refused:
                theirs.apply_chat_template(chat, tokenize=False)
            with pytest.raises(InvalidRequestError, match=re.escape(str(refused.value))):
                ours.render_chat(chat, prompt)
            continue
        how = {"add_generation_prompt": prompt, "return_dict": False}
        text = ours.render_chat(chat, prompt)
        assert text == theirs.apply_chat_template(chat, tokenize=False, **how), chat
        assert ours.encode(text, False) == theirs.apply_chat_template(chat, **how), chat


def test_where_the_template_is_found(tmp_path: Path) -> None:
    """The .jinja file, then tokenizer_config.json (text or named list), then chat_template.json."""
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "named"}]
    folder = folder_with(tmp_path, None)
    places = [
        (folder / "chat_template.json", json.dumps({"chat_template": "json"}), "json"),
        (folder / "tokenizer_config.json", json.dumps({"chat_template": named}), "named"),
        (folder / "tokenizer_config.json", json.dumps({"chat_template": "config"}), "config"),
        (folder / "chat_template.jinja", "file é", "file é"),
    ]
    assert not Tokenizer.from_folder(folder).has_chat_template
    for file, content, expected in places:
        file.write_text(content, encoding="utf-8")
        ours = Tokenizer.from_folder(folder)
        assert ours.has_chat_template
        assert ours.render_chat(CHATS[0]) == expected
        if expected != "json":  # transformers reads that file for processors only
            theirs = AutoTokenizer.from_pretrained(folder)
            assert theirs.apply_chat_template(CHATS[0], tokenize=False) == expected


@pytest.mark.parametrize("template", [None, [{"name": "rag", "template": "x"}]])
def test_no_template_says_so(template: object, tmp_path: Path) -> None:
    ours = Tokenizer.from_folder(folder_with(tmp_path, template))
    with pytest.raises(InvalidRequestError, match=r"no chat template.*use generate") as caught:
        ours.render_chat(CHATS[0])
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(("messages", "problem"), [
    ("hi", "must be a list"), ({"role": "user", "content": "x"}, "must be a list"),
    (None, "must be a list"), ([], "empty"), (["hi"], r"messages\[0\] must be a dictionary"),
    ([{"content": "x"}], "'role'"), ([{"role": "", "content": "x"}], "'role'"),
    ([{"role": 1, "content": "x"}], "'role'"), ([{"role": "user"}], "must be a string or"),
    ([{"role": "user", "content": None}], "must be a string or"),
    ([{"role": "user", "content": b"x"}], "not bytes"),
    ([{"role": "user", "content": []}], "an empty list"),
    ([{"role": "user", "content": ["x"]}], "part of type 'str'"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "'image_url'"),
    ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "part of type 'text'"),
    ([{"role": "user", "content": "x", "tool_calls": [{}]}], "has no function.name"),
    ([{"role": "user", "content": "x", "names": [1]}], "'names' of type list"),
    ([{"role": "user", "content": "x", 3: "y"}], "only string fields"),
    ([{"role": "user", "content": "x"}, {"role": "x" * 10**6, "content": 1}], r"messages\[1\]"),
])  # fmt: skip
def test_malformed_messages(messages: object, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        ChatTemplate(CHATML, "m", {}).render(messages)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(("template", "problem"), [
    ("a\n{% for %}", "line 2"), ("{{ messages[0]['content'] + 1 }}", "cannot render"),
    ("{{ messages[9].content }}", "cannot render"), ("{{ 1 // 0 }}", "division"),
    ("{{ raise_exception('no\nway') }}", "no way"), ("{% include 'x' %}", "cannot render"),
    ("{{ raise_exception('It is unsafe.') }}", "unsafe"), ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    ("{{ nothing() }}", "undefined"),
    ("{% set n = namespace(_x=1) %}", "cannot hold the attribute '_x'"),
    ("{% set n = namespace() %}{% set n._x = 1 %}", "cannot hold the attribute '_x'"),
])  # fmt: skip
def test_a_template_that_fails_is_one_sentence(template: str, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        ChatTemplate(template, "the-folder", {}).render(CHATS[0])
    assert "the-folder" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")
    assert ".." not in str(caught.value)


@pytest.mark.parametrize(
    "product",
    [
        *("'a' * 3000000000", "3000000000 * 'a'", "[0] * 3000000000", "('ab' * 2 ** 23)"),
        *("9 ** 99999999", "(-9) ** 99999999", "2 ** 8000000 * 2 ** 8000000"),
    ],
)
def test_a_product_is_capped(product: str) -> None:
    with pytest.raises(InvalidRequestError, match="is too large"):
        ChatTemplate(f"{{{{ ({product}) | string | length }}}}", "m", {}).render(CHATS[0])


def test_ordinary_products_are_python_s() -> None:
    for product in ("'ab' * 3", "3 * 'ab'", "[1] * 2", "7 * -8", "2.5 * 4", "2 ** 10", "2 ** 0.5",
                    "2 ** -1", "'x' * -3", "-3 * 'x'", "9 ** 0", "true * 2"):  # fmt: skip
        expected = str(eval(product.replace("true", "True")))
        assert ChatTemplate(f"{{{{ {product} }}}}", "m", {}).render(CHATS[0]) == expected


@pytest.mark.parametrize("attack", [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ cycler.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}", "{{ dict.__globals__ }}", "{{ dict.mro() }}",
    "{{ namespace.__init__.__globals__ }}", "{{ messages.append(1) }}",
    "{{ messages[0].update(role='system') }}",
    "{{ '{0.__class__.__mro__}'.format(1) and nothing() }}",
    "{{ (''|attr('format'))('{0.__class__}', 1) and nothing() }}",
])  # fmt: skip
def test_the_sandbox_holds(attack: str) -> None:
    chat = [{"role": "user", "content": "hi"}]
    try:
        text = ChatTemplate(attack, "m", {}).render(chat)
    except InvalidRequestError:
        text = ""
    assert text == ""  # an unsafe attribute is undefined, or refused
    assert chat == [{"role": "user", "content": "hi"}]


def test_output_is_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 1000)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}xxxx{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequestError, match="more than 1,000 characters"):
        ChatTemplate(endless, "m", {}).render(CHATS[0])
    long = [{"role": "user", "content": "x" * 2000}]
    with pytest.raises(InvalidRequestError, match="more than 1,000 characters"):
        ChatTemplate(CHATML, "m", {}).render(long)


def test_the_clock_is_there_for_templates_that_ask() -> None:
    assert ChatTemplate("{{ strftime_now('%%') }}", "m", {}).render(CHATS[0]) == "%"
