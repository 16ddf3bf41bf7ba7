use std::io::Read;

use super::*;
use crate::turns::Learned;
use flate2::read::GzDecoder;

fn template(text: &str) -> Result<ChatTemplate> {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("chat_template.jinja"), text).unwrap();
    let tokens = r#"{"bos_token": {"content": "<s>"}, "eos_token": "</s>"}"#;
    std::fs::write(folder.path().join("tokenizer_config.json"), tokens).unwrap();
    Ok(ChatTemplate::load(folder.path(), None, Clock::Fixed)?.unwrap())
}

fn assistant() -> Vec<String> {
    vec!["assistant".into()]
}

fn recorded(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name);
    let mut text = String::new();
    GzDecoder::new(std::fs::File::open(path).unwrap()).read_to_string(&mut text).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn chat(turns: &[(&str, &str)]) -> Chat {
    Chat { messages: turns.iter().map(|(role, content)| Chat::message(role, content)).collect(), ..Chat::default() }
}

const CHATML: &str = "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}\
                      {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Compares texts and ranges of generation blocks with the output of transformers 5.23 and jinja2 3.1.6 (scripts/make_chat_referee.py).
#[test]
fn templates_render_as_transformers_renders_them() {
    let data = recorded("chat_referee.json.gz");
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
        let rendered = template(source).unwrap().render_learned(&chat(&turns), &assistant()).unwrap().texts.remove(0);
        let learned: Vec<_> = rendered.learned.iter().map(|range| &rendered.text[range.clone()]).collect();
        assert_eq!(learned, expected);
    }
    let last = Chat { learned_from: 4, ..chat(&turns) };
    let rendered = template(CHATML).unwrap().render_learned(&last, &assistant()).unwrap().texts.remove(0);
    assert_eq!(rendered.learned.len(), 1);
    assert_eq!(&rendered.text[rendered.learned[0].clone()], "two<|im_end|>\n");
}

/// Returns the trained parts of each text.
fn parts(learned: &Learned) -> Vec<Vec<&str>> {
    let texts = learned.texts.iter();
    texts.map(|text| text.learned.iter().map(|range| &text.text[range.clone()]).collect()).collect()
}

#[test]
fn a_template_that_changes_earlier_turns_is_trained_turn_by_turn() {
    // The system message moves to the last turn of the user, as in Mistral's templates.
    let moving = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% if loop.last or loop.index0 == messages|length - 2 %}\
                  {{ 'SYSTEM' }}{% endif %}{% else %}{{ m.content }}{% endif %}{% endfor %}";
    let turns = chat(&[("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]);
    let learned = template(moving).unwrap().render_learned(&turns, &assistant()).unwrap();
    let texts: Vec<_> = learned.texts.iter().map(|text| text.text.as_str()).collect();
    assert_eq!((texts, learned.rewrites), (vec!["aSYSTEMb", "abcSYSTEMd"], Some(2)));
    assert_eq!(parts(&learned), [["b"], ["d"]]);
    // The prompt begins thinking, but an answer without thinking does not.
    let thinks = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant><think>{% endif %}";
    let learned = template(thinks).unwrap().render_learned(&turns, &assistant()).unwrap();
    assert_eq!(parts(&learned), [["b"], ["d"]]);
    let reason = template(CHATML).unwrap().render_learned(&chat(&[("user", "a")]), &assistant()).unwrap_err();
    assert!(reason.contains("no turn of the assistant"), "{reason}");
}

#[test]
fn values_have_the_texts_and_kinds_of_python() {
    let renders = |source: &str| template(source).unwrap().render(&chat(&[]), false).unwrap();
    assert_eq!(
        renders("{{ [{'a': 'b'}, none] | trim }}|{{ none | trim }}|{{ ' x ' | trim }}|{{ 'xax' | trim('x') }}"),
        "[{'a': 'b'}, None]|None|x|a"
    );
    let iterable = "{{ none is iterable }}|{{ 'a' is iterable }}|{{ [] is iterable }}|{{ 1 is iterable }}";
    assert_eq!(renders(iterable), "False|True|True|False");
    assert_eq!(renders("a\r\nb\rc"), "a\nb\nc");
}

#[test]
fn roles_and_messages_choose_what_is_learned() {
    let marked = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}\
                  {% else %}{{ m.content }}{% endif %}{% endfor %}";
    let mut turns = chat(&[("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]);
    let learned = |source: &str, turns: &Chat, roles: &[&str]| {
        let roles: Vec<String> = roles.iter().map(|role| role.to_string()).collect();
        template(source).unwrap().render_learned(turns, &roles).map(|learned| parts(&learned).concat().join("|"))
    };
    assert_eq!(
        learned(CHATML, &turns, &["user", "assistant"]).unwrap(),
        "<|im_start|>user\na<|im_end|>\n|b<|im_end|>\n|<|im_start|>user\nc<|im_end|>\n|d<|im_end|>\n"
    );
    turns.messages[1]["train"] = false.into();
    for (source, expected) in [(CHATML, "d<|im_end|>\n"), (marked, "d")] {
        assert_eq!(learned(source, &turns, &["assistant"]).unwrap(), expected);
    }
    turns.messages[2]["train"] = true.into();
    assert_eq!(
        learned(marked, &turns, &["assistant"]).unwrap(),
        "c|d",
        "turns without marks are found by what they add"
    );
    turns.messages[2]["train"] = false.into();
    turns.messages[3]["train"] = false.into();
    assert!(learned(CHATML, &turns, &["assistant"]).unwrap_err().contains("no turn of the conversation is trained on"));
}

/// Compares all texts and masks of `data`. Returns the numbers of texts and masks, and the names that differ.
fn compare(data: &Value) -> (usize, usize, Vec<String>) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer_config.json"), data["special_tokens"].to_string()).unwrap();
    let load = |name: &str| {
        std::fs::write(folder.path().join("chat_template.jinja"), data["templates"][name].as_str().unwrap()).unwrap();
        ChatTemplate::load(folder.path(), None, Clock::Fixed).unwrap().unwrap()
    };
    let chat = |chat: &Value| {
        let (messages, tools) = (chat["messages"].as_array().unwrap().clone(), chat["tools"].clone());
        Chat { messages, tools, ..Chat::default() }
    };
    let chats: Vec<Chat> = data["conversations"].as_array().unwrap().iter().map(chat).collect();
    assert_eq!(chats.len(), 30);
    let (mut texts, mut masks, mut wrong) = (0, 0, Vec::new());
    let mut compare = |name: &str, template: &ChatTemplate, recorded: &Value| {
        for (i, chat) in chats.iter().enumerate() {
            for prompt in [false, true] {
                let (found, expected) = (template.render(chat, prompt), recorded[i][usize::from(prompt)].as_str());
                if found.as_ref().ok().map(String::as_str) != expected {
                    wrong.push(format!("{name}, conversation {i}, prompt {prompt}:\n  {found:?}\n  {expected:?}"));
                }
                texts += 1;
            }
        }
    };
    for name in data["templates"].as_object().unwrap().keys() {
        let template = load(name);
        compare(name, &template, &data["rendered"][name]);
        let more = &data["kwargs"][name];
        if let Some(kwargs) = more["kwargs"].as_object() {
            let named = format!("{name} {kwargs:?}");
            compare(&named, &template.with_kwargs(kwargs.clone()).unwrap(), &more["rendered"]);
        }
    }
    let has_answer = |chat: &Chat| chat.messages.iter().any(|message| message["role"] == "assistant");
    for (name, recorded) in data["masks"].as_object().unwrap() {
        let template = load(name);
        assert!(template.is_replaced(), "{name}");
        for (i, chat) in chats.iter().enumerate().filter(|(_, chat)| has_answer(chat)) {
            let found = template.render_learned(chat, &assistant()).map(|mut learned| learned.texts.remove(0));
            let found = found.map(|found| (found.text.clone(), marks(&found)));
            let expected = recorded[i].as_array().map(|entry| {
                let text = entry[0].as_str().unwrap();
                (text.to_string(), marked_by(text, &entry[1]))
            });
            if found.as_ref().ok() != expected.as_ref() {
                wrong.push(format!("{name}, marks of conversation {i}:\n  {found:?}\n  {expected:?}"));
            }
            masks += 1;
        }
    }
    (texts, masks, wrong)
}

/// Compares published templates with texts of transformers 5.24, and replaced templates with marks of TRL (scripts/make_chat_masks.py).
#[test]
fn thinking_tools_and_parts_render_and_are_marked_as_in_transformers_and_trl() {
    let mut data = recorded("chat_masks.json.gz");
    let (texts, masks, wrong) = compare(&data);
    assert!(wrong.is_empty(), "{} of {texts} texts and {masks} masks:\n{}", wrong.len(), wrong.join("\n"));
    assert_eq!((texts, masks), (1980, 420));
    // One mask is made one character too long, and one text gets another end.
    let end = &mut data["masks"]["qwen3"][3][1][0][1];
    *end = (end.as_u64().unwrap() + 1).into();
    data["rendered"]["smollm3"][2][0] = "x".into();
    let (_, _, wrong) = compare(&data);
    assert_eq!(wrong.len(), 2, "planted mistakes are found: {wrong:?}");
    assert!(wrong[1].starts_with("qwen3, marks of conversation 3"), "{}", wrong[1]);
}

/// Returns whether each character is in the ranges that the referee marks.
fn marked_by(text: &str, ranges: &Value) -> Vec<bool> {
    let inside = |at: u64| {
        ranges.as_array().unwrap().iter().any(|range| range[0].as_u64() <= Some(at) && Some(at) < range[1].as_u64())
    };
    (0..text.chars().count() as u64).map(inside).collect()
}

/// Returns whether each character is trained on.
fn marks(rendered: &Rendered) -> Vec<bool> {
    let places = rendered.text.char_indices();
    places.map(|(at, _)| rendered.learned.iter().any(|range| range.contains(&at))).collect()
}

/// Tests the behaviour of `apply_chat_template` in transformers.
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

/// Qwen2.5's template writes arguments as JSON, so an argument that is text would be encoded twice. A template that tests the type accepts text and
/// objects.
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
        let rendered = template(source).unwrap().render_learned(&turns, &assistant()).unwrap().texts.remove(0);
        let learned: Vec<_> = rendered.learned.iter().map(|range| &rendered.text[range.clone()]).collect();
        assert_eq!(learned, [expected]);
        let none = template(source)
            .unwrap()
            .render_learned(&chat(&[("user", "a"), ("assistant", " ")]), &assistant())
            .unwrap();
        assert!(none.texts[0].learned.is_empty());
    }
}

#[test]
fn fields_that_a_template_does_not_read_are_known() {
    let message = serde_json::json!({"role": "assistant", "content": "c", "thinking": "t", "reasoning_content": "r"});
    let chat = Chat { messages: vec![message], ..Chat::default() };
    let unread = |source: &str| {
        let template = template(source).unwrap();
        template.unread_fields(&chat).into_iter().collect::<Vec<_>>()
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
        (
            "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
            "more than 20000000 steps",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", ""),
        ("{{ ('x' * 10000000)|upper * 7 }}", "more than 64 MiB"),
        ("{{ raise_exception('not so') }}", "not so (line 1)"),
        ("{{ messages[0].content.system.deep }}", "has no attribute 'system'"),
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

/// OpenAI's library writes messages in this form: `null` in unused fields, and an empty list of calls.
#[test]
fn null_fields_and_empty_calls_are_left_out_for_templates() {
    let source = "{% for m in messages %}{% if m.tool_calls is defined and m.tool_calls is not none %}CALLS{% endif %}\
                  {{ m.keys()|list }}{{ m.content is defined }};{% endfor %}";
    let dumped = |more: Value| {
        let mut message = serde_json::json!({"role": "assistant", "content": "yo", "refusal": null, "name": null});
        message.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        Chat { messages: vec![message], ..Chat::default() }
    };
    for calls in [serde_json::json!({"tool_calls": null}), serde_json::json!({"tool_calls": []})] {
        let template = template(source).unwrap();
        assert_eq!(template.render(&dumped(calls.clone()), false).unwrap(), "['role', 'content']True;", "{calls}");
        assert!(!template.unread_fields(&dumped(calls)).contains("refusal"), "null is no field that could go unread");
    }
    let asks = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.keys()|list }}{{ c.function.keys()|list }}{{ c.function.arguments }}{% endfor %}{% endfor %}";
    let call = serde_json::json!({"tool_calls": [{"id": null, "function": {"name": "f", "strict": null, "arguments": {"a": null}}}]});
    assert_eq!(
        template(asks).unwrap().render(&dumped(call), false).unwrap(),
        "['function']['name', 'arguments']{'a': None}"
    );
    // A template that needs the field gets `null`.
    let needs =
        "{% for m in messages %}{% if m.content is none %}null{% else %}{{ m.content + '' }}{% endif %}{% endfor %}";
    let call = serde_json::json!({"content": null, "tool_calls": [{"function": {"name": "f"}}]});
    assert_eq!(template(needs).unwrap().render(&dumped(call), false).unwrap(), "null");
}

#[test]
fn numbers_of_arguments_are_exact() {
    let source =
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}";
    let written =
        r#"{"a": 123456789012345678901234567890, "b": 1e-07, "c": -0.0, "d": 1e+22, "e": 18446744073709551615}"#;
    let record = format!(
        r#"{{"role": "assistant", "content": "", "tool_calls": [{{"function": {{"name": "f", "arguments": {written}}}}}]}}"#
    );
    let text = serde_json::json!({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": written}}]});
    for message in [crate::parse_json(&record).unwrap(), text] {
        let chat = Chat { messages: vec![message], ..Chat::default() };
        assert_eq!(template(source).unwrap().render(&chat, false).unwrap(), written);
    }
}

#[test]
fn parts_of_text_are_joined_for_templates_that_take_texts() {
    let parts = serde_json::json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
    let image = serde_json::json!([{"type": "image_url", "image_url": {"url": "x"}}]);
    let chat = |content: &Value| Chat {
        messages: vec![serde_json::json!({"role": "user", "content": content})],
        ..Chat::default()
    };
    let iterates = "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}";
    for (source, expected) in [("{% for m in messages %}{{ m.content }}{% endfor %}", "a\nb"), (iterates, "<a><b>")] {
        assert_eq!(template(source).unwrap().render(&chat(&parts), false).unwrap(), expected);
    }
    let reason = template(CHATML).unwrap().render(&chat(&image), false).unwrap_err();
    assert!(reason.contains("message 1: `content` has a part that is no text"), "{reason}");
}

#[test]
fn a_conversation_may_begin_with_the_assistant() {
    let source = "{{ messages[0].role ~ ':' }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}";
    let turns = chat(&[("assistant", "hello"), ("user", "a"), ("assistant", "b")]);
    let source = source.replace("messages[0].role", "messages[0].role.upper()");
    let learned = template(&source).unwrap().render_learned(&turns, &assistant()).unwrap();
    assert_eq!(parts(&learned), [["hello", "<assistant>b"]]);
}

#[test]
fn a_prompt_that_opens_thinking_otherwise_begins_the_turn_where_both_differ() {
    let source = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content or '' }}\n</think>{% endif %}\
                  {{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant><think>\n\n{% endif %}";
    let answer = serde_json::json!({"role": "assistant", "content": "b", "reasoning_content": "hm"});
    let turns = Chat { messages: vec![Chat::message("user", "a"), answer], ..Chat::default() };
    let learned = template(source).unwrap().render_learned(&turns, &assistant()).unwrap();
    assert_eq!(parts(&learned), [["hm\n</think>b"]]);
}

#[test]
fn additional_templates_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    let renders = |tools: Value| {
        let template = ChatTemplate::load(folder.path(), None, Clock::Fixed).unwrap().unwrap();
        template.render(&Chat { tools, ..chat(&[]) }, false).unwrap()
    };
    let tools = serde_json::json!([{"function": {"name": "f"}}]);
    write("chat_template.json", r#"{"chat_template": "json"}"#);
    assert_eq!((renders(Value::Null), renders(tools.clone())), ("json".into(), "json".into()));
    write("chat_template.jinja", "default");
    std::fs::create_dir(folder.path().join("additional_chat_templates")).unwrap();
    write("additional_chat_templates/tool_use.jinja", "tool_use");
    write("additional_chat_templates/rag.jinja", "rag");
    assert_eq!((renders(Value::Null), renders(tools)), ("default".into(), "tool_use".into()));
}
