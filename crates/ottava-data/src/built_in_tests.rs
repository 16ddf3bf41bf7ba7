use crate::built_in::BUILT_IN;
use crate::chat::{Chat, ChatTemplate};
use ottava_jinja::Clock;

fn template(text: &str) -> ChatTemplate {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("chat_template.jinja"), text).unwrap();
    let tokens = r#"{"bos_token": "<s>", "eos_token": "</s>"}"#;
    std::fs::write(folder.path().join("tokenizer_config.json"), tokens).unwrap();
    ChatTemplate::load(folder.path(), None, Clock::Fixed).unwrap().unwrap()
}

fn chat(turns: &[(&str, &str)]) -> Chat {
    Chat { messages: turns.iter().map(|(role, content)| Chat::message(role, content)).collect(), ..Chat::default() }
}

/// The published format of each template: two turns after a system message, and a prompt without one.
#[test]
fn built_in_templates_render_the_published_formats() {
    let vicuna = "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, and polite answers to the \
                  user's questions. ";
    let expected = [
        (
            "chatml",
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n\
             <|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\nSee you<|im_end|>\n"
                .to_string(),
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n".to_string(),
        ),
        (
            "llama3",
            "<s><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>\
             <|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>\
             <|start_header_id|>assistant<|end_header_id|>\n\nSee you<|eot_id|>"
                .into(),
            "<s><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n".into(),
        ),
        (
            "gemma",
            "<s><start_of_turn>user\nBe kind.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n<start_of_turn>user\nBye<end_of_turn>\n\
             <start_of_turn>model\nSee you<end_of_turn>\n"
                .into(),
            "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n".into(),
        ),
        (
            "phi3",
            "<|system|>\nBe kind.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nHello<|end|>\n<|user|>\nBye<|end|>\n<|assistant|>\nSee you<|end|>\n".into(),
            "<|user|>\nHi<|end|>\n<|assistant|>\n".into(),
        ),
        (
            "zephyr",
            "<|system|>\nBe kind.</s>\n<|user|>\nHi</s>\n<|assistant|>\nHello</s>\n<|user|>\nBye</s>\n<|assistant|>\nSee you</s>\n".into(),
            "<|user|>\nHi</s>\n<|assistant|>\n".into(),
        ),
        (
            "vicuna",
            "<s>Be kind. USER: Hi ASSISTANT: Hello</s>USER: Bye ASSISTANT: See you</s>".into(),
            format!("<s>{vicuna}USER: Hi ASSISTANT:"),
        ),
        (
            "alpaca",
            "<s>Be kind.\n\n### Instruction:\nHi\n\n### Response:\nHello</s>\n\n### Instruction:\nBye\n\n### Response:\nSee you</s>\n\n".into(),
            "<s>Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n### Instruction:\nHi\n\n\
             ### Response:\n"
                .into(),
        ),
    ];
    assert_eq!(expected.len(), BUILT_IN.len());
    let turns =
        [("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Bye"), ("assistant", "See you")];
    for ((name, all, prompt), built_in) in expected.iter().zip(BUILT_IN) {
        assert_eq!(built_in.name, *name);
        let template = template(built_in.text);
        assert_eq!(template.render(&chat(&turns), false).as_ref(), Ok(all), "{name}");
        assert_eq!(template.render(&chat(&turns[1..2]), true).as_ref(), Ok(prompt), "{name}");
        // An answer is learned with the token that ends it, and nothing else.
        let learned = template.render_learned(&chat(&turns), &["assistant".into()]).unwrap();
        let [text] = &learned.texts[..] else { panic!("{name}: one text") };
        let parts: Vec<_> = text.learned.iter().map(|range| text.text[range.clone()].trim()).collect();
        let end = built_in.end_of_turn.unwrap_or("</s>");
        assert_eq!(parts, [format!("Hello{end}"), format!("See you{end}")], "{name}");
        assert!(built_in.tokens.iter().all(|token| all.contains(token)), "{name} writes its tokens");
        let tool = chat(&[("user", "Hi"), ("tool", "4")]);
        let refusal = template.render(&tool, false);
        // ChatML and Llama 3 write any role.
        match *name {
            "chatml" | "llama3" => assert!(refusal.unwrap().contains("tool"), "{name}"),
            _ => assert!(refusal.unwrap_err().contains("no turns of the role tool"), "{name}"),
        }
    }
}

#[test]
fn gemma_drops_no_system_message() {
    let gemma = template(BUILT_IN.iter().find(|built_in| built_in.name == "gemma").unwrap().text);
    let turns = [("system", "Be kind."), ("assistant", "Hello")];
    for (turns, prompts) in [(&turns[..], false), (&turns[..1], true)] {
        let error = gemma.render(&chat(turns), prompts).unwrap_err();
        assert!(error.contains("a system message begins the next turn of the user"), "{error}");
    }
}
