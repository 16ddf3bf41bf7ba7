use crate::eval::Rendering;
use crate::limits::Limits;
use crate::*;

fn render(source: &str) -> Result<String, String> {
    let template = Template::parse(source).map_err(|failure| failure.to_string())?;
    // The limits of a run would take seconds to reach in a test build, so these limits are smaller.
    let rendering = Rendering::new(Vec::new(), Clock::Fixed, Limits::new(200_000, 4 << 20));
    rendering.run(&template.parsed.body).map_err(|failure| failure.to_string())
}

#[test]
fn growth_ends_with_an_error_before_memory_is_taken() {
    for source in [
        "{{ [1]|batch(10**12, 0)|list }}",
        "{{ [1]|slice(10**12)|list }}",
        "{{ 'a\nb'|indent(10**10) }}",
        "{{ {'a': 1}|tojson(indent=10**10) }}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (9999999999, 1) }}",
        "{{ '%.9999999999f' % 1 }}",
        "{{ 'a' * 10**10 }}",
        "{{ [1] * 10**10 }}",
        "{{ 10**10 * (1,) }}",
        "{{ 2 ** (10**9) }}",
        "{{ range(10**12)|list }}",
        "{{ 'a'.center(10**12) }}",
        "{{ 'a'|center(10**12) }}",
        "{{ 'a'.zfill(10**12) }}",
        "{{ '\t'.expandtabs(10**12) }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x|replace('a', 'aa') %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x.replace('', 'aa') %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x]|join(ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x.join([ns.x, ns.x]) %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = '{0}{0}'.format(ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='&&') %}{% for i in range(99) %}{% set ns.x = ns.x|tojson|tojson %}{% endfor %}",
        "{% set ns = namespace(x=[1, 2]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1, 2]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=[1, 2]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x == ns.x|list }}",
        "{% set ns = namespace(x=[]) %}{% for i in range(1000) %}{% set ns.x = [ns.x] %}{% endfor %}",
        "{% set ns = namespace(x={}) %}{% for i in range(1000) %}{% set ns.x = {'a': ns.x} %}{% endfor %}",
        "{% set ns = namespace(x=1) %}{% for i in range(1000) %}{% set ns.x = {'a': ns.x}.get %}{% endfor %}",
        "{% for i in range(100000) %}{{ 'x' * 100000 }}{% endfor %}",
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(x) %}{% if x %}{{ ('a' ~ f([x]|first))|trim }}{% endif %}{% endmacro %}{{ f(1) }}",
        "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{{ 'a b'|wordwrap(1, true, 'x' * 10000000) * 9 }}",
    ] {
        let reason = render(source).expect_err(source);
        assert!(reason.contains("more than") || reason.contains("width"), "{source}: {reason}");
    }
}

#[test]
fn deep_templates_are_refused_without_exhausting_the_stack() {
    let deep = |open: &str, close: &str| format!("{{{{ {}1{} }}}}", open.repeat(100_000), close.repeat(100_000));
    for source in [
        deep("(", ")"),
        deep("[", "]"),
        deep("not ", ""),
        deep("-", ""),
        deep("1 + ", ""),
        deep("1 if 1 else ", ""),
        deep("", "|list"),
        deep("", ".a"),
        deep("f(", ")"),
        "{% if 1 %}".repeat(100_000),
    ] {
        let reason = render(&source).unwrap_err();
        assert!(reason.contains("within each other") || reason.contains("too many parts"), "{reason}");
    }
}

/// Compares with the output of jinja2 3.1.6 in transformers' environment (scripts/make_jinja_expressions.py). The output is null if Python raises an
/// error.
#[test]
fn expressions_render_as_in_python() {
    let recorded: serde_json::Value =
        serde_json::from_str(include_str!("../tests/data/jinja_expressions.json")).unwrap();
    let variables: Vec<(String, Value)> = recorded["variables"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(name, json)| (name.clone(), value_of_json(json)))
        .collect();
    let mut wrong = Vec::new();
    let all = recorded["rendered"].as_array().unwrap();
    for entry in all {
        let (source, expected) = (entry[0].as_str().unwrap(), entry[1].as_str());
        let found = Template::parse(source).and_then(|template| template.render(variables.clone(), Clock::Fixed));
        let found = found.map(|text| text.replace(MARKS, "")).map_err(|failure| failure.to_string());
        if found.as_ref().ok().map(String::as_str) != expected {
            wrong.push(format!("{source}\n  found    {found:?}\n  expected {expected:?}"));
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), all.len(), wrong.join("\n"));
    assert!(all.len() > 300, "{}", all.len());
}

#[test]
fn templates_that_look_into_content_take_parts() {
    for (source, expected) in [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", false),
        (
            "{% for m in messages %}{% if '</think>' in m.content %}{{ m['content'].split('x')[1] }}{% endif %}{% endfor %}",
            false,
        ),
        ("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}", true),
        ("{% for m in messages %}{% if m.content is iterable %}{{ m.content|tojson }}{% endif %}{% endfor %}", false),
        (
            "{% macro f(content) %}{% if content is not string %}{% for p in content %}{% endfor %}{% endif %}{% endmacro %}",
            true,
        ),
        ("{{ messages[0].content | map(attribute='text') | join }}", true),
        (
            "{% for m in messages %}{% for p in m['content'] | selectattr('type', 'equalto', 'text') %}{% endfor %}{% endfor %}",
            true,
        ),
        ("{% for m in messages %}{{ m.content[0].text }}{% endfor %}", true),
        ("{% for m in messages %}{{ m.content[1:] }}{% endfor %}", false),
    ] {
        assert_eq!(Template::parse(source).unwrap().takes_parts(), expected, "{source}");
    }
}

/// Expected values from jinja2 3.1 with `Environment(undefined=StrictUndefined, keep_trailing_newline=True)`.
#[test]
fn strict_templates_keep_white_space_and_refuse_undefined_values() {
    let render = |source: &str| {
        let template = Template::parse_strict(source).map_err(|failure| failure.to_string())?;
        template.render(vec![("a".into(), Value::text("x"))], Clock::Fixed).map_err(|failure| failure.to_string())
    };
    for (source, expected) in [
        ("{{ a }}\n", "x\n"),
        ("  {% if a %}\n{{ a }}\n  {% endif %}\n", "  \nx\n  \n"),
        ("{# c #}\n{{ a }}", "\nx"),
        ("{%- if a -%}\n{{ a }} {% endif %}", "x "),
        ("{% raw %}\n{{ a }}{% endraw %}\n", "\n{{ a }}\n"),
        ("{{ b|default('y') }}{{ b is defined }}", "yFalse"),
        ("{{ b in [] }}{{ [b] }}", "False[Undefined]"),
    ] {
        assert_eq!(render(source).as_deref(), Ok(expected), "{source}");
    }
    for source in [
        "{{ b }}",
        "{{ b|upper }}",
        "{{ a ~ b }}",
        "{% if b %}{% endif %}",
        "{{ 1 if b else 2 }}",
        "{{ not b }}",
        "{{ b or a }}",
        "{% for c in b %}{% endfor %}",
        "{{ b == 'x' }}",
        "{{ 'x' == b }}",
        "{{ b != b }}",
        "{{ [b] == [1] }}",
        "{{ b in [1] }}",
        "{{ b in {} }}",
        "{{ {'x': 1}[b] }}",
        "{{ a in b }}",
        "{{ a not in b }}",
        "{{ [a, b]|join(' ') }}",
        "{{ [a, a]|join(b) }}",
    ] {
        assert_eq!(render(source).unwrap_err(), "'b' is undefined (line 1)", "{source}");
    }
}
