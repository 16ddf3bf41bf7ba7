//! DeepSeek-V3: DeepSeek-V2 with sigmoid scores, to which a bias is added for the choice. DeepSeek-AI 2024, arXiv:2412.19437.

use super::deepseek_v2::deepseek;
use super::family::{Family, softmax_routing};
use super::{ConfigFile, DecoderConfig};
use crate::error::Result;
use ottava_tensor::ops::{ExpertGroups, GroupScore, RopePairs, RouterScores, Routing};

pub(super) const FAMILY: Family =
    Family { architecture: "DeepseekV3ForCausalLM", model_type: "deepseek_v3", reward_model: None, read };

fn read(file: &ConfigFile) -> Result<DecoderConfig> {
    for (key, known) in [("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")] {
        let name: String = file.optional(key, known.to_string())?;
        if name != known {
            return Err(file.error(&format!("`{key}` is \"{name}\"; \"{known}\" is implemented for DeepSeek-V3")));
        }
    }
    let [count, chosen] = [file.optional("n_group", 1)?, file.optional("topk_group", 1)?];
    let routing = Routing {
        scores: RouterScores::Sigmoid,
        normalise: file.optional("norm_topk_prob", true)?.then_some(1e-20),
        scale: file.optional("routed_scaling_factor", 1.0)?,
        groups: Some(ExpertGroups { count, chosen, by: GroupScore::TwoBest }),
        ..softmax_routing(file, false)?
    };
    let pairs = if file.optional("rope_interleave", true)? { RopePairs::Neighbours } else { RopePairs::Halves };
    let mut sizes = deepseek(file, pairs, routing, Some("e_score_correction_bias"))?;
    sizes.skipped_layers = file.optional("num_nextn_predict_layers", 0)?;
    Ok(sizes)
}
