use std::io::Read;

use super::*;
use flate2::read::GzDecoder;

fn template(text: &str) -> Result<ChatTemplate> {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("chat_template.jinja"), text).unwrap();
    let tokens = r#"{"bos_token": {"content": "<s>"}, "eos_token": "</s>"}"#;
    std::fs::write(folder.path().join("tokenizer_config.json"), tokens).unwrap();
    Ok(ChatTemplate::load(folder.path(), None, Clock::Fixed)?.unwrap())
}

fn chat(turns: &[(&str, &str)]) -> Chat {
    Chat { messages: turns.iter().map(|(role, content)| Chat::message(role, content)).collect(), ..Chat::default() }
}

const CHATML: &str = "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}\
                      {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Texts and ranges of generation blocks that transformers 5.23 with jinja2 3.1.6 has rendered (scripts/make_chat_referee.py).
#[test]
fn templates_render_as_transformers_renders_them() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/chat_referee.json.gz");
    let mut text = String::new();
    GzDecoder::new(std::fs::File::open(path).unwrap()).read_to_string(&mut text).unwrap();
    let data: Value = serde_json::from_str(&text).unwrap();
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer_config.json"), data["special_tokens"].to_string()).unwrap();
    let chats = data["conversations"].as_array().unwrap();
    assert_eq!(chats.len(), 30);
    let mut compared = 0;
    for (name, source) in data["templates"].as_object().unwrap() {
        std::fs::write(folder.path().join("chat_template.jinja"), source.as_str().unwrap()).unwrap();
        let template = ChatTemplate::load(folder.path(), None, Clock::Fixed).unwrap().unwrap();
        for (i, chat) in chats.iter().enumerate() {
            for prompt in [false, true] {
                let expected = &data["rendered"][name][i][usize::from(prompt)];
                let found = template.render_marked(chat["messages"].as_array().unwrap(), &chat["tools"], prompt);
                let Some(text) = expected[0].as_str() else {
                    assert!(found.is_err(), "{name} refuses conversation {i}: {found:?}");
                    continue;
                };
                let found = found.unwrap_or_else(|reason| panic!("{name}, conversation {i}: {reason}"));
                assert_eq!(found.text, text, "{name}, conversation {i}, prompt {prompt}");
                let place = |at: usize| found.text[..at].chars().count();
                let ranges: Vec<_> = found.learned.iter().map(|range| [place(range.start), place(range.end)]).collect();
                assert_eq!(serde_json::json!(ranges), expected[1], "{name}, conversation {i}");
                compared += 1;
            }
        }
    }
    assert!(compared > 900, "{compared}");
}

#[test]
fn turns_of_the_assistant_are_found_in_any_template() {
    let marked = "{% for m in messages %}{{ '<' + m.role + '>' }}{%- if m.role == 'assistant' -%}{% generation %}\
                  {{ m.content }}{{ eos_token }}{%- endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}";
    let turns = [("system", "s"), ("user", "é?"), ("assistant", "one"), ("user", "more?"), ("assistant", "two")];
    for (source, expected) in [(CHATML, ["one<|im_end|>\n", "two<|im_end|>\n"]), (marked, ["one</s>", "two</s>"])] {
        let rendered = template(source).unwrap().render_learned(&chat(&turns)).unwrap();
        let learned: Vec<_> = rendered.learned.iter().map(|range| &rendered.text[range.clone()]).collect();
        assert_eq!(learned, expected);
    }
    let last = Chat { learned_from: 4, ..chat(&turns) };
    let rendered = template(CHATML).unwrap().render_learned(&last).unwrap();
    assert_eq!(rendered.learned.len(), 1);
    assert_eq!(&rendered.text[rendered.learned[0].clone()], "two<|im_end|>\n");
}

#[test]
fn a_template_without_prefixes_is_an_error() {
    // The system message moves to the last turn of the user, as in Mistral's templates.
    let moving = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% if loop.last or loop.index0 == messages|length - 2 %}\
                  {{ 'SYSTEM' }}{% endif %}{% else %}{{ m.content }}{% endif %}{% endfor %}";
    let turns = chat(&[("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]);
    let reason = template(moving).unwrap().render_learned(&turns).unwrap_err();
    assert!(reason.contains("what precedes message 2 differently"), "{reason}");
    let reason = template(CHATML).unwrap().render_learned(&chat(&[("user", "a")])).unwrap_err();
    assert!(reason.contains("no turn of the assistant"), "{reason}");
}

/// As `apply_chat_template` of transformers does.
#[test]
fn prompts_can_go_on_with_the_last_message_and_have_variables() {
    let chatml = template(CHATML).unwrap();
    let asked = chat(&[("user", "a?"), ("assistant", " Well, ")]);
    let whole = PromptForm { add_generation_prompt: false, ..PromptForm::default() };
    let opened = chatml.prompt_text(&asked, &PromptForm::default()).unwrap();
    assert_eq!(opened, chatml.render(&asked, true).unwrap());
    assert_eq!(chatml.prompt_text(&asked, &whole).unwrap(), chatml.render(&asked, false).unwrap());
    let go_on = PromptForm { continue_final_message: true, ..whole };
    let text = "<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\n Well, ";
    assert_eq!(chatml.prompt_text(&asked, &go_on).unwrap(), text);
    let stripped = template("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}").unwrap();
    assert_eq!(stripped.prompt_text(&asked, &go_on).unwrap(), "[a?][Well,");
    assert!(chatml.prompt_text(&chat(&[("user", " ")]), &go_on).unwrap_err().contains("no text to continue"));
    let thinks =
        template("{{ bos_token }}{% if enable_thinking is defined and not enable_thinking %}no{% endif %}").unwrap();
    let kwargs = serde_json::json!({"enable_thinking": false}).as_object().unwrap().clone();
    assert_eq!(thinks.prompt_text(&asked, &PromptForm::default()).unwrap(), "<s>");
    assert_eq!(thinks.prompt_text(&asked, &PromptForm { kwargs, ..PromptForm::default() }).unwrap(), "<s>no");
    assert!(thinks.reads_variable("enable_thinking", false) && !thinks.reads_variable("think", false));
}

/// Qwen2.5's template writes arguments as JSON, so text would be encoded twice; one that asks for the type takes both.
#[test]
fn arguments_of_calls_that_are_text_are_encoded_once() {
    let call = |arguments: Value| serde_json::json!({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]});
    let object = serde_json::json!({"a": 1, "b": "x"});
    let writes =
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}";
    let asks = "{% for m in messages %}{% for c in m.tool_calls %}{% if c.function.arguments is string %}{{ c.function.arguments }}\
                {% else %}{{ c.function.arguments | tojson }}{% endif %}{% endfor %}{% endfor %}";
    let written = r#"{"a": 1, "b": "x"}"#;
    let dense = r#"{"a":1,"b":"x"}"#;
    for (source, arguments, expected) in [
        (writes, object.clone(), written),
        (writes, dense.into(), written),
        (writes, "no JSON".into(), "\"no JSON\""),
        (asks, object, written),
        (asks, dense.into(), dense),
    ] {
        let chat = Chat { messages: vec![call(arguments)], ..Chat::default() };
        assert_eq!(template(source).unwrap().render(&chat, false).unwrap(), expected, "{source}");
    }
}

#[test]
fn empty_turns_are_no_targets() {
    let turns = chat(&[("user", "a"), ("assistant", ""), ("user", "b"), ("assistant", "c")]);
    let marked = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}\
                  {% else %}{{ m.content }}{% endif %}{% endfor %}";
    for (source, expected) in [(CHATML, "c<|im_end|>\n"), (marked, "c</s>")] {
        let rendered = template(source).unwrap().render_learned(&turns).unwrap();
        let learned: Vec<_> = rendered.learned.iter().map(|range| &rendered.text[range.clone()]).collect();
        assert_eq!(learned, [expected]);
        let none = template(source).unwrap().render_learned(&chat(&[("user", "a"), ("assistant", " ")])).unwrap();
        assert!(none.learned.is_empty());
    }
}

#[test]
fn fields_that_a_template_does_not_read_are_known() {
    let message = serde_json::json!({"role": "assistant", "content": "c", "thinking": "t", "reasoning_content": "r"});
    let chat = Chat { messages: vec![message], ..Chat::default() };
    let unread = |source: &str| {
        let template = template(source).unwrap();
        template.unread_fields(&chat).into_iter().map(str::to_string).collect::<Vec<_>>()
    };
    assert_eq!(unread(CHATML), ["reasoning_content", "thinking"]);
    assert_eq!(unread(&format!("{CHATML}{{{{ messages[0].reasoning_content }}}}")), ["thinking"]);
    assert!(unread("{% for message in messages %}{{ message | tojson }}{% endfor %}").is_empty());
    assert!(!template(CHATML).unwrap().reads_variable("tools", true));
    assert!(template("{% if tools %}{{ tools | tojson }}{% endif %}").unwrap().reads_variable("tools", true));
}

#[test]
fn hostile_templates_end_with_an_error() {
    for (source, says) in [
        ("{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}", "fuel"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", ""),
        ("{% for i in range(100000) %}{{ 'x' * 100000 }}{% endfor %}", "more than 64 MiB"),
        ("{{ raise_exception('not so') }}", "not so (line 1)"),
        ("{{ messages[0].content.system.deep }}", "undefined"),
        ("{{ strftime_now('%Q') }}", "`%Q`"),
    ] {
        let reason = template(source).unwrap().render(&chat(&[("user", "x")]), false).unwrap_err();
        assert!(reason.contains(says), "{source}: {reason}");
    }
    assert!(template("{% for %}").err().unwrap().to_string().contains("chat_template.jinja: "));
    let marks = template(CHATML).unwrap().render(&chat(&[("user", "\u{fdd0}")]), false).unwrap_err();
    assert!(marks.contains("U+FDD0"), "{marks}");
}

#[test]
fn a_template_is_found_where_folders_have_it() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    let load = |other| ChatTemplate::load(folder.path(), other, Clock::Fixed);
    let renders = |other| load(other).unwrap().unwrap().render(&chat(&[]), false).unwrap();
    assert!(load(None).unwrap().is_none());
    let other = folder.path().join("other");
    write("tokenizer_config.json", r#"{"chat_template": "one"}"#);
    assert_eq!(renders(None), "one");
    let named = r#"{"chat_template": [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ bos_token }}"}]}"#;
    write("tokenizer_config.json", named);
    write("special_tokens_map.json", r#"{"bos_token": "<s>"}"#);
    assert_eq!(renders(None), "<s>");
    let tools = Chat { tools: serde_json::json!([]), ..chat(&[]) };
    assert_eq!(load(None).unwrap().unwrap().render(&tools, false).unwrap(), "tools");
    write("chat_template.jinja", "two");
    assert_eq!(renders(None), "two");
    write("other", "three");
    assert_eq!(renders(Some(&other)), "three");
    std::fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
    write("tokenizer_config.json", r#"{"chat_template": [{"name": "rag", "template": ""}]}"#);
    assert!(load(None).err().unwrap().to_string().contains("a template named `default`"));
}
