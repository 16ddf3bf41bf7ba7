use serde_json::json;

use super::*;
use ottava_common::fs::RealFs;

fn info(name: &str, dtype: DType, shape: &[usize]) -> TensorInfo {
    TensorInfo { name: name.into(), dtype, shape: shape.to_vec() }
}

fn tensors() -> Vec<TensorInfo> {
    vec![
        info("m.w", DType::F32, &[5, 7]),
        info("v.w", DType::E4M3, &[5, 7]),
        info("m.norm", DType::BF16, &[11]),
        info("updates", DType::I64, &[1]),
        info("none", DType::F32, &[0, 3]),
    ]
}

fn read(files: &SliceFiles, name: &str, elements: Range<usize>) -> Result<Vec<u8>> {
    files.read_region(name, &Region { elements, columns: None })
}

fn content(tensor: &TensorInfo) -> Vec<u8> {
    (0..tensor.bytes()).map(|i| (i * 13 + tensor.name.len()) as u8).collect()
}

/// Saves a checkpoint with the tensors in one file, and returns its folder.
fn saved(folder: &Path) -> PathBuf {
    let mut writer = CheckpointWriter::begin(&RealFs, folder, 1).unwrap();
    let mut slices = SliceWriter::default();
    slices.whole(&mut writer, "optimizer.safetensors", &tensors(), |tensor| Ok(content(tensor))).unwrap();
    slices.finish(&mut writer).unwrap();
    writer.finish(serde_json::Value::Null).unwrap().join(FOLDER)
}

/// Writes the tensors' elements by hand into three files. `of(file, tensor)` returns the ranges that a file holds.
fn split(folder: &Path, of: impl Fn(usize, &TensorInfo) -> Vec<Range<usize>>) {
    let mut index = json!({ "tensors": {} });
    for tensor in tensors() {
        index["tensors"][&tensor.name] =
            json!({ "dtype": to_safetensors(tensor.dtype), "shape": tensor.shape, "slices": [] });
    }
    let mut writer = CheckpointWriter::begin(&RealFs, folder, 2).unwrap();
    for file in 0..3 {
        let name = format!("optimizer-{file}.safetensors");
        let mut held = Vec::new();
        for tensor in tensors() {
            let ranges = of(file, &tensor);
            for range in &ranges {
                let slice = json!({ "file": name, "start": range.start, "end": range.end });
                index["tensors"][&tensor.name]["slices"].as_array_mut().unwrap().push(slice);
            }
            let size = tensor.dtype.size();
            let bytes: Vec<u8> =
                ranges.iter().flat_map(|r| content(&tensor)[r.start * size..r.end * size].to_vec()).collect();
            if !ranges.is_empty() {
                held.push((info(&tensor.name, tensor.dtype, &[bytes.len() / size]), bytes));
            }
        }
        let infos: Vec<_> = held.iter().map(|(info, _)| info.clone()).collect();
        let bytes = |info: &TensorInfo| Ok(held.iter().find(|(held, _)| held.name == info.name).unwrap().1.clone());
        write_tensors(&mut writer, &format!("{FOLDER}/{name}"), &infos, bytes).unwrap();
    }
    writer.file("training/index.json", |file| file.write(index.to_string().as_bytes())).unwrap();
    writer.finish(serde_json::Value::Null).unwrap();
}

/// Returns uneven thirds. The second file holds two ranges of each tensor, and the first file holds none of the short tensors.
#[expect(clippy::single_range_in_vec_init, reason = "these are lists of ranges")]
fn thirds(file: usize, tensor: &TensorInfo) -> Vec<Range<usize>> {
    let n = tensor.elements();
    match (file, n) {
        (0, ..=1) | (1, ..=1) => vec![],
        (2, ..=1) => vec![0..n],
        (0, _) => vec![1..n / 3],
        (1, _) => vec![0..1, n / 3..n - 2],
        _ => vec![n - 2..n],
    }
}

/// Two files hold the columns of a matrix, one of them in two slices.
#[test]
fn columns_read_back_by_any_region() {
    let folder = tempfile::tempdir().unwrap();
    let tensor = info("m.w", DType::F32, &[5, 7]);
    let region = |elements, columns| Region { elements, columns };
    let files = [vec![region(0..8, Some(0..3)), region(8..15, Some(0..3))], vec![region(0..20, Some(3..7))]];
    let bytes_of = |region: &Region| -> Vec<u8> {
        let ranges = region.ranges(&tensor.shape).into_iter();
        ranges.flat_map(|range| content(&tensor)[4 * range.start..4 * range.end].to_vec()).collect()
    };
    let mut writer = CheckpointWriter::begin(&RealFs, folder.path(), 1).unwrap();
    let mut slices = SliceWriter::default();
    for (number, regions) in files.into_iter().enumerate() {
        let bytes: Vec<u8> = regions.iter().flat_map(bytes_of).collect();
        let all = [Regions { info: tensor.clone(), regions }];
        slices.regions(&mut writer, &format!("part-{number}.safetensors"), &all, |_| Ok(bytes.clone())).unwrap();
    }
    slices.finish(&mut writer).unwrap();
    let folder = writer.finish(serde_json::Value::Null).unwrap().join(FOLDER);
    let files = SliceFiles::open(&folder).unwrap();
    assert_eq!(files.read("m.w").unwrap(), content(&tensor));
    for wanted in [region(3..9, None), region(0..10, Some(2..4)), region(1..4, Some(6..7)), region(4..30, Some(0..6))] {
        assert_eq!(files.read_region("m.w", &wanted).unwrap(), bytes_of(&wanted), "{wanted:?}");
    }
    let index = std::fs::read_to_string(folder.join(INDEX_FILE)).unwrap();
    for (from, to, words) in [
        (
            "\"columns\":[3,7]",
            "\"columns\":[2,6]",
            "elements 2..3 are in both part-0.safetensors and part-1.safetensors",
        ),
        (
            "\"columns\":[3,7]",
            "\"columns\":[4,8]",
            "part-1.safetensors holds elements 0..20 of columns 4..8, the tensor has 35",
        ),
        ("\"columns\":[3,7]", "\"columns\":[7,3]", "holds elements 0..20 of columns 7..3"),
        ("\"end\":15", "\"end\":14", "elements 30..31 are in no file; part-1.safetensors continues with 31..35"),
        ("\"end\":20", "\"end\":21", "holds elements 0..21 of columns 3..7"),
    ] {
        assert!(index.contains(from), "{index}");
        std::fs::write(folder.join(INDEX_FILE), index.replace(from, to)).unwrap();
        let error = SliceFiles::open(&folder).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn whole_tensors_read_back_by_any_range() {
    let folder = tempfile::tempdir().unwrap();
    let files = SliceFiles::open(&saved(folder.path())).unwrap();
    for tensor in tensors() {
        assert_eq!(*files.info(&tensor.name).unwrap(), tensor);
        assert_eq!(files.read(&tensor.name).unwrap(), content(&tensor));
    }
    assert_eq!(read(&files, "m.w", 3..9).unwrap(), content(&tensors()[0])[12..36]);
    assert!(files.info("absent").unwrap_err().to_string().contains("no tensor \"absent\" in optimizer.safetensors"));
}

#[test]
fn tensors_are_assembled_from_uneven_slices_of_three_files() {
    let folder = tempfile::tempdir().unwrap();
    split(folder.path(), thirds);
    let files = SliceFiles::open(&folder.path().join("checkpoint-2/training")).unwrap();
    assert_eq!(files.files.len(), 3);
    for tensor in tensors() {
        assert_eq!(*files.info(&tensor.name).unwrap(), tensor);
        let (bytes, n, size) = (content(&tensor), tensor.elements(), tensor.dtype.size());
        for (start, end) in (0..=n).flat_map(|start| (start..=n).map(move |end| (start, end))) {
            let range = read(&files, &tensor.name, start..end).unwrap();
            assert_eq!(range, bytes[start * size..end * size], "{} {start}..{end}", tensor.name);
        }
    }
}

#[test]
fn gaps_overlaps_and_absent_slices_name_tensor_and_file() {
    let error = |of: &dyn Fn(usize, &TensorInfo) -> Vec<Range<usize>>| {
        let folder = tempfile::tempdir().unwrap();
        split(folder.path(), of);
        SliceFiles::open(&folder.path().join("checkpoint-2/training")).unwrap_err().to_string()
    };
    let of_w = |file: usize, tensor: &TensorInfo, ranges: [&[(usize, usize)]; 3]| match tensor.name.as_str() {
        "m.w" => ranges[file].iter().map(|&(start, end)| start..end).collect(),
        _ => thirds(file, tensor),
    };
    for (ranges, words) in [
        (
            [&[(0, 10)][..], &[(12, 20)], &[(20, 35)]],
            "elements 10..12 are in no file; optimizer-1.safetensors continues",
        ),
        ([&[(0, 12)], &[(10, 20)], &[(20, 35)]], "elements 10..12 are in both optimizer-0.safetensors and optimizer-1"),
        ([&[(0, 10)], &[(10, 20)], &[(20, 34)]], "elements 34..35 are in no file; the last file is optimizer-2"),
        ([&[(2, 10)], &[(10, 20)], &[(20, 35)]], "elements 0..2 are in no file; optimizer-0.safetensors continues"),
        ([&[], &[], &[]], "elements 0..35 are in no file; no file holds any"),
    ] {
        let error = error(&|file, tensor| of_w(file, tensor, ranges));
        assert!(error.contains("index.json: tensor \"m.w\": ") && error.contains(words), "{error}");
    }
}

#[test]
fn an_index_that_disagrees_with_its_files_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = saved(folder.path());
    let good: serde_json::Value = serde_json::from_slice(&std::fs::read(path.join("index.json")).unwrap()).unwrap();
    let error = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut index = good.clone();
        change(&mut index["tensors"]["m.w"]);
        std::fs::write(path.join("index.json"), index.to_string()).unwrap();
        SliceFiles::open(&path).unwrap_err().to_string()
    };
    assert!(
        error(&|w| w["dtype"] = "BF16".into()).contains("holds 35 elements of float32, the index says 35 of bfloat16")
    );
    assert!(error(&|w| w["dtype"] = "U9".into()).contains("its type \"U9\" is not supported"));
    let shape = |w: &mut serde_json::Value| {
        w["shape"] = json!([6, 6]);
        w["slices"][0]["end"] = 36.into();
    };
    assert!(error(&shape).contains("holds 35 elements of float32, the index says 36"));
    assert!(error(&|w| w["shape"] = json!([u64::MAX, 2])).contains("is too large"));
    assert!(error(&|w| w["slices"][0]["end"] = 36.into()).contains("holds elements 0..36, the tensor has 35"));
    assert!(error(&|w| w["slices"][0]["start"] = 36.into()).contains("holds elements 36..35"));
    for file in ["../model.safetensors", "/etc/passwd", "a/b", ""] {
        assert!(error(&|w| w["slices"][0]["file"] = file.into()).contains("is not the name of a file beside it"));
    }
    assert!(error(&|w| w["slices"][0]["file"] = "gone.safetensors".into()).contains("gone.safetensors: No such file"));
    assert!(error(&|w| w["more"] = 1.into()).contains("not a valid index"));
}
