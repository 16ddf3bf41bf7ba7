use super::*;
use std::io::Write;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

fn text(text: &str) -> Vec<u8> {
    [&b"X"[..], &(text.len() as u32).to_le_bytes(), text.as_bytes()].concat()
}

fn number(number: usize) -> Vec<u8> {
    [&b"\x8a\x08"[..], &number.to_le_bytes()].concat()
}

fn tuple(items: &[Vec<u8>]) -> Vec<u8> {
    [b"(".to_vec(), items.concat(), b"t".to_vec()].concat()
}

fn dictionary(entries: Vec<(Vec<u8>, Vec<u8>)>) -> Vec<u8> {
    let entries: Vec<u8> = entries.into_iter().flat_map(|(key, value)| [key, value].concat()).collect();
    [b"}(".to_vec(), entries, b"u".to_vec()].concat()
}

/// Returns an object of a metadata class with these attributes.
fn object(class: &str, attributes: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let state = dictionary(attributes.iter().map(|(name, value)| (text(name), value.clone())).collect());
    let module = if class == "_StorageInfo" { "filesystem" } else { "metadata" };
    let class = format!("ctorch.distributed.checkpoint.{module}\n{class}\n)");
    [class.as_bytes(), b"\x81", &state, b"b"].concat()
}

fn size(sizes: &[usize]) -> Vec<u8> {
    let sizes: Vec<_> = sizes.iter().map(|n| number(*n)).collect();
    [b"ctorch\nSize\n".to_vec(), tuple(&sizes), b"\x85R".to_vec()].concat()
}

/// A chunk of the test tensor: its offsets and sizes, and its position in a file.
#[derive(Clone)]
struct Stored {
    offsets: Vec<usize>,
    sizes: Vec<usize>,
    file: &'static str,
    start: usize,
    length: usize,
}

/// Returns the metadata of a tensor `w` with this type and shape.
fn metadata(kind: &str, shape: &[usize], chunks: &[Stored]) -> Vec<u8> {
    let properties = [
        b"ctorch.distributed.checkpoint.metadata\nTensorProperties\n)\x81".to_vec(),
        tuple(&[format!("ctorch\n{kind}\n").into_bytes()]),
        b"b".to_vec(),
    ];
    let listed: Vec<_> = chunks
        .iter()
        .map(|chunk| {
            object("ChunkStorageMetadata", &[("offsets", size(&chunk.offsets)), ("sizes", size(&chunk.sizes))])
        })
        .collect();
    let tensor = object(
        "TensorStorageMetadata",
        &[("properties", properties.concat()), ("size", size(shape)), ("chunks", tuple(&listed))],
    );
    let places = chunks.iter().map(|chunk| {
        let index = object("MetadataIndex", &[("fqn", text("w")), ("offset", size(&chunk.offsets))]);
        let place =
            [("relative_path", text(chunk.file)), ("offset", number(chunk.start)), ("length", number(chunk.length))];
        (index, object("_StorageInfo", &place))
    });
    let root = [
        ("state_dict_metadata", dictionary(vec![(text("w"), tensor)])),
        ("storage_data", dictionary(places.collect())),
    ];
    [b"\x80\x02".to_vec(), object("Metadata", &root), b".".to_vec()].concat()
}

/// Returns a file of `torch.save` with these values in F32.
fn saved(shape: &[usize], values: &[f32]) -> Vec<u8> {
    let strides: Vec<_> = (0..shape.len()).map(|axis| shape[axis + 1..].iter().product()).collect();
    let numbers = |numbers: &[usize]| tuple(&numbers.iter().map(|n| number(*n)).collect::<Vec<_>>());
    let storage = [text("storage"), b"ctorch\nFloatStorage\n".to_vec(), text("0"), text("cpu"), number(values.len())];
    let storage = [tuple(&storage), b"Q".to_vec()].concat();
    let arguments = tuple(&[storage, number(0), numbers(shape), numbers(&strides), b"\x89".to_vec()]);
    let pickle = [b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n".to_vec(), arguments, b"R.".to_vec()].concat();
    let mut writer = ZipWriter::new(std::io::Cursor::new(Vec::new()));
    let stored = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    for (name, bytes) in [("archive/data.pkl", pickle), ("archive/data/0", bytes)] {
        writer.start_file(name, stored).unwrap();
        writer.write_all(&bytes).unwrap();
    }
    writer.finish().unwrap().into_inner()
}

const SHAPE: [usize; 3] = [3, 4, 7];

/// Returns the value of the test tensor at a position. It encodes the position.
fn value(at: [usize; 3]) -> f32 {
    (100 * at[0] + 10 * at[1] + at[2]) as f32
}

/// Creates a folder with the test tensor, divided by an uneven grid over two files. Also returns the chunks.
fn folder() -> (tempfile::TempDir, Vec<Stored>) {
    let (mut files, mut chunks) = ([Vec::new(), Vec::new()], Vec::new());
    for block in [0..1, 1..3] {
        for rows in [0..3, 3..4] {
            for columns in [0..2, 2..3, 3..7] {
                let ranges = [block.clone(), rows.clone(), columns.clone()];
                let [a, b, c] = &ranges;
                let values: Vec<f32> = a
                    .clone()
                    .flat_map(|x| b.clone().flat_map(move |y| c.clone().map(move |z| value([x, y, z]))))
                    .collect();
                let sizes: Vec<_> = ranges.iter().map(Range::len).collect();
                let (bytes, number) = (saved(&sizes, &values), chunks.len() % 2);
                let (start, length) = (files[number].len(), bytes.len());
                files[number].extend(bytes);
                let offsets = ranges.iter().map(|range| range.start).collect();
                chunks.push(Stored { offsets, sizes, file: ["__0_0.distcp", "__1_0.distcp"][number], start, length });
            }
        }
    }
    // The chunks are in the order of ranks, not of offsets.
    chunks.reverse();
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("__0_0.distcp"), &files[0]).unwrap();
    std::fs::write(folder.path().join("__1_0.distcp"), &files[1]).unwrap();
    std::fs::write(folder.path().join(METADATA), metadata("float32", &SHAPE, &chunks)).unwrap();
    (folder, chunks)
}

#[test]
fn regions_of_an_uneven_grid_are_put_together() {
    let (folder, _) = folder();
    let checkpoint = Distributed::open(folder.path()).unwrap();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["w"]);
    assert!(checkpoint.tensor("v").unwrap().is_none());
    let tensor = checkpoint.tensor("w").unwrap().unwrap();
    assert_eq!((tensor.dtype, &tensor.shape[..]), (DType::F32, &SHAPE[..]));
    for region in [[0..3, 0..4, 0..7], [1..2, 0..4, 0..7], [2..3, 2..4, 1..6], [0..2, 3..4, 6..7], [0..1, 1..1, 0..7]] {
        let [a, b, c] = region.clone();
        let expected: Vec<f32> =
            a.flat_map(|x| b.clone().flat_map(move |y| (0..7).map(move |z| value([x, y, z])))).collect();
        let expected: Vec<f32> = expected.into_iter().filter(|v| c.contains(&(*v as usize % 10))).collect();
        assert_eq!(checkpoint.read(&tensor, &region).unwrap(), expected, "{region:?}");
    }
}

#[test]
fn metadata_that_do_not_describe_whole_tensors_are_refused() {
    let (folder, good) = folder();
    let expect = |bytes: Vec<u8>, words: &str| {
        std::fs::write(folder.path().join(METADATA), bytes).unwrap();
        let region = SHAPE.map(|n| 0..n);
        let read = Distributed::open(folder.path())
            .and_then(|checkpoint| checkpoint.read(&checkpoint.tensor("w")?.expect("it is a tensor"), &region));
        let error = read.unwrap_err().to_string();
        assert!(error.contains(words), "{error} lacks {words:?}");
        assert!(error.starts_with(folder.path().to_str().unwrap()), "{error}");
    };
    let with = |change: &dyn Fn(&mut Vec<Stored>)| {
        let mut chunks = good.clone();
        change(&mut chunks);
        metadata("float32", &SHAPE, &chunks)
    };
    let gap = "`w` has shape [3, 4, 7], which its chunks do not fill once each";
    expect(with(&|chunks| drop(chunks.remove(4))), gap);
    expect(with(&|chunks| chunks.push(chunks[4].clone())), gap);
    expect(with(&|chunks| chunks.clear()), gap);
    // The overlap is as large as the gap.
    expect(with(&|chunks| chunks[3].offsets[2] -= 1), gap);
    expect(with(&|chunks| chunks[0].sizes[0] += 1), "a chunk at [1, 3, 3] of [3, 1, 4] outside of it");
    expect(with(&|chunks| chunks[0].offsets[0] = usize::MAX >> 1), "outside of it");
    expect(with(&|chunks| chunks[0].sizes.truncate(2)), "outside of it");
    expect(with(&|chunks| chunks[0].offsets = vec![0; 9]), "is not the name and the offsets of a chunk");
    expect(
        with(&|chunks| chunks[0].file = "../__0_0.distcp"),
        "lies in \"../__0_0.distcp\", which the folder does not have",
    );
    expect(with(&|chunks| chunks[0].length += 100_000), "it is cut off");
    expect(with(&|chunks| chunks[0].start = usize::MAX >> 1), "it is cut off");
    // The position belongs to another chunk, or is within a chunk.
    expect(
        with(&|chunks| (chunks[0].start, chunks[0].length) = (chunks[2].start, chunks[2].length)),
        "`w` at [1, 3, 3]: the tensor is float32 [2, 1, 2]",
    );
    expect(
        with(&|chunks| (chunks[0].start, chunks[0].length) = (chunks[0].start + 1, chunks[0].length - 1)),
        "`w` at [1, 3, 3]: this is not a file of torch.save",
    );
    expect(with(&|chunks| chunks[0].length -= 30), "`w` at [1, 3, 3]: this is not a file of torch.save");
    expect(
        metadata("bfloat16", &SHAPE, &good),
        "the tensor is float32 [1, 3, 2], and .metadata makes it bfloat16 [1, 3, 2]",
    );
    expect(metadata("int64", &SHAPE, &good), "`w` is in torch.int64; weights are floats");
    expect(metadata("float32", &[1 << 20, 1 << 20, 7], &good), "more than the folder's files hold");
    expect(metadata("float32", &[usize::MAX >> 1; 8], &good), "more than the folder's files hold");
    expect(metadata("float32", &[1; 9], &good), "is not described as torch.distributed.checkpoint does");
    expect(object("Metadata", &[]), "its pickle is cut off");
    expect([object("Metadata", &[]), b".".to_vec()].concat(), "it has no `state_dict_metadata`");
    expect(metadata("float32\ncos\nsystem", &SHAPE, &good), "it refers to `os.system`");
}

#[test]
fn every_cut_of_metadata_is_an_error() {
    let (folder, good) = folder();
    let bytes = metadata("float32", &SHAPE, &good);
    for end in 0..bytes.len() {
        std::fs::write(folder.path().join(METADATA), &bytes[..end]).unwrap();
        assert!(Distributed::open(folder.path()).is_err(), "{end}");
    }
}
