//! Texts of several families of models, whole and cut at every place.

use super::*;
use crate::format::start_of;
use crate::reasoning::Beginning;
use crate::tool_calls::ToolCallParser;
use ottava_data::{Chat, ChatTemplate, Clock, PromptForm};
use serde_json::{Value, json};
use std::path::Path;

/// Reasoning, content, and the names and arguments of calls.
type Found = (String, String, Vec<(String, String)>);

fn division(reasoning: Option<&str>, calls: Option<Calls>) -> Division {
    let reasoning = reasoning.map(|name| name.parse().unwrap());
    let parameters = json!({"properties": {
        "to": {"type": "string"}, "depth": {"type": "integer"}, "kind": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    }});
    let tools = Tools::new(&[json!({"type": "function", "function": {"name": "dive", "parameters": parameters}})]);
    Division { reasoning, opened: false, is_constrained: false, calls, tools, most: usize::MAX }
}

fn free(parser: &str) -> Option<Calls> {
    Some(Calls::Free(parser.parse().unwrap()))
}

/// Returns what a text has. Asserts that it is the same for the whole text, for every division into two parts, and for single characters.
fn parsed(division: &Division, text: &str) -> Found {
    let run = |parts: &[&str]| {
        let mut reader = Reader::new(division);
        let mut found = Found::default();
        let mut ended = 0;
        for (i, part) in parts.iter().enumerate() {
            for part in reader.push(part, i + 1 == parts.len()) {
                match part {
                    Part::Reasoning(text) => found.0 += &text,
                    Part::Content(text) => found.1 += &text,
                    Part::Call { name, .. } => found.2.push((name, String::new())),
                    Part::Arguments(text) => found.2.last_mut().expect("a call has begun").1 += &text,
                    Part::EndOfCall => ended += 1,
                }
            }
        }
        assert_eq!(ended, found.2.len(), "{text}: each call ends");
        found
    };
    let whole = run(&[text]);
    for (at, _) in text.char_indices() {
        assert_eq!(run(&[&text[..at], &text[at..]]), whole, "{text}, cut at {at}");
    }
    let characters: Vec<_> = text.char_indices().map(|(at, c)| &text[at..at + c.len_utf8()]).collect();
    assert_eq!(run(&characters), whole, "{text}, character by character");
    whole
}

fn expect(division: &Division, text: &str, reasoning: &str, content: &str, calls: &[(&str, &str)]) {
    let calls = calls.iter().map(|(name, arguments)| (name.to_string(), arguments.to_string())).collect();
    assert_eq!(parsed(division, text), (reasoning.into(), content.into(), calls), "{text}");
}

#[test]
fn reasoning_is_divided_from_content() {
    let think = division(Some("qwen3"), None);
    expect(&think, "<think>\nI see.\n</think>\n\nYes.", "I see.", "Yes.", &[]);
    expect(&think, "<think>\n\n</think>\n\nYes \n", "", "Yes \n", &[]);
    expect(&think, "No thought, a <think> within.", "", "No thought, a <think> within.", &[]);
    expect(&think, "<think>I am cut </thi", "I am cut </thi", "", &[]);
    expect(&think, "<thin", "", "<thin", &[]);
    expect(&think, "", "", "", &[]);
    let opened = Division { opened: true, ..division(Some("deepseek_r1"), None) };
    expect(&opened, "I see.\n</think>\n\nYes.", "I see.", "Yes.", &[]);
    expect(&opened, "\n<think>\nI see.</think>Yes.", "I see.", "Yes.", &[]);
    expect(&opened, "I go on", "I go on", "", &[]);
    expect(&division(Some("mistral"), None), "[THINK]I see.[/THINK]Yes.", "I see.", "Yes.", &[]);
    expect(&division(Some("seed_oss"), None), "<seed:think>a</seed:think>b", "a", "b", &[]);
    let text = "<think>a</think>Well\n<tool_call>\n{\"name\": \"dive\", \"arguments\": {}}\n</tool_call>";
    expect(&division(Some("think"), free("hermes")), text, "a", "Well", &[("dive", "{}")]);
    // A text that is constrained to calls may have reasoning before them.
    let required = division(Some("think"), Some(Calls::Required));
    expect(&required, r#"[{"name": "dive", "parameters": {}}]"#, "", "", &[("dive", "{}")]);
    expect(&required, r#"<think>a</think>[{"name": "dive", "parameters": {}}]"#, "a", "", &[("dive", "{}")]);
}

#[test]
fn channels_are_reasoning_content_and_calls() {
    let gpt_oss = division(Some("gpt_oss"), free("openai"));
    let text = "<|channel|>analysis<|message|>Look. <|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>\
                <|start|>assistant<|channel|>commentary to=functions.dive <|constrain|>json<|message|>{\"depth\": 3}";
    expect(&gpt_oss, text, "Look.", "I look.", &[("dive", "{\"depth\": 3}")]);
    let text = "<|channel|>analysis<|message|>a<|end|><|start|>assistant to=functions.dive<|channel|>commentary json<|message|>{}<|call|>\
                <|start|>assistant<|channel|>final<|message|>Done < 3 <|return|>";
    expect(&gpt_oss, text, "a", "Done < 3 ", &[("dive", "{}")]);
    expect(&gpt_oss, "<|channel|>final<|message|>Yes.", "", "Yes.", &[]);
    let text = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>Here.";
    expect(&gpt_oss, text, "", "I look.\n\nHere.", &[]);
    expect(&gpt_oss, "No channel.", "", "No channel.", &[]);
    expect(&gpt_oss, "<|channel|>anal", "", "", &[]);
    let without = division(Some("gpt_oss"), None);
    expect(&without, "<|channel|>commentary to=functions.dive<|message|>{}<|call|>", "", "{}", &[]);
    let constrained = Division { is_constrained: true, ..without };
    let text = "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary to=functions.dive<|message|>{}<|call|>\
                <|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>{\"depth\": 3}";
    expect(&constrained, text, "Look.\n\n{}\n\nI look.", "{\"depth\": 3}", &[]);
    expect(&constrained, "{\"depth\": 3}", "", "{\"depth\": 3}", &[]);
}

#[test]
fn calls_are_found_in_each_format() {
    let arguments = r#"{"depth": 3, "to": "é\"}</"}"#;
    let dive = format!(r#"{{"name": "dive", "arguments": {arguments}}}"#);
    let other = dive.replace("arguments", "parameters");
    let backwards = r#"{"arguments": {"depth":3}, "name": "dive"}"#;
    let call = ("dive", arguments);
    for (parser, text, content, calls) in [
        ("hermes", format!("<tool_call>\n{dive}\n</tool_call>"), "", vec![call]),
        (
            "hermes",
            format!("Yes: <x>\n<tool_call>{dive}</tool_call>\n<tool_call>{dive}</tool_call>\n"),
            "Yes: <x>",
            vec![call; 2],
        ),
        ("hermes", format!("<tool_call>{dive}"), "", vec![call]),
        ("hermes", format!("<tool_call>{dive}\n<tool_call>{dive}</tool_call>"), "", vec![call; 2]),
        ("hermes", format!("<tool_call>{backwards}</tool_call>"), "", vec![("dive", "{\"depth\":3}")]),
        ("hermes", "<tool_call>{\"name\": </tool_call> no".into(), "<tool_call>{\"name\": </tool_call> no", vec![]),
        ("hermes", "<tool_call>{\"na".into(), "<tool_call>{\"na", vec![]),
        // The answer ends within the arguments.
        (
            "hermes",
            "<tool_call>{\"name\": \"dive\", \"arguments\": {\"to\": \"a".into(),
            "",
            vec![("dive", "{\"to\": \"a")],
        ),
        ("hermes", "a < b <tool".into(), "a < b <tool", vec![]),
        ("hermes", "text \n".into(), "text \n", vec![]),
        ("llama3_json", other.clone(), "", vec![call]),
        ("llama3_json", format!("<|python_tag|>{other}; {other}"), "", vec![call; 2]),
        ("llama3_json", format!("I call {other}"), &format!("I call {other}"), vec![]),
        ("llama3_json", "{\"a\": 1}".into(), "{\"a\": 1}", vec![]),
        ("llama3_json", "{\"name".into(), "{\"name", vec![]),
        ("mistral", format!("[TOOL_CALLS] [{dive}, {dive}]"), "", vec![call; 2]),
        ("mistral", format!("Well [1] [TOOL_CALLS][{dive}]"), "Well [1]", vec![call]),
        ("mistral", format!("[TOOL_CALLS][{dive}, {{\"na"), "", vec![call]),
        ("mistral", format!("Well [TOOL_CALLS]dive[ARGS]{arguments}"), "Well", vec![call]),
        (
            "mistral",
            format!("[TOOL_CALLS]dive[ARGS]{arguments}\n[TOOL_CALLS] dive [ARGS] {arguments}"),
            "",
            vec![call; 2],
        ),
        ("mistral", format!("[TOOL_CALLS]dive[CALL_ID]a1b2c3d4e[ARGS]{arguments}"), "", vec![call]),
        ("mistral", "[TOOL_CALLS]dive[ARGS]{\"depth\"".into(), "", vec![("dive", "{\"depth\"")]),
        ("mistral", "[TOOL_CALLS][ARGS]{} no".into(), "[TOOL_CALLS][ARGS]{} no", vec![]),
        ("mistral", "[TOOL_CALLS]a [TOOL_CALLS]b[ARGS]{}".into(), "[TOOL_CALLS]a", vec![("b", "{}")]),
        ("mistral", "[TOOL_CALLS]dive[ARGS]3 no".into(), "[TOOL_CALLS]dive[ARGS]3 no", vec![]),
    ] {
        expect(&division(None, free(parser)), &text, "", content, &calls);
    }
    let required = division(None, Some(Calls::Required));
    expect(&required, &format!("[{other}, {other}]"), "", "", &[call; 2]);
    // If the answer ends early, complete calls stay calls, and a call that is cut before its arguments is left out.
    expect(&required, "[", "", "", &[]);
    expect(&required, "[{\"name\"", "", "", &[]);
    expect(&required, &format!("[{other}, {{\"name\": \"di"), "", "", &[call]);
    let named = division(None, Some(Calls::Named("dive".into())));
    expect(&named, "{\"depth\"", "", "", &[("dive", "{\"depth\"")]);
}

#[test]
fn calls_between_tags_have_values_by_their_schema() {
    let dive = r#"{"to": "a \"b\"\nc", "depth": 3}"#;
    let qwen = "<tool_call>\n<function=dive>\n<parameter=to>\na \"b\"\nc\n</parameter>\n<parameter=depth>\n3\n</parameter>\n</function>\n</tool_call>";
    let glm = "<tool_call>dive\n<arg_key>to</arg_key>\n<arg_value>a \"b\"\nc</arg_value>\n<arg_key>depth</arg_key>\n<arg_value>3</arg_value>\n</tool_call>";
    let minimax = "<minimax:tool_call>\n<invoke name=\"dive\">\n<parameter name=\"to\">a \"b\"\nc</parameter>\n<parameter name=\"depth\">3</parameter>\n</invoke>\n</minimax:tool_call>";
    for (parser, text) in [("qwen3_coder", qwen), ("glm45", glm), ("minimax_m2", minimax)] {
        let division = division(None, free(parser));
        expect(&division, &format!("Well.\n{text}"), "", "Well.", &[("dive", dive)]);
        expect(&division, &format!("{text}\n{text}\n"), "", "", &[("dive", dive); 2]);
        let early = &text[..text.find("\nc").unwrap() + 2];
        expect(&division, early, "", "", &[("dive", r#"{"to": "a \"b\"\nc"#)]);
    }
    let qwen = division(None, free("qwen3_coder"));
    // A text that looks like a number stays a text, an unknown parameter is JSON if it can be, and the tag around calls may be missing.
    let text = "<function=dive><parameter=to>007</parameter><parameter=other>{\"a\": [1]}</parameter><parameter=third>True</parameter><parameter=kind>x y</parameter></function>";
    expect(&qwen, text, "", "", &[("dive", r#"{"to": "007", "other": {"a": [1]}, "third": true, "kind": "x y"}"#)]);
    expect(&qwen, "<function=dive>\n</function>", "", "", &[("dive", "{}")]);
    expect(&qwen, "<tool_call> is a tag, <function= too", "", "<tool_call> is a tag, <function= too", &[]);
    let glm = division(None, free("glm45"));
    expect(&glm, "<tool_call>rest</tool_call>", "", "", &[("rest", "{}")]);
    expect(
        &glm,
        "<tool_call>rise<arg_key>list</arg_key><arg_value>[1, 2]</arg_value></tool_call>",
        "",
        "",
        &[("rise", r#"{"list": [1, 2]}"#)],
    );
    expect(&glm, "a <tool_call> {\"b\"} c", "", "a <tool_call> {\"b\"} c", &[]);
}

#[test]
fn calls_between_special_tokens_have_names_and_ids() {
    let v3 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>dive\n```json\n{\"depth\": 3}\n```<｜tool▁call▁end｜>\n\
              <｜tool▁call▁begin｜>function<｜tool▁sep｜>rise\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    let v31 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>dive<｜tool▁sep｜>{\"depth\": 3}<｜tool▁call▁end｜>\
               <｜tool▁call▁begin｜>rise<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    let kimi = "<|tool_calls_section_begin|><|tool_call_begin|>functions.dive:0<|tool_call_argument_begin|>{\"depth\": 3}<|tool_call_end|>\
                <|tool_call_begin|>functions.rise:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>";
    for (parser, text) in [("deepseek_v3", v3), ("deepseek_v31", v31), ("kimi_k2", kimi)] {
        let division = division(None, free(parser));
        expect(&division, &format!("Well. {text}"), "", "Well.", &[("dive", "{\"depth\": 3}"), ("rise", "{}")]);
        let early = &text[..text.find("3}").unwrap()];
        expect(&division, early, "", "", &[("dive", "{\"depth\": ")]);
    }
    let mut reader = Reader::new(&division(None, free("kimi_k2")));
    let first = reader.push(kimi, true).swap_remove(0);
    assert_eq!(first, Part::Call { name: "dive".into(), id: Some("functions.dive:0".into()) });
}

#[test]
fn calls_of_python_become_json() {
    let pythonic = division(None, free("llama4_pythonic"));
    let text = r#"[dive(to='it\'s [1]', depth=-3, all=[1, 2.5, (True, None)], of={"a": {'b': "c"}}), rest()]"#;
    let dive = r#"{"to":"it's [1]","depth":-3,"all":[1,2.5,[true,null]],"of":{"a":{"b":"c"}}}"#;
    expect(&pythonic, text, "", "", &[("dive", dive), ("rest", "{}")]);
    expect(&pythonic, &format!("<|python_start|>{text}<|python_end|>"), "", "", &[("dive", dive), ("rest", "{}")]);
    expect(&pythonic, "[1, 2] is a list", "", "[1, 2] is a list", &[]);
    expect(&pythonic, "Yes [dive()]", "", "Yes [dive()]", &[]);
    expect(&pythonic, "[dive(depth=3), rise(de", "", "rise(de", &[("dive", "{\"depth\":3}")]);
}

#[test]
fn what_comes_after_the_last_call_that_there_may_be_is_dropped() {
    let object = |name: &str| format!(r#"{{"name": "{name}", "arguments": {{}}}}"#);
    let [dive, rise] = ["dive", "rise"].map(object);
    for (parser, text) in [
        ("hermes", format!("Yes <tool_call>{dive}</tool_call> and <tool_call>{rise}</tool_call> so")),
        ("llama3_json", format!("{dive}; {rise}")),
        ("mistral", format!("Yes [TOOL_CALLS][{dive}, {rise}] so")),
        ("mistral", "Yes [TOOL_CALLS]dive[ARGS]{} and [TOOL_CALLS]rise[ARGS]{}".into()),
    ] {
        let content = if parser == "llama3_json" { "" } else { "Yes" };
        let one = Division { most: 1, ..division(None, free(parser)) };
        expect(&one, &text, "", content, &[("dive", "{}")]);
        assert_eq!(parsed(&division(None, free(parser)), &text).2.len(), 2, "{parser}: {text}");
    }
}

/// The published templates that tests of chats have too.
#[test]
fn parsers_are_chosen_by_the_template() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ottava-data/src/templates");
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/tokenizer");
    for (name, calls, reasoning) in [
        ("qwen2_5", Some("hermes"), None),
        ("qwen3", Some("hermes"), Some("think")),
        ("qwen3_6", Some("qwen3_coder"), Some("think")),
        ("glm4moe", Some("glm45"), Some("think")),
        ("deepseekv3", Some("deepseek_v3"), Some("think")),
        ("deepseek_r1_distill", Some("deepseek_v3"), Some("think")),
        ("gptoss", Some("openai"), Some("gpt_oss")),
        ("gemma", None, None),
        ("phi3", None, None),
    ] {
        let file = folder.join(format!("{name}.jinja"));
        let template = ChatTemplate::load(&data, Some(&file), Clock::Now).unwrap().unwrap();
        let found = ToolCallParser::of_template(&template).map(ToolCallParser::name);
        assert_eq!(found, calls, "{name}");
        assert_eq!(ReasoningParser::of_template(&template).map(ReasoningParser::name), reasoning, "{name}");
    }
    let think: ReasoningParser = "think".parse().unwrap();
    for (prompt, continued, beginning) in [
        ("<|assistant|><think>\n", None, Beginning::Within),
        ("<think>\n\n</think>\n\n", None, Beginning::After),
        ("<|assistant|>", None, Beginning::Before),
        ("…", Some("<think>I"), Beginning::Within),
        ("…", Some("<think>I</think>So"), Beginning::After),
    ] {
        assert_eq!(think.beginning(prompt, continued), beginning, "{prompt} {continued:?}");
    }
    let marks = |parser: &str, beginning| parser.parse::<ReasoningParser>().unwrap().before_constraint(beginning);
    let open = |beginning| marks("think", beginning).map(|marks| marks.open);
    assert_eq!(
        [Beginning::Before, Beginning::Within, Beginning::After].map(open),
        [Some(Some("<think>")), Some(None), None]
    );
    // A message may have more in its header before the marker of its text.
    let channels = marks("gpt_oss", Beginning::Before).unwrap();
    assert_eq!((channels.close, channels.then), ("<|channel|>final", Some("<|message|>")));
    assert_eq!(marks("gpt_oss", Beginning::After), None);
    assert!("none".parse::<ToolCallParser>().unwrap_err().contains("hermes, qwen"));
}

/// Models learn to write calls as the template writes the calls of earlier turns.
#[test]
fn parsers_read_the_calls_that_templates_write() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ottava-data/src/templates");
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/tokenizer");
    let arguments = json!({"to": "the \"deep\" sea\n<é>", "depth": 3});
    let call = |id: &str| json!({"id": id, "type": "function", "function": {"name": "dive", "arguments": arguments}});
    let schema = json!({"type": "object", "properties": {"to": {"type": "string"}, "depth": {"type": "integer"}}, "required": ["to"]});
    let tools =
        json!([{"type": "function", "function": {"name": "dive", "description": "Dives.", "parameters": schema}}]);
    for (name, end, count) in [
        ("qwen2_5", "<|im_end|>", 2),
        ("qwen3", "<|im_end|>", 2),
        ("qwen3_instruct_2507", "<|im_end|>", 2),
        ("qwen3_5_think", "<|im_end|>", 2),
        ("qwen3_6", "<|im_end|>", 2),
        ("glm4moe", "<|observation|>", 2),
        ("deepseekv3", "<｜end▁of▁sentence｜>", 2),
        ("gptoss", "<|call|>", 1),
    ] {
        let file = folder.join(format!("{name}.jinja"));
        let template = ChatTemplate::load(&data, Some(&file), Clock::Now).unwrap().unwrap();
        let ids = &["c00000001", "c00000002"][..count];
        let turn = json!({"role": "assistant", "content": "", "tool_calls": ids.iter().map(|id| call(id)).collect::<Vec<_>>()});
        let text = |turns: &[&Value], add_generation_prompt: bool| {
            let messages =
                [&[Chat::message("user", "Dive!")][..], &turns.iter().map(|turn| (*turn).clone()).collect::<Vec<_>>()]
                    .concat();
            let chat = Chat { messages, tools: tools.clone(), ..Chat::default() };
            template.prompt_text(&chat, &PromptForm { add_generation_prompt, ..PromptForm::default() }).unwrap()
        };
        let (prompt, whole) = (text(&[], true), text(&[&turn], false));
        let same =
            prompt.char_indices().zip(whole.chars()).find(|((_, a), b)| a != b).map_or(prompt.len(), |((at, _), _)| at);
        // Both may go on with a marker.
        let same = whole[..same].trim_end_matches('<').len();
        let answer = whole[same..].split(end).next().unwrap();
        let reasoning = ReasoningParser::of_template(&template);
        let opened = reasoning.is_some_and(|parser| parser.beginning(&whole[..same], None) == Beginning::Within);
        let parser = ToolCallParser::of_template(&template).unwrap();
        let division = Division {
            reasoning,
            opened,
            tools: Tools::new(tools.as_array().unwrap()),
            ..division(None, Some(Calls::Free(parser)))
        };
        let (thought, content, calls) = parsed(&division, answer);
        assert_eq!((thought.as_str(), content.as_str(), calls.len()), ("", "", count), "{name}: {answer}");
        for (called, found) in calls {
            assert_eq!(
                (called.as_str(), serde_json::from_str::<Value>(&found).unwrap()),
                ("dive", arguments.clone()),
                "{name}"
            );
        }
    }
}

/// Long parts of texts, which formats wait for, and white space without end.
#[test]
fn long_texts_are_read_like_short_ones() {
    let (long, space) = ("x".repeat(6000), "\n".repeat(6000));
    let object = |text: &str| format!(r#"{{"arguments": {{"a": "{text}"}}, "name": "dive"}}"#);
    for (parser, text, calls) in [
        ("hermes", format!("<tool_call>{space}{}</tool_call>", object(&long)), 1),
        ("llama3_json", object(&long), 1),
        ("mistral", format!("[TOOL_CALLS][{}, {}]", object(&long), object("b")), 2),
        ("mistral", format!("[TOOL_CALLS]dive[CALL_ID]{long}[ARGS]{{}}"), 0),
        ("llama4_pythonic", format!("[dive(a='{long}', b={{'c': ['{long}']}}), rise()]"), 2),
        ("llama4_pythonic", format!("[dive(a='{long}'{long}"), 0),
        ("openai", format!("<|channel|>commentary to=functions.dive {long}<|message|>{{}}<|call|>"), 1),
        (
            "qwen3_coder",
            format!("<tool_call>{space}<function=dive><parameter=depth>[{long}]</parameter></function>"),
            1,
        ),
        ("qwen3_coder", format!("<tool_call><function=dive><parameter={long}>1</parameter></function>"), 1),
        ("deepseek_v3", format!("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{long}<｜tool▁sep｜>{{}}"), 0),
    ] {
        let division = division(None, free(parser));
        let run = |size: usize| {
            let (mut reader, mut found) = (Reader::new(&division), (String::new(), Vec::new()));
            let ends: Vec<usize> =
                (1..text.len()).filter(|&end| end % size == 0 && text.is_char_boundary(end)).collect();
            for (begin, end) in std::iter::once(&0).chain(&ends).zip(ends.iter().chain([&text.len()])) {
                for part in reader.push(&text[*begin..*end], *end == text.len()) {
                    match part {
                        Part::Content(text) => found.0 += &text,
                        Part::Call { name, .. } => found.1.push(name),
                        Part::Arguments(text) => found.1.last_mut().unwrap().push_str(&text),
                        Part::Reasoning(_) | Part::EndOfCall => {}
                    }
                }
            }
            found
        };
        let whole = run(text.len());
        assert_eq!(whole.1.len(), calls, "{parser}: {}", start_of(&text, 60));
        assert!([7, 1001].into_iter().all(|size| run(size) == whole), "{parser}: {}", start_of(&text, 60));
    }
}
