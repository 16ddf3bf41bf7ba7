#!/usr/bin/env python3
"""Records what jinja2 renders of short templates, in crates/ottava-jinja/tests/data/jinja_expressions.json.

usage: make_jinja_expressions.py

Development only; the program itself needs no Python. `pip install jinja2==3.1.6`. The environment is that of transformers 5.24: a sandbox whose
lists and dicts cannot be changed, with loop controls and its own `tojson`. A template that raises an error is recorded as null.
"""

import json
from pathlib import Path

import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

FILE = Path(__file__).resolve().parent.parent / "crates/ottava-jinja/tests/data/jinja_expressions.json"

VARIABLES = {
    "s": "Hello, wörld",
    "space": "\u001f\u00a0 hi \u2003\u001c",
    "lines": "a\nb\r\nc\u2028d",
    "quotes": "it's \"so\"",
    "odd": "a\u200bb\u0007\u00ad\u0301é😀\x7f",
    "n": 7,
    "x": 2.5,
    "tiny": 1e-07,
    "huge": 1e22,
    "list": [3, 1, 2],
    "words": ["b", "A", "c"],
    "mixed": [None, True, 1, 2.0, "x", [1], {"k": "v"}],
    "d": {"b": 1, "a": "two", "items": [1, 2], "C": None},
    "rows": [{"name": "b", "n": 2, "f": {"g": 1}}, {"name": "A", "n": 1, "f": {"g": 2}}, {"name": "a", "n": 2}],
    "schema": {"type": ["integer", "null"], "default": None, "minimum": -0.0},
    "empty": "",
    "none": None,
}

# Each is the inside of `{{ … }}`.
EXPRESSIONS = r"""
["integer", "null"]|string
["a"]|upper
"x" ~ ["a"]
"x" ~ none ~ true ~ 1.0 ~ {"a": none}
1e-7|string
["u"] + []
space|trim
space.strip()
space|trim == "hi"
space.split()
mixed
mixed|string
mixed|join(", ")
mixed|tojson
schema
schema|tojson
schema|tojson(indent=2)
schema|tojson(separators=(",", ":"))
schema|tojson(sort_keys=true)
[schema, []]|tojson(indent=4)
{}|tojson(indent=2)
odd
odd|tojson
odd|tojson(ensure_ascii=true)
[odd]
[quotes]
[quotes, "it's", '"', "\\", "\n\t\r"]
{"it's": 1}
tiny
huge
[tiny, huge, 1e16, 123456789.125, 0.1, 1e15, 1e300, -0.0, 100.0]
1e400
-1e400
[1e400 - 1e400]
123456789012345678901234567890
123456789012345678901234567890 + 1
-123456789012345678901234567890 // 7
-123456789012345678901234567890 % 7
2 ** 100
2 ** -1
2 ** 3 ** 2
-2 ** 2
7 // 2
-7 // 2
7 % -3
-7 % 3
7.5 // 2
-7.5 % 2
7 / 2
4 / 2
1 / 0
1 // 0
1 % 0
1 + 1.5
true + true
1 - true
"a" * 3
3 * "a"
"a" * -1
[1] * 2
(1, 2) + (3,)
(1,)
()
(1, 2)
[(1, "a")]
"a" + 1
"a" + none
1 + "a"
[1] + (2,)
"a" "b" 'c'
2.5|round
3.5|round
-2.5|round
2.675|round(2)
1234.5|round(-2)
7|round
7|round(-1)
15|round(-1)
2.1|round(0, "ceil")
2.9|round(method="floor")
0.125|round(2)
x|int
"12"|int
"12.7"|int
"x"|int
"x"|int(5)
"0x1f"|int(base=16)
"ff"|int(0, 16)
" 42 "|int
none|int
true|int
"1.5"|float
"x"|float
"nan"|float
"inf"|float
3|float
-5|abs
-2.5|abs
true|abs
"%s" % none
"%s" % "a"
"%s and %r" % ("a", "b")
"%d" % 3.7
"%5d|%-5d|%05d|%+d" % (1, 2, 3, 4)
"%5s|%-5s|%.2s" % ("a", "b", "cde")
"%.2f %e %g %G" % (1.005, 12345.678, 0.00001, 1e20)
"%x %X %o %#x" % (255, 255, 8, 255)
"%c%c" % ("a", 98)
"%%"  % ()
"%(a)s-%(b)d" % {"a": 1, "b": 2}
"%s" % [1, "a"]
"%s" % {"a": 1}
"%s" % (1,)
"%s %s" % "a"
"%s" % ("a", "b")
"%d" % "a"
"%5.1f|%-8.3f|%08.2f" % (3.14159, 2.71828, -1.5)
"%s" % 1e-7
"%i" % true
"%5%|"  % ()
"%*d" % (5, 1)
"%s"|format("a")
"%s, %s!"|format("a", 1.0)
"%(x)s"|format(x=1)
"{}".format(1)
"{} {}".format("a", none)
"{1} {0}".format("a", "b")
"{a}".format(a=1)
"{0[k]} {1[0]}".format({"k": 1}, [2])
"{:>5}|{:<5}|{:^5}|".format("a", "b", "c")
"{:*^7}".format("ab")
"{:05d} {:+d} {:,}".format(42, 42, 1234567)
"{:.2f} {:e} {:g} {:%}".format(1.005, 12345.678, 0.0001, 0.25)
"{:x} {:X} {:b} {:o} {:#x}".format(255, 255, 5, 8, 255)
"{!r} {!s}".format("a", "a")
"{:10.3}|".format("abcdef")
"{:.3}".format(2.71828)
"{:5}|{:<5}|".format(1, 2)
"{{}} {}".format(1)
"{".format(1)
"{} {}".format(1)
"{:{}}".format("a", 5)
"{:=+7d}".format(3)
"{:d}".format("a")
"{}".format([1, "a"])
s|upper
s|lower
s|capitalize
s|title
"it's a-b (c) d.e"|title
"it's a-b".title()
s.title()
s|length
s|reverse
s|first
s|last
s|list
s[1]
s[-1]
s[1:4]
s[::-1]
s[::2]
s[5:1:-1]
s[99]
s[99:]
s[-99:3]
s.upper()
s.find("w")
s.find("q")
s.rfind("l")
s.index("w")
s.index("q")
s.count("l")
s.replace("l", "L")
s.replace("l", "L", 1)
s|replace("l", "L", 1)
s|replace("l", "L")
"aaa"|replace("", "-")
"aaa".replace("", "-", 2)
none|replace("N", "n")
12|replace(1, 3)
s.startswith("Hell")
s.startswith(("x", "Hell"))
s.startswith("ell", 1)
s.endswith("rld")
s.removeprefix("Hello")
s.removesuffix("rld")
s.removesuffix("x")
s.partition(", ")
s.rpartition("l")
s.partition("q")
s.split(", ")
s.split("l", 1)
s.rsplit("l", 1)
s.split()
"a  b c".split(" ")
"a  b c ".split(none, 1)
"a  b c ".rsplit(none, 1)
"".split()
"".split(",")
s.split("")
lines.splitlines()
lines.splitlines(true)
"-".join(["a", "b"])
"-".join([1])
"-".join("abc")
"-".join({"a": 1, "b": 2})
" a ".lstrip() ~ "|"
" a ".rstrip() ~ "|"
"xxaxx".strip("x")
"abcba"|trim("ab")
"a".center(4) ~ "|"
"ab".center(5, "*")
"abc"|center(8) ~ "|"
"a".ljust(3, ".")
"a".rjust(3)
"-5".zfill(4)
"a\tb".expandtabs(4)
"aB".swapcase()
"ß".casefold()
"ab1".isalnum() ~ "ab".isalpha() ~ "12".isdigit() ~ "1.2".isdigit() ~ "²".isdigit()
"ab".islower() ~ "AB".isupper() ~ " ".isspace() ~ "Ab Cd".istitle() ~ "a1".isidentifier()
"é".isascii() ~ "a\n".isprintable() ~ "½".isnumeric()
s.nothing
s.nothing()
s.format_map
"a" in "abc"
1 in [1, 2]
"1" in [1, 2]
1 in "abc"
"b" in d
"z" not in d
none in [none]
1.0 in [1]
"a" in undefined_name
1 in 5
1 == 1.0
1 == true
"1" == 1
[1, 2] == [1, 2]
[1] == (1,)
{"a": 1} == {"a": 1.0}
none == undefined_name
undefined_name == other
1 < 2 < 3
1 < 3 < 2
"a" < "b"
"a" < 1
[1, 2] < [1, 3]
1 < 1.5
none < 1
1 != 2
not 1
not undefined_name
1 and 2
0 or "x"
none or false
true
True and None
false
none
undefined_name
undefined_name.attribute
undefined_name|default("d")
undefined_name or "d"
none|default("d")
none|default("d", true)
""|d("e", true)
undefined_name|length
undefined_name + "a"
undefined_name ~ "a"
undefined_name|string
undefined_name|tojson
undefined_name|upper
[undefined_name]
d
d.b
d["a"]
d.items
d["items"]
d.keys()
d.values()
d.items()
d.items()|list
d|items|list
d|list
d|length
d.get("z")
d.get("z", 5)
d.get("C", 5)
d.z
d.z.y
d["z"]
d.z is defined
d.update({"a": 1})
d.pop("a")
d|dictsort
d|dictsort(true)
d|dictsort(by="value")
{"b": 2, "a": 1}|dictsort(reverse=true)
{1: 2, 1.0: 3, "a": 4}
{"a": 1, "a": 2}
{[]: 1}
dict(a=1, b=2)
dict([("a", 1)])
dict({"a": 1}, b=2)
list|sort
list|sort(reverse=true)
words|sort
words|sort(case_sensitive=true)
mixed|sort
rows|sort(attribute="n")|map(attribute="name")|join(",")
rows|sort(attribute="n,name")|map(attribute="name")|join(",")
rows|map(attribute="f.g")|list
rows|map(attribute="f.g", default=0)|list
rows|map(attribute="name")|map("upper")|list
rows|selectattr("n", "equalto", 2)|map(attribute="name")|list
rows|selectattr("n", "gt", 1)|list|length
rows|rejectattr("f")|map(attribute="name")|list
rows|selectattr("f", "defined")|list|length
rows|groupby("n")
rows|groupby("name")|map("first")|list
rows|sum(attribute="n")
rows|map(attribute="name")|unique|list
words|map("lower")|unique|list
rows|max(attribute="n")
list|max
list|min
words|min
[]|max
list|sum
list|sum(start=10)
[[1], [2]]|sum(start=[])
list|first
[]|first
list|last
list|reverse
list|reverse|list
list|batch(2)|list
list|batch(2, 0)|list
list|slice(2)|list
list|slice(2, 0)|list
list|select("odd")|list
list|reject("odd")|list
list|select|list
mixed|select("string")|list
list|map("string")|join
list|join("-")
list|count
5|length
none|length
(list|map("string"))|length
list.index(1)
list.index(9)
list.count(1)
list.append(4)
list[0]
list[-1]
list[9]
list[1:]
list[:-1]
list[::-1]
list["0"]
list.0
(1, 2)[0]
list is sequence
"x" is sequence
d is sequence
5 is sequence
list is iterable
"x" is iterable
5 is iterable
none is iterable
d is mapping
list is mapping
"x" is string
5 is number
true is number
5 is integer
true is integer
5.0 is float
true is boolean
none is none
undefined_name is undefined
none is defined
4 is even
4 is divisibleby 2
4 is divisibleby(3)
3 is odd
4 is eq 4
4 is in [4, 5]
4 is not none
4 is sameas 4
"a" is lower
"A" is upper
range is callable
s.upper is callable
"upper" is filter
"odd" is test
4 is nothing
4|nothing
nothing(4)
range(3)
range(1, 10, 3)|list
range(5, 0, -2)|list
range(3)[1]
range(3)|length
range(0)|list
range(1, 2, 3, 4)
range("a")
namespace(a=1).a
namespace({"a": 1}).a
namespace().a
namespace().a is defined
"a\nb\n\nc"|indent
"a\nb"|indent(2, true)
"a\n\nb"|indent(2, blank=true)
"a\nb"|indent("> ")
"<a href='x'>&"|e
"<b>x</b> <i>y</i>"|striptags
"a b c"|wordcount
"one two three four"|truncate(9)
"one two three four"|truncate(9, true)
"one two three four"|truncate(9, false, "…", 0)
"short"|truncate(9)
"a b/ü?"|urlencode
1000|filesizeformat
1500000|filesizeformat(true)
"aaa bbb ccc"|wordwrap(7)
mixed|pprint
"a"|attr("upper")
d|attr("b")
"yes" if n else "no"
"yes" if empty
("yes" if empty) is defined
"yes" if empty else "no" if none else "maybe"
n > 5 and x < 3
(n + 1) * 2
n - -1
- n
+ n
n|string + "a"
-n|abs
x|string|length
1_000 + 0x10 + 0b11 + 0o17
1.5e3
"\x41\u00e9\101\q"
"\d\\"
'it\'s'
[1, 2,]
{"a": 1,}
[n, x][1]
{"a": {"b": [1, 2]}}.a.b[1]
"a,b".split(",")[1]|upper
"a"|upper|lower ~ "b"|upper
n is defined and n is number or false
not n is none
[x for x in list]
lambda: 1
n = 1
n n
s.__class__
s.__class__.__mro__
(1).bit_length()
2.0.is_integer()
[[1, [2, [3]]], {"a": {"b": ()}}]
true|string ~ none|string
true|tojson ~ none|tojson
[1e-7, 1e22, -0.0, 123456789012345678901234567890]|tojson
{1: 2, none: 3, true: 4, 1.5: 5}|tojson
(1, 2)|tojson
range(2)|tojson
d.items()|tojson
"\u2028<>&'"|tojson
s|tojson|length
[s]|join|upper
"a"|string is string
"%s"|string % 5
[none]|join(",")
[1.0, 2]|join("/")
[["a"]]|join("/")
"abc"|join("-")
rows|join(",", attribute="name")
"A"|list|first|lower
words|map("replace", "b", "x")|list
words|map("default", "x")|list
words|select("in", ["b"])|list
words|select("equalto", "b")|list
x|round|int
x|round|string
(x * 2)|int
1.0|int|string
1e3|int
10 ** 20
10 ** 20 / 3
0.1 + 0.2
1 / 3
3.0
1e5
12345678901234567890.0
"abc" > "abd"
"Z" < "a"
[] or {} or "" or 0 or "end"
[[], {}, "", 0, none, false]|select|list
"é"|upper
"İ"|lower|length
"ﬁ"|upper
"straße"|upper
"ǆ"|title
""".strip().split("\n")

# Whole templates: statements and white space.
TEMPLATES = [
    "a\n{% if true %}\n  b\n{% endif %}\nc\n",
    "a\n  {% if true %}  \n  b\n  {%- endif %}\n c",
    "a\n  {%+ if true %}  b {%+ endif +%}\n c",
    "  {# note #}\n x {#- y -#}  z",
    "  {{- 1 -}}  a  {{ 2 }}\n",
    "{% raw %}\n {{ x }} {% if %}\n{% endraw %}\nend",
    "  {%- raw -%}  {{ x }}  {%- endraw -%}  end",
    "a\n\n",
    "\n\na",
    "{% for i in list %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.first }}{{ loop.last }}{{ loop.length }},{% endfor %}",
    "{% for i in list %}{{ loop.previtem }}-{{ loop.nextitem }};{% endfor %}",
    "{% for i in list %}{{ loop.previtem is defined }}{{ loop.cycle('a', 'b') }}{{ loop.changed(i > 1) }};{% endfor %}",
    "{% for i in list if i > 1 %}{{ i }}{{ loop.length }}{% else %}none{% endfor %}",
    "{% for i in [] %}{{ i }}{% else %}none{% endfor %}",
    "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}",
    "{% for k in d %}{{ k }}{% endfor %}",
    "{% for c in s %}{{ c }}.{% endfor %}",
    "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 5 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{% for i in [1, [2, [3]]] recursive %}{% if i is iterable %}({{ loop(i) }}){% else %}{{ i }}@{{ loop.depth }}{% endif %}{% endfor %}",
    "{% for a, (b, c) in [(1, (2, 3))] %}{{ a }}{{ b }}{{ c }}{% endfor %}",
    "{% for a, b in [1] %}{{ a }}{% endfor %}",
    "{% for i in 5 %}{% endfor %}",
    "{% for i in none %}{% endfor %}",
    "{% for i in undefined_name %}{% else %}empty{% endfor %}",
    "{% set y = 1 %}{% for i in list %}{{ y }}{% set y = i %}{{ y }}{% endfor %}{{ y }}",
    "{% set y = 1 %}{% if true %}{% set y = 2 %}{% endif %}{{ y }}",
    "{% set ns = namespace(y=1) %}{% for i in list %}{% set ns.y = ns.y + i %}{% endfor %}{{ ns.y }}",
    "{% set ns = namespace() %}{% set ns._y = 1 %}",
    "{% set n.y = 1 %}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}",
    "{% set a = 1, 2 %}{{ a }}",
    "{% set a %} x {% endset %}[{{ a }}]",
    "{% set a | trim | upper %} x {% endset %}[{{ a }}]",
    "{% with a = 1, b = 2 %}{{ a }}{{ b }}{% endwith %}{{ a }}",
    "{% with a = n %}{% set n = 3 %}{{ a }}{{ n }}{% endwith %}{{ n }}",
    "{% filter upper %}abc{{ s }}{% endfilter %}",
    "{% filter replace('a', 'b')|upper %}abc{% endfilter %}",
    "{% macro m(a, b=2, c='x') %}{{ a }}-{{ b }}-{{ c }}{% endmacro %}{{ m(1) }} {{ m(1, c=3) }} {{ m(1, 2, 3) }} {{ m() }}",
    "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}",
    "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(z=2) }}",
    "{% macro m() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, z=3) }}",
    "{% macro m() %}{{ n }}{{ later }}{% endmacro %}{% set later = 5 %}{{ m() }}",
    "{% macro m(x) %}{% if x > 0 %}{{ x }}{{ m(x - 1) }}{% endif %}{% endmacro %}{{ m(5) }}",
    "{% macro m() %}<{{ caller() }}>{% endmacro %}{% call m() %}body{{ n }}{% endcall %}",
    "{% macro m() %}<{{ caller(1) }}>{% endmacro %}{% call(v) m() %}body{{ v }}{% endcall %}",
    "{% macro m() %}{% set y = 5 %}{% endmacro %}{{ m() }}{{ y }}",
    "{% macro m(a) %}{{ a }}{% endmacro %}{{ m('x')|upper }}{{ m.name }}{{ m('<')|length }}",
    "{% for i in list %}{% macro m() %}{{ i }}{% endmacro %}{{ m() }}{% endfor %}",
    "{% macro m(a, b=a) %}{{ b }}{% endmacro %}{{ m(1) }}",
    "{% if false %}a{% elif true %}b{% else %}c{% endif %}",
    "{% if none %}a{% elif 0 %}b{% else %}c{% endif %}",
    "{% block x %}in{% endblock %}",
    "{% set j = joiner('; ') %}{% for i in list %}{{ j() }}{{ i }}{% endfor %}",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}{{ c.current }}",
    "{% generation %}x{{ n }}{% endgeneration %}",
    "{{ raise_exception('no') }}",
    "{% if true %}x",
    "{% endif %}",
    "{{ 1",
    "{% unknown %}",
    "{# open",
    "{{ '}}' }}{{ {'a': {'b': 1}} }}",
    "{{ \"%}\" }}{% if '%}' %}y{% endif %}",
    "{%- for m in rows -%}\n  {{ m.name }}\n{%- endfor -%}\n",
    "{%- for m in rows %}\n  {{- m.name }}\n{% endfor %}\n",
    "x{% if true -%}\n\n  y\n\n{%- endif %}z",
    "\t{% set a = 1 %}\n\t{{ a }}",
    "a {% set b = 1 %} c",
    "{% set a = [] %}{% set a = a + [1] %}{% set a = a + ['x'] %}{{ a }}",
    "{% set a = {} %}{% set a = dict(a, x=1) %}{{ a }}",
    "{% set x = 'v' %}{{ x }}{% set x = x ~ 'w' %}{{ x }}",
    "{%if n%}{{n}}{%endif%}",
    "{% for i in list %}{% for j in list %}{{ loop.index }}{% endfor %}{{ loop.index }};{% endfor %}",
    "{% for i in list %}{% set outer = loop %}{% for j in [1, 2] %}{{ outer.index }}{{ loop.index }} {% endfor %}{% endfor %}",
    "{% for i in list|sort|reverse %}{{ i }}{% endfor %}",
    "{% for i in list[1:] %}{{ i }}{% endfor %}",
    "{% for i in (list if n else []) %}{{ i }}{% endfor %}",
    "{% for r in rows %}{{ r.n if r.f is defined else '-' }}{% if not loop.last %}, {% endif %}{% endfor %}",
    "{% for r in rows if r.n == 2 and loop is undefined %}{{ r.name }}{% endfor %}",
    "{{ list|tojson }}{{ d['items']|tojson }}{{ d.items()|list|tojson }}",
]


class Generation(jinja2.ext.Extension):
    """`{% generation %}` blocks, whose body is rendered like that of a `{% call %}`."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller):
        return caller()


def environment():
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    class Namespace(jinja2.utils.Namespace):
        def __setitem__(self, name, value):
            if name.startswith("_"):
                raise jinja2.exceptions.SecurityError(name)
            super().__setitem__(name, value)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["namespace"] = Namespace
    return made


def main():
    made = environment()
    rendered = []
    for source in ["{{ " + expression + " }}" for expression in EXPRESSIONS] + TEMPLATES:
        try:
            text = made.from_string(source).render(**VARIABLES)
        except Exception:
            text = None
        # Addresses differ from run to run.
        if text is None or " object at 0x" not in text and "<function" not in text:
            rendered.append([source, text])
    lines = ",\n".join(json.dumps(entry) for entry in rendered)
    FILE.write_text('{"variables": ' + json.dumps(VARIABLES) + ',\n"rendered": [\n' + lines + "\n]}\n")
    print(f"{len(rendered)} templates, {sum(text is None for _, text in rendered)} of them errors")


if __name__ == "__main__":
    main()
