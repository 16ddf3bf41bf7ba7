use super::*;

const LENGTHS: RopeLengths = RopeLengths { max_positions: 8192, seq_len: 8192 };

fn read(json: Value) -> RopeScaling {
    let Value::Object(values) = json else { panic!("an object") };
    // The table contains the defaults of Phi-3, which rotates a part of each head.
    let defaults = Map::from_iter([(PARTIAL.to_string(), json!(1.0)), ("max_position_embeddings".into(), json!(2048))]);
    RopeScaling::read(&ConfigFile::from_values("config.json", values).with_defaults(defaults)).unwrap()
}

#[test]
fn both_spellings_mean_the_same_and_survive_writing() {
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048,
        "attention_factor": 1.25, "beta_fast": 16.0});
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192});
    let longrope = json!({"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0],
        "original_max_position_embeddings": 64, "factor": 4.0, "partial_rotary_factor": 0.5});
    for scaling in [llama3, yarn, longrope, json!({"rope_type": "dynamic", "factor": 2.0})] {
        let mut parameters = scaling.clone();
        parameters["rope_theta"] = json!(500000.0);
        let old = read(json!({"rope_theta": 500000.0, "rope_scaling": scaling}));
        let new = read(json!({"rope_parameters": parameters}));
        assert_eq!(old, new);
        let mut written = Map::new();
        old.write(None, &mut written);
        assert_eq!(read(Value::Object(written)), old);
    }
}

#[test]
fn llama3_stretches_long_wavelengths_only() {
    let kind =
        RopeKind::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_positions: 8192.0 };
    let plain = RopeScaling::plain(500_000.0).inverse_frequencies(128, LENGTHS);
    let stretched = RopeScaling { kind, ..RopeScaling::plain(500_000.0) }.inverse_frequencies(128, LENGTHS);
    assert_eq!((plain[0], plain[1]), (stretched[0], stretched[1]));
    // Two quotients and a product in F64 are exact to a few units of 2⁻⁵³.
    assert!((stretched[63] * 8.0 / plain[63] - 1.0).abs() < 1e-12);
    let ramp = plain.iter().zip(&stretched).filter(|(p, s)| s < p && **s * 8.0 > **p * 1.000_001).count();
    assert!(ramp > 0, "some wavelengths lie on the ramp");
}

/// Compares "dynamic" and "longrope" on both sides of their thresholds.
#[test]
fn the_length_of_sequences_decides_once() {
    let of = |kind: RopeKind, seq_len| {
        let rope = RopeScaling { kind, ..RopeScaling::default() };
        rope.inverse_frequencies(8, RopeLengths { max_positions: 64, seq_len })
    };
    let plain = of(RopeKind::Default, 64);
    let dynamic = |seq_len| of(RopeKind::Dynamic { factor: 2.0 }, seq_len);
    assert_eq!(dynamic(64), plain);
    // theta · (2 · 2 − 1)^(8 / 6)
    let theta = 10_000.0 * 3f64.powf(8.0 / 6.0);
    let expected = (0..4).map(|i| theta.powf(-2.0 * f64::from(i) / 8.0));
    assert!(dynamic(128).iter().zip(expected).all(|(seen, expected)| (seen / expected - 1.0).abs() < 1e-12));

    let long = LongRope {
        short: vec![1.0; 4],
        long: vec![2.0, 4.0, 8.0, 16.0],
        original_max_positions: 32.0,
        factor: 2.0,
        attention_factor: None,
    };
    assert_eq!(of(RopeKind::LongRope(long.clone()), 32), plain);
    let halved: Vec<f64> = plain.iter().zip([2.0, 4.0, 8.0, 16.0]).map(|(f, factor)| f / factor).collect();
    assert_eq!(of(RopeKind::LongRope(long.clone()), 33), halved);
    let rope = RopeScaling { kind: RopeKind::LongRope(long), ..RopeScaling::default() };
    // sqrt(1 + ln 2 / ln 32)
    assert!((rope.attention_factor() - 1.2f64.sqrt()).abs() < 1e-12);
}

#[test]
fn constants_that_no_angle_can_have_are_errors() {
    let check = |json| read(json).kind.check(4).unwrap_err();
    let long = |short: Value| {
        json!({"rope_scaling": {"type": "longrope", "short_factor": short, "long_factor": [1.0, 2.0],
            "original_max_position_embeddings": 64}, "max_position_embeddings": 128})
    };
    assert!(check(long(json!([1.0]))).contains("`short_factor` has 1 factors"));
    assert!(check(long(json!([1.0, 0.0]))).contains("`short_factor` is 0"));
    let yarn = json!({"rope_scaling": {"type": "yarn", "factor": 0.0, "original_max_position_embeddings": 64}});
    assert!(check(yarn).contains("`factor` is 0"));
}
