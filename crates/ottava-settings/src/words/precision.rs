//! Words for FP8: of Transformer Engine, Accelerate, Megatron, torchao, MS-AMP and Colossal-AI.

use super::meaning::Answer::{As, Never, Nothing, Unset};
use super::meaning::Meaning::{Is, Needless, Not, Only, Values};
use super::meaning::{Answer, NONE, Row};

pub(super) const ROWS: &[Row] = &[
    // Transformer Engine and Accelerate; amax_history_len, amax_compute_algo, margin and interval are ours as well.
    ("recipe", Values("precision.recipe", RECIPES)),
    ("fp8_format", Values("precision.fp8_format", FORMATS)),
    ("fp8_config.backend", Not(BACKEND)),
    ("override_linear_precision", Values("precision.exceptions.high_precision_products", OVERRIDES)),
    (
        "use_autocast_during_eval",
        Only(&["true"], "evaluation runs in the precision of training; `ottava eval` takes another"),
    ),
    ("use_mxfp8_block_scaling", Only(&["false"], "write `recipe = \"mxfp8\"` under [precision], which is emulated")),
    ("calibrating", Only(&["false"], CALIBRATION)),
    ("fp8_calibration", Only(&["false"], CALIBRATION)),
    ("use_split_accumulator", Not(SUMS)),
    ("fp8_gemm_fprop", Not(SUMS)),
    ("fp8_gemm_dgrad", Not(SUMS)),
    ("fp8_gemm_wgrad", Not(SUMS)),
    ("is_first_microbatch", Not("weights are always cast once per step")),
    ("fp8_dpa", Only(&["false"], ATTENTION)),
    ("fp8_mha", Only(&["false"], ATTENTION)),
    (
        "mixed_precision",
        Values(
            "precision.recipe",
            &[
                ("bf16", As("\"bf16\"")),
                ("fp16", As("\"fp16\"")),
                ("no", As("\"fp32\"")),
                ("fp8", Never("write `recipe = \"bf16\"`, \"fp8-delayed\" or \"fp8-current\" under [precision]")),
            ],
        ),
    ),
    ("fp8_backend", Not(BACKEND)),
    ("fp8_autocast", Not(SWITCH)),
    ("reduce_amax", Only(&["true"], "ranks that share a tensor always share its amax")),
    (
        "scaling_factor_compute_algo",
        Only(
            NONE,
            "a scale is the largest finite value over amax, divided by 2^`margin`; `power_of_two_scales` under [precision] rounds it down",
        ),
    ),
    // MS-AMP, and Megatron's optimizer.
    ("opt_level", Values("optimizer.storage", STORAGES)),
    ("msamp", Not(MSAMP)),
    ("msamp.*", Not(MSAMP)),
    ("enable_msamp", Not(MSAMP)),
    (
        "wgrad_dtype",
        Not(
            "gradients have `gradient_dtype` under [optimizer], and ranks send them in `reduce_dtype` under [parallel]",
        ),
    ),
    (
        "main_params_dtype",
        Values("optimizer.master_weights", &[("fp32", As("\"float32\"")), ("fp16", As("\"float16\""))]),
    ),
    (
        "main_grads_dtype",
        Values("optimizer.gradient_dtype", &[("fp32", As("\"float32\"")), ("bf16", As("\"bfloat16\""))]),
    ),
    ("grad_reduce_in_bf16", Values("optimizer.gradient_dtype", &[("true", As("\"bfloat16\"")), ("false", Unset)])),
    (
        "use_precision_aware_optimizer",
        Only(
            &["false"],
            "formats are `storage`, `master_weights`, `gradient_dtype` and `state_dtype` under [optimizer]",
        ),
    ),
    ("exp_avg_dtype", Not(MOMENTS)),
    ("exp_avg_sq_dtype", Not(MOMENTS)),
    // Megatron and NeMo.
    ("fp8", Not(SWITCH)),
    ("fp4", Not("write `recipe = \"nvfp4\"` under [precision], which is emulated")),
    ("fp8_recipe", Values("precision.recipe", RECIPES)),
    ("fp8_margin", Is("precision.delayed.margin")),
    ("fp8_interval", Is("precision.delayed.interval")),
    ("fp8_amax_history_len", Is("precision.delayed.amax_history_len")),
    ("fp8_amax_compute_algo", Is("precision.delayed.amax_compute_algo")),
    (
        "fp8_wgrad",
        Values("precision.exceptions.high_precision_products", &[("true", As("[]")), ("false", As("[\"wgrad\"]"))]),
    ),
    (
        "no_fp8_wgrad",
        Values("precision.exceptions.high_precision_products", &[("true", As("[\"wgrad\"]")), ("false", As("[]"))]),
    ),
    (
        "first_last_layers_bf16",
        Only(&["false"], "say how many: `first_layers_bf16 = 1` and `last_layers_bf16 = 1` under [precision]"),
    ),
    ("num_layers_at_start_in_bf16", Is("precision.exceptions.first_layers_bf16")),
    ("num_layers_at_end_in_bf16", Is("precision.exceptions.last_layers_bf16")),
    ("fp8_param", Only(&["false"], GATHER)),
    ("fp8_params", Only(&["false"], GATHER)),
    ("fp8_param_gather", Only(&["false"], GATHER)),
    ("tp_only_amax_red", Only(&["false"], "the ranks that share an amax follow from the split of its tensor")),
    ("fp8_dot_product_attention", Only(&["false"], ATTENTION)),
    ("fp8_multi_head_attention", Only(&["false"], ATTENTION)),
    ("keep_fp8_transpose_cache", Not("whether FP8 codes of weights are stored is `weight_codes` under [memory]")),
    ("fp8_e4m3", Not("write `fp8_format = \"e4m3\"` under [precision]")),
    ("fp8_hybrid", Not("write `fp8_format = \"hybrid\"` under [precision]")),
    ("transformer_engine", Not(SWITCH)),
    ("transformer_impl", Not(SWITCH)),
    ("deterministic_mode", Is("precision.deterministic")),
    ("full_determinism", Is("precision.deterministic")),
    ("initial_loss_scale_power", Not("write `initial_loss_scale` under [precision]: 2 to that power")),
    ("fp16.initial_scale_power", Not("write `initial_loss_scale` under [precision]: 2 to that power")),
    ("loss_scale", Not(LOSS_SCALE)),
    ("fp16.loss_scale", Only(&["0"], LOSS_SCALE)),
    ("initial_scale", Is("precision.fp16.initial_loss_scale")),
    ("min_scale", Is("precision.fp16.min_loss_scale")),
    ("growth_interval", Is("precision.fp16.loss_scale_window")),
    ("fp16.loss_scale_window", Is("precision.fp16.loss_scale_window")),
    ("fp16.min_loss_scale", Is("precision.fp16.min_loss_scale")),
    ("fp16.hysteresis", Needless(LOSS_SCALE)),
    // Switches of 16-bit training.
    ("bf16", Values("precision.recipe", BF16)),
    ("bf16.enabled", Values("precision.recipe", BF16)),
    ("bfloat16", Values("precision.recipe", BF16)),
    ("bf16_full_eval", Needless(EVAL)),
    ("fp16_full_eval", Needless(EVAL)),
    ("pure_bf16", Values("optimizer.storage", &[("true", As("\"bfloat16\"")), ("false", Unset)])),
    ("fp16", Values("precision.recipe", FP16)),
    ("fp16.enabled", Values("precision.recipe", FP16)),
    ("float16", Values("precision.recipe", FP16)),
    ("fp32", Values("precision.recipe", &[("true", As("\"fp32\"")), ("false", Unset)])),
    ("float32", Values("precision.recipe", &[("true", As("\"fp32\"")), ("false", Unset)])),
    (
        "precision",
        Values(
            "precision.recipe",
            &[
                ("bf16-mixed", As("\"bf16\"")),
                ("16-mixed", As("\"fp16\"")),
                ("32-true", As("\"fp32\"")),
                ("transformer-engine", As("\"fp8-delayed\"")),
            ],
        ),
    ),
    ("mixed_precision_param", Values("precision.recipe", &[("bfloat16", As("\"bf16\"")), ("float32", As("\"fp32\""))])),
    (
        "mixed_precision_reduce",
        Not(
            "gradients have `gradient_dtype` under [optimizer], and ranks send them in `reduce_dtype` under [parallel]",
        ),
    ),
    ("amp", Not("write `recipe` under [precision]")),
    ("tf32", Needless("products have the types of `recipe` under [precision], and FP32 is never rounded to TF32")),
    (
        "compute_dtype",
        Values(
            "precision.recipe",
            &[("bfloat16", As("\"bf16\"")), ("float16", As("\"fp16\"")), ("float32", As("\"fp32\""))],
        ),
    ),
    ("upcast_layernorm", Needless("norms compute in FP32")),
    ("upcast_lmhead_output", Needless("the loss computes in FP32")),
    ("fp32_norms", Needless("norms compute in FP32")),
    // Colossal-AI.
    (
        "use_fp8",
        Not(
            "Colossal-AI scales by the tensor's own amax: write `recipe = \"fp8-current\"` under [precision], or another recipe",
        ),
    ),
    (
        "fp8_communication",
        Only(&["false"], "gradients are sent in FP8 with `reduce_dtype = \"float8\"` under [parallel]"),
    ),
    // torchao and torchtitan.
    ("float8", Not(SWITCH)),
    ("quantize", Not(SWITCH)),
    ("quantize.linear.*", Not(SWITCH)),
    ("enable_fp8", Not(SWITCH)),
    ("enable_fp8_linear", Not(SWITCH)),
    ("enable_float8_linear", Not(SWITCH)),
    ("recipe_name", Values("precision.recipe", RECIPES)),
    ("scaling_type", Values("precision.recipe", TORCHAO_SCALINGS)),
    ("scaling_type_input", Values("precision.recipe", TORCHAO_SCALINGS)),
    ("filter_fqns", Not(FILTER)),
    ("module_filter_fn", Not(FILTER)),
    ("module_filter_func", Not(FILTER)),
    ("modules_to_not_convert", Not(FILTER)),
    ("auto_filter_small_kn", Is("precision.exceptions.skip_slow_linears")),
    (
        "pad_inner_dim",
        Only(&["true"], "operands of any shape are padded by the cast, since the tensor cores demand it"),
    ),
    ("round_scales_to_power_of_2", Is("precision.power_of_two_scales")),
    (
        "force_recompute_fp8_weight_in_bwd",
        Not("whether weights are cast again for each product is `weight_codes` under [memory]"),
    ),
    ("enable_fsdp_float8_all_gather", Only(&["false"], GATHER)),
    ("fp8_enable_fsdp_float8_all_gather", Only(&["false"], GATHER)),
    ("precompute_float8_dynamic_scale_for_fsdp", Only(&["false"], GATHER)),
    ("emulate", Not("`device = \"cpu\"` emulates FP8 bit for bit")),
];

/// Recipes of Transformer Engine, Megatron, torchao and torchtitan.
const RECIPES: &[(&str, Answer)] = &[
    ("delayed", As("\"fp8-delayed\"")),
    ("DelayedScaling", As("\"fp8-delayed\"")),
    ("tensorwise", As("\"fp8-current\"")),
    ("Float8CurrentScaling", As("\"fp8-current\"")),
    ("rowwise", As("\"fp8-row\"")),
    (
        "rowwise_with_gw_hp",
        Never("write `recipe = \"fp8-row\"` and `high_precision_products = [\"wgrad\"]` under [precision]"),
    ),
    ("blockwise", As("\"fp8-block\"")),
    ("Float8BlockScaling", As("\"fp8-block\"")),
    ("deepseek", As("\"fp8-block\"")),
    ("MXFP8BlockScaling", As("\"mxfp8\"")),
    ("NVFP4BlockScaling", As("\"nvfp4\"")),
    ("fp8", Never("say where scales come from: \"fp8-delayed\", \"fp8-current\", \"fp8-row\" or \"fp8-block\"")),
    ("custom", Never("there are no custom recipes; write the keys of [precision]")),
];

const STORAGES: &[(&str, Answer)] =
    &[("O1", As("\"msamp-o1\"")), ("O2", As("\"msamp-o2\"")), ("O3", As("\"msamp-o3\""))];

const FORMATS: &[(&str, Answer)] =
    &[("HYBRID", As("\"hybrid\"")), ("E4M3", As("\"e4m3\"")), ("E5M2", Never(E5M2)), ("e5m2", Never(E5M2))];
const E5M2: &str = "inputs and weights in E5M2 are not offered, since two bits of mantissa lose too much; \"hybrid\" has gradients in E5M2";

/// fprop, dgrad, wgrad: whether each is left in high precision.
const OVERRIDES: &[(&str, Answer)] = &[
    ("[false, false, false]", As("[]")),
    ("[false, false, true]", As("[\"wgrad\"]")),
    ("[false, true, false]", As("[\"dgrad\"]")),
    ("[false, true, true]", As("[\"dgrad\", \"wgrad\"]")),
    ("[true, false, false]", As("[\"fprop\"]")),
    ("[true, false, true]", As("[\"fprop\", \"wgrad\"]")),
    ("[true, true, false]", As("[\"fprop\", \"dgrad\"]")),
    ("[true, true, true]", As("[\"fprop\", \"dgrad\", \"wgrad\"]")),
];

const TORCHAO_SCALINGS: &[(&str, Answer)] = &[
    ("dynamic", As("\"fp8-current\"")),
    ("delayed", As("\"fp8-delayed\"")),
    ("static", Never("scales that never change are not offered; \"fp8-delayed\" follows the tensors")),
];

const BF16: &[(&str, Answer)] =
    &[("true", As("\"bf16\"")), ("auto", As("\"bf16\"")), ("full", As("\"bf16\"")), ("false", Unset)];
const FP16: &[(&str, Answer)] = &[("true", As("\"fp16\"")), ("auto", Nothing), ("false", Unset)];

const MOMENTS: &str =
    "both moments have one `state_dtype` under [optimizer]: \"float32\", \"bfloat16\", \"float8\" or \"coat\"";
const MSAMP: &str = "write `storage = \"msamp-o1\"`, \"msamp-o2\" or \"msamp-o3\" under [optimizer], and an FP8 recipe under [precision]";
const BACKEND: &str = "there is only one; `recipe` under [precision] selects how scales are chosen";
const SWITCH: &str = "FP8 has no switch of its own: write `recipe = \"fp8-delayed\"` or \"fp8-current\" under [precision], and `fp8_format` for the formats";
const SUMS: &str = "each product has a key for how it adds up: `fprop_accumulation`, `dgrad_accumulation` and `wgrad_accumulation` under [precision], \"fast\" or \"exact\"";
const ATTENTION: &str = "attention computes in BF16 in every recipe";
const GATHER: &str = "weights have the format of `storage` under [optimizer]; with `zero = 3` under [parallel] and an FP8 recipe, ranks gather FP8 codes by themselves";
const CALIBRATION: &str = "steps that compute in BF16 and measure for FP8 are `high_precision_steps = \"1..100\"` under [precision]; `first_step = \"current\"` does without";
const FILTER: &str = "write patterns of names in `high_precision_layers` under [precision], as \"*.down_proj\"";
const EVAL: &str = "evaluation runs in the precision of training; `ottava eval` takes another";
const LOSS_SCALE: &str = "the loss scale of \"fp16\" is dynamic: `initial_loss_scale`, `loss_scale_window` and `min_loss_scale` under [precision]";
