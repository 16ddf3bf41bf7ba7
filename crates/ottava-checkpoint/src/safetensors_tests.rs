use std::path::Path;

use ottava_tensor::DType;

use super::*;
use crate::{Carried, CheckpointWriter, write_model, write_tensors};
use ottava_common::fs::RealFs;

fn info(name: &str, dtype: DType, shape: &[usize]) -> TensorInfo {
    TensorInfo { name: name.into(), dtype, shape: shape.to_vec() }
}

/// Returns one tensor of each type, with odd sizes, a scalar and an empty tensor.
fn tensors() -> Vec<TensorInfo> {
    vec![
        info("e4m3", DType::E4M3, &[3, 5]),
        info("bf16", DType::BF16, &[7]),
        info("f32", DType::F32, &[2, 1, 3]),
        info("e5m2", DType::E5M2, &[1]),
        info("f64", DType::F64, &[]),
        info("i32", DType::I32, &[0, 4]),
        info("f16 \"quoted\"", DType::F16, &[2]),
    ]
}

fn content(tensor: &TensorInfo) -> Vec<u8> {
    (0..tensor.bytes()).map(|i| (i * 7 + tensor.name.len()) as u8).collect()
}

/// Saves the tensors in files of at most this size, and returns their folder.
fn saved(folder: &Path, max_file_bytes: usize) -> std::path::PathBuf {
    let mut writer = CheckpointWriter::begin(&RealFs, folder, 1).unwrap();
    write_model(&mut writer, &tensors(), &Carried::default(), max_file_bytes, |tensor| Ok(content(tensor))).unwrap();
    writer.finish(serde_json::Value::Null).unwrap()
}

#[test]
fn what_is_written_reads_back() {
    for (max_file_bytes, files) in [(usize::MAX, 1), (30, 3), (1, 6)] {
        let folder = tempfile::tempdir().unwrap();
        let path = saved(folder.path(), max_file_bytes);
        let model = ModelFiles::open(&path).unwrap();
        assert_eq!(model.files.len(), files);
        let mut names: Vec<_> = tensors().into_iter().map(|tensor| tensor.name).collect();
        names.sort();
        assert_eq!(model.names().collect::<Vec<_>>(), names);
        for tensor in tensors() {
            assert_eq!(model.info(&tensor.name).unwrap(), tensor);
            assert_eq!(model.read(&tensor.name).unwrap(), content(&tensor));
        }
    }
}

#[test]
fn files_are_named_aligned_and_readable_by_the_reference_parser() {
    let folder = tempfile::tempdir().unwrap();
    let path = saved(folder.path(), 30);
    let index: serde_json::Value =
        serde_json::from_slice(&std::fs::read(path.join("model.safetensors.index.json")).unwrap()).unwrap();
    assert_eq!(index["metadata"]["total_size"], 15 + 14 + 24 + 1 + 8 + 4);
    assert_eq!(index["weight_map"]["e4m3"], "model-00001-of-00003.safetensors");
    for file in 1..=3 {
        let bytes = std::fs::read(path.join(format!("model-{file:05}-of-00003.safetensors"))).unwrap();
        let (header, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
        for info in metadata.tensors().values() {
            let size = from_safetensors(info.dtype).unwrap().size();
            assert_eq!((8 + header + info.data_offsets.0) % size, 0, "{info:?}");
        }
    }
}

#[test]
fn wrong_tensors_are_not_saved() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = CheckpointWriter::begin(&RealFs, folder.path(), 1).unwrap();
    let short = write_tensors(&mut writer, "a", &[info("x", DType::F32, &[2])], |_| Ok(vec![0; 7])).unwrap_err();
    assert_eq!(short.to_string(), "x: 7 bytes to save, expected 8");
    let twice = [info("x", DType::F32, &[2]), info("x", DType::F32, &[2])];
    let twice = write_tensors(&mut writer, "b", &twice, |_| Ok(vec![0; 8])).unwrap_err();
    assert_eq!(twice.to_string(), "there are two tensors named \"x\" to save");
}

/// Returns the error of opening a file with this header and this number of bytes of data, without its folder.
fn error_of(header: &str, data: usize) -> String {
    let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &vec![0; data]].concat();
    error_of_bytes(&bytes)
}

fn error_of_bytes(bytes: &[u8]) -> String {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
    let error = ModelFiles::open(folder.path()).expect_err("the damage to be noticed").to_string();
    assert!(error.contains("model.safetensors: "), "{error}");
    error
}

fn entry(name: &str, dtype: &str, shape: &str, start: u64, end: u64) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{start},{end}]}}"#)
}

#[test]
fn damaged_headers_are_errors() {
    assert!(error_of_bytes(b"").contains("0 bytes are too few"));
    assert!(error_of_bytes(&[1; 7]).contains("7 bytes are too few"));
    for length in [0, 1, 99, 1 << 30, 1 << 63, u64::MAX] {
        error_of_bytes(&[&u64::to_le_bytes(length)[..], b"{}"].concat());
    }
    for header in
        ["", "{", " {}", "[]", "null", "{\"a\":1}", "\u{fffd}", &"[".repeat(10_000), &"{\"a\":".repeat(10_000)]
    {
        error_of(header, 0);
    }
    error_of_bytes(&[&4_u64.to_le_bytes()[..], b"{\"\xff\""].concat());
    assert!(error_of("{}", 1).contains("1 bytes of tensors, its header describes 0"));
}

#[test]
fn impossible_tensors_are_errors() {
    let one = |dtype, shape, start, end, data| error_of(&format!("{{{}}}", entry("w", dtype, shape, start, end)), data);
    let max = u64::MAX;
    for error in [
        one("F32", "[2]", 0, 4, 4),
        one("F32", "[1]", 4, 8, 8),
        one("F32", "[1]", 4, 0, 4),
        one("F32", "[18446744073709551615,2]", 0, 8, 8),
        one("F32", "[4611686018427387904]", 0, 0, 0),
        one("F32", "[-1]", 0, 4, 4),
        one("F32", "[1.0]", 0, 4, 4),
        one("F99", "[1]", 0, 4, 4),
        one("F32", "[1]", max - 3, max, 4),
    ] {
        assert!(error.contains("its header is not valid"), "{error}");
    }
    let two = |first: String, second: String| error_of(&format!("{{{first},{second}}}"), 8);
    two(entry("a", "F32", "[1]", 0, 4), entry("b", "F32", "[1]", 2, 6));
    two(entry("a", "F32", "[1]", 0, 4), entry("b", "F32", "[1]", 5, 9));
    two(entry("a", "F32", "[1]", 0, 4), entry("a", "F32", "[1]", 4, 8));
    for (second, shape, end) in [("F32", "[2]", 8), ("I32", "[2]", 8), ("F32", "[1]", 4)] {
        let error = two(entry("a", "F32", "[2]", 0, 8), entry("a", second, shape, 0, end));
        assert!(error.contains("\"a\" appears twice"), "{error}");
    }
}

#[test]
fn a_cut_file_is_named_with_its_tensor() {
    let header = format!("{{{},{}}}", entry("a", "F32", "[1]", 0, 4), entry("b", "F32", "[1]", 4, 8));
    let error = error_of(&header, 7);
    assert!(error.contains("7 bytes of tensors, its header describes 8; tensor \"b\" is the first"), "{error}");
}

#[test]
fn a_file_that_shrinks_after_opening_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = saved(folder.path(), usize::MAX);
    let model = ModelFiles::open(&path).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(path.join("model.safetensors")).unwrap();
    file.set_len(100).unwrap();
    assert!(model.read("e4m3").unwrap_err().to_string().contains("tensor \"e4m3\": cannot be read"));
}

/// The ranges lie within a part, across parts, and at the end. A file that has lost its last byte since it was opened causes an error.
#[test]
fn tensors_of_several_parts_are_read_whole_and_in_ranges() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(SINGLE_FILE);
    let length = 2 * PART + 12345;
    let data: Vec<u8> = (0..length).map(|i| (i * 31 % 251) as u8).collect();
    let header = format!("{{{}}}", entry("w", "F8_E4M3", &format!("[{length}]"), 0, length as u64));
    std::fs::write(&path, [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()).unwrap();
    let model = ModelFiles::open(folder.path()).unwrap();
    assert!(model.read("w").unwrap() == data);
    for range in [0..0, 5..9, PART - 1..PART + 1, 7..2 * PART + 8, PART..length, length..length] {
        assert!(model.read_bytes("w", range.clone()).unwrap() == data[range.clone()], "{range:?}");
    }
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(file.metadata().unwrap().len() - 1).unwrap();
    let error = model.read("w").unwrap_err().to_string();
    assert!(error.starts_with(&format!("{}: tensor \"w\": cannot be read", path.display())), "{error}");
}

#[test]
fn absent_tensors_and_foreign_types_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let header = format!("{{{}}}", entry("ids", "U16", "[4]", 0, 8));
    let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[0; 8]].concat();
    std::fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
    let model = ModelFiles::open(folder.path()).unwrap();
    assert!(model.info("ids").unwrap_err().to_string().ends_with("tensor \"ids\": its type U16 is not supported"));
    let error = model.info("x").unwrap_err().to_string();
    assert!(error.starts_with("there is no tensor \"x\" in /"), "{error}");
    assert!(
        error.ends_with(", whose first tensor is \"ids\": config.json may be of a model of another family"),
        "{error}"
    );
    assert!(model.read("x").is_err());
    // The error does not print a long shape in full.
    let header = format!("{{{}}}", entry("deep", "U16", &format!("[{}4]", "1,".repeat(100_000)), 0, 8));
    let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[0; 8]].concat();
    std::fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
    let error = ModelFiles::open(folder.path()).map(drop).expect_err("no weight has so many").to_string();
    assert!(error.ends_with("tensor \"deep\" has 100001 axes; at most 8 are read"), "{error}");
}

/// Returns the error after `change` has changed the index of a model in three files.
fn index_error(change: impl FnOnce(&Path, &mut serde_json::Value)) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = saved(folder.path(), 30);
    let index_path = path.join("model.safetensors.index.json");
    let mut index = serde_json::from_slice(&std::fs::read(&index_path).unwrap()).unwrap();
    change(&path, &mut index);
    std::fs::write(&index_path, index.to_string()).unwrap();
    let error = ModelFiles::open(&path).expect_err("the damage to be noticed").to_string();
    error.replace(&format!("{}/", path.display()), "")
}

/// Returns the error of opening a folder that holds only this index.
fn folder_with_index(index: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("model.safetensors.index.json"), index).unwrap();
    ModelFiles::open(folder.path()).unwrap_err().to_string()
}

#[test]
fn damaged_indexes_are_errors() {
    for bad in ["../model-00001-of-00003.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""] {
        let error = index_error(|_, index| index["weight_map"]["f32"] = bad.into());
        assert!(error.contains("which is not the name of a file in this folder"), "{error}");
    }
    let third = "model-00003-of-00003.safetensors";
    let missing = index_error(|path, _| std::fs::remove_file(path.join(third)).unwrap());
    assert!(missing.contains(&format!("{third} is missing; it holds")), "{missing}");
    let absent = index_error(|_, index| index["weight_map"]["zzz"] = third.into());
    assert!(absent.contains(&format!("tensor \"zzz\" is listed, but {third} does not hold it")), "{absent}");
    let elsewhere = index_error(|_, index| index["weight_map"]["e4m3"] = third.into());
    assert!(elsewhere.contains("tensor \"e4m3\" is listed"), "{elsewhere}");
    let copy = "model-00001-of-00003.safetensors";
    let twice = index_error(|path, _| std::fs::copy(path.join(copy), path.join(third)).map(|_| ()).unwrap());
    assert!(twice.contains("is also in"), "{twice}");
    let twice = folder_with_index(r#"{"weight_map": {"a": "x.safetensors", "b": "y", "a": "y"}}"#);
    assert!(twice.contains("\"a\" appears twice"), "{twice}");
    for text in ["{}", "[]", r#"{"weight_map": {}}"#, r#"{"weight_map": {"a": 1}}"#] {
        index_error(|_, index| *index = serde_json::from_str(text).unwrap());
    }
    let cut = index_error(|path, _| {
        std::fs::OpenOptions::new().write(true).open(path.join(third)).unwrap().set_len(300).unwrap();
    });
    assert!(cut.starts_with(third), "{cut}");
}

#[test]
fn other_formats_are_refused_with_advice() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("pytorch_model.bin"), "x").unwrap();
    assert!(ModelFiles::open(folder.path()).unwrap_err().to_string().contains("convert them to safetensors"));
}

#[test]
fn mutated_files_never_panic() {
    let folder = tempfile::tempdir().unwrap();
    let path = saved(folder.path(), usize::MAX).join("model.safetensors");
    let good = std::fs::read(&path).unwrap();
    let mut state = 3_u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    for _ in 0..2000 {
        let mut bytes = good.clone();
        for _ in 0..2 {
            bytes[random(good.len())] = b"0123456789{}[]\":,-eF\xff\0"[random(22)];
        }
        std::fs::write(&path, &bytes).unwrap();
        if let Ok(model) = ModelFiles::open_file(&path) {
            for name in model.names() {
                assert!(
                    model.info(name).is_err() || model.read(name).unwrap().len() == model.info(name).unwrap().bytes()
                );
            }
        }
    }
}
