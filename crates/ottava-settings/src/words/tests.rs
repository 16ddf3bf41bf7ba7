use super::meaning::Row;
use super::*;
use crate::{RunConfig, keys, paths};
use std::collections::BTreeSet;

fn rows() -> impl Iterator<Item = &'static Row> {
    [training::ROWS, data::ROWS, precision::ROWS, parallel::ROWS].into_iter().flatten()
}

/// Keys of other trainers as people write them, and what they mean: our setting, nothing (what Ottava does anyway), needless with the
/// reason, or refused with the reason.
const TABLE: &[(&str, &[(&str, &str)])] = &[
    (
        "Axolotl",
        &[
            ("base_model = \"m\"", "model.path = \"m\""),
            ("model_type = \"AutoModelForCausalLM\"", "needless: config.json"),
            ("tokenizer_type = \"AutoTokenizer\"", "needless: tokenizer.json"),
            ("trust_remote_code = true", "refused: never run"),
            ("load_in_8bit = false", ""),
            ("strict = false", "needless: unknown key"),
            ("chat_template = \"chatml\"", "tokenizer.chat_template = \"chatml\""),
            ("chat_template = \"phi_3\"", "tokenizer.chat_template = \"phi3\""),
            ("chat_template = \"tokenizer_default\"", ""),
            ("chat_template = \"jinja\"", "refused: `chat_template_path`"),
            ("tokens = [\"<x>\"]", "tokenizer.added_tokens = [\"<x>\"]"),
            ("special_tokens.eos_token = \"<x>\"", "tokenizer.special_tokens.eos_token = \"<x>\""),
            ("special_tokens.pad_token = \"<x>\"", "needless: padding is never"),
            ("resize_token_embeddings_to_32x = true", "tokenizer.pad_vocab_to_multiple_of = 32"),
            ("dataset_prepared_path = \"p\"", "data.cache_dir = \"p\""),
            ("val_set_size = 0.05", "unknown"),
            ("sequence_len = 4096", "data.max_length = 4096"),
            ("sample_packing = true", "data.packing = \"bfd\""),
            ("eval_sample_packing = false", "needless: rows of their own"),
            ("pad_to_sequence_len = true", "needless: `max_length`"),
            ("adapter = \"lora\"", ""),
            ("adapter = \"qlora\"", ""),
            ("lora_model_dir = \"a\"", "lora.init_from = \"a\""),
            ("lora_r = 32", "lora.r = 32"),
            ("lora_target_modules = [\"q_proj\"]", "lora.target_modules = [\"q_proj\"]"),
            ("lora_target_linear = true", "lora.target_modules = \"all-linear\""),
            ("lora_target_parameters = [\"experts.down_proj\"]", "lora.target_parameters = [\"experts.down_proj\"]"),
            ("lora_fan_in_fan_out = false", ""),
            ("peft_use_dora = true", "lora.use_dora = true"),
            ("peft_use_rslora = true", "lora.use_rslora = true"),
            ("wandb_project = \"x\"", "logging.project = \"x\""),
            ("wandb_entity = \"x\"", "needless: `wandb sync`"),
            ("micro_batch_size = 2", "training.per_device_train_batch_size = 2"),
            ("num_epochs = 4", "training.num_train_epochs = 4"),
            ("optimizer = \"adamw_torch_fused\"", "optimizer.name = \"adamw\""),
            ("optimizer = \"adamw_bnb_8bit\"", "refused: `state_dtype = \"float8\"`"),
            ("lr_scheduler = \"cosine\"", "lr_scheduler.type = \"cosine\""),
            ("lr_scheduler = \"rex\"", "refused: \"warmup_stable_decay\""),
            ("train_on_inputs = false", "unknown"),
            ("group_by_length = false", ""),
            ("bf16 = \"auto\"", "precision.recipe = \"bf16\""),
            ("fp16 = false", ""),
            ("tf32 = true", "needless: never rounded to TF32"),
            ("gradient_checkpointing = true", "memory.recompute = \"full\""),
            ("gradient_checkpointing = \"offload\"", "refused: `offload_residuals = true`"),
            ("early_stopping_patience = 3", "unknown"),
            ("early_stopping_steps = 3", "evaluation.early_stopping_patience = 3"),
            ("resume_from_checkpoint = \"c\"", "needless: --resume"),
            ("flash_attention = true", "needless: always fused"),
            ("attn_implementation = \"flash_attention_2\"", "needless: always fused"),
            ("s2_attention = true", "refused: shifted sparse attention"),
            ("evals_per_epoch = 4", "refused: `eval_steps`"),
            ("saves_per_epoch = 1", "refused: `save_steps`"),
            ("deepspeed = \"zero3.json\"", "refused: `ottava import`"),
            ("special_tokens = {}", "tokenizer.special_tokens = {}"),
            ("eot_tokens = [\"<end_of_turn>\"]", "needless: chat template"),
            ("rl = \"dpo\"", "preference.loss_type = \"sigmoid\""),
            ("reward_model = true", "preference.loss_type = \"bradley_terry\""),
            ("rl = \"orpo\"", "preference.loss_type = \"orpo\""),
            ("rl = \"simpo\"", "preference.loss_type = \"simpo\""),
            ("teacher_model_name_or_path = \"t\"", "distillation.teacher = \"t\""),
            ("lmbda = 0.5", "distillation.lmbda = 0.5"),
            ("seq_kd = true", "refused: the teacher reads"),
            ("orpo_alpha = 0.2", "preference.beta = 0.2"),
            ("preference.loss_type = \"hinge\"", "preference.loss_type = \"hinge\""),
            ("loss_type = \"nll\"", ""),
            ("liger_rope = true", "needless: fused kernels"),
            ("loss_watchdog_threshold = 5.0", "needless: ends the run"),
            ("unfrozen_parameters = [\"x\"]", "refused: frozen or thawed"),
            ("noisy_embedding_alpha = 5.0", "training.neftune_noise_alpha = 5.0"),
            ("train_on_eot = \"all\"", "data.chat.train_on_eos = \"all\""),
            ("train_on_eos = \"last\"", "unknown"),
            ("dp_shard_size = 4", "parallel.data = 4"),
            ("context_parallel_size = 2", "parallel.context = 2"),
        ],
    ),
    (
        "LLaMA-Factory",
        &[
            ("model_name_or_path = \"m\"", "model.path = \"m\""),
            ("stage = \"sft\"", ""),
            ("stage = \"dpo\"", ""),
            ("stage = \"rm\"", "preference.loss_type = \"bradley_terry\""),
            ("stage = \"ppo\"", "refused: of preferences"),
            ("do_train = true", "needless: `ottava train`"),
            ("finetuning_type = \"full\"", "lora.r = 0"),
            ("finetuning_type = \"freeze\"", "refused: frozen or thawed"),
            ("lora_rank = 8", "lora.r = 8"),
            ("lora_target = \"all\"", "lora.target_modules = \"all-linear\""),
            ("pissa_init = true", "refused: plain LoRA"),
            ("template = \"llama3\"", "tokenizer.chat_template = \"llama3\""),
            ("add_special_tokens = \"<x>\"", "tokenizer.added_special_tokens = \"<x>\""),
            ("resize_vocab = true", "needless: rows for the tokens"),
            ("cutoff_len = 2048", "data.max_length = 2048"),
            ("max_samples = 1000", "refused: fewer records"),
            ("overwrite_cache = true", "needless: prepared again"),
            ("preprocessing_num_workers = 16", "needless: all cores"),
            ("dataloader_num_workers = 4", "needless: all cores"),
            ("neat_packing = true", "data.document_mask = true"),
            ("train_on_prompt = true", "data.train_on_inputs = true"),
            ("mask_history = true", "refused: all turns"),
            ("plot_loss = true", "needless: loss.svg"),
            ("overwrite_output_dir = true", "needless: never overwritten"),
            ("report_to = \"none\"", ""),
            ("report_to = \"wandb\"", "logging.report_to = [\"wandb\"]"),
            ("report_to = \"all\"", "refused: list the trackers"),
            ("ddp_timeout = 1800", "parallel.communication.collective_timeout = 1800"),
            ("val_size = 0.1", "data.val_set_size = 0.1"),
            ("pure_bf16 = true", "optimizer.storage = \"bfloat16\""),
            ("flash_attn = \"fa2\"", "needless: always fused"),
            ("enable_liger_kernel = true", "needless: fused kernels"),
            ("quantization_bit = 4", "lora.load_in_4bit = true"),
            ("use_galore = true", "refused: low-rank"),
            ("apollo_rank = 128", "refused: low-rank"),
            ("use_badam = true", "refused: BAdam"),
            ("badam_mode = \"layer\"", "refused: BAdam"),
            ("loraplus_lr_ratio = 16.0", "lora.loraplus_lr_ratio = 16.0"),
            ("adapter_name_or_path = \"a\"", "lora.init_from = \"a\""),
            ("export_dir = \"e\"", "refused: `ottava export`"),
            ("disable_gradient_checkpointing = true", "memory.recompute = \"none\""),
            ("shift_attn = true", "refused: shifted sparse attention"),
            ("pref_beta = 0.1", "preference.beta = 0.1"),
            ("pref_loss = \"simpo\"", "preference.loss_type = \"simpo\""),
            ("pref_loss = \"kto_pair\"", "refused: of preferences"),
            ("rl = \"ipo\"", "preference.loss_type = \"ipo\""),
            ("kto_chosen_weight = 2.0", "preference.desirable_weight = 2.0"),
            ("freeze_trainable_layers = 8", "refused: frozen or thawed"),
        ],
    ),
    (
        "TRL and Hugging Face's trainer",
        &[
            ("dataset_name = \"d\"", "data.train_files = \"d\""),
            ("dataset_text_field = \"body\"", "data.records.text_field = \"body\""),
            ("completion_only_loss = true", "data.train_on_inputs = false"),
            ("assistant_only_loss = true", "data.train_on_inputs = false"),
            ("packing = true", "data.packing = \"bfd\""),
            ("packing_strategy = \"bfd_split\"", "refused: \"wrapped\""),
            ("padding_free = true", "needless: `max_length`"),
            ("dataset_num_proc = 4", "needless: all cores"),
            ("max_steps = -1", ""),
            ("max_steps = 20", "training.max_steps = 20"),
            ("per_device_eval_batch_size = 4", "unknown"),
            ("eval_batch_size = 4", "evaluation.per_device_eval_batch_size = 4"),
            ("dataset_streaming = true", "data.streaming = true"),
            ("optim = \"adafactor\"", "refused: \"adamw\", \"muon\" and \"lion\""),
            ("optim = \"paged_adamw_32bit\"", "refused: `offload_optimizer = \"auto\"`"),
            ("lr_scheduler_type = \"cosine_with_min_lr\"", "lr_scheduler.type = \"cosine\""),
            ("lr_scheduler_kwargs = {min_lr = 1e-5}", "refused: `min_learning_rate`"),
            ("eval_strategy = \"no\"", "evaluation.eval_steps = \"end\""),
            ("save_strategy = \"epoch\"", "refused: number of steps"),
            ("logging_strategy = \"steps\"", ""),
            ("load_best_model_at_end = true", "unknown"),
            ("adam_beta2 = 0.99", "optimizer.beta2 = 0.99"),
            ("warmup_ratio = 0.0", ""),
            ("mix_strategy = \"concat\"", "refused: [[data.datasets]]"),
            ("interleave_probs = \"0.5,0.5\"", "refused: [[data.datasets]]"),
            ("greater_is_better = true", "needless: higher or lower values are better"),
            ("metric_for_best_model = \"loss\"", "evaluation.metric_for_best_model = \"eval_loss\""),
            ("group_by_length = true", "refused: `packing = \"bfd\"`"),
            ("loss_type = \"aot_pair\"", "preference.loss_type = \"aot_unpaired\""),
            ("f_divergence_type = \"js_divergence\"", "refused: reverse_kl"),
            ("use_weighting = true", "refused: WPO"),
            ("rpo_alpha = 1.0", "refused: loss_weights"),
            ("auto_find_batch_size = true", "refused: `ottava plan`"),
            ("torch_compile = true", "needless: CUDA graphs"),
            ("push_to_hub = false", "needless: nothing is sent"),
            ("hub_model_id = \"x\"", "needless: nothing is sent"),
            ("run_name = \"x\"", "unknown"),
            ("full_determinism = true", "precision.deterministic = true"),
            ("use_cpu = true", "device = \"cpu\""),
            ("use_liger_kernel = true", "needless: fused kernels"),
            ("data_seed = 3", "needless: `seed`"),
            ("remove_unused_columns = false", "needless: not read"),
            ("lora_modules_to_save = [\"lm_head\"]", "lora.modules_to_save = [\"lm_head\"]"),
            ("fsdp = \"full_shard\"", "parallel.zero = 3"),
            ("fsdp = \"hybrid_shard auto_wrap\"", "refused: `zero_shard_size`, the number of GPUs"),
            ("fsdp_config.fsdp_backward_prefetch = \"x\"", "needless: blocks are gathered"),
            ("fsdp_config.fsdp_sharding_strategy = 2", "parallel.zero = 2"),
        ],
    ),
    (
        "Accelerate, Transformer Engine, MS-AMP",
        &[
            ("mixed_precision = \"fp8\"", "refused: `recipe = \"bf16\"`"),
            ("mixed_precision = \"bf16\"", "precision.recipe = \"bf16\""),
            ("mixed_precision = \"no\"", "precision.recipe = \"fp32\""),
            ("fp8_config.backend = \"TE\"", "refused: only one"),
            ("fp8_format = \"HYBRID\"", "precision.fp8_format = \"hybrid\""),
            (
                "override_linear_precision = [false, false, true]",
                "precision.exceptions.high_precision_products = [\"wgrad\"]",
            ),
            ("use_autocast_during_eval = true", ""),
            ("use_mxfp8_block_scaling = true", "refused: `recipe = \"mxfp8\"`"),
            ("recipe = \"DelayedScaling\"", "precision.recipe = \"fp8-delayed\""),
            ("recipe = \"Float8CurrentScaling\"", "precision.recipe = \"fp8-current\""),
            ("recipe = \"Float8BlockScaling\"", "precision.recipe = \"fp8-block\""),
            ("recipe = \"MXFP8BlockScaling\"", "precision.recipe = \"mxfp8\""),
            ("recipe = \"NVFP4BlockScaling\"", "precision.recipe = \"nvfp4\""),
            ("reduce_amax = true", ""),
            ("fp8_dpa = true", "refused: BF16"),
            ("fp8_mha = false", ""),
            ("opt_level = \"O2\"", "optimizer.storage = \"msamp-o2\""),
            ("msamp = true", "refused: `storage = \"msamp-o1\"`"),
            ("msamp.enabled = true", "refused: `storage = \"msamp-o1\"`"),
        ],
    ),
    (
        "DeepSpeed",
        &[
            ("zero_optimization.stage = 2", "parallel.zero = 2"),
            ("zero_optimization.overlap_comm = true", "needless: overlap"),
            ("zero_optimization.mics_shard_size = 8", "parallel.zero_shard_size = 8"),
            ("zero_optimization.mics_shard_size = -1", ""),
            ("zero_optimization.zero_hpz_partition_size = 8", "refused: second copies of weights"),
            ("zero_optimization.zero_hpz_partition_size = 1", ""),
            ("offload_optimizer.device = \"cpu\"", "memory.offload_optimizer = 1.0"),
            ("offload_optimizer.device = \"nvme\"", "refused: not to disks"),
            ("offload_param.device = \"none\"", "memory.offload_parameters = 0.0"),
            ("train_micro_batch_size_per_gpu = \"auto\"", ""),
            ("train_batch_size = 64", "training.global_batch_size = 64"),
            ("gradient_clipping = 1.0", "training.max_grad_norm = 1.0"),
            ("bf16.enabled = true", "precision.recipe = \"bf16\""),
            ("fp16.enabled = false", ""),
            ("fp16.loss_scale_window = 500", "precision.fp16.loss_scale_window = 500"),
            ("optimizer.type = \"AdamW\"", "optimizer.name = \"adamw\""),
            ("scheduler.type = \"WarmupDecayLR\"", "lr_scheduler.type = \"linear\""),
            ("communication_data_type = \"bf16\"", "parallel.communication.reduce_dtype = \"bfloat16\""),
        ],
    ),
    (
        "torchtitan",
        &[
            ("local_batch_size = 8", "training.per_device_train_batch_size = 8"),
            ("seq_len = 8192", "data.max_length = 8192"),
            ("hf_assets_path = \"m\"", "model.path = \"m\""),
            ("dump_folder = \"o\"", "output_dir = \"o\""),
            ("float8 = {recipe_name = \"rowwise\"}", "refused: no switch"),
            ("recipe_name = \"rowwise\"", "precision.recipe = \"fp8-row\""),
            ("filter_fqns = [\"output\"]", "refused: `high_precision_layers`"),
            ("enable_fsdp_float8_all_gather = true", "refused: `zero = 3`"),
            ("data_parallel_shard_degree = -1", ""),
            ("tensor_parallel_degree = 2", "parallel.tensor = 2"),
            ("pipeline_parallel_degree = 2", "parallel.pipeline = 2"),
            ("activation_checkpoint.mode = \"selective\"", "memory.recompute = \"norm-swiglu\""),
            ("decay_type = \"sqrt\"", "refused: \"warmup_stable_decay\""),
            ("mixed_precision_param = \"bfloat16\"", "precision.recipe = \"bf16\""),
            ("keep_latest_k = 5", "checkpoint.save_total_limit = 5"),
            ("enable_wandb = true", "logging.report_to = [\"wandb\"]"),
        ],
    ),
    (
        "Megatron",
        &[
            ("--train-iters = 100", "training.max_steps = 100"),
            ("--seq-length = 4096", "data.max_length = 4096"),
            ("--lr-decay-style = \"cosine\"", "lr_scheduler.type = \"cosine\""),
            ("--lr-warmup-fraction = 0.01", "lr_scheduler.warmup_steps = 0.01"),
            ("--min-lr = 1e-5", "lr_scheduler.min_learning_rate = 1e-5"),
            ("--clip-grad = 1.0", "training.max_grad_norm = 1.0"),
            ("--tensor-model-parallel-size = 2", "parallel.tensor = 2"),
            ("--use-distributed-optimizer = true", "parallel.zero = 1"),
            ("--recompute-granularity = \"full\"", "memory.recompute = \"full\""),
            ("--fp8-recipe = \"blockwise\"", "precision.recipe = \"fp8-block\""),
            ("--fp8-amax-history-len = 1024", "precision.delayed.amax_history_len = 1024"),
            ("--fp8-param-gather = true", "refused: `zero = 3`"),
            ("--main-grads-dtype = \"bf16\"", "optimizer.gradient_dtype = \"bfloat16\""),
            ("--exp-avg-dtype = \"fp8\"", "refused: `state_dtype`"),
            ("--use-flash-attn = true", "needless: always fused"),
            ("--data-path = \"d\"", "data.train_files = \"d\""),
            ("--save-interval = 500", "checkpoint.save_steps = 500"),
            ("--transformer-impl = \"transformer_engine\"", "refused: no switch"),
            ("--num-layers-at-start-in-bf16 = 1", "precision.exceptions.first_layers_bf16 = 1"),
        ],
    ),
    (
        "Colossal-AI",
        &[
            ("plugin = \"gemini\"", "parallel.zero = 3"),
            ("plugin = \"zero2\"", "parallel.zero = 2"),
            ("plugin = \"3d\"", "refused: `pipeline`"),
            ("use_fp8 = true", "refused: `recipe = \"fp8-current\"`"),
            ("fp8_communication = true", "refused: `reduce_dtype = \"float8\"`"),
            ("tp_size = 2", "parallel.tensor = 2"),
            ("placement_policy = \"auto\"", "refused: `offload_parameters`"),
            ("initial_scale = 65536.0", "precision.fp16.initial_loss_scale = 65536.0"),
            ("growth_interval = 1000", "precision.fp16.loss_scale_window = 1000"),
        ],
    ),
];

/// `key = value` as a key, which may have dots and dashes, and a value.
fn parse(line: &str) -> (&str, Value) {
    let (key, value) = line.split_once(" = ").unwrap();
    (key, toml_value(value))
}

#[test]
fn keys_of_other_trainers_are_translated_or_refused_with_a_reason() {
    let mut count = 0;
    for (trainer, lines) in TABLE {
        for (theirs, expected) in *lines {
            let (key, value) = parse(theirs);
            let found = translate(key, &value);
            let agrees = match (&found, expected.split_once(": ")) {
                (Some(Translation::Refused(reason)), Some(("refused", words))) => reason.contains(words),
                (Some(Translation::Needless(reason)), Some(("needless", words))) => reason.contains(words),
                (Some(Translation::Nothing | Translation::Without(..)), None) => expected.is_empty(),
                (Some(Translation::Ours(ours, value)), None) if expected.contains(" = ") => {
                    (*ours, value.clone()) == parse(expected)
                }
                // Such keys are ours too.
                (None, None) => *expected == "unknown",
                _ => false,
            };
            assert!(agrees, "{trainer}: `{theirs}` is {found:?}, not {expected:?}");
            count += 1;
        }
    }
    assert!(count >= 150, "{count}");
}

#[test]
fn no_word_has_two_meanings() {
    let names: Vec<_> = rows().map(|(name, _)| *name).collect();
    let mut seen = BTreeSet::new();
    names.iter().for_each(|name| assert!(seen.insert(*name), "{name} is there twice"));
    assert!(names.iter().all(|name| plain(name) == *name), "names are written with underscores");
}

#[test]
fn translations_are_settings_that_are_read() {
    for (name, meaning) in rows() {
        let (ours, values) = match meaning {
            Meaning::Is(ours) => (ours, &[][..]),
            Meaning::Values(ours, values) => (ours, *values),
            _ => continue,
        };
        // The user chooses the names in some tables.
        let of_table = || ours.rsplit_once('.').and_then(|(table, _)| keys::find(table));
        assert!(keys::find(ours).or_else(of_table).is_some(), "`{name}` is `{ours}`, which is no setting");
        for (_, answer) in values {
            let Answer::As(text) = answer else { continue };
            let mut table = toml::Table::new();
            paths::insert(&mut table, ours, toml_value(text)).unwrap();
            assert!(table.try_into::<RunConfig>().is_ok(), "`{name}`: `{ours} = {text}` is not read");
        }
    }
}

#[test]
fn our_own_keys_keep_their_meaning() {
    for key in keys::all() {
        let Some(value) = &key.default else { continue };
        let found = translate(&key.path, value);
        let same = found
            .as_ref()
            .is_none_or(|found| matches!(found, Translation::Ours(ours, v) if *ours == key.path && v == value));
        assert!(same, "`{} = {value}` is {found:?}", key.path);
    }
}
