//! Chat templates that a run can choose by name, for base models whose folders have none.

/// A chat template, with the tokens that it writes.
#[derive(Debug, PartialEq, Eq)]
pub struct BuiltInTemplate {
    /// The name, as in Axolotl and LLaMA-Factory.
    pub name: &'static str,
    /// The text of the template.
    pub text: &'static str,
    /// The tokens around turns, which the tokenizer must have as single tokens.
    pub tokens: &'static [&'static str],
    /// The token that ends a turn. `None` if the end of a text ends a turn.
    pub end_of_turn: Option<&'static str>,
}

/// All templates. The Jinja files are our own; `built_in_tests.rs` compares their texts with the published formats.
pub const BUILT_IN: &[BuiltInTemplate] = &[
    BuiltInTemplate {
        name: "chatml",
        text: include_str!("templates/built_in/chatml.jinja"),
        tokens: &["<|im_start|>", "<|im_end|>"],
        end_of_turn: Some("<|im_end|>"),
    },
    BuiltInTemplate {
        name: "llama3",
        text: include_str!("templates/built_in/llama3.jinja"),
        tokens: &["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        end_of_turn: Some("<|eot_id|>"),
    },
    BuiltInTemplate {
        name: "gemma",
        text: include_str!("templates/built_in/gemma.jinja"),
        tokens: &["<start_of_turn>", "<end_of_turn>"],
        end_of_turn: Some("<end_of_turn>"),
    },
    BuiltInTemplate {
        name: "phi3",
        text: include_str!("templates/built_in/phi3.jinja"),
        tokens: &["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"],
        end_of_turn: Some("<|end|>"),
    },
    BuiltInTemplate {
        name: "zephyr",
        text: include_str!("templates/built_in/zephyr.jinja"),
        tokens: &[],
        end_of_turn: None,
    },
    BuiltInTemplate {
        name: "vicuna",
        text: include_str!("templates/built_in/vicuna.jinja"),
        tokens: &[],
        end_of_turn: None,
    },
    BuiltInTemplate {
        name: "alpaca",
        text: include_str!("templates/built_in/alpaca.jinja"),
        tokens: &[],
        end_of_turn: None,
    },
];

impl BuiltInTemplate {
    /// Returns the template called `name`.
    pub fn find(name: &str) -> Option<&'static BuiltInTemplate> {
        BUILT_IN.iter().find(|template| template.name == name)
    }
}

#[cfg(test)]
#[path = "built_in_tests.rs"]
mod tests;
