//! The meaning of the keys of `config.json`: values and precedence must match transformers 5.24.

mod layers;

use crate::layers::{HeadsSpec, LatentSpec};
use crate::*;
use serde_json::{Value, json};

/// Returns a file with the sizes of a small model, and these keys.
fn file(keys: Value) -> ConfigFile {
    let mut values = match keys["model_type"] == "gpt2" {
        true => json!({"vocab_size": 96, "n_embd": 64, "n_head": 4, "n_layer": 4}),
        false => json!({
            "vocab_size": 96, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 4, "num_attention_heads": 4,
        }),
    };
    let values = values.as_object_mut().unwrap();
    values.extend(keys.as_object().unwrap().clone());
    ConfigFile::from_values("config.json", values.clone())
}

fn with(mut keys: Value, key: &str, value: Value) -> Value {
    keys[key] = value;
    keys
}

fn read(keys: Value) -> DecoderConfig {
    decoder_config(&file(keys.clone())).unwrap_or_else(|error| panic!("{keys}: {error}"))
}

fn error(keys: Value) -> String {
    decoder_config(&file(keys.clone())).map(|_| ()).expect_err(&keys.to_string()).to_string()
}

/// Returns the attention of the first layer.
fn heads(keys: Value) -> HeadsSpec {
    *read(keys).heads().expect("heads of their own")
}

/// Returns the rotary positions of the model, followed by the rotary positions of layers with a window.
fn ropes<const N: usize>(keys: Value) -> [RopeScaling; N] {
    read(keys).ropes.try_into().expect("as many as asked for")
}

/// Returns the first rotary positions of the model.
fn rope(keys: Value) -> RopeScaling {
    read(keys).ropes.swap_remove(0)
}

/// Returns keys that keep a model small, and that give a hybrid model layers of each kind.
fn small(model_type: &str) -> Value {
    let hybrid = ["mamba", "attention", "mamba", "mamba"];
    match model_type {
        // transformers has no default for the number of chosen experts either.
        "deepseek_v2" => json!({"model_type": model_type, "num_experts_per_tok": 2}),
        "deepseek_v3" | "deepseek_v32" | "glm_moe_dsa" | "kimi_k2" => {
            json!({"model_type": model_type, "num_key_value_heads": 4})
        }
        "dots1" => json!({
            "model_type": model_type, "n_routed_experts": 4, "num_experts_per_tok": 2, "max_window_layers": 1,
        }),
        "bamba" => json!({"model_type": model_type, "attn_layer_indices": [1, 3]}),
        "granitemoehybrid" => json!({"model_type": model_type, "layer_types": hybrid}),
        "nemotron_h" => json!({"model_type": model_type, "hybrid_override_pattern": "ME*-"}),
        _ => json!({"model_type": model_type}),
    }
}

#[test]
fn missing_keys_have_the_values_of_transformers() {
    // max_position_embeddings, rope_theta (0 without rotary positions), epsilon, head_dim, tied
    let expected = [
        ("llama", 2048, 1e4, 1e-6, 16, false),
        ("mistral", 131_072, 1e4, 1e-6, 16, false),
        ("ministral", 131_072, 1e4, 1e-6, 16, false),
        ("ministral3", 262_144, 1e6, 1e-5, 128, false),
        ("qwen2", 32_768, 1e4, 1e-6, 16, false),
        ("qwen2_5_vl_text", 32_768, 1e6, 1e-5, 16, false),
        ("qwen3_vl_text", 128_000, 5e5, 1e-6, 128, false),
        ("qwen3_vl_moe_text", 128_000, 5e5, 1e-6, 16, true),
        ("granitemoe", 2048, 1e4, 1e-6, 16, false),
        ("granitemoeshared", 2048, 1e4, 1e-6, 16, false),
        ("gpt_neox", 2048, 1e4, 1e-5, 16, false),
        ("qwen3", 32_768, 1e4, 1e-6, 128, false),
        ("gpt2", 1024, 0.0, 1e-5, 16, true),
        ("cohere", 8192, 5e5, 1e-5, 16, true),
        ("gemma2", 8192, 1e4, 1e-6, 256, true),
        ("gemma3_text", 131_072, 1e6, 1e-6, 256, true),
        ("phi3", 4096, 1e4, 1e-5, 16, false),
        ("olmo2", 2048, 1e4, 1e-5, 16, false),
        ("granite", 2048, 1e4, 1e-6, 16, false),
        ("smollm3", 32_768, 2e6, 1e-6, 16, true),
        ("mixtral", 131_072, 1e6, 1e-5, 16, false),
        ("qwen2_moe", 32_768, 1e4, 1e-6, 16, false),
        ("qwen3_moe", 32_768, 1e4, 1e-6, 16, false),
        ("olmoe", 4096, 1e4, 1e-5, 16, false),
        ("deepseek_v2", 2048, 1e4, 1e-6, 192, false),
        ("deepseek_v3", 4096, 1e4, 1e-6, 192, false),
        ("gpt_oss", 131_072, 1.5e5, 1e-5, 64, false),
        ("glm4", 131_072, 1e4, 1.5625e-7, 128, false),
        ("glm4_moe", 131_072, 1e4, 1e-5, 16, false),
        ("glm4_moe_lite", 202_752, 1e4, 1e-5, 256, false),
        ("olmo3", 2048, 5e5, 1e-5, 16, false),
        ("exaone4", 2048, 1e4, 1e-5, 16, false),
        ("cohere2", 8192, 1e4, 1e-5, 16, true),
        ("seed_oss", 524_288, 1e4, 1e-6, 128, false),
        ("ernie4_5", 131_072, 5e5, 1e-5, 128, true),
        ("dots1", 2048, 1e4, 1e-6, 16, false),
        ("minimax_m2", 196_608, 5e6, 1e-6, 128, false),
        ("kimi_k2", 4096, 1e4, 1e-6, 192, false),
        ("arcee", 4096, 1e4, 1e-5, 16, false),
        ("stablelm", 4096, 1e4, 1e-5, 16, false),
        ("ernie4_5_moe", 131_072, 5e5, 1e-5, 16, true),
        ("hunyuan_v1_dense", 2048, 1e4, 1e-5, 16, false),
        ("hunyuan_v1_moe", 2048, 1e4, 1e-5, 16, false),
        ("exaone_moe", 2048, 1e4, 1e-5, 16, false),
        ("glm", 131_072, 1e4, 1.5625e-7, 128, false),
        ("qwen3_next", 32_768, 1e4, 1e-6, 256, false),
        ("qwen3_5_text", 32_768, 1e4, 1e-6, 256, false),
        ("qwen3_5_moe_text", 32_768, 1e4, 1e-6, 256, false),
        ("bamba", 262_144, 1e4, 1e-5, 16, false),
        ("granitemoehybrid", 2048, 0.0, 1e-6, 16, false),
        ("falcon_h1", 8192, 1e4, 1e-5, 16, false),
        ("nemotron_h", 4096, 0.0, 1e-5, 128, false),
        ("llama4_text", 131_072, 5e5, 1e-5, 128, false),
        ("deepseek_v32", 163_840, 1e4, 1e-6, 192, false),
        ("glm_moe_dsa", 202_752, 1e4, 1e-5, 256, false),
        ("apertus", 65_536, 12e6, 1e-5, 16, false),
        ("gemma4_text", 131_072, 1e6, 1e-6, 256, true),
        // The first rows of RoBERTa's table, up to the row of the padding token, are no positions.
        ("bert", 512, 0.0, 1e-12, 16, true),
        ("roberta", 510, 0.0, 1e-12, 16, true),
        ("xlm-roberta", 510, 0.0, 1e-12, 16, true),
        ("modernbert", 8192, 1.6e5, 1e-5, 16, true),
    ];
    for (model_type, positions, theta, epsilon, head_dim, tied) in expected {
        let sizes = read(small(model_type));
        let head_dim_of = |latent: &LatentSpec| latent.sizes.head_dim();
        let own_dim = sizes.heads().map(|heads| heads.head_dim).or(sizes.latent().map(head_dim_of)).unwrap();
        let own_theta = sizes.rope().map_or(0.0, |rope| rope.theta);
        let found = (sizes.max_positions, own_theta, sizes.stream.norm.eps, own_dim, sizes.head.tied);
        assert_eq!(found, (positions, theta, epsilon, head_dim, tied), "{model_type}");
    }
    assert_eq!(FAMILIES.len(), expected.len(), "every family is listed");

    let experts = |model_type: &str| {
        let sizes = read(small(model_type));
        let experts = sizes.experts().unwrap();
        let shared = experts.shared.map_or(0, |shared| shared.hidden);
        (experts.count, experts.routing.chosen, experts.hidden, shared, experts.routing.scale)
    };
    assert_eq!(experts("mixtral"), (8, 2, 112, 0, 1.0));
    assert_eq!(experts("qwen2_moe"), (60, 4, 1408, 5632, 1.0));
    assert_eq!(experts("qwen3_moe"), (128, 8, 768, 0, 1.0));
    assert_eq!(experts("qwen3_vl_moe_text"), (60, 4, 1408, 0, 1.0));
    assert_eq!(experts("granitemoe"), (8, 2, 112, 0, 1.0));
    assert_eq!(experts("olmoe"), (64, 8, 112, 0, 1.0));
    assert_eq!(experts("gpt_oss"), (128, 4, 112, 0, 1.0));
    assert_eq!(experts("deepseek_v3"), (256, 8, 2048, 2048, 2.5));
    assert_eq!(experts("glm4_moe"), (128, 8, 1408, 1408, 1.0));
    assert_eq!(experts("glm4_moe_lite"), (64, 4, 1536, 1536, 1.8));
    assert_eq!(experts("exaone_moe"), (64, 8, 1024, 1024, 2.5));
    assert_eq!(experts("ernie4_5_moe"), (64, 6, 1536, 3072, 1.0));
    assert_eq!(experts("minimax_m2"), (256, 8, 112, 0, 1.0));
    assert_eq!(experts("qwen3_next"), (512, 10, 512, 512, 1.0));
    assert_eq!(experts("qwen3_5_moe_text"), (256, 8, 512, 512, 1.0));
    assert_eq!(experts("llama4_text"), (16, 1, 112, 112, 1.0));
    assert_eq!(experts("deepseek_v32"), (256, 8, 2048, 2048, 2.5));
    let v3 = read(small("deepseek_v3"));
    let groups = v3.experts().unwrap().routing.groups.unwrap();
    let dense: Vec<_> = v3.layers.iter().map(|layer| layer.mlp().is_some()).collect();
    assert_eq!((groups.count, groups.chosen, v3.folder.carried.len()), (8, 4, 1));
    assert_eq!(dense, [true, true, true, false]);
    assert_eq!(v3.latent().unwrap().sizes.query_rank, Some(1536));
    let lite = read(with(small("deepseek_v3"), "q_lora_rank", Value::Null));
    assert_eq!(lite.latent().unwrap().sizes.query_rank, None, "null is a value");

    let kv_heads = |keys: Value| heads(keys).kv_heads;
    assert_eq!(kv_heads(json!({"model_type": "mistral", "num_attention_heads": 16})), 8);
    assert_eq!(kv_heads(json!({"model_type": "mistral", "num_attention_heads": 16, "num_key_value_heads": null})), 16);
    assert_eq!(kv_heads(json!({"model_type": "llama"})), 4);
    let window = json!({"model_type": "qwen3_moe", "use_sliding_window": true});
    assert_eq!(heads(window.clone()).window, Some(4096));
    assert_eq!(heads(with(window, "sliding_window", Value::Null)).window, None);
}

#[test]
fn other_names_of_keys_replace_them() {
    let count = |keys: Value| read(keys).experts().unwrap().count;
    assert_eq!(count(json!({"model_type": "mixtral", "num_local_experts": 4, "num_experts": 6})), 6);
    assert_eq!(count(json!({"model_type": "olmoe", "num_experts": 16, "num_local_experts": 8})), 8);
    assert_eq!(count(json!({"model_type": "qwen3_moe", "num_experts": 16, "num_local_experts": 8})), 8);
    assert_eq!(
        count(json!({"model_type": "qwen2_moe", "num_experts": 16, "num_local_experts": 8})),
        16,
        "no other name"
    );
    assert_eq!(count(with(small("deepseek_v3"), "num_experts", json!(16))), 256, "no other name");
    assert_eq!(count(with(small("deepseek_v3"), "num_local_experts", json!(16))), 16);
    assert_eq!(read(json!({"model_type": "gpt2", "num_hidden_layers": 3})).layers.len(), 3);
}

#[test]
fn the_model_type_decides() {
    let window = |keys: Value| heads(keys).window;
    let as_mistral = json!({"model_type": "mistral", "architectures": ["LlamaForCausalLM"]});
    assert_eq!(window(as_mistral.clone()), Some(4096));
    let ignored = read(as_mistral).folder.ignored;
    assert!(ignored.len() == 1 && ignored[0].contains("`architectures` is `LlamaForCausalLM`"), "{ignored:?}");
    assert_eq!(window(json!({"model_type": "llama", "architectures": ["MistralForCausalLM"]})), None);
    assert_eq!(window(json!({"architectures": ["MistralForCausalLM"]})), Some(4096), "without a type");
    assert_eq!(window(json!({"model_type": "mistral"})), Some(4096), "without an architecture");
    assert!(read(json!({"model_type": "llama", "architectures": ["LLaMAForCausalLM"]})).folder.ignored.is_empty());
    assert!(error(json!({})).contains("the key `model_type` is missing"));
    assert!(
        error(json!({"model_type": "exaone", "architectures": ["LlamaForCausalLM"]}))
            .contains("`exaone` is not one of llama")
    );
    assert!(
        error(json!({"model_type": "llama", "architectures": ["LlamaModel"]}))
            .contains("`LlamaModel` is not one of LlamaFor")
    );
    let reward = json!({"model_type": "qwen2", "architectures": ["LlamaForSequenceClassification"], "num_labels": 1});
    let sizes = read(reward.clone());
    assert!(sizes.head.labels == Some(1) && sizes.heads().unwrap().qkv_bias, "the decoder is Qwen2's");
    assert!(error(with(reward, "model_type", json!("granite"))).contains("is not one of GraniteForCausalLM"));
}

#[test]
fn layers_of_a_mistral_may_have_types() {
    let types = json!(["sliding_attention", "full_attention", "full_attention", "sliding_attention"]);
    let keys = json!({"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 8, "layer_types": types});
    for keys in [keys.clone(), with(keys.clone(), "model_type", json!("ministral"))] {
        let sizes = read(keys);
        assert_eq!([0, 1, 2, 3].map(|layer| sizes.layers[layer].window()), [Some(8), None, None, Some(8)]);
        assert!(sizes.folder.ignored.is_empty(), "{:?}", sizes.folder.ignored);
    }
    let null = read(with(keys, "layer_types", Value::Null));
    assert_eq!([0, 1, 2, 3].map(|layer| null.layers[layer].window()), [Some(8); 4]);
}

#[test]
fn rope_scaling_beside_rope_parameters_is_read_or_refused() {
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
    let plain = json!({"rope_type": "default", "rope_theta": 10_000.0});
    let both = |scaling: &Value, parameters: &Value| json!({"model_type": "llama", "rope_scaling": scaling, "rope_parameters": parameters});
    let alone = rope(json!({"model_type": "llama", "rope_scaling": yarn}));
    assert!(matches!(alone.kind, RopeKind::Yarn(_)));
    assert_eq!(rope(both(&yarn, &plain)), alone);
    assert_eq!(rope(both(&yarn, &yarn)), alone);
    for nothing in [Value::Null, json!({})] {
        assert_eq!(rope(both(&nothing, &yarn)), alone);
    }
    // transformers would fall back to a base of 10,000.
    let other_theta = with(plain.clone(), "rope_theta", json!(1e6));
    let other_kind = json!({"rope_type": "linear", "factor": 2.0});
    for parameters in [other_theta.clone(), other_kind] {
        assert!(error(both(&yarn, &parameters)).contains("`rope_scaling` and `rope_parameters` say different"));
    }
    assert!(error(both(&plain, &yarn)).contains("say different"));
    assert_eq!(rope(with(both(&yarn, &other_theta), "rope_theta", json!(1e6))).theta, 1e6);
    let proportional = json!({"rope_type": "proportional", "factor": 2.0});
    assert_eq!(
        rope(json!({"model_type": "llama", "rope_scaling": proportional})).kind,
        RopeKind::Linear { factor: 2.0 }
    );
    let nested = json!({"full_attention": {"rope_type": "linear", "factor": 2.0}});
    assert_eq!(rope(json!({"model_type": "llama", "rope_parameters": nested})), RopeScaling::plain(10_000.0));
    assert!(error(json!({"model_type": "qwen3", "rope_parameters": nested})).contains("the key `full_attention`"));
    // `rope_scaling` replaces the nested `rope_parameters`.
    let both = json!({"model_type": "qwen3", "rope_parameters": nested, "rope_scaling": yarn});
    assert!(matches!(rope(both).kind, RopeKind::Yarn(_)));
    // `rope_scaling` replaces the default scaling of gpt-oss.
    let gpt_oss = rope(json!({"model_type": "gpt_oss", "rope_scaling": {"rope_type": "linear", "factor": 2.0}}));
    assert_eq!((gpt_oss.kind, gpt_oss.theta), (RopeKind::Linear { factor: 2.0 }, 150_000.0));
    assert!(matches!(rope(json!({"model_type": "gpt_oss"})).kind, RopeKind::Yarn(_)));
}

#[test]
fn gemma3_joins_rope_scaling_and_rope_parameters() {
    let keys = |scaling: Value, parameters: Value| json!({"model_type": "gemma3_text", "rope_scaling": scaling, "rope_parameters": parameters});
    let (linear, full) =
        (json!({"rope_type": "linear", "factor": 8.0}), json!({"rope_type": "default", "rope_theta": 5e5}));
    let [joined, local] =
        ropes(keys(linear.clone(), json!({"full_attention": full, "sliding_attention": {"rope_theta": 2e4}})));
    assert_eq!((joined.kind, joined.theta), (RopeKind::Linear { factor: 8.0 }, 5e5));
    assert_eq!(local.theta, 2e4);
    let [flat, _] = ropes(keys(Value::Null, json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0})));
    assert_eq!((flat.kind, flat.theta), (RopeKind::Default, 1e6), "transformers ignores one object for all layers");
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
    assert!(error(keys(linear.clone(), json!({"full_attention": yarn}))).contains("say different rotary positions"));
    assert!(error(keys(json!({"type": "linear", "factor": 8.0}), Value::Null)).contains("call it `rope_type`"));
    let beside = with(keys(yarn, Value::Null), "original_max_position_embeddings", json!(7));
    let RopeKind::Yarn(found) = rope(beside).kind else { panic!("YaRN") };
    assert_eq!(found.original_max_positions, 64.0, "transformers reads the nested key");
}

#[test]
fn the_original_context_may_be_beside_the_scaling_or_missing() {
    let original = |scaling: Value, beside: Option<usize>| {
        let mut keys = json!({"model_type": "llama", "max_position_embeddings": 256, "rope_scaling": scaling});
        if let Some(beside) = beside {
            keys["original_max_position_embeddings"] = json!(beside);
        }
        match rope(keys).kind {
            RopeKind::Llama3 { original_max_positions, .. } => original_max_positions,
            RopeKind::Yarn(yarn) => yarn.original_max_positions,
            RopeKind::LongRope(long) => long.original_max_positions,
            other => panic!("{other:?}"),
        }
    };
    let kinds = [
        json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        json!({"rope_type": "yarn", "factor": 4.0}),
        json!({"rope_type": "longrope", "short_factor": vec![1.0; 8], "long_factor": vec![2.0; 8]}),
    ];
    for kind in kinds {
        let own = with(kind.clone(), "original_max_position_embeddings", json!(64));
        assert_eq!(original(own.clone(), None), 64.0);
        assert_eq!(original(own, Some(32)), 32.0, "the key beside it wins");
        assert_eq!(original(kind.clone(), Some(32)), 32.0);
        assert_eq!(original(kind, None), 256.0);
    }
}

#[test]
fn zeros_of_yarn_are_like_missing_keys() {
    let yarn = |keys: Value| {
        let mut yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
        yarn.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        rope(json!({"model_type": "llama", "max_position_embeddings": 512, "rope_scaling": yarn}))
    };
    let plain = yarn(json!({}));
    for zeros in [
        json!({"mscale": 0}),
        json!({"mscale": 0.0, "mscale_all_dim": 0.707}),
        json!({"mscale_all_dim": 0, "mscale": 1}),
    ] {
        assert_eq!(yarn(zeros).attention_factor(), plain.attention_factor());
    }
    assert_eq!(yarn(json!({"beta_fast": 0, "beta_slow": 0})).kind, plain.kind);
    assert_eq!(yarn(json!({"factor": null})).kind.factor(), Some(8.0), "from the two contexts");
}

#[test]
fn only_phi3_rotates_a_part_of_heads() {
    let partial = |model_type: &str, scaling: Value| {
        with(with(small(model_type), "partial_rotary_factor", json!(0.5)), "rope_scaling", scaling)
    };
    assert_eq!(rope(partial("phi3", Value::Null)).partial, 0.5);
    for model_type in
        ["llama", "mistral", "qwen2", "qwen3", "cohere", "granite", "olmo2", "smollm3", "mixtral", "gemma2"]
    {
        assert_eq!(rope(partial(model_type, Value::Null)).partial, 1.0, "{model_type}");
        let stretched = partial(model_type, json!({"rope_type": "linear", "factor": 2.0}));
        assert!(error(stretched).contains("`partial_rotary_factor` is 0.5"), "{model_type}");
    }
}

#[test]
fn families_rotate_the_part_of_heads_that_their_files_say() {
    assert_eq!([rope(small("glm4")), rope(small("glm4_moe"))].map(|rope| rope.partial), [0.5; 2]);
    assert_eq!(rope(with(small("glm4"), "partial_rotary_factor", json!(0.25))).partial, 0.25);
    assert_eq!([rope(small("qwen3_next")), rope(small("qwen3_5_text"))].map(|rope| rope.partial), [0.25; 2]);
    let rotated = |keys: Value| rope(keys).partial;
    assert_eq!(rotated(small("minimax_m2")), 1.0);
    assert_eq!(rotated(with(small("minimax_m2"), "rotary_dim", json!(64))), 0.5);
}

/// Layers with a window are rotated, and layers without a window are not; without a window, all layers are rotated.
#[test]
fn a_constant_alpha_changes_the_base_of_rotary_positions() {
    let of = |key: &str| {
        let scaling = json!({"type": "dynamic", "alpha": 100.0, "factor": 1.0});
        rope(with(small("hunyuan_v1_dense"), key, scaling))
    };
    // Heads have 16 elements.
    let theta = 1e4 * 100f64.powf(16.0 / 14.0);
    for found in [of("rope_scaling"), of("rope_parameters")] {
        assert_eq!((found.kind, found.theta), (RopeKind::Default, theta));
    }
}

/// Published folders name code for readers that do not know the family. A known family needs no code.
#[test]
fn code_in_a_folder_of_a_known_family_is_not_needed() {
    let map = json!({"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"});
    assert_eq!(read(with(small("phi3"), "auto_map", map.clone())), read(small("phi3")));
    assert!(error(json!({"model_type": "own", "auto_map": map})).contains("model type `own`"));
}

#[test]
fn scores_of_deepseek_grow_with_every_stretch() {
    let scale = |scaling: Value| {
        let keys = with(with(small("deepseek_v3"), "rope_scaling", scaling), "max_position_embeddings", json!(64));
        read(keys).latent().unwrap().scale.unwrap()
    };
    let plain = scale(Value::Null);
    let growth = (0.1 * 0.5 * 4f64.ln() + 1.0).powi(2);
    for kind in ["linear", "dynamic", "yarn"] {
        let scaling = json!({"rope_type": kind, "factor": 4.0});
        assert_eq!(scale(scaling.clone()), plain, "{kind}");
        let grown = scale(with(scaling, "mscale_all_dim", json!(0.5)));
        // The quotient of two F64 scales near 1 is exact to a few units of 2⁻⁵³.
        assert!((grown / plain - growth).abs() < 1e-12, "{kind}");
    }
    let stretch = json!({"rope_type": "linear", "factor": 4.0, "mscale_all_dim": 0.5});
    let stretched = rope(with(small("deepseek_v3"), "rope_scaling", stretch));
    let mut written = small("deepseek_v3").as_object().unwrap().clone();
    stretched.write(None, &mut written);
    assert_eq!(rope(Value::Object(written)), stretched);
}

#[test]
fn types_of_layers_give_smollm3_a_window() {
    let types = json!(["sliding_attention", "full_attention", "full_attention", "full_attention"]);
    let keys = json!({"model_type": "smollm3", "sliding_window": 4});
    let windows = |keys: Value| (0..4).map(|layer| read(keys.clone()).layers[layer].window()).collect::<Vec<_>>();
    assert_eq!(windows(keys.clone()), [None; 4], "no layer without `use_sliding_window`");
    assert_eq!(windows(with(keys.clone(), "use_sliding_window", json!(true))), [None, None, None, Some(4)]);
    assert_eq!(windows(with(keys, "layer_types", types)), [Some(4), None, None, None]);
}

#[test]
fn keys_that_transformers_ignores_are_ignored() {
    let gemma3 = json!({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0});
    assert_eq!(heads(gemma3).soft_cap, None);
    assert_eq!(heads(json!({"model_type": "gemma2", "attn_logit_softcapping": null})).soft_cap, None);
    let v2 = read(json!({"model_type": "deepseek_v2", "num_experts_per_tok": 2, "norm_topk_prob": true}));
    assert!(
        v2.folder.ignored.len() == 1 && v2.folder.ignored[0].contains("`norm_topk_prob` is ignored"),
        "{:?}",
        v2.folder.ignored
    );
    let v3 = read(with(small("deepseek_v3"), "scoring_func", json!("softmax")));
    assert!(v3.folder.ignored.len() == 1 && v3.folder.ignored[0].contains("`scoring_func`"), "{:?}", v3.folder.ignored);
    assert!(!heads(json!({"model_type": "mistral", "attention_bias": true})).qkv_bias);
    for model_type in ["gpt_oss", "gemma2", "gemma3_text"] {
        read(json!({"model_type": model_type, "hidden_act": "relu"}));
    }
    assert!(!read(with(small("deepseek_v3"), "mlp_bias", json!(true))).mlp().unwrap().bias);
}

#[test]
fn noise_of_training_is_no_matter_elsewhere() {
    for (model_type, key) in [
        ("llama", "attention_dropout"),
        ("phi3", "resid_pdrop"),
        ("phi3", "embd_pdrop"),
        ("mixtral", "router_jitter_noise"),
        ("deepseek_v3", "attention_dropout"),
    ] {
        let sizes = read(with(small(model_type), key, json!(0.1)));
        assert_eq!(sizes.folder.untrainable.len(), 1, "{model_type}");
        assert!(
            sizes.folder.untrainable[0].starts_with(&format!("`{key}` is not 0")),
            "{:?}",
            sizes.folder.untrainable
        );
        assert!(read(with(small(model_type), key, json!(0))).folder.untrainable.is_empty());
    }
}

#[test]
fn functions_that_are_not_implemented_are_refused_by_name() {
    for (key, value) in [("is_causal", json!(false)), ("per_layer_config", json!({"0": {"head_dim": 8}}))] {
        let reads = |family: &&Family| key == "per_layer_config" && family.model_type == "gemma4_text";
        for family in FAMILIES.iter().filter(|family| !reads(family)) {
            let problem = error(with(small(family.model_type), key, value.clone()));
            assert!(problem.contains(&format!("`{key}` is")), "{}: {problem}", family.model_type);
        }
    }
    let types = json!(["sliding_attention", "full_attention", "full_attention", "full_attention"]);
    for model_type in ["qwen2", "qwen3", "qwen2_moe"] {
        let problem = error(with(with(small(model_type), "layer_types", types.clone()), "sliding_window", json!(4)));
        assert!(problem.contains("`use_sliding_window` is false"), "{model_type}: {problem}");
    }
    assert!(error(with(small("deepseek_v2"), "mlp_bias", json!(true))).contains("`mlp_bias` is true"));
    assert_eq!(heads(json!({"model_type": "gpt2", "scale_attn_weights": false})).scale, Some(1.0));
    assert!(error(with(small("llama"), "hidden_act", json!("relu"))).contains("`hidden_act` is \"relu\""));
    let spelled = |name: &str| read(with(small("llama"), "hidden_act", json!(name))).mlp().unwrap().activation;
    assert_eq!(spelled("swish"), spelled("silu"));
    assert_eq!(spelled("gelu_python"), spelled("gelu"));
}

#[test]
fn huge_counts_are_errors_before_work() {
    let counts = [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_intermediate_size",
        "shared_expert_intermediate_size",
        "n_shared_experts",
        "kv_lora_rank",
        "q_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
        "mamba_n_heads",
        "mamba_d_head",
        "mamba_n_groups",
        "mamba_d_state",
        "mamba_d_ssm",
        "mamba_num_heads",
        "mamba_head_dim",
        "ssm_state_size",
        "conv_kernel",
        "moe_latent_size",
        "moe_shared_expert_intermediate_size",
        "n_group",
        "topk_group",
        "num_nextn_predict_layers",
        "n_embd",
        "n_layer",
        "n_head",
        "n_inner",
        "n_positions",
    ];
    let start = std::time::Instant::now();
    for family in FAMILIES {
        let keys = small(family.model_type);
        for count in counts {
            let known = family.complete(&file(keys.clone()));
            // Latent attention computes its head size from other keys.
            let is_latent = ["deepseek", "kimi", "glm_moe_dsa"].iter().any(|name| family.model_type.starts_with(name));
            let is_neox = family.model_type == "gpt_neox" && ["head_dim", "num_key_value_heads"].contains(&count);
            let is_read = !(count == "head_dim" && is_latent || is_neox);
            if !is_read || !known.has(count) && !known.has_default(count) {
                continue;
            }
            for huge in [1u64 << 40, u64::MAX] {
                let found = decoder_config(&file(with(keys.clone(), count, json!(huge))));
                // Llama's keys do not exist in GPT-2.
                assert!(
                    found.is_err() || family.model_type == "gpt2" && !count.starts_with("n_"),
                    "{}: `{count}`",
                    family.model_type
                );
            }
        }
    }
    let experts = json!({"model_type": "mixtral", "num_hidden_layers": 10_000, "num_local_experts": 1024});
    assert!(error(experts).contains("10000 layers of 1024 experts"));
    assert!(start.elapsed().as_secs() < 5);
}

#[test]
fn numbers_that_are_not_finite_are_refused_where_they_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let with_text = |text: &str| {
        let keys = file(json!({"model_type": "llama"})).values().clone();
        let whole = serde_json::to_string(&keys).unwrap().replacen('{', &format!("{{{text}, "), 1);
        std::fs::write(folder.path().join("config.json"), whole).unwrap();
        decoder_config(&ConfigFile::read(folder.path()).unwrap())
    };
    assert!(with_text(r#""time_step_limit": [0.0, Infinity], "x": NaN"#).is_ok(), "nothing reads the keys");
    for text in [r#""rms_norm_eps": Infinity"#, r#""rms_norm_eps": {"__float__": "Infinity"}"#] {
        let error = with_text(text).unwrap_err().to_string();
        assert!(error.contains("`rms_norm_eps` is Infinity, and must be finite"), "{error}");
    }
}
