use crate::setup::{Run, json};

/// The arguments for the text to calibrate and evaluate on.
const TEXT: [&str; 6] = ["--data", "text.txt", "--max-length", "16", "--device", "cpu"];

#[test]
fn exported_folders_are_evaluated_and_generate() {
    let run = Run::new();
    let checkpoint = run.checkpoint();
    let checkpoint = checkpoint.to_str().unwrap();
    let loss = |folder: &str| {
        json(&run.succeed(&[&["eval", folder, "--recipe", "fp32", "--json"], &TEXT[..]].concat()))["loss"]
            .as_f64()
            .unwrap()
    };
    let text = run.succeed(&["export", checkpoint, "rows", "--format", "compressed-tensors"]);
    for words in [
        "rows: 14176 parameters",
        "4 linears in FP8, cast from the weights, since the source is not an FP8 run: relative error up to 2.",
        "in BF16: lm_head: the head is never cast",
        "tensor parallelism: at most 1 ranks",
        "read back: each weight is the nearest value",
    ] {
        assert!(text.contains(words), "{text} lacks {words:?}");
    }
    let report = json(&run.succeed(&["export", "run", "again", "--format", "compressed-tensors", "--json"]));
    assert_eq!(report["linears"].as_array().unwrap().len(), 4);
    let error = report["linears"][0]["relative_error"].as_f64().unwrap();
    assert!((0.02..0.03).contains(&error) && report["left"][0]["name"] == "lm_head", "{report}");
    // A cast to E4M3 changes the weights of a linear by 2 % to 3 % of their norm (above). The model has trained for only two steps, so its logits are
    // small and the loss changes by only 5e-6.
    assert!((loss("rows") / loss(checkpoint) - 1.0).abs() < 0.01);
    assert_ne!(loss("rows"), loss(checkpoint));
    run.succeed(&["generate", "rows", "--prompt", "line", "--max-new-tokens", "4", "--device", "cpu"]);
    // The MLP has no whole blocks of 32.
    for (format, linears) in [("nvfp4", 4), ("mxfp4", 1)] {
        let text = run.succeed(&["export", checkpoint, format, "--format", format]);
        assert!(
            text.contains(&format!("{linears} linears in FP4, cast from the weights"))
                && text.contains("14176 parameters"),
            "{text}"
        );
        assert!((loss(format) / loss(checkpoint) - 1.0).abs() < 0.01 && loss(format) != loss("rows"));
    }
    run.succeed(&["export", "rows", "plain", "--format", "bf16"]);
    assert!(run.succeed(&["eval", "plain", "--data", "text.txt", "--device", "cpu"]).contains("loss"));

    run.fail(&["export", "run", "rows"], 1, &["rows: this exists already; name a new folder"]);
    run.fail(
        &["export", "run", "blocks", "--format", "fp8-block"],
        1,
        &["q_proj has 32 outputs, no multiple of 128", "--format compressed-tensors"],
    );
    run.fail(&["export", "run", "x", "--scheme", "static", "--format", "bf16"], 1, &["--scheme is a choice of"]);
    run.fail(&["export", checkpoint, "run/checkpoints/checkpoint-2/x"], 1, &["this is inside the model folder run/"]);
    // Widths of 32 are not whole blocks, like SmolLM2's widths of 576.
    let output = run.ottava(&["export", "run", "default"]);
    let (text, notes) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let words = "format: compressed-tensors --scheme dynamic, since model.layers.0.self_attn.q_proj has 32 inputs, no multiple of 128";
    assert!(output.status.success() && notes.contains(words), "{notes}");
    assert!(text.contains("4 linears in FP8"), "{text}");
    let report = json(&run.succeed(&["export", "run", "default-2", "--json"]));
    assert_eq!((&report["layout"], &report["scheme"]), (&"compressed-tensors".into(), &"dynamic".into()), "{report}");
    run.fail(
        &["export", "run", "x", "--format", "modelopt"],
        1,
        &["there is no scale for the input of `model.layers.0."],
    );
    assert!(!run.path("x").exists() && !run.path("blocks").exists());
}

#[test]
fn calibrated_scales_are_exported_and_compared() {
    let run = Run::new();
    run.checkpoint();
    let calibrate = [&["calibrate", "run", "scales.json", "--method", "mse"], &TEXT[..]].concat();
    assert!(run.succeed(&calibrate).contains("scales.json: scales of the inputs of 7 linears, from "));
    let few = [&calibrate[..], &["--samples", "2", "--batch-size", "2", "--json"]].concat();
    assert_eq!(json(&run.succeed(&few))["tokens"], 32);
    run.succeed(&calibrate);
    let export = |folder: &'static str, scales: &[&str]| {
        let args = ["export", "run", folder, "--format", "compressed-tensors", "--scheme", "static"];
        run.succeed(&[&args[..], scales].concat());
    };
    export("static", &["--activation-scales", "scales.json"]);
    let compare = |folder: &str, more: &[&str]| {
        json(&run.succeed(&[&["eval", folder, "--compare", "--json"], &TEXT[..], more].concat()))["compare"].clone()
    };
    let from_file = compare("run", &["--activation-scales", "scales.json"]);
    // The folder stores the same scales.
    let from_folder = compare("static", &[]);
    for results in [&from_file, &from_folder] {
        let names: Vec<_> =
            results.as_array().unwrap().iter().map(|result| result["precision"].as_str().unwrap()).collect();
        assert_eq!(names, ["bf16", "fp8 dynamic", "fp8 static"]);
        let losses = [0, 1, 2].map(|i| results[i]["loss"].as_f64().unwrap());
        assert!(losses.iter().all(|loss| (loss / losses[0] - 1.0).abs() < 0.01), "{results}");
        assert!(losses[0] != losses[1] && losses[1] != losses[2], "{results}");
    }
    // In both cases, products read the same codes of weights and inputs.
    assert_eq!(from_file[2]["loss"], from_folder[2]["loss"]);
    assert_eq!(compare("run", &[]).as_array().unwrap().len(), 2, "the run has no scales");
    // The linears that stay in BF16 are also the same in both cases.
    let first = ["--set", "high_precision_layers=[\"*.o_proj\", \"*.down_proj\"]"];
    export("first", &[&["--activation-scales", "scales.json"], &first[..]].concat());
    let [from_file, folder] =
        [compare("run", &[&["--activation-scales", "scales.json"], &first[..]].concat()), compare("first", &[])];
    assert_eq!(from_file[2]["loss"], folder[2]["loss"]);
    assert_ne!(from_file[2]["loss"], from_folder[2]["loss"]);
    // If scales are given, the default format stores them.
    assert_eq!(
        json(&run.succeed(&["export", "run", "y", "--activation-scales", "scales.json", "--json"]))["scheme"],
        "static"
    );
    run.succeed(&["train", "run.toml", "--set", "output_dir=other", "--set", "seed=7"]);
    for args in [&["export", "other", "x"][..], &["eval", "other", "--compare", "--data", "text.txt"]] {
        let args = [args, &["--activation-scales", "scales.json"]].concat();
        run.fail(&args, 1, &["the scales of inputs were measured on another model, whose weights are not these"]);
    }
    run.fail(
        &["export", "run", "x", "--format", "compressed-tensors", "--activation-scales", "scales.json"],
        1,
        &["--activation-scales are of `--scheme static`"],
    );
}
