use super::*;

/// The parts of a file with one tensor, in the order of the format. Tests change single parts.
struct Parts {
    version: u32,
    tensors: u64,
    entries: u64,
    /// The keys and values.
    metadata: Vec<u8>,
    axes: Vec<u64>,
    kind: u32,
    offset: u64,
}

const GOOD: Parts =
    Parts { version: 3, tensors: 1, entries: 1, metadata: Vec::new(), axes: Vec::new(), kind: 0, offset: 0 };

/// Opens a file with one tensor and these keys.
pub fn with_keys(keys: &[(&str, Value)]) -> Gguf {
    let entries = keys.iter().map(|(key, value)| match value {
        Value::Integer(n) => entry(key, kinds::U32, &(*n as u32).to_le_bytes()),
        Value::Float(n) => entry(key, kinds::F32, &(*n as f32).to_le_bytes()),
        Value::Bool(flag) => entry(key, kinds::BOOL, &[u8::from(*flag)]),
        Value::Text(words) => entry(key, kinds::TEXT, &text(words)),
        other => panic!("{other:?} is not written"),
    });
    Parts { entries: keys.len() as u64, ..Parts::with(entries.flatten().collect()) }.open().unwrap()
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

/// Returns the bytes of a key, the number of a type, and a value.
fn entry(key: &str, kind: u32, value: &[u8]) -> Vec<u8> {
    [&text(key)[..], &kind.to_le_bytes(), value].concat()
}

impl Parts {
    fn with(metadata: Vec<u8>) -> Parts {
        Parts { metadata, axes: vec![4, 2], ..GOOD }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(self.tensors.to_le_bytes());
        bytes.extend(self.entries.to_le_bytes());
        bytes.extend(&self.metadata);
        bytes.extend(text("a"));
        bytes.extend((self.axes.len() as u32).to_le_bytes());
        bytes.extend(self.axes.iter().flat_map(|n| n.to_le_bytes()));
        bytes.extend(self.kind.to_le_bytes());
        bytes.extend(self.offset.to_le_bytes());
        bytes.resize(bytes.len().next_multiple_of(ALIGNMENT as usize), 0);
        bytes.extend((0..8).flat_map(|i| (i as f32).to_le_bytes()));
        bytes
    }

    fn open(&self) -> Result<Gguf> {
        open(&self.bytes())
    }
}

fn open(bytes: &[u8]) -> Result<Gguf> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.gguf");
    std::fs::write(&path, bytes).unwrap();
    Gguf::open(&path)
}

#[test]
fn metadata_of_every_type_are_read() {
    let list = |kind: u32, count: u64, bytes: &[u8]| [&kind.to_le_bytes()[..], &count.to_le_bytes(), bytes].concat();
    let long: Vec<u8> = (0..3_u32).flat_map(u32::to_le_bytes).collect();
    let entries = [
        ("u8", 0, vec![200], Value::Integer(200)),
        ("i8", 1, vec![200], Value::Integer(-56)),
        ("u16", 2, vec![1, 255], Value::Integer(65281)),
        ("i16", 3, vec![1, 255], Value::Integer(-255)),
        ("u32", 4, u32::MAX.to_le_bytes().into(), Value::Integer(u32::MAX.into())),
        ("i32", 5, (-7_i32).to_le_bytes().into(), Value::Integer(-7)),
        ("f32", 6, 1e-5_f32.to_le_bytes().into(), Value::Float(1e-5)),
        ("bool", 7, vec![1], Value::Bool(true)),
        ("text", 8, text("é"), Value::Text("é".into())),
        ("u64", 10, u64::MAX.to_le_bytes().into(), Value::Integer(u64::MAX.into())),
        ("i64", 11, i64::MIN.to_le_bytes().into(), Value::Integer(i64::MIN.into())),
        ("f64", 12, 0.1_f64.to_le_bytes().into(), Value::Float(0.1)),
        ("texts", 9, list(8, 2, &[text("a"), text("")].concat()), Value::Texts(vec!["a".into(), "".into()])),
        ("numbers", 9, list(4, 3, &long), Value::Integers(vec![0, 1, 2])),
        ("nested", 9, list(9, 1, &list(0, 2, &[1, 2])), Value::Other),
    ];
    let metadata = entries.iter().flat_map(|(key, kind, bytes, _)| entry(key, *kind, bytes)).collect();
    let gguf = Parts { entries: entries.len() as u64, ..Parts::with(metadata) }.open().unwrap();
    for (key, _, _, expected) in entries {
        assert_eq!(gguf.value(key), Some(&expected), "{key}");
    }
    let tensor = &gguf.tensors()["a"];
    assert_eq!((&tensor.shape[..], tensor.kind.name), (&[2, 4][..], "F32"));
    assert_eq!(gguf.values(tensor).unwrap(), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
    assert_eq!(gguf.count("u32").unwrap(), Some(u32::MAX as usize));
    assert!(gguf.count("i32").unwrap_err().to_string().contains("`i32` is not a number from 0 up"));
}

#[test]
fn a_file_that_promises_more_than_it_has_is_an_error() {
    let key = || entry("k", 0, &[1]);
    let long_text = entry("k", 8, &u64::MAX.to_le_bytes());
    let list = |kind: u32| entry("k", 9, &[&kind.to_le_bytes()[..], &u64::MAX.to_le_bytes()].concat());
    let deep = entry("k", 9, &[&9_u32.to_le_bytes()[..], &1_u64.to_le_bytes()].concat().repeat(50));
    for (parts, words) in [
        (Parts { tensors: u64::MAX, ..Parts::with(key()) }, "incomplete or damaged"),
        (Parts { entries: u64::MAX, ..Parts::with(key()) }, "bytes are to follow"),
        (Parts::with(long_text), "18446744073709551615 bytes are to follow byte 45"),
        (Parts::with(list(8)), "bytes are to follow"),
        (Parts::with(list(4)), "bytes are to follow"),
        (Parts::with(list(7)), "bytes are to follow"),
        (Parts::with(list(9)), "bytes are to follow"),
        (Parts::with(deep), "more than 4 arrays within one another"),
        (Parts::with(entry("k", 77, &[])), "there is no type 77"),
        (Parts { entries: 2, ..Parts::with([key(), key()].concat()) }, "two values of \"k\""),
        (Parts::with(entry("general.alignment", 4, &[0; 4])), "`general.alignment` is Integer(0)"),
        (Parts { axes: vec![4, 3], ..Parts::with(key()) }, "beyond the end of the file"),
        (Parts { offset: u64::MAX, ..Parts::with(key()) }, "beyond the end of the file"),
        (Parts { offset: 32, ..Parts::with(key()) }, "beyond the end of the file"),
        (Parts { axes: vec![1 << 40, 1 << 40], ..Parts::with(key()) }, "more than fits a file"),
        (Parts { axes: vec![1 << 62], ..Parts::with(key()) }, "more than fits a file"),
        (Parts { axes: vec![1; 5], ..Parts::with(key()) }, "has 5 axes"),
        (Parts { kind: 2, ..Parts::with(key()) }, "has rows of 4, which is not a multiple of the 32 of a Q4_0"),
        (Parts { kind: 10, ..Parts::with(key()) }, "has the type Q2_K, which is not read; F32, F16, BF16"),
        (Parts { version: 1, ..Parts::with(key()) }, "version 1 is not read"),
        (Parts { version: 3_u32.swap_bytes(), ..Parts::with(key()) }, "big endian"),
    ] {
        let error = parts.open().unwrap_err().to_string();
        assert!(error.contains(words), "{error:?} lacks {words:?}");
    }
    let good = Parts::with(key()).bytes();
    assert!(open(&good).is_ok());
    (0..good.len()).for_each(|length| assert!(open(&good[..length]).is_err(), "{length} bytes are not enough"));
    assert!(open(b"PK\x03\x04 and so on").unwrap_err().to_string().contains("this is not a GGUF file"));
}
