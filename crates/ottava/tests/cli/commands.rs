use crate::setup::{Run, json};
use serde_json::Value;

#[test]
fn a_run_leaves_configuration_metrics_events_plot_and_checkpoint() {
    let run = Run::new();
    let result = json(&run.succeed(&["train", "run.toml", "--set", "recipe=fp8-delayed", "--json"]));
    assert_eq!(result["step"], 2);
    assert!(result["eval_loss"].as_f64().unwrap() < result["initial_eval_loss"].as_f64().unwrap());
    for name in ["config.toml", "metrics.jsonl", "loss.svg", "checkpoints/checkpoint-2/manifest.json"] {
        assert!(run.path("run").join(name).is_file(), "{name}");
    }
    let resolved = std::fs::read_to_string(run.path("run/config.toml")).unwrap();
    assert!(resolved.contains("recipe = \"fp8-delayed\""), "{resolved}");
    let lines: Vec<Value> = std::fs::read_to_string(run.path("run/metrics.jsonl"))
        .unwrap()
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    let step = lines.iter().find(|l| l["step"] == 2).unwrap();
    let keys = [
        "loss",
        "learning_rate",
        "grad_norm",
        "tokens",
        "tokens_per_second",
        "peak_memory_bytes",
        "fp8_saturated",
        "fp8_underflowed",
    ];
    for key in keys {
        assert!(step[key].is_number(), "{key} in {step}");
    }
    assert!(step["peak_memory_bytes"].as_f64().unwrap() > 1e6);
    let files = std::fs::read_dir(run.path("run")).unwrap().flatten().map(|entry| entry.path());
    let events: Vec<_> = files.filter(|path| path.to_string_lossy().contains("tfevents")).collect();
    assert_eq!(events.len(), 1);
    let events = String::from_utf8_lossy(&std::fs::read(&events[0]).unwrap()).into_owned();
    for tag in keys.map(|key| format!("train/{key}")).iter().chain(&["eval/loss".into(), "eval/bits_per_byte".into()]) {
        assert!(events.contains(tag.as_str()), "TensorBoard has no {tag}");
    }
}

#[test]
fn evaluations_after_steps_in_high_precision_are_in_high_precision() {
    let run = Run::new();
    let eval_loss = |name: &str, set: &[&str]| {
        let folder = format!("output_dir={name}");
        let set = set.iter().copied().chain([folder.as_str()]).flat_map(|value| ["--set", value]);
        let args: Vec<&str> = ["train", "run.toml", "--json"].into_iter().chain(set).collect();
        json(&run.succeed(&args))["eval_loss"].as_f64().unwrap()
    };
    let expected = eval_loss("bf16", &["recipe=bf16"]);
    let fp8 = |name, steps: &str| eval_loss(name, &["recipe=fp8-current", &format!("high_precision_steps={steps}")]);
    assert_eq!(fp8("high", "1..3"), expected);
    assert_ne!(fp8("mixed", "1..2"), expected);
}

#[test]
fn eval_and_generate_read_a_checkpoint() {
    let run = Run::new();
    let checkpoint = run.checkpoint();
    let checkpoint = checkpoint.to_str().unwrap();
    let eval = |extra: &[&str]| {
        let args =
            [&["eval", checkpoint, "--data", "text.txt", "--max-length", "16", "--device", "cpu", "--json"], extra]
                .concat();
        json(&run.succeed(&args))
    };
    let full = eval(&["--recipe", "fp32"]);
    let loss = full["loss"].as_f64().unwrap();
    // The perplexity is an exponential in F64. Two libraries may round it differently by a few units of 2⁻⁵³.
    assert!((full["perplexity"].as_f64().unwrap() - loss.exp()).abs() < 1e-9 * loss.exp());
    let bytes = std::fs::metadata(run.path("text.txt")).unwrap().len() as f64;
    // The tokens are one token per byte, and the end of the text, which is not a byte.
    assert_eq!(full["tokens"].as_f64().unwrap(), bytes + 1.0);
    let bits = full["bits_per_byte"].as_f64().unwrap();
    assert!((bits - loss * (bytes + 1.0) / bytes / std::f64::consts::LN_2).abs() < 1e-9, "{full}");
    for recipe in ["bf16", "fp8-delayed", "fp8-current"] {
        let other = eval(&["--recipe", recipe])["loss"].as_f64().unwrap();
        assert!((other - loss).abs() < 0.02 && other != loss, "{recipe}: {other} against {loss}");
    }
    let set = |settings: &[&str]| eval(settings)["loss"].as_f64().unwrap();
    assert_eq!(set(&["--set", "recipe=fp8-current"]), set(&["--recipe", "fp8-current"]));
    let kept = set(&["--recipe", "fp8-current", "--set", "first_layers_bf16=1"]);
    assert_eq!(kept, set(&["--recipe", "bf16"]), "the one block stays in BF16");
    // With the stride, each token has at least 8 tokens of context. Without it, the first token of each block has no context. The model has learned
    // too little for a lower loss.
    let strided = eval(&["--recipe", "fp32", "--stride", "8"]);
    assert_eq!((&strided["tokens"], &strided["stride"], &full["stride"]), (&full["tokens"], &8.into(), &16.into()));
    assert_ne!(strided["loss"], full["loss"]);
    let args = ["eval", checkpoint, "--data", "text.txt", "--device", "cpu"];
    let refused = |more: &[&str], words: &[&str]| run.fail(&[&args[..], more].concat(), 1, words);
    refused(&["--max-length", "16", "--stride", "17"], &["a larger stride would leave tokens out"]);
    refused(&["--max-length", "1000000"], &["--max-length is 1000000, and config.json gives the model 64 positions"]);
    refused(&["--set", "max_steps=3"], &["only keys of [precision] are set here"]);
    refused(&["--set", "recipes=bf16"], &["`recipes` is not a setting; did you mean"]);
    let said = run.ottava(&[&args[..], &["--max-length", "16", "--stride", "8", "--set", "interval=2"]].concat());
    let (said, text) = (String::from_utf8(said.stderr).unwrap(), String::from_utf8(said.stdout).unwrap());
    assert!(said.contains("`precision.delayed.interval = 2` has no effect") && said.contains("tokens/s"), "{said}");
    assert!(text.contains("in windows of 16 tokens, of which the last 8 are counted; token 0 precedes"), "{text}");
    let generate = |extra: &[&str]| {
        let args = [
            &["generate", checkpoint, "--prompt", "line 4", "--device", "cpu", "--max-new-tokens", "8", "--json"],
            extra,
        ]
        .concat();
        json(&run.succeed(&args))["text"].as_str().unwrap().to_string()
    };
    assert_eq!(generate(&[]), generate(&[]));
    let warm = ["--temperature", "5", "--seed"];
    assert_eq!(generate(&[&warm[..], &["1"]].concat()), generate(&[&warm[..], &["1"]].concat()));
    assert_ne!(generate(&[&warm[..], &["1"]].concat()), generate(&[&warm[..], &["2"]].concat()));
}

#[test]
fn an_adapter_is_trained_evaluated_and_merged() {
    let run = Run::new();
    let base = run.checkpoint();
    let base = base.to_str().unwrap();
    let path = format!("model.path={base}");
    let train = ["train", "run.toml", "--set", "lora.r=2", "--set", &path, "--set", "init=pretrained"];
    let more = ["--set", "output_dir=adapter", "--set", "learning_rate=0.05", "--json"];
    run.succeed(&[&train[..], &more].concat());
    let eval = |model: &str, more: &[&str]| {
        let args = [
            "eval",
            model,
            "--data",
            "text.txt",
            "--max-length",
            "16",
            "--device",
            "cpu",
            "--recipe",
            "fp32",
            "--json",
        ];
        json(&run.succeed(&[&args[..], more].concat()))["loss"].as_f64().unwrap()
    };
    let (alone, adapted) = (eval(base, &[]), eval(base, &["--adapter", "adapter"]));
    assert!(adapted < alone, "{adapted} with the adapter and {alone} without");
    assert_eq!(json(&run.succeed(&["merge", base, "adapter", "merged", "--json"]))["merged"], 7);
    // The weights of the base model are BF16, so the merged weights are BF16 too.
    let merged = eval("merged", &[]);
    assert!((merged - adapted).abs() < 2e-3, "{merged} merged and {adapted} with the adapter");
    // A new run can start from the adapter, which names its base model.
    let further = ["train", "run.toml", "--set", "init=pretrained", "--set", "output_dir=further"];
    run.succeed(&[&further[..], &["--set", "model.path=adapter/checkpoints/checkpoint-2"]].concat());
    let saved = std::fs::read_to_string(run.path("further/config.toml")).unwrap();
    assert!(saved.contains("init_from = \"adapter/checkpoints/checkpoint-2\"") && saved.contains("r = 2"), "{saved}");
    assert!(run.path("further/checkpoints/checkpoint-2/adapter_model.safetensors").is_file());
    run.fail(&["merge", base, "adapter", "merged"], 1, &["exists already"]);
    run.fail(
        &["generate", "adapter", "--prompt", "a"],
        1,
        &["this is an adapter", "--adapter adapter", "ottava merge "],
    );
    run.fail(&["merge", base, "model", "other"], 1, &["there is no adapter_config.json"]);
    run.fail(
        &[&train[..], &["--set", "output_dir=o", "--set", "target_modules=[\"q\"]"]].concat(),
        1,
        &["`q` is no linear"],
    );
    let plan = run.succeed(&[
        "plan",
        "run.toml",
        "--details",
        "--set",
        "lora.r=2",
        "--set",
        &path,
        "--set",
        "init=pretrained",
    ]);
    assert!(plan.contains("parameters in adapters are trained") && plan.contains("the weight is frozen"), "{plan}");
}

#[test]
fn a_model_of_llama_cpp_is_converted_and_read() {
    let run = Run::new();
    run.write("a.gguf", include_bytes!("../../../ottava-convert/tests/data/llama.gguf"));
    let converted = json(&run.succeed(&["convert", "a.gguf", "new", "--json"]));
    assert_eq!((&converted["parameters"], &converted["stored"]["Q6_K"]), (&83_680.into(), &1.into()));
    run.succeed(&["generate", "new", "--prompt", "ab 12", "--max-new-tokens", "2", "--device", "cpu"]);
    // The exported model is bit-identical after it was converted back.
    let text = run.succeed(&["export", "new", "file", "--format", "gguf"]);
    assert!(text.contains("model.gguf: 83680 parameters") && text.contains("the tensors are 22 BF16, 7 F32"), "{text}");
    run.succeed(&["convert", "file/model.gguf", "again"]);
    let text = |model: &str, prompt: &str| {
        run.succeed(&[
            "generate",
            model,
            "--prompt",
            prompt,
            "--max-new-tokens",
            "8",
            "--temperature",
            "0",
            "--device",
            "cpu",
        ])
    };
    assert_eq!(text("new", "ab 12"), text("again", "ab 12"));
    assert_ne!(text("new", "ab 12"), text("new", "c"));
    let report = json(&run.succeed(&["export", "new", "blocks", "--format", "gguf", "--dtype", "q8_0", "--json"]));
    assert_eq!((&report["architecture"], &report["stored"]["Q8_0"]), (&"llama".into(), &22.into()), "{report}");
    for flags in [&["--scheme", "static"][..], &["--set", "first_layers_bf16=1"]] {
        let words = "--scheme, --activation-scales and --set are for FP8 weights";
        run.fail(&[&["export", "new", "x", "--format", "gguf"], flags].concat(), 1, &[words]);
    }
    let words = "--dtype is a choice of `--format gguf`";
    run.fail(&["export", "new", "x", "--format", "bf16", "--dtype", "q8_0"], 1, &[words]);
    run.fail(&["convert", "a.gguf", "new"], 1, &["new: this exists already; name a new folder"]);
    run.fail(&["convert", "model/tokenizer.json", "other"], 1, &["tokenizer.json: this is not a GGUF file"]);
}

#[test]
fn a_short_text_takes_no_longer_where_the_model_has_many_positions() {
    let run = Run::new();
    run.replace("model/config.json", "\"max_position_embeddings\": 64", "\"max_position_embeddings\": 1000000");
    run.checkpoint();
    run.write("short.txt", b"seven.");
    let eval = ["eval", "run", "--data", "short.txt", "--device", "cpu", "--json", "--max-length"];
    // A row of 1,000,000 tokens would take hours, so rows must not be longer than the text.
    let [long, short] =
        ["1000000", "16"].map(|seq_len| json(&run.succeed(&[&eval[..], &[seq_len]].concat()))["loss"].clone());
    assert_eq!(long, short);
}

#[test]
fn a_model_runs_in_the_precision_of_its_run() {
    let run = Run::new();
    let train = |name: &str, settings: &[&str]| {
        let output = format!("output_dir={name}");
        let settings = [&["recipe=fp8-current", &output], settings].concat();
        let settings: Vec<&str> = settings.iter().flat_map(|setting| ["--set", setting]).collect();
        run.succeed(&[&["train", "run.toml"][..], &settings].concat());
    };
    let loss = |folder: &str, extra: &[&str]| {
        let args = ["eval", folder, "--data", "text.txt", "--max-length", "16", "--device", "cpu", "--json"];
        json(&run.succeed(&[&args, extra].concat()))["loss"].as_f64().unwrap()
    };
    train("fp8", &[]);
    let fp8 = loss("fp8/checkpoints/checkpoint-2", &[]);
    assert_eq!(fp8, loss("fp8", &["--recipe", "fp8-current"]), "the run's folder stands for its newest checkpoint");
    let bf16 = loss("fp8", &["--recipe", "bf16"]);
    assert_ne!(fp8, bf16);
    train("some", &[r#"high_precision_layers=["*.mlp.*"]"#]);
    let some = ["fp8-current", "bf16"].map(|recipe| loss("some", &["--recipe", recipe]));
    assert_eq!(loss("some", &[]), some[0]);
    assert_ne!(some[0], some[1]);
    train("none", &[r#"high_precision_layers=["*"]"#]);
    let none = [&[][..], &["--recipe", "fp8-delayed"], &["--recipe", "bf16"]].map(|recipe| loss("none", recipe));
    assert_eq!(none, [none[2]; 3], "linears that the run left in BF16 stay there");
    // Without its manifest, the folder has no recipe.
    std::fs::remove_file(run.path("fp8/checkpoints/checkpoint-2/manifest.json")).unwrap();
    assert_eq!(loss("fp8/checkpoints/checkpoint-2", &[]), bf16);
    run.fail(&["eval", "fp8", "--data", "text.txt"], 7, &["there is no complete checkpoint"]);
}

#[test]
fn plan_names_every_cast_and_its_reason_and_writes_nothing() {
    let run = Run::new();
    let plan = json(&run.succeed(&["plan", "run.toml", "--set", "recipe=fp8-delayed", "--json"]));
    let linears = plan["linears"].as_array().unwrap();
    assert_eq!(linears.len(), 5);
    assert!(linears[0]["wgrad"].as_str().unwrap().contains("dy E5M2 · x E4M3"));
    assert!(linears[4]["reason"].as_str().unwrap().contains("head"));
    // Embedding and head, one block (q and o 32x32, k and v 16x32, three linears of the MLP 48x32, two norms), and one norm.
    assert_eq!(plan["parameters"], 2 * 100 * 32 + 2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32 + 2 * 32 + 32);
    let memory = &plan["memory"];
    let lines: u64 = memory["lines"].as_array().unwrap().iter().map(|line| line["bytes"].as_u64().unwrap()).sum();
    assert_eq!((memory["peak_bytes"].as_u64().unwrap(), &memory["fits"]), (lines, &true.into()));
    let some = r#"high_precision_layers=["*.mlp.*"]"#;
    let mixed = json(&run.succeed(&["plan", "run.toml", "--set", "recipe=fp8-delayed", "--set", some, "--json"]));
    let reasons: Vec<_> = mixed["linears"].as_array().unwrap().iter().map(|l| l["reason"].as_str().unwrap()).collect();
    assert!(reasons[1].starts_with("recipe fp8-delayed"), "{reasons:?}");
    assert_eq!(reasons[2..4], ["`*.mlp.*` of high_precision_layers"; 2]);
    let part = r#"high_precision_layers=["*.q_proj"]"#;
    run.fail(&["plan", "run.toml", "--set", part], 1, &["`*.q_proj` matches", "they are one product"]);
    assert!(!run.path("run").exists());
}

#[test]
fn plan_counts_communication_and_predicts_overlap() {
    let run = Run::new();
    let two = ["plan", "run.toml", "--details", "--set", "parallel.data=2", "--set", "parallel.zero=2"];
    let text = run.succeed(&two);
    for part in ["Memory of rank 0 of 2", "sent by each of 2 ranks", "calls of reduce-scatter", "--step-ms adds"] {
        assert!(text.contains(part), "no {part:?} in: {text}");
    }
    let mesh = "Mesh\n\n  data 2, context 1, tensor 1, pipeline 1, expert 1\n  data: ranks 0, 1\n";
    assert!(text.contains(mesh), "{text}");
    let fp8 = run.succeed(&[&two[..], &["--set", "recipe=fp8-delayed"]].concat());
    for operand in ["input", "weight", "grad_output"] {
        assert!(fp8.contains(&format!(" casts of {operand}: the maximum over data x context")), "{fp8}");
    }
    let expert = ["plan", "run.toml", "--set", "parallel.expert=2"];
    run.fail(&expert, 1, &["`parallel.expert` is 2", "has no experts; set it to 1"]);
    let plan = json(&run.succeed(&[&two[..], &["--step-ms", "5", "--json"]].concat()));
    let communication = &plan["communication"];
    assert_eq!((&communication["zero"], communication["units"].as_array().unwrap().len()), (&2.into(), 3));
    assert!(communication["traffic"]["all_gather"]["bytes"].as_u64().unwrap() > 0);
    let predictions = plan["predicted_overlap"]["predictions"].as_array().unwrap();
    let ranks: Vec<_> = predictions.iter().map(|prediction| prediction["ranks"].as_u64().unwrap()).collect();
    assert_eq!(ranks, (1..=12).map(|i| 1 << i).collect::<Vec<_>>());
    for prediction in predictions {
        let exposed = prediction["step"]["exposed_seconds"].as_f64().unwrap();
        assert!(exposed > 0.0 && exposed <= prediction["communication_seconds"].as_f64().unwrap());
    }
    let table = run.succeed(&[&two[..], &["--step-ms", "5"]].concat());
    assert!(table.contains("tokens/s per GPU") && table.contains("\n    4096 "), "{table}");
    let alone = run.succeed(&["plan", "run.toml", "--json"]);
    assert!(json(&alone)["communication"].is_null() && json(&alone)["predicted_overlap"].is_null());
    run.fail(&[&two[..], &["--step-ms", "0"]].concat(), 1, &["--step-ms is 0"]);
}

#[test]
fn plan_lists_the_actions_of_a_step_and_of_an_evaluation() {
    let run = Run::new();
    let command = ["plan", "run.toml", "--program", "--set", "gradient_accumulation_steps=2"];
    let text = run.succeed(&command);
    let step = "Program of a step

  forward of stage 0, micro-batch 0
  loss of micro-batch 0
  backward of stage 0, micro-batch 0
  store the losses of micro-batch 0
  forward of stage 0, micro-batch 1
  loss of micro-batch 1
  backward of stage 0, micro-batch 1
  store the losses of micro-batch 1
  norm of the gradients
  update scales and weights, and cast the weights

Program of the evaluation of a batch

  forward of stage 0, micro-batch 0
  loss of micro-batch 0
";
    assert!(text.ends_with(step), "{text}");
    let divided = ["--set", "parallel.data=2", "--set", "parallel.zero=2", "--json"];
    let program = json(&run.succeed(&[&command[..], &divided].concat()))["program"][0].take();
    let reduces: Vec<_> = program["step"].as_array().unwrap().iter().filter_map(|a| a["reduces"].as_bool()).collect();
    assert_eq!(reduces, [true, true], "each backward of stage 2 reduces its gradients");
    assert_eq!(program["step"][8]["action"], "reduce");
    assert_eq!(program["evaluation"].as_array().unwrap().len(), 2);
    assert!(json(&run.succeed(&["plan", "run.toml", "--json"]))["program"].is_null());
}

#[test]
fn plan_says_what_runs_on_a_gpu_that_is_not_here() {
    let run = Run::new();
    let hopper = run.succeed(&["plan", "run.toml", "--details", "--gpu", "H100"]);
    for part in
        ["NVIDIA H100, Hopper, compute capability 9.0, tested", "features: ", "wgmma", "per-row", "kernels that run: "]
    {
        assert!(hopper.contains(part), "no {part:?} in: {hopper}");
    }
    assert!(!hopper.contains("do not run"), "{hopper}");
    assert_eq!(json(&run.succeed(&["plan", "run.toml", "--gpu", "H100", "--json"]))["gpu"]["architecture"], "Hopper");
    let ada = run.succeed(&["plan", "run.toml", "--details", "--gpu", "L40S"]);
    assert!(ada.contains("compute capability 8.9, not tested") && ada.contains("do not run: skinny"), "{ada}");
    let bf16 = run.succeed(&["plan", "run.toml", "--details", "--gpu", "A100", "--set", "recipe=bf16"]);
    assert!(bf16.contains("compute capability 8.0, not tested") && bf16.contains("do not run: skinny"), "{bf16}");
    // The kernels that run on the GPU are shown even if the run cannot run.
    let ampere = ["plan", "run.toml", "--details", "--gpu", "A100", "--set", "recipe=fp8-delayed"];
    run.fail(&ampere, 1, &["A100"]);
    let shown = String::from_utf8_lossy(&run.ottava(&ampere).stdout).into_owned();
    assert!(shown.contains("compute capability 8.0, not tested"), "{shown}");
    run.fail(&["plan", "run.toml", "--gpu", "V100"], 1, &["there is no GPU `V100`", "known are A100, B200"]);
}

#[test]
fn a_plan_begins_with_its_verdict_and_checks_what_train_checks() {
    let run = Run::new();
    let plan = run.succeed(&["plan", "run.toml", "--gpu", "H100", "--recipe", "fp8-delayed"]);
    let lines: Vec<&str> = plan.lines().collect();
    let names = ["fits: ", "steps: ", "tokens: ", "time: ", "checkpoint: ", "precision: ", "data: "];
    assert_eq!(lines.len(), names.len(), "{plan}");
    assert!(lines.iter().zip(names).all(|(line, name)| line.starts_with(name)), "{plan}");
    assert!(lines[0].contains("yes: ") && lines[1].contains("2 (`training.max_steps`)"), "{plan}");
    assert!(lines[5].contains("fp8-delayed, 4 of 4 linears in FP8") && lines[6].contains("30 documents"), "{plan}");
    let of_four_bits = run.succeed(&["plan", "run.toml", "--gpu", "H100", "--recipe", "nvfp4"]);
    assert!(of_four_bits.contains("nvfp4, 4 of 4 linears in FP4"), "{of_four_bits}");
    // The steps of epochs are counted, as in the run.
    run.replace("run.toml", "max_steps = 2\n", "num_train_epochs = 2.0\n");
    let verdict = json(&run.succeed(&["plan", "run.toml", "--json"]))["verdict"].clone();
    let trained = json(&run.succeed(&["train", "run.toml", "--json"]));
    assert_eq!(verdict["steps"], trained["step"]);
    let saved = std::fs::metadata(run.path(trained["checkpoint"].as_str().unwrap()).join("model.safetensors")).unwrap();
    assert!(verdict["checkpoint_bytes"].as_u64().unwrap() > saved.len(), "{verdict}");
    run.write("empty.txt", b"");
    run.fail(&["plan", "run.toml", "--set", "train_files=[\"empty.txt\"]"], 2, &["empty.txt"]);
    std::fs::remove_file(run.path("model/tokenizer.json")).unwrap();
    run.fail(&["plan", "run.toml"], 1, &["model/tokenizer.json"]);
    run.succeed(&["plan", "run.toml", "--set", "model.path=model/config.json"]);
}

#[test]
fn plan_needs_no_gpu_and_refuses_what_does_not_fit_one() {
    let run = Run::new();
    run.replace("model/config.json", "\"max_position_embeddings\": 64", "\"max_position_embeddings\": 1048576");
    let plan = run.succeed(&["plan", "run.toml", "--details", "--gpu-memory", "80", "--set", "recompute=auto"]);
    for part in ["attention: cuDNN", "at the peak, in ", "recompute = \"none\"", "recompute = \"auto\" is \"none\""] {
        assert!(plan.contains(part), "no {part:?} in: {plan}");
    }
    let long = ["plan", "run.toml", "--gpu-memory", "1.125", "--set", "recompute=auto", "--set", "max_length=65536"];
    run.fail(&long, 3, &["the run does not fit", "per_device_train_batch_size = 1,"]);
    run.succeed(&["train", "run.toml", "--set", "recompute=auto"]);
    let saved = std::fs::read_to_string(run.path("run/config.toml")).unwrap();
    assert!(saved.contains("recompute = \"none\""), "what was chosen is what is saved: {saved}");
    run.succeed(&["train", "run.toml", "--resume", "--set", "recompute=full", "--set", "max_steps=3"]);
}

#[test]
fn prepare_counts_and_train_reuses() {
    let run = Run::new();
    let counts = json(&run.succeed(&["prepare", "run.toml", "--json"]));
    assert_eq!(counts["documents"], 30);
    let output = run.ottava(&["train", "run.toml"]);
    assert!(!String::from_utf8_lossy(&output.stderr).contains("tokenizing"), "prepared tokens are used");
}

/// A teacher is scored once, a plan and a run read its distributions, and the teacher's folder may be gone.
#[test]
fn logits_are_stored_once_and_trained_on() {
    let run = Run::new();
    run.succeed(&["train", "run.toml", "--set", "output_dir=teacher"]);
    let teacher = "teacher/checkpoints/checkpoint-2";
    let text = std::fs::read_to_string(run.path("run.toml")).unwrap();
    run.fail(&["logits", "run.toml", "--teacher", teacher], 1, &["run.toml: `distillation.logits` is not set"]);
    run.write("student.toml", format!("{text}[distillation]\nlogits = \"logits\"\ntop_k = 8\n").as_bytes());
    run.fail(
        &["train", "student.toml"],
        1,
        &["`distillation.logits` (logits): there is no index.json", "ottava logits"],
    );
    run.fail(&["logits", "student.toml", "--teacher", "missing"], 1, &["missing"]);
    let logits = ["logits", "student.toml", "--teacher", teacher];
    let stored = json(&run.succeed(&[&logits[..], &["--json"]].concat()));
    assert_eq!((&stored["documents"], stored["tokens"].as_u64() > Some(100)), (&28.into(), true), "{stored}");
    std::fs::remove_dir_all(run.path("teacher")).unwrap();
    run.succeed(&["plan", "student.toml"]);
    run.succeed(&["train", "student.toml"]);
    run.succeed(&["train", "student.toml", "--resume", "--set", "max_steps=3"]);
}

#[test]
fn doctor_always_answers() {
    let run = Run::new();
    let report = json(&run.succeed(&["doctor", "--json"]));
    let names: Vec<_> = report["libraries"].as_array().unwrap().iter().map(|l| l["name"].as_str().unwrap()).collect();
    for name in ["CUDA driver", "NVRTC", "cuBLASLt", "cuDNN", "NCCL", "NVML"] {
        assert!(names.contains(&name), "{name} in {names:?}");
    }
}

#[cfg(unix)]
#[test]
fn a_signal_saves_and_a_resumed_run_ends() {
    use std::process::{Command, Stdio};
    let run = Run::new();
    run.replace("run.toml", "max_steps = 2", "max_steps = 100000");
    let mut child = run.command(&["train", "run.toml"]).stderr(Stdio::piped()).spawn().unwrap();
    run.wait_for_steps(&mut child, 4);
    let kill = Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    assert!(kill.success());
    assert_eq!(child.wait().unwrap().code(), Some(75));
    let saved = std::fs::read_dir(run.path("run/checkpoints")).unwrap().count();
    assert_eq!(saved, 1);
    let name = std::fs::read_dir(run.path("run/checkpoints")).unwrap().next().unwrap().unwrap().file_name();
    let step: u64 = name.to_str().unwrap().trim_start_matches("checkpoint-").parse().unwrap();
    run.succeed(&["train", "run.toml", "--resume", "--set", &format!("max_steps={}", step + 1)]);
    assert!(run.path(&format!("run/checkpoints/checkpoint-{}", step + 1)).is_dir());
}
