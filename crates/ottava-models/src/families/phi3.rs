//! Phi-3 and Phi-4: Llama's blocks. One tensor holds Q, K and V, and one tensor holds gate and up. LongRoPE extends the context. Phi-4-mini rotates
//! a part of each head. Abdin et al. 2024, arXiv:2404.14219 and arXiv:2412.08905.

use crate::SublayerSpec::{Heads, Mlp};
use crate::family::{Family, common, untrainable, window};
use crate::layers::{HeadsSpec, LLAMA, Names};
use crate::{ConfigFile, DecoderConfig};
use ottava_common::error::Result;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "Phi3ForCausalLM",
    model_type: "phi3",
    reward_model: Some("Phi3ForSequenceClassification"),
    defaults,
    aliases: &[],
    read,
};

fn defaults() -> Value {
    json!({
        "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "pad_token_id": 32_000, "partial_rotary_factor": 1.0,
        "rms_norm_eps": 1e-5, "sliding_window": null,
    })
}

static NAMES: Names = Names { qkv: &[LLAMA.qkv_stack], gate_up: &[LLAMA.gate_up_stack], ..LLAMA };

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let mut values = file.values().clone();
    for key in ["rope_scaling", "rope_parameters"] {
        rename_longrope(values.get_mut(key));
    }
    let mut common = common(&file.with_values(values))?.named(&NAMES);
    common.model.folder.untrainable = untrainable(file, &["attention_dropout", "resid_pdrop", "embd_pdrop"])?;
    let heads = HeadsSpec { window: window(file)?.size, ..common.heads };
    let (rope, mlp) = (Some(common.rope), common.mlp);
    Ok(common.sequential(|_| [Heads(heads, rope), Mlp(mlp)]))
}

/// Renames the type "su" or "yarn", by which early folders of Phi-3 mean LongRoPE.
fn rename_longrope(section: Option<&mut Value>) {
    let Some(section) = section.and_then(Value::as_object_mut) else { return };
    let name = section.get("rope_type").or_else(|| section.get("type")).and_then(Value::as_str);
    if name.is_some_and(|name| name == "su" || name == "yarn") {
        section.insert("rope_type".into(), json!("longrope"));
    }
}
