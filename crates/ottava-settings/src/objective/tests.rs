use crate::tests::{SMALL, load};
use crate::{CorrectionConfig, CorrectionMode, ObjectiveKind};

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
        ("[reinforcement]\nnum_generations = 1", "compare completions of one prompt"),
        ("[reinforcement]\nnum_generations = 3", "a generation has a whole number of steps and of prompts"),
        ("[reinforcement]\nmax_completion_length = 1024", "below `data.max_length`"),
        ("[reinforcement]\ntemperature = 0.0", "`reinforcement.temperature` must be above 0"),
        ("[reinforcement.loss]\nepsilon = 0.0", "no ratio is followed"),
        ("[reinforcement.loss]\ndelta = 1.1", "`reinforcement.loss.delta` must be above"),
        ("[reinforcement.loss]\nbeta = 0.1", "`lora.r` is 0"),
        ("[reinforcement.correction]\nmax = 0.5", "`reinforcement.correction.max` at least 1"),
        ("[parallel]\ntensor = 2", "`parallel.tensor` is 2"),
        ("[parallel]\nzero = 3", "`parallel.zero` is 3"),
        ("[preference]\nloss_type = \"ipo\"", "a run has one objective"),
    ] {
        let error = error(keys);
        assert!(error.contains(words), "{keys}: {error}");
    }
}

#[test]
fn corrections_bound_or_mask_ratios() {
    let (old, drawn) = ([-1.0, -2.0, -0.5], [-1.0, -2.0 - 4f64.ln(), -0.5 - 0.25f64.ln()]);
    // Ratios 1, 4 and 1/4; of the completion 1.
    let factors = |mode, max| CorrectionConfig { mode, min: 0.5, max }.factors(&old, &drawn);
    let near = |found: Vec<f64>, expected: [f64; 3]| {
        // Exponentials of logarithms of numbers near 1: some units of 2⁻⁵³.
        assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-14), "{found:?}, {expected:?}");
    };
    near(factors(CorrectionMode::None, 3.0), [1.0; 3]);
    near(factors(CorrectionMode::TokenTruncate, 3.0), [1.0, 3.0, 0.25]);
    near(factors(CorrectionMode::TokenMask, 3.0), [1.0, 0.0, 0.0]);
    near(factors(CorrectionMode::TokenMask, 5.0), [1.0, 4.0, 0.0]);
    near(factors(CorrectionMode::SequenceTruncate, 3.0), [1.0; 3]);
    let apart = CorrectionConfig { mode: CorrectionMode::SequenceMask, min: 0.5, max: 3.0 }.factors(&old, &[-3.0; 3]);
    assert_eq!(apart, [0.0; 3], "the ratio of the completion is e^5.5");
}
