use super::*;
use serde_json::Value;

/// `tests/data/README.md` describes the source of the numbers.
#[test]
fn blocks_are_those_of_the_gguf_package() {
    let recorded: Value = serde_json::from_str(include_str!("../../../tests/data/gguf_q8_0.json")).unwrap();
    let values: Vec<f32> = serde_json::from_value(recorded["values"].clone()).unwrap();
    let bytes: Vec<u8> = serde_json::from_value(recorded["bytes"].clone()).unwrap();
    assert_eq!(GgufType::Q8_0.encode("w", &values).unwrap(), bytes);
}

#[test]
fn types_follow_shapes_and_values_have_to_fit() {
    let of = |kind: GgufType, shape: &[usize]| kind.of(shape).name();
    assert_eq!((of(GgufType::Q8_0, &[3, 64]), of(GgufType::Q8_0, &[64, 48])), ("Q8_0", "F16"));
    assert_eq!((of(GgufType::Q8_0, &[64]), of(GgufType::Bfloat16, &[3, 5])), ("F32", "BF16"));
    let mut values = [0.0; 64];
    for (kind, bad, words) in [
        (GgufType::Float32, f32::NAN, "`w`: element 40 is not finite"),
        (GgufType::Bfloat16, f32::MAX, "`w`: element 40 is too large for BF16"),
        (GgufType::Float16, 65_520.0, "`w`: element 40 is too large for F16"),
        // The scale of a block is F16, and would be infinite.
        (GgufType::Q8_0, 127.0 * 65_520.0, "`w`: element 32 is too large for Q8_0"),
    ] {
        values[40] = 65_504.0;
        assert!(kind.encode("w", &values).is_ok());
        values[40] = bad;
        let error = kind.encode("w", &values).unwrap_err().to_string();
        assert!(error.contains(words), "{error} lacks {words:?}");
    }
}
