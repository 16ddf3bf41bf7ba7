use crate::*;
use ottava_common::error::Result;
use ottava_recipe::recompute::Recompute;
use ottava_recipe::{Precision, RecipeName};

pub fn load(text: &str, settings: &[&str]) -> Result<RunConfig> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.toml");
    std::fs::write(&path, text).unwrap();
    RunConfig::load(&path, &settings.iter().map(|s| s.to_string()).collect::<Vec<_>>()).map(|loaded| loaded.config)
}

pub const SMALL: &str = "[model]\npath = \"m\"\n[data]\ntrain_files = [\"a.txt\"]\n";

/// Fails unless the content of the file at `path` is `text`. With `OTTAVA_GOLDEN=record`, writes the file.
pub fn expect_file(path: &str, text: &str) {
    if std::env::var("OTTAVA_GOLDEN").is_ok_and(|value| value == "record") {
        std::fs::write(path, text).unwrap();
    }
    let found = std::fs::read_to_string(path).unwrap_or_default();
    assert!(found == text, "write {path} again: `OTTAVA_GOLDEN=record cargo test -p ottava-settings the_`");
}

#[test]
fn misspelt_keys_are_errors_with_a_suggestion() {
    let error = load(&format!("{SMALL}[training]\nlearning_rte = 1e-3\n"), &[]).unwrap_err().to_string();
    assert!(
        error.ends_with("`training.learning_rte` is not a setting; did you mean `optimizer.learning_rate`?"),
        "{error}"
    );
    let error = load(&format!("{SMALL}[trainig]\nmax_steps = 3\n"), &[]).unwrap_err().to_string();
    assert!(error.ends_with("`trainig` is not a table of settings; did you mean `[training]`?"), "{error}");
    let error = load(&format!("{SMALL}[train]\nmax_steps = 3\n"), &[]).unwrap_err().to_string();
    assert!(error.ends_with("`train` is not a table of settings; did you mean `[training]`?"), "{error}");
    let error = load(&format!("{SMALL}[training]\nval_set_siz = 3\n"), &[]).unwrap_err().to_string();
    assert!(error.ends_with("`training.val_set_siz` is not a setting; did you mean `data.val_set_size`?"), "{error}");
}

#[test]
fn keys_that_are_near_to_none_are_errors_with_those_that_there_are() {
    for (text, settings, words) in [
        ("[lora]\npurple = true\n", &[][..], "`lora.purple` is not a setting; [lora] has `r`, `lora_alpha`, "),
        (
            "[purple]\nproject = \"x\"\n",
            &[],
            "`purple` is not a table of settings; there are [model], [tokenizer], [lora], [data], ",
        ),
        ("purple = true\n", &[], "`purple` is not a setting; `ottava config reference` lists all of them"),
        ("", &["purple=true"], "`purple` is not a setting; `ottava config reference` lists all of them"),
    ] {
        // Keys outside of tables must precede all tables.
        let text = if text.starts_with('[') { format!("{SMALL}{text}") } else { format!("{text}{SMALL}") };
        let error = load(&text, settings).unwrap_err().to_string();
        assert!(error.contains(words) && !error.contains("did you mean"), "{error}");
    }
}

#[test]
fn a_text_in_place_of_a_list_says_how_to_write_it() {
    let text = SMALL.replace("[\"a.txt\"]", "\"a.txt\"");
    let error = load(&text, &[]).unwrap_err().to_string();
    assert!(error.ends_with("`data.train_files` is a list: write `train_files = [\"a.txt\"]`"), "{error}");
    let error = load(SMALL, &["prompts=Once"]).unwrap_err().to_string();
    assert!(error.contains("write `prompts = [\"Once\"]`"), "{error}");
}

#[test]
fn a_warm_up_is_a_number_of_steps_or_a_share() {
    let config = load(SMALL, &["warmup_steps=0.03"]).unwrap();
    assert_eq!((config.schedule(1000).warmup_steps, config.schedule(10).warmup_steps), (30, 1));
    assert_eq!(load(SMALL, &["warmup_steps=7"]).unwrap().schedule(1000).warmup_steps, 7);
    let error = load(SMALL, &["warmup_steps=1.5"]).unwrap_err().to_string();
    assert!(error.contains("1.5 is no number of warm-up steps, and no share"), "{error}");
}

#[test]
fn every_problem_is_reported_at_once() {
    let error = load("[logging]\nlogging_steps = 0\n", &["beta1=1.5", "nonsense"]).unwrap_err().to_string();
    assert!(error.contains("--set nonsense: expected key=value"), "{error}");
    let error = load("[logging]\nlogging_steps = 0\n", &["beta1=1.5"]).unwrap_err().to_string();
    for part in ["model.path", "train_files", "logging_steps", "optimizer.beta1"] {
        assert!(error.contains(part), "{part} in {error}");
    }
}

#[test]
fn settings_take_bare_keys_dotted_paths_and_words() {
    let config =
        load(SMALL, &["recipe=fp8-delayed", "training.max_steps=7", "lr=0.5", "prompts=[\"a\", \"b\"]"]).unwrap();
    assert_eq!(config.precision.recipe, ottava_recipe::RecipeName::Fp8Delayed);
    assert_eq!((config.training.max_steps, config.optimizer.learning_rate), (Some(7), 0.5));
    assert_eq!(config.generation.prompts, ["a", "b"]);
}

#[test]
fn other_trainers_spellings_are_understood_once() {
    let config = load(&format!("{SMALL}seq_len = 77\n[training]\nmicro_batch_size = 3\n"), &[]).unwrap();
    assert_eq!((config.data.max_length, config.training.per_device_train_batch_size), (77, 3));
    let error = load(&format!("{SMALL}seq_len = 77\nmax_length = 5\n"), &[]).unwrap_err().to_string();
    assert!(error.contains("mean the same"), "{error}");
}

#[test]
fn the_resolved_configuration_reads_back() {
    let config = load(SMALL, &["max_steps=3"]).unwrap();
    assert_eq!(load(&config.to_toml(), &[]).unwrap(), config);
}

#[test]
fn a_resumed_run_keeps_its_shape() {
    let saved = load(SMALL, &["max_steps=3"]).unwrap();
    let longer = load(SMALL, &["max_steps=9", "output_dir=elsewhere"]).unwrap();
    let wider = load(SMALL, &["max_steps=3", "recipe=fp32"]).unwrap();
    assert!(wider.check_resume(&saved).unwrap_err().to_string().contains("recipe `bf16` and cannot resume as `fp32`"));
    assert_eq!(
        longer.check_resume(&saved).unwrap(),
        [("training.max_steps".to_string(), "3".to_string(), "9".to_string())]
    );
    let other = load(SMALL, &["max_length=9"]).unwrap();
    assert!(other.check_resume(&saved).unwrap_err().to_string().contains("`data.max_length` was 1024"));
}

/// Earlier versions saved `mode = "none"` in every run. A run whose losses change says so.
#[test]
fn runs_resume_after_the_default_of_corrections_has_changed() {
    const MODE: &str = "reinforcement.correction.mode";
    let rewards = "\n[[reinforcement.rewards]]\ntype = \"math\"\n";
    let changes = |text: &str, recipe: &str| {
        let [before, now] = ["none", "auto"].map(|mode| {
            let settings = [format!("{MODE}={mode}"), format!("recipe={recipe}")];
            load(text, &[&settings[0], &settings[1]]).unwrap()
        });
        now.check_resume(&before).unwrap()
    };
    let rewarded = format!("{SMALL}{rewards}");
    assert_eq!(changes(SMALL, "fp8-row"), []);
    assert_eq!(changes(&rewarded, "bf16"), []);
    assert_eq!(changes(&rewarded, "fp8-row"), [(MODE.to_string(), "\"none\"".to_string(), "\"auto\"".to_string())]);
}

/// Loads `lines` as the `[precision]` table, and returns the `Precision`. Keys of other trainers may be used.
fn precision(lines: &str) -> Result<Precision> {
    load(&format!("{SMALL}[precision]\n{lines}\n"), &[]).map(|config| config.precision)
}

#[test]
fn numbers_that_steps_cannot_hold_are_refused() {
    for setting in [
        "eps=1e-320",
        "eps=1e-40",
        "learning_rate=1e-300",
        "learning_rate=1e39",
        "weight_decay=1e-50",
        "max_grad_norm=1e300",
        "beta2=0.99999999999",
    ] {
        let error = load(SMALL, &[setting]).unwrap_err().to_string();
        let key = setting.split('=').next().unwrap();
        assert!(error.contains(&format!(".{key}` is")) && error.contains("F32"), "{setting}: {error}");
    }
    for setting in ["eps=1e-30", "weight_decay=0.0", "max_grad_norm=0.0", "beta2=0.9999"] {
        load(SMALL, &[setting]).unwrap_or_else(|error| panic!("{setting}: {error}"));
    }
}

#[test]
fn names_with_our_meaning_are_understood() {
    let same = [
        ("fp8_margin = 2", "margin = 2"),
        ("fp8_interval = 3", "interval = 3"),
        ("fp8-amax-history-len = 16", "amax_history_len = 16"),
        ("fp8_amax_compute_algo = \"most_recent\"", "amax_compute_algo = \"most_recent\""),
        ("fp8_format = \"E4M3\"", "fp8_format = \"e4m3\""),
        ("fp8_format = \"HYBRID\"", "fp8_format = \"hybrid\""),
        ("fp8_recipe = \"delayed\"", "recipe = \"fp8-delayed\""),
        ("fp8_recipe = \"tensorwise\"", "recipe = \"fp8-current\""),
        ("recipe_name = \"tensorwise\"", "recipe = \"fp8-current\""),
        ("scaling_type = \"dynamic\"", "recipe = \"fp8-current\""),
        ("fp8_recipe = \"blockwise\"", "recipe = \"fp8-block\""),
        ("recipe_name = \"rowwise\"", "recipe = \"fp8-row\""),
        ("fp8_recipe = \"mxfp8\"", "recipe = \"mxfp8\""),
        ("override_linear_precision = [false, false, true]", "high_precision_products = [\"wgrad\"]"),
        ("override_linear_precision = [true, true, false]", "high_precision_products = [\"fprop\", \"dgrad\"]"),
        ("fp8_wgrad = false", "high_precision_products = [\"wgrad\"]"),
        ("round_scales_to_power_of_2 = true", "power_of_two_scales = true"),
        ("num_layers_at_start_in_bf16 = 1", "first_layers_bf16 = 1"),
        ("num_layers_at_end_in_bf16 = 2", "last_layers_bf16 = 2"),
        ("auto_filter_small_kn = false", "skip_slow_linears = false"),
    ];
    for (theirs, ours) in same {
        let expected = precision(ours).unwrap();
        assert_eq!(precision(theirs).unwrap(), expected, "{theirs}");
        assert_ne!(expected, Precision::default(), "{ours} says something");
        assert_eq!(load(SMALL, &[theirs]).unwrap().precision, expected, "--set {theirs}");
    }
}

#[test]
fn names_of_fine_tuning_are_understood() {
    for (theirs, ours) in [
        ("assistant_only_loss = false", "train_on_inputs = true"),
        ("train_on_prompt = true", "train_on_inputs = true"),
        ("sample_packing = true", "packing = \"bfd\""),
        ("packing = false", "packing = \"none\""),
        ("packing_strategy = \"wrapped\"", "packing = \"wrapped\""),
        ("reset_attention_mask = true", "document_mask = true"),
        ("dataset_text_field = \"body\"", "text_field = \"body\""),
    ] {
        let expected = load(&format!("{SMALL}{ours}\n"), &[]).unwrap();
        assert_eq!(load(&format!("{SMALL}{theirs}\n"), &[]).unwrap(), expected, "{theirs}");
        assert_eq!(load(SMALL, &[theirs]).unwrap(), expected, "--set {theirs}");
        assert_ne!(expected, load(SMALL, &[]).unwrap(), "{ours} says something");
    }
}

#[test]
fn names_at_the_value_ottava_implements_are_accepted() {
    let lines = [
        "override_linear_precision = [false, false, false]",
        "fp8_wgrad = true",
        "first_last_layers_bf16 = false",
        "fp8_dot_product_attention = false",
        "fp8_param_gather = false",
        "fp8_communication = false",
        "use_mxfp8_block_scaling = false",
        "pad_inner_dim = true",
        "use_autocast_during_eval = true",
    ];
    for line in lines {
        assert_eq!(precision(line).unwrap(), Precision::default(), "{line}");
        assert_eq!(load(SMALL, &[line]).unwrap().precision, Precision::default(), "--set {line}");
    }
}

#[test]
fn names_with_another_meaning_are_refused_with_a_reason_and_our_key() {
    let refused = [
        ("use_fp8 = true", "`recipe = \"fp8-current\"`"),
        ("enable_fp8 = true", "`recipe = \"fp8-delayed\"`"),
        ("fp8 = \"hybrid\"", "`fp8_format` for the formats"),
        ("fp8 = true", "FP8 has no switch of its own"),
        ("transformer_engine = true", "FP8 has no switch of its own"),
        ("enable_float8_linear = true", "FP8 has no switch of its own"),
        ("mixed_precision = \"fp8\"", "`recipe = \"bf16\"`"),
        ("exp_avg_dtype = \"fp8\"", "`state_dtype` under [optimizer]"),
        ("fp8_format = \"E5M2\"", "two bits of mantissa"),
        ("recipe_name = \"rowwise_with_gw_hp\"", "`high_precision_products = [\"wgrad\"]`"),
        ("first_last_layers_bf16 = true", "`first_layers_bf16 = 1`"),
        ("fp8_multi_head_attention = true", "attention computes in BF16"),
        ("fp8_param_gather = true", "ranks gather FP8 codes"),
        ("fp8_communication = true", "`reduce_dtype = \"float8\"`"),
        ("tp_only_amax_red = true", "the split of its tensor"),
        ("use_mxfp8_block_scaling = true", "under [precision], which is emulated"),
        ("calibrating = true", "`high_precision_steps = \"1..100\"`"),
        ("use_split_accumulator = true", "`dgrad_accumulation`"),
        ("filter_fqns = [\"lm_head\"]", "`high_precision_layers`"),
        ("modules_to_not_convert = [\"lm_head\"]", "`high_precision_layers`"),
        ("pad_inner_dim = false", "padded by the cast"),
        ("force_recompute_fp8_weight_in_bwd = true", "`weight_codes` under [memory]"),
        ("use_autocast_during_eval = false", "`ottava eval`"),
    ];
    for (line, reason) in refused {
        let name = line.split(' ').next().unwrap();
        let error = precision(line).unwrap_err().to_string();
        assert!(error.contains(&format!("`precision.{name}`: ")) && error.contains(reason), "{line}: {error}");
        let error = load(SMALL, &[line]).unwrap_err().to_string();
        assert!(error.contains(reason), "--set {line}: {error}");
        let error = load(&format!("{line}\n{SMALL}"), &[]).unwrap_err().to_string();
        assert!(error.contains(reason), "at the top, {line}: {error}");
    }
    let error = load(&format!("{SMALL}[training]\nfp8_margin = 1\n"), &[]).unwrap_err().to_string();
    assert!(error.ends_with("`training.fp8_margin` is `precision.delayed.margin` here"), "{error}");
    let error = precision("fp8_margin = 1\nmargin = 1").unwrap_err().to_string();
    assert!(error.contains("mean the same"), "{error}");
    let error = load(&format!("{SMALL}[float8]\nrecipe_name = \"tensorwise\"\n"), &[]).unwrap_err().to_string();
    assert!(error.contains("`float8`: FP8 has no switch"), "{error}");
}

#[test]
fn precision_problems_are_errors_of_the_configuration() {
    for (line, reason) in [
        ("interval = 0", "`precision.delayed.interval` is 0"),
        ("high_precision_layers = [\"\"]", "empty pattern"),
        ("non_finite = \"ignore\"", "quarantine"),
        ("wgrad_accumulation = \"slow\"", "exact"),
        ("wgrad_blocks = \"64x64\"", "\"128x128\""),
        ("recipe = \"fp8-block\"\nfprop_accumulation = \"fast\"", "always add up exactly"),
        ("recipe = \"fp8-delayed\"\npower_of_two_scales = true", "not for \"fp8-delayed\""),
        ("recipe = \"fp8-row\"\nsmooth_swiglu = true", "one scale per tensor, of which recipe fp8-row has none"),
        ("high_precision_products = [\"backward\"]", "fprop"),
        ("recipe = \"fp8-row\"\nhigh_precision_steps = \"9\"", "`9` is no range of steps"),
        ("high_precision_steps = \"1..9\"", "choose an FP8 recipe"),
    ] {
        let error = precision(line).unwrap_err().to_string();
        assert!(error.contains(reason), "{line}: {error}");
    }
}

#[test]
fn impossible_offloading_is_an_error() {
    for (lines, reason) in [
        ("offload_optimizer = 1.5", "`memory.offload_optimizer` is a share"),
        ("offload_parameters = -0.1", "`memory.offload_parameters` is a share"),
        ("offload_residuals = true", "for `memory.recompute = \"full\"`"),
        ("recompute = \"auto\"\noffload_residuals = true", "for `memory.recompute = \"full\"`"),
    ] {
        let error = load(&format!("{SMALL}[memory]\n{lines}\n"), &[]).unwrap_err().to_string();
        assert!(error.contains(reason), "{lines}: {error}");
    }
    load(
        &format!("{SMALL}[memory]\nrecompute = \"full\"\noffload_residuals = true\noffload_parameters = \"auto\"\n"),
        &[],
    )
    .unwrap();
}

#[test]
fn ranks_share_a_global_batch() {
    let shared = |global: Option<usize>, rows: usize, passes: usize, ranks: usize| {
        let mut training = TrainingConfig {
            global_batch_size: global,
            per_device_train_batch_size: rows,
            gradient_accumulation_steps: passes,
            ..TrainingConfig::default()
        };
        let result = training.share_batch(ranks).map_err(|error| error.to_string());
        result.map(|()| (training.sequences(), training.gradient_accumulation_steps))
    };
    assert_eq!(shared(None, 4, 2, 1), Ok((8, 2)));
    assert_eq!(shared(None, 4, 2, 3), Ok((24, 2)), "without it, ranks add sequences");
    assert_eq!(shared(Some(24), 4, 1, 3), Ok((24, 2)));
    assert_eq!(shared(Some(24), 4, 2, 3), Ok((24, 2)), "both may be given where they agree");
    assert!(shared(Some(24), 4, 3, 3).unwrap_err().contains("takes 2 micro-batches"));
    assert!(shared(None, 1 << 10, 1 << 8, 2).unwrap_err().contains("at most 262144 sequences"));
    assert!(shared(Some(20), 4, 1, 3).unwrap_err().contains("over 3 ranks of 4 sequences"));
    // The number of ranks may change within a run, but not the sequences of a step.
    let of = |global, rows| {
        let mut config = RunConfig::default();
        (config.training.global_batch_size, config.training.per_device_train_batch_size) = (global, rows);
        config
    };
    assert_eq!(of(Some(8), 4).check_resume(&of(Some(8), 8)).unwrap().len(), 1);
    assert_eq!(of(None, 8).check_resume(&of(Some(8), 8)).unwrap(), []);
    assert!(of(Some(16), 8).check_resume(&of(Some(8), 8)).unwrap_err().to_string().contains("global_batch_size"));
}

#[test]
fn a_resolved_configuration_is_saved_with_its_values() {
    let mut run = RunConfig::default();
    (run.memory.recompute, run.checkpoint.async_save) = (None, None);
    (run.memory.offload_optimizer, run.memory.offload_parameters) = (None, None);
    let (recompute, async_save) = (Recompute::Full, false);
    let (offload_optimizer, offload_parameters) = (0.5, 0.25);
    let resolved = ResolvedConfig { run, recompute, offload_optimizer, offload_parameters, async_save };
    let saved = resolved.to_run_config();
    assert_eq!(ResolvedConfig::fastest(&saved), ResolvedConfig { run: saved, ..resolved });
}

/// Returns the file of a run with two data sets. The second data set has further `keys`.
fn mixture(keys: &str) -> String {
    format!(
        "[model]\npath = \"m\"\n[[data.datasets]]\nname = \"a\"\ntrain_files = [\"a.txt\"]\nweight = 3\n\
         [[data.datasets]]\nname = \"b\"\ntrain_files = [\"b.jsonl\"]\nformatting = \"messages\"\n{keys}"
    )
}

#[test]
fn data_sets_are_read_and_written() {
    let config = load(&mixture("weight = 1.0\n"), &[]).unwrap();
    assert_eq!(config.weighted_shares().unwrap(), [("a", 0.75), ("b", 0.25)]);
    let written = load(&config.to_toml(), &[]).unwrap();
    assert_eq!(written, config);
    assert_eq!(RunConfig::default().weighted_shares(), None);
    // Weights may change within a run.
    let now = load(&mixture("weight = 2.0\n"), &[]).unwrap();
    assert!(!now.has_shares_of(&config) && config.has_shares_of(&written));
    assert_eq!(now.check_resume(&config).unwrap()[0].0, "data.datasets");
}

#[test]
fn mistakes_in_data_sets_are_named() {
    for (keys, expected) in [
        ("wieght = 1\n", "`wieght` is not a setting of [[data.datasets]]; did you mean `weight`?"),
        ("path = \"c\"\n", "`path` is not a setting of [[data.datasets]]; did you mean `train_files`?"),
        ("purple = 1\n", "`purple` is not a setting of [[data.datasets]], which has `name`, `train_files`,"),
        ("", "1 of 2 sets of [[data.datasets]] have a `weight`; set it for all of them, or for none"),
        ("weight = 1\nrepeat = 2\n", "have a `weight` and a `repeat`"),
        ("weight = 0\n", "`weight` of data set `b` lies outside 1e-9 to 1000000"),
        ("weight = nan\n", "`weight` of data set `b` lies outside 1e-9 to 1000000"),
        (
            "weight = 1\n[[data.datasets]]\nname = \"a\"\ntrain_files = [\"c\"]\nweight = 1\n",
            "two sets of [[data.datasets]] have the name `a`",
        ),
        (
            "weight = 1\n[[data.datasets]]\ntrain_files = [\"c\"]\nweight = 1\n",
            "set 3 of [[data.datasets]] needs a `name`",
        ),
        ("weight = 1\n[[data.datasets]]\nname = \"c\"\nweight = 1\n", "`train_files` of data set `c` is empty"),
        ("weight = 1\n[data]\ntrain_files = [\"c\"]\n", "make the files one more table of [[data.datasets]]"),
    ] {
        let error = load(&mixture(keys), &[]).unwrap_err().to_string();
        assert!(error.contains(expected), "{keys}: {error}");
    }
    let error = load(&format!("datasets = [\"a\"]\n{SMALL}"), &[]).unwrap_err().to_string();
    assert!(error.contains("tables of [[data.datasets]], each with `name`"), "{error}");
}

#[test]
fn evaluations_are_compared_by_a_metric_that_they_have() {
    let set = |settings: &[&str]| load(&mixture("weight = 1\n"), settings);
    let best = "load_best_model_at_end=true";
    set(&[best, "eval_steps=5", "metric_for_best_model=eval_b_loss"]).unwrap();
    for (settings, expected) in [
        (&[best][..], "`evaluation.load_best_model_at_end` is set and `evaluation.eval_steps` is \"end\""),
        (&[best, "eval_steps=5", "val_set_size=0"], "the run has no validation documents"),
        (
            &["early_stopping_patience=2", "eval_steps=5", "metric_for_best_model=eval_c_loss"],
            "has eval_loss, eval_bits_per_byte, eval_a_loss,",
        ),
        (&["early_stopping_patience=2", "eval_steps=5", "early_stopping_threshold=-1"], "must not be negative"),
    ] {
        let error = set(settings).unwrap_err().to_string();
        assert!(error.contains(expected), "{settings:?}: {error}");
    }
}

/// Tests values of other trainers that mean the default: they reset what the file sets.
#[test]
fn words_for_the_default_reset_what_the_file_has() {
    let file = "[model]\npath = \"m\"\n[data]\ntrain_files = [\"a.txt\"]\n[training]\nmax_steps = 8\n[optimizer]\nname = \"muon\"\n";
    let of = |setting: &str| load(file, &[setting]).unwrap();
    assert_eq!(of("max_steps=-1").training.max_steps, None);
    assert_eq!(of("use_muon=false").optimizer.algorithm, Algorithm::Adamw(Adamw::default()));
    let lion = load(&file.replace("muon", "lion"), &["use_muon=false"]).unwrap();
    assert_eq!(lion.optimizer.algorithm, Algorithm::Lion(Lion::default()));
    let with = |table: &str, setting: &str| load(&format!("{SMALL}{table}"), &[setting]);
    let recipe = |table: &str, setting: &str| with(table, setting).unwrap().precision.recipe;
    assert_eq!(recipe("[precision]\nrecipe = \"fp32\"\n", "fp32=false"), RecipeName::Bf16);
    assert_eq!(recipe("[precision]\nrecipe = \"fp8-row\"\n", "bf16=false"), RecipeName::Fp8Row);
    assert_eq!(recipe("[precision]\nrecipe = \"fp16\"\n", "fp16=false"), RecipeName::Bf16);
    for table in ["", "[precision]\nrecipe = \"bf16\"\n"] {
        let error = with(table, "bf16=false").unwrap_err().to_string();
        assert!(error.contains("--set bf16=false: `recipe = \"bf16\"` under [precision] is the default"), "{error}");
    }
    let loss = |loss: &str, setting: &str| {
        with(&format!("[preference]\nloss_type = \"{loss}\"\n"), setting).unwrap().preference.loss_type
    };
    for set in ["stage=sft", "stage=pt", "loss_type=nll"] {
        assert_eq!(loss("ipo", set), None, "{set}");
    }
    assert_eq!(loss("bradley_terry", "reward_model=false"), None);
    assert_eq!(loss("ipo", "reward_model=false"), Some(LossType::Ipo.into()));
    let cpu = load(&format!("device = \"cpu\"\n{SMALL}"), &["use_cpu=false"]).unwrap();
    assert_eq!(cpu.device, RunConfig::default().device);
}

#[test]
fn words_for_the_default_contradict_settings_of_one_file() {
    let error = |text: &str| load(&format!("{SMALL}{text}"), &[]).unwrap_err().to_string();
    let muon = error("[optimizer]\nname = \"muon\"\nuse_muon = false\n");
    assert!(
        muon.contains(
            "`use_muon = false` under [optimizer] and `name = \"muon\"` under [optimizer] contradict each other"
        ),
        "{muon}"
    );
    let stage = error("[preference]\nloss_type = \"ipo\"\nstage = \"sft\"\n");
    assert!(stage.contains("contradict each other"), "{stage}");
    assert!(error("[precision]\nbf16 = false\n").contains("`recipe = \"bf16\"` under [precision] is the default"));
    load(&format!("{SMALL}[optimizer]\nuse_muon = false\n[training]\nmax_steps = -1\n"), &[]).unwrap();
}

/// The settings of a run that version 0.1 saved.
const SAVED: &str = include_str!("../tests/data/old_settings.toml");

/// Asserts that the file `old`, changed by `settings` of a command line, loads like the file `now`.
fn says(old: &str, settings: &[&str], now: &str) {
    let loaded = load(&format!("{SMALL}{old}"), settings).unwrap();
    assert_eq!(loaded, load(&format!("{SMALL}{now}"), &[]).unwrap(), "{old} {settings:?}");
}

#[test]
fn old_spellings_say_the_same_in_files_and_on_the_command_line() {
    let lion = "[optimizer]\nname = \"lion\"\nbeta2 = 0.98\n";
    says("[optimizer]\nname = \"lion\"\n[training]\nlion_beta2 = 0.98\nadam_beta2 = 0.95\n", &[], lion);
    says("[training]\nlion_beta2 = 0.98\n", &["optimizer.name=lion"], lion);
    says("", &["lion_beta2=0.98", "optimizer.name=lion"], lion);
    says("", &["training.lion_beta2=0.98", "optimizer.name=lion"], lion);
    says("[training]\nadam_beta2 = 0.5\n", &["optimizer.name=lion", "beta2=0.98"], lion);
    says("[optimizer]\nbeta2 = 0.5\nname = \"lion\"\n", &["lion_beta2=0.98"], lion);
    says("[optimizer]\nbeta1 = 0.8\n", &["lion_beta1=0.5"], "[optimizer]\nbeta1 = 0.8\n");
    // Keys that had no effect in the old run have no effect now.
    says("[training]\nlion_beta1 = 0.5\nlr_power = 3.0\n", &[], "");
    says("[training]\nmax_steps = 0\nglobal_batch_size = 0\nwarmup_ratio = 0.0\n", &[], "");
    says("[training]\nwarmup_ratio = 0.25\nwarmup_steps = 9\n", &[], "[lr_scheduler]\nwarmup_steps = 0.25\n");
    says("", &["warmup_ratio=0.25", "warmup_steps=0"], "[lr_scheduler]\nwarmup_steps = 0.25\n");
    says("[training]\nwarmup_steps = 9\n", &["warmup_steps=3"], "[lr_scheduler]\nwarmup_steps = 3\n");
    says("", &["warmup_ratio=0.25"], "[lr_scheduler]\nwarmup_steps = 0.25\n");
    let stable = "[lr_scheduler]\ntype = \"warmup_stable_decay\"\ndecay_steps = 7\nmin_learning_rate = 1e-5\n";
    says("[training]\ndecay_steps = 7\nmin_learning_rate = 1e-5\n", &["lr_scheduler_type=wsd"], stable);
    says("[training]\neval_steps = 0\nsave_steps = 0\n", &[], "[checkpoint]\nsave_steps = \"end\"\n");
    says("", &["save_steps=0", "max_steps=0"], "[checkpoint]\nsave_steps = \"end\"\n");
    let names = "fields = {role = \"who\", content = \"says\"}\nroles = {user = [\"me\", \"you\"]}\n";
    says("fields = [\"role=who\", \"content=says\"]\nroles = [\"user=me\", \"user=you\"]\n", &[], names);
    says("", &["fields=role=who,content=says", "roles=[\"user=me\", \"user=you\"]"], names);
    says("[lora]\nrank_pattern = [\"^a=b$=8\"]\n", &[], "[lora]\nrank_pattern = {\"^a=b$\" = 8}\n");
    says("", &["alpha_pattern=q_proj=2.5"], "[lora]\nalpha_pattern = {q_proj = 2.5}\n");
    let kwargs =
        load(&format!("{SMALL}chat_template_kwargs = [\"think=false\", \"mood = calm\", \"n=\\\"5\\\"\"]\n"), &[]);
    assert_eq!(kwargs.unwrap().data.chat.chat_template_kwargs.entries(), ["think=false", "mood=calm", "n=\"5\""]);
    for (old, now) in [("O0", "float32"), ("O3", "msamp-o3"), ("coat", "coat"), ("bf16", "bfloat16")] {
        says("", &[&format!("level={old}")], &format!("[optimizer]\nstorage = \"{now}\"\n"));
    }
    let whole = load(SMALL, &["training.warmup_ratio=1"]).unwrap();
    assert_eq!([1, 7, 1000, 123_456].map(|steps| whole.schedule(steps).warmup_steps), [1, 7, 1000, 123_456]);
    let both = load(&format!("{SMALL}[training]\nlearning_rate = 1e-3\n[optimizer]\nlearning_rate = 1e-3\n"), &[]);
    let error = both.unwrap_err().to_string();
    assert!(
        error.contains("`training.learning_rate` and `optimizer.learning_rate` mean the same; keep one"),
        "{error}"
    );
}

#[test]
fn a_key_of_another_variant_is_an_error_that_names_both() {
    for (text, expected) in [
        ("[optimizer]\nmomentum = 0.9\n", "`optimizer.momentum` is for muon, and `optimizer.name` is adamw; remove it"),
        (
            "[optimizer]\nname = \"lion\"\neps = 1e-8\n",
            "`optimizer.eps` is for adamw, muon, and `optimizer.name` is lion; remove it",
        ),
        (
            "[lr_scheduler]\ntype = \"inverse_sqrt\"\nmin_learning_rate = 0.0\n",
            "is for cosine, linear, warmup_stable_decay, cosine_with_restarts, polynomial, and `lr_scheduler.type` is inverse_sqrt",
        ),
    ] {
        let error = load(&format!("{SMALL}{text}"), &[]).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let error = load(SMALL, &["optimizer.name=sgd"]).unwrap_err().to_string();
    assert!(error.contains("the optimizers are \"adamw\", \"muon\" and \"lion\""), "{error}");
}

#[test]
fn settings_that_an_earlier_version_saved_are_read() {
    let (config, _) = RunConfig::from_table(SAVED.parse().unwrap()).unwrap();
    assert_eq!(config.optimizer.algorithm, Algorithm::Lion(Lion { beta1: 0.85, beta2: 0.98 }));
    assert_eq!((config.optimizer.learning_rate, config.optimizer.weight_decay), (0.01, 0.2));
    assert_eq!(config.optimizer.storage, ottava_recipe::storage::Storage::MsampO2);
    let decay = ottava_parallel::optim::StableDecay { min_learning_rate: 1e-4, decay_steps: 3 };
    assert_eq!(config.lr_scheduler.kind, ottava_parallel::optim::SchedulerType::WarmupStableDecay(decay));
    assert_eq!(config.lr_scheduler.warmup_steps, Warmup::Share(0.25));
    assert_eq!((config.evaluation.eval_steps, config.checkpoint.save_steps), (Interval::Every(2), Interval::End));
    assert_eq!((config.training.max_steps, config.training.global_batch_size), (Some(6), Some(12)));
    assert_eq!((config.logging.logging_steps, config.logging.cast_statistics_steps), (10, 100));
    assert_eq!((config.checkpoint.save_total_limit, config.checkpoint.async_save), (0, Some(true)));
    // The written settings have no old key, and can be read back.
    let written: toml::Table = config.to_toml().parse().unwrap();
    assert_eq!(RunConfig::from_table(written).unwrap(), (config, None));
}

#[test]
fn a_file_is_rewritten_with_its_comments() {
    let old = "# A run.\n[training]\nmax_steps = 9 # nine\n# The rate.\nlearning_rate = 1e-3  # high\nlion_beta1 = 0.5\nsave_steps = 0\n\n\
               # Formats.\n[optimizer]\nlevel = \"O2\" # two\n";
    let Migrated { toml, changes } = migrate("run.toml".as_ref(), old).unwrap();
    let new = "# A run.\n[training]\nmax_steps = 9 # nine\n\n[checkpoint]\nsave_steps = \"end\"\n\n\
               # Formats.\n[optimizer]\n# The rate.\nlearning_rate = 1e-3  # high\nstorage = \"msamp-o2\" # two\n";
    assert_eq!(toml, new);
    assert_eq!(changes.len(), 4, "{changes:?}");
    assert!(changes.join(" ").contains(
        "`training.lion_beta1 = 0.5` has no effect and is left out: it is for lion, and `optimizer.name` is adamw"
    ));
    assert_eq!(migrate("run.toml".as_ref(), new).unwrap().toml, new, "nothing is old now");
    let twice = migrate("run.toml".as_ref(), "[training]\nweight_decay = 0\n[optimizer]\nweight_decay = 0.1\n");
    assert!(twice.unwrap_err().to_string().contains("mean the same"));
    // The settings of a saved run can be migrated too.
    let saved = migrate("run.toml".as_ref(), SAVED).unwrap().toml;
    let [before, after] = [SAVED, &saved].map(|text| RunConfig::from_table(text.parse().unwrap()).unwrap());
    assert_eq!((before.0, after.1), (after.0, None));
}
