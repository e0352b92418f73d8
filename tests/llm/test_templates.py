"""Chat templates: what transformers makes of them, and hostile ones."""

from __future__ import annotations

import time
import tracemalloc

import pytest

pytest.importorskip("jinja2")
utils = pytest.importorskip("transformers.utils.chat_template_utils")

from purevk.errors import FileFormatError, InputError  # noqa: E402
from purevk.llm import templates  # noqa: E402
from purevk.llm.templates import Template  # noqa: E402

MESSAGES = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": "<b>2 + 2?</b> {{ 7 * 7 }}"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Ünï 漢 🙂"},
]
TEXTS = {
    "loop": "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "<|{{ m['role'] }}|>\n{{ m.content | trim }}\n{% endfor %}<|assistant|>",
    "namespace": "{%- set ns = namespace(n=0) -%}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{{ ns.n ~ ':' ~ m['content'][:3] ~ '\n' }}{% endfor %}",
    "slices": "{% for m in messages[1:] %}{{ m['role'].upper() + ' ' + m['content'] }}{% endfor %}",
    "json": "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }}",
    "macro": "{% macro line(m) %}[{{ m.role }}]{{ m.content | replace('<', '(') }}{% endmacro %}"
    "{% for m in messages %}{{ line(m) }}{% if m.role == 'assistant' %}{% break %}{% endif %}"
    "{% endfor %}{{ 'x' * 3 }} {{ 10 % 4 }} {{ messages | map(attribute='role') | join(',') }}",
    "thinking": "{% for m in messages[::-1] %}{% set parts = m.content.split('2') %}"
    "{{ parts[0].rstrip(' +') ~ parts[-1].lstrip('\n') }}{% set x %}{{ m.role }}{% endset %}{{ x * 2 }}"
    "{% macro f(l) %}{{ l.index }}{% endmacro %}{{ f(loop) }}{% endfor %}"
    "{{ messages | map(attribute='content') | map('length') | sum }}{{ '|'.join(['a', 'b']) | indent(2) }}",
    "tests": "{% if messages[0].role is defined and messages[0].content is string and "
    "'system' in messages[0]['role'] %}yes{% endif %}{{ messages | length }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_are_those_of_transformers(name: str) -> None:
    want, _ = utils.render_jinja_template(
        [MESSAGES], chat_template=TEXTS[name], add_generation_prompt=True, bos_token="<s>"
    )
    assert Template(TEXTS[name], "here", {"bos_token": "<s>"}).render(MESSAGES) == want[0]


def test_long_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation is metered, and that is not to count the messages again and again."""
    monkeypatch.setattr(templates, "SECONDS", 60.0)
    messages = [
        {"role": role, "content": f"{number} " * 500}
        for number in range(200)
        for role in ("user", "assistant")
    ]
    text = (
        "{% set ns = namespace(text='') %}{% for m in messages[::-1] %}{% if messages | length > 3 %}"
        "{% set last = messages[messages | length - 1] %}{% if m.content == last.content or "
        "'7' in m.content %}{{ m.role + m.content.split('1')[-1] | trim }}{% endif %}{% endif %}"
        "{% endfor %}{{ (messages | tojson) | length }}"
    )
    want, _ = utils.render_jinja_template([messages], chat_template=text)
    start = time.process_time()
    assert Template(text, "here", {}).render(messages) == want[0]
    assert time.process_time() - start < 2


LONG = "{% set a = 'a' * 4000000 %}{% set b = 'a' * 4000000 %}"
HOSTILE = {
    "time": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "text": "{% for a in range(99999) %}{{ messages[0].content * 99 }}{% endfor %}",
    "doubling": "{% set ns = namespace(x='a') %}{% for a in range(99) %}{% set ns.x = ns.x ~ ns.x %}"
    "{% endfor %}",
    "adding": "{% set ns = namespace(x='a') %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}"
    "{% endfor %}",
    "product": "{{ 'a' * 9999999999 }}",
    "list": "{{ [0] * 999999999 }}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "large integers": "{% set ns = namespace(x=9) %}{% for a in range(99) %}{% set ns.x = ns.x * ns.x %}"
    "{% endfor %}",
    "format": "{{ '%999999999d' % 1 }}",
    "format method": "{{ '{:999999999}'.format(1) }}",
    "width": "{{ 'a'.ljust(999999999) }}",
    "indent": "{{ 'a\nb' | indent(999999999) }}",
    "center": "{{ 'a' | center(999999999) }}",
    "replace": "{% set x = 'a' * 99999 %}{{ x.replace('a', x) }}",
    "replace filter": "{% set x = 'a' * 99999 %}{{ x | replace('a', x) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__['__builtins__'] }}",
    "code": "{{ cycler.__init__.__globals__ }}",
    "attribute filter": "{{ '' | attr('__class__') }}",
    "environment": "{{ self._TemplateReference__context.environment.from_string('x').render() }}",
    "write": "{{ messages.append(1) }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "syntax": "{% for %}",
    "type": "{{ 1 + 'a' }}",
    "comparison": f"{LONG} {{{{ [a] * 4000000 == [b] * 4000000 }}}}",
    "comparisons in a line": f"{LONG} {{{{ {' and '.join(['a == b'] * 20_000)} }}}}",
    "tests in a line": f"{LONG} {{{{ {' and '.join(['a is eq b'] * 15_000)} }}}}",
    "member": f"{LONG} {{{{ 'c' in [a] * 4000000 }}}}",
    "join": f"{LONG} {{{{ ([a] * 1000) | join | length }}}}",
    "join method": f"{LONG} {{{{ ''.join([a] * 1000) | length }}}}",
    "separator": f"{LONG} {{{{ a.join(range(1000) | map('string')) }}}}",
    "text of a list": f"{LONG} {{{{ ([a] * 1000) | string | length }}}}",
    "list as output": f"{LONG} {{{{ [a] * 1000 }}}}",
    "JSON of a list": f"{LONG} {{{{ ([a] * 1000) | tojson | length }}}}",
    "JSON indented": "{{ ([0] * 40000) | tojson(indent=100000) | length }}",
    "list literal": f"{LONG} {{% set x = [{'a, ' * 9999}] %}}",
    "slices": f"{LONG} {''.join(f'{{% set x{n} = a[1:] %}}' for n in range(5000))}",
    "nested lists": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% endfor %}{{ ns.x }}",
    "nested namespaces": f"{LONG} {{% set ns = namespace(x=a) %}}{{{{ [ns] * 9999999 }}}}",
    "block": "{% set ns = namespace(x='aaaa') %}{% for i in range(40) %}{% set y %}{{ ns.x }}{{ ns.x }}"
    "{% endset %}{% set ns.x = y %}{% endfor %}",
    "tabs": "{% set a = '\t' * 40000 %}{{ a.expandtabs(100000) | length }}",
    "translation": "{{ ('a' * 4000).translate({97: 'b' * 1000000}) | length }}",
    "encoding": "{{ ('a' * 400000).encode('punycode') }}",
    "lines indented": "{% set a = 'a\n' * 40000 %}{{ a | indent(1000) | length }}",
    "sum of lists": "{{ ([[0] * 2000] * 500) | sum(start=[]) | length }}",
    "replace by name": "{% set a = 'a' * 99999 %}{{ a | replace(old='a', new=a) }}",
    "strip": f"{LONG} {{{{ a.strip(b) }}}}",
    "search from the end": f"{LONG} {{{{ a.rfind('ab' ~ a[1:2000000]) }}}}",
    "split from the end": f"{LONG} {{{{ a.rsplit('ab' ~ a[1:2000000]) }}}}",
    "depth": "{% set ns = namespace(x=()) %}{% for i in range(3000) %}"
    "{% set ns.x = cycler(ns.x).items %}{% endfor %}{% set d = {ns.x: 1} %}",
    "number of a text": "{{ ('9' * 4000000) | int }}",
    "dict of equal hashes": "{{ {}.fromkeys(range(0, 2305843009213693951 * 9999, 2305843009213693951)) }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "SECONDS", 0.3)
    start = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(FileFormatError, match="chat template"):
            Template(HOSTILE[name], "here", {}).render(MESSAGES)
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()
    assert time.process_time() - start < 5


@pytest.mark.parametrize("loop", ["for a in range(99999)", "for a in [[9, 9]] * 99999 recursive"])
def test_loops_end_without_tracing(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recursion that is too deep within the callback of tracing ends it."""
    monkeypatch.setattr(templates, "SECONDS", 0.1)
    monkeypatch.setattr(templates.sys, "settrace", lambda trace: None)
    body = "{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(FileFormatError, match="takes more than 0.1 s"):
        Template(f"{{% {loop} %}}{body}{{% endfor %}}", "here", {}).render(MESSAGES)


def test_templates_refuse_messages() -> None:
    with pytest.raises(InputError, match="no system"):
        Template("{{ raise_exception('no system') }}", "here", {}).render(MESSAGES)
