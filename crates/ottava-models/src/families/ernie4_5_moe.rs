//! ERNIE 4.5 with mixtures of experts: a bias is added to the softmax scores for the choice. Baidu 2025, and `transformers`.

use crate::SublayerSpec::{Experts, Heads, Mlp};
use crate::family::{Family, common, ignore_router_logits};
use crate::layers::{ChoiceBias, ExpertsSpec, SharedExpert};
use crate::{ConfigFile, DecoderConfig, RopeSpec};
use ottava_common::error::Result;
use ottava_recipe::param::FolderLayout;
use ottava_tensor::ops::{RopePairs, RouterScores, Routing};
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    architecture: "Ernie4_5_MoeForCausalLM",
    model_type: "ernie4_5_moe",
    reward_model: None,
    defaults,
    aliases: &[("num_experts", "moe_num_experts"), ("num_experts_per_tok", "moe_k")],
    read,
};

fn defaults() -> Value {
    json!({
        "max_position_embeddings": 131_072, "moe_intermediate_size": 1536, "moe_k": 6, "moe_layer_end_index": -1, "moe_layer_interval": 1,
        "moe_layer_start_index": 1, "moe_norm_min": 1e-12, "moe_num_experts": 64, "moe_num_shared_experts": 2, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": true, "use_bias": false,
    })
}

/// The largest `moe_norm_min` that changes no weight noticeably. The weights of the chosen experts are divided by their sum, or by this value if the sum
/// is smaller.
const MOST_NORM_MIN: f64 = 1e-6;

const BIAS: ChoiceBias = ChoiceBias { name: "moe_statics.e_score_correction_bias", layout: FolderLayout::Rows(1) };

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    let (bias, least): (bool, f64) = (file.required("use_bias")?, file.required("moe_norm_min")?);
    if bias {
        return Err(file.error("`use_bias` is true; biases of experts and of the head are not implemented"));
    }
    if least > MOST_NORM_MIN {
        let text = format!("`moe_norm_min` is {least}; a least sum of weights up to {MOST_NORM_MIN} is implemented");
        return Err(file.error(&text));
    }
    let common = common(file)?;
    let hidden: usize = file.required("moe_intermediate_size")?;
    let shared: usize = file.required("moe_num_shared_experts")?;
    let of_shared = shared.saturating_mul(hidden);
    let routing = Routing {
        chosen: file.required("moe_k")?,
        scores: RouterScores::Softmax,
        normalise: Some(0.0),
        scale: 1.0,
        groups: None,
    };
    let experts = ExpertsSpec {
        bias: Some(BIAS),
        shared: (shared > 0).then_some(SharedExpert {
            name: "shared_experts",
            is_in_block: false,
            hidden: of_shared,
            gate: None,
        }),
        ..ExpertsSpec::new(file.required("moe_num_experts")?, hidden, common.mlp.activation, routing)
    };
    let (first, last): (usize, i64) = (file.required("moe_layer_start_index")?, file.required("moe_layer_end_index")?);
    let interval: usize = file.required("moe_layer_interval")?;
    if interval == 0 {
        return Err(file.error("`moe_layer_interval` is 0; every such layer has experts, counted from 1"));
    }
    // -1 stands for the last layer.
    let last = usize::try_from(last).unwrap_or(common.layers);
    let routed = |index: usize| (index + 1).is_multiple_of(interval) && (first..=last).contains(&index);
    let rope = RopeSpec { pairs: RopePairs::Neighbours, ..common.rope };
    let (attention, mlp) = (Heads(common.heads, Some(rope)), common.mlp);
    let sizes = common.sequential(|index| [attention, if routed(index) { Experts(experts) } else { Mlp(mlp) }]);
    ignore_router_logits(file, sizes.with_carried("model.mtp_"))
}
