//! A small model, and rows that it can learn in a few steps.

use ottava_checkpoint::RandomWeights;
use ottava_common::Result;
use ottava_data::Batch;
use ottava_models::{ConfigFile, Decoder, decoder_config};
use ottava_recipe::param::{MemoryPolicy, Purpose};
use ottava_recipe::{Precision, RecipeName};
use ottava_tensor::Device;

/// The number of rows of a micro-batch.
pub const ROWS: usize = 8;
/// The number of tokens of a row.
pub const TOKENS: usize = 16;
/// The number of tokens of the vocabulary.
const VOCABULARY: usize = 64;

/// Returns a model of two layers with random weights. Its products read BF16.
pub fn model() -> Result<Decoder> {
    let values = serde_json::json!({
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": TOKENS, "rms_norm_eps": 1e-5, "vocab_size": VOCABULARY,
    });
    let file = ConfigFile::from_values("model", values.as_object().expect("it is an object").clone());
    let recipe = Precision { recipe: RecipeName::Bf16, ..Precision::default() }.recipe();
    let mut weights = RandomWeights { seed: 1, device: Device::Cpu };
    let purpose = Purpose::Train(MemoryPolicy::FULL);
    let mut model = Decoder::new(&decoder_config(&file)?, &recipe, &Device::Cpu, purpose, TOKENS, &mut weights)?;
    model.quantize_weights()?;
    Ok(model)
}

/// Returns rows that count upwards from different numbers, which depend on `step`.
pub fn counting(step: usize) -> Batch {
    let number = |row: usize, token: usize| ((step * 7 + row * 5 + token) % VOCABULARY) as i32;
    let of = |shift: usize| (0..ROWS).flat_map(move |row| (0..TOKENS).map(move |token| number(row, token + shift)));
    Batch::whole(of(0).collect(), of(1).collect(), ROWS)
}
