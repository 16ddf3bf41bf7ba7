//! Settings of other trainers: translated where one of ours means the same, refused with a reason where not.

use toml::Value;

/// The meaning of another trainer's setting.
enum Meaning {
    /// Another spelling of this key.
    Is(&'static str),
    /// This key, with other values: each is translated to TOML, or refused with a reason.
    Values(&'static str, &'static [(&'static str, Result<&'static str, &'static str>)]),
    /// Accepted at this one value, which is what Ottava does; refused at others, with the reason.
    Only(&'static str, &'static str),
    /// Refused, with the reason.
    Not(&'static str),
}

use Meaning::{Is, Not, Only, Values};

const THEIRS: &[(&str, Meaning)] = &[
    ("micro_batch_size", Is("per_device_train_batch_size")),
    ("local_batch_size", Is("per_device_train_batch_size")),
    ("seq_len", Is("max_length")),
    ("seq_length", Is("max_length")),
    ("sequence_len", Is("max_length")),
    ("cutoff_len", Is("max_length")),
    ("max_seq_length", Is("max_length")),
    ("block_size", Is("max_length")),
    ("lr", Is("learning_rate")),
    ("min_lr", Is("min_learning_rate")),
    ("lr_warmup_steps", Is("warmup_steps")),
    ("train_iters", Is("max_steps")),
    ("max_norm", Is("max_grad_norm")),
    ("clip_grad", Is("max_grad_norm")),
    ("grad_clip", Is("max_grad_norm")),
    ("keep_latest_k", Is("save_total_limit")),
    // Data of TRL, Axolotl, LLaMA-Factory and Megatron; formatting, packing and train_on_inputs are ours as well.
    ("assistant_only_loss", Values("train_on_inputs", NEGATED)),
    ("completion_only_loss", Values("train_on_inputs", NEGATED)),
    ("train_on_prompt", Is("train_on_inputs")),
    ("packing", Values("packing", PACKED)),
    ("sample_packing", Values("packing", PACKED)),
    ("packing_strategy", Is("packing")),
    ("neat_packing", Is("document_mask")),
    ("reset_attention_mask", Is("document_mask")),
    ("reset_position_ids", Is("document_mask")),
    ("dataset_text_field", Is("text_field")),
    ("chat_template_jinja", Not("write the template into a file and name it in `chat_template_path` under [data]")),
    ("model_name_or_path", Is("path")),
    ("base_model", Is("path")),
    // Axolotl and LLaMA-Factory; lora_alpha and lora_dropout are ours as well.
    ("lora_r", Is("r")),
    ("lora_rank", Is("r")),
    ("lora_target_modules", Is("target_modules")),
    ("lora_target", Is("target_modules")),
    ("lora_model_dir", Is("init_from")),
    ("adapter_name_or_path", Is("init_from")),
    // Transformer Engine and Accelerate; amax_history_len, amax_compute_algo, margin and interval are ours as well.
    ("fp8_format", Values("fp8_format", FORMATS)),
    ("override_linear_precision", Values("high_precision_products", OVERRIDES)),
    (
        "use_autocast_during_eval",
        Only("true", "evaluation runs in the precision of training; `ottava eval` takes another"),
    ),
    (
        "use_mxfp8_block_scaling",
        Only("false", "write `recipe = \"mxfp8\"` under [precision], which is emulated on the CPU"),
    ),
    ("calibrating", Only("false", CALIBRATION)),
    ("fp8_calibration", Only("false", CALIBRATION)),
    ("use_split_accumulator", Not(SUMS)),
    ("fp8_gemm_fprop", Not(SUMS)),
    ("fp8_gemm_dgrad", Not(SUMS)),
    ("fp8_gemm_wgrad", Not(SUMS)),
    ("is_first_microbatch", Not("weights are always cast once per step")),
    ("fp8_dpa", Only("false", ATTENTION)),
    ("fp8_mha", Only("false", ATTENTION)),
    ("mixed_precision", Not("write `recipe = \"bf16\"`, \"fp8-delayed\" or \"fp8-current\" under [precision]")),
    ("fp8_backend", Not("there is only one; `recipe` under [precision] selects how scales are chosen")),
    // MS-AMP, and Megatron's optimizer.
    ("opt_level", Is("level")),
    ("main_params_dtype", Values("master_weights", &[("fp32", Ok("\"float32\"")), ("fp16", Ok("\"float16\""))])),
    ("main_grads_dtype", Values("gradient_dtype", &[("fp32", Ok("\"float32\"")), ("bf16", Ok("\"bfloat16\""))])),
    ("exp_avg_dtype", Not(MOMENTS)),
    ("exp_avg_sq_dtype", Not(MOMENTS)),
    // Megatron and NeMo.
    ("fp8", Not(SWITCH)),
    ("fp8_recipe", Values("recipe", MEGATRON_RECIPES)),
    ("fp8_margin", Is("margin")),
    ("fp8_interval", Is("interval")),
    ("fp8_amax_history_len", Is("amax_history_len")),
    ("fp8_amax_compute_algo", Is("amax_compute_algo")),
    ("fp8_wgrad", Values("high_precision_products", &[("true", Ok("[]")), ("false", Ok("[\"wgrad\"]"))])),
    (
        "first_last_layers_bf16",
        Only("false", "say how many: `first_layers_bf16 = 1` and `last_layers_bf16 = 1` under [precision]"),
    ),
    ("num_layers_at_start_in_bf16", Is("first_layers_bf16")),
    ("num_layers_at_end_in_bf16", Is("last_layers_bf16")),
    ("fp8_param", Only("false", PARAMETERS)),
    ("fp8_param_gather", Only("false", PARAMETERS)),
    ("tp_only_amax_red", Only("false", "one GPU trains; there is nobody to reduce amaxes with")),
    ("fp8_dot_product_attention", Only("false", ATTENTION)),
    ("fp8_multi_head_attention", Only("false", ATTENTION)),
    ("keep_fp8_transpose_cache", Not("whether FP8 codes of weights are stored is `weight_codes` under [memory]")),
    ("fp8_e4m3", Not("write `fp8_format = \"e4m3\"` under [precision]")),
    ("fp8_hybrid", Not("write `fp8_format = \"hybrid\"` under [precision]")),
    ("transformer_engine", Not(SWITCH)),
    ("transformer_impl", Not(SWITCH)),
    ("deterministic_mode", Is("deterministic")),
    // Hugging Face's trainer, and PyTorch's Muon.
    ("optim", Values("name", OPTIMIZERS)),
    ("adjust_lr_fn", Is("muon_adjust_lr_fn")),
    ("full_determinism", Is("deterministic")),
    // Colossal-AI.
    (
        "use_fp8",
        Not(
            "Colossal-AI scales by the tensor's own amax: write `recipe = \"fp8-current\"` under [precision], or another recipe",
        ),
    ),
    ("fp8_communication", Only("false", "one GPU trains; there is no communication")),
    // torchao and torchtitan.
    ("float8", Not(SWITCH)),
    ("enable_fp8", Not(SWITCH)),
    ("enable_fp8_linear", Not(SWITCH)),
    ("enable_float8_linear", Not(SWITCH)),
    ("recipe_name", Values("recipe", TORCHAO_RECIPES)),
    ("scaling_type", Values("recipe", TORCHAO_SCALINGS)),
    ("filter_fqns", Not(FILTER)),
    ("module_filter_fn", Not(FILTER)),
    ("modules_to_not_convert", Not(FILTER)),
    ("auto_filter_small_kn", Is("skip_slow_linears")),
    ("pad_inner_dim", Only("true", "operands of any shape are padded by the cast, since the tensor cores demand it")),
    ("round_scales_to_power_of_2", Is("power_of_two_scales")),
    (
        "force_recompute_fp8_weight_in_bwd",
        Not("whether weights are cast again for each product is `weight_codes` under [memory]"),
    ),
    ("enable_fsdp_float8_all_gather", Only("false", PARAMETERS)),
    ("precompute_float8_dynamic_scale_for_fsdp", Only("false", PARAMETERS)),
    ("emulate", Not("`device = \"cpu\"` emulates FP8 bit for bit")),
];

const MOMENTS: &str =
    "both moments have one `state_dtype` under [optimizer]: \"float32\", \"bfloat16\", \"float8\" or \"coat\"";
const FORMATS: &[(&str, Result<&str, &str>)] = &[
    ("HYBRID", Ok("\"hybrid\"")),
    ("E4M3", Ok("\"e4m3\"")),
    (
        "E5M2",
        Err(
            "inputs and weights in E5M2 are not offered, since two bits of mantissa lose too much; \"hybrid\" has gradients in E5M2",
        ),
    ),
    (
        "e5m2",
        Err(
            "inputs and weights in E5M2 are not offered, since two bits of mantissa lose too much; \"hybrid\" has gradients in E5M2",
        ),
    ),
];

const OPTIMIZERS: &[(&str, Result<&str, &str>)] = &[
    ("adamw_torch", Ok("\"adamw\"")),
    ("adamw_torch_fused", Ok("\"adamw\"")),
    ("lion_32bit", Ok("\"lion\"")),
    ("adamw_8bit", Err("write `level = \"coat\"` under [optimizer]; docs/optimizer.md has all formats")),
];

const NEGATED: &[(&str, Result<&str, &str>)] = &[("true", Ok("false")), ("false", Ok("true"))];
const PACKED: &[(&str, Result<&str, &str>)] = &[("true", Ok("\"bfd\"")), ("false", Ok("\"none\""))];

const MEGATRON_RECIPES: &[(&str, Result<&str, &str>)] = &[
    ("delayed", Ok("\"fp8-delayed\"")),
    ("tensorwise", Ok("\"fp8-current\"")),
    ("blockwise", Ok("\"fp8-block\"")),
    ("mxfp8", Ok("\"mxfp8\"")),
    ("custom", Err("there are no custom recipes; write the keys of [precision]")),
];

const TORCHAO_RECIPES: &[(&str, Result<&str, &str>)] = &[
    ("tensorwise", Ok("\"fp8-current\"")),
    ("rowwise", Ok("\"fp8-row\"")),
    (
        "rowwise_with_gw_hp",
        Err("write `recipe = \"fp8-row\"` and `high_precision_products = [\"wgrad\"]` under [precision]"),
    ),
];

/// fprop, dgrad, wgrad: whether each is left in high precision.
const OVERRIDES: &[(&str, Result<&str, &str>)] = &[
    ("[false, false, false]", Ok("[]")),
    ("[false, false, true]", Ok("[\"wgrad\"]")),
    ("[false, true, false]", Ok("[\"dgrad\"]")),
    ("[false, true, true]", Ok("[\"dgrad\", \"wgrad\"]")),
    ("[true, false, false]", Ok("[\"fprop\"]")),
    ("[true, false, true]", Ok("[\"fprop\", \"wgrad\"]")),
    ("[true, true, false]", Ok("[\"fprop\", \"dgrad\"]")),
    ("[true, true, true]", Ok("[\"fprop\", \"dgrad\", \"wgrad\"]")),
];

const TORCHAO_SCALINGS: &[(&str, Result<&str, &str>)] = &[
    ("dynamic", Ok("\"fp8-current\"")),
    ("delayed", Ok("\"fp8-delayed\"")),
    ("static", Err("scales that never change are not offered; \"fp8-delayed\" follows the tensors")),
];

const SWITCH: &str = "FP8 has no switch of its own: write `recipe = \"fp8-delayed\"` or \"fp8-current\" under [precision], and `fp8_format` for the formats";
const SUMS: &str = "each product has a key for how it adds up: `fprop_accumulation`, `dgrad_accumulation` and `wgrad_accumulation` under [precision], \"fast\" or \"exact\"";
const ATTENTION: &str = "attention computes in BF16 in every recipe";
const PARAMETERS: &str =
    "weights have the format of `level` under [optimizer] and are cast to FP8, and with one GPU nothing is gathered";
const CALIBRATION: &str = "steps that compute in BF16 and measure for FP8 are `high_precision_steps = \"1..100\"` under [precision]; `first_step = \"current\"` does without";
const FILTER: &str = "write patterns of names in `high_precision_layers` under [precision], as \"*.down_proj\"";

/// `name` without the dashes of a command line.
fn plain(name: &str) -> String {
    name.trim_start_matches("--").replace('-', "_")
}

/// Our key for another trainer's `name`, if there is one.
pub(super) fn ours(name: &str) -> Option<&'static str> {
    let name = plain(name);
    THEIRS.iter().find(|(theirs, _)| *theirs == name).and_then(|(_, meaning)| match meaning {
        Is(ours) | Values(ours, _) => Some(*ours),
        Only(..) | Not(_) => None,
    })
}

/// Translates another trainer's `name = value`: to one of our settings, to nothing where Ottava does so anyway, or to the reason why
/// it is refused. `None` for unknown names.
#[allow(clippy::type_complexity)]
pub(super) fn translate(name: &str, value: &Value) -> Option<Result<Option<(&'static str, Value)>, &'static str>> {
    let name = plain(name);
    let (_, meaning) = THEIRS.iter().find(|(theirs, _)| *theirs == name)?;
    Some(match meaning {
        Is(ours) => Ok(Some((*ours, value.clone()))),
        Values(ours, values) => match values.iter().find(|(theirs, _)| says(value, theirs)) {
            Some((_, Ok(text))) => Ok(Some((*ours, toml_value(text)))),
            Some((_, Err(reason))) => Err(*reason),
            None => Ok(Some((*ours, value.clone()))),
        },
        Only(only, _) if value.to_string() == *only => Ok(None),
        Only(_, reason) | Not(reason) => Err(*reason),
    })
}

/// Whether `value` is `theirs`: a word, or something else as TOML writes it.
fn says(value: &Value, theirs: &str) -> bool {
    value.as_str().map_or_else(|| value.to_string() == theirs, |word| word == theirs)
}

fn toml_value(text: &str) -> Value {
    let table: toml::Table = format!("value = {text}").parse().expect("our own values are TOML");
    table["value"].clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_name_has_two_meanings() {
        let mut names: Vec<_> = THEIRS.iter().map(|(name, _)| *name).collect();
        names.sort();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
        assert!(names.iter().all(|name| plain(name) == *name), "names are written with underscores");
    }
}
