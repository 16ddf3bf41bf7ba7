//! Published templates without `{% generation %}` blocks, and the templates with such blocks that replace them.
//!
//! The files in `templates/` are the training templates of TRL 1.16 (Apache-2.0, copyright The HuggingFace Team). The first lines of each file say
//! what it changes. As in TRL, a template is replaced only in training, and only if its text is the published text.

use ottava_common::hash::sha256;

/// SHA-256 of each published template (without white space at its end), and the template that replaces it in training.
const MARKED: &[(&str, &str)] = &[
    ("90c33aee14aa2a226127516d48ee9184c9b90745d4a04c484621ec2e82fb712c", include_str!("templates/cohere.jinja")),
    ("2147c474f41b522b7296f74692b9f31e45f49a31465960576a9d321339c5915a", include_str!("templates/cohere2.jinja")),
    (
        "56a1447ad31926fdc21fb07e56e5642bd9c850c4f52d8c8af7bbe5f079a84f5f",
        include_str!("templates/deepseek_r1_distill.jinja"),
    ),
    ("563b1ce7d61d50a9b4c7439a912a1116f095b712df5b5e4d3e1116049874eb64", include_str!("templates/deepseekv3.jinja")),
    ("ecd6ae513fe103f0eb62e8ab5bfa8d0fe45c1074fa398b089c93a7e70c15cfd6", include_str!("templates/gemma.jinja")),
    ("8d9e3a3c114fb2053ec500184677af4f7e5f8ec2582443cd535834e68b3ade29", include_str!("templates/gemma3.jinja")),
    ("44f815868bf02fa458dd2f741a338046f4bf45f398eb6d067766726b9d96cce3", include_str!("templates/glm4moe.jinja")),
    ("a4c9919cbbd4acdd51ccffe22da049264b1b73e59055fa58811a99efbd7c8146", include_str!("templates/gptoss.jinja")),
    ("ba03a121d097859c7b5b9cd03af99aafe95275210d2876f642ad9929a150f122", include_str!("templates/llama3.jinja")),
    ("dcaee66df77bfbb789ec541fe713218da30225a526f1db97138fc39ee6dc56aa", include_str!("templates/phi3.jinja")),
    ("78d976a442bcde2f0be15aafbb8e3050e1104f86732266f68403251b89982a90", include_str!("templates/phi3_5.jinja")),
    ("55b2f4a26ac9ee719330a61a0c39d9e538b0e9322212f048326318cff4f8674a", include_str!("templates/qwen2_5.jinja")),
    ("a55ee1b1660128b7098723e0abcd92caa0788061051c62d51cbe87d9cf1974d8", include_str!("templates/qwen3.jinja")),
    (
        "273d8e0e683b885071fb17e08d71e5f2a5ddfb5309756181681de4f5a1822d80",
        include_str!("templates/qwen3_5_nothink.jinja"),
    ),
    ("a4aee8afcf2e0711942cf848899be66016f8d14a889ff9ede07bca099c28f715", include_str!("templates/qwen3_5_think.jinja")),
    ("e84f32a23fdda27689f868aa4a1a5621f41133e51a48d7f3efcbea2839574259", include_str!("templates/qwen3_6.jinja")),
    (
        "64f85b198065d0fba2a81f37e10ed68161ce2c19a754c7100e67e0ca2ee9c326",
        include_str!("templates/qwen3_instruct_2507.jinja"),
    ),
];

/// Returns the template with marked turns that replaces `template` in training.
pub(super) fn marked(template: &str) -> Option<&'static str> {
    let sha256 = sha256(template.trim_end().as_bytes());
    MARKED.iter().find(|(published, _)| *published == sha256).map(|(_, marked)| *marked)
}
