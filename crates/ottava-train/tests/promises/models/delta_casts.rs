//! The linears of gated delta nets that settings cast to FP8.

use crate::setup::config;
use ottava_models::Decoder;
use ottava_recipe::{Precision, PrecisionOverride, RecipeName};
use serde_json::json;

/// Settings can cast the projections of a gated delta net, but not the projections of its gates.
#[test]
fn gates_of_states_are_never_cast() {
    for (model_type, expected) in [
        ("qwen3_next", vec![("in_proj_qkvz", true), ("in_proj_ba", false), ("out_proj", true)]),
        (
            "qwen3_5_text",
            vec![
                ("in_proj_qkv", true),
                ("in_proj_z", true),
                ("in_proj_b", false),
                ("in_proj_a", false),
                ("out_proj", true),
            ],
        ),
    ] {
        let sizes = config(json!({
            "model_type": model_type, "vocab_size": 96, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2,
            "num_attention_heads": 4, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
        }));
        let describe = |change: fn(&mut Precision)| {
            let mut precision = Precision { recipe: RecipeName::Fp8Block, ..Precision::default() };
            precision.exceptions.skip_slow_linears = false;
            change(&mut precision);
            Decoder::describe(&sizes, &precision.recipe())
        };
        let model = describe(|_| {}).unwrap();
        let of_layer = model.linears.iter().filter_map(|(site, decision)| {
            Some((site.name.strip_prefix("model.layers.0.linear_attn.")?, decision.fp8.is_some()))
        });
        assert_eq!(of_layer.collect::<Vec<_>>(), expected, "{model_type}");
        let owner = |name: &str| {
            let name = format!("model.layers.0.linear_attn.{name}");
            let (site, _) = model.linears.iter().find(|(site, _)| site.name == name).unwrap();
            model.input_owner(&site.name).rsplit('.').next().unwrap().to_string()
        };
        for (name, shares) in &expected[..expected.len() - 1] {
            assert_eq!(owner(name), if *shares { expected[0].0 } else { name }, "{model_type}");
        }
        assert_eq!(owner("out_proj"), "out_proj");
        describe(|precision| precision.exceptions.high_precision_layers = vec!["*.linear_attn".into()]).unwrap();
        describe(|precision| precision.exceptions.high_precision_layers = vec!["*.in_proj_*a".into()]).unwrap();
        let only_gates = |precision: &mut Precision| {
            let (layers, recipe) = (vec!["*.in_proj_*a".into()], Some(RecipeName::Bf16));
            precision.overrides =
                vec![PrecisionOverride { layers, recipe, fp8_format: None, high_precision_products: None }];
        };
        let error = describe(only_gates).unwrap_err().to_string();
        assert!(error.contains("`*.in_proj_*a` matches no linear of this model"), "{error}");
    }
}
