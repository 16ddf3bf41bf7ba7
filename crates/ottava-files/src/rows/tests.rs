use super::*;
use arrow_array::builder::{Int32Builder, ListBuilder, StringBuilder, StructBuilder};
use arrow_array::{ArrayRef, DictionaryArray, Float64Array, Int64Array, StringArray};
use arrow_ipc::writer::{FileWriter, StreamWriter};
use arrow_schema::{DataType, Field, Fields};
use parquet::arrow::ArrowWriter;
use parquet::basic::Compression;
use parquet::file::properties::WriterProperties;
use serde_json::json;
use std::sync::Arc;

/// Returns three records with texts, numbers, lists and conversations. The second record has missing values.
fn batch() -> RecordBatch {
    let fields =
        Fields::from(vec![Field::new("role", DataType::Utf8, true), Field::new("content", DataType::Utf8, true)]);
    let mut messages = ListBuilder::new(StructBuilder::from_fields(fields, 4));
    for turns in [&[("user", Some("a")), ("assistant", Some("b"))][..], &[("user", None)], &[]] {
        for (role, content) in turns {
            let turn = messages.values();
            turn.field_builder::<StringBuilder>(0).unwrap().append_value(role);
            turn.field_builder::<StringBuilder>(1).unwrap().append_option(*content);
            turn.append(true);
        }
        messages.append(true);
    }
    let mut ids = ListBuilder::new(Int32Builder::new());
    for list in [vec![Some(1), Some(2)], vec![], vec![None]] {
        ids.append_value(list);
    }
    let kinds: DictionaryArray<arrow_array::types::Int32Type> = ["x", "y", "x"].into_iter().collect();
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("text", Arc::new(StringArray::from(vec![Some("é"), None, Some("")]))),
        ("id", Arc::new(Int64Array::from(vec![1, 2, 3]))),
        ("share", Arc::new(Float64Array::from(vec![0.5, 1.5, -2.0]))),
        ("kind", Arc::new(kinds)),
        ("messages", Arc::new(messages.finish())),
        ("ids", Arc::new(ids.finish())),
    ];
    RecordBatch::try_from_iter_with_nullable(columns.into_iter().map(|(name, column)| (name, column, true))).unwrap()
}

fn expected() -> Value {
    json!([
        {"text": "é", "id": 1, "share": 0.5, "kind": "x", "ids": [1, 2],
         "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"text": null, "id": 2, "share": 1.5, "kind": "y", "messages": [{"role": "user"}], "ids": []},
        {"text": "", "id": 3, "share": -2.0, "kind": "x", "messages": [], "ids": [null]},
    ])
}

fn read(bytes: &[u8], format: Format) -> Result<Value, String> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    let rows = Rows::open(File::open(file.path()).unwrap(), format)?;
    Ok(Value::Array(rows.map(|row| row.map(Value::Object)).collect::<Result<_, _>>()?))
}

fn parquet(compression: Compression) -> Vec<u8> {
    let properties = WriterProperties::builder().set_compression(compression).build();
    let mut writer = ArrowWriter::try_new(Vec::new(), batch().schema(), Some(properties)).unwrap();
    writer.write(&batch()).unwrap();
    writer.into_inner().unwrap()
}

fn arrow(stream: bool) -> Vec<u8> {
    let (batch, mut bytes) = (batch(), Vec::new());
    if stream {
        let mut writer = StreamWriter::try_new(&mut bytes, &batch.schema()).unwrap();
        (0..2).for_each(|_| writer.write(&batch).unwrap());
        writer.finish().unwrap();
    } else {
        let mut writer = FileWriter::try_new(&mut bytes, &batch.schema()).unwrap();
        writer.write(&batch).unwrap();
        writer.finish().unwrap();
    }
    bytes
}

#[test]
fn records_of_parquet_and_arrow_are_the_same_objects() {
    for compression in
        [Compression::UNCOMPRESSED, Compression::SNAPPY, Compression::GZIP(Default::default()), Compression::LZ4_RAW]
    {
        assert_eq!(read(&parquet(compression), Format::Parquet).unwrap(), expected(), "{compression}");
    }
    assert_eq!(read(&arrow(false), Format::Arrow).unwrap(), expected());
    let twice: Vec<Value> = [expected(), expected()].iter().flat_map(|list| list.as_array().unwrap().clone()).collect();
    assert_eq!(read(&arrow(true), Format::Arrow).unwrap(), Value::Array(twice), "a stream of two batches");
}

#[test]
fn a_small_file_of_large_records_is_refused_before_they_fill_memory() {
    let text = "a".repeat(1 << 18);
    let column: ArrayRef = Arc::new(StringArray::from(vec![text.as_str(); 100]));
    let batch = RecordBatch::try_from_iter([("text", column)]).unwrap();
    let properties = WriterProperties::builder().set_compression(Compression::SNAPPY).build();
    let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    let bytes = writer.into_inner().unwrap();
    assert!(bytes.len() < 100_000, "{} bytes for 25 MiB", bytes.len());
    assert!(read(&bytes, Format::Parquet).unwrap_err().contains("unpacks to more than 200 times its size"));
}

/// The recorded files of `scripts/make_data_files.py` whose pages are compressed with Zstandard.
fn zstandard_files() -> Vec<Vec<u8>> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../ottava-data/tests/data/formats/");
    ["chats-zstd", "chats-zstd-2", "chats-polars"]
        .map(|name| std::fs::read(format!("{folder}{name}.parquet")).unwrap())
        .to_vec()
}

#[test]
fn pages_of_zstandard_are_unpacked_and_damage_is_an_error() {
    let all: Vec<Value> = zstandard_files().iter().map(|bytes| read(bytes, Format::Parquet).unwrap()).collect();
    assert_eq!(all[0][1]["messages"][4]["content"], "No.");
    assert!(all.iter().all(|records| *records == all[0]));
    for bytes in zstandard_files() {
        // One damaged byte in the first pages, after the magic number of the file.
        for at in (4..200).step_by(3) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x55;
            // A changed letter in an uncompressed literal cannot be noticed, and nothing may panic.
            let _ = read(&damaged, Format::Parquet);
        }
        let frame = bytes.windows(4).position(|four| four == [0x28, 0xb5, 0x2f, 0xfd]).expect("a Zstandard frame");
        let mut damaged = bytes.clone();
        damaged[frame] ^= 1;
        let error = read(&damaged, Format::Parquet).unwrap_err();
        assert!(error.contains("a Zstandard page cannot be unpacked"), "{error}");
    }
}

#[test]
fn levels_of_pages_of_version_2_are_not_compressed() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../ottava-data/tests/data/formats/long-zstd-2.parquet");
    let records = read(&std::fs::read(path).unwrap(), Format::Parquet).unwrap();
    for (record, number) in records.as_array().unwrap().iter().zip(0..) {
        let expected = if number % 3 == 1 { Value::Null } else { format!("otter {number} ").repeat(20).into() };
        assert_eq!(record["text"], expected, "record {number}");
    }
    assert_eq!(records.as_array().unwrap().len(), 60);
}

#[test]
fn damaged_files_are_errors() {
    for (bytes, format) in
        [(parquet(Compression::SNAPPY), Format::Parquet), (arrow(false), Format::Arrow), (arrow(true), Format::Arrow)]
    {
        for length in [0, 3, bytes.len() / 2] {
            assert!(read(&bytes[..length], format).is_err(), "{format:?} cut to {length}");
        }
    }
    assert!(read(b"{\"text\": 1}", Format::Parquet).unwrap_err().contains("not a readable Parquet file"));
    assert!(read(b"{\"text\": 1}", Format::Arrow).unwrap_err().contains("not a readable Arrow file"));
}

#[test]
fn columns_of_types_that_json_lacks_are_named() {
    let column: ArrayRef = Arc::new(arrow_array::BinaryArray::from(vec![None, Some(b"x".as_slice())]));
    let batch = RecordBatch::try_from_iter([("text", column)]).unwrap();
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let mut writer = StreamWriter::try_new(&mut file, &batch.schema()).unwrap();
    writer.write(&batch).unwrap();
    writer.finish().unwrap();
    let mut rows = Rows::open(File::open(file.path()).unwrap(), Format::Arrow).unwrap();
    assert_eq!(rows.next(), Some(Ok(json!({"text": null}).as_object().unwrap().clone())));
    assert_eq!(rows.next(), Some(Ok(Map::new())));
    assert_eq!((rows.unread_type("text"), rows.unread_type("other")), (Some("Binary".into()), None));
}
