//! Ranks train models whose layers read values of earlier layers, beside the residual stream, as one rank does: keys and values, and per-layer
//! embeddings. Stages of a pipeline do not send these values to each other.

use crate::parallel::divided::{Setup, adapters, apart, llama};
use crate::setup::config;
use ottava_parallel::Zero;
use ottava_recipe::RecipeName;
use ottava_settings::{ResolvedConfig, RunConfig};
use ottava_tensor::Device;
use ottava_train::plan::MemoryPlan;
use serde_json::{Value, json};

/// The tolerance. Scores are products of normalised queries and keys without a factor. Such scores are large, and their softmax amplifies the
/// roundings of sums in another order: differences of up to 5e-5 are seen.
const SHARP: f64 = 2e-4;

/// Returns a model with heads of two sizes and these layers, which are `f` (full) or have a window. With a smaller `eps`, the norm after per-layer
/// embeddings would amplify roundings.
fn gemma(layers: &str, more: Value) -> Value {
    let kind = |of: char| if of == 'f' { "full_attention" } else { "sliding_attention" };
    let types: Vec<_> = layers.chars().map(kind).collect();
    let mut keys = llama(json!({
        "architectures": ["Gemma4ForCausalLM"], "num_hidden_layers": types.len(), "layer_types": types, "head_dim": 16, "global_head_dim": 32,
        "num_key_value_heads": 2, "sliding_window": 9, "rms_norm_eps": 0.01, "hidden_size_per_layer_input": 0, "tie_word_embeddings": true,
    }));
    keys.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    keys
}

/// Returns a model with experts whose values are the projected keys, a model whose last layers read keys and values of earlier layers, and the same
/// with per-layer embeddings.
fn models() -> [(&'static str, Value); 3] {
    let experts = json!({
        "attention_k_eq_v": true, "num_global_key_value_heads": 2, "enable_moe_block": true, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 24,
    });
    let shared = json!({"num_kv_shared_layers": 1, "use_double_wide_mlp": true});
    let mut embedded = shared.clone();
    embedded["hidden_size_per_layer_input"] = json!(12);
    embedded["vocab_size_per_layer_input"] = json!(96);
    embedded["num_kv_shared_layers"] = json!(2);
    [("experts", gemma("sf", experts)), ("shared", gemma("fsff", shared)), ("embedded", gemma("sfsf", embedded))]
}

#[test]
fn ranks_of_every_axis_train_as_one_rank() {
    for (name, keys) in models() {
        for (mesh, zero) in [
            ([1, 1, 1, 2], Zero::Nothing),
            ([2, 1, 1, 1], Zero::OptimizerStates),
            ([1, 2, 1, 1], Zero::Nothing),
            ([1, 1, 2, 1], Zero::Nothing),
            ([2, 1, 1, 2], Zero::Weights),
        ] {
            if mesh[1] > 1 && name == "embedded" {
                continue;
            }
            let mut alone = Setup { documents: true, ..Setup::new(keys.clone(), RecipeName::Fp32) };
            alone.mesh.zero = zero;
            let (apart, tensor) = apart(&alone, mesh);
            assert!(apart < SHARP, "{name} on {mesh:?}, {zero:?}: {tensor} is {apart:.1e} apart");
        }
    }
}

#[test]
fn adapters_train_as_on_one_rank() {
    for (name, keys) in models() {
        let mut alone = Setup::new(keys, RecipeName::Fp32);
        alone.mesh.sizes.lora = adapters(false);
        let (apart, tensor) = apart(&alone, [1, 1, 1, 2]);
        assert!(apart < SHARP, "{name}: {tensor} is {apart:.1e} apart");
    }
}

#[test]
fn stages_that_would_share_values_are_refused() {
    let [_, (_, shared), (_, embedded)] = models();
    // The last two layers read the keys of layer 2, and four ranks have at most two layers each.
    let apart = gemma("fsfff", json!({"num_kv_shared_layers": 2}));
    let plan = |keys: &Value, pipeline: usize| {
        let mut run = RunConfig::default();
        run.data.max_length = 32;
        (run.parallel.pipeline, run.training.gradient_accumulation_steps) = (pipeline, 4);
        MemoryPlan::new(&ResolvedConfig::fastest(&run), &config(keys.clone()), &Device::Cpu)
    };
    assert!(plan(&shared, 2).is_ok());
    let refused = |keys: &Value, pipeline| plan(keys, pipeline).expect_err("it is refused").to_string();
    let text = refused(&apart, 4);
    assert!(text.contains("reads the keys and values of block 2, which is on another rank of the pipeline"), "{text}");
    let text = refused(&embedded, 2);
    assert!(text.contains("per-layer embeddings") && text.contains("set `parallel.pipeline` to 1"), "{text}");
}
