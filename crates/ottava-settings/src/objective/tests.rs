use crate::ObjectiveKind;
use crate::tests::{SMALL, load};
use ottava_tensor::ops::Correction;

#[test]
fn rewards_are_tables_with_the_keys_of_their_type() {
    let run = |rewards: &str| {
        let text = format!(
            "[model]\npath = \"m\"\n[data]\ntrain_files = [\"a.jsonl\"]\n[data.records]\nformatting = \"prompts\"\n{rewards}"
        );
        load(&text, &[]).map_err(|error| error.to_string())
    };
    let table = |keys: &str| format!("[[reinforcement.rewards]]\n{keys}\n");
    let config =
        run(&[table("type = \"math\"\nweight = 2.0"), table("type = \"length\"\ntarget = 64\ndistance = 8")].concat())
            .unwrap();
    assert_eq!(config.reinforcement.rewards.len(), 2);
    assert_eq!(config.objective(), ObjectiveKind::Reinforcement);
    // Settings of a run are written and read again.
    assert_eq!(load(&config.to_toml(), &[]).unwrap(), config);
    for (keys, words) in [
        ("type = \"math\"\ntarget = 64", "`target` is not a setting of [[reinforcement.rewards]]"),
        ("type = \"length\"\ntraget = 64\ndistance = 8", "did you mean `target`?"),
        ("type = \"maths\"", "maths"),
        ("weight = 1.0", "type"),
    ] {
        let error = run(&table(keys)).unwrap_err();
        assert!(error.contains(words), "{keys}: {error}");
    }
}

#[test]
fn reinforcement_learning_refuses_what_does_not_go_together() {
    let error = |keys: &str| {
        let text = format!("{SMALL}{keys}\n[[reinforcement.rewards]]\ntype = \"math\"\n");
        load(&text, &[]).unwrap_err().to_string()
    };
    for (keys, words) in [
        ("[reinforcement]\nnum_generations = 0", "`reinforcement.num_generations` is 0"),
        ("[reinforcement.environment]\ncommand = [\"a\"]\nmax_turns = 0", "`reinforcement.environment.max_turns` is 0"),
        ("[reinforcement.endpoint]\naddress = \"localhost\"", "write an IP address and a port"),
        (
            "[reinforcement.sampling]\ndynamic_sampling = true\n[reinforcement.endpoint]\naddress = \"127.0.0.1:0\"",
            "`reinforcement.endpoint.address` and `reinforcement.sampling.dynamic_sampling` are both set",
        ),
        (
            "[reinforcement.sampling]\nmax_staleness = 2\n[reinforcement.endpoint]\naddress = \"127.0.0.1:0\"",
            "`reinforcement.endpoint.address` and `reinforcement.sampling.max_staleness` are both set",
        ),
        (
            "[reinforcement.sampling]\nmax_staleness = 2\n[reinforcement.environment]\ncommand = [\"a\"]",
            "`reinforcement.environment.command` and `reinforcement.sampling.max_staleness` are both set",
        ),
        ("[[reinforcement.rewards]]\ntype = \"environment\"", "set `reinforcement.environment.command`"),
        ("[reinforcement]\nnum_generations = 1", "compare completions of one prompt"),
        ("[reinforcement]\nnum_generations = 3", "a generation has a whole number of steps and of prompts"),
        ("[reinforcement]\nmax_completion_length = 1024", "below `data.max_length`"),
        ("[reinforcement.sampling]\nkv_cache_tokens = 1000", "`reinforcement.sampling.kv_cache_tokens` is below"),
        ("[reinforcement.sampling]\ntemperature = 0.0", "`reinforcement.sampling.temperature` must be above 0"),
        ("[reinforcement.loss]\nepsilon = 0.0", "no ratio is followed"),
        ("[reinforcement.loss]\ndelta = 1.1", "`reinforcement.loss.delta` must be above"),
        ("[reinforcement.correction]\nmax = 0.5", "`reinforcement.correction.max` at least 1"),
        ("[parallel]\npipeline = 2", "`parallel.pipeline` is 2"),
        ("[parallel]\nauto = true", "`parallel.auto` is true, and it measures steps without draws"),
        ("[preference]\nloss_type = \"ipo\"", "a run has one objective"),
    ] {
        let error = error(keys);
        assert!(error.contains(words), "{keys}: {error}");
    }
    // The reference model is the model of the start, which has to have learned something.
    let text = format!("{SMALL}[reinforcement.loss]\nbeta = 0.1\n[[reinforcement.rewards]]\ntype = \"math\"\n");
    assert!(load(&text, &[]).is_ok());
    let error = load(&text, &["model.init=random"]).unwrap_err().to_string();
    assert!(error.contains("`model.init` is \"random\""), "{error}");
}

#[test]
fn corrections_follow_the_mode_and_what_draws_differ_by() {
    let correction = |keys: &str| {
        let text = format!("{SMALL}\n[[reinforcement.rewards]]\ntype = \"math\"\n{keys}");
        load(&text, &[]).unwrap().correction()
    };
    let token = Some(Correction { of_sequence: false, is_mask: false, min: 0.0, max: 3.0 });
    for (keys, expected) in [
        ("[precision]\nrecipe = \"bf16\"", None),
        ("[precision]\nrecipe = \"fp8-row\"", token),
        ("[precision]\nrecipe = \"fp8-row\"\n[reinforcement.correction]\nmode = \"none\"", None),
        ("[precision]\nrecipe = \"bf16\"\n[reinforcement.sampling]\nkv_cache_dtype = \"fp8\"", token),
        ("[precision]\nrecipe = \"bf16\"\n[reinforcement.sampling]\nmax_staleness = 1", token),
        (
            "[precision]\nrecipe = \"bf16\"\n[reinforcement.correction]\nmode = \"sequence_mask\"\nmin = 0.5\nmax = 2",
            Some(Correction { of_sequence: true, is_mask: true, min: 0.5, max: 2.0 }),
        ),
    ] {
        assert_eq!(correction(keys), expected, "{keys}");
    }
}

#[test]
fn distillation_refuses_what_does_not_go_together() {
    let error = |keys: &str| {
        let text = format!("{SMALL}\n[distillation]\nteacher = \"t\"\n{keys}");
        load(&text, &[]).unwrap_err().to_string()
    };
    for (keys, words) in [
        ("beta = 1.5", "`distillation.beta` must be from 0"),
        ("temperature = 0.0", "`distillation.temperature` must be above 0"),
        ("lmbda = 1.5", "`distillation.lmbda` is a share of the steps"),
        ("[parallel]\ncontext = 2", "`parallel.context` is 2, and the teacher"),
        ("lmbda = 0.5\n[parallel]\nexpert = 2", "`parallel.expert` is above 1; ranks that divide experts draw"),
        ("[preference]\nloss_type = \"ipo\"", "a run has one objective"),
        ("[[reinforcement.rewards]]\ntype = \"math\"", "a run has one objective"),
        ("[sentinel]\nrepeat_steps = 2", "`sentinel.repeat_steps` is set"),
    ] {
        let error = error(keys);
        assert!(error.contains(words), "{keys}: {error}");
    }
    let packed = format!("{SMALL}packing = \"bfd\"\n[distillation]\nteacher = \"t\"\nlmbda = 0.5");
    let packed = load(&packed, &[]).unwrap_err().to_string();
    assert!(packed.contains("a drawn completion has a row of its own"), "{packed}");
    let config =
        load(&format!("{SMALL}\n[distillation]\nteacher = \"t\"\nteacher_recipe = \"fp8-row\"\n"), &[]).unwrap();
    assert_eq!(config.objective(), ObjectiveKind::Distillation);
    assert_eq!(load(&config.to_toml(), &[]).unwrap(), config);
    let unread = load(&format!("{SMALL}\n[distillation]\nbeta = 0.2\n"), &[]).unwrap().without_effect().join("\n");
    assert!(unread.contains("`distillation.beta = 0.2` has no effect without `distillation.teacher`"), "{unread}");
}

#[test]
fn stored_distributions_refuse_what_does_not_go_together() {
    let text = |keys: &str| format!("{SMALL}\n[distillation]\nlogits = \"l\"\n{keys}");
    for (keys, words) in [
        ("teacher = \"t\"", "`distillation.teacher` and `distillation.logits` are both set"),
        ("lmbda = 0.5", "`distillation.lmbda` is above 0, and `distillation.logits` has no distributions"),
        ("top_k = 0", "`distillation.top_k` is 0"),
        ("[parallel]\npipeline = 2", "`parallel.pipeline` is 2, and the teacher's distributions"),
        ("[[reinforcement.rewards]]\ntype = \"math\"", "`distillation.teacher` or `distillation.logits` is set"),
    ] {
        let error = load(&text(keys), &[]).unwrap_err().to_string();
        assert!(error.contains(words), "{keys}: {error}");
    }
    for (setting, words) in [
        ("data.packing=\"wrapped\"", "`data.packing` is \"wrapped\", and `distillation.logits` has"),
        ("data.document_mask=false", "`data.document_mask` is false, and the distributions of `distillation.logits`"),
    ] {
        let error = load(&text(""), &[setting]).unwrap_err().to_string();
        assert!(error.contains(words), "{setting}: {error}");
    }
    let config = load(&text("teacher_recipe = \"fp8-row\"\ntop_k = 8"), &[]).unwrap();
    assert_eq!((config.objective(), config.without_effect()), (ObjectiveKind::Distillation, Vec::<String>::new()));
    let running = format!("{SMALL}\n[distillation]\nteacher = \"t\"\ntop_k = 8");
    let unread = load(&running, &[]).unwrap().without_effect().join("\n");
    assert!(unread.contains("`distillation.top_k = 8` has no effect without `distillation.logits`"), "{unread}");
}

#[test]
fn losses_without_a_reference_model_leave_its_keys_unread() {
    let told = |keys: &str| load(&format!("{SMALL}\n[preference]\n{keys}"), &[]).unwrap().without_effect().join("\n");
    let text = told("loss_type = [\"simpo\", \"sft\"]\nreference_free = true\ncpo_alpha = 0.5");
    assert!(
        text.contains("`preference.reference_free = true` has no effect with loss_type cpo, simpo or orpo"),
        "{text}"
    );
    assert!(
        text.contains("`preference.cpo_alpha = 0.5` has no effect with loss_type simpo + sft; it is for cpo"),
        "{text}"
    );
    let text = told("loss_type = \"orpo\"\nprecompute_ref_log_probs = true\nlabel_smoothing = 0.1\nsimpo_gamma = 1.0");
    for key in ["precompute_ref_log_probs = true", "label_smoothing = 0.1", "simpo_gamma = 1.0"] {
        assert!(text.contains(&format!("`preference.{key}` has no effect")), "{key}: {text}");
    }
    assert_eq!(told("loss_type = \"cpo\"\nbeta = 0.2\ncpo_alpha = 0.5\nlabel_smoothing = 0.1"), "");
}

#[test]
fn objectives_of_examples_refuse_what_does_not_go_together() {
    let labels = |keys: &str| format!("{SMALL}\n[classification]\nlabel_names = [\"no\", \"yes\"]\n{keys}");
    for (keys, words) in [
        ("[embedding]\npooling = \"mean\"", "[classification] and [embedding] are both set"),
        ("[distillation]\nteacher = \"t\"", "both set"),
        ("[preference]\nloss_type = \"ipo\"", "[classification] and `preference.loss_type` are both set"),
        ("[generation]\nprompts = [\"a\"]", "writes no text"),
        ("num_labels = 3", "`classification.num_labels` is 3"),
    ] {
        let error = load(&labels(keys), &[]).unwrap_err().to_string();
        assert!(error.contains(words), "{keys}: {error}");
    }
    let config = load(&labels(""), &[]).unwrap();
    assert_eq!(config.objective(), ObjectiveKind::Classification);
    assert_eq!(load(&config.to_toml(), &[]).unwrap(), config);
    let related = load(&format!("{SMALL}\n[embedding]\npooling = \"last\"\nnegatives = 2\n"), &[]).unwrap();
    assert_eq!((related.objective(), related.embedding.texts()), (ObjectiveKind::Embedding, 4));
    assert_eq!(load(&related.to_toml(), &[]).unwrap(), related);
}
