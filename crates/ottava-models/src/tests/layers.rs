//! No key of `config.json` that shapes layers is dropped, and no layer is built with settings that it cannot have.

use super::{error, file, read, small, with};
use crate::layers::{ExpertsSpec, KeysAndValues, NormScope, ProjectionLayout, Role};
use crate::{
    BranchSpec, Decoder, DecoderConfig, FAMILIES, FolderNotes, LayerSpec, RopeLengths, SublayerSpec, Uniform,
    decoder_config, layer_keys,
};
use ottava_recipe::Precision;
use ottava_tensor::ops::NormKind;
use serde_json::{Value, json};

/// Returns a value of `key` that differs from the family's default.
fn other_value(key: &str, default: Option<&Value>) -> Value {
    match key {
        "attention_bias" | "mlp_bias" | "qkv_bias" | "use_qk_norm" => json!(default != Some(&json!(true))),
        "layer_types" => json!(["full_attention", "full_attention", "sliding_attention", "full_attention"]),
        "no_rope_layers" => json!([1, 1, 0, 1]),
        "attention_multiplier" | "residual_multiplier" | "logit_scale" => json!(0.5),
        "attn_logit_softcapping" | "clip_qkv" | "final_logit_softcapping" => json!(7.0),
        "embedding_multiplier" | "logits_scaling" | "rope_local_base_freq" => json!(77.0),
        "sliding_window" => json!(3),
        _ if default == Some(&json!(16)) => json!(24),
        _ => json!(16),
    }
}

/// Returns the model without notes about its folder.
fn built(sizes: DecoderConfig) -> DecoderConfig {
    DecoderConfig { folder: FolderNotes::default(), ..sizes }
}

#[test]
fn keys_that_shape_layers_reach_them_or_are_named() {
    let mut reached = Vec::new();
    for family in FAMILIES {
        for key in layer_keys::KEYS {
            let mut keys = small(family.model_type);
            if family.complete(&file(keys.clone())).has_default("use_sliding_window") {
                (keys["use_sliding_window"], keys["max_window_layers"]) = (json!(true), json!(1));
            }
            let complete = family.complete(&file(keys.clone()));
            let value = other_value(key, complete.required::<Value>(key).ok().as_ref());
            let what = format!("{}: `{key}` = {value}", family.model_type);
            match decoder_config(&file(with(keys.clone(), key, value))) {
                Err(error) => assert!(error.to_string().contains(&format!("`{key}`")), "{what}: {error}"),
                Ok(sizes) if built(sizes.clone()) != built(read(keys)) => reached.push((family.model_type, *key)),
                Ok(sizes) => {
                    let named = |sentence: &String| sentence.starts_with(&format!("`{key}` is ignored"));
                    assert!(sizes.folder.ignored.iter().any(named), "{what} is dropped: {:?}", sizes.folder.ignored);
                }
            }
        }
    }
    for known in [("gpt_oss", "sliding_window"), ("deepseek_v3", "q_lora_rank"), ("cohere", "use_qk_norm")] {
        assert!(reached.contains(&known), "{known:?}");
    }
    // Latent attention has no window, soft cap or norm of heads.
    let latent = reached.iter().filter(|(family, _)| *family == "deepseek_v3").map(|(_, key)| *key);
    let own =
        ["attention_bias", "kv_lora_rank", "n_routed_experts", "n_shared_experts", "num_local_experts", "q_lora_rank"];
    assert_eq!(latent.collect::<Vec<_>>(), own);
}

/// A branch with experts or latent attention and another sublayer would need a second cast of its operand.
#[test]
fn experts_and_latent_attention_have_a_branch_of_their_own() {
    let beside = |sublayer: SublayerSpec| {
        let mut sizes = read(json!({"model_type": "cohere"}));
        sizes.layers[1].branches[0].sublayers[1] = sublayer;
        sizes.check().expect_err("refused")
    };
    let experts: ExpertsSpec = *read(small("deepseek_v3")).experts().unwrap();
    let latent = read(small("deepseek_v3")).layers[0].branches[0].sublayers[0];
    for sublayer in [SublayerSpec::Experts(experts), latent] {
        assert!(beside(sublayer).contains("beside another sublayer"), "{sublayer:?}");
    }
}

#[test]
fn a_layer_may_be_one_branch_of_any_sublayer() {
    let mut sizes = read(json!({"model_type": "llama"}));
    let [attention, mlp] = [0, 1].map(|branch| sizes.layers[0].branches[branch].clone());
    let both = [&attention, &mlp].map(|branch| branch.sublayers[0]).to_vec();
    let both = BranchSpec { sublayers: both, ..attention.clone() };
    sizes.layers = [attention, mlp, both].map(LayerSpec::single).to_vec();
    sizes.check().unwrap();
    let tensors = Decoder::folder_tensors(&sizes, &Precision::default().recipe()).unwrap();
    let roles = |layer: usize| {
        let roles = tensors.iter().filter_map(|tensor| sizes.stream.names.role_of(&tensor.name));
        roles.filter(|of| of.block == Some(layer)).map(|of| of.role).collect::<Vec<_>>()
    };
    let attention = [Role::AttentionNorm, Role::Query, Role::Key, Role::Value, Role::AttentionOutput];
    let mlp = [Role::Gate, Role::Up, Role::Down];
    assert_eq!(roles(0), attention);
    assert_eq!(roles(1), [&[Role::MlpNorm][..], &mlp].concat());
    assert_eq!(roles(2), [&attention[..], &mlp].concat());
}

#[test]
fn uniform_models_have_layers_of_one_size() {
    let uniform = |keys: Value| Uniform::of(&read(keys)).is_some();
    for model_type in ["llama", "gemma3_text", "smollm3"] {
        assert!(uniform(json!({"model_type": model_type})), "{model_type}");
    }
    for model_type in ["cohere", "qwen3_moe", "deepseek_v3", "gpt2"] {
        assert!(!uniform(small(model_type)), "{model_type}");
    }
    let with_second_layer = |change: &dyn Fn(&mut SublayerSpec)| {
        let mut sizes = read(json!({"model_type": "llama"}));
        sizes.layers[1].branches.iter_mut().for_each(|branch| change(&mut branch.sublayers[0]));
        Uniform::of(&sizes).is_some()
    };
    assert!(with_second_layer(&|sublayer| {
        if let SublayerSpec::Heads(heads, _) = sublayer {
            heads.window = Some(8);
        }
    }));
    assert!(!with_second_layer(&|sublayer| {
        if let SublayerSpec::Heads(heads, _) = sublayer {
            heads.kv_heads = 2;
        }
    }));
    assert!(!with_second_layer(&|sublayer| {
        if let SublayerSpec::Mlp(mlp) = sublayer {
            mlp.hidden = 128;
        }
    }));
}

#[test]
fn lists_and_intervals_decide_which_layers_are_recurrent() {
    for model_type in ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"] {
        let recurrent =
            |keys: Value| -> Vec<bool> { read(keys).layers.iter().map(|layer| layer.delta().is_some()).collect() };
        let small = || small(model_type);
        assert_eq!(recurrent(small()), [true, true, true, false]);
        assert_eq!(recurrent(with(small(), "full_attention_interval", json!(2))), [true, false, true, false]);
        let listed = ["full_attention", "linear_attention", "full_attention", "linear_attention"];
        let listed = with(with(small(), "full_attention_interval", json!(2)), "layer_types", json!(listed));
        assert_eq!(recurrent(listed), [false, true, false, true]);
        let sizes = read(small());
        let heads = sizes.heads().unwrap();
        assert!(heads.output_gate && heads.qk_norm == Some(NormScope::Head), "{model_type}");
        assert_eq!(sizes.stream.norm.kind, NormKind::RmsPlusOne);
        let delta = sizes.layers[0].delta().unwrap();
        let of = delta.heads;
        assert_eq!((of.key_heads, of.value_heads, of.key_dim, of.value_dim, delta.taps), (16, 32, 128, 128, 4));
        assert_eq!(delta.layout == ProjectionLayout::Flat, model_type != "qwen3_next");
        for (key, value, words) in [
            ("full_attention_interval", json!(0), "`full_attention_interval` is 0"),
            ("hidden_act", json!("gelu"), "only convolutions with SiLU"),
            (
                "linear_num_value_heads",
                json!(24),
                "`linear_num_value_heads` 24 is not a multiple of `linear_num_key_heads` 16",
            ),
            ("linear_conv_kernel_dim", json!(5), "`linear_conv_kernel_dim` is 5; at most 4 taps"),
            ("linear_key_head_dim", json!(0), "`linear_key_head_dim` is 0"),
            ("layer_types", json!(["linear_attention"]), "`layer_types` has 1 entries"),
            ("layer_types", json!(vec!["chunked_attention"; 4]), "`layer_types` has \"chunked_attention\""),
        ] {
            let problem = error(with(small(), key, value));
            assert!(problem.contains(words), "{model_type}: {problem}");
        }
    }
}

#[test]
fn attention_that_is_implemented_for_short_texts_limits_their_length() {
    for (model_type, key, default) in [
        ("llama4_text", "attention_chunk_size", 8192),
        ("deepseek_v32", "index_topk", 2048),
        ("glm_moe_dsa", "index_topk", 2048),
    ] {
        let sizes = read(small(model_type));
        assert_eq!(sizes.context(), default, "{model_type}");
        assert!(sizes.context_reason().contains(&format!("`{key}`")), "{model_type}: {}", sizes.context_reason());
        let short = read(with(small(model_type), "max_position_embeddings", json!(40)));
        assert_eq!(short.context(), 40, "{model_type}");
        assert!(short.context_reason().contains("`max_position_embeddings`"), "{model_type}");
        assert!(error(with(small(model_type), key, json!(0))).contains(&format!("`{key}` is 0")));
    }
    let without_chunks = read(with(small("llama4_text"), "attention_chunk_size", Value::Null));
    assert_eq!(without_chunks.context(), 131_072);
    let types = json!(["chunked_attention", "full_attention", "full_attention", "full_attention"]);
    let listed = with(small("llama4_text"), "layer_types", types);
    let chunks: Vec<_> = read(listed.clone()).layers.iter().map(|layer| layer.heads().unwrap().chunk).collect();
    assert_eq!(chunks, [Some(8192), None, None, None]);
    assert!(error(with(listed, "attention_chunk_size", Value::Null)).contains("`attention_chunk_size` is null"));
}

#[test]
fn layers_of_llama4_have_positions_or_growing_queries_and_experts_or_an_mlp() {
    let layers = |keys: Value| -> Vec<[bool; 3]> {
        let of = |layer: &LayerSpec| {
            let heads = layer.heads().unwrap();
            assert_eq!(heads.qk_norm.is_some(), layer.rope().is_some());
            [layer.rope().is_some(), heads.growth.is_some(), layer.experts().is_some()]
        };
        read(keys).layers.iter().map(of).collect()
    };
    let [rotated, grown] = [[true, false, true], [false, true, true]];
    assert_eq!(layers(small("llama4_text")), [rotated, rotated, rotated, grown]);
    // Published files have an empty list.
    assert_eq!(layers(with(small("llama4_text"), "no_rope_layers", json!([]))), [rotated, rotated, rotated, grown]);
    let keys = with(small("llama4_text"), "no_rope_layers", json!([0, 1, 1, 1]));
    let keys = with(with(keys, "moe_layers", json!([3])), "attn_temperature_tuning", json!(false));
    let [dense, plain] = [[true, false, false], [false, false, false]];
    assert_eq!(layers(keys), [plain, dense, dense, rotated]);
    let every_second = layers(with(small("llama4_text"), "interleave_moe_layer_step", json!(2)));
    assert_eq!(every_second, [dense, rotated, dense, grown]);
    assert!(
        error(with(small("llama4_text"), "interleave_moe_layer_step", json!(0)))
            .contains("`interleave_moe_layer_step`")
    );
}

/// Returns a letter for each layer: M for a Mamba-2 layer, `*` for attention, B for both, and - for neither.
fn mixers(sizes: &DecoderConfig) -> String {
    let letter = |layer: &LayerSpec| match (layer.mamba().is_some(), layer.heads().is_some()) {
        (true, true) => 'B',
        (true, false) => 'M',
        (false, true) => '*',
        (false, false) => '-',
    };
    sizes.layers.iter().map(letter).collect()
}

#[test]
fn lists_and_patterns_decide_which_layers_are_mamba_layers() {
    let of = |keys: Value| mixers(&read(keys));
    assert_eq!(of(small("bamba")), "M*M*");
    assert_eq!(of(json!({"model_type": "bamba"})), "MMMM");
    assert_eq!(of(json!({"model_type": "granitemoehybrid"})), "MMMM");
    // Names of transformers 5 and of transformers 4.
    let types = json!(["linear_attention", "mamba", "attention", "full_attention"]);
    assert_eq!(of(with(small("granitemoehybrid"), "layer_types", types.clone())), "MM**");
    assert_eq!(of(with(small("granitemoehybrid"), "layers_block_type", types)), "MM**");
    assert_eq!(of(small("falcon_h1")), "BBBB");
    assert_eq!(of(small("nemotron_h")), "M-*-");
    let list = json!(["moe", "attention", "mamba", "mlp"]);
    let listed = read(json!({"model_type": "nemotron_h", "layers_block_type": list}));
    assert_eq!(mixers(&listed), "-*M-");
    assert!(listed.layers[0].experts().is_some() && listed.layers[3].mlp().is_some());
    assert!(listed.layers.iter().all(|layer| layer.branches.len() == 1 && layer.rope().is_none()));
}

#[test]
fn granite_4_may_have_experts_and_rotary_positions() {
    let of = |key: &str, value: Value| read(with(small("granitemoehybrid"), key, value)).layers[1].clone();
    assert!(of("num_local_experts", json!(2)).experts().unwrap().shared.is_some());
    let dense =
        with(with(small("granitemoehybrid"), "num_local_experts", json!(0)), "shared_intermediate_size", json!(40));
    let dense = read(dense).layers[1].clone();
    assert_eq!((dense.experts(), dense.mlp().unwrap().hidden), (None, 40));
    assert!(of("position_embedding_type", json!("rope")).rope().is_some());
    assert!(of("position_embedding_type", json!("nope")).rope().is_none());
}

#[test]
fn limits_of_time_steps_are_read_in_every_spelling() {
    for infinity in [json!("Infinity"), json!({"__float__": "Infinity"}), json!(5.0)] {
        let sizes = read(with(small("bamba"), "time_step_limit", json!([0.5, infinity])));
        let most = infinity.as_f64().unwrap_or(f64::INFINITY);
        assert_eq!(sizes.layers[0].mamba().unwrap().heads.dt_limits, [0.5, most]);
    }
    assert_eq!(read(small("nemotron_h")).layers[0].mamba().unwrap().heads.dt_limits, [0.0, f64::INFINITY]);
    for (key, value, words) in [
        ("time_step_limit", json!([2.0, 1.0]), "the limits of time steps are 2 and 1"),
        ("time_step_limit", json!([0.0]), "`time_step_limit` has the value [0.0]"),
        ("time_step_limit", json!([0.0, "NaN"]), "the limits of time steps are 0 and NaN"),
        ("hidden_act", json!("gelu"), "only convolutions with SiLU"),
        ("mamba_d_head", json!(3), "`mamba_n_heads` 128 times `mamba_d_head` 3 is not 128"),
        ("mamba_n_groups", json!(3), "128 heads of a state space do not divide into 3 groups"),
        ("mamba_d_conv", json!(5), "at most 4 taps"),
    ] {
        let problem = error(with(small("bamba"), key, value));
        assert!(problem.contains(words), "{problem}");
    }
    let pattern = |value: &str| error(json!({"model_type": "nemotron_h", "hybrid_override_pattern": value}));
    assert!(pattern("M*x-").contains("`hybrid_override_pattern` has \"x\""));
    assert!(pattern("M*-").contains("`hybrid_override_pattern` has 3 entries, and `num_hidden_layers` is 4"));
    let biased = with(small("falcon_h1"), "attention_bias", json!(true));
    let problem = error(with(biased, "attention_in_multiplier", json!(0.5)));
    assert!(problem.contains("`attention_bias` is true and `attention_in_multiplier` is 0.5"), "{problem}");
}

#[test]
fn windows_decide_which_layers_of_exaone_and_cohere2_are_rotated() {
    let layers = |keys: Value| -> Vec<_> {
        read(keys).layers.iter().map(|layer| (layer.window().is_some(), layer.rope().is_some())).collect()
    };
    let (local, full) = ((true, true), (false, false));
    assert_eq!(layers(small("cohere2")), [local, local, local, full]);
    assert_eq!(layers(small("exaone4")), [local, local, local, full]);
    assert_eq!(layers(with(small("exaone4"), "sliding_window_pattern", json!("LG"))), [local, full, local, full]);
    assert_eq!(layers(with(small("exaone4"), "sliding_window", Value::Null)), [(false, true); 4]);
}

#[test]
fn lists_of_layer_types_decide_which_layers_have_experts() {
    let has_experts =
        |keys: Value| -> Vec<bool> { read(keys).layers.iter().map(|layer| layer.experts().is_some()).collect() };
    let types = |types: [&str; 4]| with(small("glm4_moe_lite"), "mlp_layer_types", json!(types));
    assert_eq!(has_experts(small("glm4_moe_lite")), [false, true, true, true]);
    assert_eq!(has_experts(types(["sparse", "dense", "dense", "sparse"])), [true, false, false, true]);
    assert!(error(types(["sparse", "dense", "dense", "wide"])).contains("has \"wide\""));
    assert!(error(with(small("glm4_moe_lite"), "mlp_layer_types", json!(["dense"]))).contains("has 1 entries"));
}

#[test]
fn layers_of_ernie_have_experts_at_an_interval_within_a_range() {
    let has_experts = |keys: Value| -> Vec<bool> {
        let mut all = small("ernie4_5_moe");
        all.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        read(all).layers.iter().map(|layer| layer.experts().is_some()).collect()
    };
    assert_eq!(has_experts(json!({})), [false, true, true, true]);
    assert_eq!(has_experts(json!({"moe_layer_start_index": 0, "moe_layer_interval": 2})), [false, true, false, true]);
    assert_eq!(has_experts(json!({"moe_layer_start_index": 0, "moe_layer_end_index": 1})), [true, true, false, false]);
    assert!(error(with(small("ernie4_5_moe"), "use_bias", json!(true))).contains("`use_bias` is true"));
    assert!(error(with(small("ernie4_5_moe"), "moe_norm_min", json!(0.1))).contains("`moe_norm_min` is 0.1"));
}

/// Folders of transformers 5.24 list the sizes of each layer, and older folders have a key for all layers without a window.
#[test]
fn sizes_of_single_layers_equal_the_keys_of_older_folders() {
    let types = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"];
    let keys = json!({
        "model_type": "gemma4_text", "layer_types": types, "head_dim": 16, "num_key_value_heads": 2, "attention_k_eq_v": true,
        "vocab_size_per_layer_input": 100, "num_kv_shared_layers": 1,
    });
    let old = with(with(keys.clone(), "global_head_dim", json!(32)), "num_global_key_value_heads", json!(1));
    let large = json!({"head_dim": 32, "num_key_value_heads": 1});
    // The last layer has no window, whatever the list says.
    let sizes = read(with(keys, "per_layer_config", json!({"0": large, "2": large, "3": large})));
    assert_eq!(read(old.clone()), sizes);
    let of = |index: usize| *sizes.layers[index].heads().unwrap();
    assert_eq!(
        [0, 1, 2, 3].map(|index| (of(index).head_dim, of(index).kv_heads)),
        [(32, 1), (16, 2), (32, 1), (32, 1)]
    );
    assert_eq!([0, 1, 2, 3].map(|index| of(index).window.is_some()), [false, true, false, false]);
    assert_eq!([0, 1, 2].map(|index| of(index).is_shared), [false, false, true]);
    assert_eq!(of(0).source, KeysAndValues::OneProjection);
    assert_eq!((of(1).source, of(3).source), (KeysAndValues::Projections, KeysAndValues::OfBlock(2)));
    // The projections of layers that read other layers' keys are in published folders, and are copied.
    let carried = sizes.folder.carried.iter().filter(|name| name.starts_with("model.layers.3.self_attn."));
    assert_eq!(carried.count(), 4, "{:?}", sizes.folder.carried);
    for (key, value, expected) in [
        ("per_layer_config", json!({"0": {"intermediate_size": 7}}), "gives layer 0 `intermediate_size` 7"),
        ("per_layer_config", json!({"1": 512}), "`per_layer_config` has `1`: 512"),
        ("per_layer_config", json!({"99": {}}), "`per_layer_config` has `99`"),
        ("per_layer_config", json!({"ful_attention": {}}), "`per_layer_config` has `ful_attention`"),
        ("num_kv_shared_layers", json!(4), "no layer before layer 0 is of the kind `full_attention` of layer 0"),
        ("vocab_size_per_layer_input", json!(95), "fewer than the 96 tokens of `vocab_size`"),
        ("use_bidirectional_attention", json!("all"), "attention to later tokens is not implemented"),
        (
            "per_layer_config",
            json!({"2": {"head_dim": 8}}),
            "layer 3 reads the keys and values of layer 2, which have other sizes",
        ),
        ("rope_parameters", json!({"rope_theta": 1e4}), "`full_attention` with `rope_theta` is missing"),
    ] {
        let text = error(with(old.clone(), key, value));
        assert!(text.contains(expected), "{key}: {text}");
    }
    let vision = with(old.clone(), "use_bidirectional_attention", json!("vision"));
    assert_eq!(read(vision), read(old), "texts without images are read from the first token on");
}

/// Of each head, some pairs have the angles of a whole head, and the others have none.
#[test]
fn proportional_positions_have_angles_of_zero() {
    let rope = json!({
        "full_attention": {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    });
    let keys = json!({"model_type": "gemma4_text", "head_dim": 8, "global_head_dim": 16, "rope_parameters": rope});
    let sizes = read(keys);
    let lengths = RopeLengths { max_positions: 64, seq_len: 64 };
    let full = sizes.ropes[0].inverse_frequencies(16, lengths);
    let expected: Vec<f64> =
        (0..8).map(|pair| if pair < 3 { libm::pow(100.0, -2.0 * f64::from(pair) / 16.0) } else { 0.0 }).collect();
    assert_eq!(full, expected);
    assert_eq!(sizes.ropes[1].inverse_frequencies(8, lengths).len(), 4);
    assert_eq!(sizes.ropes[1].theta, 50.0);
    // A written file has no spelling of older folders, which transformers would read for all layers.
    let mut written = serde_json::Map::new();
    sizes.ropes[0].write(sizes.ropes.get(1), &mut written);
    assert_eq!(written.keys().collect::<Vec<_>>(), ["rope_parameters"]);
    assert_eq!(written["rope_parameters"]["full_attention"]["partial_rotary_factor"], 0.4);
    let scaled =
        with(json!({"model_type": "gemma4_text"}), "rope_scaling", json!({"rope_type": "linear", "factor": 2.0}));
    assert!(error(scaled).contains("`rope_scaling` is set"));
}

/// The table of families in the documentation has a row for each type of the registry.
#[test]
fn the_table_of_families_has_all_types() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/models.md")).unwrap();
    let mut listed: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
    let headers = page.lines().filter(|line| line.starts_with("| `model_type`")).count();
    let mut known: Vec<&str> = FAMILIES.iter().map(|family| family.model_type).chain(crate::wrapper::names()).collect();
    known.extend(vec!["model_type"; headers]);
    listed.sort_unstable();
    known.sort_unstable();
    assert_eq!(listed, known);
}
